"""``unipar schema``."""

from __future__ import annotations

import json


def schema() -> None:
    """Print the JSON Schema of run files, for editors.

    The options of every installed strategy are in it. Put
    `# yaml-language-server: $schema=run.schema.json` at the top of a run file to use it.
    """
    from unipar.config.schema import run_schema

    print(json.dumps(run_schema(), indent=2))
