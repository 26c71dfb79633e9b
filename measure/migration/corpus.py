"""Migrate every program that the tests have, run it before and after, and print what came out.

Of each: what it is written for, how many of its lines change, whether the losses of both agree, and
the seconds that both runs take. A program whose framework is not installed is said to be left out.

python measure/migration/corpus.py                     all of them, under what they ask for
python measure/migration/corpus.py --only fabric torch/vae
python measure/migration/corpus.py --strategy fsdp     the migrated ones under another strategy
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import yaml

# Before torch is imported: threads of its own would compete with the other processes.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from unipar.errors import ConfigError  # noqa: E402
from unipar.migrate import migrate_files  # noqa: E402
from unipar.migrate.verify import TOLERANCE, verify  # noqa: E402

FOLDERS, FILES = ROOT / "tests" / "migrate" / "corpus", ROOT / "tests" / "compat" / "corpus"
PACKAGES = {"fabric": "lightning_fabric", "ddp": "torch", "fsdp": "torch", "notebook": "torch"}
"""What a program of the folder imports, where that is not the folder's name."""
_SETTINGS, _TIMEOUT = (".json", ".yaml"), 300.0


class Program(NamedTuple):
    """A program of the tests.

    Attributes:
        name: the framework's folder, and its own name.
        root: the directory that it runs in.
        main: the file that is run, from there.
        files: all of its code.
    """

    name: str
    root: Path
    main: str
    files: dict[str, str]


def programs() -> Iterator[Program]:
    """Those of several files, and those of one."""
    for main in sorted(FOLDERS.glob("*/*/train.*")):
        if main.suffix in (".py", ".ipynb"):
            root = main.parent
            code = sorted(p for p in root.rglob("*") if p.suffix in (".py", ".ipynb"))
            files = {path.relative_to(root).as_posix(): path.read_text() for path in code}
            yield Program(root.relative_to(FOLDERS).as_posix(), root, main.name, files)
    for path in sorted(FILES.glob("*/*.py")):
        name = path.relative_to(FILES).with_suffix("").as_posix()
        yield Program(name, path.parent, path.name, {path.name: path.read_text()})


def line(program: Program, strategy: str | None) -> str:
    """A program's line of the table."""
    framework = program.name.partition("/")[0]
    package = PACKAGES.get(framework, framework)
    if find_spec(package) is None:
        return f"| {program.name} | {framework} | | left out: {package} is not installed | |"
    settings = {
        path.relative_to(program.root).as_posix(): path.read_text()
        for path in program.root.rglob("*")
        if path.suffix in _SETTINGS
    }
    began = time.monotonic()
    found = migrate_files(program.files, settings=settings)
    main = found[program.main]
    changed = 0
    for name, one in found.items():
        before, after = program.files[name].splitlines(), one.code.splitlines()
        changed += sum(now not in before for now in after)
    try:
        refused = [str(note) for one in found.values() for note in one.notes
                   if note.kind == "refused"]  # fmt: skip
        if refused:
            raise ConfigError(refused[0])
        proof = verify(
            program.root,
            program.main,
            {name: one.code for name, one in found.items()},
            yaml.safe_dump(dict(main.config)),
            launcher=main.launcher,
            timeout=_TIMEOUT,
            environ={"UNIPAR_STRATEGY": strategy} if strategy else {},
        )
        agrees = "agree" if proof.difference <= TOLERANCE else "**differ**"
        result = f"{agrees}: {proof.difference:.1e}"
    except ConfigError as error:
        result = f"refused: {str(error).splitlines()[0][:100]}"
    seconds = time.monotonic() - began
    return f"| {program.name} | {main.dialect} | {changed} | {result} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="frameworks, or programs by their names")
    parser.add_argument("--strategy", help="what the migrated programs train under")
    parser.add_argument("--lanes", type=int, default=2, help="programs at once (default: 2)")
    args = parser.parse_args()
    asked = [
        one for one in programs()
        if not args.only or {one.name, one.name.partition("/")[0]} & {*args.only}
    ]  # fmt: skip
    print("| program | dialect | lines changed | losses before and after | seconds |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    with ThreadPoolExecutor(args.lanes) as pool:
        for found in pool.map(lambda one: line(one, args.strategy), asked):
            print(found, flush=True)


if __name__ == "__main__":
    main()
