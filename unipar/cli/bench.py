"""``unipar bench``."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from cyclopts import App, Parameter

from unipar.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from unipar.benchmark.compare import Kind
    from unipar.benchmark.result import BenchResult

Format = Literal["table", "markdown", "csv"]
T = TypeVar("T")

_ANY = "failed,drift,regression"
_HELP = "Run the same job under every strategy, and compare speed, memory and losses."
app = App(name="bench", help=_HELP)


@app.default
def bench(
    run: Path,
    *,
    strategies: str,
    devices: str = "1",
    steps: int = 50,
    warmup: int = 5,
    repeats: int = 5,
    output: Path | None = None,
    precision: str | None = None,
    micro_batch: str | None = None,
    raw: Path | None = None,
    python: Annotated[tuple[Path, ...], Parameter(negative="")] = (),
    time_limit: float = 600.0,
    trace: Annotated[bool, Parameter(negative="")] = False,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    format: Format = "table",
    fail_on: str = _ANY,
    against: Path | None = None,
    verbose: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Run the same job under every strategy, and compare speed, memory and losses.

    Called again with the same --output, it runs only what is not finished.

    Args:
        run: the run file, YAML or TOML; what it says of evaluation and checkpoints is left out.
        strategies: which, such as ddp,fsdp,deepspeed:stage=1|2|3; | sweeps over an option.
        devices: numbers of processes, such as 1,2,4; the global batch stays the same.
        steps: timed steps of each repeat.
        warmup: steps before them, whose times are discarded.
        repeats: how often each is run, in new processes and in random order.
        output: directory for report.html, result.json and the trials; left out: one in runs.
        precision: compute dtypes, such as fp32,bf16; left out: the run file's.
        micro_batch: samples of one forward pass on one rank, such as 4,8; left out: the run file's.
        raw: directory of hand-written loops to compare with, NAME.py for the strategy NAME.
        python: interpreter of another environment with unipar, for frameworks that are not in
            this one; may be repeated.
        time_limit: seconds that one repeat of one strategy may take.
        trace: keep a Chrome trace of one step of each rank, named in report.html.
        set_: any key of the run file, as key.sub=value; may be repeated.
        format: how the table is printed.
        fail_on: exit with 1 where a strategy failed, drift where its loss is wrong, regression
            where it became slower or fuller than --against; none of these: none.
        against: an earlier benchmark of the same job, to be set beside this one.
        verbose: show tracebacks of errors.
    """
    from unipar.benchmark import compare as comparing
    from unipar.benchmark import outcome
    from unipar.benchmark.api import bench as run_bench
    from unipar.benchmark.api import new_directory
    from unipar.benchmark.cells import split_strategies, sweep
    from unipar.benchmark.live import Progress
    from unipar.benchmark.report.comparison import render
    from unipar.benchmark.result import BenchResult
    from unipar.config.settings import load_settings
    from unipar.utils.console import open_console

    kinds = _kinds(fail_on)
    earlier = BenchResult.load_runs(against) if against else None
    settings = load_settings(run, sets=set_)
    arguments = settings.run.arguments(settings.where)
    asked = split_strategies(strategies)
    # A benchmark has its own: several strategies and numbers of devices, its length, its place.
    for name in ("strategy", "devices", "steps", "output_dir"):
        del arguments[name]
    console, output = open_console(stderr=True), output or new_directory()
    with _saying_where(output, console), Progress(repeats, console) as show:
        result = run_bench(
            arguments.pop("model"),
            arguments.pop("data"),
            strategies=asked,
            devices=_listed("--devices", devices, int),
            precisions=_listed("--precision", precision, str),  # pyright: ignore[reportArgumentType]
            micro_batch_sizes=_listed("--micro-batch", micro_batch, int),
            steps=steps,
            warmup=warmup,
            repeats=repeats,
            output_dir=output,
            raw=raw,
            pythons=python,
            time_limit=time_limit,
            trace=trace,
            show=show,
            look_ahead=show.look_ahead,
            command=shlex.join(["unipar", *sys.argv[1:]]),
            run_file=run,
            **arguments,
        )
    _show(result, format)
    swept = [variant for strategy in asked for variant in sweep(strategy)]
    wrong = outcome.problems(result, swept, kinds)
    if wrong:
        console.print(f"unipar: {'; '.join(wrong)}.", style="red", soft_wrap=True)
    status = outcome.WORSE if wrong else outcome.SUCCESS
    if earlier:
        found = comparing.compare(earlier, result)
        _print(render(found, format))
        status = status or outcome.of_comparison(found, kinds)
    return status


@app.command
def compare(
    before: Path,
    after: Path,
    *,
    fail_on: str = _ANY,
    format: Format = "table",
    verbose: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Set two benchmarks of the same job beside each other, and mark what became slower.

    The exit code is 1 where something became worse, and 3 where the noise hides whether it did.

    Args:
        before: a directory that unipar bench wrote to, its result.json, or a directory of several
            such: runs of one build.
        after: another.
        fail_on: what counts as worse: failed (it ran before), drift (its loss was right before),
            regression (it is slower, or holds more); none of these: none.
        format: how the table is printed.
        verbose: show tracebacks of errors.
    """
    from unipar.benchmark import compare as comparing
    from unipar.benchmark import outcome
    from unipar.benchmark.report.comparison import render
    from unipar.benchmark.result import BenchResult

    kinds = _kinds(fail_on)
    found = comparing.compare(BenchResult.load_runs(before), BenchResult.load_runs(after))
    _print(render(found, format))
    return outcome.of_comparison(found, kinds)


@contextlib.contextmanager
def _saying_where(output: Path, console: Console) -> Iterator[None]:
    """Name the report when there is one, after an interrupt too."""
    report = output / "report.html"
    before = report.stat().st_mtime_ns if report.exists() else None
    try:
        yield
    finally:
        if report.exists() and report.stat().st_mtime_ns != before:
            console.print(f"Report: {report}", soft_wrap=True)


def _show(result: BenchResult, format: Format) -> None:
    from unipar.benchmark.report import table

    writers = {"table": table.terminal, "markdown": table.markdown, "csv": table.csv}
    _print(writers[format](result))


def _print(shown: object) -> None:
    from unipar.utils.console import open_console

    if isinstance(shown, str):
        print(shown.rstrip("\n"))
    else:
        open_console().print(shown)


def _kinds(text: str) -> list[Kind]:
    """What ``--fail-on`` names."""
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    known: list[Kind] = ["failed", "drift", "regression"]
    if odd := [name for name in names if name not in known]:
        raise ConfigError(
            f"--fail-on {text}: there is no '{odd[0]}'. Give some of {_ANY}, or none."
        )
    return [kind for kind in known if kind in names]


def _listed(flag: str, text: str | None, kind: Callable[[str], T]) -> list[T]:
    if text is None:
        return []
    try:
        return [kind(item.strip()) for item in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: write whole numbers with commas, like 1,2,4.") from error
