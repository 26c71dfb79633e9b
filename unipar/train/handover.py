"""Handing a run over to another number of ranks: who leaves its state, where, and who reads it.

Asked for, all ranks leave it together at the end of a step. Where ranks are lost, one that survives
and holds the whole state leaves that of the last whole step, if it is sure of it. The next group
goes on from what it finds, else from the run's newest checkpoint, else from the start.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from unipar import checkpoint
from unipar.callbacks import StepRecord
from unipar.checkpoint import Manifest
from unipar.checkpoint.save import save_states
from unipar.checkpoint.training import class_names
from unipar.engine import StepEngine
from unipar.errors import CheckpointError
from unipar.launch.blame import classify
from unipar.launch.elastic import Change, Member
from unipar.session import Session
from unipar.strategy import Strategy
from unipar.train.kept_history import Evaluation, KeptHistory
from unipar.utils.host_memory import host_memory
from unipar.utils.version import __version__
from unipar.world import Flag, Placement, World

log = logging.getLogger("unipar")

_LEFT = "handover-"
"""How the names of directories begin in which groups leave the state of the run."""
_PART = "elastic"
"""Where the progress of a handover says what only the next group needs."""


def holds_whole(strategy: Strategy, placement: Placement) -> bool:
    """Whether a rank that is alone can leave the whole state of the run as of a step.

    On an accelerator the host does not know of which step the memory is once a collective fails.
    """
    layout = strategy.layout(placement)
    replicas = not strategy.capabilities().sharded and layout.size == layout.batch
    return replicas and placement.device_type == "cpu"


@dataclass(frozen=True)
class _Whole:
    """The run at the end of a step, but for the tensors."""

    step: int
    num_steps: int
    progress: Mapping[str, Any]
    record: StepRecord | None
    evaluation: Evaluation | None
    owes_evaluation: bool

    @property
    def left(self) -> dict[str, Any]:
        """What the next group needs besides the state."""
        return {
            "record": None if self.record is None else asdict(self.record),
            "evaluation": self.evaluation,
            "owes_evaluation": self.owes_evaluation,
        }


@dataclass
class TakenOver:
    """What a group takes over from those before it, besides the state of the model.

    Attributes:
        records: of the steps until then, on rank 0.
        evaluations: until then.
        recorded: the last step that callbacks know of.
        reached: the last step that was taken before, or ``None``.
        missing: the record of a step that was taken, and that callbacks do not know.
        unsaid: an evaluation of which that is true.
        owes_evaluation: whether the evaluation after the last step was not made.
        began: when the first group began, in seconds since the epoch.
    """

    records: list[StepRecord]
    evaluations: list[Evaluation]
    recorded: int
    reached: int | None
    missing: StepRecord | None
    unsaid: Evaluation | None
    owes_evaluation: bool
    began: float


@dataclass
class Handover:
    """One rank's part in it.

    Args:
        member: the launching process's side of it.
        session: the run's, in which the engine has been prepared.
    """

    member: Member
    session: Session
    _whole: _Whole | None = field(default=None, init=False)
    _besides: Mapping[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        world = self.session.world
        self.keeps = holds_whole(self.session.strategy, world.placement)
        """Whether this rank can leave the state alone, and :meth:`ended_step` is to be called."""
        self._buffers = self._copies() if self.keeps else []
        self.history = KeptHistory(self.member.kept)
        """Is told of each step on rank 0."""

    @property
    def change(self) -> Change | None:
        """What this group has come by."""
        return self.member.change

    # -- from the group before -------------------------------------------------------------------

    def found(self) -> Path | None:
        """Where the state is that a group before has left. Collective."""
        world = self.session.world
        return world.broadcast(newest_left(self.member.places) if world.is_main else None)

    def resumed(self, manifest: Manifest) -> None:
        """Note what the group before has left besides the state."""
        self._besides = manifest.progress.get(_PART, {})

    def take_over(self, step: int) -> TakenOver:
        """What is known of the steps and evaluations up to ``step``. Collective."""
        world = self.session.world
        records, evaluations = self.history.read(step) if world.is_main else ([], [])
        last = records[-1].step if records else None
        told = (last, evaluations, self.history.reached, self.history.began)
        last, evaluations, reached, began = world.broadcast(told)
        record, unsaid = self._besides.get("record"), self._besides.get("evaluation")
        missing = None
        if record is not None and record["step"] == step and (last is None or last < step):
            missing = StepRecord(**record)
        if unsaid is not None:
            unsaid = None if (unsaid[0], unsaid[1]) in evaluations else (unsaid[0], unsaid[1])
        return TakenOver(
            records,
            evaluations,
            step if missing is None else step - 1,
            reached,
            missing,
            unsaid,
            bool(self._besides.get("owes_evaluation")),
            began,
        )

    def settled(self) -> None:
        """Remove what groups before have left: this one has taken a step."""
        if self.session.world.is_main:
            for left in _left(self.member.places):
                shutil.rmtree(left, ignore_errors=True)

    # -- to the group after ----------------------------------------------------------------------

    def look(self) -> None:
        """Ask all ranks to hand over in their next step, if the launching process wants that."""
        world = self.session.world
        if world.is_main and self.member.asked:
            world.raise_flag(Flag.HANDOVER)

    def hand_over(
        self, step: int, progress: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> bool:
        """Leave the run's state; whether this group is to end. Collective."""
        since, world = time.time(), self.session.world
        place = world.broadcast(self._place(self._num_bytes()))
        try:
            path = checkpoint.save(
                place,
                self.session.engines,
                world,
                step=step,
                progress=progress,
                metrics=metrics,
                strategy=self.session.strategy.name,
            )
        except CheckpointError as error:
            if not error.agreed:
                raise
            log.warning("the run cannot be handed over, and goes on as it is: %s", error)
            if world.is_main:
                self.member.refuse()
            return False
        log.info("handing over after step %d, by %s", step, path)
        if world.is_main:
            self.member.handed_over(since)
        return True

    def ended_step(
        self,
        step: int,
        progress: Mapping[str, Any],
        record: StepRecord | None,
        evaluation: Evaluation | None,
        *,
        owes_evaluation: bool,
    ) -> None:
        """Note that the state in this rank's memory is that after ``step`` steps."""
        num_steps = self._engine().num_steps
        self._whole = _Whole(step, num_steps, progress, record, evaluation, owes_evaluation)

    def survive(self, error: BaseException) -> None:
        """Leave the state of the last whole step, if ranks are lost and this one is to do so."""
        if self._whole is None or not classify(error).is_echo:
            return
        if not self.member.another_is_lost():
            return
        whole, engine = self._whole, self._engine()
        if engine.num_steps != whole.num_steps:
            self.member.say_unsure(f"the step after step {whole.step} may have been taken in part")
        elif not all(map(torch.equal, self._buffers, self._copies())):
            self.member.say_unsure("the model has buffers that training changes")
        elif whole.step > 0 and self.member.claim(whole.step):
            self._save_alone(whole, engine)

    def _save_alone(self, whole: _Whole, engine: StepEngine) -> None:
        state = engine.own_state()
        state.extra |= class_names(engine)
        manifest = Manifest(
            path=self._place(self._num_bytes()),
            step=whole.step,
            strategy=self.session.strategy.name,
            world_size=1,
            engines={},
            files={},
            progress={**whole.progress, _PART: whole.left},
            metrics={},
            unipar_version=__version__,
            torch_version=str(torch.__version__),
        )
        try:
            # No generators: those of a step that was under way are of no use to other ranks.
            save_states(manifest, {engine.spec.name: state}, World(Placement()), None)
        except Exception as error:
            # The error that this rank is ending with is not to be hidden.
            self.member.say_unsure(f"it cannot be written: {error}")

    # -- what it takes ---------------------------------------------------------------------------

    def _engine(self) -> StepEngine:
        [engine] = self.session.engines.values()
        assert isinstance(engine, StepEngine)
        return engine

    def _copies(self) -> list[torch.Tensor]:
        return [buffer.detach().clone() for buffer in self._engine().module.buffers()]

    def _num_bytes(self) -> int:
        """Bytes of the whole state."""
        state = self._engine().own_state()
        tensors = [*state.weights, *state.optimizer]
        return sum(one.dtype.itemsize * torch.Size(one.shape).numel() for one in tensors)

    def _place(self, num_bytes: int) -> Path:
        """Memory, where the state takes less than half of what is free; else the last place."""
        *preferred, last = self.member.places
        for place in preferred:
            free = min(shutil.disk_usage(place).free, host_memory().available)
            if 2 * num_bytes < free:
                return place / f"{_LEFT}{self.member.restart}"
        return last / f"{_LEFT}{self.member.restart}"


