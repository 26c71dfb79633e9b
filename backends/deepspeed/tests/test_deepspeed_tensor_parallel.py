"""AutoTP under each stage of ZeRO trains the run of a plain loop in one process."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from deepspeed_models import (
    BATCH,
    CLIP,
    Sentences,
    Step,
    adamw,
    entropy,
    language_model,
    plain_loop,
    schedule,
)

from unipar import LossSum, Session, fit
from unipar.errors import ConfigError
from unipar.testing.cases.numbers import MOST_SKIPPED
from unipar.testing.compare import assemble_weights, assert_equal_weights, difference
from unipar.testing.harness import Exported
from unipar.testing.kit import HALF_PRECISION_FACTOR, TOLERANCE, Kit, Target
from unipar.testing.models import Samples
from unipar.testing.pool import WorldPools
from unipar.testing.portability import Where
from unipar.testing.scenarios import Scenario, reference_trace
from unipar.world import Placement

pytestmark = pytest.mark.slow

STEPS, HALF = 10, 5
TIED: dict[str, Any] = {"tie_word_embeddings": True}
QWEN2: dict[str, Any] = {"kind": "Qwen2"}


def loss_of(model: Any, batch: Any) -> LossSum:
    return LossSum(*entropy(model, batch))


def prepare(
    session: Session,
    model: Any,
    micro: int | None = None,
    shares: list[float] | None = None,
    **asked: Any,
) -> Any:
    settings = {"optimizer": adamw, "lr_scheduler": schedule, "max_grad_norm": CLIP, **asked}
    sizes: Any = {"global_batch_size": BATCH, "micro_batch_size": micro, "shares": shares}
    loader = session.loader(Sentences(), **sizes, shuffle=False)
    return session.prepare(model, **settings), loader


def take(engine: Any, loader: Any, steps: int) -> list[Step]:
    def endless() -> Any:
        while True:
            yield from loader

    found = (engine.train_step(batch, loss_of) for batch in islice(endless(), steps))
    return [Step(step.loss, step.grad_norm, step.num_items) for step in found]


def train(
    placement: Placement,
    strategy: str,
    micro: int | None,
    settings: dict[str, Any],
    activations: str = "off",
    shares: list[float] | None = None,
) -> tuple[list[Step], Exported]:
    with Session(strategy, device="cpu", placement=placement) as session:
        # Each rank's own weights, of which those of rank 0 must be what is trained.
        model = language_model(seed=placement.rank, **settings)
        engine, loader = prepare(
            session, model, micro, shares, activation_checkpointing=activations
        )
        return take(engine, loader, STEPS), Exported.of(engine)


@functools.cache
def expected(settings: tuple[tuple[str, Any], ...]) -> tuple[list[Step], dict[str, torch.Tensor]]:
    model = language_model(**dict(settings))
    return plain_loop(model, STEPS), model.state_dict()


def assert_same(done: list[Step], wanted: list[Step]) -> None:
    assert done == [pytest.approx(step, rel=1e-5) for step in wanted]


@pytest.mark.parametrize(
    ("strategy", "ranks", "micro", "settings"),
    [
        ("zero1:tp=2", 2, None, {}),
        ("zero3:tp=2,persistence_threshold=0", 4, 3, TIED),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("zero2:tp=2", 4, 1, QWEN2),
                ("zero2:tp=2", 2, 3, TIED),
                ("zero3:tp=2", 2, 3, {}),
                ("zero1:tp=2", 4, 1, TIED),
                ("zero2:tp=4", 4, None, {"num_key_value_heads": 4}),
                ("zero2:tp=2", 2, 3, {"kind": "Mistral"}),
                ("zero3:tp=2", 2, None, QWEN2),
            )
        ),
    ],
)
def test_losses_gradient_norms_and_weights_are_those_of_a_plain_loop(
    strategy: str,
    ranks: int,
    micro: int | None,
    settings: dict[str, Any],
    world_pool: WorldPools,
) -> None:
    steps, weights = expected(tuple(settings.items()))
    results = world_pool(ranks).run(train, strategy, micro, settings)
    for done, _ in results:
        assert_same(done, steps)
    assert_equal_weights(assemble_weights([state for _, state in results]), weights, 1e-5)


@pytest.mark.thorough
def test_replicas_of_divided_layers_take_unequal_shares(world_pool: WorldPools) -> None:
    steps, weights = expected(tuple(QWEN2.items()))
    run = functools.partial(train, shares=[3, 1])
    results = world_pool(4).run(run, "zero2:tp=2", 3, QWEN2)
    for done, _ in results:
        assert_same(done, steps)
    assert_equal_weights(assemble_weights([state for _, state in results]), weights, 1e-5)


def test_recomputed_activations_change_nothing(world_pool: WorldPools) -> None:
    for done, _ in world_pool(2).run(train, "zero2:tp=2", 4, TIED, "full"):
        assert_same(done, expected(tuple(TIED.items()))[0])


def train_partly(placement: Placement, strategy: str) -> tuple[list[Step], Exported]:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, partly_frozen())
        return take(engine, loader, HALF), Exported.of(engine)


def partly_frozen() -> Any:
    model = language_model()
    for name in ("model.embed_tokens", "model.layers.0.mlp.up_proj"):
        model.get_submodule(name).requires_grad_(False)
    return model


@pytest.mark.parametrize("strategy", ["zero2:tp=2", "zero3:tp=2"])
def test_frozen_weights_stay(strategy: str, world_pool: WorldPools) -> None:
    model = partly_frozen()
    steps = plain_loop(model, HALF)
    results = world_pool(2).run(train_partly, strategy)
    for done, _ in results:
        assert_same(done, steps)
    parts = assemble_weights([state for _, state in results])
    assert_equal_weights(parts, model.state_dict(), 1e-5)


# -- what is inside of divided layers --------------------------------------------------------------


def penalized(model: Any, batch: Any) -> LossSum:
    total, count = entropy(model, batch)
    squares = sum(weight.square().sum() for weight in getattr(model, "module", model).parameters())
    return LossSum(total + count * 0.01 * squares, count)


def of_attention(model: Any, batch: Any) -> LossSum:
    output = model(input_ids=batch["input_ids"], output_attentions=True)
    return LossSum(torch.stack([each.square().mean() for each in output.attentions]).sum(), 1)


def of_hidden_states(model: Any, batch: Any) -> LossSum:
    """From what all ranks have whole, the model's parts called one by one."""
    parts = getattr(model, "module", model)
    output = parts.model(input_ids=batch["input_ids"], output_hidden_states=True)
    total = sum(each.square().mean((1, 2)).sum() for each in output.hidden_states)
    return LossSum(total + parts.lm_head(output.last_hidden_state).square().sum(), 1)


