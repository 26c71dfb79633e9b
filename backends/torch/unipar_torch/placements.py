"""Where each parameter of a model goes on a grid of ranks, in words."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from unipar.layout import Layout
from unipar_torch.expert_plan import ExpertPlan, shard_dim
from unipar_torch.tensor_plan import TensorPlan


def placements(
    module: nn.Module,
    layout: Layout,
    plan: TensorPlan | None,
    experts: ExpertPlan | None = None,
) -> dict[str, str]:
    """Say of each parameter how it is divided, and the shape of the largest part of a rank.

    Args:
        module: the model, on the meta device too.
        layout: how the processes are arranged.
        plan: which layers are divided over ``tp``; ``None`` where none are.
        experts: which modules' experts are divided over ``ep``; ``None`` where none are.
    """
    named = {id(p): name for name, p in module.named_parameters()}
    dims: dict[int, int] = {}
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        layer, _, key = name.rpartition(".")
        dim = None if plan is None else plan.dim(layer, key)
        if dim is not None:
            dims[id(parameter)] = dim
        if named[id(parameter)] != name:
            aliases.setdefault(id(parameter), []).append(name)
    found: dict[str, str] = {}
    for name, parameter in module.named_parameters():
        shape, dim = list(parameter.shape), dims.get(id(parameter))
        said = [f"{shape}"]
        if dim is not None:
            shape[dim] //= layout.tp
            said.append(f"dim {dim} over tp={layout.tp}")
        elif layout.tp > 1:
            said.append(f"whole on tp={layout.tp}")
        if experts is not None and experts.divides(name):
            shape[0] //= layout.ep
            said.append(f"dim 0 over ep={layout.ep}")
            if layout.efsdp > 1:
                at = shard_dim(shape, layout.efsdp)
                shape[at] //= layout.efsdp
                said.append(
                    f"dim {at} over the {layout.efsdp} others of dp_shard={layout.dp_shard}"
                )
        elif layout.fsdp > 1 and shape:
            shape[0] = -(-shape[0] // layout.fsdp)
            over = {"dp_shard": layout.dp_shard, "cp": layout.cp}
            named_sizes = [f"{axis}={size}" for axis, size in over.items() if size > 1]
            said.append(f"dim 0 over {' * '.join(named_sizes)}")
        if layout.dp_replicate > 1:
            said.append(f"copied dp_replicate={layout.dp_replicate} times")
        text = f"{', '.join(said)}: {shape} of a rank"
        if others := aliases.get(id(parameter)):
            text += f"; also {', '.join(others)}"
        found[name] = text
    return found


def remarks(plan: TensorPlan) -> Iterator[tuple[str, str]]:
    """Say what else a plan does, and does not."""
    yield "layers divided over tp", plan.source
    for holder, keys in plan.counts.items():
        yield f"{holder or 'the model'}: divided too", ", ".join(keys)
    for note in plan.notes:
        yield "left whole", note
