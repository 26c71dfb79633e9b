"""What ``Fabric(...)`` asks for, as settings of a run."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from unipar.compat.fabric import strategies
from unipar.compat.fabric.accelerators import Accelerator
from unipar.compat.fabric.plugins import Precision, precision_among
from unipar.compat.fabric_names import refuse
from unipar.compat.run import current
from unipar.errors import ConfigError

_DEVICES = {"auto": "auto", "cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}
_PRECISIONS = {
    "32-true": "fp32", "32": "fp32", "bf16-mixed": "bf16", "bf16": "bf16", "16-mixed": "fp16",
    "16": "fp16",
}  # fmt: skip
_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64,
         "64": torch.float64}  # fmt: skip
"""Precisions of the weights themselves, in which a run of fp32 leaves them."""


class Asked(NamedTuple):
    """The arguments of a ``Fabric``.

    Attributes:
        run: fields of :class:`unipar.compat.runconfig.ScriptConfig`.
        prepare: arguments of :meth:`unipar.Session.prepare`.
        devices: processes on each node; ``None``: as many as there are GPUs, or those there are.
        num_nodes: nodes.
        names_strategy: whether the script does, so that Fabric would share data out to a single
            process, and put something around its model, too.
        spawns: whether ``launch`` has a function run in processes, and the script in none.
        forks: whether Fabric would have these processes share what this one has in memory.
        true: the dtype of weights, where that is other than fp32.
        of_deepspeed: whether Fabric would clear gradients, and step schedulers, by DeepSpeed.
        by_ddp: whether Fabric would sum gradients by DDP.
        seeds_again: whether Fabric seeds again as processes begin, by the last seed.
    """

    run: dict[str, Any]
    prepare: dict[str, Any]
    devices: int | None
    num_nodes: int
    names_strategy: bool
    spawns: bool
    forks: bool
    of_deepspeed: bool
    by_ddp: bool
    seeds_again: bool
    true: torch.dtype | None = None


def read(
    accelerator: Any, strategy: Any, devices: Any, num_nodes: int, precision: Any, plugins: Any
) -> Asked:
    """Read the arguments of a ``Fabric``, and what ``fabric run`` was given for them.

    What ``unipar.yaml`` or the environment decides is not asked for, so it may be anything.

    Raises:
        ConfigError: one has no counterpart, or they contradict each other.
    """
    accelerator = _from_command("accelerator", accelerator, "auto")
    strategy = _from_command("strategy", strategy, "auto")
    devices = _from_command("devices", devices, "auto")
    num_nodes = int(_from_command("num_nodes", num_nodes, 1))
    precision = _from_command("precision", precision, None)
    made = _made(strategy)
    run = {} if made is None else made.more()
    if made is not None and not current.decides("strategy"):
        run["strategy"] = made.options()
    prepare = run.pop("prepare", {})
    of_plugins = precision_among(plugins)
    if precision is not None and of_plugins is not None:
        raise ConfigError(
            f"Fabric was given precision={precision!r} and a plugin for "
            f"{of_plugins.precision!r}. Give one."
        )
    given = [one for one in (precision, of_plugins, run.pop("precision", None)) if one is not None]
    true = None
    if given and isinstance(given[0], Precision):
        run |= given[0].scale
    if given and not current.decides("precision"):
        run["precision"], true = _precision(given[0])
    if not current.decides("device"):
        device = _device(accelerator)
        run |= {} if device == "auto" else {"device": device}
    how = getattr(made, "start_method", "popen")
    of_deepspeed = isinstance(made, strategies.DeepSpeedStrategy)
    of_fsdp = isinstance(made, strategies.FSDPStrategy)
    if true is not None and of_deepspeed:
        refuse("DeepSpeedStrategy(precision='bf16-true'/'16-true')")
    return Asked(
        run, prepare, _count(devices), num_nodes, strategy != "auto", how != "popen",
        how not in ("popen", "spawn"), of_deepspeed,
        made is None or isinstance(made, strategies.DDPStrategy), of_deepspeed or of_fsdp, true,
    )  # fmt: skip


def _from_command(name: str, given: Any, default: Any) -> Any:
    """What ``fabric run`` was told in the place of an argument that the script leaves out."""
    told = os.environ.get(f"LT_{name.upper()}")
    if told is None or told == str(given):
        return given
    if given != default:
        raise ConfigError(
            f"the script says Fabric({name}={given!r}), and `fabric run` was given {told!r} for "
            "it. Say it in one place."
        )
    return told


def _made(strategy: Any) -> strategies.ParallelStrategy | None:
    if strategy == "auto":
        return None
    if isinstance(strategy, str):
        made = strategies.NAMED.get(strategy.lower())
        if made is not None:
            return made()
        if not current.decides("strategy"):
            known = ", ".join(strategies.NAMED)
            raise ConfigError(
                f"Fabric(strategy={strategy!r}) has no counterpart. Use one of {known}, or say "
                "strategy in unipar.yaml (docs/strategies.md)."
            )
        return None
    if type(strategy).__module__ != strategies.__name__ and not current.decides("strategy"):
        refuse("Fabric(strategy=…)")
    return strategy if isinstance(strategy, strategies.ParallelStrategy) else None


def _precision(given: Any) -> tuple[str, torch.dtype | None]:
    """The precision of the run, and the dtype that the script gives weights."""
    word = given.precision if isinstance(given, Precision) else str(given)
    if word in _TRUE:
        return "fp32", _TRUE[word]
    if word not in (*_PRECISIONS, *_PRECISIONS.values()):
        refuse("Fabric(precision='transformer-engine')")
    return _PRECISIONS.get(word, word), None


def _device(accelerator: Any) -> str:
    if isinstance(accelerator, Accelerator):
        return accelerator.device
    if accelerator not in _DEVICES:
        refuse("Fabric(accelerator='mps'/'tpu')")
    return _DEVICES[accelerator]


def _count(devices: Any) -> int | None:
    if isinstance(devices, str):
        listed = [int(one) for one in devices.split(",") if one.strip().lstrip("-").isdigit()]
        if devices != "auto" and not listed:
            raise ConfigError(
                f"devices={devices!r} is no number. Give how many processes to start."
            )
        devices = listed if "," in devices else (listed or ["auto"])[0]
    if isinstance(devices, (list, tuple)):
        if list(devices) != list(range(len(devices))) or not devices:
            refuse("Fabric(devices=[1,3])")
        return len(devices)
    if devices in ("auto", -1):
        return None
    if not isinstance(devices, int) or devices < 1:
        raise ConfigError(f"devices={devices!r}: give how many processes to start, at least 1.")
    return devices