def refused_losses(placement: Placement) -> tuple[list[str], float]:
    with Session("zero2:tp=2", device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model(attn_implementation="eager"))
        batch = next(iter(loader))
        said: list[str] = []
        for attempt in (
            lambda: engine.train_step(batch, penalized),
            lambda: engine.train_step(batch, of_attention),
            lambda: engine.backward(penalized(engine, batch.microbatches[0].data)),
            lambda: engine.probe(batch.microbatches[0], loss_of),
        ):
            with pytest.raises(ConfigError) as refusal:
                attempt()
            said.append(str(refusal.value))
            engine.zero_grad()
        return said, engine.train_step(batch, of_hidden_states).grad_norm


def test_losses_that_would_be_of_parts_of_layers_are_refused(world_pool: WorldPools) -> None:
    model = language_model()
    loss = of_hidden_states(model, Sentences()[:BATCH])
    (loss.total / loss.count).backward()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
    for (*of_parts, probing), norm in world_pool(2).run(refused_losses):
        for said in of_parts:
            assert "the loss depends on 'model.layers.1" in said
            assert "each rank holds a part of the model: a penalty of the weights" in said
        assert "Give numbers" in probing
        assert norm == pytest.approx(wanted, rel=1e-5)


def transposed(model: Any, batch: Any) -> LossSum:
    """Of embeddings as a convolution gives them, whose sample is contiguous in its channels."""
    channels = torch.cos(torch.arange(16)[:, None] * batch["input_ids"][:, None])
    logits = model(inputs_embeds=channels.transpose(1, 2)).logits
    return LossSum(logits.float().logsumexp(-1).sum(), 1)


def without_embedding() -> Any:
    model = language_model()
    model.model.embed_tokens.requires_grad_(False)
    return model


def norms_of_single_samples(placement: Placement) -> list[float]:
    with Session("zero2:tp=2", device="cpu", placement=placement) as session:
        engine, _ = prepare(session, without_embedding())
        loader = session.loader(Sentences(), global_batch_size=1, shuffle=False)
        return [engine.train_step(batch, transposed).grad_norm for batch in islice(loader, 2)]


