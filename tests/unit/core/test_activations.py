"""What is kept of a forward pass, where, and that gradients are those of keeping all of it here."""

from __future__ import annotations

import copy
import gc
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # pyright: ignore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn import functional

from unipar.engine import checkpoint_activations, offload_activations
from unipar.engine.checks import check_capabilities
from unipar.engine.offload import Copies, Offloaded
from unipar.engine.repeatable import explain_recomputed
from unipar.errors import ConfigError
from unipar.state import local_part
from unipar.strategy import Capabilities, Engine, EngineSpec, Strategy, StrategyOptions
from unipar.strategy.registry import resolve
from unipar.testing.pool import WorldPools
from unipar.world import Placement, World, join

WIDTH, HEADS, LENGTH = 32, 4, 16


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_attention, self.norm_feed = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = self.out(attended.transpose(1, 2).flatten(2))
        x = x + functional.dropout(attended, self.dropout, self.training)
        return x + self.down(functional.gelu(self.up(self.norm_feed(x))))


class Model(nn.Module):
    """Blocks; ``same`` makes all of them one."""

    def __init__(self, dropout: float = 0.0, same: bool = False) -> None:
        super().__init__()
        first = Block(dropout)
        self.blocks = nn.ModuleList([first, first if same else Block(dropout), Block(dropout)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def build(**options: Any) -> Model:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Model(**options)


def gradients(
    model: nn.Module, x: torch.Tensor, *, autocast: bool = False
) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(x)
    output.float().square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def recomputing(policy: str) -> Callable[[nn.Module], Any]:
    return lambda model: checkpoint_activations(model, policy)


def offloading(model: nn.Module) -> None:
    offload_activations(model, True)


def recomputing_and_offloading(model: nn.Module) -> None:
    checkpoint_activations(model, "full")
    offload_activations(model, True)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"same": True}], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "change",
    [recomputing("full"), recomputing("selective"), offloading, recomputing_and_offloading],
    ids=["full", "selective", "offload", "full and offload"],
)
def test_gradients_stay_the_same(
    x: torch.Tensor, change: Callable[[nn.Module], Any], autocast: bool, options: dict[str, Any]
) -> None:
    expected = gradients(build(**options), x, autocast=autocast)
    model = build(**options)
    change(model)
    found = gradients(model, x, autocast=autocast)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        # A weight with two uses: autocast sums in bf16 what comes back to one cast of it, and
        # selective checkpointing has it cast twice.
        bound = 2**-7 if autocast and "same" in options else 0.0
        assert (gradient - expected[name]).abs().max() <= bound * expected[name].abs().max(), name


