"""Write the table of strategies into the README and the docs, from what each says it can do.

python docs/strategies.py          # rewrite
python docs/strategies.py --check  # exit 1 where the pages differ
"""

from __future__ import annotations

import sys
from pathlib import Path

from unipar import registry

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "strategies.md")
BEGIN, END = "<!-- strategies: begin -->", "<!-- strategies: end -->"

OPTIONS = ("single", "ddp", "ddp:shard_optimizer=true", "fsdp", "dp")


def table() -> str:
    """A Markdown table with a row for each strategy."""
    rows = [
        "| strategy | devices | precision | a rank holds a share of | several models | own loop |",
        "|---|---|---|---|---|---|",
    ]
    for name in OPTIONS:
        able = registry.resolve(name).capabilities()
        where = ", ".join(sorted(able.device_types, reverse=True))
        most = f", {able.max_devices} process" if able.max_devices else ", any number"
        order = ("parameters", "gradients", "optimizer")
        shared = ", ".join(part for part in order if part in able.sharded) or "nothing"
        precisions = ", ".join(p for p in ("fp32", "bf16", "fp16") if p in able.precisions)
        yes = {True: "yes", False: "no"}
        rows.append(
            f"| `{name}` | {where}{most} | {precisions} | {shared} | "
            f"{yes[able.several_engines]} | {yes[able.custom_loop]} |"
        )
    return "\n".join(rows)


def rewritten(text: str) -> str:
    """``text`` with the table between the markers."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


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