def say_what_changes(module: nn.Module, dropout_seed: Literal["rank", "sample"]) -> None:
    """Say what of a model depends on the number of ranks, and so differs after a change."""
    kinds: dict[str, Any] = {
        "BatchNorm, whose statistics are those of a rank's micro-batch": nn.BatchNorm1d
        | nn.BatchNorm2d
        | nn.BatchNorm3d,
    }
    if dropout_seed == "rank":
        drops = (
            "dropout, which each rank draws from a stream of its own (dropout_seed='sample' draws "
            "for each sample)"
        )
        kinds[drops] = (
            nn.Dropout
            | nn.Dropout1d
            | nn.Dropout2d
            | nn.Dropout3d
            | nn.AlphaDropout
            | nn.FeatureAlphaDropout
            | nn.MultiheadAttention
            | nn.RNNBase
        )
    found = [what for what, kind in kinds.items() if _has(module, kind)]
    if found:
        log.warning(
            "the number of ranks may change, and with it the numbers of what depends on it: the "
            "model has %s. All else is as in a run that is not disturbed.",
            "; and ".join(found),
        )


def _has(module: nn.Module, kind: Any) -> bool:
    for one in module.modules():
        p = getattr(one, "p", getattr(one, "dropout", 1.0))
        # Between layers, of which one alone has none.
        if isinstance(one, kind) and p > 0 and getattr(one, "num_layers", 2) > 1:
            return True
    return False


def _left(places: Iterable[Path]) -> list[Path]:
    """What groups have left that no group has gone on from."""
    return [left for place in places for left in place.glob(f"{_LEFT}*")]


def newest_left(places: Iterable[Path]) -> Path | None:
    """The newest checkpoint in which groups have left the state of a run."""
    found = [path for left in _left(places) if (path := checkpoint.newest(left)) is not None]
    return max(found, key=checkpoint.step_of, default=None)