def counted(model: nn.Module, x: torch.Tensor) -> dict[str, int]:
    """How often operations run in a forward and a backward pass, of which products count double."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, int] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.seen[func.name()] = self.seen.get(func.name(), 0) + 1
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        gradients(model, x)
    return counting.seen


def test_selective_repeats_what_is_cheap_and_nothing_else(x: torch.Tensor) -> None:
    seen = {}
    for policy in ("off", "full", "selective"):
        model = build()
        checkpoint_activations(model, policy)
        seen[policy] = counted(model, x)
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    for costly in ("aten::addmm", attention):
        assert seen["selective"][costly] == seen["off"][costly] < seen["full"][costly]
    for cheap in ("aten::native_layer_norm", "aten::gelu"):
        assert seen["off"][cheap] < seen["selective"][cheap] == seen["full"][cheap]


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_compiled_blocks_are_recomputed_likewise(x: torch.Tensor, policy: str) -> None:
    expected = gradients(build(), x)
    model = build()
    checkpoint_activations(model, policy)
    forward, backward = [], []

    def look(into: list[set[str]]) -> Any:
        def compiler(module: Any, inputs: Any) -> Any:
            calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
            into.append({one.name() for one in calls if isinstance(one, torch._ops.OpOverload)})
            return make_boxed_func(module.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=look(forward),
        bw_compiler=look(backward),
        partition_fn=min_cut_rematerialization_partition,
    )
    for block in model.blocks:
        block.compile(backend=backend)
    found = gradients(model, x)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert len(forward) == len(backward) > 0
    for seen in backward:
        # Under "full" the compiler may keep attention's output all the same.
        assert attention not in seen or policy == "full"
        assert "aten::native_layer_norm" in seen


@pytest.mark.parametrize("bias", [True, False])
def test_an_output_that_is_changed_in_place_is_no_wrong_gradient(
    x: torch.Tensor, bias: bool
) -> None:
    class InPlace(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Without a bias torch's own check does not see it.
            inner = functional.linear(x, self.up.weight, self.up.bias if bias else None)
            inner += 1
            return x + self.down(functional.relu(inner, inplace=True))

    model = nn.Sequential(nn.Sequential(*(InPlace(0.0) for _ in range(2))))
    checkpoint_activations(model, "selective")
    with pytest.raises(ConfigError, match=r"changes one in place \(aten::add_.*'full'"):
        gradients(model, x)


class Viewed(nn.Module):
    """Products without biases, one of which may be changed in place."""

    def __init__(self, *, change: bool) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        if self.change:
            inner += 1
        # Memory of this kind is used again and again.
        for _ in range(20):
            inner = inner + torch.empty_like(inner).fill_(1.0)
        return x + self.down(inner.relu())


def gradients_of_dtensors(placement: Placement, policy: str, change: bool) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (join(placement).size,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Viewed(change=change) for _ in range(2))))
    for module in model.modules():
        for name, one in [*module.named_parameters(recurse=False)]:
            module.register_parameter(
                name, nn.Parameter(distribute_tensor(one.detach(), mesh, [Replicate()]))
            )
    checkpoint_activations(model, policy)
    inputs = distribute_tensor(torch.ones(2, 3, 4), mesh, [Replicate()])
    model(inputs).square().sum().backward()
    return [local_part(one.grad) for one in model.parameters() if one.grad is not None]


def test_dtensors_are_kept_by_the_memory_of_their_parts(world_pool: WorldPools) -> None:
    pool = world_pool(1)
    (plain,), (found,) = (
        pool.run(gradients_of_dtensors, policy, False) for policy in ("off", "selective")
    )
    torch.testing.assert_close(found, plain)
    with pytest.raises(ConfigError, match="changes one in place"):
        pool.run(gradients_of_dtensors, "selective", True)


class Normed(nn.Module):
    """A block with statistics of batches, and a mask that stays as it is."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.norm(self.linear(x)) * self.mask).sin()


@pytest.mark.parametrize("policy", ["full", "selective", ("Normed",)], ids=str)
def test_a_block_that_changes_its_buffers_is_refused(
    x: torch.Tensor, policy: str | tuple[str, ...]
) -> None:
    model = nn.Sequential(nn.Sequential(Normed(), Normed()))
    checkpoint_activations(model, policy)
    model.eval()
    model(x[0]).square().mean().backward()
    model.train()
    with pytest.raises(ConfigError, match=r"Normed twice, .* 'norm\.running_mean'.*MyBlock"):
        model(x[0])


