"""The tables of what was measured under every framework and torch, and of edited files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2] / "docs" / "backends"
GPU_TESTS = HERE.parent / "gpu" / "tests.json"
APART = "[by parts](#where-more-than-data-is-divided)"
PARTS = {"parameters": 4, "gradients": 4, "optimizer": 8}
"""Bytes of each part for each parameter, in fp32 under AdamW."""
HALF_PARTS = {"parameters": 2, "gradients": 2, "optimizer": 12}
"""The same where weights are in half precision; their fp32 originals go with the optimizer."""
ON_HOST = (*PARTS, "activations")
"""What may live in host memory."""
FLAGS = {
    "custom_loop": "loop by hand",
    "accumulation": "micro-batches",
    "several_engines": "several models",
    "clipping": "clipping",
    "activation_checkpointing": "recomputed activations",
    "selective_checkpointing": "selectively",
    "compile": "`torch.compile`",
    "pipeline": "pipeline",
    "skip_nan": "skips NaN",
    "half_weights": "half-precision weights",
    "splits_tensors": "splits tensors",
}

SUITES = {
    "unit tests": ["unit"],
    "real processes": [f"integration/{name}" for name in ("fit", "kit", "launch")],
    "checkpoints": ["integration/checkpoint"],
    "bench": ["integration/bench"],
    "torch backend": ["backends/torch"],
    **{f"kit: `{strategy}`": [strategy] for strategy in ("single", "ddp", "fsdp", "mesh:tp=2")},
}
"""The columns of the table of torches, and the suites that each is of."""


def precisions(able: Collection[str]) -> str:
    """Of those that a strategy has, where they are not had everywhere."""
    shown = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8 (GPU)"}
    return ", ".join(text for name, text in shown.items() if name in able)


def load(name: str) -> dict[str, Any]:
    return json.loads((HERE / name).read_text())


def strategies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Framework, strategy, and what was found."""
    for framework, found in load("survey.json")["frameworks"].items():
        for strategy, measured in found["strategies"].items():
            yield framework, strategy, measured


def about(name: str) -> str:
    """When, where and by which command."""
    record = load(name)
    frameworks = record.get("frameworks", {})
    versions = [f"{name} {found['version']}" for name, found in frameworks.items()]
    return " ".join([record["about"], *([f"{', '.join(versions)}."] if versions else [])])


def ran() -> tuple[list[str], list[list[str]]]:
    """A row for each framework: what has run on CPUs, and what on GPUs."""
    rows = []
    for framework, found in load("survey.json")["frameworks"].items():
        names, apart, most, takes_gpu = [], 0.0, 1, False
        for strategy, measured in found["strategies"].items():
            names.append(f"`{strategy}`")
            takes_gpu |= "cuda" in measured["capabilities"]["device_types"]
            most = max(most, *map(int, measured["parity"]))
            if measured["precision"] == "fp32":
                apart = max(apart, *(one["loss"] for one in measured["parity"].values()))
        on_gpu = on_gpus(framework) if takes_gpu else "refused"
        on_cpu = f"1 to {most} processes: losses within {apart:.1e}"
        rows.append([framework, ", ".join(names), on_cpu, on_gpu])
    return ["framework", "`strategy`", "on CPUs", "on GPUs"], rows


def on_gpus(framework: str) -> str:
    """Where the tests of a framework's strategies have run, if on any GPU."""
    record = json.loads(GPU_TESTS.read_text()) if GPU_TESTS.exists() else {"suites": {}}
    found = [suite for suite in record["suites"].values() if suite["framework"] == framework]
    if not found:
        return "never run"
    failed = sum(len(suite["failed"]) for suite in found)
    passed = sum(suite["passed"] for suite in found)
    return f"one {record['gpu']}: {passed} tests passed, {failed} failed"


def overview() -> tuple[list[str], list[list[str]]]:
    """What each is, and how near it came at the largest number of processes."""
    rows = []
    for framework, strategy, found in strategies():
        able, most = found["capabilities"], max(found["parity"], key=int)
        rounded = "" if found["precision"] == "fp32" else f" ({found['precision']})"
        rows.append(
            [
                f"`{strategy}`",
                framework,
                divided(able),
                precisions(able["precisions"]),
                most,
                f"{found['parity'][most]['loss']:.1e}{rounded}",
                f"{found['bytes'][most] / 2**20:.0f} MiB" if "bytes" in found else APART,
            ]
        )
    heads = [
        *("strategy", "framework", "divided among ranks", "precision", "processes"),
        *("losses apart at most", "bytes of a rank"),
    ]
    return heads, rows


def layouts() -> tuple[list[str], list[list[str]]]:
    """What a rank holds where more than data is divided, beside the formula."""
    rows = []
    for row in load("layouts.json")["memory"]:
        kinds = ("parameters", "gradients", "optimizer", "off", "full")
        rows.append([f"`{row['strategy']}`", *(_beside(*row[kind]) for kind in kinds)])
    heads = ["strategy", "parameters", "gradients", "optimizer", "activations", "recomputed"]
    return heads, rows


def layouts_traffic() -> tuple[list[str], list[list[str]]]:
    """What a rank sends there in a step, by collective, beside the formula."""
    rows = [
        [
            *(f"`{strategy}`", "recomputed" if setting == "full" else "", kind, str(count)),
            *(words.split("; ")[-1 if setting == "full" else 0].removesuffix(" recomputed"),),
            _beside(found, formula),
        ]
        for strategy, setting, kind, count, words, found, formula in load("layouts.json")["traffic"]
    ]
    return ["strategy", "activations", "collective", "calls", "formula", "bytes"], rows


def _beside(found: float, formula: float) -> str:
    return f"{found / 2**10:.0f} ({formula / 2**10:.0f})"


