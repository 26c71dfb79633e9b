"""Whole state dicts of what a strategy may have divided among ranks, in memory.

They are what FSDP gives under ``FULL_STATE_DICT``: weights by name, and the optimizer's state by
the names of the parameters, so that files of such scripts load under any strategy.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import _IncompatibleKeys

from unipar.checkpoint.boxes import part
from unipar.checkpoint.differences import describe_differences
from unipar.checkpoint.load import agree
from unipar.errors import CheckpointError, ConfigError, first_few
from unipar.state import GroupState, TensorInfo, TensorState
from unipar.strategy import Engine
from unipar.utils.json_state import from_json, to_json
from unipar.world import World

log = logging.getLogger("unipar")
_UNIPAR = Path(__file__).parents[1]


class _Gathered:
    """The state of an engine, for state dicts that are whole.

    Args:
        engine: what holds it.
        world: the joined processes.
        rank0_only: whether the other ranks get nothing.
    """

    def __init__(self, engine: Engine, world: World, *, rank0_only: bool) -> None:
        self._engine, self._world = engine, world
        self._kept = world.is_main or not rank0_only


class OnRank0(dict[str, Any]):
    """What a rank has of a state dict that rank 0 alone has: nothing.

    A script that reads it there is told so, once; to libraries it is an empty dict, for they are
    given it on all ranks where rank 0 is to write.
    """

    _told = False

    def _tell(self) -> None:
        caller: Any = inspect.currentframe()
        for _ in range(2):
            caller = caller and caller.f_back
        file = Path(caller.f_code.co_filename) if caller else _UNIPAR
        if OnRank0._told or "site-packages" in file.parts or file.is_relative_to(_UNIPAR):
            return
        OnRank0._told = True
        log.warning(
            "%s:%d reads a state dict that is empty here: where ranks divide a model, rank 0 "
            "alone has its whole weights. Send on what is made of them, or use a strategy that "
            "leaves weights whole, such as ddp or zero2.",
            file.name, caller.f_lineno,
        )  # fmt: skip

    def __reduce__(self) -> Any:
        return dict, ()


def _telling(name: str) -> Any:
    own = getattr(dict, name)

    def method(self: OnRank0, *args: Any) -> Any:
        self._tell()
        return own(self, *args)

    method.__name__, method.__doc__ = name, own.__doc__
    return method


for _name in ("__iter__", "__getitem__", "__contains__", "get", "items", "keys", "values"):
    setattr(OnRank0, _name, _telling(_name))


class GatheredModel(_Gathered):
    """A model whose state dict is whole. Its methods are collective."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers at their full shapes, on the host."""
        return self._whole(kept=self._kept)

    def _whole(self, *, kept: bool) -> dict[str, torch.Tensor]:
        state = self._engine.export_state()
        found = gather(state.weights, self._world, kept=kept)
        if kept:
            found |= {name: found[stored] for name, stored in state.aliases.items()}
        return {outer(name): tensor for name, tensor in found.items()}

    def load_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], *, strict: bool = True
    ) -> _IncompatibleKeys:
        """Take over weights of full shape.

        Args:
            state_dict: on all ranks, or on rank 0 and empty elsewhere.
            strict: whether it has to have all names, and no others.

        Returns:
            As a module's method: names that it has not, and those that the model has not.

        Raises:
            CheckpointError: names or shapes differ.
        """
        state = self._engine.export_state()
        inner = {outer(name): name for name in (*state.aliases, *(t.name for t in state.weights))}
        # torch 2.8 to 2.13, nn/modules/module.py, load_state_dict.
        keys = _IncompatibleKeys([], [])
        given = {inner.get(name, name): t for name, t in state_dict.items()}
        if not strict:
            names = self._world.broadcast(list(state_dict))
            keys.missing_keys.extend(name for name in inner if name not in names)
            keys.unexpected_keys.extend(name for name in names if name not in inner)
            # A tied weight may be given by any of its names.
            given = {state.aliases.get(name, name): t for name, t in given.items()} | given
            # By the engine, which takes over whole models, as it has the rest.
            own = self._whole(kept=self._world.is_main)
            given = {inner[name]: given.get(inner[name], t) for name, t in own.items()}
        weights = {name: t for name, t in given.items() if name not in state.aliases}
        source = _Source(weights, {}, {}, self._world)
        self._engine.import_state(source, optimizer=False)
        return keys


