"""Import paths: ``"package.module:name"``, as run files name a model or a dataset."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unipar.errors import ConfigError, did_you_mean

PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
"""What an import path looks like, as a regular expression."""


def make_importable(directories: Iterable[str | Path]) -> None:
    """Put directories at the end of ``sys.path``, where no installed package is hidden by them."""
    for directory in map(str, (Path(one).resolve() for one in directories)):
        if directory not in sys.path:
            sys.path.append(directory)


def load(path: str) -> Any:
    """Import what ``path`` (``"package.module:name"``) names.

    Raises:
        ConfigError: the path is malformed, its module does not exist or fails to import, or the
            module has no such name.
    """
    if not re.match(PATTERN, path):
        raise ConfigError(f"'{path}' is not an import path. Write package.module:name.")
    module_name, _, attributes = path.partition(":")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(_failed(module_name, error)) from error
        raise ConfigError(
            f"there is no module '{error.name}' to import '{path}' from. Looked beside the config "
            f"file, in the current directory ({Path.cwd()}) and in the installed packages."
        ) from error
    except Exception as error:
        raise ConfigError(_failed(module_name, error)) from error
    owner = module_name
    for name in attributes.split("."):
        if not hasattr(found, name):
            names = [one for one in dir(found) if not one.startswith("_")]
            raise ConfigError(f"'{owner}' has no '{name}'.{did_you_mean(name, names)}")
        found, owner = getattr(found, name), f"{owner}.{name}"
    return found


def _failed(module_name: str, error: Exception) -> str:
    # The frames of importlib come first; the last frame is where the module's own code failed.
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"importing '{module_name}' failed: {type(error).__name__}: {error}{at}."
