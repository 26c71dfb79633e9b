"""The self-test: whether a strategy trains on this machine's devices as a plain loop does.

It is tried in processes of its own, by :mod:`unipar.install.smoke`, and given up after a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel

from unipar.errors import ConfigError
from unipar.launch.comparison import Comparison, Refusal
from unipar.launch.detection import launcher_variables
from unipar.strategy import registry
from unipar.utils.own_path import own_path
from unipar.utils.scratch import scratch
from unipar.utils.subprocesses import end_group

TIME_LIMIT = 300.0
"""Seconds for one strategy. Some frameworks compile kernels when they are first used."""

_COLLECTIVE = 60.0
"""Seconds that a collective waits, at most; a third of the time limit, where that is less."""

_TAIL = 30
"""Lines that are shown of what a process has printed that failed."""

Verdict = Literal["agrees", "differs", "failed", "refused", "not run"]


class Outcome(BaseModel, frozen=True):
    """The outcome of one strategy.

    Attributes:
        strategy: as ``name:option=value,…``.
        verdict: ``"failed"`` is an error, or the time limit; ``"refused"`` is the strategy's word
            against the small model or the devices; ``"not run"``: it cannot run here.
        compared: the losses, of a strategy that has trained.
        why: of one that has not.
    """

    strategy: str
    verdict: Verdict
    compared: Comparison | None = None
    why: str = ""

    @property
    def wrong(self) -> bool:
        """Whether it speaks against the strategy on this machine."""
        return self.verdict in ("differs", "failed")


def try_strategy(
    strategy: str, *, devices: int | None = None, time_limit: float = TIME_LIMIT
) -> Outcome:
    """Try a strategy on the devices at hand, if its framework is installed.

    Args:
        strategy: as ``name:option=value,…``.
        devices: processes; left out: every GPU, or two on a CPU. A strategy that takes fewer gets
            as many as it takes.
        time_limit: in seconds.
    """
    try:
        available = registry.strategy_class(registry.as_mapping(strategy)["name"]).availability()
        if not available.ok:
            why = f"{available.reason} {available.remedy}".strip()
            return Outcome(strategy=strategy, verdict="not run", why=why)
        kinds = registry.resolve(strategy).capabilities().device_types
    except ConfigError as error:
        return Outcome(strategy=strategy, verdict="refused", why=str(error))
    here = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    device = next((one for one in here if one in kinds), None)
    if device is None:
        why = f"It runs on {' or '.join(sorted(kinds))}, and there is none here."
        return Outcome(strategy=strategy, verdict="not run", why=why)
    if devices is None:
        devices = torch.cuda.device_count() if device == "cuda" else 2
    return compare(strategy, device, devices, time_limit=time_limit)


def compare(strategy: str, device: str, devices: int, *, time_limit: float = TIME_LIMIT) -> Outcome:
    """Run a few steps under a strategy beside a plain loop, in processes of their own.

    Args:
        strategy: as ``name:option=value,…``.
        device: ``"cpu"`` or ``"cuda"``.
        devices: processes.
        time_limit: in seconds; processes that take longer are ended.
    """
    timeout = min(_COLLECTIVE, time_limit / 3)
    with scratch() as directory:
        result, log = directory / "result.json", directory / "log"
        command = [
            *(sys.executable, "-m", "unipar.install.smoke", strategy),
            *("--device", device, "--devices", str(devices)),
            *("--timeout", f"{timeout:g}", "--result", str(result)),
        ]
        code = _run(command, log, time_limit)
        if not result.exists():
            said = log.read_text(errors="replace").strip().splitlines()[-_TAIL:]
            what = f"exit code {code}" if code is not None else f"took longer than {time_limit:g} s"
            why = "\n".join([f"{what}; the last that it said:" if said else what, *said])
            return Outcome(strategy=strategy, verdict="failed", why=why)
        found = json.loads(result.read_text())
    if "reason" in found:
        why = Refusal.model_validate(found).reason
        return Outcome(strategy=strategy, verdict="refused", why=why)
    compared = Comparison.model_validate(found)
    verdict = "agrees" if compared.agrees else "differs"
    return Outcome(strategy=strategy, verdict=verdict, compared=compared)


def _run(command: list[str], log: Path, time_limit: float) -> int | None:
    """Run a command in the log's directory; its exit code, or ``None`` where it took too long."""
    # It is no rank of the run that asks.
    inherited = {k: v for k, v in os.environ.items() if k not in launcher_variables()}
    # A strategy may come from anywhere that this process imports from.
    importable = os.pathsep.join(map(os.path.abspath, own_path()))
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            # TF32 rounds more than the comparison allows, and some images turn it on for all.
            # https://docs.pytorch.org/docs/stable/cuda_environment_variables.html
            env=inherited | {"PYTHONPATH": importable, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"},
            # Python puts the current one first of all places to import from.
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(time_limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_group(process)
