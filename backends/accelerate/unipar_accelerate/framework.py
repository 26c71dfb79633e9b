"""Bringing Accelerate up in this process on unipar's process group, and letting go of it.

Its state is shared by all of its objects in a process, and found from environment variables.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from unipar.errors import ConfigError
from unipar.utils.environ import environ
from unipar.utils.logs import quiet_framework
from unipar.world import Placement, World

_TRUE = frozenset({"1", "true", "yes", "on", "t", "y"})
_SWITCHES = {
    "ACCELERATE_USE_MEGATRON_LM": "another strategy",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "the strategy 'mesh' (tp, cp)",
}
"""What ``accelerate launch`` may have switched on, and what unipar has instead."""


def load() -> ModuleType:
    """Accelerate itself.

    Raises:
        ConfigError: it is installed, and cannot be imported.
    """
    try:
        with quiet():
            import accelerate
    except Exception as error:
        said = str(error).splitlines()
        raise ConfigError(
            f"Accelerate {metadata.version('accelerate')} is installed and fails to import: "
            f"{type(error).__name__}: {said[0] if said else ''}. "
            "Install it again: unipar install accelerate --force."
        ) from error
    return accelerate


def quiet() -> contextlib.AbstractContextManager[None]:
    """Keep Accelerate's messages from the terminal, unless unipar's log level is ``debug``."""
    return quiet_framework("accelerate")


def check_environment(
    plugin: str, precision: str, device_type: str, environment: Mapping[str, str]
) -> None:
    """Refuse what ``accelerate launch`` or the user has set to something else than the run.

    Raises:
        ConfigError: it names the variable, and the place for it.
    """
    set_to_something = {
        "ACCELERATE_MIXED_PRECISION": (native_precision(precision), "the run's precision"),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "micro_batch_size"),
        "ACCELERATE_DYNAMO_BACKEND": ("no", "the run's compile"),
        "ACCELERATE_TORCH_DEVICE": (None, "the run's device"),
    }
    for name, (wanted, place) in set_to_something.items():
        given = environment.get(name)
        if given is not None and given.lower() != wanted:
            raise ConfigError(
                f"accelerate: the environment has {name}={given}, and the run has "
                f"{wanted or 'another'}. Unset the variable, and set {place}."
            )
    switches = dict(_SWITCHES)
    for other in {"fsdp", "deepspeed"} - {plugin}:
        switches[f"ACCELERATE_USE_{other.upper()}"] = f"the option plugin='{other}'"
    if device_type != "cpu":
        switches["ACCELERATE_USE_CPU"] = "device='cpu'"
    for name, place in switches.items():
        if environment.get(name, "").lower() in _TRUE:
            raise ConfigError(
                f"accelerate: the environment has {name}={environment[name]}, which this run is "
                f"not. Unset the variable, or use {place}."
            )


class Framework:
    """Accelerate's shared state for the length of a run. Collective.

    Where the user's code has made an ``Accelerator`` before, its state is taken over if it is of
    this run, and left as it is afterwards.

    Args:
        world: the joined processes.
        plugin: ``"ddp"``, ``"fsdp"`` or ``"deepspeed"``.
    """

    def __init__(self, world: World, plugin: str) -> None:
        self.accelerate = load()
        from accelerate.state import AcceleratorState, GradientState, PartialState

        self._states: Any = (AcceleratorState, GradientState)
        self._environment = _accelerates_own()
        # Accelerate 1.15.0, state.py: what all instances share.
        self._owns = PartialState._shared_state == {}
        with quiet(), _placed(world.placement):
            state = PartialState(cpu=world.device.type == "cpu")
        try:
            self._check(state, world, plugin)
        except ConfigError:
            self.stop()
            raise

    def _check(self, state: Any, world: World, plugin: str) -> None:
        kind = "MULTI_CPU" if world.device.type == "cpu" else "MULTI_GPU"
        kinds = {kind} if self._owns else {kind, "FSDP" if plugin == "fsdp" else kind}
        if not self._owns and world.size == 1:
            kinds.add("NO")
        found = (str(state.distributed_type.value), state.num_processes, state.process_index)
        placed = found[1:] == (world.size, world.rank)
        if placed and found[0] in kinds and state.device.type == world.device.type:
            return
        made = "" if self._owns else " by an Accelerator that was made before"
        raise ConfigError(
            f"accelerate: its state in this process was set up{made} for {found[0]} on "
            f"{state.device} with {found[1]} process(es), this one being {found[2]}; the run is "
            f"{kind} on {world.device} with {world.size}, this one being {world.rank}. Training "
            "would not be synchronized. Make no Accelerator of your own, and use "
            "engine.accelerator; or make it under the launcher, with cpu=True where there is no "
            "GPU."
        )

    def precision(self) -> str | None:
        """The precision that all Accelerators of this process share, once there is one."""
        state = self._states[0]
        return state._shared_state.get("_mixed_precision")

    def forget_plugin(self) -> None:
        """Let the next Accelerator have another plugin; the processes stay joined."""
        self._states[0]._reset_state()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)

    def stop(self) -> None:
        """Forget the state, so that another run can have another, and restore the environment."""
        if not self._owns:
            return
        accelerator_state, gradient_state = self._states
        accelerator_state._reset_state(reset_partial_state=True)
        gradient_state._reset_state()
        for name in _accelerates_own():
            del os.environ[name]
        os.environ.update(self._environment)


def native_precision(precision: str) -> str:
    """Return Accelerate's name of a precision."""
    return "no" if precision == "fp32" else precision


def _accelerates_own() -> dict[str, str]:
    """The variables that Accelerate reads, and writes when it is given a plugin."""
    return {k: v for k, v in os.environ.items() if k.startswith(("ACCELERATE_", "FSDP_"))}


@contextlib.contextmanager
def _placed(placement: Placement) -> Iterator[None]:
    """Tell Accelerate its place. Without one, its processes would train each by itself."""
    wanted = {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.size),
        # Which it takes for the number of the GPU.
        "LOCAL_RANK": str(placement.device_index),
        "LOCAL_WORLD_SIZE": str(placement.local_size),
        # Only said to exist, for the process group is there.
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "localhost"),
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
        # Unset, Accelerate would choose the number of threads.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads())),
    }
    with environ(wanted):
        yield
