"""Checkpoints that DeepSpeed itself has saved, so that a project can go on under unipar."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unipar.checkpoint.boxes import whole
from unipar.errors import CheckpointError
from unipar.state import EngineState, GroupState, LocalState, TensorState
from unipar.utils.json_state import to_json
from unipar_deepspeed import contents, files

_NOT_FOR_TORCH = frozenset({"params", "step", "bias_correction"})
"""What DeepSpeed's own optimizers keep in a group, and PyTorch's do not."""

logger = logging.getLogger(__name__)

_OF_DEEPSPEED = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes",
        "shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd",
        "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples",
        "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions",
        "universal_checkpoint_info", "num_experts", "ds_config", "ds_version",
    }
)  # fmt: skip
"""What a file of the model has beside a script's ``client_state`` (0.19.8, runtime/engine.py)."""
_MASTER = "master"
_HALF = (torch.bfloat16, torch.float16)


class Piece(NamedTuple):
    """Consecutive elements of a parameter in one rank's file.

    Attributes:
        rank: whose file.
        flat: number of the flat partition.
        start: the first of them in that partition.
        numel: how many they are.
    """

    rank: int
    flat: int
    start: int
    numel: int


@dataclass(frozen=True, eq=False)
class _Pieced(TensorState):
    """A tensor in pieces; they are put together when it is read."""

    pieces: tuple[torch.Tensor, ...]

    def read(self) -> Sequence[torch.Tensor]:
        count = torch.Size(self.shape).numel()
        return (torch.cat(self.pieces).narrow(0, 0, count).view(self.shape).to(self.dtype),)

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        raise CheckpointError(f"'{self.name}' is being converted and cannot be written to.")


def read(path: Path) -> EngineState:
    """Describe a checkpoint of DeepSpeed's; tensors stay on the disk until they are read.

    Args:
        path: what ``save_checkpoint`` was given, or one of the steps in it.

    Returns:
        the weights in fp32; and from stage 1 on, where the files say whose they are, the
        optimizer's moments and groups.

    Raises:
        ConfigError: there is no checkpoint of DeepSpeed's.
        CheckpointError: a file is damaged, missing, or holds what cannot be converted.
    """
    directory = files.step_directory(path)
    models = [contents.model(files.load(file), file) for file in files.of_model(directory)]
    optimizers = [
        contents.optimizer(files.load(file), file) for file in files.of_optimizer(directory)
    ]
    if not models:
        raise CheckpointError(f"{directory} lacks the file of its first rank.")
    saved = _Saved(directory, models, optimizers)
    state = EngineState(list(saved.weights()), aliases=saved.aliases())
    state.extra["num_steps"] = saved.model.global_steps
    if optimizers:
        state.optimizer = list(saved.moments())
        state.groups = saved.groups()
        scheduler = saved.model.lr_scheduler
        if _is_of_torch(scheduler):
            state.extra["lr_scheduler"] = to_json(scheduler, "lr_scheduler")
    return state


def keep_beside(path: Path, converted: Path) -> None:
    """Keep what a script that loads by DeepSpeed's face finds beside what trains.

    Args:
        path: what :func:`read` was given.
        converted: the checkpoint that was made of it.

    Raises:
        CheckpointError: ``client_state`` holds objects.
    """
    from unipar.compat.deepspeed_kept import convert_kept

    each: list[dict[str, Any]] = []
    schedules = half = False
    for file in files.of_model(files.step_directory(path)):
        held = files.load(file)
        model = contents.model(held, file)
        scheduler = model.lr_scheduler
        schedules |= scheduler is not None and not _is_of_torch(scheduler)
        half |= any(value.dtype is torch.float16 for value in model.module.values())
        each.append(
            {
                "client_state": {k: v for k, v in held.items() if k not in _OF_DEEPSPEED},
                "lr_scheduler": scheduler,
                "global_steps": model.global_steps,
                "global_samples": model.global_samples,
                "skipped_steps": model.skipped_steps,
            }
        )
    convert_kept(converted, each)
    left = [
        *(["the state of DeepSpeed's own scheduler"] if schedules else ()),
        *(["client_state"] if any(one["client_state"] for one in each) else ()),
    ]
    if left:
        logger.warning(
            "%s: engine.load_checkpoint of unipar.compat.deepspeed alone finds %s in it. fit and "
            "Session go on with the optimizer's learning rates as they were saved, and begin a "
            "scheduler that is given to them anew.",
            converted, " and ".join(left),
        )  # fmt: skip
    if half:
        logger.warning("%s: the loss scale of fp16 is not taken over, and begins anew.", converted)


