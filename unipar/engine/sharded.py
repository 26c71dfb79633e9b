"""Parameters that FSDP2 has made shards of, used where they are not gathered.

They are DTensors outside of the model's forward pass. Most operations that mix them with plain
tensors are errors of torch's; those that are none leave gradients that FSDP does not know of, or
give numbers that are of one rank's shard alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from unipar.engine.precision import keep_scale_on_host
from unipar.engine.replaced import replacement_of
from unipar.engine.sharded_draws import draw_for_whole
from unipar.engine.sharded_places import keep_in_place
from unipar.errors import ConfigError, first_few
from unipar.utils.torch_versions import reset_passes, sharded_groups

# torch 2.13, distributed/tensor/_dispatch.py, try_replicate_spec_for_scalar_tensor.
_MIXED = "got mixed torch.Tensor and DTensor"
# torch 2.13, distributed/tensor/_sharding_prop.py, propagate_op_sharding_non_cached.
_UNKNOWN = "does not have a sharding strategy registered"
# torch 2.13, distributed/tensor/_dispatch.py, _propagate_op_sharding_dispatch_slow_path, with what
# is the matter before it, such as a view across rows.
_NO_LAYOUT = "Sharding propagation failed"
# torch 2.13, csrc/autograd/variable.cpp, handle_view_on_rebase: FSDP gives modules such views.
_CHANGED = "is a view and is being modified inplace"
# torch 2.13, aten/src/ATen/native/Resize.h, checkInBoundsForStorage.
_FREED = "are out of bounds for storage of size 0"

_ELSEWHERE = "Under ddp and zero2, which leave weights whole, it runs as it stands."
_OF_LOSS = (
    "For a loss: leave the parameters out of it. An L2 penalty c·Σp² is weight_decay=2c of SGD or "
    "Adam (but not of AdamW); any other is computed in the forward of the module that holds them, "
    "where they are whole, and returned with its output. For a moving average or a target network: "
    "build it once the strategy has divided the model (after prepare; behind DDP's or Horovod's "
    "calls after the first forward pass), as [p.detach().clone() for p in model.parameters()], "
    "which is divided alike, so that it can be averaged with the parameters and copied into them."
)
_OF_NUMBER = (
    "For a number that is logged, such as a norm, or the whole tensor: x.detach().full_tensor() in "
    "place of x, which every rank has to call."
)
_REMEDIES = f"{_ELSEWHERE} {_OF_LOSS} {_OF_NUMBER}"


def explain_sharded(error: BaseException, strategy: str) -> str:
    """Explain an error of torch's that comes of sharding; empty for any other error."""
    said = str(error)
    if isinstance(error, RuntimeError) and _CHANGED in said:
        return (
            "a tensor was changed in place in a way that autograd does not allow. Under strategy "
            f"'{strategy}' that is so of each tensor with a gradient that a block (or another "
            "module that is sharded by itself) is given, and of its views. Compute a new one, and "
            "return it: x = x + y in place of x += y or x.add_(y); memory = torch.cat(…) or "
            f"torch.where(…) in place of memory[…] = y. PyTorch says: {said}"
        )
    if isinstance(error, RuntimeError) and _FREED in said:
        return (
            "a backward pass came to parameters of the model that were freed after the forward "
            f"pass. Under strategy '{strategy}' they are gathered again when the pass comes to "
            "what a block (or another module that is sharded by itself) returned, or wrote into "
            "what it was given. Return all that the loss depends on; what a block leaves in an "
            f"attribute or a global is not seen. PyTorch says: {said}"
        )
    if (isinstance(error, NotImplementedError) and _UNKNOWN in said) or (
        isinstance(error, RuntimeError) and _NO_LAYOUT in said and _MIXED not in said
    ):
        return (
            f"an operation was given a tensor that is divided among ranks, as parameters are under "
            f"strategy '{strategy}' outside of the model's forward pass, and so is what is made of "
            f"them. {_REMEDIES} PyTorch says: {said}"
        )
    if _MIXED not in said:
        return ""
    if called := _called_by_itself(frame for frame, _ in walk_tb(error.__traceback__)):
        return _part_alone(called)
    return (
        f"a parameter of the model was used outside of the model's forward pass, together with "
        f"plain tensors. Under strategy '{strategy}' it is there a DTensor, of which this rank "
        f"holds a shard, and torch cannot compute with both. So it is with what is made of one, "
        f"as by weight.new_zeros(…): use torch.zeros(…, dtype=weight.dtype, device=weight.device). "
        f"{_REMEDIES}"
    )


def _called_by_itself(frames: Iterable[FrameType]) -> nn.Module | None:
    """The part of a model that a script calls, where it does not call the whole model.

    Args:
        frames: of what was called, the innermost last.
    """
    found: nn.Module | None = None
    for frame in frames:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if not isinstance(module, nn.Module):
            continue
        known = ((name, _SHARDS.get(one)) for name, one in module.named_parameters())
        name, whole = next(((name, shard[0]) for name, shard in known if shard), ("", ""))
        # Parameters have the same names in the model, and longer ones in what it is a part of.
        if whole and not whole.endswith(f".{name}"):
            return None
        found = found or (module if whole else None)
    return found


