"""A script's own module and optimizer, once an engine trains the one with the other."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from unipar.checkpoint.load import agree
from unipar.compat.fp32_outputs import cast
from unipar.compat.gathering import GatheredModel, GatheredOptimizer, nested, outer
from unipar.compat.models import Calls, PreparedModel
from unipar.compat.optimizers import PreparedOptimizer
from unipar.engine import StepEngine, broadcast_tensors
from unipar.engine.replicas import unlike
from unipar.errors import CheckpointError, ConfigError, first_few
from unipar.world import World

log = logging.getLogger("unipar")

_CALLS = Calls(
    prepare="the first call of the model",
    optimized="build one optimizer over all parameters that are trained",
    backward="loss.backward()",
    clip="torch.nn.utils.clip_grad_norm_",
    whole="unipar.compat.torch.whole_state_dict(model)",
    save="unipar.compat.torch.save_state(directory)",
    load="unipar.compat.torch.load_state(directory)",
    unwrap="copy.deepcopy(model)",
)


class AdoptedModel(PreparedModel):
    """The engine's side of a module that stays where the script has it.

    Attributes:
        called: whether it was called since its last backward pass, so as to be trained.
        through: whether the pass of now is by DDP, and not within its no_sync().
        listed: its weights, when these were last looked at.
        versions: the same, and how often each had been written to when ranks last had the same.
        evened: how often ranks were given the same since.
        told_unlike: whether it was said that they had others.
    """

    _unipar_passes = True
    face_calls: ClassVar[Calls] = _CALLS
    guards_module: ClassVar[bool] = False
    called: bool
    through: bool
    listed: list[torch.Tensor]
    versions: list[tuple[torch.Tensor, int]] | None
    evened: int
    told_unlike: bool
    gives: torch.dtype | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By the script, if at all.
        self._unipar_shared = True
        self.__dict__["versions"], self.__dict__["evened"] = None, 0
        self.__dict__["listed"] = list[torch.Tensor]()
        self.__dict__["told_unlike"], self.__dict__["gives"] = False, None
        self.__dict__["called"] = self.__dict__["through"] = False

    @property
    def world(self) -> World:
        """The joined processes."""
        return self._unipar_session.world

    @property
    def learns(self) -> bool:
        """Whether a parameter of it is trained."""
        return any(one.requires_grad for one in self.module.parameters())

    @property
    def is_trained(self) -> bool:
        """Whether the script still has the optimizer that it was taken up with."""
        training = self.training_by
        return training is not None and training.engine in self._unipar_session.engines.values()

    @property
    def syncs(self) -> bool:
        return self.through

    @property
    def divided(self) -> bool:
        """Whether each rank has a part of the weights."""
        return "parameters" in self._unipar_session.capabilities.sharded

    @property
    def sums_in_order(self) -> bool:
        """Whether ranks sum gradients block after block, so that all are to use the same ones."""
        return bool(self._unipar_session.capabilities.sharded)

    def _begin_pass(self) -> None:
        """Nothing: DDP's own forward does it, and ranks need not evaluate together around it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return output if self.gives is None else cast(output, self.gives)

    def note(self, output: Any, inputs: Any) -> None:
        """Note on an output which models a loss of it would train."""
        if torch.is_grad_enabled() and self.training_by is not None:
            self.__dict__["called"] = self.training_by.called = True
            self._note(self.training_by, output, inputs)

    def even_out_weights(self) -> None:
        """Where a script has changed weights by hand, take rank 0's. Collective then.

        A script that knows nothing of ranks may have drawn them at random, of which ranks draw
        others.
        """
        self.__dict__["listed"] = list(self.module.parameters())
        # By torch.func.functional_call it may have what other weights are made of.
        if self.divided or not all(one.is_leaf for one in self.listed):
            return
        before, now = self.versions, self._versions()
        if before is not None and not _same(before, now):
            self.__dict__["evened"] = self.evened + 1
            if self.evened & (self.evened - 1) == 0 and not self.told_unlike:
                self._tell_unlike()
            broadcast_tensors(self.listed, self.world)
            now = self._versions()
        self.__dict__["versions"] = now

    def _tell_unlike(self) -> None:
        names = unlike(self.module.named_parameters(), self.world)
        self.__dict__["told_unlike"] = bool(names)
        if names and self.world.is_main:
            log.warning(
                "weights (%s) that the script changes by hand are others on each rank, and rank "
                "0's are taken. What is made of a batch is so of rank 0's part of it, and not as "
                "on one process.",
                first_few(names),
            )

    def note_step(self) -> None:
        """An engine has changed the weights, on all ranks alike."""
        self.__dict__["versions"] = self._versions()

    def _versions(self) -> list[tuple[torch.Tensor, int]]:
        return [(one, one._version) for one in self.listed]

    def gathered(self, *, rank0_only: bool = False) -> GatheredModel:
        """The whole of what ranks may have parts of."""
        assert self.training_by is not None
        return GatheredModel(self.training_by.engine, self.world, rank0_only=rank0_only)


