"""Models cut into stages on two ranks: models of several kinds, schedules, wrong cuts, resuming."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from test_mesh import SIZES, llama, olmo2, phi3, predict, qwen3
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint as recomputed

import unipar
from unipar import checkpoint
from unipar.data.batch import Batch, MicroBatch
from unipar.engine.checks import check_capabilities
from unipar.errors import ConfigError
from unipar.strategy import Strategy
from unipar.testing import models
from unipar.testing.cases import ALL
from unipar.testing.cases.numbers import PLAIN, TOKENS
from unipar.testing.cases.shapes import DECODER
from unipar.testing.kit import Kit, Target
from unipar.testing.pool import WorldPools
from unipar.testing.scenarios import NUM_SAMPLES, sgd
from unipar.utils.torch_versions import splits_backward_passes
from unipar.world import Placement
from unipar_torch.mesh import MeshStrategy
from unipar_torch.mesh_options import MeshOptions
from unipar_torch.stage_schedule import _shapes

CASES = {case.name: case for case in ALL}


def made(**options: Any) -> Callable[[], Strategy]:
    return lambda: MeshStrategy(MeshOptions(**{"pp": 2, **options}))


def kit_of(world_pool: WorldPools, size: int = 2, **options: Any) -> Kit:
    return Kit(Target(f"mesh with {options}", made(**options)), size, world_pool)


# -- the conformance kit's cases that cover most ---------------------------------------------------


COVERING = (
    "equals_the_reference",
    "clips",
    "weighs_tokens",
    "keeps_tied_weights_tied",
    "keeps_buffers",
    "evaluates_every_sample_once",
    "skips_a_loss_that_is_not_finite",
    "resumes",
    "keeps_to_bf16",
    "skips_overflow",
)


@pytest.mark.parametrize("name", COVERING)
def test_it_is_the_same_run(name: str, world_pool: WorldPools) -> None:
    CASES[name].check(kit_of(world_pool))


# -- schedules -------------------------------------------------------------------------------------


class Deep(models.Network):
    """A block for each of four stages, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block(9) for _ in range(5))


class DeepTied(models.Tied):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block(9) for _ in range(4))


NEEDS_SPLIT = pytest.mark.skipif(
    not splits_backward_passes(), reason="torch 2.13 splits backward passes rightly"
)
SPLITTING = [pytest.param(name, marks=NEEDS_SPLIT) for name in ("zero-bubble", "dualpipev")]
SCHEDULES = ("gpipe", "interleaved", *SPLITTING)
"""Another than the default."""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_makes_the_same_run(schedule: str, world_pool: WorldPools) -> None:
    """Global batches of five micro-batches, which divide by nothing, and a last one of one."""
    scenarios = [
        replace(PLAIN, model=Deep, accumulation=5, num_steps=7, max_grad_norm=0.5, optimizer=sgd),
        replace(TOKENS, model=DeepTied, accumulation=4, num_steps=5),
    ]
    kit = kit_of(world_pool, schedule=schedule)
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario)


def test_activations_are_recomputed_on_each_stage(world_pool: WorldPools) -> None:
    scenario = replace(PLAIN, activation_checkpointing="full", accumulation=4, num_steps=5)
    kit = kit_of(world_pool)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


# -- models ----------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=12, n_embd=16, n_head=4, n_layer=2, n_positions=16, n_inner=24,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        )
    )  # fmt: skip


def mistral() -> nn.Module:
    import transformers

    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES))


def gemma2() -> nn.Module:
    """It scales its embeddings, and has layers of two kinds in turn."""
    import transformers

    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=4))


