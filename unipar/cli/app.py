"""The commands, and how their errors are shown."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from cyclopts import App, CycloptsError
from rich.text import Text

from unipar.errors import ConfigError, UniparError
from unipar.utils.console import open_console
from unipar.utils.signals import terminations_raised

USAGE_ERROR, RUN_ERROR, INTERRUPTED = 2, 1, 130

_COMMANDS = {
    "train": "Train what a run file describes.",
    "bench": "Run the same job under every strategy, and compare speed, memory and losses.",
    "runs": "List the runs of a directory, and draw one of them.",
    "checkpoints": "List, verify and remove the checkpoints of a run.",
    "schema": "Print the JSON Schema of run files, for editors.",
    "doctor": "Say what this machine can run, and what is missing for the rest.",
    "install": "Install the framework of a strategy, built for the torch that is here.",
    "migrate": "Turn a training script into a unipar script, and show that it trains the same.",
    "convert": "Turn a checkpoint into Hugging Face safetensors, or back.",
}

# Commands that have commands of their own are an App in their module.
_GROUPS = {"bench": "app", "runs": "app", "checkpoints": "app"}


def command_line() -> App:
    app = App(
        name="unipar",
        help="One training loop, any distributed framework.",
        version=lambda: metadata.version("unipar"),
        suppress_keyboard_interrupt=False,
    )
    for name, help_text in _COMMANDS.items():
        # By import path, so that `unipar --help` imports no command, and none of them torch.
        target = _GROUPS.get(name, name)
        app.command(f"unipar.cli.{name}:{target}", name=name, help=help_text)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0 is success, 1 a run that failed, 2 something for the user to fix, 3 a comparison whose noise
    hides the answer, 130 an interrupt. SIGTERM and SIGHUP leave by way of ``SystemExit``, with
    their exit codes, 143 and 129.

    Args:
        argv: the arguments after the program's name; left out: those of this process.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    verbose = "--verbose" in tokens
    try:
        with terminations_raised():
            result: Any = command_line()(tokens, exit_on_error=False, result_action="return_value")
        sys.stdout.flush()
    except CycloptsError:
        return USAGE_ERROR  # cyclopts has already said what was wrong.
    except KeyboardInterrupt:
        open_console(stderr=True).print("unipar: interrupted.", style="yellow")
        return INTERRUPTED
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return RUN_ERROR
    except UniparError as error:
        _show(error, verbose)
        return USAGE_ERROR if isinstance(error, ConfigError) else RUN_ERROR
    return result if isinstance(result, int) else 0


def _reader_is_gone() -> bool:
    """Whether what reads this output, such as ``head``, has ended; the rest then goes nowhere."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # It goes into memory.
        return False
    poll = select.poll()
    poll.register(output, 0)
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        return False
    # Or the interpreter complains of it once more when it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _show(error: UniparError, verbose: bool) -> None:
    console = open_console(stderr=True, soft_wrap=True)
    if verbose:
        console.print_exception()
        return
    console.print(Text.assemble((f"{type(error).__name__}:", "bold red"), f" {error}"))
