"""``unipar doctor --self-test``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unipar.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from unipar.launch.selftest import Outcome
    from unipar.utils.fitted_table import FittedTable

# Room for every column; whatever reads a pipe has no width to fit.
_WIDTH_OF_PIPE = 200
_COLORS = {"agrees": "green", "differs": "red", "failed": "red"}


def run(
    strategies: Sequence[str], devices: int | None, time_limit: float | None, *, as_json: bool
) -> int:
    """Try strategies, show what came of each, and return the exit code.

    Raises:
        ConfigError: there is no such strategy or option, or a number is not above 0.
    """
    from rich.text import Text

    from unipar.launch import once
    from unipar.launch.selftest import TIME_LIMIT, try_strategy
    from unipar.strategy import registry
    from unipar.utils.console import open_console

    for flag, value in (("--devices", devices), ("--time-limit", time_limit)):
        if value is not None and value <= 0:
            raise ConfigError(f"{flag} {value:g}: give a number above 0.")
    for strategy in strategies:
        registry.resolve(strategy)
    console = open_console(width_of_pipe=_WIDTH_OF_PIPE)
    outcomes = []
    for strategy in strategies or registry.names():
        waiting = contextlib.nullcontext()
        if console.is_terminal and not as_json:
            waiting = console.status(Text(f"{strategy} …"))
        with waiting:
            outcome = try_strategy(strategy, devices=devices, time_limit=time_limit or TIME_LIMIT)
        if outcome.compared is not None:
            once.keep(registry.resolve(strategy), outcome)
        outcomes.append(outcome)
        if not as_json:
            # The table is at the end; who has interrupted it by then has this.
            console.print(f"{strategy}: {outcome.verdict}")
    if as_json:
        print(json.dumps([_as_dict(one) for one in outcomes], indent=2))
    else:
        show(outcomes, console)
    nothing = not any(one.compared for one in outcomes)
    return int(nothing or any(one.wrong for one in outcomes))


def _as_dict(outcome: Outcome) -> dict[str, object]:
    compared = outcome.compared
    told = {} if compared is None else {"step": compared.step, "apart": compared.apart}
    return outcome.model_dump() | told


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """A table with both losses of each strategy, and below it why others have none."""
    from rich.text import Text

    console.print(_table(outcomes))
    for one in outcomes:
        if one.why:
            line = Text.assemble((one.strategy, "bold"), f" {_SAID[one.verdict]}: {one.why}")
            console.print(line, soft_wrap=True)
    if any(one.compared for one in outcomes):
        console.print(
            "\nThe losses are those of the step that is farthest apart, or the first that differs.",
            style="dim",
        )
    else:
        console.print("\nNothing was compared.", style="red")


_SAID = {"failed": "failed", "refused": "was not compared", "not run": "cannot run here"}


def _table(outcomes: Sequence[Outcome]) -> FittedTable:
    from rich.text import Text

    from unipar.utils.fitted_table import OPTIONS, FittedTable

    table = FittedTable(
        "Self-test: a few steps beside a plain loop",
        elsewhere="`unipar doctor --self-test --json` has all",
    )
    table.add_column("strategy", 0, breaks=OPTIONS)
    table.add_column("on", 6)
    table.add_column("verdict", 1)
    for column, rank in {"step": 7, "loss": 2, "plain loop": 3, "apart": 4, "allowed": 5}.items():
        table.add_column(column, rank, right=True)
    for one in outcomes:
        verdict = Text(one.verdict, _COLORS.get(one.verdict, "yellow"))
        found = one.compared
        if found is None:
            table.add_row(Text(one.strategy), "", verdict, *[""] * 5)
            continue
        half = "" if found.precision == "fp32" else f", {found.precision}"
        table.add_row(
            Text(one.strategy),
            f"{found.devices} x {found.device}" + half,
            verdict,
            str(found.step),
            f"{found.loss:.7g}",
            f"{found.expected_loss:.7g}",
            f"{found.apart:.1e}",
            f"{found.tolerance:.0e}",
        )
    return table
