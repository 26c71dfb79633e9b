"""Write the tables of strategies into the README and the docs, from what each says of itself.

python docs/strategies.py          # rewrite
python docs/strategies.py --check  # exit 1 where the pages differ
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args, get_type_hints

from unipar import registry

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "strategies.md")

SHOWN = ("single", "ddp", "ddp:shard_optimizer=true", "fsdp", "dp")
PARTS = ("parameters", "gradients", "optimizer")


def capabilities() -> str:
    """A Markdown table with a row for each strategy."""
    rows = [
        "| strategy | devices | precision | a rank holds a share of | several models | own loop |",
        "|---|---|---|---|---|---|",
    ]
    for name in SHOWN:
        able = registry.resolve(name).capabilities()
        where = ", ".join(sorted(able.device_types, reverse=True))
        most = f", {able.max_devices} process" if able.max_devices else ", any number"
        shared = ", ".join(part for part in PARTS if part in able.sharded) or "nothing"
        precisions = ", ".join(p for p in ("fp32", "bf16", "fp16") if p in able.precisions)
        yes = {True: "yes", False: "no"}
        rows.append(
            f"| `{name}` | {where}{most} | {precisions} | {shared} | "
            f"{yes[able.several_engines]} | {yes[able.custom_loop]} |"
        )
    return "\n".join(rows)


def options() -> str:
    """A Markdown section with a table for each strategy that has options."""
    sections = []
    for name in registry.names():
        found = registry.strategy_class(name).options_type
        if not found.model_fields:
            continue
        hints = get_type_hints(found)
        rows = [f"### {name}", "", "| option | values | default | |", "|---|---|---|---|"]
        for key, field in found.model_fields.items():
            default = "none" if field.default is None else str(field.default).lower()
            rows.append(f"| `{key}` | {_values(hints[key])} | {default} | {field.description} |")
        sections.append("\n".join(rows))
    return "\n\n".join(sections)


def _values(hint: object) -> str:
    plain = {bool: "true, false", int: "a whole number", float: "a number", type(None): ""}
    if hint in plain:
        return plain[hint]  # pyright: ignore[reportArgumentType]
    if hint == tuple[str, ...]:
        return "class names"
    if all(isinstance(arg, str) for arg in get_args(hint)):
        return ", ".join(f"`{arg}`" for arg in get_args(hint))
    return ", ".join(text for text in map(_values, get_args(hint)) if text)


def rewritten(text: str) -> str:
    """``text`` with each table between its markers."""
    for name, make in (("strategies", capabilities), ("options", options)):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text:
            head, _, rest = text.partition(begin)
            _, _, tail = rest.partition(end)
            text = f"{head}{begin}\n{make()}\n{end}{tail}"
    return text


def main() -> int:
    stale = [page for page in PAGES if rewritten(page.read_text()) != page.read_text()]
    if "--check" in sys.argv:
        for page in stale:
            print(f"{page.relative_to(ROOT)} is stale: run python docs/strategies.py")
        return bool(stale)
    for page in stale:
        page.write_text(rewritten(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