MODELS = [
    llama,
    *(
        pytest.param(m, marks=pytest.mark.thorough)
        for m in (gpt2, qwen3, olmo2, phi3, mistral, gemma2)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_models_of_transformers_train_the_same_run(
    model: Callable[[], nn.Module], world_pool: WorldPools
) -> None:
    scenario = replace(
        DECODER, model=model, terms=predict, optimizer=sgd, accumulation=2, num_steps=5
    )
    kit = kit_of(world_pool)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


def own_losses(placement: Placement, strategy: str) -> list[float]:
    """Of a model that computes its loss, on rows of which some are not to be predicted at first."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(
            llama(), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
        )
        loss = unipar.Objective.of_model(engine.module)
        found = []
        for _ in range(3):
            ids = torch.randint(1, 12, (4, 2, 8), generator=draw)
            labels = ids.clone()
            labels[:2, :, :3] = -100
            parts = [
                MicroBatch({"input_ids": ids[one], "labels": labels[one]}, 2) for one in range(4)
            ]
            found.append(engine.train_step(Batch(tuple(parts), 8), loss).loss)
        return found


@pytest.mark.slow
def test_labels_that_a_models_own_loss_shifts_are_counted_as_in_the_whole(
    world_pool: WorldPools,
) -> None:
    whole = world_pool(1).run(own_losses, "single")[0]
    for found in world_pool(2).run(own_losses, "mesh:pp=2"):
        assert found == pytest.approx(whole, rel=1e-6)


# -- cuts ------------------------------------------------------------------------------------------


class Skipping(models.Network):
    """The head sees what the blocks began with, which the last stage does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(x + first)


class Counting(models.Network):
    """Blocks go by how many there were before them, as they themselves note."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Weighed(9) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, seen = self.inward(x), []
        for block in self.blocks:
            x = block(x, seen)
        return self.outward(x)


class Weighed(models.Block):
    def forward(self, x: torch.Tensor, seen: list[int]) -> torch.Tensor:  # pyright: ignore
        seen.append(len(seen))
        return super().forward(x / len(seen))


class Residual(models.Network):
    """Two tensors go from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adding(9) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.inward(x)
        for block in self.blocks:
            x = block(x, first)
        return self.outward(x)


class Adding(models.Block):
    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return super().forward(x + first)


class Twice(models.Network):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.outward(x)


class HeadFirst(models.Network):
    """Its modules stand in another order than that in which they run."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.outward = nn.Linear(9, models.CLASSES)
        self.inward = nn.Linear(models.FEATURES, 9)
        self.blocks = nn.ModuleList(models.Block(9) for _ in range(2))


class InPlace(models.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1.0
        return super().forward(x)


class InPlaces(models.Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlace(9) for _ in range(2))


class CountingCalls(models.Network):
    """It counts its calls in a Python number."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 20)


class Remembering(models.Network):
    """It adds what the last batch had."""

    last: float | torch.Tensor = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self.last = self.last, x.mean()
        return super().forward(x) + before


class AddingOutside(models.Network):
    """The sum that blocks usually have in their own forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x) + 0 * x
        return self.outward(x)


WRONG = {
    Skipping: r"stage 1 \(blocks\.1\) needs inward\.\w+, inward\.\w+, which other stages have",
    Counting: r"cannot begin before 'blocks\.1': .* arguments of another structure",
    Residual: r"stage 1 \(blocks\.1\) needs inward",
    Twice: r"calls 'blocks\.0' out of order, or twice",
    HeadFirst: r"needs outward\.\w+, outward\.\w+, which other stages have",
    InPlaces: r"changes in place what its first block is given .*Write x = x \+ …",
    CountingCalls: r"counts its calls or keeps something .*register_buffer",
    Remembering: r"counts its calls or keeps something .*register_buffer",
    AddingOutside: r"what blocks of earlier stages give, .*do that in the block's own forward",
    models.Clamped: r"changes weights in its forward|written-to tensor",
}


@pytest.mark.parametrize("model", WRONG)
def test_a_cut_that_changes_the_model_is_refused_in_the_first_pass(
    model: type[nn.Module], world_pool: WorldPools
) -> None:
    with pytest.raises((ConfigError, RuntimeError), match=WRONG[model]):
        kit_of(world_pool).train(replace(PLAIN, model=model, num_steps=1))


class Noised(models.Network):
    """The loss is over noise that the first block is given, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x[:, :1])
        x = self.inward(x) + noise
        for block in self.blocks:
            x = block(x)
        return self.outward(x) - noise


class Dropped(models.Network):
    """What is drawn before the blocks goes into the first one alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.inward(x), 0.5)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.5)
        return self.outward(x)


class Scaling(models.Network):
    """Changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(1.5).add_(0.25))


class Costly(models.Block):
    """A block that leaves a cost behind, as routers do."""

    cost = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.cost = x.square().mean()
        return x