class GatheredOptimizer(_Gathered):
    """An optimizer whose state dict is whole, and by name. Its methods are collective."""

    def state_dict(self) -> dict[str, Any]:
        """``state`` by parameter name and key, and ``param_groups`` with names for ``params``.

        An optimizer that has not stepped has moments of zero here, so that
        ``torch.distributed.checkpoint.load``, which fills what there is, finds all of them.

        Raises:
            ConfigError: it has not stepped, and is a framework's own.
        """
        with _begun(self._engine, self._world):
            exported = self._engine.export_state()
            moments = gather(exported.optimizer, self._world, kept=self._kept)
        if not self._kept:
            return {}
        state: dict[str, dict[str, Any]] = {}
        for name, tensor in moments.items():
            parameter, _, key = name.rpartition(".")
            state.setdefault(outer(parameter), {})[key] = tensor
        for parameter, scalars in exported.extra.get("scalars", {}).items():
            state.setdefault(outer(parameter), {}).update(scalars)
        groups = [
            {**from_json(dict(one.hyperparameters)), "params": list(map(outer, one.params))}
            for one in exported.groups
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over state by parameter name.

        Args:
            state_dict: on all ranks, or on rank 0 and empty elsewhere.

        Raises:
            ConfigError: it is by number, as a plain optimizer's is; or none on any rank.
            CheckpointError: parameters or shapes differ.
        """
        groups = state_dict.get("param_groups", ())
        if not any(self._world.gather(bool(groups))):
            raise ConfigError(
                "this optimizer state holds no 'param_groups', so it is none of an optimizer's, "
                "and the one that there is would be lost. Load what the state_dict() of one, or "
                "get_optimizer_state_dict, has made."
            )
        names = [*state_dict.get("state", {}), *(name for one in groups for name in one["params"])]
        if any(self._world.gather(any(not isinstance(name, str) for name in names))):
            raise ConfigError(
                "this optimizer state is by the numbers of parameters, as a plain optimizer's "
                "state_dict() is, and not by their names. Load what "
                "script.gathered(optimizer).state_dict() or FSDP.optim_state_dict has made."
            )
        moments: dict[str, torch.Tensor] = {}
        scalars: dict[str, dict[str, Any]] = {}
        trained = [name for one in self._engine.export_state().groups for name in one.params]
        inner = {outer(name): name for name in trained}
        groups = [
            {**one, "params": [inner.get(name, name) for name in one["params"]]} for one in groups
        ]
        for stored, values in state_dict.get("state", {}).items():
            name = inner[stored] if stored in inner else str(stored)
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    moments[f"{name}.{key}"] = value
                elif value is not None:
                    scalars.setdefault(name, {})[key] = to_json(value, f"state '{key}'")
        told = {
            "scalars": scalars,
            "num_steps": self._engine.num_steps,
            "groups": [to_json(dict(one), "param_groups") for one in groups],
        }
        self._engine.import_state(_Source({}, moments, told, self._world))


def outer(name: str) -> str:
    """A parameter's name without what wraps its module so that it is computed again.

    torch's own state dicts leave it out (distributed/checkpoint/state_dict.py).
    """
    return name.replace("_checkpoint_wrapped_module.", "")


def nested(flat: Mapping[str, Any], groups: Iterable[Sequence[str]]) -> dict[str, Any]:
    """The state of an optimizer that ``StateDictOptions(flatten_optimizer_state_dict=True)`` made.

    Args:
        flat: with keys ``state.<parameter>.<key>`` and ``param_groups.<parameter>.<key>``; also of
            parameters that are not asked for.
        groups: the names of the parameters of each group.

    Raises:
        CheckpointError: a parameter's are missing, or those of a group have other options.
    """
    groups = list(groups)
    known = {name for names in groups for name in names}
    found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for full, value in flat.items():
        kind, _, rest = full.partition(".")
        name = rest
        while name and name not in known:
            name = name.rpartition(".")[0]
        if name and kind in found:
            *path, key = rest.removeprefix(f"{name}.").split(".")
            held = found[kind].setdefault(name, {})
            for one in path:
                held = held.setdefault(one, {})
            held[key] = value
    options = found["param_groups"]
    for names in groups:
        if any(name not in options or options[name] != options[names[0]] for name in names):
            raise CheckpointError(
                f"the flat optimizer state has no options of {first_few(names)}, or not the same "
                "of all of them, and this optimizer has these in one group. Build the same groups "
                "as the saved run did."
            )
    return {
        "state": found["state"],
        "param_groups": [
            {**(options[names[0]] if names else {}), "params": list(names)} for names in groups
        ],
    }


@contextlib.contextmanager
def _begun(engine: Engine, world: World) -> Iterator[None]:
    """Give an optimizer without state the one that it begins with, for a moment."""
    optimizer = engine.optimizer
    assert optimizer is not None
    if any(world.gather(bool(optimizer.state) or engine.num_steps > 0)):
        yield
        return
    if not type(optimizer).__module__.startswith("torch.optim."):
        raise ConfigError(
            f"{type(optimizer).__name__} has no state before its first step. "
            "Take its state dict after one."
        )
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    # Not the instance's step, which a scheduler counts.
    type(optimizer).step(optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    for values in optimizer.state.values():
        if isinstance(values.get("step"), torch.Tensor):
            values["step"].zero_()
    try:
        yield
    finally:
        optimizer.state.clear()


def gather(states: Iterable[TensorState], world: World, *, kept: bool) -> dict[str, torch.Tensor]:
    """Put the parts of each tensor together, one tensor at a time. Collective.

    Args:
        states: what this rank holds of each; the same tensors in the same order on every rank.
        world: the joined processes.
        kept: whether this rank wants them.

    Returns:
        Tensors of full shape on the host; none where they are not kept.
    """
    listed = list(states)
    held = world.gather([state.boxes for state in listed])
    found: dict[str, torch.Tensor] = {}
    for index, state in enumerate(listed):
        own = dict(zip(state.boxes, state.read(), strict=True))
        whole = torch.empty(state.shape, dtype=state.dtype, device="cpu") if kept else None
        owners: dict[Any, int] = {}
        for rank, boxes in enumerate(held):
            for box in boxes[index]:
                owners.setdefault(box, rank)
        for box, rank in owners.items():
            values = own.get(box)
            if world.size > 1:
                sent = torch.empty(box.sizes, dtype=state.dtype, device=world.device)
                if rank == world.rank and values is not None:
                    sent.copy_(values.detach())
                dist.broadcast(sent, src=rank)
                values = sent
            if whole is not None and values is not None:
                part(whole, (0,) * whole.dim(), box).copy_(values.detach())
        if whole is not None:
            found[state.name] = whole
    return found


class _Source:
    """Tensors of full shape in memory as a stored state; no weights leave them as they are.

    Args:
        weights: by name; on all ranks, or on rank 0 and empty elsewhere, as the other two.
        moments: of the optimizer, likewise.
        extra: what else there is, and ``groups``.
        world: the joined processes.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        moments: Mapping[str, torch.Tensor],
        extra: Mapping[str, Any],
        world: World,
    ) -> None:
        self._tensors, self._world = {**weights, **moments}, world
        self._everywhere = all(world.gather(bool(self._tensors)))
        told = ([_infos(weights), _infos(moments)], extra)
        (self.weights, self._moments), self.extra = world.broadcast(told)
        self.optimizer: dict[str, dict[str, TensorInfo]] = {}
        for name, info in self._moments.items():
            parameter, _, key = name.rpartition(".")
            self.optimizer.setdefault(parameter, {})[key] = info
        self.groups = tuple(
            GroupState(tuple(one["params"]), {k: v for k, v in one.items() if k != "params"})
            for one in self.extra.get("groups", ())
        )

    def fill_weights(self, states: Iterable[TensorState]) -> None:
        if self.weights:
            self._fill("weights", list(states), self.weights, exact=True)

    def fill_optimizer(self, states: Iterable[TensorState]) -> None:
        self._fill("optimizer moments", list(states), self._moments, exact=False)

    def _fill(
        self, what: str, states: list[TensorState], stored: Mapping[str, TensorInfo], *, exact: bool
    ) -> None:
        wanted = {state.name: state for state in states}
        error = describe_differences(
            what, "the state dict",
            {name: tuple(state.shape) for name, state in wanted.items()},
            {name: tuple(info.shape) for name, info in stored.items()}, exact=exact,
        )  # fmt: skip
        agree(self._world, error)
        # Each rank may ask for the moments of its own parameters only.
        for name in wanted if self._everywhere else stored:
            whole = self._tensor(name, stored[name])
            state = wanted.get(name)
            if state is None:
                continue
            parts = [part(whole, (0,) * whole.dim(), box) for box in state.boxes]
            state.write([one.to(state.dtype) for one in parts])

    def _tensor(self, name: str, info: TensorInfo) -> torch.Tensor:
        if self._everywhere:
            return self._tensors[name].detach()
        sent = torch.empty(info.shape, dtype=info.dtype, device=self._world.device)
        if self._world.is_main:
            sent.copy_(self._tensors[name].detach())
        dist.broadcast(sent, src=0)
        return sent


def _infos(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(tuple(one.shape), one.dtype) for name, one in tensors.items()}
