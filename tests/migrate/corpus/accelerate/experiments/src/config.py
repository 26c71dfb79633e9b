import json
from pathlib import Path
from types import SimpleNamespace


def load(path, **overrides):
    """A file, on what it names as its base."""
    found = json.loads(Path(path).read_text())
    base = found.pop("base", None)
    if base is not None:
        found = {**json.loads((Path(path).parent / base).read_text()), **found}
    return SimpleNamespace(**{**found, **overrides})