class Costs(models.Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Costly(9) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + sum(block.cost for block in self.blocks)  # pyright: ignore


class CostsAside(models.Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Costly(9) for _ in range(2))


class Shuffled(models.Network):
    """Blocks are given an order that is another on each stage."""

    integers = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Ordered(9) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.arange(9).roll(torch.distributed.get_rank())
        x = self.inward(x)
        for block in self.blocks:
            x = block(x, order if self.integers else order.float())
        return self.outward(x)


class ShuffledFloats(Shuffled):
    integers = False


class Ordered(models.Block):
    def forward(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return super().forward(x[:, order.long()])


@dataclass
class Wrapped:
    logits: torch.Tensor


class SkippingWrapped(Skipping):
    def forward(self, x: torch.Tensor) -> Any:
        return Wrapped(super().forward(x))


class Slotted:
    __slots__ = ("logits",)


class SkippingSlotted(Skipping):
    def forward(self, x: torch.Tensor) -> Any:
        output = Slotted()
        output.logits = super().forward(x)
        return output


def loss_of(output: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(getattr(output, "logits", output), batch["y"])


def of_one_session(
    placement: Placement, make: Callable[[], nn.Module], term: str, evaluate: bool = False
) -> Any:
    """A step's loss, or what evaluation gives."""
    torch.manual_seed(3)
    model = make()

    def loss(output: Any, batch: Any) -> torch.Tensor:
        extra = {
            "costs": lambda model: sum(block.cost for block in model.blocks),
            **WEIGHTS,
            "last": lambda model: sum(p.square().sum() for p in model.blocks[1].parameters()),
        }.get(term, lambda model: 0.0)
        return loss_of(output, batch) + extra(model)

    objective = unipar.Objective(lambda batch: (batch["x"].clone(),), loss)
    with unipar.Session("mesh:pp=2", device="cpu", placement=placement) as session:
        engine = session.prepare(
            model, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
        )
        if not evaluate:
            return engine.train_step(batch_of(0), objective).loss
        tally = engine.eval_batch(batch_of(0), objective)
        if term == "later":
            model.late = True  # pyright: ignore
            tally = engine.eval_batch(batch_of(0), objective)
        return float(tally.total / tally.count)


class Late(models.Network):
    """Sees what the blocks began with when it is told to."""

    late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(x + first if self.late else x)


SEEN = {
    "noise that the head sees": (Noised, "", r"stage 1 .* depends on random numbers"),
    "costs in forward": (Costs, "", r"depends on '?(blocks\.1|what the stage before)"),
    "costs in the loss": (CostsAside, "costs", r"depends on '?(blocks\.1|what the stage before)"),
    "a penalty": (models.Network, "last", r"depends on 'blocks\.1\.\w+.*weight_decay"),
    "an order": (Shuffled, "", r"cannot begin before 'blocks\.1'.* is given another"),
    "an order of floats": (ShuffledFloats, "", r"cannot begin before .* is given another"),
    "a dataclass": (SkippingWrapped, "", r"stage 1 \(blocks\.1\) needs inward"),
    "an object with slots": (SkippingSlotted, "", r"gives a Slotted, .* Have it give tensors"),
}


WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "all": lambda model: sum(p.square().sum() for p in model.parameters()),
    "without a gradient": lambda model: sum(p.detach().abs().sum() for p in model.parameters()),
    "by name": lambda model: sum(p.sum() for n, p in model.named_parameters() if "inward" in n),
    "one": lambda model: model.inward.weight.sum(),
    "of a block": lambda model: torch.stack([p.norm() for p in model.blocks[0].parameters()]).sum(),
    "to freeze": lambda model: [setattr(p, "requires_grad", False) for p in model.parameters()],
    "a state": lambda model: sum(value.sum() for value in model.state_dict().values()),
    "together": lambda model: nn.utils.parameters_to_vector(model.parameters()).norm(),
}
"""What a loss function may make of the weights of a model that it knows as a variable."""


@pytest.mark.parametrize(
    ("term", "evaluate"), [*((term, False) for term in WEIGHTS), ("all", True)]
)
def test_a_loss_that_uses_weights_of_other_stages_is_refused(
    term: str, evaluate: bool, world_pool: WorldPools
) -> None:
    said = r"the loss function uses '(inward|blocks\.0)\..*weight_decay; .* strategy='ddp'"
    with pytest.raises(ConfigError, match=said):
        world_pool(2).run(of_one_session, models.Network, term, evaluate)


def counting_weights(placement: Placement, strategy: Any) -> tuple[list[float], list[Any]]:
    """The losses of some steps, and what their loss function has found of the weights."""
    torch.manual_seed(3)
    model, found = Deep(), []
    model.inward.requires_grad_(False)
    model.blocks[1].norm = model.blocks[0].norm

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        listed = [(n, tuple(p.shape), p.requires_grad) for n, p in model.named_parameters()]
        found[:] = [*listed, *model.state_dict(keep_vars=True)]
        size = sum(p.numel() for p in model.parameters() if isinstance(p, nn.Parameter))
        assert size == sum(p.data.nelement() for p in model.parameters())
        found.extend((len(p), p.itemsize, p.get_device()) for p in model.parameters())
        found.extend(tuple(value.shape) for value in model.state_dict().values())
        assert next(model.parameters()).device == output.device
        return OBJECTIVE.loss(output, batch) * size / 100

    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(
            model, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.01)
        )
        objective = unipar.Objective(OBJECTIVE.inputs, loss)
        losses = [engine.train_step(batch_of(step), objective).loss for step in range(3)]
        return losses, found


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_loss_may_ask_what_weights_there_are(schedule: str, world_pool: WorldPools) -> None:
    losses, found = world_pool(1).run(counting_weights, "single")[0]
    strategy = {"name": "mesh", "pp": 2, "schedule": schedule}
    here, listed = world_pool(2).run(counting_weights, strategy)[1]
    assert here == pytest.approx(losses, rel=1e-5)
    assert listed == found


@pytest.mark.parametrize("name", SEEN)
def test_what_a_stage_does_not_know_is_refused(name: str, world_pool: WorldPools) -> None:
    make, term, said = SEEN[name]
    with pytest.raises(ConfigError, match=said):
        world_pool(2).run(of_one_session, make, term)


def test_what_is_drawn_before_the_blocks_may_go_into_them(world_pool: WorldPools) -> None:
    losses = world_pool(2).run(of_one_session, Dropped, "")
    assert all(isinstance(one, float) and math.isfinite(one) for one in losses), losses


def test_the_check_leaves_what_a_model_is_given_as_it_is(world_pool: WorldPools) -> None:
    torch.manual_seed(3)
    model = Scaling()
    expected = sum(
        loss_of(model(part.data["x"].clone()), part.data).item() * part.num_samples
        for part in batch_of(0)
    )
    for loss in world_pool(2).run(of_one_session, Scaling, ""):
        assert loss == pytest.approx(expected / batch_of(0).global_num_samples, rel=1e-5)


def test_evaluation_is_checked_too(world_pool: WorldPools) -> None:
    with pytest.raises(ConfigError, match=r"stage 1 \(blocks\.1\) needs outward\."):
        world_pool(2).run(of_one_session, HeadFirst, "", True)


def test_what_is_missing_is_not_a_number_in_later_passes(world_pool: WorldPools) -> None:
    found = world_pool(2).run(of_one_session, Late, "later", True)
    assert all(math.isnan(one) for one in found), found


def test_what_the_user_says_goes_first(world_pool: WorldPools) -> None:
    """Parts of each stage by name; a part that two stages need is in both, and kept equal."""
    cuts: dict[type[nn.Module], Any] = {
        HeadFirst: (("inward", "blocks.0"), ("blocks.1", "outward")),
        Skipping: (("inward", "blocks.0"), ("inward", "blocks.1", "outward")),
    }
    for model, stages in cuts.items():
        scenario = replace(PLAIN, model=model, num_steps=4, accumulation=2)
        kit = kit_of(world_pool, stages=stages)
        (run,) = kit.train(scenario)
        kit.check(run, scenario)


REFUSED = {
    "fewer blocks than stages": ({"pp": 3}, models.Network, 3, r"Set pp to 2 at most"),
    "no blocks": ({}, models.Sparse, 2, r"has none .*stages=\[\["),
    "an unknown name": (
        {"stages": (("inward", "blocks.0"), ("blocks.one",))},
        models.Network,
        2,
        r"'blocks\.one', which is no module or parameter",
    ),
    "a block left out": (
        {"stages": (("inward", "blocks.0"), ("outward",))},
        models.Network,
        2,
        r"names block 'blocks\.1' 0 times",
    ),
    "another order": (
        {"stages": (("blocks.1",), ("blocks.0",))},
        models.Network,
        2,
        r"in their order",
    ),
    **{
        f"nothing for {option} to divide": (
            {option: value},
            models.Network,
            2,
            rf"{option}={value} says .* pp=2\): .* or leave {option} out",
        )
        for option, value in (
            ("wrap", "none"),
            ("wrap_min_params", 5),
            ("reduce_dtype", "bf16"),
            ("param_dtype", "fp32"),
            ("reduce_scatter_every_microbatch", False),
            ("prefetch", 1),
            ("sharding", "grad_op"),
        )
    },
    "processes": ({}, models.Network, 3, r"does not divide the 3 processes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_before_any_process_starts(name: str) -> None:
    options, model, size, said = REFUSED[name]
    strategy = made(**options)()
    placement = Placement(size=size, local_size=size)
    with pytest.raises(ConfigError, match=said):
        strategy.check(replace(PLAIN, model=model).spec(1), placement)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"activation_offload": True}, "activation_offload=True"),
        ({"activation_checkpointing": "selective"}, "activation_checkpointing='selective'"),
        ({"compile": True}, "compile=True"),
        ({"parallelize": lambda module, world: None}, "parallelize"),
    ],
    ids=str,
)
def test_what_stages_cannot_do_is_refused_as_such(asked: dict[str, Any], said: str) -> None:
    spec = replace(PLAIN, model=models.Network).spec(1)
    placement = Placement(size=2, local_size=2)
    with pytest.raises(ConfigError, match=rf"{said} is not supported with stages \(pp=2\)"):
        check_capabilities(made()(), replace(spec, **asked), placement)
    check_capabilities(made(pp=1, dp_shard=2)(), replace(spec, **asked), placement)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pp": 1, "schedule": "gpipe"}, "pp is 1"),
        ({"schedule": "zero-bubble", "virtual_stages": 3}, "has 2 stages on each rank"),
        ({"schedule": "interleaved", "virtual_stages": 1}, "is '1f1b'"),
        ({"cpu_offload": True}, "cpu_offload with pp is not built"),
    ],
)
def test_options_that_say_nothing_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(**options)()