class Stateful(nn.Module):
    """A block that keeps something of its own from pass to pass; its kinds say what.

    Those of ``harmless`` change nothing that a second computation could see.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.kind, self.calls, self.scale = kind, 0, 1.0
        self.mean: torch.Tensor | None = None
        self.seen: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, scale = x.detach().mean((0, 1)), torch.ones(())
        if self.kind == "parameter":
            with torch.no_grad():
                scale = self.frozen.lerp_(mean, 0.2).clone()
        elif self.kind == "data":
            self.frozen.data = self.frozen.data.lerp(mean, 0.2)
            scale = self.frozen
        elif self.kind == "trained":
            self.linear.bias.data.add_(0.1)
        elif self.kind == "count":
            self.calls += 1
            scale = torch.tensor(self.calls / 10)
        elif self.kind == "number":
            self.scale = 0.9 * self.scale + 0.1 * float(mean[0])
            scale = torch.tensor(self.scale)
        elif self.kind == "tensor":
            scale = self.mean = mean if self.mean is None else self.mean.lerp(mean, 0.2)
        elif self.kind == "kept":
            self.mean, self.scale, self.calls = self.linear(x).detach(), float(mean[0]), len(x)
        elif self.kind == "settles":
            self.mean = mean * 0.0 + 1.0 if self.mean is None else self.mean
            self.calls = min(self.calls + 1, 1)
        return x + self.other(functional.gelu(self.linear(x)) * scale)


def repeat(model: nn.Module, x: torch.Tensor, passes: int = 3) -> list[torch.Tensor]:
    """Train without momentum; the weights."""
    for number in range(passes):
        model(x + number).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return list(model.parameters())


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("parameter", "changes its parameter 'frozen'"),
        ("data", "changes its parameter 'frozen'"),
        ("trained", r"changes its parameter 'linear\.bias'"),
        ("count", r"changes its attribute 'calls' \(1 after the forward pass, 2 after"),
        ("number", "changes its attribute 'scale'"),
        ("tensor", "changes its attribute 'mean'|does not compute what it did"),
    ],
)
def test_a_block_that_changes_what_it_computes_from_is_refused(
    x: torch.Tensor, policy: str, kind: str, says: str
) -> None:
    model = nn.Sequential(nn.Sequential(Stateful(kind), Stateful(kind)))
    checkpoint_activations(model, policy)
    with pytest.raises(ConfigError, match=f"computes Stateful twice, .*({says})"):
        repeat(model, x)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("kind", ["nothing", "kept", "settles"])
def test_a_block_that_keeps_what_it_has_computed_trains(
    x: torch.Tensor, policy: str, kind: str
) -> None:
    torch.manual_seed(0)
    block = Stateful(kind)
    # Once with other weights, and once the same: what it keeps is of another pass by then.
    model = nn.Sequential(nn.Sequential(block, Stateful(kind), block))
    expected = copy.deepcopy(model)
    checkpoint_activations(model, policy)
    for found, weight in zip(repeat(model, x), repeat(expected, x), strict=True):
        assert torch.equal(found, weight)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_an_attribute_that_is_given_another_value_meanwhile_is_refused(
    x: torch.Tensor, policy: str
) -> None:
    class Stepped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Stateful("nothing"), Stateful("nothing")])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in range(3):
                block: Any = self.blocks[0]
                block.calls = number
                x = block(x)
            return x

    model = Stepped()
    checkpoint_activations(model, policy)
    with pytest.raises(ConfigError, match=r"another value of its attribute 'calls' \(1 .* 2 "):
        repeat(model, x)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize(
    ("draw", "says"), [(random.random, "Python's random"), (numpy.random.rand, r"numpy\.random")]
)
def test_a_block_that_draws_other_numbers_the_second_time_is_refused(
    x: torch.Tensor, policy: str, draw: Any, says: str
) -> None:
    class Drawing(Writing):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return given + self.other(torch.tanh(self.linear(given)) * draw())

    model = Passing(lambda x: x)
    model.blocks = nn.ModuleList([Drawing(), Drawing()])
    checkpoint_activations(model, policy)
    with torch.no_grad():
        model(x)
    with pytest.raises(ConfigError, match=rf"Drawing twice, .* numbers of {says}.* by torch"):
        model(x)


class Holder:
    """An object with a tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.extra = x, {"depth": [0]}


