"""Which models and optimizers of a script an engine trains, from when and until when."""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from unipar.compat import hooks
from unipar.compat.adopted import AdoptedModel, AdoptedOptimizer
from unipar.compat.delayed import DelayedOptimizer
from unipar.compat.dividing.batch_norms import is_batch_norm, normalize_over
from unipar.compat.dividing.splitting import Splitting
from unipar.compat.optimizers import frozen_in
from unipar.compat.routed import model_class, optimizer_class
from unipar.compat.run import current, may_leave_unused
from unipar.compat.script import Script
from unipar.engine import COMPUTE_DTYPES
from unipar.engine.absent import take_away
from unipar.errors import ConfigError
from unipar.session import Session
from unipar.strategy import Precision

PRECISIONS: dict[Any, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""What a run computes in where a script asks for these."""


class Adopter(Script):
    """What a script has built so far, and what engines train of it.

    Attributes:
        scripts_precision: whether the run has the precision that the script asks for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scripts_precision = False
        self._pending: list[weakref.ref[Optimizer]] = []
        self._trained: list[weakref.ref[AdoptedOptimizer]] = []
        self._passed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._wrapped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._making: weakref.WeakSet[Any] = weakref.WeakSet()
        self._alone: weakref.WeakSet[Any] = weakref.WeakSet()
        self._frozen: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
        self._untrained: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._splittings: weakref.WeakKeyDictionary[AdoptedModel, Splitting] = (
            weakref.WeakKeyDictionary()
        )
        self._routes: weakref.WeakValueDictionary[AdoptedOptimizer, Any] = (
            weakref.WeakValueDictionary()
        )
        self._names = 0

    # -- what the script builds ------------------------------------------------------------------

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Take notice of an optimizer that has just been built."""
        if self.inside or isinstance(optimizer, AdoptedOptimizer) or hasattr(optimizer, "routed"):
            return
        optimizer.__class__ = optimizer_class(type(optimizer), self)
        self._pending.append(weakref.ref(optimizer))
        self._passed.clear()
        hooks.watch(True)

    def leave(self, optimizer: Optimizer) -> None:
        """Leave an optimizer that waits for its model to another face."""
        rest = [ref for ref in self._pending if ref() is not optimizer]
        if len(rest) < len(self._pending):
            self._pending = rest
            optimizer.__class__ = type(optimizer)._unipar_kind  # pyright: ignore

    def note_wrapped(self, one: Any) -> None:
        """Take notice of a model, or an optimizer, that the script gives to a framework."""
        self._wrapped.add(one)
        if isinstance(one, nn.Module):
            self._frozen[one] = frozen_in(one)
        else:
            held = [p for group in one.param_groups for p in group["params"]]
            self._untrained[one] = [p for p in held if not p.requires_grad]
        self.note_aware()

    @property
    def trained(self) -> list[AdoptedOptimizer]:
        """The optimizers that engines step."""
        return [one for ref in self._trained if (one := ref()) is not None]

    @property
    def _waiting(self) -> list[Optimizer]:
        """The optimizers that no engine steps yet."""
        return [one for ref in self._pending if (one := ref()) is not None]

    def models(self) -> list[AdoptedModel]:
        """The models that engines train."""
        return [one.model for one in self.trained if isinstance(one.model, AdoptedModel)]

    def optimizers_of(self, parameters: list[torch.Tensor]) -> tuple[list[AdoptedOptimizer], bool]:
        """The optimizers whose models have some of these parameters.

        Returns:
            They, and whether it is one, and the parameters are all those of its model.
        """
        found: list[AdoptedOptimizer] = []
        whole = False
        for one in self.trained:
            model = one.model
            assert model is not None
            # A strategy may have put tensors of its own into the optimizer's groups.
            own = {
                id(p) for group in one.optimizer.param_groups for p in group["params"]
                if model.name_of(p) is None
            }  # fmt: skip
            names = {id(p): model.name_of(p) for p in parameters}
            known = {key for key, name in names.items() if name is not None or key in own}
            if known:
                found.append(one)
                wanted = {name for name, p in model.module.named_parameters() if p.requires_grad}
                given = wanted <= set(names.values()) or (bool(own) and own <= known)
                whole = given and known == names.keys()
        return found, whole and len(found) == 1

    # -- taking up -------------------------------------------------------------------------------

    def takes(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Put a module under the strategy if it is what an optimizer updates. Collective if so.

        Args:
            module: what is called.
            args: what it is called with.
            kwargs: likewise.
        """
        # Before training, a model computes by itself; how training is meant is seen when it begins.
        if self.inside or not torch.is_grad_enabled() or is_transformed():
            return False
        if module in self._passed or getattr(module, "_unipar_passes", False):
            return False
        held = {id(parameter) for parameter in module.parameters()}
        pending = self._waiting
        if any(map(is_lazy, module.parameters())):
            # This call makes its weights, and trains by itself; the next one is an engine's.
            self._making.update(one for one in pending if held & _parameters(one))
            return False
        touching = [one for one in pending if held & _parameters(one) and not _holds(one, pending)]
        found = [one for one in touching if _parameters(one) <= held]
        its_own = len(touching) == 1 and bool(found)
        if its_own and not any(parameter.requires_grad for parameter in module.parameters()):
            # It may be thawed, as a GAN's networks are in turn.
            return False
        if not its_own or not self._may_take(module, found[0]):
            self._passed.add(module)
            return False
        self._take(module, found[0], args, kwargs)
        return True

    def _may_take(self, module: nn.Module, optimizer: Optimizer) -> bool:
        alone = current.placement().size == 1
        scripted = isinstance(module, torch.jit.ScriptModule)
        odd = scripted or isinstance(optimizer, torch.optim.LBFGS)
        if odd and not alone and self.aware:
            raise ConfigError(
                f"{type(module).__name__} is a scripted module, and on several ranks an engine "
                "trains it, which takes a module of Python. Leave torch.jit.script out."
                if scripted
                else f"{type(module).__name__} is trained by {type(optimizer).__name__}, which "
                "computes the loss several times in a step, and on several ranks an engine "
                "computes it once. Use another optimizer, or one process."
            )
        return not odd

    def _take(self, module: nn.Module, optimizer: Any, args: Any, kwargs: Any) -> None:
        alone = current.placement().size == 1
        known = any(one in self._wrapped for one in (module, optimizer))
        if self.aware and not alone and not known:
            self._refuse_unwrapped(module)
        session = self._open(module)
        self._names += 1
        name = "model" if "model" not in session.engines else f"model{self._names}"
        self._check_synchronized(module)
        if self.synchronized and not getattr(session.strategy.options, "sync_batchnorm", False):
            nn.SyncBatchNorm.convert_sync_batchnorm(module)
        config, kind = current.config, type(module)
        half = config.precision if config else "fp32"
        with self.engine_calls():
            model = AdoptedModel(
                module, session, half=None if half == "fp32" else COMPUTE_DTYPES[half],
                device=session.world.device, widens=not self.scripts_precision,
            )  # fmt: skip
            model.__dict__["gives"] = self.gives.get(module)
            adopted = self._adopted(module, optimizer, session)
            splitting, compiled = None, self.compiled.get(module, False)
            if not self.aware and session.world.data_size > 1:
                divides = config is None or config.divide_batches
                splitting = Splitting(model, self.tell, divides=divides, compiled=bool(compiled))
                self._splittings[model] = splitting
                splitting.look_at(args, kwargs)
            self._take_over(model, adopted, session, name, compiled)
            if splitting is not None:
                splitting.begin()
        self._route(optimizer, adopted)
        module.__class__ = model_class(type(module), kind, self)
        module.__dict__["_unipar"] = model
        self._trained.append(weakref.ref(adopted))
        weakref.finalize(optimizer, _release, session, name).atexit = False

    def _refuse_unwrapped(self, module: nn.Module) -> NoReturn:
        """Refuse a model that the script gives to no framework, itself or as a part of another."""
        kind = type(module).__name__
        for whole in self._wrapped:
            if not isinstance(whole, nn.Module) or all(
                one is not module for one in whole.modules()
            ):
                continue
            held = {id(parameter) for parameter in whole.parameters()}
            updating = [type(one).__name__ for one in self._waiting if held & _parameters(one)]
            if len(updating) > 1:
                raise ConfigError(
                    f"a {type(whole).__name__} is wrapped, and several optimizers update it "
                    f"({' and '.join(updating)}), of which one has all of its {kind}: an engine "
                    "trains what is wrapped by one optimizer. Give one optimizer all parameters, "
                    "in groups, each of which has its own lr and other options; or, under a "
                    "strategy that leaves gradients whole, such as ddp, wrap each part for "
                    "itself, as model.part = DistributedDataParallel(model.part), and give it "
                    "its optimizer."
                )
            raise ConfigError(
                f"this {kind} is a part of a {type(whole).__name__} that is wrapped, and is called "
                "around that, so its replicas would drift apart. Call what wraps it, or wrap it "
                "for itself: model.part = DistributedDataParallel(model.part)."
            )
        raise ConfigError(
            f"this {kind} is trained on {current.placement().size} ranks that have data of their "
            "own, and is not wrapped, so its replicas would drift apart. Wrap it: "
            "DistributedDataParallel(model), or hvd.DistributedOptimizer(optimizer)."
        )

    def _adopted(self, module: nn.Module, optimizer: Any, session: Session) -> AdoptedOptimizer:
        """The engine's side of an optimizer, with what the script says of its steps."""
        config = current.config
        scales = config is not None and config.precision == "fp16"
        skips = config is not None and config.on_nan == "skip"
        delay = self.delays.get(optimizer)
        kind = AdoptedOptimizer if delay is None else DelayedOptimizer
        adopted = kind(
            optimizer.own(), session, accumulating=lambda: False, may_skip=scales or skips
        )
        if isinstance(adopted, DelayedOptimizer) and delay is not None:
            adopted.delay = delay
        adopted.summed = optimizer in self.sums
        adopted.compressed = optimizer in self.compresses
        adopted.finds_unused = may_leave_unused(self.options.get(module, {}))
        adopted.of_thawed = self.of_thawed.get(optimizer)
        adopted.alike = not self.aware or current.placement().size == 1
        adopted.same_parameters = self.by_ddp
        adopted.skips = skips and not scales
        adopted.frozen = self._frozen.get(module)
        if optimizer in self._untrained:
            # The framework has the optimizer, whose parameters have no names yet.
            ids = {id(one) for one in self._untrained[optimizer]}
            named = module.named_parameters()
            adopted.frozen = frozenset(name for name, p in named if id(p) in ids)
        return adopted

    def _take_over(
        self,
        model: AdoptedModel,
        adopted: AdoptedOptimizer,
        session: Session,
        name: str,
        compiled: Any,
    ) -> None:
        """Have an engine train a model, which may have gradients already. Collective."""
        module, kind = model.module, type(model.module)
        # An engine before this one has stepped last.
        adopted.uncleared = take_away(module.parameters())
        there = [one.grad for one in module.parameters() if one.grad is not None]
        same: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if not self.aware:
            # Ranks are given the weights that they have, which graphs of before may be of.
            # torch 2.8 to 2.13, autograd/grad_mode.py.
            same = torch.autograd._unsafe_preserve_version_counter(tuple(module.parameters()))  # pyright: ignore[reportPrivateImportUsage]
        with same:
            options = self._options_of(model.module)
            if adopted.compressed and session.world.size > 1:
                options |= self._compression(session)
            adopted.take_over(model, name=name, compile=compiled, strategy_options=options)
        if not adopted.lends_gradients and any(bool(grad.any()) for grad in there):
            session.release(name)
            raise ConfigError(
                f"{kind.__name__} has gradients from before its first call, and strategy "
                f"'{session.strategy.name}' keeps gradients elsewhere, so its steps would "
                "be without these. Clear them before; or add what they are of to the loss of what "
                "the model gives."
            )

    def _options_of(self, module: nn.Module) -> dict[str, Any]:
        """What a wrapper has asked of the strategy for its model, unless settings decide."""
        asked, session = self.options.get(module), current.session
        if not asked or session is None or current.decides("strategy"):
            return {}
        return {key: one for key, one in asked.items() if key in session.strategy.engine_options}

    def _compression(self, session: Session) -> dict[str, Any]:
        """The option by which a strategy sums one optimizer's gradients in fp16, if it has one."""
        strategy = session.strategy
        if "compression" in strategy.options.model_fields_set:
            return {}
        if "compression" in strategy.engine_options:
            return {"compression": "fp16"}
        self.tell(
            "compression=hvd.Compression.fp16: strategy '%s' sums gradients as they are, without "
            "rounding them to fp16 as Horovod does. Leave it out, or use ddp or horovod.",
            strategy.name,
        )
        return {}

    def _route(self, optimizer: Any, adopted: AdoptedOptimizer) -> None:
        """Have an optimizer step by its engine, and those that hold it."""
        optimizer.routed(adopted)
        self._routes[adopted] = optimizer
        around: list[Any] = [one for one in self._waiting if _holds(one, [optimizer])]
        for one in around:
            self._check_around(one, optimizer, adopted)
            one.routed_within(adopted)
        done = {id(one) for one in (None, optimizer, *around)}
        self._pending = [ref for ref in self._pending if id(ref()) not in done]
        if not self._pending:
            hooks.watch(False)

    @staticmethod
    def _check_around(outer: Any, inner: Optimizer, adopted: AdoptedOptimizer) -> None:
        """Refuse an optimizer around another where it would not find what it changes by itself."""
        assert adopted.model is not None
        own = {id(one) for one in adopted.model.module.parameters()}
        if adopted.lends_gradients and _parameters(inner) <= own:
            return
        strategy = current.config.strategy if current.config else ""
        raise ConfigError(
            f"{type(outer).__name__} steps by the {type(inner).__name__} that it holds, and "
            f"strategy '{strategy}' divides gradients, or what that one has to step by, among "
            "ranks, where what is around it (SAM, Lookahead) would use them. Use a strategy that "
            "leaves both whole, such as ddp or horovod."
        )

    def _again(self, model: AdoptedModel, args: Any, kwargs: Any) -> nn.Module | None:
        """A model that the script has built another optimizer for, taken up with that one."""
        pending = self._waiting
        # A part of it may have been replaced.
        held = {id(parameter) for parameter in model.module.parameters()}
        found = [
            one for one in pending
            if not _holds(one, pending) and any(
                id(p) in held or model.name_of(p) is not None
                for g in one.param_groups for p in g["params"]
            )
        ]  # fmt: skip
        if not found:
            return None
        # Schedulers and optimizers hold each other.
        gc.collect()
        several = len(found) > 1 or model.is_trained
        if (several or not self._may_take(model.module, found[0])) and self._give_back(model):
            return model.module
        if len(found) > 1 or model.divided or model.is_trained:
            raise ConfigError(
                "another optimizer was built for a model that one trains already"
                + (", and each rank has a part of its weights" if model.divided else "")
                + ". Let the first one go (del optimizer) before the model is called again, under "
                "a strategy that leaves weights whole; or keep it: give it all parameters at "
                "first, toggle requires_grad, and change param_group['lr']."
            )
        self._let_go(model)
        self._take(model.module, found[0], args, kwargs)
        return model.module

    def _let_go(self, model: AdoptedModel) -> None:
        module = model.module
        self._trained = [ref for ref in self._trained if (one := ref()) and one.model is not model]
        del module.__dict__["_unipar"]
        module.__class__ = type(module)._unipar_kind  # pyright: ignore[reportAttributeAccessIssue]

    def _give_back(self, model: AdoptedModel) -> bool:
        """Leave a model to torch, on each rank, which several optimizers are to train.

        Returns:
            Whether that is possible: ranks make the same steps, and have whole weights.
        """
        adopted = next((one for one in self.trained if one.model is model), None)
        optimizer: Any = None if adopted is None else self._routes.get(adopted)
        if model.divided or self.aware or (adopted is not None and not adopted.steps_by_hand):
            return False
        assert model.training_by is not None
        session, engine = current.session, model.training_by.engine
        assert session is not None
        self._let_go(model)
        with self.engine_calls():
            normalize_over(None, model.module)
            for name in [n for n, one in session.engines.items() if one is engine]:
                session.release(name)
        # The script may have let go of the first one.
        if optimizer is not None:
            optimizer.given_back()
            self._pending.append(weakref.ref(optimizer))
        self._passed.add(model.module)
        return True

    def _open(self, module: nn.Module) -> Session:
        if current.session is not None:
            return current.session
        asked = dict(self.asked)
        first = next(module.parameters())
        # FSDP moves a model to GPUs itself.
        if first.device.type == "cpu" and not self.gathers:
            asked["device"] = "cpu"
        kind = current.device_type(asked)
        own = replace(current.placement(), device_type=kind).device
        if first.is_cuda and own.type == "cuda" and first.device != own:
            raise ConfigError(
                f"the model is on {first.device}, and rank {current.placement().rank} computes on "
                f"{own}, by its local rank. Put the model there, or let CUDA_VISIBLE_DEVICES name "
                "the GPUs that are to be used, in order of local ranks."
            )
        if torch.is_autocast_enabled(kind):
            asked["precision"] = PRECISIONS[torch.get_autocast_dtype(kind)]
        if isinstance(asked.get("strategy"), dict) and current.placement().size == 1:
            # Options of a wrapper that one process has no use for.
            del asked["strategy"]
        current.unasked |= not dist.is_initialized()
        with self.engine_calls():
            session = current.open(asked)
        world = session.world
        if self.aware and world.data_size != world.size:
            raise ConfigError(
                f"strategy '{session.strategy.name}' lets {world.size // world.data_size} ranks "
                "share their samples, and the script gives each its own. Use a strategy of data "
                "parallelism, or take the division of data out of the script."
            )
        self.scripts_precision = (
            current.config is not None and not self.by_policy
            and current.config.precision == asked.get("precision", "fp32")
        )  # fmt: skip
        return session

    def _check_synchronized(self, module: nn.Module) -> None:
        """Refuse to convert what the script has not."""
        norms = [one for one in module.modules() if is_batch_norm(one)]
        if self.synchronized and not all(one in self.synchronized for one in norms):
            raise ConfigError(
                "SyncBatchNorm.convert_sync_batchnorm was given some of the batch norms that are "
                f"trained, and not all of this {type(module).__name__}'s: strategies have them "
                "over all ranks, or over each rank's own samples. Convert whole models, and every "
                "one that is trained; or none."
            )

    def check_alone(self, optimizer: Optimizer) -> None:
        """Refuse a step by gradients that several ranks would have to sum."""
        if self.inside or current.placement().size == 1:
            return
        if optimizer in self._making and not self.aware:
            self._making.discard(optimizer)
            return
        if not self.aware:
            if optimizer not in self._alone:
                self._alone.add(optimizer)
                self._tell_alone(optimizer)
            return
        kind = type(optimizer).__name__
        holder = _holder_of(optimizer)
        if holder is not None:
            raise ConfigError(
                f"this {kind} updates {holder}, which was never called as a whole with gradients: "
                "its parts were, or methods of it other than forward. On several ranks an engine "
                "takes over what is called, and sums gradients. Have forward do what that method "
                "does, call the module (or DistributedDataParallel around it), and leave out what "
                "sums p.grad by hand."
            )
        raise ConfigError(
            f"this {kind} updates no module that was called: on several ranks an engine sums "
            "gradients, and trains the parameters of one nn.Module that is called as a whole. Put "
            "them into one, with one optimizer."
        )

    def _tell_alone(self, optimizer: Optimizer) -> None:
        """Warn of an optimizer by which each rank does what one process would do."""
        updated = _parameters(optimizer)
        beside = [one for one in self._waiting if one is not optimizer]
        beside = [one for one in beside if updated & _parameters(one)] + [
            one.optimizer for one in self.trained
            if one.model and any(id(p) in updated for p in one.model.module.parameters())
        ]  # fmt: skip
        others = " and ".join(type(one).__name__ for one in beside)
        self.tell(
            "this %s %s, so each of %d ranks trains by itself what it updates, without the "
            "strategy: results are those of one process, and no faster.%s",
            type(optimizer).__name__,
            f"shares its model with {others}" if others
            else "updates no module that was called as a whole",
            current.placement().size,
            " Let go of one that is done (del optimizer) before the next is built."
            if others else "",
        )  # fmt: skip


def is_transformed() -> bool:
    """Whether a transform of torch.func is under way, or forward-mode AD."""
    # torch 2.8 to 2.13: torch/_functorch, torch/autograd/forward_ad.py.
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0  # pyright: ignore[reportAttributeAccessIssue]


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(one) for group in optimizer.param_groups for one in group["params"]}


def _holds(optimizer: Optimizer, others: list[Optimizer]) -> bool:
    """Whether one steps by another that it holds, whose groups are its own, as SAM does."""
    held = {id(one) for one in vars(optimizer).values()}
    own = {id(group) for group in optimizer.param_groups}
    return any(
        id(one) in held and own & {id(group) for group in one.param_groups} for one in others
    )


def _holder_of(optimizer: Optimizer) -> str | None:
    """The class of the smallest module that has all parameters of an optimizer, if one has."""
    updated = _parameters(optimizer)
    # It is looked for where a script ends by an error.
    sizes = {}
    for one in gc.get_objects():
        kind = type(one)
        if not issubclass(kind, nn.Module) or issubclass(kind, (nn.ModuleList, nn.ModuleDict)):
            continue
        # One may be half built.
        with contextlib.suppress(AttributeError):
            held = [id(parameter) for parameter in one.parameters()]
            if not getattr(one, "_unipar_passes", False) and updated <= set(held):
                sizes[kind.__name__] = len(held)
    return min(sizes, key=lambda name: sizes[name], default=None)


def _release(session: Session, name: str) -> None:
    if name in session.engines and current.session is session:
        session.release(name)