def _is_of_torch(scheduler: Any) -> bool:
    """Whether a state is of a scheduler of PyTorch's: DeepSpeed's own count otherwise."""
    return isinstance(scheduler, Mapping) and "last_epoch" in scheduler


class _Saved:
    """The files of one step.

    Args:
        directory: where they are.
        models: the contents of the model's files, by rank at stage 3, else of the only one.
        optimizers: those of the optimizer's, by rank; empty at stage 0.
    """

    def __init__(
        self,
        directory: Path,
        models: list[contents.Model],
        optimizers: list[contents.Partitioned | contents.Sharded],
    ) -> None:
        self.directory, self.model, self._models = directory, models[0], models
        self._optimizers = optimizers
        self._is_stage_3 = bool(optimizers) and isinstance(optimizers[0], contents.Sharded)
        self._shapes = (self.model.param_shapes or []) if optimizers else []
        self._shape_of = {name: shape for group in self._shapes for name, shape in group.items()}
        self._check_ranks()
        self._check_precision()
        self._flats = [
            one.fp32_flat_groups
            if isinstance(one, contents.Sharded)
            else one.single_partition_of_fp32_groups
            for one in optimizers
        ]
        self._check_groups()
        self._pieces = self._sharded() if self._is_stage_3 else self._partitioned()
        for name, pieces in self._pieces.items():
            wanted = torch.Size(self._shape_of[name]).numel()
            if sum(piece.numel for piece in pieces) < wanted:
                raise self._error(f"holds only a part of '{name}'")

    def weights(self) -> Iterator[TensorState]:
        """Parameters and buffers, in the model's order."""
        aliases = self.aliases()
        frozen = self.model.frozen_param_shapes or {}
        for name, value in self.model.module.items():
            if name in aliases:
                continue
            if name in self._pieces:
                yield self._pieced(name, name, _MASTER)
            elif self._is_stage_3 and name in frozen:
                yield self._frozen(name, frozen[name])
            elif not self._is_stage_3 or name in self.model.buffer_names:
                yield LocalState.of(name, _in_fp32(value))
            # What is left at stage 3 is a further name of a tied weight, of which nothing is kept.

    def _frozen(self, name: str, shape: tuple[int, ...]) -> _Pieced:
        held = [(model.frozen_param_fragments or {}).get(name) for model in self._models]
        parts = tuple(part.reshape(-1) for part in held if part is not None)
        numel = torch.Size(shape).numel()
        if len(parts) != len(held) or sum(part.numel() for part in parts) < numel:
            raise self._error(f"holds only a part of '{name}'")
        return _Pieced(name, shape, torch.float32, (whole(shape),), parts)

    def aliases(self) -> dict[str, str]:
        """Further names of tied weights."""
        if self._shapes:
            aliases = self.model.shared_params or {}
            for alias, name in aliases.items():
                known = name in self.model.module and name not in aliases
                if not known or alias in self._shape_of:
                    raise self._error(f"has '{alias}' for '{name}', which is no other weight")
            return aliases
        first: dict[tuple[Any, ...], str] = {}
        aliases: dict[str, str] = {}
        for name, value in self.model.module.items():
            place = (value.data_ptr(), tuple(value.shape), value.stride())
            if not value.numel() or first.setdefault(place, name) == name:
                continue
            aliases[name] = first[place]
        return aliases

    def moments(self) -> Iterator[TensorState]:
        """The optimizer's state of each trained parameter."""
        steps = [group.get("step") for group in self._base(0).param_groups]
        for number, group in enumerate(self._shapes):
            for name in group:
                yield from self._moments_of(name, steps[number])

    def _moments_of(self, name: str, step: Any) -> Iterator[TensorState]:
        if not self._pieces[name]:
            return
        first = self._pieces[name][0]
        held = self._base(first.rank).state.get(first.flat, {})
        for key, value in held.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                yield self._pieced(f"{name}.{key}", name, key)
            elif key == "step":
                step = value
            else:
                raise self._error(f"holds optimizer state '{key}' that is no tensor")
        if held and step is not None:
            # A number with DeepSpeed's own optimizers, a tensor with PyTorch's.
            count = contents.number(step)
            if count is None or count < 0:
                raise self._error(f"holds {str(step)[:40]} for the optimizer's step of '{name}'")
            yield LocalState.of(f"{name}.step", torch.tensor(count))

    def groups(self) -> tuple[GroupState, ...]:
        """The optimizer's groups, by the names of their parameters."""
        return tuple(
            GroupState(
                tuple(names),
                {
                    key: to_json(value, f"optimizer hyperparameter '{key}'")
                    for key, value in group.items()
                    if key not in _NOT_FOR_TORCH
                },
            )
            for names, group in zip(self._shapes, self._base(0).param_groups, strict=True)
        )

    def _pieced(self, full: str, name: str, key: str) -> _Pieced:
        shape = self._shape_of[name]
        parts = tuple(
            self._flat(piece, key).narrow(0, piece.start, piece.numel)
            for piece in self._pieces[name]
        )
        return _Pieced(full, shape, torch.float32, (whole(shape),), parts)

    def _flat(self, piece: Piece, key: str) -> torch.Tensor:
        master = self._flats[piece.rank][piece.flat]
        if key == _MASTER:
            return master
        moment = self._base(piece.rank).state.get(piece.flat, {}).get(key)
        # The last rank's masters are without the padding at their end, its moments are with it.
        padding = self._padding(piece)
        if (
            not isinstance(moment, torch.Tensor)
            or moment.dim() != 1
            or not master.numel() <= moment.numel() <= master.numel() + padding
            or not moment.is_floating_point()
        ):
            raise self._error(
                f"holds optimizer state '{key}' that is not of the size of its partition"
            )
        return moment

    def _padding(self, piece: Piece) -> int:
        """How many elements more than weights the state of a piece's partition may have."""
        own = self._optimizers[piece.rank]
        told = own.group_paddings if isinstance(own, contents.Partitioned) else None
        if told is not None and piece.flat < len(told):
            return told[piece.flat]
        flats = self._flats
        return flats[0][piece.flat].numel() - flats[piece.rank][piece.flat].numel()

    def _base(self, rank: int) -> contents.Base:
        """PyTorch's state dict of the optimizer over flat partitions."""
        own = self._optimizers[rank]
        if isinstance(own, contents.Sharded):
            return own.optimizer_state_dict
        if not isinstance(own.base_optimizer_state, contents.Base):
            raise self._error("was saved with elastic_checkpoint, which has to be off for this")
        return own.base_optimizer_state

    def _partitioned(self) -> dict[str, tuple[Piece, ...]]:
        """Stages 1 and 2: a group's parameters end to end, cut into equal parts.

        What the files map to whom (``param_slice_mappings``) is wrong under
        ``round_robin_gradients`` in DeepSpeed 0.19: ``_link_all_hp_params`` of
        ``zero/stage_1_and_2.py`` counts in the order from before the parameters were dealt out.
        """
        pieces: dict[str, tuple[Piece, ...]] = {}
        for flat, group in enumerate(self._shapes):
            lengths = [flats[flat].numel() for flats in self._flats]
            if any(length != lengths[0] for length in lengths[:-1]) or lengths[-1] > lengths[0]:
                raise self._error(f"has partitions of {lengths} elements, which are not alike")
            paddings = getattr(self._optimizers[0], "param_alignment_paddings", None)
            gaps = paddings[flat] if paddings and flat < len(paddings) else [0] * len(group)
            if len(gaps) != len(group):
                raise self._error(f"has {len(gaps)} paddings for {len(group)} parameters")
            begin = 0
            for (name, shape), gap in zip(group.items(), gaps, strict=True):
                end = begin + torch.Size(shape).numel()
                held: list[Piece] = []
                for rank, length in enumerate(lengths):
                    # The last part is shorter by the padding that is left out of it.
                    offset = rank * lengths[0]
                    start, stop = max(begin, offset), min(end, offset + length)
                    if start < stop:
                        held.append(Piece(rank, flat, start - offset, stop - start))
                pieces[name] = tuple(held)
                begin = end + gap
        return pieces

    def _sharded(self) -> dict[str, tuple[Piece, ...]]:
        """Stage 3: an equal part of each parameter, in flat partitions filled one after another."""
        sizes = [flat.numel() for flat in self._flats[0]]
        if any([flat.numel() for flat in flats] != sizes for flats in self._flats):
            raise self._error("has partitions that are not alike on every rank")
        pieces: dict[str, tuple[Piece, ...]] = {}
        flat = used = 0
        for name in (name for group in self._shapes for name in group):
            numel = -(-torch.Size(self._shape_of[name]).numel() // len(self._optimizers))
            if flat < len(sizes) and used == sizes[flat]:
                flat, used = flat + 1, 0
            if flat == len(sizes) or used + numel > sizes[flat]:
                raise self._error("has parameters across several of its partitions")
            pieces[name] = tuple(
                Piece(rank, flat, used, numel) for rank in range(len(self._optimizers))
            )
            used += numel
        return pieces

    def _check_ranks(self) -> None:
        for optimizer in self._optimizers[:1]:
            count = optimizer.partition_count
            wanted = max(count, default=0) if isinstance(count, list) else count
            if wanted != len(self._optimizers):
                raise self._error(
                    f"was saved by {wanted} ranks, and has {len(self._optimizers)} files of "
                    "optimizer state"
                )
        if self._is_stage_3 and len(self._models) != len(self._optimizers):
            raise self._error(f"has {len(self._models)} files of weights for that many ranks")

    def _check_groups(self) -> None:
        """Hold that the files tell of the same groups, partitions and weights."""
        if len({type(one) for one in self._optimizers}) > 1:
            raise self._error("has files of stage 3 and of another")
        if sum(map(len, self._shapes)) != len(self._shape_of):
            raise self._error("has a parameter in two groups of param_shapes")
        if self._optimizers and not self._shapes:
            raise self._error("has no param_shapes, which tell whose the optimizer's state is")
        for rank, flats in enumerate(self._flats):
            groups = len(self._base(rank).param_groups)
            if groups != len(self._shapes) or (not self._is_stage_3 and groups != len(flats)):
                raise self._error(
                    f"has {len(self._shapes)} groups in param_shapes, and {groups} of rank {rank}"
                )
        for name, shape in self._shape_of.items():
            stored = self.model.module.get(name)
            if stored is None:
                raise self._error(f"has no '{name}' in module, and has it in param_shapes")
            if not self._is_stage_3 and tuple(stored.shape) != shape:
                raise self._error(
                    f"has '{name}' as {list(stored.shape)} in module, and as {list(shape)} in "
                    "param_shapes"
                )

    def _check_precision(self) -> None:
        half = [name for name, value in self.model.module.items() if value.dtype in _HALF]
        if half and not self._optimizers:
            raise self._error(
                f"has '{half[0]}' in half precision, and its fp32 original, which training goes on "
                "from, under no name: stage 0 saves so. With DeepSpeed, load it under stage 1 by "
                "load_checkpoint(…, load_optimizer_states=False) and save it there: training goes "
                "on from rounded weights then, and the optimizer starts over"
            )

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.directory} {what}.")


def _in_fp32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in _HALF else value
