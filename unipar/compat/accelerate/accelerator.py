"""The ``Accelerator``: its settings, what it prepares, and a step."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from unipar.compat.accelerate import launched, profiling
from unipar.compat.accelerate.data_loader import DealtLoader
from unipar.compat.accelerate.exchange import Exchange
from unipar.compat.accelerate.keeping import Keeping
from unipar.compat.accelerate.optimizer import AcceleratedOptimizer, check_kept
from unipar.compat.accelerate.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    handlers,
)
from unipar.compat.accelerate.scheduler import Followed, Paced, is_deepspeeds
from unipar.compat.accelerate.state import AcceleratorState, GradientState
from unipar.compat.accelerate.tracking import Trackers
from unipar.compat.accelerate_names import ACCELERATOR, refuse
from unipar.compat.models import PreparedModel
from unipar.compat.optimizers import PreparedOptimizer, training_in
from unipar.compat.run import current
from unipar.compat.several_optimizers import fetch_to_clip, trained_by
from unipar.compat.tables import Table
from unipar.engine import COMPUTE_DTYPES
from unipar.errors import ConfigError

log = logging.getLogger("unipar")

_LEFT_OUT: Any = object()


class Accelerator(Exchange, Keeping):
    """Accelerate's, over a run under any strategy that takes a script's own loop. Collective.

    Arguments are Accelerate's, and so is what they are where the script is silent: what
    ``accelerate launch`` says. ``unipar.yaml`` and the environment win over ``mixed_precision``,
    ``cpu``, plugins and handlers, which are settings of the run and options of its strategy.

    Args:
        strategy: what ``unipar.yaml`` may say instead; left out: a plugin's, or ``ddp`` on several
            ranks and ``single`` on one.

    Raises:
        ConfigError: a setting has no counterpart, or the strategy cannot run here.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = _LEFT_OUT,
        mixed_precision: str | PrecisionType | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[Any] | None = None,
        log_with: Any = None,
        project_dir: Any = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Iterable[KwargsHandler] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        strategy: str | dict[str, Any] | None = None,
    ) -> None:
        # A second one takes the first one's state, as there.
        is_first = current.session is None

        def asks_for(name: str) -> bool:
            return is_first and launched.asks_for(name)

        for name, value in (
            ("torch_tp_plugin", torch_tp_plugin),
            ("megatron_lm_plugin", megatron_lm_plugin or asks_for("USE_MEGATRON_LM")),
            ("parallelism_config", parallelism_config or asks_for("USE_PARALLELISM_CONFIG")),
        ):  # fmt: skip
            if value:
                refuse(f"Accelerator({name}=…)")
        held = handlers(kwargs_handlers or ())
        if fsdp_plugin is None and asks_for("USE_FSDP"):
            fsdp_plugin = FullyShardedDataParallelPlugin()
        plugin = deepspeed_plugin or deepspeed_plugins
        if plugin is None and asks_for("USE_DEEPSPEED"):
            plugin = DeepSpeedPlugin()
        cpu = cpu or asks_for("USE_CPU")
        mixed_precision = mixed_precision or (launched.precision() if is_first else None)
        if gradient_accumulation_plugin is None:
            # Accelerate 1.15.0: what is launched wins over the argument.
            said = launched.says("GRADIENT_ACCUMULATION_STEPS")
            gradient_accumulation_steps = int(said or gradient_accumulation_steps)
        if isinstance(plugin, dict):
            refuse("Accelerator(deepspeed_plugins={…})")
        deepspeed: dict[str, Any] = plugin.asked() if plugin is not None else {}
        # One micro-batch is what the argument says by default; of the others each counts.
        steps = {int(gradient_accumulation_steps)} - {1}
        steps |= {deepspeed["accumulation"]} if "accumulation" in deepspeed else set()
        if gradient_accumulation_plugin is not None:
            steps.add(gradient_accumulation_plugin.num_steps or 1)
        if len(steps) > 1:
            raise ConfigError(
                f"gradients are to be accumulated over {' and over '.join(map(str, steps))} "
                "micro-batches. Say it once: as an argument, or by one plugin."
            )
        accumulation = gradient_accumulation_plugin or GradientAccumulationPlugin(
            num_steps=next(iter(steps), 1)
        )
        accumulation.check()
        self.gradient_state = GradientState(accumulation)
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        self.project_configuration.check()
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        data = dataloader_config or DataLoaderConfiguration()
        if split_batches is not _LEFT_OUT and bool(split_batches) != data.split_batches:
            log.warning(
                "Accelerator(split_batches=%s) has no effect, as in Accelerate since 1.0, so "
                "batch_size is %s. Pass dataloader_config=DataLoaderConfiguration(split_batches=%s)"
                " where it is meant, as before 1.0.",
                split_batches, "cut up" if data.split_batches else "each rank's", split_batches,
            )  # fmt: skip
        data.check()
        self.dataloader_config = data
        if dynamo_backend is not None:
            dynamo_plugin = TorchDynamoPlugin(backend=dynamo_backend)
        self._compile = (dynamo_plugin or TorchDynamoPlugin()).compile()
        self._max_grad_norm: float | None = deepspeed.get("max_grad_norm")
        recomputes = fsdp_plugin is not None and fsdp_plugin.activation_checkpointing
        self._recompute = "full" if recomputes else "off"
        self._autocast: Any = held.get(AutocastKwargs)
        if self._autocast is not None and not self._autocast.enabled:
            refuse("kwargs_handlers=[AutocastKwargs(enabled=False)]")
        self._profile: Any = held.get(ProfileKwargs)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = [str(one) for one in rng_types] if rng_types else ["generator"]
        logging_dir = self.project_configuration.logging_dir
        self._trackers = Trackers(log_with, Path(logging_dir) if logging_dir else None)
        self._models: list[PreparedModel] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[Paced] = []
        self._dataloaders: list[DealtLoader] = []
        self._custom_objects: list[Any] = []
        self._save_hooks, self._load_hooks = OrderedDict(), OrderedDict()
        self.step = 0

        asked: dict[str, Any] = {}
        if "precision" in deepspeed:
            asked["precision"] = deepspeed["precision"]
        if mixed_precision is not None:
            asked["precision"] = _precision(mixed_precision)
        scaler = held.get(GradScalerKwargs)
        if "loss_scale" in deepspeed:
            asked["loss_scale"] = deepspeed["loss_scale"]
        elif isinstance(scaler, GradScalerKwargs) and plugin is None:
            # Under a DeepSpeedPlugin Accelerate 1.15 makes no scaler (accelerator.py).
            asked |= scaler.asked()
        if cpu:
            asked["device"] = "cpu"
        timeout = getattr(held.get(InitProcessGroupKwargs), "timeout", None)
        if timeout is not None:
            asked["timeout"] = timeout.total_seconds()
        chosen = strategy or deepspeed.get("strategy")
        if chosen is None and fsdp_plugin is not None:
            chosen = fsdp_plugin.options()
        self._by_ddp = "strategy" not in deepspeed and fsdp_plugin is None
        # DeepSpeed's engine clips, and clears gradients as it steps.
        self._by_deepspeed = plugin is not None
        self._replaces_optimizers = plugin is not None and plugin.replaces_optimizers()
        ddp = held.get(DistributedDataParallelKwargs)
        if chosen is None and isinstance(ddp, DistributedDataParallelKwargs):
            options = ddp.options()
            several = current.placement("cpu" if cpu else "auto").size > 1
            chosen = {"name": "ddp", **options} if options and several else None
        if chosen is not None:
            asked["strategy"] = chosen
        self._session = current.open(asked)
        self.state = AcceleratorState()
        assert current.config is not None
        precision = current.config.precision
        self._half = None if precision == "fp32" else COMPUTE_DTYPES[precision]
        self._may_skip = precision == "fp16" or current.config.on_nan == "skip"
        on_cpu = self.device.type == "cpu" and not self._by_deepspeed
        if precision == asked.get("precision") == "fp16" and on_cpu and self.is_main_process:
            log.warning(
                "this run computes in fp16 on CPUs, as it is asked to; Accelerate 1.15 computes in "
                "fp32 there. Say mixed_precision='no' where that is meant."
            )

    # -- preparing -------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Take over models, optimizers, loaders and schedulers, in any order and number.

        A model is put under the strategy when its optimizer is here as well. Collective.

        Args:
            args: objects; what is none of these comes back as it is.
            device_placement: whether each is moved to the device; left out: as the run does.

        Returns:
            What takes the place of each, in the same order; a single one by itself.

        Raises:
            ConfigError: the strategy cannot train them so.
        """
        placed = device_placement or [None] * len(args)
        if len(placed) != len(args):
            raise ConfigError(
                f"device_placement has {len(placed)} elements for {len(args)} objects. Give one "
                "for each."
            )
        found = [self._taken(one, place) for one, place in zip(args, placed, strict=True)]
        self._take_up()
        # Accelerate 1.15.0, _prepare_deepspeed: a scheduler without its model comes back as it is.
        if not self._by_deepspeed or any(isinstance(one, nn.Module) for one in args):
            found = [self._paced(one) for one in found]
        return found[0] if len(found) == 1 else tuple(found)

    def _taken(self, one: Any, place: bool | None) -> Any:
        if isinstance(one, DataLoader):
            return self.prepare_data_loader(one, place)
        if isinstance(one, nn.Module):
            return self._add_model(one, place)
        return self._add_optimizer(one) if isinstance(one, Optimizer) else one

    def _paced(self, one: Any) -> Any:
        if self._by_deepspeed and self._optimizers and is_deepspeeds(one):
            self._optimizers[-1].schedule = one
            return self._add_scheduler(one, Followed)
        return self.prepare_scheduler(one) if isinstance(one, LRScheduler) else one

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """This rank's share of a loader's batches, on the device."""
        if isinstance(data_loader, DealtLoader):
            return data_loader
        if slice_fn_for_dispatch is not None:
            refuse("prepare_data_loader(slice_fn_for_dispatch=…)")
        data = self.dataloader_config
        seed = data.data_seed if data.data_seed is not None else torch.initial_seed()
        dealt = DealtLoader(
            data_loader, self._session.world, split=data.split_batches, even=data.even_batches,
            place=self.device_placement if device_placement is None else device_placement,
            enter=self.gradient_state.enter, dispatch=data.dispatch_batches,
            seed=seed if data.use_seedable_sampler else None, synchronized=self.rng_types,
        )  # fmt: skip
        self._dataloaders.append(dealt)
        return dealt

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> PreparedModel:
        """Take over a model; one that is only evaluated computes by itself."""
        prepared = self._add_model(model, device_placement)
        self._take_up()
        return prepared

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Take over an optimizer, and put its model under the strategy if it is here."""
        prepared = self._add_optimizer(optimizer)
        self._take_up()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Paced:
        """The scheduler, stepped when its optimizer steps."""
        return scheduler if isinstance(scheduler, Paced) else self._add_scheduler(scheduler, Paced)

    def _add_scheduler(self, scheduler: Any, kind: type[Paced]) -> Paced:
        followed = getattr(scheduler, "optimizer", None)
        own = [one for one in self._optimizers if followed in (one, one.optimizer)]
        paced = kind(
            scheduler, own or self._optimizers, self.gradient_state,
            times=self._session.world.data_size, split=self.split_batches,
            with_optimizer=self.step_scheduler_with_optimizer,
        )  # fmt: skip
        self._schedulers.append(paced)
        return paced

    def _add_model(self, model: nn.Module, place: bool | None) -> PreparedModel:
        if isinstance(model, PreparedModel):
            return model
        if hasattr(model, "_orig_mod"):
            refuse("prepare(torch.compile(model))")
        moved = self.device_placement if place is None else place
        device = self._session.world.device if moved else None
        prepared = PreparedModel(model, self._session, half=self._half, device=device)
        self._models.append(prepared)
        if not any(one.requires_grad for one in model.parameters()):
            # Accelerate 1.15.0 wraps what is trained in DDP, which shares weights, and no other.
            shares = not self._by_ddp
            prepared.share_weights(parameters=shares, buffers=shares)
        else:
            prepared.begins_alike = self._by_ddp and not current.asks_for_own_buffers()
        return prepared

    def _add_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        if self._replaces_optimizers:
            check_kept(optimizer)
        state = self.gradient_state
        prepared = AcceleratedOptimizer(
            optimizer, self._session, accumulating=lambda: not state.sync_gradients,
            may_skip=self._may_skip,
        )  # fmt: skip
        prepared.same_parameters, prepared.clears = self._by_ddp, not self._by_deepspeed
        self._optimizers.append(prepared)
        return prepared

    def _take_up(self) -> None:
        """Put every model under the strategy whose optimizer is here."""
        for optimizer in self._optimizers:
            model = None if optimizer.training else optimizer.model_among(self._models)
            if model is not None:
                optimizer.takes_up(
                    model, max_grad_norm=self._max_grad_norm,
                    compile=self._compile, activation_checkpointing=self._recompute,
                )  # fmt: skip

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything that was prepared.

        Returns:
            ``None`` for each object, to put in its place.
        """
        for model in self._models:
            if model.training_by is not None:
                self._session.release(model.training_by.engine.spec.name)
        self._models, self._optimizers = [], []
        self._schedulers, self._dataloaders, self.step = [], [], 0
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    def clear(self, *objects: Any) -> list[None]:
        """:meth:`free_memory`."""
        return self.free_memory(*objects)

    # -- a step ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch; the last of a step, or of the data, sets :attr:`sync_gradients`."""
        state = self.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step, state.sync_gradients = 0, True
        else:
            self.step += 1
            state.sync_gradients = self.step % state.num_steps == 0
        synced = state.sync_gradients or state.plugin.sync_each_batch
        with contextlib.ExitStack() as blocks:
            for model in () if synced else models:
                blocks.enter_context(self.no_sync(model))
            yield

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A block of passes whose gradients are left to each rank."""
        return model.no_sync() if isinstance(model, PreparedModel) else contextlib.nullcontext()

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Have the next backward pass average all gradients that there are over ranks."""
        if isinstance(model, PreparedModel) and model.training_by is not None:
            model.training_by.note_pass(syncs=True)
        yield

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Autocast to the run's precision, if that is half."""
        handler = autocast_handler or self._autocast or AutocastKwargs()
        return torch.autocast(
            self.device.type, self._half or torch.bfloat16,
            enabled=handler.enabled and self._half is not None, cache_enabled=handler.cache_enabled,
        )  # fmt: skip

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Add the gradient of a micro-batch's loss, divided by their number.

        Raises:
            ConfigError: it cannot be told which model the loss trains.
        """
        if kwargs:
            refuse("Accelerator.backward(loss, retain_graph=…)")
        known = training_in(self._session, AcceleratedOptimizer)
        optimizer, *beside = trained_by(loss, known)
        num = self.gradient_accumulation_steps
        optimizer.backward(
            loss / num if num != 1 else loss,
            likely_last=self.sync_gradients and not current.unsynced,
            beside=beside,
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing: engines unscale gradients before they clip them."""

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip gradients: a model's as it steps, and what else there is where ranks have it whole.

        Args:
            parameters: of models that are trained.
            max_norm: what to clip to.
            norm_type: of which norm.

        Returns:
            The norm before, a scalar tensor; under strategies that divide gradients it can be read
            once the optimizer has stepped.

        Raises:
            ConfigError: the strategy cannot clip so.
        """
        self._check_may_clip("clip_grad_norm_")
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        whole = self._optimizer_of_all(given) if norm_type == 2 and max_norm > 0 else None
        asked = f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type})"
        if self._by_deepspeed and (whole is None or max_norm != self._max_grad_norm):
            raise ConfigError(
                f"{asked} of {len(given)} parameters: under a DeepSpeedPlugin Accelerate ignores "
                "this, and DeepSpeed clips the gradient of the model to gradient_clipping, which "
                f"is {self._max_grad_norm or 0.0}, and 1.0 where nothing is said. Say "
                f"DeepSpeedPlugin(gradient_clipping={max_norm}), or in its configuration, and clip "
                "model.parameters() to the same."
            )
        if whole is not None:
            return whole.clip_given(max_norm, given)
        self._fetch_to_clip(given, f"{asked} of {len(given)} parameters")
        return nn.utils.clip_grad_norm_(given, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of gradients, where ranks have them whole.

        Args:
            parameters: of models that are trained.
            clip_value: the most that an element may be.

        Raises:
            ConfigError: the strategy has them elsewhere.
        """
        self._check_may_clip("clip_grad_value_")
        if self._by_deepspeed:
            raise ConfigError(
                "clip_grad_value_: Accelerate cannot clip so under a DeepSpeedPlugin. Use "
                "clip_grad_norm_, or leave the plugin out."
            )
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._fetch_to_clip(given, "clip_grad_value_")
        nn.utils.clip_grad_value_(given, clip_value)

    def _check_may_clip(self, call: str) -> None:
        if not self.sync_gradients:
            raise ConfigError(
                f"{call} came in the midst of an accumulation, where it would clip what each "
                "micro-batch adds. Write `if accelerator.sync_gradients:` before it."
            )
        if not self._session.capabilities.clipping:
            raise ConfigError(
                f"strategy '{self._session.strategy.name}' cannot clip gradients. Leave "
                f"{call} out, or use another strategy."
            )

    def _optimizer_of_all(self, parameters: Sequence[torch.Tensor]) -> PreparedOptimizer | None:
        """What trains the one model whose trained parameters these are, all of them."""
        for one in self._optimizers:
            model = one.model
            if model is None:
                continue
            names = {model.name_of(parameter) for parameter in parameters}
            named = model.module.named_parameters()
            wanted = {name for name, parameter in named if parameter.requires_grad}
            if wanted <= names and None not in names:
                return one
        return None

    def _fetch_to_clip(self, parameters: Sequence[torch.Tensor], call: str) -> None:
        known = ((one, one.model) for one in self._optimizers)
        found = [
            one for one, model in known
            if model is not None and any(model.name_of(p) is not None for p in parameters)
        ]  # fmt: skip
        if not found or not all(one.begun for one in found):
            raise ConfigError(
                f"{call} came before accelerator.backward(loss)." if found else
                f"{call}: none is of a model that accelerator.prepare has, with its optimizer."
            )  # fmt: skip
        fetch_to_clip(found, call)

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """A block under torch's profiler."""
        return profiling.profile(profile_handler or self._profile or ProfileKwargs(), self)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether layers of a model lie on several devices."""
        return len({*getattr(model, "hf_device_map", {}).values()}) > 1

    def __getattr__(self, name: str) -> Any:
        if ACCELERATOR.find(name) is not None:
            refuse(f"Accelerator.{name}")
        raise AttributeError(f"'Accelerator' object has no attribute '{name}'")


def _precision(asked: Any) -> str:
    word = str(asked)
    if word not in PrecisionType.list():
        raise ConfigError(
            f"mixed_precision={word!r} is unknown. Choose of {', '.join(PrecisionType.list())}."
        )
    return "fp32" if word == "no" else word


__getattr__ = Table("accelerate.accelerator").refusing(__name__)
