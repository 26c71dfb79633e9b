"""The core knows no framework but torch, and importing it costs none of what a run may need."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import unipar

CORE = Path(unipar.__file__).parent
FLOORS = {
    "foundations": ("errors", "utils"),
    "values": ("state", "layout", "loss", "objective", "world"),
    "inputs": ("data", "combined", "optimizers"),
    "the seam": ("strategy", "engine", "sizing"),
    "what a run needs": ("callbacks", "launch", "launchers", "checkpoint", "evaluation", "config"),
    "runs": ("session", "train", "install"),
    "beside the core": ("testing", "benchmark", "compat", "migrate"),
    "faces": ("cli", "__main__", "__init__"),
}
"""Each imports only those before it, wherever in a file the import stands."""
ORDER = [entry for floor in FLOORS.values() for entry in floor]
RUNTIME = CORE / "compat"
FOREIGN = {
    "accelerate", "apex", "bmtrain", "colossalai", "deepspeed", "fairscale", "horovod", "libcst",
    "lightning", "lightning_fabric", "megatron", "mpi4py", "plotly", "ray", "submitit",
    "transformers",
}  # fmt: skip
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
RAY = [CORE / "launchers" / f"ray{name}.py" for name in ("", "_handle", "_node")]
TRACKERS = {"mlflow", "prometheus_client", "tensorboard", "trackio", "wandb"}


def in_core(path: Path) -> str:
    return str(path.relative_to(CORE))


def imported_modules(path: Path) -> Iterator[str]:
    """The full names of what a file imports: of ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text())):
        yield from names_of(node)


def names_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported(path: Path) -> Iterator[str]:
    """The packages that a file imports from."""
    return (name.split(".")[0] for name in imported_modules(path))


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=in_core)
def test_no_file_of_the_core_imports_a_backend_or_a_framework(path: Path) -> None:
    names = set(imported(path))
    if path.is_relative_to(CORE / "benchmark" / "report"):
        names.discard("plotly")  # The charts of a report are drawn when one is asked for.
    # What reads scripts is a tool of its own, which no run imports.
    own = {"libcst"} if path.is_relative_to(CORE / "migrate") else set()
    # A launcher's system is imported when the launcher is used.
    own |= {"submitit"} if path == CORE / "launchers" / "slurm.py" else set()
    if path in RAY:
        own.add("ray")
    assert (FOREIGN - own).isdisjoint(names)
    assert not [name for name in names if name.startswith("unipar_")]


@pytest.mark.parametrize("path", RAY, ids=in_core)
def test_the_launcher_of_ray_imports_ray_only_when_it_is_used(path: Path) -> None:
    top = ast.Module(
        [node for node in ast.parse(path.read_text()).body if not isinstance(node, DEFINITIONS)],
        type_ignores=[],
    )
    assert "ray" in set(imported(path))
    names = {name for node in ast.walk(top) for name in names_of(node)}
    assert not [name for name in names if name.split(".")[0] == "ray"]


@pytest.mark.parametrize("path", sorted(RUNTIME.rglob("*.py")), ids=in_core)
def test_what_migrated_scripts_call_imports_nothing_that_rewrites_scripts(path: Path) -> None:
    rewriting = [n for n in imported_modules(path) if f"{n}.".startswith("unipar.migrate.")]
    assert not rewriting


def test_a_backend_imports_no_other_backend() -> None:
    backends = [p for p in (CORE.parent / "backends").glob("*/unipar_*") if p.is_dir()]
    assert backends
    names = {path.name for path in backends}
    for backend in backends:
        for path in backend.rglob("*.py"):
            assert (names - {backend.name}).isdisjoint(imported(path)), path


ENTRIES = {path.name for path in CORE.iterdir()} - {"__pycache__", "py.typed"}
MODULES = {
    ".".join(path.relative_to(CORE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in CORE.rglob("*.py")
    if path.parent != CORE / "migrate" / "capture"
}


def needed(path: Path) -> set[str]:
    """The modules of unipar that a file imports, in functions and for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found & MODULES.keys()


def entry(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def test_every_entry_has_its_place_in_the_order() -> None:
    assert sorted(ORDER) == sorted(name.removesuffix(".py") for name in ENTRIES)
    assert len(ENTRIES) <= 30


def test_a_module_imports_only_what_stands_before_it() -> None:
    upwards = [
        (module, name)
        for module, path in MODULES.items()
        for name in needed(path)
        if ORDER.index(entry(name)) > ORDER.index(entry(module))
    ]
    assert not upwards


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: needed(path) - {module} for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()


def loaded_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.split())


def packages(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_importing_unipar_imports_no_framework() -> None:
    everything = "import unipar\nfor name in unipar.__all__: getattr(unipar, name)"
    for code in ("import unipar", everything):
        loaded = packages(loaded_after(code))
        assert "unipar" in loaded
        assert loaded.isdisjoint(FOREIGN | TRACKERS)


def test_importing_what_migrated_scripts_call_imports_no_framework() -> None:
    public = sorted(info.name for info in pkgutil.iter_modules([str(RUNTIME)]))
    assert {"accelerate", "colossalai", "deepspeed", "fabric", "horovod", "torch"} <= {*public}
    code = "; ".join(f"import unipar.compat.{name}" for name in public)
    loaded = loaded_after(f"{code}; import unipar.compat.horovod.torch")
    assert {f"unipar.compat.{name}" for name in public} <= loaded
    assert "unipar.migrate" not in loaded
    assert packages(loaded).isdisjoint(FOREIGN | TRACKERS)


def test_plotly_waits_for_a_report_to_be_drawn() -> None:
    code = "import unipar.benchmark.report.table, unipar.benchmark.report.html"
    loaded = packages(loaded_after(code))
    assert "unipar" in loaded
    assert loaded.isdisjoint({"plotly", "pandas"})


def test_every_public_name_is_there() -> None:
    for name in unipar.__all__:
        assert getattr(unipar, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        unipar.fitt  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