def test_inputs_that_are_not_contiguous_change_nothing(world_pool: WorldPools) -> None:
    model = without_embedding()
    optimizer = adamw(model.named_parameters())
    wanted = []
    for index in range(2):
        optimizer.zero_grad()
        transposed(model, Sentences()[index : index + 1]).total.backward()
        wanted.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    for norms in world_pool(2).run(norms_of_single_samples):
        assert norms == pytest.approx(wanted, rel=1e-5)


def own_loop(placement: Placement) -> tuple[list[float], dict[str, float]]:
    with Session("zero2:tp=2", device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model(), 3)
        losses: list[float] = []
        for batch in islice(loader, HALF):
            for microbatch in batch:
                loss = loss_of(engine, microbatch.data)
                engine.backward(loss if microbatch.num_samples else LossSum(loss.total * 0, 0))
            losses.append(engine.step().loss)
        every = session.loader(Sentences(), global_batch_size=BATCH, shuffle=False)
        return losses, session.evaluate(engine, every, loss_of)


def test_a_loop_of_ones_own_and_an_evaluation(world_pool: WorldPools) -> None:
    model = language_model()
    wanted = [step.loss for step in plain_loop(model, HALF)]
    with torch.no_grad():
        total, count = entropy(model, Sentences()[:])
    for losses, metrics in world_pool(4).run(own_loop):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert metrics["loss"] == pytest.approx((total / count).item(), rel=1e-5)


def sentences() -> Samples:
    return Samples(**Sentences()[:])


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("zero2:tp=2", "bf16"),
        pytest.param("zero2:tp=2", "fp16", marks=pytest.mark.thorough),
        pytest.param("zero3:tp=2", "bf16", marks=pytest.mark.thorough),
        pytest.param("zero3:tp=2", "fp16", marks=pytest.mark.thorough),
    ],
)
def test_half_precision_is_no_further_from_fp32_than_rounding_takes_it(
    strategy: str, precision: Any, world_pool: WorldPools
) -> None:
    kit = Kit(Target.named(strategy), 2, world_pool)
    asked = [
        Scenario(
            model=functools.partial(language_model, seed=seed),
            data=sentences,
            terms=entropy,
            weighted=True,
            optimizer=small_steps,
            scheduler=schedule,
            num_steps=STEPS,
            global_batch_size=BATCH,
            accumulation=2,
            precision=precision,
            max_grad_norm=CLIP,
            seed=seed,
        )
        for seed in range(4)
    ]
    assert_rounded(kit, asked)


def small_steps(named: Any) -> torch.optim.Optimizer:
    """As in fp32, at rates at which a difference does not grow from step to step."""
    optimizer = adamw(named)
    for group in optimizer.param_groups:
        group["lr"] *= 0.1
    return optimizer


def assert_rounded(kit: Kit, asked: list[Scenario]) -> None:
    """The kit's bound, on the mean over runs; one of so small a model says little."""
    found, rounding = [], []
    for run, scenario in zip(kit.train(*asked), asked, strict=True):
        skipped = frozenset(step for step, was in enumerate(run.trace.skipped) if was)
        assert len(skipped) <= MOST_SKIPPED[scenario.precision]
        for step in skipped:
            run.trace.grad_norms[step] = None
        rounded = replace(scenario, leave_out=skipped)
        found.append(difference(run.trace, reference_trace(replace(rounded, precision="fp32"))))
        rounding.append(kit.rounding(rounded))
        assert found[-1].largest > TOLERANCE, "the precision changed nothing"
    for what in ("loss", "grad_norm", "weights"):
        own, bound = (fmean(getattr(one, what) for one in of) for of in (found, rounding))
        assert own <= HALF_PRECISION_FACTOR * bound, what


# -- checkpoints -----------------------------------------------------------------------------------

SOURCES = [Where("single", 1), Where("zero1:tp=2", 2), Where("zero3:tp=2", 4)]
TARGETS = [
    *(Where("zero2:tp=2", 2), Where("zero3:tp=2", 2), Where("zero1:tp=2", 4)),
    *(Where("single", 1), Where("fsdp", 2)),
]


