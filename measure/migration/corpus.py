"""Migrate every program that the tests have, run it before and after, and print what came out.

Of each: what it is written for, how many of its lines change, on how many ranks it trains, whether
the losses of both agree, and the seconds that all takes. What is refused is so with the message.
Frameworks that this environment has not are asked in their own.

python measure/migration/corpus.py                     all of them, under what they ask for
python measure/migration/corpus.py --only fabric torch/vae
python measure/migration/corpus.py --strategy fsdp     the migrated ones under another strategy
python measure/migration/corpus.py --out docs/migrate/corpus.json     for the docs
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

# Before torch is imported: threads of its own would compete with the other processes.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "backends" / "colossalai" / "tests"
sys.path[:0] = [str(ROOT), str(PATCHES)]

from patched_colossalai import OTHERS, PLUGINS  # noqa: E402

from measure.report import circumstances  # noqa: E402
from unipar.errors import ConfigError  # noqa: E402
from unipar.migrate import Migration, migrate_files  # noqa: E402
from unipar.migrate.launchers import command  # noqa: E402
from unipar.migrate.verify import TOLERANCE, Proof, losses_of, run_of  # noqa: E402
from unipar.testing.programs import forked_programs  # noqa: E402

FOLDERS, FILES = ROOT / "tests" / "migrate" / "corpus", ROOT / "tests" / "compat" / "corpus"
PACKAGES = {"fabric": "lightning_fabric", "ddp": "torch", "fsdp": "torch", "notebook": "torch"}
"""What a program of the folder imports, where that is not the folder's name."""
ENVIRONMENTS = {"colossalai": ROOT / ".venv-colossalai" / "bin" / "python"}
"""The interpreters of frameworks that are not installed beside the others."""
ELSEWHERE = ("colossalai/processes.py",)
"""They start ranks of their own, where Colossal-AI is not changed to run: tests run these alone."""
HALF = 2e-2
"""Up to what losses agree that are computed in half precision, where summing rounds to it."""
_SETTINGS, _TIMEOUT, _PROCESSES = (".json", ".yaml"), 300.0, 2
_HEADS = ("program", "dialect", "lines changed", "ranks", "losses before and after", "seconds")


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

    @property
    def framework(self) -> str:
        """The folder's name."""
        return self.name.partition("/")[0]

    @property
    def plugin(self) -> str | None:
        """The plugin of Colossal-AI that it takes, by which that is changed to run here."""
        if self.framework != "colossalai":
            return None
        name = self.name.partition("/")[2]
        own = name.removesuffix(".py")
        return PLUGINS.get(own) if name != own else OTHERS.get(f"migrate/{own}")

    @property
    def here(self) -> bool:
        """Whether its framework is installed."""
        return find_spec(PACKAGES.get(self.framework, self.framework)) is not None