def parity() -> tuple[list[str], list[list[str]]]:
    """The largest relative differences from the hand-written loop."""
    rows = [
        [
            *(f"`{strategy}`", found["precision"], size),
            *(f"{apart[what]:.1e}" for what in ("loss", "grad_norm", "weights")),
        ]
        for _, strategy, found in strategies()
        for size, apart in found["parity"].items()
    ]
    return ["strategy", "in", "processes", "loss", "gradient norm", "weights"], rows


def memory() -> tuple[list[str], list[list[str]]]:
    """Bytes of the rank that holds most, beside what the capabilities promise."""
    rows = []
    for _, strategy, found in strategies():
        if "bytes" not in found:
            continue
        row = [f"`{strategy}`", divided(found["capabilities"])]
        for size in ("1", "2", "4"):
            if size not in found["bytes"]:
                row += [""]
                continue
            expected = promised(found, int(size))
            row += [f"{found['bytes'][size] / 2**20:.0f} ({expected / 2**20:.0f})"]
        rows.append(row)
    return ["strategy", "divided among ranks", *(f"on {n}" for n in ("1", "2", "4"))], rows


def promised(found: dict[str, Any], size: int) -> float:
    """Bytes of a rank: each part whole, or its share where the part is divided."""
    able = found["capabilities"]
    parts = HALF_PARTS if able["half_weights"] else PARTS
    return found["parameters"] * sum(
        each / (size if part in able["sharded"] else 1) for part, each in parts.items()
    )


def capabilities() -> tuple[list[str], list[list[str]]]:
    """Every capability of every strategy."""
    rows = []
    for _, strategy, found in strategies():
        able = found["capabilities"]
        rows.append(
            [
                f"`{strategy}`",
                ", ".join({"cpu": "CPU", "cuda": "GPU"}[kind] for kind in able["device_types"]),
                "any" if able["max_devices"] is None else str(able["max_devices"]),
                precisions(able["precisions"]),
                divided(able),
                ", ".join(part for part in ON_HOST if part in able["offload"]) or "no",
                *("yes" if able[flag] else "no" for flag in FLAGS),
            ]
        )
    heads = ["strategy", "runs on", "processes", "precision", "divided", "CPU offload"]
    return [*heads, *FLAGS.values()], rows


def divided(able: dict[str, Any]) -> str:
    return ", ".join(part for part in PARTS if part in able["sharded"]) or "nothing"


def matrix() -> tuple[list[str], list[list[str]]]:
    """In fp32, how far the second half is from the undisturbed run's: sources down."""
    worst = _worst("fp32")
    targets = list(next(iter(worst.values())))
    rows = [[_named(s), *(f"{row[target]:.0e}" for target in targets)] for s, row in worst.items()]
    return ["saved under \\ resumed under", *map(_named, targets)], rows


def half_matrix() -> tuple[list[str], list[list[str]]]:
    """The same in bf16, from and to the strategies that have no fp32."""
    rows = [
        [_named(source), _named(target), f"{apart:.1e}"]
        for source, row in _worst("bf16").items()
        for target, apart in row.items()
    ]
    return ["saved under", "resumed under", "apart"], rows


def _named(strategy: str) -> str:
    """Without the names of the model's parts, which are this model's."""
    return f"`{strategy.split(',stages=')[0]}`"


def half_bound() -> str:
    bounds = {t["bound"] for t in load("matrix.json")["targets"] if t["precision"] == "bf16"}
    return f"Allowed: {max(bounds):.1e}."


def edits() -> tuple[list[str], list[list[str]]]:
    """What came of reading files that were edited on purpose."""
    kinds = {
        "refused": "refused",
        "same": "read as saved",
        "told": "another value, no tensor",
        "silent": "other tensors",
        "foreign": "other exceptions",
        "outside": "files opened elsewhere",
    }
    record = load("fuzz.json")
    rows = [
        [found["what"], str(record["edits"]), *(str(found.get(kind, 0)) for kind in kinds)]
        for found in record["readers"].values()
    ]
    return ["edited", "edits", *kinds.values()], rows


def _worst(precision: str) -> dict[str, dict[str, float]]:
    """For each source and target, the largest difference over the numbers of processes."""
    worst: dict[str, dict[str, float]] = {}
    for target in load("matrix.json")["targets"]:
        if target["precision"] == precision:
            for source, apart in target["apart"].items():
                row = worst.setdefault(source, {})
                row[target["strategy"]] = max(apart, row.get(target["strategy"], 0.0))
    return worst


def torches() -> tuple[list[str], list[list[str]]]:
    """A row for each torch: how many tests passed, and how many were skipped or failed."""
    rows = []
    for torch, record in load("torches.json").items():
        row = [torch, record["python"]]
        for names in SUITES.values():
            found = [record["suites"][name] for name in names if name in record["suites"]]
            row.append(_outcome(found) if len(found) == len(names) else "not run")
        rows.append(row)
    return ["torch", "Python", *SUITES], rows


def about_torches() -> str:
    """When, where and by which command, for each torch."""
    return "\n\n".join(record["about"] for record in load("torches.json").values())


def _outcome(suites: list[dict[str, Any]]) -> str:
    passed, skipped = (sum(suite[end] for suite in suites) for end in ("passed", "skipped"))
    failed = sum(len(suite["failed"]) for suite in suites)
    others = (
        f"{number} {end}" for number, end in ((failed, "failed"), (skipped, "skipped")) if number
    )
    return ", ".join([f"{passed} passed", *others])


def migrated() -> tuple[list[str], list[list[str]]]:
    """A row for each framework: its programs, what changes in them, and how losses compare."""
    record = load("../migrate/corpus.json")
    return record["heads"], [[str(cell) for cell in cells] for cells in record["rows"]]
