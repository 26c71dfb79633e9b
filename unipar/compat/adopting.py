"""Training by PyTorch's own calls, which an engine takes over when the script runs.

No line of a script need name its model and optimizer: an optimizer is noted when it is built, and
its model is the first module that is called and has all of its parameters. From that call on the
module computes by the engine, ``loss.backward()`` goes to the engine of the model that it came
from, and ``optimizer.step()`` to that engine too. What belongs to no engine stays torch's own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from unipar.compat import hooks
from unipar.compat.adopted import AdoptedModel, AdoptedOptimizer
from unipar.compat.common_draws import CommonDraws
from unipar.compat.dividing.alike import check_alike, is_looked_at
from unipar.compat.dividing.batch_norms import normalize_over
from unipar.compat.dividing.shares import comes_of_parts, mean_over
from unipar.compat.dividing.splitting import Splitting
from unipar.compat.dividing.whole_draws import drawing_again
from unipar.compat.models import led_to
from unipar.compat.optimizers import frozen_in, trained_by
from unipar.compat.routed import model_class, optimizer_class
from unipar.compat.run import current, explain_spawned
from unipar.data import move_to
from unipar.engine import COMPUTE_DTYPES, StepEngine
from unipar.engine.absent import take_away
from unipar.engine.graphs import nodes_behind
from unipar.engine.inner import in_backward_pass
from unipar.errors import ConfigError
from unipar.launch import detect
from unipar.session import Session
from unipar.strategy import Precision

log = logging.getLogger("unipar")
PRECISIONS: dict[Any, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""What a run computes in where a script asks for these."""