def train_and_save(placement: Placement, strategy: str, directory: Path) -> None:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model(**TIED))
        take(engine, loader, HALF)
        session.save(directory, loader=loader)


def resume_each(placement: Placement, strategy: str, paths: list[Path]) -> list[list[Step]]:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model(seed=1, **TIED))
        runs = []
        for path in paths:
            assert session.load(path, loader=loader) == HALF
            runs.append(take(engine, loader, STEPS - HALF))
        return runs


@pytest.fixture(scope="module")
def saved(world_pool: WorldPools, tmp_path_factory: pytest.TempPathFactory) -> dict[Where, Path]:
    root = tmp_path_factory.mktemp("saved")
    paths = {where: root / str(number) for number, where in enumerate(SOURCES)}
    for where, path in paths.items():
        world_pool(where.ranks).run(train_and_save, where.strategy, path)
    return paths


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_resumes_what_any_source_has_saved(
    target: Where, saved: dict[Where, Path], world_pool: WorldPools
) -> None:
    wanted = expected(tuple(TIED.items()))[0][HALF:]
    for runs in world_pool(target.ranks).run(resume_each, target.strategy, list(saved.values())):
        for source, done in zip(saved, runs, strict=True):
            assert done == [pytest.approx(step, rel=1e-5) for step in wanted], source


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("zero1:pp=2", r"pp=2 cannot be had: .*PipelineModule.*list of layers.*'mesh:pp=2'"),
        ("zero2:cp=2", r"cp=2 cannot be had: .*Ulysses.*unsummed.*'mesh:cp=2,cp_kind=ulysses'"),
        ("deepspeed:ep=2", r"ep=2 cannot be had: .*deepspeed\.moe.*AutoEP.*'mesh:ep=2'"),
        ("deepspeed:stage=0,tp=2", r"tp=2 is not proved with stage 0.*stage=1.*'mesh:tp=2'"),
        ("zero2:tp=2,offload_optimizer=true", r"offload_optimizer is not proved with tp=2.*mesh"),
        ("zero3:tp=2,offload_parameters=true", r"offload_parameters is not proved with tp=2"),
        ('zero1:native={"tensor_parallel":{"autotp_size":2}}', r"'tensor_parallel'.*option tp"),
        ('zero1:native={"sequence_parallel_size":2}', r"'sequence_parallel_size'.*cp is not"),
        ('zero1:native={"expert_parallel":{"enabled":true}}', r"'expert_parallel'.*ep is not"),
        ("zero1:tp=3", r"tp=3 does not divide the 2 processes.*multiple of 3"),
    ],
)
def test_what_is_not_proved_is_refused_by_name(strategy: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        start(strategy, language_model(), tmp_path)


def changed(what: str) -> Any:
    """A model with something in a layer that DeepSpeed would lose or get wrong."""
    model = language_model()
    first, second = (layer.mlp for layer in model.model.layers)
    if what == "hook":
        first.up_proj.register_forward_hook(lambda *_: None)
    elif what == "tie":
        second.up_proj.weight = first.up_proj.weight
    elif what == "class":
        first.up_proj = torch.nn.Sequential(first.up_proj)
    else:
        first.up_proj.weight.register_hook(lambda gradient: gradient)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.nn.Linear(2, 2), r"LlamaForCausalLM, .*a Linear of torch.*'mesh:tp=2'"),
        (language_model(intermediate_size=25), r"tp=2 does not divide .*intermediate_size=25"),
        (language_model().bfloat16(), r"bfloat16, and tp=2 is proved with float32.*model.float"),
        (changed("hook"), r"'model.layers.0.mlp.up_proj' has a hook, which DeepSpeed would lose"),
        (changed("tie"), r"up_proj' shares its weight .* cut it twice.*'mesh:tp=2'"),
        (
            changed("class"),
            r"up_proj' is a Sequential, .*divides torch.nn.Linear alone",
        ),
        (changed("gradient"), r"'model.layers.0.mlp.up_proj.weight' has a hook on its gradient"),
    ],
)
def test_models_that_are_not_proved_are_refused(
    model: torch.nn.Module, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        start("zero2:tp=2", model, tmp_path)


def start(strategy: str, model: torch.nn.Module, directory: Path) -> None:
    quiet = {"progress": False, "output_dir": directory, "global_batch_size": 4, "steps": 1}
    fit(model, Sentences(), strategy=strategy, device="cpu", devices=2, loss=loss_of, **quiet)
