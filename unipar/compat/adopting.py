"""Training by PyTorch's own calls, which an engine takes over when the script runs.

No line of a script need name its model and optimizer: an optimizer is noted when it is built, and
its model is the first module that is called and has all of its parameters. From that call on the
module computes by the engine, ``loss.backward()`` goes to the engine of the model that it came
from, and ``optimizer.step()`` to that engine too. What belongs to no engine stays torch's own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from unipar.compat import hooks
from unipar.compat.adopted import AdoptedModel, AdoptedOptimizer
from unipar.compat.common_draws import CommonDraws
from unipar.compat.dividing.alike import check_alike, is_looked_at
from unipar.compat.dividing.batch_norms import normalize_over
from unipar.compat.dividing.shares import comes_of_parts, mean_over
from unipar.compat.dividing.whole_draws import drawing_again
from unipar.compat.engine_steps import share_scale_of
from unipar.compat.loss_scales import (
    SCALERS,
    computes_in_fp16,
    found_overflow,
    leaves_of,
    run_scaled,
    scaler_of,
    unscaled,
)
from unipar.compat.models import led_to
from unipar.compat.run import current, explain_spawned
from unipar.compat.several_optimizers import trained_by
from unipar.compat.taking_up import Adopter, is_transformed
from unipar.data import move_to
from unipar.engine import PrecisionPolicy, StepEngine
from unipar.engine.graphs import nodes_behind
from unipar.engine.inner import in_backward_pass
from unipar.errors import ConfigError
from unipar.launch import detect

log = logging.getLogger("unipar")
_NOTHING = contextlib.nullcontext()


class Adoption(Adopter):
    """The passes of a script's models, which engines make."""

    def __init__(self) -> None:
        super().__init__()
        self._differentiates = False
        self._scaled_beside: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def compute(self, model: AdoptedModel, args: Any, kwargs: Any) -> Any:
        """A forward pass of an adopted model."""
        if is_transformed():
            return self._by_torch(model, args, kwargs)
        if self._pending and torch.is_grad_enabled():
            again = self._again(model, args, kwargs)
            if again is not None:
                return again(*args, **kwargs)
        if torch.is_grad_enabled():
            model.__dict__["through"] = self.syncs
        if self.gathers and model.world.device.type != "cpu":
            # As FSDP does, of which a script may make use.
            args, kwargs = move_to((args, kwargs), model.world.device)
        with self._precision(model), self.engine_calls():
            splitting = self._splittings.get(model)
            if splitting is None:
                output = model.forward(*args, **kwargs)
            else:
                model.even_out_weights()
                output = splitting.compute(args, kwargs)
        model.note(output, (args, kwargs))
        return output

    def _precision(self, model: AdoptedModel) -> contextlib.AbstractContextManager[Any]:
        """Around a pass: what the script asks for there, which engines do by themselves.

        Raises:
            ConfigError: the pass may be trained on, and is in another precision than the first.
        """
        kind = model.world.device.type
        under = torch.is_autocast_enabled(kind)
        half = current.config is not None and current.config.precision != "fp32"
        if under != half and self.scripts_precision:
            if not torch.is_grad_enabled():
                return _NOTHING if under else self._in_fp32(model)
            if model.learns:
                raise ConfigError(
                    f"this forward pass is under {'' if under else 'no '}autocast, and the first "
                    f"of the run was {'not' if under else 'under one'}. Engines compute all "
                    "forward passes that may be trained on in one precision: use autocast around "
                    "all of them."
                )
        return torch.autocast(kind, enabled=False) if under and not half else _NOTHING

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
        if engine.precision.autocasts and engine.precision.may_leave_out:
            return engine.precision.left_out()
        self.tell(
            "an evaluation under no autocast is computed in half precision as training is: "
            "strategy '%s' has weights in that, or rounds them in every pass. Use ddp or zero2, "
            "which round them under autocast alone.",
            current.session.strategy.name if current.session else "",
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
        found = self._behind(loss) if self.trained else []
        if not found:
            return self._around(loss, given, [] if found is not None else self._made_of(loss))
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
        with contextlib.ExitStack() as around:
            around.enter_context(self.engine_calls())
            if retains:
                around.enter_context(self.retaining())
            for other in self.trained:
                if other not in found:
                    # The pass may go through its model, as a generator's through a critic.
                    around.enter_context(other.without_stand_ins())
            if size > 1 and not self.aware:
                one.passes += 1
                if is_looked_at(one.passes):
                    divides = current.config is None or current.config.divide_batches
                    check_alike({"the loss": loss}, one.world, divides=divides)
            for each in found:
                each.begin_pass(unsynced=current.unsynced)
            self._scale_as_asked(loss, found)
            with drawing_again(one.world.device), self._unscaling(loss, found):
                one.backward(
                    loss * size if one.scales_loss else loss,
                    likely_last=(
                        self.sums_in_backward
                        and not (self.accumulates or current.unsynced)
                        and not any(each.adds_own for each in found)
                    ),
                    beside=beside,
                )
        return True

    def _behind(self, loss: torch.Tensor) -> list[AdoptedOptimizer] | None:
        """The optimizers of the models that a loss trains; ``None`` if no call of one made it."""
        trained, led = self.trained, led_to([loss])
        found = trained_by(loss, trained) if led else []
        if all(one.steps_by_hand for one in trained):
            if not led and not comes_of_parts(loss):
                return None
            if not led or self._differentiates:
                # What is made of gradients of an output may lead to no output itself.
                made_of = self._made_of(loss)
                found += [one for one in made_of if one.training not in led and one not in found]
        elif not led:
            models = [(one, one.model) for one in trained]
            found = [one for one, own in models if isinstance(own, AdoptedModel) and own.called]
            if len(found) != 1:
                return None
            several = len(trained) > 1 and found[0].lends_gradients
            if several and found[0] not in self._made_of(loss):
                # Another was called, and its output is left.
                return None
        return found

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
            if not (one.steps_by_hand or one.by_own_gradients):
                raise ConfigError(
                    "this loss is made of weights of "
                    f"{type(one.model and one.model.module).__name__}, and not of a call of it, so "
                    "its gradients would be none of a step of its engine's. Add it to a loss that "
                    "is, and call backward() on the sum."
                )
        if not found and scaler_of(loss) is None:
            return False

        def run(one: int = 0) -> None:
            if one < len(found):
                found[one].add_by_hand(functools.partial(run, one + 1))
            else:
                run_scaled(loss, given)

        with self.engine_calls():
            run()
        return True

    def _scale_as_asked(self, loss: torch.Tensor, found: list[AdoptedOptimizer]) -> None:
        """Have engines begin as the script's scaler does, also where a model has fp16 of its own.

        Raises:
            ConfigError: the strategy scales in precision 'fp16' alone.
        """
        fresh = [
            policy for one in found
            if not one.begun and (policy := one.precision) is not None
            and not any(scaler.has_handed_on(policy) for scaler in SCALERS)
        ]  # fmt: skip
        scaler = scaler_of(loss) if fresh else None
        if scaler is None:
            return
        without = [one for one in fresh if one.scaler is None]
        for policy in without if without and computes_in_fp16(loss) else ():
            if type(policy) is not PrecisionPolicy or not all(one.lends_gradients for one in found):
                strategy = current.config.strategy if current.config else ""
                raise ConfigError(
                    "this loss is scaled by a GradScaler, and computed in float16 under an "
                    f"autocast within the model, of which strategy '{strategy}' knows nothing, so "
                    "that it would scale nothing. Have the autocast around the call of the model, "
                    "or set precision: fp16 in unipar.yaml; or use ddp."
                )
            policy.begin_scaling()
        for policy in fresh:
            if policy.scaler is not None:
                scaler.hand_on(policy)

    @contextlib.contextmanager
    def _unscaling(self, loss: torch.Tensor, found: list[AdoptedOptimizer]) -> Iterator[None]:
        """Around an engine's backward pass: take its scale out of what no engine steps."""
        policies = [p for one in found if (p := one.precision) is not None and p.scaler is not None]
        if not policies:
            yield
            return
        waiting = self._waiting
        stepped = [p for one in waiting for group in one.param_groups for p in group["params"]]
        # Where models are divided, what is in a graph is the framework's.
        whole = all(one.lends_gradients for one in self.trained)
        leaves = leaves_of(loss) if whole else stepped
        met, owned = {id(one) for one in leaves}, set[int]()
        sharing: list[AdoptedOptimizer] = []
        for one in self.trained:
            own = {id(p) for p in one.model.module.parameters()} if one.model else set[int]()
            if one in found or (one.holds_scaled and own & met):
                # Its step unscales what is there.
                sharing.append(one)
                owned |= own
        share_scale_of(sharing)
        beside = [one for one in leaves if id(one) not in owned]
        with unscaled(beside, policies[0].current_scale):
            yield
        known = {id(one) for one in stepped}
        overflow = found_overflow(one for one in beside if id(one) in known)
        if overflow is None:
            return
        self._scaled_beside.update(
            one for one in waiting
            if any(id(p) in met for group in one.param_groups for p in group["params"])
        )  # fmt: skip
        if found[0].world.size > 1 and not self.aware:
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        for policy in policies:
            policy.note_overflow(overflow)

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        """Whether an engine's scale was too high for gradients that another optimizer has."""
        if optimizer not in self._scaled_beside:
            return False
        overflow = found_overflow(p for group in optimizer.param_groups for p in group["params"])
        return overflow is not None and bool(overflow)

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


adoption = Adoption()
_draws = functools.cache(CommonDraws)
"""Of a process: a face that is imported, and starts again, is given no other numbers."""


def start() -> None:
    """See optimizers, modules and losses from now on, until :func:`stop`."""
    place = detect()
    if place is not None and place.size > 1 and torch.cuda.is_available():
        # A script that knows nothing of ranks says "cuda". There may be fewer, for a run on CPUs.
        own = replace(place, device_type="cuda").device
        if own.index < torch.cuda.device_count():
            torch.cuda.set_device(own)
    if place is not None and place.size > 1:
        adoption.draws = _draws(place)
    hooks.put(adoption)
    current.claim = adoption.leave
    explain_spawned()


def stop() -> None:
    """End the run, and leave what is built from now on to torch."""
    close()
    current.claim = lambda _: None
    hooks.take_back()


def close() -> None:
    """End the run; what is built afterwards is of another."""
    current.close()
    adoption.__init__()
    hooks.watch(False)


def _is_weight(one: Any) -> bool:
    return isinstance(one, nn.Parameter)
