"""Write the tables that pages hold between markers: the code's own, and what was measured.

python measure/pages/generate.py          # rewrite
python measure/pages/generate.py --check  # exit 1 where a page differs
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from measure.pages import (  # noqa: E402
    benchmarks,
    beside,
    commands,
    faces,
    figures,
    gpu,
    reliability,
    surveys,
)
from unipar.compat import (  # noqa: E402
    accelerate_names,
    colossalai_names,
    deepspeed_names,
    fabric_names,
)
from unipar.compat.tables import lines_of  # noqa: E402
from unipar.config import CheckpointConfig, RunConfig  # noqa: E402
from unipar.launchers.registry import LAUNCHERS  # noqa: E402
from unipar.migrate.dialects import DIALECTS  # noqa: E402
from unipar.strategy import LossScale, StrategyOptions, registry  # noqa: E402

NAMES = {
    "accelerate": accelerate_names.TABLES,
    "colossalai": colossalai_names.TABLES,
    "deepspeed": deepspeed_names.TABLES,
    "fabric": fabric_names.TABLES,
}
"""The tables of names of those faces that are packages of a framework's own."""

MIGRATED = {one.name: one for one in DIALECTS if one.rows}
"""The dialect of each page of docs/migrate."""

PAGES = (
    ROOT / "docs" / "architecture.md",
    ROOT / "docs" / "commands.md",
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("strategies.md", "settings.md", "backends/index.md")),
    ROOT / "docs" / "versions.md",
    ROOT / "docs" / "reliability.md",
    ROOT / "docs" / "benchmarks" / "frameworks.md",
    ROOT / "docs" / "security.md",
    ROOT / "docs" / "gpu.md",
    *(ROOT / "docs" / "how-to" / name for name in ("slurm.md", "elastic.md")),
    *(ROOT / "docs" / "migrate" / f"{name}.md" for name in ("index", *MIGRATED)),
)
MARKED = re.compile(
    r"(?P<begin><!-- (?P<what>[\w: ]+) begin -->\n).*?(?P<end><!-- (?P=what) end -->)", re.DOTALL
)
STRATEGIES = ("single", "ddp", "ddp:shard_optimizer=true", "fsdp", "mesh", "dp")


def strategies() -> str:
    """A row for each strategy, from its capabilities."""
    rows = []
    for name in STRATEGIES:
        able = registry.resolve(name).capabilities()
        devices = {"cpu": "CPU", "cuda": "GPU"}
        where = ", ".join(devices[kind] for kind in sorted(able.device_types))
        most = "any number" if able.max_devices is None else str(able.max_devices)
        precisions = surveys.precisions(able.precisions)
        parts = ("parameters", "gradients", "optimizer")
        shared = ", ".join(part for part in parts if part in able.sharded) or "nothing"
        on_host = (*parts, "activations")
        offload = ", ".join(part for part in on_host if part in able.offload) or "no"
        several, loop = (_yes(flag) for flag in (able.several_engines, able.custom_loop))
        rows.append([f"`{name}`", where, most, precisions, shared, offload, several, loop])
    heads = [
        *("strategy", "runs on", "processes", "precision", "divided among ranks"),
        *("CPU offload", "several models", "loop by hand"),
    ]
    return _table(heads, rows)


def options(name: str) -> str:
    """A row for each option of a strategy."""
    return _fields(type(registry.resolve(name).options))


def launcher(name: str) -> str:
    """A row for each option of a launcher."""
    return _fields(LAUNCHERS.load(name).options_type)


def settings() -> str:
    """A row for each field of a run."""
    return _fields(RunConfig)


def checkpoint() -> str:
    """A row for each field of ``checkpoint``."""
    return _fields(CheckpointConfig)


def loss_scale() -> str:
    """A row for each field of ``loss_scale``."""
    return _fields(LossScale)


def _fields(model: type[BaseModel]) -> str:
    rows = []
    for name, field in model.model_fields.items():
        shown = field.serialization_alias or name
        text = " ".join((field.description or "").split())
        rows.append([f"`{shown}`", _type(field.annotation), _default(field), text])
    return _table(["field", "takes", "default", "what it does"], rows)


def _default(field: FieldInfo) -> str:
    value = field.default
    if isinstance(value, BaseModel):
        given = value.model_dump(exclude_unset=True)
        return f"`{given['name']}`" if "name" in given else "the fields' defaults"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "" if value in (None, (), {}) else f"`{value}`"


