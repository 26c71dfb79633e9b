"""The command that starts a script for verification, by its dialect's launcher."""

from __future__ import annotations

import sys
from pathlib import Path

_PYTHON = (sys.executable,)
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "python": _PYTHON,
    # Isolated, for the file's directory would come before the standard library.
    "torchrun": (*_PYTHON, "-I", str(Path(__file__).with_name("ranks.py")), "{processes}"),
    "horovodrun": (*_PYTHON, "-m", "horovod.runner.launch", "--gloo", "-np", "{processes}",
                   *_PYTHON),
}  # fmt: skip
"""The words in front of the script's path; ``{processes}`` is their number."""

REPORTS = ("/horovod/runner/",)
"""What is in the first line of a launcher's own report on a script that has failed."""


def command(launcher: str, processes: int) -> list[str]:
    """The command that a script's path and arguments are put behind.

    Args:
        launcher: a name among :data:`LAUNCHERS`.
        processes: how many, where the launcher starts several.
    """
    return [word.replace("{processes}", str(processes)) for word in LAUNCHERS[launcher]]
