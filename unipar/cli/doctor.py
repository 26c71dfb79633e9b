"""``unipar doctor``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from unipar.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from unipar.install.doctor import Report
    from unipar.utils.fitted_table import FittedTable


Switch = Parameter(negative="")


def doctor(
    *,
    json: Annotated[bool, Switch] = False,
    self_test: Annotated[bool, Switch] = False,
    strategy: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    devices: int | None = None,
    time_limit: float | None = None,
) -> int:
    """Say what this machine can run, and what is missing for the rest.

    With --self-test, train a tiny model for a few steps under each strategy beside a plain loop,
    and say which losses agree. The exit code is 1 where one differs or fails.

    Args:
        json: print JSON.
        self_test: train under each strategy, on every GPU, or on two processes of a CPU.
        strategy: with --self-test, what to try, such as ddp or fsdp:sharding=hybrid; may be
            repeated; default: every installed one.
        devices: with --self-test, the number of processes.
        time_limit: with --self-test, seconds for each strategy; default: 300.
    """
    from unipar.utils.console import open_console

    if self_test:
        from unipar.cli.selftest import run

        return run(strategy, devices, time_limit, as_json=json)
    given = {"--strategy": strategy, "--devices": devices, "--time-limit": time_limit}
    for flag in (name for name, value in given.items() if value):
        raise ConfigError(f"{flag} goes with --self-test: unipar doctor --self-test {flag} ….")

    from unipar.install.doctor import examine

    report = examine()
    if json:
        _print_json(report)
    else:
        _print_tables(report, open_console(width_of_pipe=200))
    return 0


def _print_json(report: Report) -> None:
    print(json.dumps(report.as_dict(), indent=2))


def _print_tables(report: Report, console: Console) -> None:
    from rich.text import Text

    tables = [_machine(report), _interconnect(report), _strategies(report)]
    if report.frameworks:
        tables.append(_frameworks(report))
    for table in tables:
        console.print(table)
        console.print()
    broken = [one for one in report.strategies if not one.ok]
    for one in broken:
        console.print(Text.assemble((one.name, "bold"), f" cannot run here: {one.reason}"))
        if one.remedy:
            console.print(Text.assemble("    to fix it: ", (one.remedy, "cyan")))


def _table(title: str, *columns: str) -> FittedTable:
    """A table whose columns are left out from the last one on where there is no room."""
    from unipar.utils.fitted_table import FittedTable

    table = FittedTable(title, elsewhere="`unipar doctor --json` has all")
    for rank, column in enumerate(columns):
        table.add_column(column, rank)
    return table


def _machine(report: Report) -> Table:
    from rich import box
    from rich.table import Table

    software, host = report.software, report.host
    build = f"CUDA {software.cuda_build}" if software.cuda_build else "CPU build"
    on = [name for name, there in software.communication.items() if there]
    off = [name for name, there in software.communication.items() if not there]
    limit = f", limited to {host.cores_limit:g}" if host.cores_limit else ""
    memory = f"{_bytes(host.memory)}, {_bytes(host.memory_available)} free"
    if host.memory_limit:
        memory += f", limited to {_bytes(host.memory_limit)}"
    table = Table(
        title="Machine",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
        show_header=False,
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("unipar", software.unipar)
    table.add_row("Python", f"{software.python}  ({software.executable})")
    table.add_row("torch", f"{software.torch}  ({build})")
    table.add_row("communication", ", ".join(on) + (f"  (not: {', '.join(off)})" if off else ""))
    table.add_row("system", software.platform)
    table.add_row("cores", f"{host.usable_cores:g} usable of {host.cores}{limit}")
    table.add_row("memory", memory)
    table.add_row("/dev/shm", _bytes(host.shared_memory) if host.shared_memory else "none")
    for device in report.devices:
        bf16 = "bf16" if device.bf16 else "no bf16"
        table.add_row(
            f"cuda:{device.index}",
            f"{device.name}, {_bytes(device.memory)}, {_bytes(device.free_memory)} free, {bf16}",
        )
    if not report.devices:
        table.add_row("GPUs", "none")
    return table


def _interconnect(report: Report) -> FittedTable:
    table = _table("Interconnect", "interface", "addresses", "speed")
    for one in report.interfaces:
        speed = f"{one.speed / 1000:g} Gbit/s" if one.speed else "unknown"
        table.add_row(one.name, ", ".join(one.addresses) or "none", speed)
    for device in report.devices if len(report.devices) > 1 else ():
        peers = ", ".join(f"cuda:{peer}" for peer in device.peers)
        table.add_row(f"cuda:{device.index}", f"peer to peer with {peers or 'none'}", "")
    return table


def _strategies(report: Report) -> FittedTable:
    from rich.text import Text

    table = _table("Strategies", "name", "runs here", "devices", "precisions", "shards", "from")
    for one in report.strategies:
        table.add_row(
            one.name,
            Text("yes", "green") if one.ok else Text("no", "red"),
            ", ".join(one.device_types),
            ", ".join(one.precisions),
            ", ".join(one.sharded) or "nothing",
            one.distribution,
        )
    return table


def _frameworks(report: Report) -> FittedTable:
    columns = ("unipar install", "brings", "can share an environment with", "or not, because")
    table = _table("Frameworks", *columns)
    for one in report.frameworks:
        with_all = len(one.shares_with) == len(report.frameworks) - 1 and not one.apart
        shared = "all of these" if with_all else ", ".join(one.shares_with) or "none of these"
        table.add_row(one.name, one.framework, shared, one.apart)
    return table


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