def _same(before: list[tuple[torch.Tensor, int]], now: list[tuple[torch.Tensor, int]]) -> bool:
    # A script may put another parameter in the place of one.
    return len(before) == len(now) and all(
        one is other and version == other_version
        for (one, version), (other, other_version) in zip(before, now, strict=True)
    )


class AdoptedOptimizer(PreparedOptimizer):
    """The engine's side of an optimizer that stays where the script has it.

    Attributes:
        summed: whether its steps are by the sum over ranks, and not by the mean.
        passes: how many losses have trained its model.
        compressed: whether the script's framework sums its gradients in fp16.
        skips: whether a step by gradients that are not finite is left out, by more than the loss.
        adds_own: whether the framework leaves the gradients of the pass that begins to each rank.
    """

    calls: ClassVar[Calls] = _CALLS
    keeps_model: ClassVar[bool] = True
    summed = compressed = skips = adds_own = False
    passes = 0

    @property
    def world(self) -> World:
        """The joined processes."""
        return self._session.world

    def take_over(self, model: AdoptedModel, **asked: Any) -> None:
        """:meth:`takes_up`, also with state from a file. Collective."""
        # Some strategies put other parameters, or fewer, into the groups.
        self._numbered: list[list[str]] = []
        for group in self.optimizer.param_groups:
            self.number(group, model)
        stored = self.optimizer.state_dict() if self.divided and self.optimizer.state else None
        if stored is not None:
            self.optimizer.state.clear()
        self.takes_up(model, **asked)
        self._taken = self._held()
        if stored is not None:
            self.import_numbered(stored)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._find_apart()

    def number(self, group: Mapping[str, Any], model: Any = None) -> None:
        """Count the parameters of a group after those of the groups before it."""
        model = model or self.model
        self._numbered.append([model.name_of(one) or "" for one in group["params"]])

    @property
    def scales_loss(self) -> bool:
        """Whether it steps by the sum over ranks, as the mean of losses that are so much larger."""
        return self.summed

    @property
    def steps_by_hand(self) -> bool:
        """Whether a script may step by what it has put into ``parameter.grad`` itself."""
        return self.alike and self.lends_gradients

    @property
    def is_by_hand(self) -> bool:
        """Whether a step is by what a script has put into ``parameter.grad`` itself."""
        if self.begun:
            return False
        if self.alike:
            return self.steps_by_hand
        return self.by_own_gradients and self._has_gradients()

    @property
    def by_own_gradients(self) -> bool:
        """Whether each rank may step by what it has there, as under DDP."""
        return self.same_parameters and self.lends_gradients and not self.divided

    def _own_gradients(self) -> str:
        if not self.same_parameters or self.by_own_gradients:
            return ""
        return (
            " Strategies that divide gradients, or an optimizer's state, step by what comes of it "
            "alone: to step by gradients that a script puts into p.grad itself use ddp, without "
            "shard_optimizer."
        )

    def without_stand_ins(self) -> contextlib.AbstractContextManager[None]:
        """Around a backward pass of another model's loss, which may go through this one's."""
        engine = self._known().engine
        if isinstance(engine, StepEngine):
            return engine.without_stand_ins()
        return contextlib.nullcontext()

    def begin_pass(self, *, unsynced: bool) -> None:
        """Before a backward pass: have it add to the gradients that there are, as in PyTorch.

        Args:
            unsynced: whether it is within the script's no_sync().

        Raises:
            ConfigError: gradients of the last step are there in PyTorch, and are not here; or the
                script has put some there that are this rank's own.
        """
        if self.uncleared and not self.lends_gradients:
            raise ConfigError(
                "the optimizer has stepped, and gradients were not cleared since: PyTorch would "
                "add to those of the last step, which an engine has cleared. Call "
                "optimizer.zero_grad() before this loss.backward(); p.grad = None is not seen."
            )
        # DDP alone leaves them to each rank by its forward pass.
        self.adds_own = self._known().leaves_own if self.same_parameters else unsynced

    @property
    def sums_what_is_there(self) -> bool:
        return self.by_own_gradients and not self.alike

    def _keep_what_is_there(self, *, own: bool) -> None:
        engine, parameters = self._known().engine, self._known().engine.module.parameters()
        fetched = self.alike and self.begun and self.lends_gradients and engine.fetched  # pyright: ignore[reportAttributeAccessIssue]
        if self.uncleared or fetched or (self.steps_by_hand and not self.begun):
            # PyTorch would add to what is there, which is reduced already, or each rank's own.
            self._carries_own |= self.uncleared and self.steps_own
            self._set_aside(parameters)
            self.uncleared = False
            if fetched:
                engine.zero_grad()
                self.begun = False
        elif not self.alike:
            super()._keep_what_is_there(own=own)
        elif self.lends_gradients and not self.begun:
            self._set_aside(self._apart)

    def backward(self, loss: torch.Tensor, **how: Any) -> None:
        super().backward(loss, unsynced=self.adds_own, **how)
        assert isinstance(self.model, AdoptedModel)
        self.model.__dict__["called"] = False

    def add_by_hand(self, run: Callable[[], None]) -> None:
        """Add the gradients of a loss that no call of the model has made, alike on all ranks.

        Args:
            run: its backward pass.
        """
        engine = self._known().engine
        if self.begun and not self.alike:
            self.fetch_gradients()
        if not (self.begun and self.alike) or engine.fetched:  # pyright: ignore[reportAttributeAccessIssue]
            run()
            return
        # What is there is the engine's, of a rank's part of the batch.
        parameters = list(engine.module.parameters())
        held = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        try:
            run()
            self._carried.keep((p, p.grad) for p in parameters if p.grad is not None)
        finally:
            for p, grad in zip(parameters, held, strict=True):
                p.grad = grad

    def take_step(self) -> None:
        engine = self._known().engine
        evens = self.alike and self.world.size > 1
        if evens and self.lends_gradients and engine.gradients_changed:  # pyright: ignore[reportAttributeAccessIssue]
            self._agree()
        assert isinstance(self.model, AdoptedModel)
        if evens:
            self.model.even_out_weights()
        if not self.is_by_hand:
            if self.skips and self._limit is None:
                # The norm tells whether gradients are finite.
                self._limit = math.inf
            super().take_step()
        else:
            self._carried.add()
            self._forget()
            if evens:
                self._agree()
            self._last, self.stepped, self.steps_own = None, True, not self.alike
            engine.step_by_hand()  # pyright: ignore[reportAttributeAccessIssue]
        if evens:
            self.model.note_step()
        if not self.lends_gradients and isinstance(engine, StepEngine):
            # PyTorch leaves them until they are cleared.
            engine.hide_gradients()
        self.uncleared = True
        # What the model gave before may have been differentiated by other means.
        self.model.__dict__["called"] = False

    def _agree(self) -> None:
        """Step by rank 0's gradients, where ranks have changed them by random numbers."""
        assert self.model is not None
        grads = [p.grad for p in self.model.module.parameters() if p.grad is not None]
        if not grads:
            return
        norms = self.world.gather(float(torch.nn.utils.get_total_norm(grads)))
        if len(set(norms)) > 1:
            broadcast_tensors(grads, self.world)

    # -- state, by the numbers of parameters, as PyTorch has it ----------------------------------

    def export_numbered(self) -> dict[str, Any]:
        """The whole state, whatever ranks divide. Collective."""
        self._renumber()
        found = self.gathered().state_dict()
        state = {
            number: found["state"][outer(name)] for number, name in enumerate(self._names())
            if outer(name) in found["state"]
        }  # fmt: skip
        groups, first = [], 0
        for group, names in zip(self.optimizer.param_groups, self._numbered, strict=True):
            groups.append({**group, "params": list(range(first, first + len(names)))})
            first += len(names)
        return {"state": state, "param_groups": groups}

    def import_numbered(self, stored: Mapping[str, Any]) -> None:
        """Take over whole state, by numbers or by the names of parameters. Collective."""
        self._renumber()
        names = self._names()
        error = None
        if stored and "state" not in stored:
            try:
                stored = nested(stored, [list(map(outer, one)) for one in self._numbered])
            except CheckpointError as found:
                error = str(found)
        # Rank 0 alone may have it.
        agree(self.world, error)

        def name(one: Any) -> str:
            return one if isinstance(one, str) else names[one]

        state = {name(one): values for one, values in stored.get("state", {}).items()}
        groups = [
            {**group, "params": [name(one) for one in group["params"]]}
            for group in stored.get("param_groups", ())
        ]
        self.gathered().load_state_dict({"state": state, "param_groups": groups} if groups else {})

    def gathered(self, *, rank0_only: bool = False) -> GatheredOptimizer:
        """The whole of what ranks may have parts of, by the names of parameters."""
        return GatheredOptimizer(self._known().engine, self.world, rank0_only=rank0_only)

    def _renumber(self) -> None:
        """Count what a script has put into the groups since, where a strategy lets it."""
        groups = getattr(self._known().engine, "groups", None)
        if self._held() != self._taken and (groups is None or not groups.apart):
            self._taken, self._numbered = self._held(), []
            for group in self.optimizer.param_groups:
                self.number(group)

    def _held(self) -> list[list[int]]:
        return [[id(one) for one in group["params"]] for group in self.optimizer.param_groups]

    def _names(self) -> list[str]:
        return [name for names in self._numbered for name in names]
