"""The command line: a file for each command, imported only when that command runs."""

from unipar.cli.app import main

__all__ = ["main"]