def _type(annotation: Any) -> str:
    """A type as a user writes its values."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{str(a).lower() if a is False else a}`" for a in arguments)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for a in arguments if a is not type(None) for kind in _type(a).split(", ")]
        return ", ".join(dict.fromkeys(kinds))
    if origin is tuple:
        return "list"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if issubclass(annotation, StrategyOptions):
            return "options object"
        return "name, mapping" if "name" in annotation.model_fields else "mapping"
    plain = {str: "text", int: "integer", float: "number", bool: "`true`, `false`", Path: "path"}
    return plain.get(annotation, "mapping")


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [heads, ["---"] * len(heads), *escaped]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def floors() -> str:
    """A row for each package and module of the core, from its docstring."""
    return _table(
        ["floor", "`unipar/`", "what it is for"],
        [[floor, f"`{name}`", line.replace("``", "`")] for floor, name, line in figures.purposes()],
    )


def ran() -> str:
    """What has run where; first of all whether anything has on a GPU."""
    first = "" if surveys.GPU_TESTS.exists() else "Nothing has run on a GPU yet.\n\n"
    return first + _table(*surveys.ran())


def _gpu(name: str, rows: Callable[..., Any], told: Callable[..., str]) -> str:
    """What was found on a GPU, if anything was."""
    record = gpu.load(name)
    if record is None:
        return gpu.NOTHING
    parts = [gpu.about(record), _table(*rows(record)), told(record)]
    return "\n\n".join(filter(None, parts))


TABLES = {
    "floors": floors,
    "commands": lambda: commands.page(_table),
    "strategies": strategies,
    "options: ddp": lambda: options("ddp"),
    "options: fsdp": lambda: options("fsdp"),
    "options: mesh": lambda: options("mesh"),
    "launcher: slurm": lambda: launcher("slurm"),
    "settings": settings,
    "checkpoint": checkpoint,
    "loss scale": loss_scale,
    "survey: ran": ran,
    "migration: corpus": lambda: _table(*surveys.migrated()),
    "migration: about": lambda: surveys.about("../migrate/corpus.json"),
    "survey: overview": lambda: _table(*surveys.overview()),
    "survey: about": lambda: surveys.about("survey.json"),
    "survey: parity": lambda: _table(*surveys.parity()),
    "survey: memory": lambda: _table(*surveys.memory()),
    "survey: layouts": lambda: _table(*surveys.layouts()),
    "survey: layouts traffic": lambda: _table(*surveys.layouts_traffic()),
    "survey: about layouts": lambda: surveys.about("layouts.json"),
    "survey: capabilities": lambda: _table(*surveys.capabilities()),
    "survey: matrix": lambda: _table(*surveys.matrix()),
    "survey: half matrix": lambda: _table(*surveys.half_matrix()),
    "survey: half bound": surveys.half_bound,
    "survey: about matrix": lambda: surveys.about("matrix.json"),
    "survey: edits": lambda: _table(*surveys.edits()),
    "survey: about edits": lambda: surveys.about("fuzz.json"),
    "survey: torches": lambda: _table(*surveys.torches()),
    "survey: about torches": surveys.about_torches,
    "reliability: hangs summary": reliability.hangs_summary,
    "reliability: hangs": lambda: _table(*reliability.hangs()),
    "reliability: about hangs": reliability.about_hangs,
    "reliability: faults summary": reliability.faults_summary,
    "reliability: faults": lambda: _table(*reliability.faults()),
    "reliability: about faults": reliability.about_faults,
    "reliability: kills summary": reliability.kills_summary,
    "reliability: kills": lambda: _table(*reliability.kills()),
    "reliability: about kills": reliability.about_kills,
    "reliability: changes": lambda: _table(*reliability.changes()),
    "reliability: about changes": reliability.about_changes,
    "reliability: beside": lambda: _table(*beside.changes()),
    "reliability: beside prices": lambda: _table(*beside.prices()),
    "reliability: about beside": beside.about,
    "gpu: tests": lambda: _gpu("tests.json", gpu.tests, gpu.failures),
    "gpu: bench": lambda: _gpu("bench.json", gpu.bench, gpu.shape),
    "bench: about gpt": lambda: benchmarks.about("gpt"),
    "bench: gpt": lambda: benchmarks.compared("gpt"),
    "bench: about digits": lambda: benchmarks.about("digits"),
    "bench: digits": lambda: benchmarks.compared("digits"),
    "bench: about by hand": lambda: benchmarks.about("by-hand"),
    "bench: by hand": lambda: _table(*benchmarks.by_hand("by-hand")),
}


def of_face(name: str) -> dict[str, Callable[[], str]]:
    """The tables of a page on migrating from a framework."""
    dialect, tables = MIGRATED[name], NAMES.get(name, ())
    return {
        "maps": lambda: dialect.table().rstrip(),
        "refused": lambda: dialect.refused_table().rstrip(),
        "kept": lambda: lines_of(tables, "kept").rstrip(),
        "ignored": lambda: lines_of(tables, "ignored").rstrip(),
        "speed": lambda: _speed(name),
    }


def _speed(name: str) -> str:
    found = faces.speed(name)
    if found is None:
        return faces.NOTHING
    about, heads, rows = found
    return f"{faces.METHOD}\n\n{about}\n\n{_table(heads, rows)}"


def rewritten(page: Path) -> str:
    """The text of a page with each table as the code has it now."""
    tables = TABLES | of_face(page.stem) if page.stem in MIGRATED else TABLES
    return MARKED.sub(lambda m: f"{m['begin']}{tables[m['what']]()}\n{m['end']}", page.read_text())


def wanted() -> dict[Path, str]:
    """Every generated file as the code has it now."""
    pages = {page: rewritten(page) for page in PAGES}
    return pages | {path: draw() for path, draw in figures.FIGURES.items()}


def main() -> int:
    stale = {
        path: text
        for path, text in wanted().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run python measure/pages/generate.py")
        return int(bool(stale))
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