def _part_alone(part: nn.Module) -> str:
    strategy = next(_SHARDS[one][1] for one in part.parameters() if one in _SHARDS)
    return (
        f"a {type(part).__name__}, which is a part of the model, was called by itself, outside of "
        f"the model's forward pass. Under strategy '{strategy}' the parameters are gathered when "
        "the whole model is called; elsewhere this rank holds a shard of each. Have the model's "
        "own forward call the part, as by an argument, model(x, generate=True), and call the model "
        "as often on every rank; or use strategy='zero2' or 'ddp', which keep all parameters on "
        "every rank."
    )


def refuse_uses_outside(module: nn.Module, strategy: str) -> list[Callable[[], None]]:
    """Refuse gradients of shards, and numbers that are of one rank's shard.

    Random numbers for shards are drawn as for whole parameters from here on, and FSDP has what is
    put in their places, or it is refused.

    A gradient that comes to a shard itself, not to what FSDP has gathered, would miss the weighting
    of this rank's samples, which only FSDP's reduction makes the global batch's.

    Returns:
        What takes that back. Numbers of shards, and gradients that are asked for of some of them,
        are refused as long as there are any.
    """
    # A private table, which torch's own loss_parallel changes, too (torch 2.13,
    # distributed/tensor/parallel/loss.py).
    dispatcher: Any = DTensor._op_dispatcher  # pyright: ignore[reportAttributeAccessIssue]
    dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _number_of
    # f"{weight.norm():.6f}" would be an error of Python's, which names no cause.
    DTensor.__format__ = _formatted
    # Whoever has imported torch.autograd.grad by its name goes through this, too. It has two names
    # (torch 2.13, compiler/__init__.py, which replaces both for as long as it traces).
    torch.autograd._engine_run_backward = _run_to_no_shard  # pyright: ignore
    torch.autograd.graph._engine_run_backward = _run_to_no_shard
    divided = [(name, p) for name, p in module.named_parameters() if isinstance(p, DTensor)]
    _SHARDS.update({parameter: (name, strategy) for name, parameter in divided})
    draw_for_whole(parameter for _, parameter in divided)
    hooks = [
        parameter.register_hook(partial(_refuse, name, strategy)).remove
        for name, parameter in divided
        if parameter.requires_grad
    ]
    return [*hooks, *keep_in_place(module, strategy)]


def _formatted(self: Any, format_spec: str) -> str:
    if self.dim():
        return torch.Tensor.__format__(self, format_spec)
    return format(self.item(), format_spec)


def _number_of(op: Any, args: Any, kwargs: Any) -> Any:
    """What ``item()`` gives, which torch takes from this rank's part, whatever others have.

    torch 2.13, distributed/tensor/_sharding_prop.py, propagate_op_sharding_non_cached.
    """
    one: DTensor = args[0]
    if one.device_mesh.size() > 1 and not all(p.is_replicate() for p in one.placements):
        frames = [frame for frame, _ in walk_stack(inspect.currentframe())]
        if called := _called_by_itself(reversed(frames)):
            raise ConfigError(_part_alone(called))
        raise ConfigError(
            "a number was read (item(), float(), an if) of a tensor that is divided among ranks, "
            f"of which this one has {tuple(map(str, one.placements))}: it would be of this rank's "
            f"part. {_OF_NUMBER} {_ELSEWHERE} {_OF_LOSS}"
        )
    return op(one.to_local())


_SHARDS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters of which this rank has a shard, with their names and the strategy's."""
_run_backward: Any = torch.autograd.graph._engine_run_backward


