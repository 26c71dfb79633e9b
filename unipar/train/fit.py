"""``fit``: train a model under any strategy."""

from __future__ import annotations

import copy
import dataclasses
import functools
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from unipar import checkpoint
from unipar.callbacks import Callback, Logger, RunResult
from unipar.callbacks.loggers import resolve_loggers
from unipar.config import UNSET, CheckpointConfig, RunConfig, Unset
from unipar.data import Loader
from unipar.errors import CheckpointError, ConfigError, WorkerError
from unipar.evaluation.evaluate import Metric, Predict
from unipar.launchers import LauncherOptions
from unipar.loss import LossFn
from unipar.optimizers.factories import refuse_built
from unipar.optimizers.groups import check_choice, factories, holds_functions
from unipar.optimizers.named import NamedScheduler
from unipar.strategy import (
    DropoutSeed,
    LossScale,
    ModelFactory,
    OnNaN,
    OptimizerFactory,
    Precision,
    SchedulerFactory,
    SelfTest,
    Strategy,
    StrategyOptions,
)
from unipar.train import directories, preflight
from unipar.train.arguments import check_objects
from unipar.train.elastic import changing, resuming_by_itself, saves_final
from unipar.train.events import EventLog
from unipar.train.job import Job
from unipar.train.loaders import evaluation_loader
from unipar.train.loop import train
from unipar.utils.matmul_precision import MatmulPrecision
from unipar.utils.scratch import tmpdir_remedy
from unipar.world import Placement


