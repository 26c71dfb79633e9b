"""Arguments of the command line that DeepSpeed's launcher gives."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_config_arguments(
    parser: argparse.ArgumentParser, settings: str = ""
) -> argparse.ArgumentParser:
    """Let the command line go on naming the settings, which now stand in ``unipar.yaml``.

    Args:
        parser: gets ``--deepspeed`` and ``--deepspeed_config``.
        settings: the file that ``unipar.yaml`` was made of; any other is an error.
    """

    def check(given: str) -> str:
        if settings and Path(given).name != settings:
            raise argparse.ArgumentTypeError(
                f"unipar.yaml was made of {settings}, not of {given}. Change unipar.yaml instead."
            )
        return given

    group = parser.add_argument_group("settings that now stand in unipar.yaml")
    group.add_argument("--deepspeed", action="store_true", help="accepted, and means nothing")
    group.add_argument("--deepspeed_config", type=check, help="accepted, and means nothing")
    return parser
