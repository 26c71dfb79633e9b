"""Layers of a model divided over the tensor-parallel ranks, as its plan says."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from unipar.engine import replace_forward
from unipar.world import World
from unipar_torch.async_tp import overlap
from unipar_torch.layer_checks import check_in_first_pass
from unipar_torch.layer_cuts import Activations, divided_forward, show_whole_parameters
from unipar_torch.loss_parallel import Logits, LossParallel, logits_of
from unipar_torch.sequences import divide_sequences, enter_before, holders_of
from unipar_torch.tensor_plan import STYLES, TensorPlan, blocks_by_name

Undo = Callable[[], None]


def divide_layers(
    module: nn.Module,
    plan: TensorPlan,
    world: World,
    *,
    sequence: bool,
    loss: LossParallel | None = None,
    plain: bool = False,
    overlapped: bool = False,
) -> list[Undo]:
    """Divide a model's layers over the ranks along ``tp``.

    Parameters become DTensors on their mesh, those of layers that stay whole replicated ones, so
    that FSDP, optimizers and norms see one mesh.

    Args:
        module: the whole model, with the same weights on every rank, or on the meta device.
        plan: which layers, and how.
        world: the joined processes.
        sequence: whether activations are divided by sequence between divided layers.
        loss: computes the loss from divided logits.
        plain: whether parameters that stay whole stay plain tensors, too, where each rank has all
            of their gradients. It saves what a DTensor takes to go through.
        overlapped: whether the compiler is to exchange sequences while products run.

    Returns:
        What takes back what can be.

    Raises:
        ConfigError: the sequence is to be divided, and the model has no blocks to do it in; or the
            loss, and the plan divides no logits.
    """
    mesh = world.mesh("tp")
    blocks = blocks_by_name(module)
    within = {part for block in blocks.values() for part in block.modules()}
    usual, inside = Activations(mesh), Activations(mesh, sequence=sequence)
    entered = Activations(mesh, sequence=sequence, entered=True)
    holders = holders_of(blocks, plan) if sequence else {}
    logits = {} if loss is None else dict.fromkeys(logits_of(plan, blocks), Logits(mesh, loss))
    concerned = {
        part
        for name, part in module.named_modules()
        if name in plan.styles or (sequence and part in within)
    }
    _distribute(module, plan, mesh, concerned if plain else None)
    undo: list[Undo] = [overlap(world)] if overlapped else []
    for name, part in module.named_modules():
        style = plan.styles.get(name)
        in_sequence = sequence and part in within
        if style is not None and STYLES[style].dims:
            activations = logits.get(name, inside if in_sequence else usual)
            if name.rpartition(".")[0] in holders:
                activations = entered
            undo.append(replace_forward(part, divided_forward(name, part, style, activations)))
        elif any(True for _ in part.named_parameters(recurse=False)):
            undo.append(show_whole_parameters(part, mesh, summed=part in concerned))
        elif isinstance(part, nn.TransformerEncoderLayer):
            # Without gradients it calls none of its layers, but for hooks (torch 2.13).
            undo.append(part.register_forward_pre_hook(lambda *_: None).remove)
    undo += [
        _divide_count(module.get_submodule(holder), key, mesh.size())
        for holder, keys in plan.counts.items()
        for key in keys
    ]
    for holder, layer in holders.items():
        undo.append(enter_before(holder, module.get_submodule(holder), layer, inside))
    undo += check_in_first_pass(module, plan, blocks, inside, world)
    if sequence:
        undo += divide_sequences(blocks, inside)
    return undo


def _distribute(
    module: nn.Module, plan: TensorPlan, mesh: DeviceMesh, concerned: Collection[nn.Module] | None
) -> None:
    """Put DTensors in the place of parameters; one that has two names stays one.

    Args:
        module: the whole model.
        plan: which layers are divided, and how.
        mesh: of the tensor-parallel ranks.
        concerned: modules whose parameters are to be DTensors, since ranks compute with parts of
            them, or parts of their gradients; ``None``: all.
    """
    held = [
        (name, part, key, parameter)
        for name, part in module.named_modules(remove_duplicate=False)
        for key, parameter in part._parameters.items()
        if parameter is not None
    ]
    dims: dict[int, int] = {}
    for name, _, key, parameter in held:
        if (dim := plan.dim(name, key)) is not None:
            dims[id(parameter)] = dim
    if concerned is not None:
        wanted = {id(parameter) for _, part, _, parameter in held if part in concerned}
        held = [one for one in held if id(one[3]) in wanted]
    made: dict[int, nn.Parameter] = {}
    for _, part, key, parameter in held:
        if id(parameter) not in made:
            placement = Shard(dims[id(parameter)]) if id(parameter) in dims else Replicate()
            # Every rank has the whole, so that nothing needs to be sent.
            divided = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            made[id(parameter)] = nn.Parameter(divided, requires_grad=parameter.requires_grad)
        part._parameters[key] = made[id(parameter)]


def _divide_count(holder: nn.Module, key: str, tp: int) -> Undo:
    count = getattr(holder, key)
    setattr(holder, key, count // tp)
    return lambda: setattr(holder, key, count)
