"""``ray``: processes on the nodes of a Ray cluster, under the controller of Ray Train."""

# Ray is not in the environment in which types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import psutil
from pydantic import PositiveInt

from unipar import launch
from unipar.callbacks import Callback, RunInfo, RunResult, StepRecord
from unipar.callbacks.loggers.callback import step_metrics
from unipar.errors import ConfigError, WorkerError
from unipar.launch.rundir import fresh
from unipar.launchers import ray_node
from unipar.launchers.base import LauncherOptions, SubmittingLauncher
from unipar.launchers.handle import Status
from unipar.launchers.ray_pools import RayPool, check_nodes, check_pools, selectors
from unipar.launchers.shared import SharedHandle, SharedRun
from unipar.launchers.task import Task
from unipar.strategy import Availability
from unipar.utils.environ import environ

log = logging.getLogger("unipar.launch")

_INSTALL = 'pip install "unipar[ray]"'
_OBJECT_STORE = 100 << 20
"""Bytes; Ray's least is some 75 MB, and nothing of a run goes through it."""
# How long the cluster may leave the run without nodes until that is said, and how long Ray has to
# end what was canceled.
_PATIENCE, _CANCEL = 60.0, 10.0
_END, _REACHABLE = 5.0, 10.0
_REPORT_EVERY = 1.0
_VARIABLES = {
    # How soon the end of the ranks is seen; Ray's own is 2 s.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Without it Ray prints a warning of what a later version will do.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Where the user has not set them."""
_VARIABLES_HERE = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
"""The same for a cluster of this machine alone, of which no node is ever taken away."""


class RayOptions(LauncherOptions, frozen=True):
    """Options of ``ray``."""

    launcher: ClassVar[str] = "ray"

    address: str | None = None
    """A running cluster: `host:port` of its head, or `auto` for the one that this machine is part
    of; `local`: one of this machine alone, for the length of the run. Left out: the one that this
    process is connected to, or that `RAY_ADDRESS` names, and else `local`."""
    cpus: PositiveInt = 1
    """CPUs that Ray sets aside for each process, which are also its `OMP_NUM_THREADS`."""
    python: str | None = None
    """The interpreter on the nodes; left out: this one's path."""
    pools: tuple[RayPool, ...] = ()
    """Nodes of several kinds, as a list of mappings with `nodes` (how many) and `labels` (that Ray
    knows them by); ranks are in the order of the list. Left out: nodes of any kind."""


class RayLauncher(SubmittingLauncher):
    """Starts one worker of Ray Train on each node, which starts the node's ranks."""

    options_type = RayOptions

    @property
    def elsewhere(self) -> bool:
        return self._address is not None or _connected()

    @property
    def _address(self) -> str | None:
        """The running cluster's; ``None`` for one of this machine alone."""
        address = self.options.address or os.environ.get("RAY_ADDRESS") or None
        return None if address == "local" else address

    @classmethod
    def availability(cls) -> Availability:
        # Not by where an import would find it: any directory of that name would do.
        try:
            version = metadata.version("ray")
        except metadata.PackageNotFoundError:
            return Availability(False, "the package 'ray' is not installed", f"Run: {_INSTALL}")
        major, minor = (int(part) for part in version.split(".")[:2])
        if major != 2 or minor < 60:
            return Availability(
                False,
                f"ray {version} is installed, and 2.60 or a later 2.x is needed",
                f"Run: {_INSTALL}",
            )
        missing = [name for name in ("pandas", "pyarrow") if find_spec(name) is None]
        if missing:
            return Availability(
                False, f"Ray Train needs {' and '.join(missing)}, not installed", f"Run: {_INSTALL}"
            )
        return Availability(True)

    def check(self, devices: int, num_nodes: int, device_type: str) -> None:
        if device_type not in ("cpu", "cuda"):
            raise ConfigError(
                f"launcher 'ray' takes device='cpu' and device='cuda', not '{device_type}'."
            )
        check_pools(self.options.pools, num_nodes)
        if (address := self._address) is not None and not _connected():
            _check_reachable(address)
        if not self.elsewhere:
            if num_nodes > 1:
                raise ConfigError(
                    f"num_nodes={num_nodes}, and launcher 'ray' has no cluster but this machine. "
                    "Name a running one, by launcher='ray:address=auto' on one of its machines or "
                    "by launcher='ray:address=\"HOST:6379\"'."
                )
            launch.check(devices, num_nodes, device_type)

    def callbacks(self, directory: Path) -> Sequence[Callback]:
        return [_Report(directory)]

    def start(self, task: Task) -> RayHandle:
        # What cannot travel is refused before Ray is started.
        run = SharedRun(task, python=self.options.python)
        with contextlib.ExitStack() as stack:
            variables = _VARIABLES if self.elsewhere else _VARIABLES | _VARIABLES_HERE
            unset = {name: text for name, text in variables.items() if name not in os.environ}
            stack.enter_context(environ(unset))
            stack.enter_context(self._connection(task))
            self._check_room(task)
            trainer = _trainer(task, self.options, run.command)
            return RayHandle(run, self.options, trainer, stack.pop_all())

    def run(self, task: Task) -> Any:
        # Restarts are Ray's.
        return self.once(task)

    @contextlib.contextmanager
    def _connection(self, task: Task) -> Iterator[None]:
        """Be connected to the cluster for the length of the block.

        Raises:
            ConfigError: there is none, or its versions are others.
        """
        import ray

        address = self._address
        if _connected():
            connected = ray.get_runtime_context().gcs_address
            if self.options.address not in (None, "auto", connected):
                raise ConfigError(
                    f"launcher 'ray': address='{self.options.address}', and this process is "
                    f"connected to the cluster at {connected}. Leave address out, or call "
                    "ray.shutdown() before."
                )
            yield
            return
        here: dict[str, Any] = {
            "num_cpus": task.size * self.options.cpus,
            "num_gpus": task.size if task.device_type == "cuda" else 0,
            "object_store_memory": _OBJECT_STORE,
            "include_dashboard": False,
        }
        process = psutil.Process()
        before = process.children()
        with _handler_kept(signal.SIGTERM):
            try:
                ray.init(
                    address=address or "local",
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                    **({} if address else here),
                )
            except Exception as error:
                raise ConfigError(_refused(address, error)) from error
        try:
            yield
        finally:
            started = [child for child in process.children() if child not in before]
            family = [one for child in started for one in (child, *_below(child))]
            ray.shutdown()
            if address is None:
                _, left = psutil.wait_procs(family, _END)
                for one in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()

    def _check_room(self, task: Task) -> None:
        """Refuse what the cluster will never have room for, where Ray would wait for ever."""
        import ray

        wanted = _wanted(task, self.options)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        own = ray.get_runtime_context()
        # Inside a task of Ray, such as a trial of Ray Tune, what that task holds is not free.
        held = _assigned(own)
        fitting: list[Any] = []
        lines = []
        for node in nodes:
            has = dict(node["Resources"])
            taken = ""
            if held and node["NodeID"] == own.get_node_id():
                taken = ", of which the task that starts the run holds " + _amounts(held)
                has = {name: has.get(name, 0.0) - held.get(name, 0.0) for name in has}
            if all(has.get(name, 0.0) >= amount for name, amount in wanted.items()):
                fitting.append(node)
            amounts = {name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")}
            lines.append(f"  {node['NodeManagerHostname']}: {_amounts(amounts)}{taken}")
        if len(fitting) >= task.num_nodes:
            check_nodes(self.options.pools, fitting)
            return
        found = len(fitting)
        raise ConfigError(
            f"launcher 'ray': the run needs {_amounts(wanted)} on each of {_nodes(task.num_nodes)} "
            f"(devices={task.devices}, cpus={self.options.cpus} for each), and of the "
            f"{_nodes(len(nodes))} of the cluster {found} ha{'s' if found == 1 else 've'} "
            "that much:\n" + "\n".join(lines) + "\nAsk for fewer devices, num_nodes or cpus, or "
            "add nodes to the cluster."
        )


class RayHandle(SharedHandle):
    """One run of Ray Train, which a thread of this process waits for.

    Args:
        run: what is run, and its directory.
        options: of the launcher.
        trainer: Ray's own.
        held: what is given up when the run has ended: the connection to the cluster.
    """

    name = "the run on Ray"

    def __init__(
        self, run: SharedRun, options: RayOptions, trainer: Any, held: contextlib.ExitStack
    ) -> None:
        self._run, self._task, self._options = run, run.task, options
        self._trainer, self._held = trainer, held
        self._failure: BaseException | None = None
        self._refused: BaseException | None = None
        self._asked_to_end = self._canceled = self._said = False
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._train, name="unipar-ray", daemon=True)
        self._thread.start()

    def _train(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self._failure = error

    def status(self) -> Status:
        self._answer()
        if self._canceled:
            return Status.CANCELED
        if self._thread.is_alive():
            return Status.RUNNING if self._begun(0) else Status.WAITING
        return Status.SUCCEEDED if self._failure is None else Status.FAILED

    def interrupt(self, number: signal.Signals) -> None:
        saves = number == self._task.save_signal
        self._asked_to_end |= not saves
        if self._begun(0):
            self._run.interrupt(number)
        elif not saves:
            self.cancel()

    def cancel(self) -> None:
        self._canceled = True
        self._stop()
        self._thread.join(_CANCEL)
        # What Ray may yet start where it does not end here finds that it was canceled.

    def result(self) -> Any:
        if self._refused is not None:
            raise self._refused
        if self._canceled:
            raise KeyboardInterrupt
        return self._run.result(self._ending())

    def close(self) -> None:
        self._stop()
        self._held.close()
        self._thread.join(_CANCEL)

    # -- between what Ray starts -----------------------------------------------------------------

    def _begun(self, restart: int) -> bool:
        fresh(self._task.directory)
        return (self._task.directory / f"begin-{restart}").exists()

    def _stop(self) -> None:
        (self._task.directory / "stop").touch()

    def _answer(self) -> None:
        """Let the group start again where Ray has decided on that, unless it is not to."""
        if not self._begun(0):
            if not self._said and time.monotonic() - self._since > _PATIENCE:
                self._said = True
                log.warning(
                    "Ray has not started the run within %g s. It needs %s on each of %s; maybe "
                    "others use them (`ray status` shows that).",
                    _PATIENCE,
                    _amounts(_wanted(self._task, self._options)),
                    _nodes(self._task.num_nodes),
                )
            return
        restart = self._run.task.restart
        if self._refused is not None or self._canceled or not self._begun(restart + 1):
            return
        try:
            if self._asked_to_end:
                raise KeyboardInterrupt
            self._run.result(self._ending())
            raise WorkerError("Ray started the run again after it had ended.")
        except WorkerError as error:
            print(self._run.output.read(), end="", flush=True)
            left = max(0, self._task.max_restarts - restart - 1)
            headline = str(error).splitlines()[0].rstrip(".")
            log.warning("%s. Restarting all ranks (%d restarts left).", headline, left)
            again = replace(self._task, restart=restart + 1)
            self._run = SharedRun(again, python=self._options.python)
        except BaseException as error:
            # What is refused on purpose would be refused again.
            self._refused = error
            self._stop()

    def _ending(self) -> str:
        """How the newest start has ended, as its nodes say it, or else as Ray does."""
        restart = self._run.task.restart
        notes = sorted(self._task.directory.glob(f"ending-{restart}-*.txt"))
        if notes:
            return "; ".join(note.read_text() for note in notes)
        return str(self._failure or "Ray has ended it.").strip()


class _Report(Callback):
    """Leaves the newest metrics where the first node's worker of Ray reads them.

    Args:
        directory: of the run.
    """

    lags = True

    def __init__(self, directory: Path) -> None:
        self._path = directory / "report.json"
        self._values: dict[str, Any] = {}
        self._written = -math.inf

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        self._values |= {"step": record.step, **step_metrics(record)}
        every = run.config["log_every"]
        if record.step % every == 0 and time.monotonic() - self._written > _REPORT_EVERY:
            self._write()

    def on_evaluate_end(self, run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
        self._values["step"] = step
        self._values |= {f"eval/{name}": float(value) for name, value in metrics.items()}
        self._write()

    def on_checkpoint(self, run: RunInfo, step: int, path: Path) -> None:
        self._values["checkpoint"] = str(path)
        self._write()

    def on_run_end(self, run: RunInfo, result: RunResult | None) -> None:
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._values))
        partial.replace(self._path)


def _trainer(task: Task, options: RayOptions, command: list[str]) -> Any:
    """Ray's own trainer, which starts one worker on each node."""
    from ray import cloudpickle
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    # For good: the trainer is pickled when it is run.
    cloudpickle.register_pickle_by_value(ray_node)
    return DataParallelTrainer(
        ray_node.run_node,
        train_loop_config={
            "directory": str(task.directory),
            "command": command,
            "devices": task.devices,
            "cpus": options.cpus,
        },
        scaling_config=ScalingConfig(
            num_workers=task.num_nodes,
            use_gpu=task.device_type == "cuda",
            resources_per_worker=_wanted(task, options),
            label_selector=selectors(options.pools),
            placement_strategy="STRICT_SPREAD" if task.num_nodes > 1 else "PACK",
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=str(task.directory),
            failure_config=FailureConfig(max_failures=task.max_restarts),
            callbacks=_callbacks_of_tune(),
        ),
    )


def _callbacks_of_tune() -> list[Any]:
    """What tells a trial of Ray Tune of the metrics, where this process is one."""
    if "ray.tune" not in sys.modules:
        return []
    from ray.tune.integration.ray_train import TuneReportCallback

    with contextlib.suppress(RuntimeError):
        return [TuneReportCallback()]
    return []


def _below(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _connected() -> bool:
    """Whether this process is connected to a cluster of Ray; imports nothing."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _wanted(task: Task, options: RayOptions) -> dict[str, float]:
    """What a node must have."""
    wanted = {"CPU": float(task.devices * options.cpus)}
    if task.device_type == "cuda":
        wanted["GPU"] = float(task.devices)
    return wanted


def _assigned(context: Any) -> dict[str, float]:
    if context.get_task_id() is None and context.get_actor_id() is None:
        return {}
    return {name: amount for name, amount in context.get_assigned_resources().items() if amount}


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count != 1 else ''}"


def _check_reachable(address: str) -> None:
    """Refuse an address where nothing listens, at which Ray would try for two minutes."""
    if "://" in address:
        raise ConfigError(
            f"launcher 'ray': address='{address}' is one of Ray's client, whose driver runs "
            "elsewhere. Start the script on a machine of the cluster, with address='auto' (or by "
            "`ray job submit`)."
        )
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"launcher 'ray': address='{address}' is neither 'auto' nor HOST:PORT.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHABLE).close()
    except OSError as error:
        raise ConfigError(_refused(address, error)) from error


def _refused(address: str | None, error: Exception) -> str:
    reason = " ".join(str(error).split()).rstrip(".")
    if address is None:
        return f"launcher 'ray': Ray cannot be started on this machine: {reason}"
    return (
        f"launcher 'ray': no cluster of Ray answers as it should at '{address}': {reason}. Start "
        "one (`ray start --head`), correct the address (`ray status` shows it), or leave it out to "
        "use this machine alone."
    )


@contextlib.contextmanager
def _handler_kept(number: signal.Signals) -> Iterator[None]:
    """Put back the handler that Ray replaces when it connects."""
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(number, before)
