"""A plan held against numbers: in the first pass one block of each kind runs whole and divided.

In the mode in which it is called, in fp32, without dropout, on what the block was given, cut to a
few samples: its output, and the gradients of its inputs and of each of its parameters. What differs
is refused by name. Parameters that begin at nothing have other values meanwhile, for behind them
nothing is seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from unipar.engine import replace_forward
from unipar.engine.sharded_places import lending_places
from unipar.engine.trials import Draws, digest, host_generators, trial
from unipar.errors import ConfigError, first_few
from unipar.world import World
from unipar_torch.layer_cuts import Activations, is_gathered
from unipar_torch.sequences import hidden_of, mapped, with_hidden
from unipar_torch.tensor_plan import STYLES, TensorPlan

Undo = Callable[[], None]
TOLERANCE = 1e-3
"""The largest difference that is rounding in fp32, relative to the largest element of a tensor.
What plans get wrong is off by a factor."""
_SAMPLES = 2
_VECTORS = 16
"""Samples of one position: statistics of two of them are those of no more than a sign."""
_NOTHING = 1e-2
"""Below this, what comes before a parameter is lost beside what passes it by: biases, gates and
last layers of branches that begin at zero, factors of 1e-6."""


def check_in_first_pass(
    model: nn.Module,
    plan: TensorPlan,
    blocks: Mapping[str, nn.Module],
    activations: Activations,
    world: World,
) -> list[Undo]:
    """Have a block of each kind compared with itself undivided, when it is first called.

    Args:
        model: the whole model, divided.
        plan: how.
        blocks: its repeated blocks.
        activations: how they go between ranks within blocks.
        world: the joined processes.

    Raises:
        ConfigError: layers are divided outside of blocks in a way that has to be checked, and
            cannot be by itself.
    """
    opened = [name for name, style in plan.styles.items() if not STYLES[style].is_closed]
    checked: dict[Any, tuple[str, nn.Module]] = {}
    for name, block in blocks.items():
        own = [layer for layer in opened if f"{layer}.".startswith(f"{name}.")]
        opened = [layer for layer in opened if layer not in set(own)]
        styles = tuple((layer[len(name) :], plan.styles[layer]) for layer in own)
        kind = type(block), styles, _settings(block)
        if own:
            checked.setdefault(kind, (name, block))
    if opened:
        around = _around(model, opened)
        if any(block in set(around[1].modules()) for block in blocks.values()):
            raise ConfigError(
                f"mesh: {plan.source} divides {first_few(opened)} outside of the model's repeated "
                "blocks, and that cannot be checked in parts. Divide them so that their inputs and "
                "outputs stay whole (colwise_gather_output, rowwise_split_input), or leave them "
                "out."
            )
        checked[""] = around
    return [
        _Check(name, block, model, plan, activations, world).install()
        for name, block in checked.values()
    ]


def _around(model: nn.Module, layers: list[str]) -> tuple[str, nn.Module]:
    """The smallest module that holds all layers."""
    parts = [name.split(".")[:-1] for name in layers]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    name = ".".join(shared)
    return name, model.get_submodule(name)


def _settings(block: nn.Module) -> tuple[Any, ...]:
    """What blocks of one class may differ in, but for their places among others."""
    shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
    plain = tuple(
        (key, value)
        for module in block.modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | float | str | None)
        or (isinstance(value, int) and not any(word in key for word in ("idx", "index", "number")))
    )
    return shapes, plain


class _Check:
    """Compares one block with itself, once in each mode; and again once gradients are asked for."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        model: nn.Module,
        plan: TensorPlan,
        activations: Activations,
        world: World,
    ) -> None:
        self._name, self._block, self._model, self._plan = name, block, model, plan
        # FSDP gives it another.
        self._kind = type(block).__name__
        self._activations, self._world = activations, world
        # In training or not, with gradients or without.
        self._done: set[tuple[bool, bool]] = set()

    def install(self) -> Undo:
        block = self._block
        self._forward = block.forward
        compare: Any = torch.compiler.disable(self._compare)

        def checked(*args: Any, **kwargs: Any) -> Any:
            gradients = torch.is_grad_enabled()
            mode = block.training, gradients
            # Evaluation comes after training at times when not all ranks have samples.
            known = mode in self._done or (not gradients and any(done[1] for done in self._done))
            if not known:
                self._done.add(mode)
                compare(args, kwargs)
            return self._forward(*args, **kwargs)

        return replace_forward(block, checked)

    def _compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        problem, drawn = self._problem(args, kwargs)
        stream = self._world.layout.stream(self._world.rank)
        state = None if drawn is None else (stream, drawn)
        # Other stages of a pipeline have other blocks, and come to them at other times.
        axis = "tp" if self._world.layout.pp > 1 else None
        found = self._world.gather((problem, state), axis)
        states = {state for _, state in found if state is not None}
        if len(states) > len({stream for stream, _ in states}):
            raise ConfigError(
                f"mesh: '{self._name or 'the model'}' ({self._kind}) draws from Python's random or "
                "from numpy.random in its forward, and ranks that hold parts of its layers do not "
                "draw the same numbers there. Draw from torch, as ranks along tp do alike; or let "
                "all of them draw as often before."
            )
        problem = next(filter(None, (said for said, _ in found)), None)
        if problem:
            layers = [
                n for n in self._plan.styles if n.startswith(f"{self._name}.") or not self._name
            ]
            raise ConfigError(
                f"mesh: dividing '{self._name or 'the model'}' ({self._kind}) as "
                f"{self._plan.source} says changes what it computes: {problem}. Divided are "
                f"{', '.join(f'{n} ({self._plan.styles[n]})' for n in layers)}. Leave out of "
                "plan={…} what does not bear it: layers between which something is computed over "
                "the whole width, or with numbers of heads that are written down elsewhere. "
                "Parameters between divided layers are 'replicated_with_grad_allreduce'."
            )

    def _problem(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str | None]:
        """What differs; and the state of the host's generators, empty if the block lets them be.

        ``None`` if that is not known.
        """
        generators = digest(host_generators())
        with _apart(self._world.device), _gathered(self._block), lending_places():
            try:
                divided, draws = self._run(args, kwargs, whole=False)
            except (ConfigError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                return f"divided, it raises {type(error).__name__} ({str(error)[:160]})", None
            whole, expected_draws = self._run(args, kwargs, whole=True)
        drawn = generators if draws.on_host else ""
        largest = max((t.abs().max().item() for t in whole.values() if t.numel()), default=0.0)
        for what, expected in whole.items():
            if said := _difference(divided.get(what), expected, TOLERANCE * largest):
                if draws.torch != expected_draws.torch:
                    said += (
                        " (it draws other random numbers where it is divided: by "
                        "torch.nn.functional.dropout, which is left out here, it may)"
                    )
                return f"{what} {said}", drawn
        return "", drawn

    def _run(self, args: Any, kwargs: Any, *, whole: bool) -> tuple[dict[str, torch.Tensor], Draws]:
        """Outputs and gradients, whole, by what they are; and the random numbers drawn for them."""
        sequence = self._activations.outside.is_shard()
        hidden = hidden_of(args, kwargs)
        args, kwargs = _in_fp32(args, kwargs, _rows(hidden))
        hidden = hidden_of(args, kwargs)
        takes = isinstance(hidden, torch.Tensor) and hidden.is_floating_point()
        if takes and sequence and whole:
            hidden = self._activations.gather_sequence(hidden)
        if takes:
            hidden = hidden.detach().requires_grad_()
            args, kwargs = with_hidden(args, kwargs, hidden)
        with (
            _replaced(self._block, self._plan, self._name, whole, self._activations) as held,
            trial(self._model, self._world.device) as draws,
        ):
            output = self._forward(*args, **kwargs)
            if sequence and not whole:
                output = mapped(output, self._activations.gather_sequence)
            given = [t for t in tree_leaves(output) if _is_float(t)]
            seen = {f"output {number}": t.detach() for number, t in enumerate(given)}
            wanted = {name: p for name, p in held.items() if p.requires_grad}
            if takes:
                wanted["its input"] = hidden
            others = [t for t in tree_leaves((args, kwargs)) if t is not hidden and _is_float(t)]
            for number, one in enumerate(others, 1):
                if one.requires_grad:
                    wanted[f"what else it is given (tensor {number})"] = one
            if not wanted:
                return seen, draws
            total = sum((t * _factors(t)).sum() for t in given)
            if not isinstance(total, torch.Tensor) or not total.requires_grad:
                return seen, draws
            gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
            for name, gradient in zip(wanted, gradients, strict=True):
                if gradient is None:
                    continue
                if isinstance(gradient, DTensor):
                    gradient = gradient.redistribute(
                        placements=wanted[name].placements
                    ).full_tensor()
                elif takes and name == "its input" and sequence and not whole:
                    gradient = self._activations.gather_sequence(gradient)
                seen[f"the gradient of {name}"] = gradient.detach()
        return seen, draws


@contextlib.contextmanager
def _gathered(block: nn.Module) -> Iterator[None]:
    """Gather the parts of a block that FSDP gathers by themselves, and let it do nothing in them.

    It would put its own parameters in the place of copies, and reduce these gradients as a step's.
    Its hooks are known by their handles (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_state.py,
    ``init``, and nn/modules/module.py).
    """
    hooks: list[tuple[Any, dict[Any, Any]]] = []
    parts = [m for m in block.modules() if isinstance(m, FSDPModule) and m is not block]
    try:
        for part in parts:
            part.unshard()
            state: Any = part._get_fsdp_state()
            for of_module, handle in (
                (part._forward_pre_hooks, state._pre_forward_hook_handle),
                (part._forward_hooks, state._post_forward_hook_handle),
            ):
                hooks.append((of_module, dict(of_module)))
                of_module.pop(handle.id, None)
        yield
    finally:
        for of_module, before in hooks:
            of_module.clear()
            of_module.update(before)
        for part in parts:
            part.reshard()


def _rows(hidden: Any) -> int | None:
    return hidden.shape[0] if isinstance(hidden, torch.Tensor) and hidden.ndim else None


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _in_fp32(args: Any, kwargs: Any, rows: int | None) -> tuple[Any, Any]:
    """Arguments by themselves, of a few samples."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.ndim]
    few = (
        rows is not None
        and all(t.shape[0] in (rows, 1) or t.ndim == 1 for t in tensors)
        and not any(size == rows for t in tensors for size in t.shape[1:])
    )
    samples = _VECTORS if max((t.ndim for t in tensors), default=0) < 3 else _SAMPLES

    def own(value: Any) -> Any:
        if hasattr(value, "get_seq_length"):
            # A cache of transformers', which would keep what these runs put into it.
            return None
        if not isinstance(value, torch.Tensor):
            return value
        learned, value = value.requires_grad, value.detach()
        if few and value.ndim and value.shape[0] == rows:
            value = value[:samples]
        # The block may change it.
        value = value.clone()
        return value.float().requires_grad_(learned) if value.is_floating_point() else value

    return tree_map(own, (args, kwargs))


def _factors(output: torch.Tensor) -> torch.Tensor:
    """Numbers that tell elements apart, the same on every rank."""
    places = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
    return torch.cos(places).view(output.shape)


@contextlib.contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Let no mode that surrounds a run change it, or count it."""
    with (
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        # Recomputation counts what a pass saves; a selective one, each operation of it
        # (torch 2.13, utils/_python_dispatch.py and utils/checkpoint.py).
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        _disable_current_modes(),
    ):
        yield


@contextlib.contextmanager
def _replaced(
    block: nn.Module, plan: TensorPlan, name: str, whole: bool, activations: Activations
) -> Iterator[dict[str, Any]]:
    """Put copies in fp32 in the place of a block's parameters: whole ones, or divided as they are.

    Yields:
        The copies, by name.
    """
    kept: list[tuple[nn.Module, str, Any]] = []
    copies: dict[int, Any] = {}
    named: dict[str, Any] = {}
    counts: list[tuple[nn.Module, str, int]] = []
    tp = activations.mesh.size()
    try:
        for part_name, part in block.named_modules():
            for key, parameter in list(part._parameters.items()):
                if parameter is None or (
                    isinstance(parameter, DTensor) and not is_gathered(parameter)
                ):
                    continue
                kept.append((part, key, parameter))
                if id(parameter) not in copies:
                    own: Any = parameter.detach().float()
                    whole_value = own.full_tensor() if isinstance(own, DTensor) else own.clone()
                    value: Any = visible(whole_value, len(copies))
                    if isinstance(own, DTensor) and not whole:
                        value = distribute_tensor(
                            value, own.device_mesh, own.placements, src_data_rank=None
                        )
                    copies[id(parameter)] = value.detach().requires_grad_(parameter.requires_grad)
                    named[f"{part_name}.{key}".lstrip(".")] = copies[id(parameter)]
                part._parameters[key] = copies[id(parameter)]
        for holder, keys in plan.counts.items():
            if whole and (holder == name or holder.startswith(f"{name}.") or not name):
                module = block.get_submodule(holder[len(name) :].lstrip("."))
                for key in keys:
                    counts.append((module, key, getattr(module, key)))
                    setattr(module, key, getattr(module, key) * tp)
        yield named
    finally:
        for part, key, parameter in kept:
            part._parameters[key] = parameter
        for module, key, value in counts:
            setattr(module, key, value)


def visible(value: torch.Tensor, number: int) -> torch.Tensor:
    """Values for a parameter that has none to speak of, the same on every rank."""
    if not value.numel() or value.abs().max() >= _NOTHING:
        return value
    spread = value.shape[-1] ** -0.5 if value.ndim > 1 else 0.1
    generator = torch.Generator().manual_seed(number)
    return (spread * torch.randn(value.shape, generator=generator)).to(value)


def _difference(found: torch.Tensor | None, expected: torch.Tensor, floor: float) -> str:
    """How a tensor is off; a size below ``floor`` is small beside others', and may be rounding."""
    if found is None:
        return "is there only where it is whole"
    if found.shape != expected.shape:
        return f"has the shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    if not expected.numel() or not torch.isfinite(expected).all():
        # What is no number shows nothing, and is the run's to find.
        return ""
    scale = max(expected.abs().max().item(), floor)
    apart = (found - expected).abs().max().item()
    return "" if apart <= TOLERANCE * scale else f"is {apart / scale:.1%} off"