def fit(
    model: nn.Module | ModelFactory,
    data: Any,
    *,
    strategy: str | Mapping[str, Any] | StrategyOptions | Unset = UNSET,
    loss: LossFn | None = None,
    optimizer: OptimizerFactory | str | Mapping[str, Any] | Unset = UNSET,
    lr_scheduler: SchedulerFactory | str | Mapping[str, Any] | Unset | None = UNSET,
    eval_data: Any = None,
    metrics: Mapping[str, Metric] | None = None,
    predict: Predict | None = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[str | Logger] | Unset = UNSET,
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    launcher: str | Mapping[str, Any] | LauncherOptions | Unset = UNSET,
    device: Literal["auto", "cpu", "cuda"] | Unset = UNSET,
    devices: int | str | Unset = UNSET,
    num_nodes: int | Unset = UNSET,
    global_batch_size: int | Unset | None = UNSET,
    micro_batch_size: int | Literal["auto"] | Unset | None = UNSET,
    shares: Sequence[float] | Literal["auto"] | Unset | None = UNSET,
    epochs: int | Unset | None = UNSET,
    steps: int | Unset | None = UNSET,
    eval_every: int | Unset | None = UNSET,
    precision: Precision | Unset = UNSET,
    loss_scale: LossScale | Mapping[str, Any] | Unset | None = UNSET,
    float32_matmul_precision: MatmulPrecision | Unset | None = UNSET,
    max_grad_norm: float | Unset | None = UNSET,
    activation_checkpointing: str | Sequence[str] | Unset = UNSET,
    activation_offload: bool | Unset = UNSET,
    compile: bool | Mapping[str, Any] | Unset = UNSET,
    seed: int | Unset = UNSET,
    dropout_seed: DropoutSeed | Unset = UNSET,
    initial_weights: Literal["model", "by_name"] | str | Path | Unset = UNSET,
    shuffle: bool | Unset | None = UNSET,
    num_workers: int | Unset | None = UNSET,
    checkpoint: CheckpointConfig | Mapping[str, Any] | str | Path | Literal[False] | Unset = UNSET,
    resume: Literal["auto"] | str | Path | Unset | None = UNSET,
    timeout: float | Unset = UNSET,
    max_restarts: int | Unset = UNSET,
    grace_period: float | Unset = UNSET,
    save_signal: Literal["SIGUSR1", "SIGUSR2", "none"] | Unset = UNSET,
    on_nan: OnNaN | Unset = UNSET,
    output_dir: str | Path | Unset | None = UNSET,
    progress: bool | Unset = UNSET,
    log_level: str | Unset = UNSET,
    log_every: int | Unset = UNSET,
    self_test: SelfTest | Unset = UNSET,
) -> RunResult:
    """Train a model, under any strategy, on any number of devices.

    Works in a plain script, a notebook or ``python -c``, where it starts the processes itself, and
    under ``torchrun``, ``srun`` or ``mpirun``, whose processes it joins. Where it started them, a
    module given as ``model`` holds the trained weights afterwards.

    Args:
        model: a module, or a function without arguments that builds one.
        data: a map-style or iterable dataset, ``DataLoader``, tensor, tuple of tensors, or list of
            samples.
        strategy: a name (``"fsdp"``, ``"fsdp:sharding=hybrid"``), a mapping with ``name``, an
            options object, or ``"auto"``.
        loss: ``loss(model, batch)`` returns a mean over samples or a :class:`unipar.LossSum`; or a
            :class:`unipar.Objective`; left out: the model's output has ``.loss``.
        optimizer: a function of the named parameters, the name of a class of ``torch.optim``, a
            mapping of ``name`` and its arguments, or a mapping of several such, each with the
            ``params`` that it is for and an ``lr_scheduler`` of its own. Default: AdamW.
        lr_scheduler: a function of the optimizer, or a name or mapping likewise; stepped once for
            each optimizer step; a ``ReduceLROnPlateau`` at each evaluation, with its ``loss`` or
            the ``metric`` that a mapping names.
        eval_data: what to evaluate on.
        metrics: by name, functions of (predictions, targets), or torchmetrics objects.
        predict: ``predict(model, batch) -> (predictions, targets)``, or a
            :class:`unipar.Objective` whose ``loss`` returns these; left out: a batch is a pair of
            inputs and targets.
        callbacks: what else watches the run.
        loggers: where else metrics go besides ``metrics.jsonl``: names, or loggers.
        config: a file or mapping with any of the arguments below; those given here win.
        launcher: what starts the processes: a name (``"slurm"``), a name with options
            (``"mpi:hosts=[a,b]"``), a mapping with ``name``, or an options object; default:
            ``"local"``, this machine.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``.
        devices: processes on this machine; ``"auto"``: each GPU, or one process on a CPU; a range
            such as ``"2:8"``, or ``"2:"`` up to all devices: the run goes on with other numbers of
            them when some are lost, and when ``unipar runs resize`` asks for it.
        num_nodes: machines; more than one takes a ``launcher``.
        global_batch_size: samples of one step over all devices; default: the ``DataLoader``'s.
        micro_batch_size: samples of one forward pass on one device; ``"auto"`` finds the largest
            that fits. Accumulation follows from the two and the number of devices.
        shares: one positive number for each data-parallel rank, for devices that are not equally
            fast or large: each takes its part of every global batch in proportion, and
            ``micro_batch_size`` is that of the largest part; ``"auto"`` measures how fast ranks
            are, before the first step and when that changes; default: equal parts.
        epochs: passes over the data; default 1.
        steps: optimizer steps, instead of ``epochs``.
        eval_every: steps between evaluations; default: each epoch's end.
        precision: compute dtype, ``"fp32"``, ``"bf16"``, ``"fp16"``, or ``"fp8"`` (``"bf16"``
            with linear layers in float8); weights and reductions are fp32.
        loss_scale: how the scale of losses in fp16 begins and changes: ``initial``,
            ``growth_factor``, ``backoff_factor`` and ``growth_interval``, as of PyTorch's scaler,
            whose defaults they have. A run that goes on from a checkpoint goes on with its scale.
        float32_matmul_precision: how exactly matrix products of fp32 tensors are computed, as
            :func:`torch.set_float32_matmul_precision` takes it; default: as torch is set.
        max_grad_norm: 2-norm to clip the whole gradient to; ``math.inf`` only measures it.
        activation_checkpointing: ``"off"``, ``"full"``, ``"selective"``, or names of module
            classes.
        activation_offload: whether what is saved for the backward pass waits for it in host memory.
        compile: whether to use ``torch.compile``, or its keyword arguments.
        seed: of the data order, of a model function's weights, and of dropout.
        dropout_seed: what dropout draws for: ``"rank"``, each rank, as torch does; or ``"sample"``,
            each sample by its place in the global batch, so that a run has the same losses on any
            number of ranks, with any micro-batches, and resumed elsewhere. Other random numbers
            that a forward pass draws are then refused, and so is ``compile``.
        initial_weights: where a model function's first weights come from: ``"model"``, as it
            computes them; ``"by_name"``, each tensor by itself under a seed of its name; or a
            path, of a checkpoint or of safetensors in the Hugging Face layout.
        shuffle: whether each epoch has an order of its own.
        num_workers: data-loading processes of each device.
        checkpoint: a directory, a URL (``"s3://bucket/run"``) to which checkpoints are copied, a
            :class:`CheckpointConfig` or its fields, or ``False``.
        resume: ``"auto"`` for the newest checkpoint in ``checkpoint``'s directory, or at its URL,
            if there is one; or a path or a URL.
        timeout: seconds that a collective waits for a missing rank.
        max_restarts: how often a failed group of processes starts again from its newest checkpoint.
        grace_period: seconds that the run has after SIGTERM or SIGHUP to finish its step and save.
        save_signal: the signal that makes the run save and go on, or ``"none"``.
        on_nan: ``"raise"``, ``"skip"`` or ``"ignore"`` a loss that is not finite.
        output_dir: where the run's files go; default: a new directory in ``runs``.
        progress: whether to show progress.
        log_level: how much is logged.
        log_every: steps between logged metrics.
        self_test: whether a few steps of a tiny model under the strategy are compared with a plain
            loop first, once for a machine and its versions; ``"auto"`` does so on GPUs.

    Returns:
        Metrics by step, the newest checkpoint, throughput, memory.

    Raises:
        ConfigError: what is asked for cannot be done; raised before any process starts where it
            can be known by then.
        DataError: the data cannot be trained on.
        CheckpointError: a checkpoint cannot be written or read.
        WorkerError: a process failed.
        KeyboardInterrupt: the run was interrupted; it has saved a checkpoint if it was to.
        Terminated: SIGTERM or SIGHUP ended it, likewise; a ``SystemExit`` with the signal's code.
    """
    given = {name: value for name, value in locals().items() if name in RunConfig.model_fields}
    objects = {
        name: given.pop(name)
        for name in ("optimizer", "lr_scheduler")
        if holds_functions(given.get(name))
    }
    refuse_built(given.get("optimizer"), given.get("lr_scheduler"))
    loggers_given = given.pop("loggers")
    if isinstance(loggers_given, (str, Logger)):
        loggers_given = [loggers_given]
    if not isinstance(loggers_given, (list, tuple, Unset)):
        raise ConfigError(
            f"loggers is a {type(loggers_given).__name__}. Pass a list of names or loggers."
        )
    if not isinstance(loggers_given, Unset):
        given["loggers"] = [item for item in loggers_given if isinstance(item, str)]
    settings = RunConfig.build(config, **given)
    return _Launch(settings).run(
        model,
        data,
        loggers=settings.loggers if isinstance(loggers_given, Unset) else loggers_given,
        loss=loss,
        eval_data=eval_data,
        metrics=metrics,
        predict=predict,
        callbacks=callbacks,
        **objects,
    )