def test_stages_are_balanced_and_shown() -> None:
    strategy = made(schedule="interleaved")()
    assert isinstance(strategy, MeshStrategy)
    spec = replace(PLAIN, model=Deep).spec(1)
    said = dict(strategy.placements(spec, Placement(size=2, local_size=2)))
    assert [key for key in said if key.startswith("stage ")] == [
        "stage 0, pp 0",
        "stage 1, pp 1",
        "stage 2, pp 0",
        "stage 3, pp 1",
    ]
    assert said["stage 0, pp 0"].startswith("blocks.0, with inward: 1,")
    assert "outward" in said["stage 3, pp 1"]


# -- dropout, and runs that go on elsewhere --------------------------------------------------------


class Dropping(models.Network):
    """Of ones, the first block keeps some, and the second some of these."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.5, self.training)
        return self.outward(x)


def draws(placement: Placement) -> list[float]:
    """What a stage's generator gives after it has been prepared."""
    with unipar.Session("mesh:pp=2", device="cpu", placement=placement) as session:
        session.prepare(
            Dropping(), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
        )
        return torch.rand(4).tolist()


def test_stages_draw_different_numbers(world_pool: WorldPools) -> None:
    first, second = world_pool(2).run(draws)
    assert first != second


OBJECTIVE = unipar.Objective(
    lambda batch: (batch["x"],),
    lambda output, batch: nn.functional.cross_entropy(output, batch["y"]),
)