@wraps(_run_backward)
def _run_to_no_shard(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse ``torch.autograd.grad`` over shards, which no graph leads to.

    It would be an error without a name, or ``None`` with ``allow_unused=True``; and
    ``backward(inputs=…)`` would leave no gradient.
    """
    # torch 2.8 to 2.13: gradients of the outputs, retain_graph, create_graph, inputs, …
    for one in map(replacement_of, args[3]):
        if isinstance(one, torch.Tensor) and (found := _SHARDS.get(one)) is not None:
            name, strategy = found
            asked = "backward(inputs=…)" if kwargs.get("accumulate_grad") else "torch.autograd.grad"
            raise ConfigError(
                f"{asked} was asked for the gradient of parameter '{name}'. Under "
                f"strategy '{strategy}' this rank holds a shard of it, and models compute with "
                "what is gathered of all ranks. Gradients of a model's inputs can be taken; for "
                "those of its parameters, as in MAML or a penalty on their norm, use "
                "strategy='ddp'."
            )
    return _run_backward(outputs, *args, **kwargs)


def discard_gradients(root: Any, strategy: str) -> None:
    """Drop the gradients that FSDP has not reduced, and what an error in a pass has left gathered.

    Args:
        root: the outermost module that ``fully_shard`` was called for.
        strategy: as the user calls it.

    Raises:
        ConfigError: the error came from within a forward pass, after which this torch cannot go on.
    """
    # Importing it takes as long as torch, and only what shards needs it.
    from torch.distributed.fsdp import FSDPModule

    reset_passes(root, strategy)
    for part in root.modules():
        if not isinstance(part, FSDPModule):
            continue
        # torch 2.13 leaves what was accumulated in the whole parameters, and adds the next step's
        # to it (distributed/fsdp/_fully_shard/_fsdp_param_group.py, _reset_iter_state); 2.15 does
        # not.
        for group in sharded_groups(part):
            for parameter in group.fsdp_params:
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    whole.grad = None
                if parameter.unsharded_accumulated_grad is not None:
                    parameter.unsharded_accumulated_grad = None


def refuse_unreduced(groups: Sequence[Any], strategy: str) -> None:
    """Refuse to step with gradients that FSDP has not reduced, since it saw no backward pass.

    Args:
        groups: of parameters that FSDP gathers together.
        strategy: as the user calls it.

    Raises:
        ConfigError: there are any.
    """
    for group in groups:
        for parameter in group.fsdp_params:
            # As in discard_gradients().
            whole = getattr(parameter, "_unsharded_param", None)
            left = parameter.unsharded_accumulated_grad
            if left is not None or (whole is not None and whole.grad is not None):
                raise ConfigError(
                    f"{strategy}: the gradients of {_names_of(group)} were computed, and not "
                    "summed over ranks: FSDP sees a backward pass by the tensors that a module "
                    "gives, and the loss came from others: compute it from what model(…) returns. "
                    "Or the last micro-batch did not use them, which needs "
                    "reduce_scatter_every_microbatch=true."
                )


def _names_of(group: Any) -> str:
    names = [parameter._param_fqn or "a parameter" for parameter in group.fsdp_params]
    return first_few(names)


def total_norm_of_shards(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """2-norm of the whole gradient whose shards, DTensors, these are. Collective.

    They may be on several meshes (experts beside dense layers).
    """
    # DTensor's own norm of several is reduced one by one, and along one dimension after another.
    alike: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    known: dict[tuple[int, Any], tuple[Any, ...]] = {}
    # With gradients each part would be a node of a graph.
    with torch.no_grad():
        for one in gradients:
            groups: tuple[Any, ...] = ()
            if isinstance(one, DTensor):
                mesh, placements = one.device_mesh, one.placements
                if any(placement.is_partial() for placement in placements):
                    one = one.full_tensor()
                else:
                    key = (id(mesh), placements)
                    if key not in known:
                        divided = [dim for dim, p in enumerate(placements) if not p.is_replicate()]
                        known[key] = tuple(map(mesh.get_group, divided))
                    groups, one = known[key], one.to_local()
            alike.setdefault(groups, []).append(one)
        norms = [_whole_norm(shards, groups) for groups, shards in alike.items()]
        return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)


def _whole_norm(shards: list[torch.Tensor], groups: Iterable[Any]) -> torch.Tensor:
    """The norm of tensors of which the ranks of some groups have shards. Collective."""
    norm = nn.utils.get_total_norm(shards)
    squared = norm.double().square()
    for group in groups:
        dist.all_reduce(squared, group=group)
    return squared.sqrt().to(norm.dtype)


class MeshScaler(GradScaler):
    """Lets all ranks of a mesh know of an overflow that one of them has seen.

    Torch's does so over the ranks among which the first gradient is divided, and others may be
    divided among more (torch 2.13, distributed/tensor/_dispatch.py, found_inf_reduce_handler).
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh.device_type)
        self._groups = mesh.get_all_groups()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            for group in self._groups:
                dist.all_reduce(found, dist.ReduceOp.MAX, group)


def scaler_of(parameters: Iterable[torch.Tensor], device: torch.device) -> GradScaler:
    """Return the loss scaler for fp16.

    Args:
        parameters: those of the model, which may be divided, not all alike, and offloaded.
        device: where the model computes.
    """
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    kinds = {(p.device_mesh, tuple(one.is_replicate() for one in p.placements)) for p in sharded}
    if len(kinds) < 2:
        scaler = GradScaler(device.type)
    else:
        scaler = MeshScaler(max((p.device_mesh for p in sharded), key=lambda mesh: mesh.ndim))
    if any(p.device.type != device.type for p in sharded):
        keep_scale_on_host(scaler)
    return scaler


def _refuse(name: str, strategy: str, gradient: Any) -> NoReturn:
    raise ConfigError(
        f"the loss depends on parameter '{name}' other than through the model's forward pass. "
        f"Under strategy '{strategy}' this rank holds a shard of it there, whose gradient would "
        f"not be the global batch's. {_REMEDIES}"
    )