class Writing(nn.Module):
    """A block that writes its result into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        x = given["x"] if isinstance(given, dict) else getattr(given, "x", given)
        y = self.other(torch.tanh(self.linear(x)))
        if isinstance(given, dict):
            given["x"] = x + y
        elif isinstance(given, Holder):
            given.x = x + y
        else:
            given = given.add_(y)
        return given


class Passing(nn.Module):
    def __init__(self, into: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.blocks, self.into = nn.ModuleList([Writing(), Writing()]), into

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.into(x * 1.0)
        for block in self.blocks:
            given = block(given)
        return given["x"] if isinstance(given, dict) else getattr(given, "x", given)


@pytest.mark.parametrize("policy", ["full", "selective", ("Writing",)], ids=str)
@pytest.mark.parametrize(
    ("into", "says"),
    [
        (lambda x: {"x": x}, r"argument 1\['x'\]"),
        (Holder, r"argument 1\.x"),
        (lambda x: x, "argument 1"),
    ],
    ids=["dict", "object", "tensor"],
)
def test_a_block_that_changes_its_arguments_is_refused(
    x: torch.Tensor, policy: Any, into: Any, says: str
) -> None:
    model = Passing(into)
    checkpoint_activations(model, policy)
    with torch.no_grad():
        model(x)
    with pytest.raises(ConfigError, match=rf"Writing twice, .* given \({says}\).*return"):
        model(x)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("more", [True, False])
def test_a_block_that_computes_something_else_the_second_time_is_explained(
    x: torch.Tensor, policy: str, more: bool
) -> None:
    taken: list[int] = []

    class Taking(Writing):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            taken.append(0)
            first = len(taken) <= 2
            y = given.sin().exp() if first is not more else given
            return given + self.other(torch.tanh(self.linear(y)))

    model = Passing(lambda x: x)
    model.blocks = nn.ModuleList([Taking(), Taking()])
    checkpoint_activations(model, policy)
    with pytest.raises((RuntimeError, ConfigError)) as caught:
        model(x.requires_grad_()).sum().backward()
    # Torch's, which a session explains.
    raised = caught.value
    words = str(raised) if isinstance(raised, ConfigError) else explain_recomputed(raised)
    assert re.search("twice.* does not compute what it did", words)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_of_transformers_fill_no_cache_where_they_are_computed_twice(
    policy: str, attention: str
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": attention}
    config = transformers.LlamaConfig(**sizes, **heads)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    expected = copy.deepcopy(model)
    tokens = torch.randint(64, (2, 12))
    expected(input_ids=tokens, labels=tokens).loss.backward()
    undo = checkpoint_activations(model, policy)
    model(input_ids=tokens, labels=tokens).loss.backward()
    for found, weight in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, weight.grad, rtol=1e-6, atol=1e-8)
    with pytest.raises(ConfigError, match=r"LlamaDecoderLayer twice, .*use_cache=False"):
        model(input_ids=tokens, labels=tokens, use_cache=True)
    undo()
    assert model.config.use_cache is True


def test_a_compiled_block_updates_its_buffers_once(x: torch.Tensor) -> None:
    model = nn.Sequential(nn.Sequential(Normed(), Normed()))
    expected = copy.deepcopy(model)
    checkpoint_activations(model, "full")
    for block in model[0]:  # pyright: ignore
        block.compile(backend="aot_eager_decomp_partition")
    for one in (expected, model):
        one(x[0]).square().mean().backward()
    for name, buffer in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], buffer, rtol=1e-5, atol=1e-6)


# -- on the host -----------------------------------------------------------------------------------


@pytest.fixture
def on_host() -> Iterator[Callable[[], list[Offloaded]]]:
    gc.collect()
    assert not live()
    yield live
    gc.collect()
    assert not live()


def live() -> list[Offloaded]:
    return [one for one in gc.get_objects() if type(one) is Offloaded]


def test_each_storage_goes_once_and_small_ones_and_weights_stay(
    x: torch.Tensor, on_host: Callable[[], list[Offloaded]]
) -> None:
    model = build()
    offload_activations(model, True)
    output = model(x)
    rows = x.numel() // WIDTH
    sizes = sorted(one.nbytes // (4 * rows) for one in on_host())
    # Of each block: its input and the second norm's; both norms' outputs; queries, keys and values
    # as one; attention's output, twice for it is copied into rows; before and after gelu.
    widths = sorted(3 * [WIDTH, WIDTH, WIDTH, WIDTH, 3 * WIDTH, WIDTH, 4 * WIDTH, 4 * WIDTH])
    assert [size for size in sizes if size >= WIDTH] == widths
    places = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[torch.Tensor] = []
    saved_by(output, kept)
    weights = [one for one in kept if one.untyped_storage().data_ptr() in places]
    assert len(weights) >= 3 * 4
    output.square().mean().backward()
    del output


def saved_by(output: torch.Tensor, found: list[torch.Tensor]) -> None:
    """The saved tensors of a graph."""
    seen, left = set(), [output.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += [
            value
            for name in dir(node)
            if name.startswith("_saved_") and isinstance(value := getattr(node, name), torch.Tensor)
        ]
        left += [before for before, _ in node.next_functions]


def test_views_come_back_as_views_of_one_storage(on_host: Callable[[], list[Offloaded]]) -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = x.chunk(2, dim=-1)
            return left.t() @ right

    model = Halves()
    offload_activations(model, True)
    given = torch.randn(64, 64, requires_grad=True)
    output = model(given * 1.0)
    assert len(on_host()) == 1
    kept: list[torch.Tensor] = []
    saved_by(output, kept)
    mine = [one for one in kept if one.shape == (64, 32) or one.shape == (32, 64)]
    assert len({one.untyped_storage().data_ptr() for one in mine}) == 1
    assert {one.stride() for one in mine} <= {(64, 1), (1, 64)}
    output.sum().backward()
    assert given.grad is not None
    rows = given.detach()[:, 32:].sum(1, keepdim=True)
    torch.testing.assert_close(given.grad[:, :32], rows.expand(64, 32))
    del output, kept, mine


@pytest.mark.parametrize("operation", [lambda y: y * y, torch.exp], ids=["input", "output"])
@pytest.mark.parametrize("size", [512, 16], ids=["moved", "too small to move"])
@pytest.mark.parametrize("offload", [False, True])
def test_what_is_changed_in_place_afterwards_is_an_error_of_autograds(
    on_host: Callable[[], list[Offloaded]], offload: bool, size: int, operation: Any
) -> None:
    class Changing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1.0
            made = operation(y)
            with torch.no_grad():
                (made if operation is torch.exp else y)[:8].add_(1.0)
            return made * 1.0

    model = Changing()
    offload_activations(model, offload)
    output = model(torch.ones(size, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"inplace operation: .* version 1; expected version 0"):
        output.sum().backward()
    del output


def test_what_is_changed_in_place_before_is_none(on_host: Callable[[], list[Offloaded]]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64))
    x = torch.randn(8, 64)
    expected = gradients(copy.deepcopy(model), x)
    offload_activations(model, True)
    for name, gradient in gradients(model, x).items():
        assert torch.equal(gradient, expected[name])


@pytest.mark.parametrize("whole", [False, True])
def test_memory_that_is_written_part_by_part_is_saved_as_it_was(
    on_host: Callable[[], list[Offloaded]], whole: bool
) -> None:
    class Filling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            space = torch.zeros(2, 512)
            total = torch.zeros(512)
            for number, row in enumerate(space):
                if whole:
                    # As a kernel does it: by the address.
                    place = torch.from_numpy(space.numpy())[number]
                else:
                    place = row = space.data[number]
                place.fill_(number + 2.0)
                total = total + x * row
            return total

    model = Filling()
    offload_activations(model, True)
    given = torch.ones(512, requires_grad=True)
    model(given).sum().backward()
    assert torch.equal(given.grad, torch.full((512,), 5.0))  # pyright: ignore


def test_what_is_saved_elsewhere_than_where_it_is_computed_stays(
    x: torch.Tensor, on_host: Callable[[], list[Offloaded]]
) -> None:
    model = build()
    for block in model.blocks:
        # Wherever the parameters wait.
        block.register_parameter("waits", nn.Parameter(torch.empty(1, device="meta")))
        block._parameters = dict(reversed(block._parameters.items()))  # pyright: ignore
    offload_activations(model, True, torch.device("cpu"))
    output = model(x)
    assert on_host()
    del output
    model = build()
    offload_activations(model, True, torch.device("cuda", 0))
    output = model(x)
    assert not on_host()
    del output


def test_what_autocast_makes_of_weights_stays(
    x: torch.Tensor, on_host: Callable[[], list[Offloaded]]
) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(2)))
    offload_activations(model, True)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.randn(4, 256))
    assert on_host()
    assert max(one.nbytes for one in on_host()) < 256 * 256
    del output


def test_copies_under_way_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(torch.device("cpu"))
    waited: list[Any] = []
    monkeypatch.setattr(copies, "wait", waited.append)
    sizes = [40, 20, 30, 200]
    left = []
    for number, size in enumerate(sizes):
        copies._leaving.append((number, torch.empty(size, dtype=torch.uint8)))  # pyright: ignore
        copies._let_go(60, 1)
        left.append(len(copies._leaving))
    assert left == [1, 2, 2, 1]
    assert waited == [0, 1, 2]
    copies._let_go(0)
    assert waited == [0, 1, 2, 3]


def test_a_graph_that_is_kept_can_be_gone_through_again(
    x: torch.Tensor, on_host: Callable[[], list[Offloaded]]
) -> None:
    model = build()
    offload_activations(model, True)
    output = model(x).square().mean()
    output.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert on_host()
    output.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name])
    del output


def test_nothing_is_moved_without_gradients(
    x: torch.Tensor, on_host: Callable[[], list[Offloaded]]
) -> None:
    model = build()
    offload_activations(model, True)
    with torch.no_grad():
        output = model(x)
    assert not on_host()
    del output


def test_what_was_done_is_undone(x: torch.Tensor) -> None:
    model = build()
    undo = [checkpoint_activations(model, "selective"), offload_activations(build(), True)]
    assert "forward" in vars(model.blocks[0])
    for one in reversed(undo):
        one()
    assert not any("forward" in vars(module) for module in model.modules())


# -- asked for -------------------------------------------------------------------------------------


class Least(Strategy):
    """A strategy that claims nothing."""

    name = "least"
    options_type = StrategyOptions

    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset({"fp32"}), frozenset({"cpu"}))

    def prepare(self, spec: EngineSpec, world: World) -> Engine:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"activation_checkpointing": "selective"}, "not supported. Use 'full'"),
        ({"activation_offload": True}, "not supported. Use False"),
    ],
)
def test_a_strategy_that_claims_nothing_refuses(asked: dict[str, Any], says: str) -> None:
    spec = EngineSpec(nn.Linear(1, 1), **asked)
    with pytest.raises(ConfigError, match=rf"'least': activation.* is {says}"):
        check_capabilities(Least(StrategyOptions()), spec, Placement())


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"compile": True}, "torch.compile .* Use one of the two"),
        ({"activation_checkpointing": "selective"}, "would stay on the device. Use 'full'"),
    ],
)
def test_what_does_not_go_together_is_refused(asked: dict[str, Any], says: str) -> None:
    spec = EngineSpec(nn.Linear(1, 1), activation_offload=True, **asked)
    with pytest.raises(ConfigError, match=rf"activation_offload=True .*{says}"):
        check_capabilities(resolve("single"), spec, Placement())


def test_a_word_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'Block' is no word .*'selective'.*\('Block',\)"):
        checkpoint_activations(build(), "Block")
    with pytest.raises(ConfigError, match="='selective' recomputes repeated blocks"):
        checkpoint_activations(nn.Linear(1, 1), "selective")