class Row(NamedTuple):
    """What came out of one program.

    Attributes:
        name: the program's.
        dialect: what it is written for.
        changed: lines that differ.
        ranks: processes that computed losses.
        apart: the largest relative difference of two losses; ``None``: there are none.
        half: the format of half precision that the original computes in, if it does.
        told: what is refused, or why nothing ran.
        seconds: for migrating and both runs.
    """

    name: str
    dialect: str
    changed: int
    ranks: int
    apart: float | None
    half: str
    told: str
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether all losses are equal up to rounding."""
        return self.apart is not None and self.apart <= (HALF if self.half else TOLERANCE)

    @property
    def cells(self) -> list[str]:
        """Its line of the table."""
        result = self.told
        if self.apart is not None:
            word = "equal" if self.apart == 0 else "agree" if self.agrees else "**differ**"
            precision = f" in {self.half}" if self.half else ""
            result = word if self.apart == 0 else f"{word}: {self.apart:.1e} apart{precision}"
        shown = [str(count) if count else "" for count in (self.changed, self.ranks)]
        return [self.name, self.dialect, *shown, result, f"{self.seconds:.0f}"]


def programs() -> Iterator[Program]:
    """Those of several files, and those of one."""
    for main in sorted(FOLDERS.glob("*/*/train.*")):
        if main.suffix in (".py", ".ipynb"):
            root = main.parent
            code = sorted(p for p in root.rglob("*") if p.suffix in (".py", ".ipynb"))
            files = {path.relative_to(root).as_posix(): path.read_text() for path in code}
            yield Program(root.relative_to(FOLDERS).as_posix(), root, main.name, files)
    for path in sorted(FILES.glob("*/*.py")):
        name = path.relative_to(FILES).as_posix()
        if name not in ELSEWHERE:
            yield Program(name, path.parent, path.name, {path.name: path.read_text()})


def row(program: Program, strategy: str | None) -> Row:
    """Migrate a program, and run it before and after."""
    settings = {
        path.relative_to(program.root).as_posix(): path.read_text()
        for path in program.root.rglob("*")
        if path.suffix in _SETTINGS
    }
    began = time.monotonic()
    found = migrate_files(program.files, settings=settings)
    dialect, changed = next((one.dialect for one in found.values() if one.dialect), ""), 0
    for name, one in found.items():
        before = Counter(program.files[name].splitlines())
        changed += (Counter(one.code.splitlines()) - before).total()
    proof, half, told = None, "", ""
    try:
        proof, half = _proof(program, found, strategy)
    except ConfigError as error:
        told = f"refused: {_words(error)}"
    return Row(
        program.name, dialect, changed, len(proof.original) if proof else 0,
        proof.difference if proof else None, half, told, time.monotonic() - began,
    )  # fmt: skip


def _proof(
    program: Program, found: dict[str, Migration], strategy: str | None
) -> tuple[Proof, str]:
    """The losses of both, and the format of half precision in which the original computes."""
    refused = [note for one in found.values() for note in one.notes if note.kind == "refused"]
    if refused:
        raise ConfigError(str(refused[0]))
    main, plugin = found[program.main], program.plugin
    start = command(main.launcher, _PROCESSES)
    files = {name: one.code for name, one in found.items()}
    files["unipar.yaml"] = yaml.safe_dump(dict(main.config))
    environ = {"UNIPAR_STRATEGY": strategy} if strategy else {}
    patched = [*start, str(PATCHES / "patched_colossalai.py"), plugin] if plugin else start
    run = run_of(
        program.root, program.main, _installed(program), patched, name="original",
        timeout=_TIMEOUT, environ=main.launched,
    )  # fmt: skip
    original = run.losses
    if plugin == "gemini":
        # It runs the backward pass of a loss by that of another, which is seen as well.
        original = {rank: losses[::2] for rank, losses in original.items()}
    migrated = losses_of(
        program.root, program.main, files, start, environ=environ, timeout=_TIMEOUT
    )
    if plugin == "gemini":
        migrated = {rank: losses[: len(original[rank])] for rank, losses in migrated.items()}
    half = [one for one in run.formats if one in ("bfloat16", "float16")]
    return Proof(original, migrated), half[0] if half else ""


def _installed(program: Program) -> dict[str, str]:
    """What runs as the original: Fabric is installed by one of the names that it has."""
    if program.framework != "fabric" or find_spec("lightning") is not None:
        return {}
    return {
        path: text.replace("import lightning as", "import lightning_fabric as").replace(
            "from lightning.fabric", "from lightning_fabric"
        )
        for path, text in program.files.items()
    }


def _words(error: ConfigError) -> str:
    """The message of a refusal, or the first line of that of a script that has failed."""
    lines = str(error).splitlines()
    own = [line.partition("ConfigError: ")[2] for line in lines if "ConfigError: " in line]
    return (own or lines)[0].replace("|", "\\|")


def rows(asked: list[Program], options: argparse.Namespace) -> Iterator[Row]:
    """A row for each program, as they end."""
    here = [one for one in asked if one.here]
    with forked_programs(), ThreadPoolExecutor(options.lanes) as pool:
        yield from pool.map(lambda one: row(one, options.strategy), here)
    elsewhere = [one for one in asked if not one.here]
    for framework in dict.fromkeys(one.framework for one in elsewhere):
        yield from _elsewhere(
            framework, [one.name for one in elsewhere if one.framework == framework], options
        )


def _elsewhere(framework: str, names: list[str], options: argparse.Namespace) -> Iterator[Row]:
    """The rows of programs whose framework has an environment of its own."""
    python = options.colossalai or ENVIRONMENTS.get(framework)
    if options.lines or python is None or not python.exists():
        told = f"left out: {framework} is not installed"
        yield from (Row(name, framework, 0, 0, None, "", told, 0) for name in names)
        return
    more = ["--lanes", str(options.lanes)]
    more += ["--strategy", options.strategy] if options.strategy else []
    call = [str(python), __file__, "--lines", "--only", *names, *more]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from (Row(*json.loads(line)) for line in process.stdout)
    if process.returncode:
        sys.exit(f"{framework}: {' '.join(call[:2])} failed.")


def summary(found: list[Row]) -> Iterator[list[Any]]:
    """By framework: programs, the lines that change in one, and how many agree."""
    for framework in dict.fromkeys(one.name.partition("/")[0] for one in found):
        own = [one for one in found if one.name.startswith(f"{framework}/")]
        lines = sorted(one.changed for one in own)
        yield [
            framework, len(own), f"{lines[len(lines) // 2]} ({lines[0]} to {lines[-1]})",
            sum(one.apart == 0 for one in own),
            sum(one.apart is not None and 0 < one.apart <= TOLERANCE for one in own),
            sum(one.agrees and (one.apart or 0) > TOLERANCE for one in own),
            sum(one.apart is not None and not one.agrees for one in own),
            sum(one.apart is None for one in own),
        ]  # fmt: skip


SUMMARY = ("written for", "programs", "lines changed", "equal to the last bit",
           f"up to {TOLERANCE:g}", "up to the rounding of half precision",
           "differ", "refused")  # fmt: skip


def _add(path: Path, found: list[Row], began: float) -> None:
    """Put rows into a file; those of programs that have not been run this time stay."""
    record = json.loads(path.read_text()) if path.exists() else {"about": "", "programs": []}
    rows = {one[0]: Row(*one) for one in record["programs"]} | {one.name: one for one in found}
    words = [one for one in sys.argv[1:] if not one.startswith(("--out", "--colossalai", "/"))]
    packages = [one for one in ("accelerate", "deepspeed", "horovod", "lightning-fabric")
                if any(row.name.startswith(one.rpartition("-")[2]) for row in found)]  # fmt: skip
    about = circumstances(
        " ".join(["python measure/migration/corpus.py", *words]), time.monotonic() - began, packages
    )
    content = {
        "about": "\n\n".join(filter(None, [record["about"], about])),
        "heads": SUMMARY,
        "rows": [*summary([*rows.values()])],
        "programs": [*rows.values()],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _line(cells: list[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="frameworks, or programs by their names")
    parser.add_argument("--strategy", help="what the migrated programs train under")
    parser.add_argument("--lanes", type=int, default=2, help="programs at once (default: 2)")
    parser.add_argument("--colossalai", type=Path, help="the interpreter that has Colossal-AI")
    parser.add_argument(
        "--out", type=Path, help="also put all of it there, as JSON, into what is there"
    )
    parser.add_argument("--lines", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asked = [
        one for one in programs()
        if not options.only
        or {one.name, one.name.removesuffix(".py"), one.framework} & {*options.only}
    ]  # fmt: skip
    began = time.monotonic()
    if options.lines:
        for one in rows(asked, options):
            print(json.dumps(one), flush=True)
        return
    print(_line([*_HEADS]), _line(["---"] * len(_HEADS)), sep="\n", flush=True)
    found = []
    for one in rows(asked, options):
        found.append(one)
        print(_line(one.cells), flush=True)
    print("", _line([*SUMMARY]), _line(["---"] * len(SUMMARY)), sep="\n")
    print(*(_line(cells) for cells in summary(found)), sep="\n")
    if options.out is not None:
        _add(options.out, found, began)
    if any(one.apart is not None and not one.agrees for one in found):
        sys.exit("Losses differ.")


if __name__ == "__main__":
    main()
