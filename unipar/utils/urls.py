"""Telling URLs from paths."""

from __future__ import annotations

import re

URL = r"^[a-z][a-z0-9+.\-]*://[^/].*|^(file|local|memory):///.+"
"""What a URL looks like, such as ``s3://bucket/run``; no path of a file is written so."""


def is_url(path: object) -> bool:
    """Return whether ``path`` is text that begins like a URL."""
    return isinstance(path, str) and re.match(URL, path) is not None