class _Launch:
    """Where a run's processes come from, and what is checked before there are any."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def run(self, model: nn.Module | ModelFactory, data: Any, **objects: Any) -> RunResult:
        planned = preflight.plan(self.config, model)
        strategy, self.placement = planned.strategy, planned.placement
        self.planned = planned
        if planned.sizes and planned.joined:
            self.config = resuming_by_itself(self.config)
        # Every process resolves the same strategy, with what this one found out for "auto".
        config = self.config.model_copy(update={"strategy": strategy.options})
        scheduler = objects.pop("lr_scheduler", None)
        if scheduler is None and config.lr_scheduler is not None:
            scheduler = config.lr_scheduler.factory()
        optimizer, scheduler = factories(
            objects.pop("optimizer", None) or config.optimizer.factory(), scheduler
        )
        assert optimizer is not None
        output_dir = self._output_dir(strategy)
        job = Job(
            model,
            data,
            config,
            output_dir,
            self._checkpoint_dir(output_dir),
            optimizer=optimizer,
            lr_scheduler=scheduler,
            **objects,
        )
        loader = self._check(job, planned)
        if planned.sizes and not planned.joined and config.micro_batch_size is None:
            # Those of the most ranks: with fewer of them, no rank needs more memory.
            micro = {"micro_batch_size": loader.micro_batch_size}
            job = dataclasses.replace(job, config=config.model_copy(update=micro))
        # In this process if it can be the only one and stays usable, else in new ones.
        alone = (
            self.placement.size == 1
            and self.config.max_restarts == 0
            and not planned.sizes
            and planned.launcher.starts_here
        )
        if not planned.joined:
            # Ranks that a launcher started learn of it from rank 0, once they have joined: one that
            # left before would keep the others waiting.
            directories.check(job, alone=alone)
        self._refuse_used(job)
        if planned.joined:
            return _here(job, self.placement)
        keeps_weights = isinstance(model, nn.Module) and (not alone or strategy.rewrites_module)
        if alone and not keeps_weights:
            return _here(job, self.placement)
        with planned.launcher.directory(output_dir) as directory:
            try:
                return self._start(job, directory, alone=alone, keeps_weights=keeps_weights)
            except CheckpointError as error:
                if str(directory) not in str(error) or not planned.launcher.starts_here:
                    raise
                raise CheckpointError(f"{error} {tmpdir_remedy()}") from error

    def _start(self, job: Job, directory: Path, *, alone: bool, keeps_weights: bool) -> RunResult:
        """Run away from the caller's module, and put the weights into it afterwards."""
        model = job.model
        if keeps_weights:
            kept = job.checkpoint_dir is not None and saves_final(job.config)
            job = dataclasses.replace(
                job,
                model=copy.deepcopy(model) if alone else model,
                weights_dir=None if kept else directory / "weights",
            )
        if alone:
            result = _here(job, self.placement)
        else:
            callbacks = [*job.callbacks, *self.planned.launcher.callbacks(directory)]
            fn = functools.partial(train, dataclasses.replace(job, callbacks=callbacks))
            with changing(job, self.planned, directory) as elastic:
                name = job.output_dir.name
                task = preflight.task(self.config, self.planned, fn, directory, name, elastic)
                try:
                    result = self.planned.launcher.run(task)
                except WorkerError as error:
                    # Rank 0 may have been killed, or know only that another has gone.
                    EventLog(job.output_dir).failed(error, step=None)
                    raise
        if keeps_weights:
            source = job.weights_dir or result.checkpoint
            assert source is not None
            assert isinstance(model, nn.Module)
            checkpoint.load_model(source, model)
            if job.weights_dir is not None:
                shutil.rmtree(job.weights_dir, ignore_errors=True)
        return result

    def _check(self, job: Job, planned: preflight.Plan) -> Loader:
        check_objects(job)
        _check_evaluation(job)
        resolve_loggers(job.loggers)
        if isinstance(job.model, nn.Module):
            check_choice(job.optimizer, job.model)
        if isinstance(job.config.resume, Path):
            checkpoint.find(job.config.resume)
        elif job.config.resume not in ("auto", None) and not planned.joined:
            checkpoint.located(job.config.resume)
        if isinstance(job.config.initial_weights, Path):
            checkpoint.check_weights(job.config.initial_weights)
        loader = preflight.check(
            job.config, planned, job.model, job.data, loss=job.loss, predict=job.predict
        )
        evaluation_loader(
            job.config,
            job.eval_data,
            loader.micro_batch_size,
            data_size=planned.strategy.layout(self.placement).batch,
        )
        return loader

    def _output_dir(self, strategy: Strategy) -> Path:
        if self.config.output_dir is not None:
            return self.config.output_dir.absolute()
        settings = self.config.checkpoint
        placed = isinstance(settings, CheckpointConfig) and settings.directory is not None
        if self.config.resume == "auto" and not placed:
            raise ConfigError(
                "resume='auto' looks for the newest checkpoint of this run, and the run has no "
                "directory of its own: set output_dir='…' (or checkpoint='…'), the same each time."
            )
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return directories.unused(Path("runs", f"{stamp}-{strategy.name}").absolute())

    def _configured_directory(self) -> Path | None:
        settings = self.config.checkpoint
        given = settings.directory if isinstance(settings, CheckpointConfig) else None
        return given if isinstance(given, Path) else None

    def _checkpoint_dir(self, output_dir: Path) -> Path | None:
        if self.config.checkpoint is False:
            return None
        return (self._configured_directory() or output_dir / "checkpoints").absolute()

    def _refuse_used(self, job: Job) -> None:
        restarted = self.placement.restart > 0
        if job.checkpoint_dir is None or restarted or self.config.resume == "auto":
            return
        newest = checkpoint.newest(job.checkpoint_dir)
        if newest is not None:
            directories.refuse_used(job, job.checkpoint_dir, newest.name, "output_dir")


def _here(job: Job, placement: Placement) -> RunResult:
    """Train in this process, which hands the run over to nobody."""
    result = train(job, placement)
    assert result is not None
    return result


def _check_evaluation(job: Job) -> None:
    if job.eval_data is None:
        if job.metrics:
            raise ConfigError(
                f"metrics ({', '.join(job.metrics)}) are computed on eval_data, and there is none. "
                "Give eval_data, or leave metrics out."
            )
        if job.config.eval_every is not None:
            raise ConfigError(
                f"eval_every is {job.config.eval_every}, and there is no eval_data to evaluate on. "
                "Give eval_data, or leave eval_every out."
            )
    settings = job.config.checkpoint
    if isinstance(settings, CheckpointConfig) and settings.keep_best is not None:
        job.check_evaluates(settings.keep_best.metric, "checkpoint.keep_best")
    scheduler = job.lr_scheduler
    if isinstance(scheduler, NamedScheduler) and scheduler.metric is not None:
        job.check_evaluates(scheduler.metric, "lr_scheduler")
