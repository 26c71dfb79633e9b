"""Sphinx's settings."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from sphinx.application import Sphinx

project = "unipar"
author = "The unipar authors"
project_copyright = "2026, the unipar authors"
release = metadata.version("unipar")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Nothing is fetched while the documentation is built.
intersphinx_mapping = {}
exclude_patterns = ["_build"]

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_use_ivar = True

html_theme = "furo"
html_title = "unipar"


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", _without_unset)


def _without_unset(*event: Any) -> tuple[str | None, str | None]:
    """``strategy=UNSET`` means that it may be left out, which ``…`` says more plainly."""
    signature, returned = event[-2:]
    return signature and signature.replace("=UNSET", "=…"), returned