class Adoption:
    """What a script has built so far, and what engines train of it.

    Attributes:
        aware: whether the script itself divides its data among ranks, as with DDP or Horovod.
        sums_in_backward: whether the script's framework sums gradients there, so that ranks make
            the same passes.
        by_ddp: whether that is DDP.
        accumulates: whether no step is to follow the next backward pass, as the script says.
        asked: settings of the run that the script's own calls ask for.
        compiled: modules that the script compiles.
        sums: optimizers that step by the sum over ranks, and not by the mean.
        own_buffers: optimizers whose models have each rank's own batch statistics.
        draws: random numbers of ranks that know nothing of each other.
        inside: whether what is called now is called by an engine.
        retains: whether the backward pass under way is to leave its graph.
        through: whether a model is called through the wrapper that the script has put around it.
        gathers: whether the script takes state dicts on all ranks, as under FSDP.
        rank0_only: whether only the first of them wants those.
        synchronized: whether the script asks for batch norms over all ranks.
        scripts_precision: whether the run has the precision that the script asks for.
    """

    def __init__(self) -> None:
        self.aware = self.inside = self.retains = self.through = False
        self.draws: CommonDraws | None = None
        self.sums_in_backward = self.by_ddp = self.accumulates = False
        self.gathers = self.rank0_only = False
        self.synchronized = self.scripts_precision = False
        self.asked: dict[str, Any] = {}
        self.compiled: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self.sums: weakref.WeakSet[Any] = weakref.WeakSet()
        self.own_buffers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pending: list[weakref.ref[Optimizer]] = []
        self._trained: list[weakref.ref[AdoptedOptimizer]] = []
        self._passed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._wrapped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._making: weakref.WeakSet[Any] = weakref.WeakSet()
        self._frozen: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
        self._splittings: weakref.WeakKeyDictionary[AdoptedModel, Splitting] = (
            weakref.WeakKeyDictionary()
        )
        self._routes: weakref.WeakValueDictionary[AdoptedOptimizer, Any] = (
            weakref.WeakValueDictionary()
        )
        self._told: set[str] = set()
        self._told_of_around = self._differentiates = False
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

    def note_wrapped(self, one: Any) -> None:
        """Take notice of a model, or an optimizer, that the script gives to a framework."""
        self._wrapped.add(one)
        if isinstance(one, nn.Module):
            self._frozen[one] = frozen_in(one)
        self.note_aware()

    def note_aware(self) -> None:
        """Take notice of a script that divides its data among ranks itself."""
        self.aware = True
        if self.draws is not None:
            self.draws.give_back()
            self.draws = None

    def ask(self, **settings: Any) -> None:
        """Ask for settings of the run, unless it is open."""
        if current.session is None:
            self.asked |= settings

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
            raise ConfigError(
                f"this {type(module).__name__} is trained on {current.placement().size} ranks that "
                "have data of their own, and is not wrapped, so its replicas would drift apart. "
                "Wrap it: DistributedDataParallel(model), or hvd.DistributedOptimizer(optimizer)."
            )
        session = self._open(module)
        self._names += 1
        name = "model" if "model" not in session.engines else f"model{self._names}"
        if self.synchronized and not getattr(session.strategy.options, "sync_batchnorm", False):
            nn.SyncBatchNorm.convert_sync_batchnorm(module)
        with self.engine_calls():
            half = current.config.precision if current.config else "fp32"
            model = AdoptedModel(
                module, session, half=None if half == "fp32" else COMPUTE_DTYPES[half],
                device=session.world.device, widens=not self.scripts_precision,
            )  # fmt: skip
            kind = type(module)
            adopted = AdoptedOptimizer(
                optimizer.own(), session, accumulating=lambda: False, may_skip=half == "fp16"
            )
            compiled = self.compiled.get(module, False)
            adopted.summed = optimizer in self.sums
            adopted.own_buffers = optimizer in self.own_buffers
            adopted.alike = alone or not self.aware
            adopted.same_parameters = self.by_ddp
            config = current.config
            adopted.skips = config is not None and config.on_nan == "skip" and half != "fp16"
            adopted.frozen = self._frozen.get(module)
            splitting = None
            if not self.aware and session.world.data_size > 1:
                divides = config is None or config.divide_batches
                splitting = Splitting(model, self.tell, divides=divides, compiled=bool(compiled))
                self._splittings[model] = splitting
                splitting.look_at(args, kwargs)
            # An engine before this one has stepped last.
            adopted.uncleared = take_away(module.parameters())
            there = [one for one in module.parameters() if one.grad is not None]
            same: contextlib.AbstractContextManager[Any] = _NOTHING
            if not self.aware:
                # Ranks are given the weights that they have, which graphs of before may be of.
                # torch 2.8 to 2.13, autograd/grad_mode.py.
                same = torch.autograd._unsafe_preserve_version_counter(tuple(module.parameters()))  # pyright: ignore[reportPrivateImportUsage]
            with same:
                adopted.take_over(model, name=name, compile=compiled)
            if not adopted.lends_gradients and any(bool(one.grad.any()) for one in there):  # pyright: ignore[reportOptionalMemberAccess]
                session.release(name)
                raise ConfigError(
                    f"{kind.__name__} has gradients from before its first call, and "
                    f"strategy '{session.strategy.name}' keeps gradients elsewhere, so its steps "
                    "would be without these. Clear them before; or add what they are of to the "
                    "loss of what the model gives."
                )
            if splitting is not None:
                splitting.begin()
        optimizer.routed(adopted)
        self._routes[adopted] = optimizer
        around: list[Any] = [one for one in self._waiting if _holds(one, [optimizer])]
        for one in around:
            self._check_around(one, optimizer, adopted)
            one.routed_within(adopted)
        module.__class__ = model_class(type(module), kind, self)
        module.__dict__["_unipar"] = model
        self._trained.append(weakref.ref(adopted))
        weakref.finalize(optimizer, _release, session, name).atexit = False
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
        self.scripts_precision = current.config is not None and (
            current.config.precision == asked.get("precision", "fp32")
        )
        return session

    def engine_calls(self) -> contextlib.AbstractContextManager[None]:
        """Leave what is called to torch: an engine calls it."""
        return _While(self, "inside")

    def wrapping(self) -> contextlib.AbstractContextManager[None]:
        """Around a call of a model by the wrapper that the script has put around it."""
        return _While(self, "through")

    # -- a step ----------------------------------------------------------------------------------

    def compute(self, model: AdoptedModel, args: Any, kwargs: Any) -> Any:
        """A forward pass of an adopted model."""
        if is_transformed():
            return self._by_torch(model, args, kwargs)
        if self._pending and torch.is_grad_enabled():
            again = self._again(model, args, kwargs)
            if again is not None:
                return again(*args, **kwargs)
        model.__dict__["wrapped"] = self.through
        if torch.is_grad_enabled():
            model.__dict__["around"] = not self.through and (model.around or not model.called)
        kind = model.world.device.type
        if self.gathers and kind != "cpu":
            # As FSDP does, of which a script may make use.
            args, kwargs = move_to((args, kwargs), model.world.device)
        under = torch.is_autocast_enabled(kind)
        half = current.config is not None and current.config.precision != "fp32"
        asked: contextlib.AbstractContextManager[Any] = _NOTHING
        if under != half and self.scripts_precision and not torch.is_grad_enabled():
            asked = _NOTHING if under else self._in_fp32(model)
        elif under != half and self.scripts_precision and model.learns:
            raise ConfigError(
                f"this forward pass is under {'' if under else 'no '}autocast, and the first of "
                f"the run was {'not' if under else 'under one'}. Engines compute all forward "
                "passes that may be trained on in one precision: use autocast around all of them."
            )
        elif under and not half:
            asked = torch.autocast(kind, enabled=False)
        with asked, self.engine_calls():
            splitting = self._splittings.get(model)
            if splitting is None:
                output = model.forward(*args, **kwargs)
            else:
                model.even_out_weights()
                output = splitting.compute(args, kwargs)
        model.note(output, (args, kwargs))
        return output

    def _by_torch(self, model: AdoptedModel, args: Any, kwargs: Any) -> Any:
        """A pass within a transform of torch.func, or of forward-mode AD: whole on each rank.

        Raises:
            ConfigError: each rank has a part of the weights.
        """
        kind = type(model.module).__name__
        if model.divided:
            raise ConfigError(
                f"{kind} is called within a transform of torch.func or of forward-mode AD, and "
                "each rank has a part of its weights. Use a strategy that leaves weights whole, "
                "such as ddp."
            )
        if not self.aware and model.world.size > 1:
            self.tell(
                "each of %d ranks computes all of what %s is called with within a transform of "
                "torch.func or of forward-mode AD. Results are those of one process, and no "
                "faster.",
                model.world.size, kind,
            )  # fmt: skip
        with self.engine_calls():
            normalize_over(None, model.module)
            return model.module(*args, **kwargs)

    def _in_fp32(self, model: AdoptedModel) -> contextlib.AbstractContextManager[Any]:
        """Evaluate in fp32 what is trained in half precision, where the script asks for that."""
        engine = None if model.training_by is None else model.training_by.engine
        if not isinstance(engine, StepEngine):
            return _NOTHING
        if engine.precision.autocasts:
            return engine.precision.left_out()
        self.tell(
            "an evaluation under no autocast is computed in half precision as training is: the "
            "strategy has weights in that. Use ddp, which rounds them in the pass alone."
        )
        return _NOTHING

    def backward(self, loss: torch.Tensor, given: dict[str, Any]) -> bool:
        """Hand a loss to the engine of the model that it came from.

        Returns:
            Whether there is such an engine.

        Raises:
            ConfigError: it asks for what no engine does.
        """
        if in_backward_pass():
            return False
        trained = self.trained
        if not trained:
            return False
        led = led_to([loss])
        found = trained_by(loss, trained) if led else []
        if all(one.steps_by_hand for one in trained):
            if not led or self._differentiates:
                # What is made of gradients of an output may lead to no output itself.
                made_of = self._made_of(loss)
                if not led and not comes_of_parts(loss):
                    return self._around(loss, given, made_of)
                found += [one for one in made_of if one.training not in led and one not in found]
        elif not led:
            called = [one for one in trained if isinstance(one.model, AdoptedModel)
                      and one.model.called]  # fmt: skip
            if len(called) != 1:
                return self._around(loss, given, self._made_of(loss))
            found = called
        if not found:
            return False
        one, *beside = found
        size = one.world.data_size
        weights = given.get("gradient", given.get("grad_tensors"))
        if isinstance(weights, torch.Tensor) and weights.shape == loss.shape:
            # The gradient of this sum is that of the outputs, by these.
            loss = (loss * weights.detach()).sum()
            given = {k: v for k, v in given.items() if k not in ("gradient", "grad_tensors")}
        if given.keys() & {"inputs", "create_graph"} and all(one.steps_by_hand for one in found):
            self._backward_by_hand(loss, given, found)
            return True
        retains = given.pop("retain_graph", None) is not None
        if given or (retains and not (one.lends_gradients and one.alike)):
            raise ConfigError(
                f"loss.backward({', '.join(given) or 'retain_graph'}=…): an engine's backward pass "
                "takes a loss and nothing else. Add losses, and call backward once"
                + ("." if given else "; or use a strategy that leaves gradients whole, such as "
                   "ddp, in a script that leaves the division of data to it.")
            )  # fmt: skip
        self._tell_of_around(one)
        with self.engine_calls(), _While(self, "retains") if retains else _NOTHING:
            if size > 1 and not self.aware:
                one.passes += 1
                if is_looked_at(one.passes):
                    check_alike({"the loss": loss}, one.world)
            for each in found:
                each.keep_what_is_there()
            with drawing_again(one.world.device):
                one.backward(
                    loss * size if one.summed else loss,
                    likely_last=self.sums_in_backward and not self.accumulates,
                    beside=beside,
                )
        return True

    def _backward_by_hand(
        self, loss: torch.Tensor, given: dict[str, Any], found: list[AdoptedOptimizer]
    ) -> None:
        """A backward pass to some tensors alone, or with a graph of gradients. Collective."""
        inputs = given.get("inputs")
        if inputs is None:
            nodes = nodes_behind([loss.grad_fn])
            inputs = [node.variable for node in nodes if hasattr(node, "variable")]
        inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        for one in found:
            if one.begun:
                one.fetch_gradients()
        grads = torch.autograd.grad(
            loss, inputs, create_graph=bool(given.get("create_graph")),
            retain_graph=given.get("retain_graph"), allow_unused=True,
        )  # fmt: skip
        for one, grad in zip(inputs, grads, strict=True):
            if grad is not None:
                one.grad = grad if one.grad is None else one.grad + grad

    def _made_of(self, loss: torch.Tensor) -> list[AdoptedOptimizer]:
        """The optimizers of those models whose weights are in a loss."""
        leaves = {id(getattr(node, "variable", None)) for node in nodes_behind([loss.grad_fn])}
        return [
            one for one in self.trained
            if one.model is not None
            and any(id(parameter) in leaves for parameter in one.model.module.parameters())
        ]  # fmt: skip

    def _around(
        self, loss: torch.Tensor, given: dict[str, Any], found: list[AdoptedOptimizer]
    ) -> bool:
        """A backward pass of what no call of a model has made, as a penalty of its weights.

        Returns:
            Whether it is done.

        Raises:
            ConfigError: an engine would clear its gradients as a step begins.
        """
        for one in found:
            if not one.steps_by_hand:
                raise ConfigError(
                    "this loss is made of weights of "
                    f"{type(one.model and one.model.module).__name__}, and not of a call of it, so "
                    "its gradients would be none of a step of its engine's. Add it to a loss that "
                    "is, and call backward() on the sum."
                )
        if not found:
            return False

        def run(one: int = 0) -> None:
            if one < len(found):
                found[one].add_by_hand(functools.partial(run, one + 1))
            else:
                loss.backward(**given)

        with self.engine_calls():
            run()
        return True

    def gradients(
        self, take: Callable[[], Any], outputs: Any, inputs: Any, options: dict[str, Any]
    ) -> Any:
        """Gradients of weights that a script asks for by itself, as those of the whole batch.

        Collective where ranks have computed parts of it.
        """
        named = isinstance(inputs, Mapping)
        given = list(inputs.values()) if named else inputs
        asked = [given] if isinstance(given, torch.Tensor) else list(given)
        session = current.session
        if session is None:
            return take()
        self._differentiates |= bool(options.get("create_graph"))
        with drawing_again(session.world.device):
            found = take()
        if in_backward_pass() or not self._splittings or not any(map(_is_weight, asked)):
            return found
        shares = next(iter(self._splittings.values())).shares
        with self.engine_calls():
            grads = [
                mean_over(grad, shares) if grad is not None and _is_weight(one) else grad
                for one, grad in zip(asked, found.values() if named else found, strict=True)
            ]
        return dict(zip(inputs, grads, strict=True)) if named else tuple(grads)

    def _tell_of_around(self, trained: AdoptedOptimizer) -> None:
        """Warn once of gradients that DDP would leave to each rank."""
        model = trained.model
        if not isinstance(model, AdoptedModel) or not model.around or self._told_of_around:
            return
        if trained.same_parameters and trained.world.size > 1:
            self._told_of_around = True
            log.warning(
                "this loss comes of a call of %s itself, as model.module(…), and not of the "
                "DistributedDataParallel around it. DDP leaves the gradients of such a pass to "
                "each rank, so that replicas drift apart; here they are averaged over ranks as in "
                "every other pass. Call the wrapper, and both do the same.",
                type(model.module).__name__,
            )

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around backward passes that no step is to follow."""
        before, self.accumulates = self.accumulates, True
        try:
            yield
        finally:
            self.accumulates = before

    def check_alone(self, optimizer: Optimizer) -> None:
        """Refuse a step by gradients that several ranks would have to sum."""
        if self.inside or current.placement().size == 1:
            return
        if optimizer in self._making and not self.aware:
            self._making.discard(optimizer)
            return
        kind = type(optimizer).__name__
        if not self.aware:
            # Each rank does what one process would do.
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
                kind,
                f"shares its model with {others}" if others
                else "updates no module that was called as a whole",
                current.placement().size,
                " Let go of one that is done (del optimizer) before the next is built."
                if others else "",
            )  # fmt: skip
            return
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

    def tell(self, message: str, *args: Any) -> None:
        """Warn on rank 0, once of each thing."""
        said = message % args
        if said not in self._told and current.placement().rank == 0:
            log.warning("%s", said)
        self._told.add(said)

    def refuse_parts(self, call: str) -> None:
        """Refuse what only some ranks may call, of what ranks have parts of.

        A script that knows nothing of ranks calls it on all of them.
        """
        if self.aware and not self.gathers:
            raise ConfigError(
                f"strategy '{current.config.strategy if current.config else ''}' divides the run's "
                f"state among ranks, so {call} is only a part here. Call unipar.compat.torch."
                "whole_state_dict(model_or_optimizer) on all ranks, and load_whole_state_dict."
            )

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


class _While:
    """A block in which an attribute is true; a class, for a step enters it several times."""

    def __init__(self, of: Adoption, name: str) -> None:
        self._of, self._name = of, name

    def __enter__(self) -> None:
        self._before = getattr(self._of, self._name)
        setattr(self._of, self._name, True)

    def __exit__(self, *error: Any) -> None:
        setattr(self._of, self._name, self._before)


_NOTHING = contextlib.nullcontext()
adoption = Adoption()


def start() -> None:
    """See optimizers, modules and losses from now on, until :func:`stop`."""
    place = detect()
    if place is not None and place.size > 1 and torch.cuda.is_available():
        # A script that knows nothing of ranks says "cuda". There may be fewer, for a run on CPUs.
        own = replace(place, device_type="cuda").device
        if own.index < torch.cuda.device_count():
            torch.cuda.set_device(own)
    if place is not None and place.size > 1:
        adoption.draws = CommonDraws(place)
    hooks.put(adoption)
    explain_spawned()


def stop() -> None:
    """End the run, and leave what is built from now on to torch."""
    close()
    hooks.take_back()


def close() -> None:
    """End the run; what is built afterwards is of another."""
    current.close()
    adoption.__init__()
    hooks.watch(False)


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


def _is_weight(one: Any) -> bool:
    return isinstance(one, nn.Parameter)
