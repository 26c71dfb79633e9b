"""``Session``: a run for people who keep their own loop."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from unipar.config import RunFields, validate
from unipar.data import Loader
from unipar.data.batch import Batch
from unipar.data.feed import copies_to, fed, pins_for
from unipar.data.randomness import draw_alike
from unipar.engine import ModuleState, StepEngine, Undo, refuse_copies
from unipar.engine.checks import (
    CheckedModel,
    check_capabilities,
    check_dropout,
    check_gradients,
    check_initial_weights,
    check_model,
)
from unipar.engine.held_groups import HeldGroups
from unipar.engine.parameter_hooks import ParameterHooks
from unipar.engine.repeatable import explain_recomputed
from unipar.engine.replaced import Held
from unipar.engine.replicas import Replicas
from unipar.engine.sharing import Sharing
from unipar.errors import ConfigError, UniparError
from unipar.evaluation.evaluate import Metric, Predict, evaluate
from unipar.launch import once, rank_status
from unipar.loss import LossFn
from unipar.optimizers.factories import CheckedOptimizer, CheckedScheduler, check_factories
from unipar.optimizers.groups import check_choice, factories
from unipar.sizing import resolve_for
from unipar.strategy import (
    Capabilities,
    DropoutSeed,
    Engine,
    EngineSpec,
    InitialWeights,
    LossScale,
    ModelContext,
    ModelFactory,
    OnNaN,
    OptimizerFactory,
    Parallelize,
    Precision,
    SchedulerFactory,
    SelfTest,
    StrategyOptions,
)
from unipar.strategy.registry import for_engine
from unipar.utils.devices import DeviceChoice, resolve_device_type
from unipar.utils.garbage_collection import no_collection
from unipar.utils.gradient_hooks import gradient_hooks
from unipar.utils.matmul_precision import MatmulPrecision, set_matmul_precision
from unipar.world import Placement, World

log = logging.getLogger("unipar")


class Session:
    """The processes of one run under one strategy, and the engines in it.

    Use it as a context manager, in a process that ``torchrun``, ``srun`` or ``mpirun`` started, or
    in a plain one for a single device::

        with unipar.Session(strategy="ddp", precision="bf16") as session:
            engine = session.prepare(model, optimizer=make_adamw, max_grad_norm=1.0)
            for batch in session.loader(dataset, global_batch_size=64):
                step = engine.train_step(batch, loss_fn)

    Args:
        strategy: a name, a mapping with ``name``, an options object, or ``"auto"``.
        model: what will be prepared, one or several, for ``"auto"`` with several processes to go
            by: it shards what would not fit on a device. Nothing else looks at it.
        precision: the compute dtype of every engine; weights and reductions stay fp32.
        loss_scale: how the scale of losses in fp16 begins and changes: ``initial``,
            ``growth_factor``, ``backoff_factor`` and ``growth_interval``; left out: as PyTorch's
            does.
        float32_matmul_precision: how exactly matrix products of fp32 tensors are computed inside
            the ``with`` block, as :func:`torch.set_float32_matmul_precision` takes it; left out: as
            torch is set.
        device: ``"auto"`` takes the GPU where there is one.
        seed: seeds torch's generators and the order of data.
        dropout_seed: whether dropout draws for each rank, as torch does (``"rank"``), or for each
            sample, so that masks do not depend on ranks (``"sample"``); then steps are those of
            ``engine.train_step``.
        timeout: seconds that a collective waits for a rank.
        on_nan: what a step with a non-finite loss does.
        self_test: whether a few steps of a tiny model under the strategy are compared with a plain
            loop first, once for a machine and its versions; ``"auto"`` does so on GPUs.
        placement: where this process stands; found in the environment when left out.

    Attributes:
        world: the joined processes, inside the ``with`` block.
        strategy: the resolved strategy.
        engines: the prepared engines, by name.

    Raises:
        ConfigError: the strategy is unknown or cannot run here.
    """

    world: World

    def __init__(
        self,
        strategy: str | Mapping[str, Any] | StrategyOptions = "auto",
        *,
        model: nn.Module | ModelFactory | Sequence[nn.Module | ModelFactory] = (),
        precision: Precision = "fp32",
        loss_scale: LossScale | Mapping[str, Any] | None = None,
        float32_matmul_precision: MatmulPrecision | None = None,
        device: DeviceChoice = "auto",
        seed: int = 0,
        dropout_seed: DropoutSeed = "rank",
        timeout: float = 1800.0,
        on_nan: OnNaN = "raise",
        self_test: SelfTest = "auto",
        placement: Placement | None = None,
    ) -> None:
        asked = {
            "precision": precision,
            "loss_scale": loss_scale,
            "float32_matmul_precision": float32_matmul_precision,
            "device": device,
            "seed": seed,
            "dropout_seed": dropout_seed,
            "timeout": timeout,
            "on_nan": on_nan,
            "self_test": self_test,
        }
        fields = validate(RunFields, asked)
        device_type = resolve_device_type(device)
        self._placement = placement or find_placement(device_type, timeout)
        models = tuple(model) if isinstance(model, Sequence) and not callable(model) else (model,)
        self.strategy = resolve_for(strategy, self._placement, models)
        self.engines: dict[str, Engine] = {}
        self._recomputes = False
        self._sharing = Sharing(self.strategy, self.engines)
        self._undo: list[Undo] = []
        self._precision: Precision = precision
        self._loss_scale: LossScale | None = fields.loss_scale
        self._matmul_precision: MatmulPrecision | None = float32_matmul_precision
        self._on_nan: OnNaN = on_nan
        self._seed = seed
        self._dropout_seed: DropoutSeed = dropout_seed
        self._self_test: SelfTest = self_test

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the strategy with its options."""
        return self.strategy.capabilities()

    def __enter__(self) -> Session:
        check_capabilities(self.strategy, self._spec(nn.Identity()), self._placement)
        once.ensure(self.strategy, self._placement, self._self_test)
        restore = set_matmul_precision(self._matmul_precision)
        try:
            with no_collection():
                self.world = self.strategy.setup(self._placement)
            self._check_layout()
        except BaseException:
            restore()
            raise
        self._undo.append(restore)
        self._peers = rank_status.watch(self.world)
        torch.manual_seed(self._seed)
        return self

    def _check_layout(self) -> None:
        """Refuse a world whose shares of a batch are not those that were counted on."""
        said, made = self.strategy.layout(self._placement), self.world.layout
        if said == made:
            return
        self.strategy.teardown()
        self.world.leave()
        raise ConfigError(
            f"strategy '{self.strategy.name}' says by layout() that the run is {said}, and its "
            f"setup() has made {made}. Let it return join(placement, self.layout(placement))."
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        explained = late = None
        if error is None:
            error = late = self._last_error()
        if error is not None:
            from unipar.launch.failure import note

            explained = self.explained(error)
            error = explained or error
            note(error)
        # Before this rank's connections close, and others fail by that.
        told = self._peers.leave(error) if self._peers else None
        if "unipar.checkpoint.save" in sys.modules:
            # A save in the background still needs the process group.
            sys.modules["unipar.checkpoint.save"].wait_for_pending()
        for engine in self.engines.values():
            engine.close()
        for undo in self._undo:
            undo()
        self.strategy.teardown()
        self.world.leave()
        if self._peers:
            self._peers.close()
        if told is not None:
            raise told from error
        if explained is not None:
            raise explained
        if late is not None:
            raise late

    def _last_error(self) -> Exception | None:
        """Find the error of an engine's last step, where nobody has read its result."""
        for engine in self.engines.values():
            try:
                engine.check_last_step()
            except Exception as error:
                return error
        return None

    def explained(self, error: BaseException) -> ConfigError | None:
        """A framework's error in words of the strategy's; ``None`` where it has none."""
        if isinstance(error, UniparError):
            return None
        words = self.strategy.explain(error)
        if self._recomputes:
            words = words or explain_recomputed(error)
        if not words:
            return None
        explained = ConfigError(words)
        explained.__cause__ = error
        return explained

    def _spec(self, model: Any, **asked: Any) -> EngineSpec:
        return EngineSpec(
            model,
            precision=self._precision,
            loss_scale=self._loss_scale,
            on_nan=self._on_nan,
            seed=self._seed,
            dropout_seed=self._dropout_seed,
            **asked,
        )

    def prepare(
        self,
        model: nn.Module | ModelFactory,
        *,
        optimizer: OptimizerFactory | str | Mapping[str, Any] | None = None,
        lr_scheduler: SchedulerFactory | str | Mapping[str, Any] | None = None,
        max_grad_norm: float | None = None,
        activation_checkpointing: Literal["off", "full", "selective"] | Iterable[str] = "off",
        activation_offload: bool = False,
        compile: bool | dict[str, Any] = False,
        initial_weights: Literal["model", "by_name"] | str | Path = "model",
        parallelize: Parallelize | None = None,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        accumulation: int | None = None,
        strategy_options: Mapping[str, Any] | None = None,
        name: str = "model",
    ) -> Engine:
        """Put a model under the strategy, then build its optimizer and scheduler. Collective.

        Args:
            model: a module, or a function that builds one, without arguments or from a
                :class:`unipar.strategy.ModelContext`.
            optimizer: a function, called with the named parameters once they have their final
                form; the name of a class of ``torch.optim``; a mapping of ``name`` and its
                arguments; or a mapping of several such, each with the ``params`` that it is for
                and an ``lr_scheduler`` of its own.
            lr_scheduler: a function, called with the optimizer, or a name or mapping likewise;
                stepped once for each optimizer step, but for a ``ReduceLROnPlateau``: call
                ``engine.lr_scheduler.step(metric)`` with what :meth:`evaluate` gives, on every
                rank.
            max_grad_norm: the 2-norm that gradients are clipped to; ``math.inf`` only measures.
            activation_checkpointing: ``"off"``, ``"full"``, ``"selective"``, or names of module
                classes.
            activation_offload: whether what is saved for the backward pass waits for it in host
                memory.
            compile: ``True``, or keyword arguments of :meth:`torch.nn.Module.compile`.
            initial_weights: where a model function's first weights come from: ``"model"``, as it
                computes them, the whole model on one host; ``"by_name"``, each tensor by itself,
                under a seed made of the session's and its name; or a path, of a checkpoint or of
                safetensors in the Hugging Face layout.
            parallelize: divides parts of the model your own way, before the strategy divides the
                rest: ``parallelize(module, world)``, by ``fully_shard`` over ``world.mesh(…)``.
            global_batch_size: samples of a full step over all ranks, where the framework must
                know it beforehand.
            micro_batch_size: samples of one forward pass on one rank, likewise.
            accumulation: micro-batches of a full step on one rank, likewise.
            strategy_options: options of the strategy's that this engine has otherwise than the
                session, as ``ddp`` has ``find_unused_parameters``.
            name: the engine's name in checkpoints; each engine of a session needs its own.

        Raises:
            ConfigError: the strategy cannot do what is asked, or nothing can be trained.
            CheckpointError: ``initial_weights`` are damaged, or of another model.
        """
        if name in self.engines:
            raise ConfigError(
                f"this session already has an engine named '{name}'. "
                "Give each its own: prepare(model, name='discriminator', …)."
            )
        if self.engines and not self.capabilities.several_engines:
            raise ConfigError(
                f"strategy '{self.strategy.name}' holds one model in a session. "
                "Train the models one after the other, each released before the next is prepared, "
                "or use another strategy."
            )
        check_model(model)
        check_initial_weights(model, initial_weights)
        if isinstance(lr_scheduler, Mapping) and "metric" in lr_scheduler:
            raise ConfigError(
                "lr_scheduler has a metric, by which fit steps it. In a loop of your own leave it "
                "out, and call engine.lr_scheduler.step(metric) on every rank."
            )
        build, schedule = factories(optimizer, lr_scheduler)
        check_factories(build, schedule)
        policy = activation_checkpointing
        self._recomputes |= policy != "off"
        spec = self._spec(
            model,
            optimizer=CheckedOptimizer(build) if build is not None else None,
            lr_scheduler=CheckedScheduler(schedule) if schedule is not None else None,
            max_grad_norm=max_grad_norm,
            activation_checkpointing=policy if isinstance(policy, str) else tuple(policy),
            activation_offload=activation_offload,
            compile=compile,
            parallelize=parallelize,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            accumulation=accumulation,
            name=name,
        )
        strategy = for_engine(self.strategy, strategy_options or {})
        check_capabilities(strategy, spec, self._placement)

        hooked: list[str] = []

        def check(built: nn.Module) -> None:
            # Frameworks add their own.
            hooked.extend(n for n, p in built.named_parameters() if gradient_hooks(p))
            self._sharing.refuse(built, name)
            if build is not None:
                check_gradients(built, self.strategy, spec)
                check_choice(build, built)
                check_dropout(built, spec)

        if isinstance(model, nn.Module):
            check(model)
            prepared = spec
        else:
            prepared = replace(
                spec,
                model=CheckedModel(model, check, self._context()),
                initial_weights=self._opened(initial_weights, name),
            )
        if build is not None:
            with no_collection():
                # Torch's optimizers import it when the first of them is made.
                importlib.import_module("torch._dynamo")
        held = Held(model) if isinstance(model, nn.Module) else None
        engine = strategy.prepare(prepared, self.world)
        if held is not None:
            held.lead_on()
        self._sharing.note(engine)
        self.engines[name] = engine
        whole = "parameters" not in self.capabilities.sharded
        if isinstance(engine, StepEngine):
            engine.hooks = ParameterHooks(
                hooked, engine.module, called=whole, alone=self.world.data_size == 1
            )
        if self.capabilities.sharded or self.world.size > 1:
            self._hold_groups(engine)
        if not whole:
            self._undo.append(refuse_copies(engine.module, self.strategy.name))
        if isinstance(engine, StepEngine) and parallelize is None:
            engine.agreement.replicas = Replicas.of(
                engine.module,
                self.world,
                weights=whole,
                in_parts="optimizer" in self.capabilities.sharded,
            )
        stream = self.world.layout.stream(self.world.rank)
        if stream > 0:
            # The first keeps that of a plain loop.
            torch.manual_seed(self._seed + 1_000_003 * stream)
        draw_alike(self.world)
        return engine

    def _hold_groups(self, engine: Engine) -> None:
        """Refuse steps once the optimizer's groups hold what the strategy does not know."""
        if isinstance(engine, StepEngine) and engine.optimizer is not None:
            partial = isinstance(engine.state, ModuleState) and engine.state.partial
            engine.groups = HeldGroups(
                engine.optimizer, engine.module.parameters(), self.strategy.name, apart=partial
            )

    def release(self, name: str) -> None:
        """Let go of an engine, which cannot be used afterwards; another may take its name.

        Args:
            name: of an engine of this session.
        """
        engine = self.engines.pop(name)
        for other in engine.sharing:
            other.sharing = tuple(one for one in other.sharing if one is not engine)
        engine.close()

    def _opened(self, asked: str | Path, name: str) -> InitialWeights:
        if asked in ("model", "by_name"):
            return asked  # pyright: ignore[reportReturnType]
        # Imported when a checkpoint is read or written.
        from unipar.checkpoint import StoredWeights

        return StoredWeights.at(Path(asked), name, self.world)

    def _context(self) -> ModelContext:
        layout, rank = self.world.layout, self.world.rank
        return ModelContext(layout, layout.coordinate("pp", rank), self.world.device)

    def loader(
        self,
        data: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        shares: Sequence[float] | None = None,
        shuffle: bool | None = None,
        num_workers: int | None = None,
    ) -> Loader:
        """This rank's share of the data, in the global order that (seed, epoch) make.

        Args:
            data: a dataset, ``DataLoader``, tensor, tuple of tensors, or list of samples.
            global_batch_size: samples of one step over all ranks.
            micro_batch_size: samples of one forward pass on one rank, that with the largest share;
                left out: the rank's whole share of the global batch.
            shares: one positive number for each data-parallel rank (``world.data_size``): parts of
                each global batch are in proportion to them, and so are micro-batches; left out:
                equal parts.
            shuffle: whether each epoch has an order of its own; left out: as the data says.
            num_workers: processes that load samples.

        Raises:
            ConfigError: the batch sizes contradict each other, or the shares.
            DataError: the data is empty, or smaller than a global batch.
        """
        return Loader(
            data,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            data_rank=self.world.data_rank,
            data_size=self.world.data_size,
            shares=shares,
            seed=self._seed,
            shuffle=shuffle,
            num_workers=num_workers,
            pin_memory=pins_for(self.world.device),
        )

    def feed(self, batches: Iterable[Batch], *, limit: int | None = None) -> Iterator[Batch]:
        """The batches, their micro-batches copied to a GPU one ahead of their use.

        ``fit`` and :meth:`evaluate` go through their data so. ``engine.train_step`` and
        :func:`unipar.data.on_device` take the copies; what is in ``micro_batch.data`` stays on the
        host, and is not to be changed in place. Of a loader each batch is read early as
        :meth:`unipar.data.Loader.feed` says, anything else when it is due. On a CPU these are the
        batches themselves.

        Args:
            batches: a loader of this session, for the rest of its epoch, or batches of one.
            limit: how many of them will be used, if not all.
        """
        device = self.world.device
        if isinstance(batches, Loader):
            return batches.feed(device, limit=limit)
        begin = copies_to(device)
        if begin is None:
            return iter(batches)
        reading = ((batch, None) for batch in batches)
        return (batch for batch, _ in fed(reading, device, begin, ahead=False))

    def evaluate(
        self,
        engine: Engine,
        batches: Iterable[Batch],
        loss: LossFn | None = None,
        *,
        metrics: Mapping[str, Metric] | None = None,
        predict: Predict | None = None,
    ) -> dict[str, float]:
        """Mean loss and metrics, with every sample counted once. Collective.

        Args:
            engine: one of this session's.
            batches: from a loader of this session.
            loss: ``None`` computes metrics alone.
            metrics: by name, functions of (predictions, targets), or torchmetrics objects.
            predict: ``predict(model, batch) -> (predictions, targets)``, or a
                :class:`unipar.Objective` whose ``loss`` returns these; left out: a batch is a pair
                of inputs and targets.

        Returns:
            ``loss`` and each metric by its name, the same on every rank.

        Raises:
            ConfigError: a metric is not one number, or nothing says what it compares.
        """
        return evaluate(
            engine, self.feed(batches), loss, self.world, metrics=metrics, predict=predict
        )

    def save(
        self, directory: str | Path, *, step: int | None = None, loader: Loader | None = None
    ) -> Path:
        """Write a checkpoint of all engines, and of the loader's position. Collective.

        Args:
            directory: holds the checkpoints; each is a directory ``step-…`` in it.
            step: the number it is filed under; left out: the first engine's step count.
            loader: whose position to save too.

        Raises:
            CheckpointError: it cannot be written; the last good one is kept.
        """
        from unipar import checkpoint

        if step is None:
            step = max((engine.num_steps for engine in self.engines.values()), default=0)
        progress = {"loader": loader.state_dict()} if loader is not None else {}
        return checkpoint.save(
            Path(directory),
            self.engines,
            self.world,
            step=step,
            progress={"seed": self._seed, **progress},
            strategy=self.strategy.name,
        )

    def load(
        self, path: str | Path, *, loader: Loader | None = None, optimizer: bool = True
    ) -> int:
        """Take over a checkpoint of any strategy and world size. Collective.

        Args:
            path: a checkpoint, or a directory of them, of which the newest is taken that is not
                damaged.
            loader: what to set to the saved position.
            optimizer: whether to restore more than the weights.

        Returns:
            The number of steps it was saved after.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another model.
            ConfigError: it was saved with another optimizer or scheduler, or within an epoch of
                another order or other batches.
            DataError: it was saved within an epoch over another number of samples.
        """
        from unipar import checkpoint

        manifest = checkpoint.load(Path(path), self.engines, self.world, optimizer=optimizer)
        if loader is not None and "loader" in manifest.progress:
            loader.load_state_dict(manifest.progress["loader"])
        elif loader is not None and not manifest.weights_only and self.world.is_main:
            log.warning(
                "%s holds no place in the data, so the loader begins with the first epoch. Save "
                "with session.save(directory, loader=loader).",
                manifest.path,
            )
        return manifest.step


def find_placement(device_type: str, timeout: float) -> Placement:
    """Where the environment says this process stands; alone, when it says nothing."""
    import dataclasses

    from unipar import launch

    found = launch.detect() or Placement()
    return dataclasses.replace(found, device_type=device_type, timeout=timeout)
