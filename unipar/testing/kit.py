"""One strategy at one world size, and how a case asks things of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unipar.engine.checks import check_capabilities
from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.strategy import Capabilities, EngineSpec, Strategy
from unipar.strategy.registry import resolve
from unipar.testing.compare import (
    Difference,
    assemble,
    assemble_weights,
    assert_equal_runs,
    assert_told_alike,
    difference,
)
from unipar.testing.harness import RankRun, on_strategy, train_all
from unipar.testing.pool import WorkerPool, WorldPools
from unipar.testing.reference import Trace
from unipar.testing.scenarios import Scenario, in_parts, reference_trace
from unipar.world import Placement

TOLERANCE = 1e-5
"""Relative, in fp32, over 20 steps, for every strategy; what is measured against what is in
:class:`unipar.testing.compare.Difference`."""

ROUNDINGS = (1, 2, 4)
"""The parts that the reference computes a global batch in, in half precision. Each number rounds
differently and is as right as the others, so one alone says little of what rounding does."""
HALF_PRECISION_FACTOR = 2.0
"""How many times the reference's own deviation in half precision a strategy's may be: frameworks
differ in which operations they leave in fp32, and so in how often a value is rounded."""


@dataclass(frozen=True)
class Target:
    """A strategy under test.

    Attributes:
        name: as ``--strategy`` takes it: ``name`` or ``name:option=value,…``.
        make: builds a new one; carried to the ranks by cloudpickle.
    """

    name: str
    make: Callable[[], Strategy]

    @classmethod
    def named(cls, text: str) -> Target:
        """The installed strategy; looked up once, which reads a file of each distribution."""
        strategy = resolve(text)
        return cls(text, partial(type(strategy), strategy.options))


@dataclass
class Run:
    """The view of all ranks together.

    Attributes:
        trace: as in the reference.
        samples: the samples of each step, of all replicas, in order of rank.
        optimizer: the optimizer's moments, whole, by name.
        ranks: what each rank returned.
    """

    trace: Trace
    samples: list[list[int]]
    optimizer: dict[str, torch.Tensor]
    ranks: list[RankRun]


@dataclass
class Measurements:
    """The largest differences from the reference that were seen, for ``--parity-json``."""

    found: dict[tuple[str, int, str], Difference] = field(default_factory=dict)

    def add(self, strategy: str, size: int, kind: str, difference: Difference) -> None:
        key = (strategy, size, kind)
        self.found[key] = self.found.get(key, Difference()) | difference

    def write(self, path: Path) -> None:
        rows = [
            {"strategy": strategy, "world_size": size, "precision": kind, **asdict(difference)}
            for (strategy, size, kind), difference in self.found.items()
        ]
        path.write_text(json.dumps(rows, indent=1) + "\n")


class Kit:
    """A strategy at a world size, on running processes."""

    def __init__(
        self, target: Target, size: int, pools: WorldPools, measurements: Measurements | None = None
    ) -> None:
        self.target, self.size, self._pools = target, size, pools
        self.measurements = measurements or Measurements()
        self._runs: dict[Scenario, Run] = {}

    @property
    def pool(self) -> WorkerPool:
        return self._pools(self.size)

    @property
    def placement(self) -> Placement:
        """Rank 0's, for what is checked before any process starts."""
        return Placement(size=self.size, local_size=self.size, device_type=self._pools.device_type)

    @property
    def capabilities(self) -> Capabilities:
        return self.target.make().capabilities()

    @property
    def layout(self) -> Layout:
        """How ranks are arranged; as one rank where the strategy refuses their number."""
        try:
            return self.target.make().layout(self.placement)
        except ConfigError:
            return Layout()

    @property
    def experts(self) -> bool:
        """Whether ranks divide experts, so that models without any are refused."""
        return self.layout.ep > 1

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``fn(strategy, world, *args)`` on every rank; the results, by rank."""
        return self.pool.run(on_strategy, self.target.make, fn, args, timeout=timeout)

    def fit(self, scenario: Scenario) -> Scenario:
        """The scenario as it can be asked of the strategy.

        In half precision of one that has no fp32. Without the gradient's norm of one that denies
        clipping: it owes none, for to measure it is a ``max_grad_norm`` too. On sequences where
        ranks divide these, with experts in the model where ranks divide those, and with the loss in
        its parts for a pipeline, which takes no other.
        """
        able = self.capabilities
        if scenario.precision == "fp32" and "fp32" not in able.precisions:
            scenario = replace(scenario, precision="bf16" if "bf16" in able.precisions else "fp16")
        if scenario.max_grad_norm == math.inf and not able.clipping:
            scenario = replace(scenario, max_grad_norm=None)
        if self.layout.cp > 1:
            scenario = scenario.in_sequences()
        if able.pipeline and scenario.objective is None:
            parts = in_parts(scenario.terms, weighted=scenario.weighted)
            scenario = replace(scenario, objective=parts)
        return replace(scenario, experts=True) if self.experts else scenario

    def train(self, *scenarios: Scenario) -> list[Run]:
        """Train each scenario by ``train_step``, once for all cases that look at its run."""
        missing = [scenario for scenario in scenarios if scenario not in self._runs]
        self._runs.update(zip(missing, self.train_again(*missing), strict=True))
        return [self._runs[scenario] for scenario in scenarios]

    def train_again(self, *scenarios: Scenario) -> list[Run]:
        """Train each scenario, whatever has been trained before."""
        if not scenarios:
            return []
        return merge_all(self.run(train_all, tuple(map(self.fit, scenarios))))

    def check(
        self,
        run: Run,
        scenario: Scenario,
        *,
        tolerance: float = TOLERANCE,
        subject: str = "",
        whole: bool = False,
    ) -> Difference:
        """Assert that a run is the reference's run of the scenario.

        In half precision it may be as far from fp32 as :meth:`rounding` says.

        Args:
            run: what was seen.
            scenario: what was asked for.
            tolerance: relative, in fp32.
            subject: what it is called in errors.
            whole: whether the scenario would be another if its batches were taken apart.
        """
        subject, scenario = subject or self.target.name, self.fit(scenario)
        expected = reference_trace(replace(scenario, precision="fp32"))
        trace = run.trace
        if scenario.max_grad_norm is None:
            trace = replace(trace, grad_norms=expected.grad_norms)
        assert_same_samples(run, scenario)
        if scenario.precision == "fp32":
            found = assert_equal_runs(trace, expected, tolerance, subject=subject)
        else:
            assert_told_alike(trace, expected, subject=subject)
            found = difference(trace, expected)
            self.assert_rounded(found, scenario, subject=subject, whole=whole)
        self.measurements.add(self.target.name, self.size, scenario.precision, found)
        return found

    def rounding(self, scenario: Scenario, *, whole: bool = False) -> Difference:
        """How far rounding takes the reference from fp32.

        What is rounded is computed where the strategy computes, with weights as the strategy's;
        what it is compared with, in fp32, on a CPU, as a strategy's run is.
        """
        exact = reference_trace(replace(scenario, precision="fp32"))
        rounding = Difference()
        for parts in (1,) if whole else ROUNDINGS:
            rounded = reference_trace(
                scenario,
                parts=parts,
                half_weights=self.capabilities.half_weights,
                device=self.placement.device_type,
            )
            rounding |= difference(rounded, exact)
        return rounding

    def assert_rounded(
        self, found: Difference, scenario: Scenario, *, subject: str = "", whole: bool = False
    ) -> None:
        """Assert that a run is no further from fp32 than rounding explains.

        The bound is measured: :data:`HALF_PRECISION_FACTOR` times what it does to the reference.
        """
        rounding = self.rounding(scenario, whole=whole)
        print(f"{scenario.precision} reference from fp32: {rounding}; {subject}: {found}")
        for what in ("loss", "grad_norm", "weights"):
            own, bound = getattr(found, what), HALF_PRECISION_FACTOR * getattr(rounding, what)
            if not own <= bound:
                raise AssertionError(
                    f"{subject} in {scenario.precision}: {what} is {own:.1e} from fp32, and "
                    f"the reference {getattr(rounding, what):.1e}; allowed: "
                    f"{HALF_PRECISION_FACTOR:g} times that"
                )

    def refuses(self, *scenarios: Scenario) -> bool:
        """Return whether the capabilities deny one of the scenarios; it must then be refused."""
        denied = [s for s in scenarios if self.refuses_spec(self.fit(s).spec(self.size))]
        return bool(denied)

    def refuses_spec(self, spec: EngineSpec, placement: Placement | None = None) -> bool:
        """Return whether the capabilities deny ``spec``.

        Raises:
            AssertionError: they do, and asking for it is no ConfigError.
        """
        placement = placement or self.placement
        reasons = denials(self.capabilities, spec, placement)
        if not reasons:
            return False
        try:
            check_capabilities(self.target.make(), spec, placement)
        except ConfigError as error:
            if len(str(error)) < 20:
                raise AssertionError(f"the refusal says too little: {error}") from error
            return True
        raise AssertionError(
            f"{self.target.name} says that it has no {', '.join(reasons)}, and takes it silently"
        )


@dataclass
class Kits:
    """The kit of each strategy and world size in a session, each made when it is first asked for.

    So a strategy's runs are shared by its cases.
    """

    pools: WorldPools
    measurements: Measurements = field(default_factory=Measurements)
    _made: dict[tuple[Target, int], Kit] = field(default_factory=dict)

    def __call__(self, target: Target, size: int) -> Kit:
        if (target, size) not in self._made:
            self._made[target, size] = Kit(target, size, self.pools, self.measurements)
        return self._made[target, size]


def denials(capabilities: Capabilities, spec: EngineSpec, placement: Placement) -> list[str]:
    """List what of a request a strategy says that it cannot do."""
    limit = capabilities.max_devices
    asked = {
        f"precision {spec.precision}": spec.precision not in capabilities.precisions,
        f"device {placement.device_type}": placement.device_type not in capabilities.device_types,
        f"world of {placement.size}": limit is not None and placement.size > limit,
        "accumulation": (spec.accumulation or 1) > 1 and not capabilities.accumulation,
        "clipping": spec.max_grad_norm is not None and not capabilities.clipping,
        "activation checkpointing": spec.activation_checkpointing != "off"
        and not capabilities.activation_checkpointing,
        "selective checkpointing": spec.activation_checkpointing == "selective"
        and not capabilities.selective_checkpointing,
        "activation offload": spec.activation_offload and "activations" not in capabilities.offload,
        "compile": bool(spec.compile) and not capabilities.compile,
        "parallelize": spec.parallelize is not None and not capabilities.parallelize,
        "dropout by sample": spec.dropout_seed == "sample" and not capabilities.sample_dropout,
        "skipping": spec.on_nan == "skip" and not capabilities.skip_nan,
    }
    return [what for what, denied in asked.items() if denied]


def merge_all(by_rank: list[list[RankRun]]) -> list[Run]:
    return [merge(list(ranks)) for ranks in zip(*by_rank, strict=True)]


def merge(ranks: list[RankRun]) -> Run:
    """One run from what its ranks saw.

    Raises:
        AssertionError: ranks were told different results, hold different values of one tensor, or
            hold parts of one replica and were given different samples.
    """
    first = ranks[0].trace
    for rank, own in enumerate(ranks):
        for what in ("losses", "grad_norms", "num_items", "skipped", "lrs"):
            _assert_told_alike(what, getattr(own.trace, what), getattr(first, what), rank)
    trace = Trace(first.losses, first.grad_norms, first.num_items, first.lrs, first.skipped)
    trace.weights = assemble_weights([own.state for own in ranks])
    samples = [
        [i for share in step for i in share] for step in zip(*_samples_of(ranks), strict=True)
    ]
    return Run(trace, samples, assemble([own.state.optimizer for own in ranks]), ranks)


def _samples_of(ranks: list[RankRun]) -> Iterable[list[list[int]]]:
    """The samples of each replica, once."""
    found: dict[int, list[list[int]]] = {}
    for rank, own in enumerate(ranks):
        replica = rank if own.data_rank is None else own.data_rank
        if found.setdefault(replica, own.samples) != own.samples:
            raise AssertionError(
                f"rank {rank} holds a part of replica {replica}, and was given other samples than "
                "the ranks that hold the rest of it"
            )
    return found.values()


def _assert_told_alike(what: str, own: list, first: list, rank: int) -> None:
    if repr(own) != repr(first):
        raise AssertionError(f"rank {rank} was told other {what} than rank 0: {own} and {first}")


def assert_same_samples(run: Run, scenario: Scenario) -> None:
    """Each global batch holds the samples of the global order, each once, whatever the ranks."""
    order = scenario.order()
    _assert_epochs(order, len(scenario.data()))
    for step, (trained, expected) in enumerate(zip(run.samples, order, strict=True), start=1):
        if sorted(trained) != sorted(expected):
            raise AssertionError(
                f"step {step} trained on samples {trained}, and its global batch is {expected}"
            )


def _assert_epochs(order: Iterable[list[int]], num_samples: int) -> None:
    """The global order visits every sample once before it visits any again."""
    seen: set[int] = set()
    for batch in order:
        repeated = seen.intersection(batch)
        if repeated or len(set(batch)) < len(batch):
            raise AssertionError(f"samples {sorted(repeated)} come twice in one epoch")
        seen.update(batch)
        if len(seen) == num_samples:
            seen = set()
