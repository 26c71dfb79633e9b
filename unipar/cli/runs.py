"""``unipar runs``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from unipar.errors import ConfigError
from unipar.utils.console import open_console

Switch = Parameter(negative="")
_REFRESH = 2.0
# Of curves where the output is no terminal. A table there has every column, and no line is cut.
_WIDTH_OF_CURVES, _ENDLESS = 120, 1000

app = App(name="runs", help="List the runs of a directory, and draw one of them.")


@app.default
def runs(
    *,
    directory: Path = Path("runs"),
    as_json: Annotated[bool, Parameter("--json", negative="")] = False,
) -> None:
    """List the runs of a directory, and draw one of them.

    The newest is first. A run is running while it keeps its claim of its directory fresh, and lost
    where it stopped doing so without a word; what its directory does not say is shown as `?`.

    Args:
        directory: the directory that holds the runs' output directories.
        as_json: print what is known of each as JSON.
    """
    from unipar.train.watching.runs import find_runs

    found = find_runs(directory)
    if as_json:
        print(json.dumps([run.as_dict() for run in found], indent=2))
        return
    from unipar.train.watching.show import table

    if not found:
        print(f"There are no runs in {directory}.")
        return
    open_console(width_of_pipe=_ENDLESS).print(table(found))


@app.command
def show(
    run: str,
    *,
    directory: Path = Path("runs"),
    follow: Annotated[bool, Switch] = False,
) -> None:
    """Draw the losses, throughput, restarts and number of ranks of a run.

    Args:
        run: its name in the directory, or its path.
        directory: the directory that holds the runs' output directories.
        follow: draw again every two seconds, until the run has ended.
    """
    from unipar.train.watching.runs import find_run
    from unipar.train.watching.show import page

    console = open_console(width_of_pipe=_WIDTH_OF_CURVES)
    plain = not (console.encoding or "").startswith("utf")
    found = find_run(directory, run)
    if not follow:
        console.print(page(found, console.width, plain=plain))
        return
    if not console.is_terminal:
        raise ConfigError("--follow draws on a terminal, and the output is none. Leave it out.")
    from rich.live import Live

    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(page(found, console.width, plain=plain), refresh=True)
            if found.state != "running":
                return
            time.sleep(_REFRESH)
            found = find_run(directory, run)


@app.command
def resize(run: str, ranks: int, *, directory: Path = Path("runs")) -> None:
    """Let a run go on with another number of ranks, after its next step.

    The run was started with a range of them, such as devices="2:8". No step is lost.

    Args:
        run: its name in the directory, or its path.
        ranks: how many.
        directory: the directory that holds the runs' output directories.
    """
    from unipar.launch.elastic import ask
    from unipar.train.watching.runs import find_run

    found = find_run(directory, run)
    if found.state != "running":
        raise ConfigError(f"run '{found.name}' is not running: it is {found.state}.")
    try:
        print(ask(found.directory, ranks))
    except OSError as error:
        raise ConfigError(f"{found.directory} cannot be written: {error.strerror}.") from error