def part_of_run(
    placement: Placement,
    strategy: Any,
    directory: Path,
    start: int,
    stop: int,
    model: Callable[[], nn.Module] = Deep,
) -> list[float]:
    """Steps of a session, from the checkpoint of the last one if there is one; their losses."""
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        torch.manual_seed(3)
        engine = session.prepare(
            model(), optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01)
        )
        if start:
            checkpoint.load(directory / f"step-{start:08d}", session.engines, session.world)
        losses = []
        for step in range(start, stop):
            losses.append(engine.train_step(batch_of(step), OBJECTIVE).loss)
        checkpoint.save(directory, session.engines, session.world, step=stop, strategy="any")
        return losses


def batch_of(step: int) -> Batch:
    data = models.points(NUM_SAMPLES).batch(list(range(8 * step, 8 * step + 8)))
    parts = [{key: value[a:b] for key, value in data.items()} for a, b in ((0, 3), (3, 5), (5, 8))]
    return Batch(tuple(MicroBatch(part, len(part["x"])) for part in parts), 8)


def plain_run() -> list[float]:
    """The same steps in plain PyTorch."""
    torch.manual_seed(3)
    model, losses = Deep(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        data = models.points(NUM_SAMPLES).batch(list(range(8 * step, 8 * step + 8)))
        loss = nn.functional.cross_entropy(model(data["x"]), data["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_run_goes_on_under_other_strategies_and_comes_back(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    staged = {"name": "mesh", "pp": 2, "schedule": "interleaved"}
    first = world_pool(2).run(part_of_run, "mesh:pp=2", tmp_path, 0, 2)[0]
    second = world_pool(1).run(part_of_run, "single", tmp_path, 2, 4)[0]
    third = world_pool(2).run(part_of_run, staged, tmp_path, 4, 6)[0]
    assert [*first, *second, *third] == pytest.approx(plain_run(), rel=1e-5)


class WrappedBlocks(Deep):
    """In wrappers of torch's, whose names parameters have and state dicts leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = checkpoint_wrapper(self.inward)
        self.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in self.blocks)


def test_blocks_in_wrappers_of_torch_are_saved_and_loaded(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    run = partial(part_of_run, model=WrappedBlocks)
    whole = world_pool(1).run(run, "single", tmp_path / "whole", 0, 6)[0]
    parts = []
    for size, strategy, start in ((2, "mesh:pp=2", 0), (1, "single", 2), (2, "mesh:pp=2", 4)):
        parts += world_pool(size).run(run, strategy, tmp_path / "parts", start, start + 2)[0]
    assert parts == pytest.approx(whole, rel=1e-5)


class SavesOthers(Deep):
    """Hooks put tensors into its state dict that are not those that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.inward, *self.blocks, self.outward):
            part.register_state_dict_post_hook(detached)


def detached(module: nn.Module, held: dict[str, Any], prefix: str, _: Any) -> None:
    own = [name for name in held if name.startswith(prefix)]
    held.update({name: held[name].detach() for name in own})


def test_what_hooks_put_into_a_state_dict_is_saved(world_pool: WorldPools, tmp_path: Path) -> None:
    run = partial(part_of_run, model=SavesOthers)
    whole = world_pool(1).run(run, "single", tmp_path / "whole", 0, 4)[0]
    parts = []
    for size, strategy, start in ((2, "mesh:pp=2", 0), (1, "single", 2)):
        parts += world_pool(size).run(run, strategy, tmp_path / "parts", start, start + 2)[0]
    assert parts == pytest.approx(whole, rel=1e-5)


# -- what would be lost without a word -------------------------------------------------------------


class Trial(NamedTuple):
    """A few steps of a small model.

    Attributes:
        model: what is trained.
        optimizer: with a learning rate of 0.1.
        arguments: of the model, beside ``x``.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    arguments: Callable[[], tuple[Any, ...]] = tuple


def tried(placement: Placement, strategy: Any, trial: Trial, num_steps: int = 3) -> Any:
    """The losses of a run."""
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        torch.manual_seed(3)
        engine = session.prepare(
            trial.model(),
            optimizer=lambda named: trial.optimizer([p for _, p in named], lr=0.1),
        )
        objective = unipar.Objective(lambda batch: (batch["x"], *trial.arguments()), OBJECTIVE.loss)
        return [engine.train_step(one_by_one(step), objective).loss for step in range(num_steps)]


def one_by_one(step: int) -> Batch:
    """Micro-batches of one sample, so many that schedules come to all their kinds of passes."""
    data = models.points(NUM_SAMPLES).batch(list(range(8 * step, 8 * step + 8)))
    parts = ({key: value[at : at + 1] for key, value in data.items()} for at in range(8))
    return Batch(tuple(MicroBatch(part, 1) for part in parts), 8)


def refused(world_pool: WorldPools, trial: Trial, **options: Any) -> str:
    strategy = {"name": "mesh", "pp": 2, **options}
    with pytest.raises(ConfigError) as error:
        world_pool(2).run(tried, strategy, trial)
    return str(error.value)


class OfAll(torch.optim.SGD):
    """Its step is as long whatever the gradient, of all tensors together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        for parameter in parameters:
            parameter.sub_(0.1 * parameter.grad / norm)


def test_an_optimizer_that_looks_at_all_tensors_is_refused(world_pool: WorldPools) -> None:
    said = refused(world_pool, Trial(models.Network, OfAll))
    assert "OfAll cannot be used where ranks divide" in said


class Stopped(models.Network):
    """No gradient goes back to the first of the two blocks of the third stage of four."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block(9) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for number, block in enumerate(self.blocks):
            with torch.set_grad_enabled(number > 4 and torch.is_grad_enabled()):
                x = block(x)
        return self.outward(x)


@pytest.mark.parametrize("schedule", SPLITTING)
def test_weights_behind_a_stopped_gradient_are_trained(
    schedule: str, world_pool: WorldPools
) -> None:
    strategy = {"name": "mesh", "pp": 2, "schedule": schedule}
    found = world_pool(2).run(tried, strategy, Trial(Stopped))[0]
    assert found == pytest.approx(world_pool(1).run(tried, "single", Trial(Stopped))[0], rel=1e-5)


class Extra:
    """Its name has its address in it."""


class WithExtra(models.Network):
    def forward(self, x: torch.Tensor, extra: Any) -> torch.Tensor:  # pyright: ignore
        return super().forward(x)


def an_object() -> tuple[Any, ...]:
    return (Extra(),)


def test_inputs_that_say_nothing_of_shapes_are_refused(world_pool: WorldPools) -> None:
    said = refused(world_pool, Trial(WithExtra, arguments=an_object))
    assert "the model is given a Extra ([0][1] of its args, kwargs)" in said


def test_shapes_follow_from_no_fraction() -> None:
    given = torch.ones(2), 3, None, "a" * 90
    assert _shapes((given, {"rate": 0.1})) == _shapes((given, {"rate": 0.2}))
    assert _shapes((given, {"rate": 1})) != _shapes((given, {"rate": 2}))
    assert _shapes(("a" * 90 + "b",)) != _shapes(("a" * 90 + "c",))


class CountsAtTheEnd(models.Network):
    """A buffer of the model itself, which stages count as coming first."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x) * self.seen.clone()
        self.note()
        return x

    def note(self) -> None:
        if self.training:
            self.seen.add_(1)


class Replaces(CountsAtTheEnd):
    def note(self) -> None:
        self.seen = self.seen + 1


class CountsAtBothEnds(CountsAtTheEnd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note()
        return super().forward(x)


class CountsFirst(Deep):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
        return super().forward(x)


class CountsInAWrapper(models.Network):
    def __init__(self) -> None:
        super().__init__()
        self.inward.register_buffer("seen", torch.zeros(()))
        self.inward = checkpoint_wrapper(self.inward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.inward.seen.add_(1)  # pyright: ignore
        return x


class CountsBesideAHook(CountsAtTheEnd):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(detached)


COUNTING = (CountsAtTheEnd, Replaces, CountsAtBothEnds, CountsInAWrapper, CountsBesideAHook)


@pytest.mark.parametrize("model", COUNTING)
def test_a_buffer_that_changes_where_it_is_not_written_from_is_refused(
    model: type[nn.Module], world_pool: WorldPools
) -> None:
    said = refused(world_pool, Trial(model))
    assert re.search(r"buffer '[\w.]*seen' changes on stage 1", said), said


def test_a_buffer_that_stages_of_one_rank_change_is_refused(world_pool: WorldPools) -> None:
    said = refused(world_pool, Trial(CountsFirst), schedule="interleaved")
    assert "buffer 'seen' changes in the forward passes of stages 0, 1, 2, 3" in said


class NormsFirst(models.Network):
    """Every stage runs what comes before the blocks, and only the first has its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Sequential(self.inward, nn.BatchNorm1d(9))  # pyright: ignore
        self.outward = nn.Sequential(nn.BatchNorm1d(9), self.outward)  # pyright: ignore


def test_statistics_before_the_blocks_are_those_of_their_stage(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    expected = world_pool(1).run(counted, "single", tmp_path / "one", NormsFirst, 1)[0]
    found = world_pool(2).run(counted, "mesh:pp=2", tmp_path / "two", NormsFirst, 1)[0]
    again = world_pool(1).run(counted, "single", tmp_path / "two", NormsFirst, 0)[0]
    assert [found, again] == pytest.approx([expected, expected], rel=1e-5)


def counted(placement: Placement, strategy: Any, directory: Path, model: Any, step: int) -> float:
    """Train a step and save, or load it; a loss of evaluation after that."""
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        torch.manual_seed(3)
        engine = session.prepare(
            model(), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
        )
        if step:
            engine.train_step(batch_of(0), OBJECTIVE)
            checkpoint.save(directory, session.engines, session.world, step=step, strategy="any")
        else:
            checkpoint.load(directory / "step-00000001", session.engines, session.world)
        found = engine.eval_batch(batch_of(1), OBJECTIVE)
        return float(found.total / found.count)


def test_every_stage_is_given_the_buffers_that_it_computes_with(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    (expected,) = world_pool(1).run(counted, "single", tmp_path, CountsAtTheEnd, 1)
    assert world_pool(2).run(counted, "mesh:pp=2", tmp_path, CountsAtTheEnd, 0)[0] == (
        pytest.approx(expected, rel=1e-5)
    )


def test_a_buffer_goes_where_the_user_says(world_pool: WorldPools, tmp_path: Path) -> None:
    strategy = {
        "name": "mesh",
        "pp": 2,
        "stages": [["inward", "blocks.0"], ["blocks.1", "outward", "seen"]],
    }
    expected = world_pool(2).run(counted, strategy, tmp_path, CountsAtTheEnd, 1)[0]
    (found,) = world_pool(1).run(counted, "single", tmp_path, CountsAtTheEnd, 0)
    assert found == pytest.approx(expected, rel=1e-5)


class Leaving(models.Block):
    """Leaves a statistic without a gradient behind, if it is one of the first so many blocks."""

    def __init__(self, number: int, most: int) -> None:
        super().__init__(9)
        self.leaves = number < most
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.leaves:
            self.statistic = x.detach().square().mean()
            self.seen[:] = [self.statistic]
        self.own = x.detach()
        return x


class Collecting(models.Network):
    """Scales its outputs by what blocks have left behind, where they have."""

    def __init__(self, attribute: str, most: int = 2) -> None:
        super().__init__()
        self.attribute = attribute
        self.blocks = nn.ModuleList(Leaving(number, most) for number in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, blocks = super().forward(x), cast(list[Any], self.blocks)
        if self.attribute == "statistic":
            left = sum(block.statistic for block in blocks if hasattr(block, "statistic"))
        else:
            left = sum(sum(block.seen) for block in blocks)
        return x * (1 + left)


@pytest.mark.parametrize(("attribute", "most"), [("statistic", 2), ("statistic", 1), ("seen", 2)])
def test_what_blocks_of_other_stages_leave_behind_is_refused_where_it_is_read(
    attribute: str, most: int, world_pool: WorldPools
) -> None:
    said = refused(world_pool, Trial(partial(Collecting, attribute, most)))
    assert f"'blocks.0' sets its attribute '{attribute}' in its forward pass" in said


def test_what_blocks_keep_for_themselves_is_theirs(world_pool: WorldPools) -> None:
    """And lookups are those of torch afterwards."""
    found = world_pool(2).run(tried, "mesh:pp=2", Trial(Keeping))[0]
    assert found == pytest.approx(world_pool(1).run(tried, "single", Trial(Keeping))[0], rel=1e-5)


class Keeping(models.Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaving(number, 2) for number in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # What no block sets may be asked for.
        blocks = cast(list[Any], self.blocks)
        scale = sum(hasattr(block, "missing") or block.leaves for block in blocks)
        return super().forward(x) * scale


class Recomputing(models.Network):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = recomputed(block, x, use_reentrant=False)
        return self.outward(x)


def test_a_model_that_recomputes_blocks_itself_is_told_what_to_do(world_pool: WorldPools) -> None:
    said = refused(world_pool, Trial(Recomputing))
    assert "recomputes its blocks itself" in said
    assert "activation_checkpointing='full'" in said


class Spare(models.Network):
    """It has a layer that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


def decayed(placement: Placement, strategy: Any) -> bool:
    """Whether a step has changed what nothing has used."""
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(
            Spare(),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], weight_decay=0.1),
        )
        spare = dict(engine.module.named_parameters())["spare.weight"]
        before = spare.detach().clone()
        engine.train_step(batch_of(0), OBJECTIVE)
        return not torch.equal(before, spare)


def test_a_tied_parameter_that_no_stage_uses_is_left_alone(world_pool: WorldPools) -> None:
    stages = [["inward", "blocks.0", "spare"], ["spare", "blocks.1", "outward"]]
    strategy = {"name": "mesh", "pp": 2, "stages": stages}
    assert world_pool(2).run(decayed, strategy) == [False, False]


def with_backward(placement: Placement) -> None:
    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        found = OBJECTIVE.loss(output, batch)
        found.backward(retain_graph=True)
        return found

    with unipar.Session("mesh:pp=2", device="cpu", placement=placement) as session:
        engine = session.prepare(
            models.Network(), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
        )
        engine.train_step(batch_of(0), unipar.Objective(OBJECTIVE.inputs, loss))


def test_a_loss_that_runs_the_backward_pass_itself_is_refused(world_pool: WorldPools) -> None:
    with pytest.raises(ConfigError, match="gradient"):
        world_pool(2).run(with_backward)


def hooked(placement: Placement) -> str:
    with unipar.Session("mesh:pp=2", device="cpu", placement=placement) as session:
        engine = session.prepare(
            models.Network(), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
        )
        engine.train_step(batch_of(0), OBJECTIVE)
        of_stage = next(p for p in engine.module.parameters() if p.numel())
        of_stage.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        try:
            engine.train_step(batch_of(1), OBJECTIVE)
        except ConfigError as error:
            return str(error)
        return "trained"


def test_a_hook_on_a_gradient_of_a_stage_is_refused(world_pool: WorldPools) -> None:
    """It would see what is computed of one micro-batch."""
    for said in world_pool(2).run(hooked):
        assert "a hook was put on the gradient of a parameter" in said
        assert "called with a part of the gradient" in said


def test_a_loss_that_was_left_out_is_named_under_stages_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=r"no loss was given.*model\(Tensor, Tensor\), which its"):
        unipar.fit(
            model,
            (torch.randn(8, 4), torch.randn(8, 1)),
            strategy="mesh:pp=2,stages=[['0'],['1']]",
            devices=2,
            device="cpu",
            global_batch_size=4,
            steps=1,
            output_dir=tmp_path,
        )
