"""The training loop: steps and epochs, evaluation, checkpoints, resuming."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from unipar import checkpoint, launch, launchers
from unipar.callbacks import (
    Callback,
    LoggerCallback,
    ProgressBar,
    RunInfo,
    RunResult,
    StepRecord,
)
from unipar.callbacks.loggers import resolve_loggers
from unipar.config import CheckpointConfig
from unipar.data import Loader
from unipar.data.batch import Batch
from unipar.data.feed import pins_for
from unipar.errors import CheckpointError, Terminated
from unipar.launch import elastic
from unipar.launch.detection import launcher_name
from unipar.objective import Objective
from unipar.optimizers.named import LOSS, NamedScheduler, takes_metric
from unipar.session import Session
from unipar.strategy import Engine
from unipar.train.agreement import agree
from unipar.train.autobatch import largest_micro_batch
from unipar.train.checkpointing import Saver
from unipar.train.events import EventLog
from unipar.train.handover import Handover, TakenOver, say_what_changes
from unipar.train.interrupt import Signals
from unipar.train.job import Job
from unipar.train.loaders import (
    evaluation_loader,
    say_evaluating,
    say_lone_samples,
    training_loader,
)
from unipar.train.recording import Recorder
from unipar.train.resuming import check_same_order, load
from unipar.train.shares import AutoShares
from unipar.train.stragglers import Stragglers
from unipar.utils import progress_marks
from unipar.utils.devices import device_range, peak_memory
from unipar.utils.logs import logging_to_terminal
from unipar.utils.signals import passed_on
from unipar.world import Flag, Placement

log = logging.getLogger("unipar")


def train(job: Job, placement: Placement) -> RunResult | None:
    """Run a job in this process of the run; the same result on every rank.

    Returns:
        The result; or ``None`` where other ranks go on with the run, as many as were asked for.

    Raises:
        ConfigError, DataError, CheckpointError: as the message says.
        KeyboardInterrupt, Terminated: the run was stopped by a signal, and has saved what it was
            asked to save.
    """
    config = job.config
    signals = Signals(grace_period=config.grace_period, save_signal=config.save_signal_number)
    session = Session(
        config.strategy,
        precision=config.precision,
        loss_scale=config.loss_scale,
        float32_matmul_precision=config.float32_matmul_precision,
        device=placement.device_type,  # pyright: ignore[reportArgumentType]
        seed=config.seed,
        dropout_seed=config.dropout_seed,
        timeout=config.timeout,
        on_nan=config.on_nan,
        self_test=config.self_test,
        placement=placement,
    )
    with (
        logging_to_terminal(config.log_level, main=placement.rank == 0),
        signals.handled(),
        # Outside the session, which waits for what is still being written when it ends.
        contextlib.ExitStack() as claim,
        session,
    ):
        job = agree(job, session.world, claim)
        # Where other ranks may go on, the launching process knows whether a loss is the end.
        events = EventLog(
            job.output_dir,
            write=placement.rank == 0,
            echoes=elastic.member() is None,
            step=None if placement.restart else 0,
        )
        with events.ending():
            run = TrainingRun(job, session, signals, events)
            with signals.training(session.world):
                result = run.run()
                events.ends = result is not None
                return result


class TrainingRun:
    """The state of one run in one process."""

    def __init__(self, job: Job, session: Session, signals: Signals, events: EventLog) -> None:
        self.job, self.session, self.world = job, session, session.world
        self.signals, self.events = signals, events
        self.config = job.config
        self.step = 0
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.metrics: dict[str, float] = {}
        self._announced: Path | None = None
        self.loader = self._loader()
        self.engine = self._engine()
        self.loss = job.loss or Objective.of_model(self.engine.module)
        self._plateau_metric = self._find_plateau_metric()
        if self.config.micro_batch_size == "auto":
            self.loader = largest_micro_batch(self.engine, self.loader, self.loss, self.world)
        if self.world.is_main:
            say_lone_samples(self.engine.module, self.loader)
            say_evaluating(self.engine.module)
        self.eval_loader = self._eval_loader()
        self.saver = self._saver()
        member = elastic.member()
        self.handover = None if member is None else Handover(member, session)
        self._resume()
        self.taken_over = self.handover.take_over(self.step) if self.handover else None
        self.resumed_step = self.step
        # What callbacks are yet to be told of comes after it.
        self.start_step = self.taken_over.recorded if self.taken_over else self.step
        self.total_steps = self._total_steps()
        self.info = self._info()
        self.callbacks = self._callbacks()
        self.recorder = self._recorder()
        self.stragglers = Stragglers(self.world, self.info.hosts, self._note_speed)
        self.shares: AutoShares | None = None
        if self.config.shares == "auto" and self.world.data_size > 1:
            note = functools.partial(self.events.add, "shares")
            self.shares = AutoShares(self.engine, self.loader, self.loss, self.world, note)

    # -- before the first step -------------------------------------------------------------------

    def _loader(self) -> Loader:
        loader = training_loader(
            self.config,
            self.job.data,
            data_rank=self.world.data_rank,
            data_size=self.world.data_size,
            pin_memory=pins_for(self.world.device),
        )
        if isinstance(self.config.shares, tuple):
            log.info(
                "data-parallel ranks take %s of the %d samples of a global batch",
                ", ".join(map(str, loader.share_sizes)),
                loader.global_batch_size,
            )
        return loader

    def _engine(self) -> Engine:
        auto = self.config.micro_batch_size == "auto"
        moves = auto or self.config.shares == "auto"
        return self.session.prepare(
            self.job.model,
            optimizer=self.job.optimizer,
            lr_scheduler=self.job.lr_scheduler,
            max_grad_norm=self.config.max_grad_norm,
            activation_checkpointing=self.config.activation_checkpointing,
            activation_offload=self.config.activation_offload,
            compile=self.config.compile,
            initial_weights=self.config.initial_weights,
            global_batch_size=self.loader.global_batch_size,
            micro_batch_size=None if auto else self.loader.micro_batch_size,
            accumulation=None if moves else self.loader.accumulation,
        )

    def _find_plateau_metric(self) -> str | None:
        """The metric that the scheduler is stepped with at evaluations, if it is."""
        if not takes_metric(self.engine.lr_scheduler):
            return None
        asked = self.job.lr_scheduler
        metric = (asked.metric if isinstance(asked, NamedScheduler) else None) or LOSS
        self.job.check_evaluates(metric, "lr_scheduler")
        return metric

    def _eval_loader(self) -> Loader | None:
        return evaluation_loader(
            self.config,
            self.job.eval_data,
            self.loader.micro_batch_size,
            data_rank=self.world.data_rank,
            data_size=self.world.data_size,
            pin_memory=pins_for(self.world.device),
        )

    def _saver(self) -> Saver | None:
        settings = self.config.checkpoint
        if not isinstance(settings, CheckpointConfig) or self.job.checkpoint_dir is None:
            return None
        return Saver(self.job.checkpoint_dir, settings, self.session)

    def _resume(self) -> None:
        left = self.handover.found() if self.handover else None
        manifest = load(
            self.config.resume,
            self.job,
            self.session.engines,
            self.world,
            left=left,
            own_first=device_range(self.config.devices) is not None and self.handover is None,
        )
        if manifest is None:
            return
        check_same_order(manifest, self.loader)
        if "loader" in manifest.progress:
            self.loader.load_state_dict(manifest.progress["loader"])
        elif not manifest.weights_only:
            log.warning(
                "%s holds no place in the data: it begins with the first epoch", manifest.path
            )
        self.step = manifest.step
        if self.handover is not None and left is not None:
            self.handover.resumed(manifest)
            if self.saver is not None:
                self._announced = self.signals.newest = self.saver.find_newest()
        else:
            self.signals.newest = manifest.path
        self.metrics = dict(manifest.progress.get("metrics", {}))
        if self.saver is not None:
            self.saver.take_best(manifest.progress.get("best"))
        if self.saver is not None and self.saver.take_over(manifest):
            self._announced = manifest.path
        log.info(
            "resuming at step %d from %s (written by %s on %d)",
            self.step,
            manifest.path,
            manifest.strategy or "an unnamed strategy",
            manifest.world_size,
        )

    def _total_steps(self) -> int | None:
        if self.config.steps is not None:
            return self.config.steps
        assert self.config.epochs is not None
        batches = self.loader.num_batches
        return None if batches is None else batches * self.config.epochs

    def _info(self) -> RunInfo:
        return RunInfo(
            strategy=self.session.strategy.name,
            world_size=self.world.size,
            device=self.world.device.type,
            total_steps=self.total_steps,
            epochs=self.config.epochs,
            global_batch_size=self.loader.global_batch_size,
            num_parameters=self.engine.num_parameters,
            output_dir=self.job.output_dir,
            start_step=self.start_step,
            rank=self.world.rank,
            hosts=self.world.gather(socket.gethostname()),
            launcher=self._launcher(),
            restart=self.world.placement.restart,
            engine=self.engine,
            config=self.config.model_dump(mode="json", by_alias=True),
        )

    def _launcher(self) -> str:
        asked = launchers.resolve(self.config.launcher)
        if not asked.starts_here or progress_marks.watched():
            return asked.name
        return launcher_name() or asked.name

    def _callbacks(self) -> list[Callback]:
        # First, so that a step that another callback fails at is a step that was taken.
        callbacks: list[Callback] = [self.events, *self.job.callbacks]
        if self.world.is_main:
            loggers = resolve_loggers(self.job.loggers)
            callbacks.append(LoggerCallback(loggers, every=self.config.log_every))
            if self.config.progress:
                callbacks.append(ProgressBar())
            if self.handover is not None:
                callbacks.append(self.handover.history)
        return [c for c in callbacks if c.every_rank or self.world.is_main]

    def _recorder(self) -> Recorder:
        return Recorder(
            self._recorded,
            device_type=self.world.device.type,
            every=self.config.log_every,
            first=self.start_step + 1,
            last=self.total_steps,
            # The same on every rank, which the callbacks that there are here are not.
            lags=all(callback.lags for callback in self.job.callbacks),
            records=self.taken_over.records if self.taken_over else (),
        )

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> RunResult | None:
        try:
            result = self._run()
        except BaseException as error:
            if self.handover is not None:
                self.handover.survive(error)
            # The run's own error is what the user must see, whatever callbacks make of it.
            self.recorder.settle_before(error)
            for callback in self.callbacks:
                with _logged(callback):
                    callback.on_exception(self.info, error)
            for callback in self.callbacks:
                with _logged(callback):
                    callback.on_run_end(self.info, None)
            raise
        finally:
            if self.saver is not None:
                self.saver.close()
        # A run that is handed over has no result yet.
        for callback in self.callbacks:
            callback.on_run_end(self.info, result)
        return result

    def _run(self) -> RunResult | None:
        began = time.perf_counter()
        for callback in self.callbacks:
            callback.on_run_start(self.info)
        if self.taken_over is not None:
            began -= time.time() - self.taken_over.began
            self._take_over(self.taken_over)
        if self.shares is not None:
            self._measure_speeds(self.shares)
        for batch in self._batches():
            self._train_step(batch)
            if self._hands_over():
                return None
        self.recorder.settle()
        if self.step > self.start_step and self._last_evaluated() != self.step:
            self._evaluate()
        self.engine.rest()
        final = self._finish()
        return self._result(final, time.perf_counter() - began)

    def _batches(self) -> Iterator[Batch]:
        """Batches until the run's last step, over as many epochs as that takes."""
        epochs, steps = self.config.epochs, self.config.steps
        while steps is None or self.step < steps:
            epoch = self.loader.position.epoch
            if epochs is not None and epoch >= epochs:
                return
            limit = None if steps is None else steps - self.step
            if self.shares is not None:
                self.loader = self.shares.cut(self.loader)
            for batch in self.session.feed(self.loader, limit=limit):
                yield batch
                if steps is not None and self.step >= steps:
                    return
                # A stream would be read again from its beginning: its parts wait for the next one.
                if self.shares is not None and self.shares.changed and not self.loader.is_stream:
                    break
            else:
                # The end of a stream shows only when nothing follows.
                if self.config.eval_every is None and self._last_evaluated() != self.step:
                    self._evaluate()

    def _train_step(self, batch: Batch) -> None:
        started = time.perf_counter() if self.recorder.empty else self._last_end
        self.stragglers.loaded()
        launch.mark(self.step + 1, "training step")
        self.signals.begin_step()
        if self.handover is not None:
            self.handover.look()
        lr = self.engine.optimizer.param_groups[0]["lr"] if self.engine.optimizer else None
        if isinstance(lr, torch.Tensor):
            # A scheduler changes it in place, before it is recorded.
            lr = lr.clone()
        done = self.engine.train_step(batch, self.loss)
        # The step before, of which the device has come to the end since.
        self.recorder.settle()
        self.step += 1
        launch.mark(self.step, "after the step")
        self._last_end = time.perf_counter()
        seconds = self._last_end - started
        self.stragglers.end()
        self.recorder.add(self.step, batch, done, lr, seconds)
        due = self._evaluation_due()
        self._note_whole(owes_evaluation=due)
        if due:
            self._evaluate()
            launch.mark(self.step, "after the evaluation")
        if self.saver is not None:
            self._announce(self.saver.collect())
            if self.saver.due(self.step, self._metrics()):
                self.recorder.settle()
                kept = self.saver.save(self.step, self._progress(), self._metrics())
                self._announce(kept)
        if self.world.take_flag(Flag.SAVE):
            self._save_now()
        if self.world.take_flag(Flag.INTERRUPT):
            self._stop()
        if self.shares is not None and self.shares.are_due(seconds):
            self._measure_speeds(self.shares)
        launch.mark(self.step + 1, "loading data")
        self.stragglers.begin()

    def _measure_speeds(self, shares: AutoShares) -> None:
        if self.step == self.total_steps:
            return
        launch.mark(self.step, "measuring speeds")
        self.recorder.settle()
        shares.measure()
        self._last_end = time.perf_counter()

    # -- other numbers of ranks ------------------------------------------------------------------

    def _take_over(self, taken: TakenOver) -> None:
        """Go on where another group of ranks has left the run."""
        assert self.handover is not None
        change = self.handover.change
        if change is None:
            say_what_changes(self.engine.module, self.config.dropout_seed)
        if taken.missing is not None:
            self.recorder.take(taken.missing)
        self.evaluations += taken.evaluations
        if taken.unsaid is not None:
            self._evaluated(*taken.unsaid, owes_evaluation=taken.owes_evaluation)
        if taken.owes_evaluation:
            self._evaluate()
        self._note_whole()
        if change is None:
            return
        repeated = max(0, (taken.reached or 0) - self.step)
        seconds = time.time() - change.since
        self.events.add(
            "changed",
            before=change.before,
            after=change.after,
            why=change.why,
            seconds=round(seconds, 3),
            repeated=repeated,
        )
        log.info(
            "%s now, from step %d on; %.1f s and %d steps were lost",
            elastic.ranks(change.after),
            self.step,
            seconds,
            repeated,
        )

    def _note_whole(self, *, owes_evaluation: bool = False) -> None:
        if self.handover is not None and self.handover.keeps:
            history, evaluations = self.recorder.history, self.evaluations
            self.handover.ended_step(
                self.step,
                self._progress(),
                history[-1] if history else None,
                evaluations[-1] if evaluations else None,
                owes_evaluation=owes_evaluation,
            )

    def _hands_over(self) -> bool:
        """Leave the run to another number of ranks, if that is asked for."""
        if self.handover is None:
            return False
        if self.step == self.resumed_step + 1:
            self.handover.settled()
        if not self.world.take_flag(Flag.HANDOVER) or self.step == self.total_steps:
            return False
        launch.mark(self.step, "handing over")
        self.recorder.settle()
        if self.saver is not None:
            self._announce(self.saver.wait())
        return self.handover.hand_over(self.step, self._progress(), self._metrics())

    def _recorded(self, record: StepRecord) -> None:
        self.metrics["train_loss"] = record.loss
        for callback in self.callbacks:
            callback.on_step_end(self.info, record)

    def _note_speed(self, event: str, rank: int, host: str) -> None:
        self.events.add(event, rank=rank, host=host)

    def _evaluation_due(self) -> bool:
        """Before a checkpoint of the same step is written, so that it holds the metrics."""
        return self.step == self.total_steps or self._is_scheduled()

    def _is_scheduled(self) -> bool:
        """Whether an evaluation is due after this step wherever the run ends."""
        if self.config.eval_every is not None:
            return self.step % self.config.eval_every == 0
        return self.loader.position.index == 0

    def _evaluate(self) -> None:
        if self.eval_loader is None:
            return
        self.recorder.settle()
        launch.mark(self.step, "evaluation")
        self.eval_loader.rewind()
        metrics = self.session.evaluate(
            self.engine,
            self.eval_loader,
            self.loss,
            metrics=self.job.metrics,
            predict=self.job.predict,
        )
        # One at the end is none of a run that goes on with more steps.
        if self._plateau_metric is not None and self._is_scheduled():
            scheduler: Any = self.engine.lr_scheduler
            scheduler.step(metrics[self._plateau_metric])
        self._evaluated(self.step, metrics)

    def _evaluated(
        self, step: int, metrics: dict[str, float], *, owes_evaluation: bool = False
    ) -> None:
        self.evaluations.append((step, metrics))
        self.metrics.update(metrics)
        # Before callbacks, in which a rank may be lost: the scheduler is not to be stepped again.
        self._note_whole(owes_evaluation=owes_evaluation)
        for callback in self.callbacks:
            callback.on_evaluate_end(self.info, step, metrics)
        self._last_end = time.perf_counter()

    def _last_evaluated(self) -> int:
        return self.evaluations[-1][0] if self.evaluations else -1

    # -- saving and ending -----------------------------------------------------------------------

    def _progress(self) -> dict[str, Any]:
        return {
            "loader": self.loader.state_dict(),
            "seed": self.config.seed,
            # A copy: it may be written while training goes on.
            "metrics": dict(self.metrics),
            "best": None if self.saver is None else self.saver.best,
        }

    def _metrics(self) -> dict[str, float]:
        """The metrics that belong to the weights as they are now."""
        return self.evaluations[-1][1] if self._last_evaluated() == self.step else {}

    def _announce(self, path: Path | None) -> None:
        if path is None or path == self._announced:
            return
        self._announced = self.signals.newest = path
        for callback in self.callbacks:
            callback.on_checkpoint(self.info, checkpoint.step_of(path), path)
        self._last_end = time.perf_counter()

    def _finish(self) -> Path | None:
        """Save what the run is asked to leave; the newest checkpoint."""
        newest = None
        if self.saver is not None:
            self._announce(self.saver.wait())
            newest = self.saver.finish(self.step, self._progress(), self._metrics())
            self._announce(newest)
            missing = self.saver.wait_for_copies()
            if missing is not None:
                raise CheckpointError(
                    f"The run has come to its end, and its newest checkpoint is not where it "
                    f"should be: {missing} It is {newest}; resume='auto' copies it once more."
                )
        if self.job.weights_dir is not None:
            checkpoint.save_weights(self.job.weights_dir, self.engine, self.world)
        return newest

    def _save_now(self) -> None:
        """Save because a signal asks for it, and go on."""
        self.recorder.settle()
        if self.saver is None:
            log.warning("a signal asks for a checkpoint, and checkpoint=False: nothing was saved")
        else:
            kept = self.saver.save_now(self.step, self._progress(), self._metrics())
            self._announce(kept)
            log.info("saved after step %d to %s, as a signal asks", self.step, kept)
        self.signals.pass_on()

    def _stop(self) -> None:
        self.recorder.settle()
        own = self.signals.stopped_by
        told = self.world.gather((own, own in passed_on))
        number = max(own for own, _ in told)
        asked = [str(rank) for rank, (own, _) in enumerate(told) if own]
        if any(to_all for _, to_all in told):
            asked = [str(rank) for rank in range(self.world.size)]
        what = (
            "interrupted" if number == signal.SIGINT else f"{signal.Signals(number).name}: stopped"
        )
        if len(asked) < self.world.size:
            what += f" by a signal to rank {', '.join(asked)} alone,"
        kept = None
        if self.saver is not None:
            kept = self.saver.finish(self.step, self._progress(), self._metrics())
            missing = self.saver.wait_for_copies()
            if missing is not None:
                log.error("the newest checkpoint is on this run's disks alone: %s", missing)
        log.log(
            logging.WARNING if self.world.is_main else logging.INFO,
            "%s after step %d%s",
            what,
            self.step,
            f"; saved to {kept}, continue with resume='auto'" if kept else "; nothing was saved",
        )
        if number == signal.SIGINT and len(asked) == self.world.size:
            raise KeyboardInterrupt
        # No rank is to blame for what came to one alone.
        raise Terminated(number)

    def _result(self, newest: Path | None, wall_time: float) -> RunResult:
        history = self.recorder.history
        items, seconds = history.num_items, history.seconds
        return RunResult(
            metrics=dict(self.metrics),
            history=history,
            evaluations=self.evaluations,
            checkpoint=newest,
            items_per_second=items / seconds if seconds else 0.0,
            peak_memory=self.world.gather(peak_memory(self.world.device.type)),
            wall_time=wall_time,
            output_dir=self.job.output_dir,
            world_size=self.world.size,
            strategy=self.session.strategy.name,
        )


@contextlib.contextmanager
def _logged(callback: Callback) -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("%s failed while the run was ending", type(callback).__name__)
