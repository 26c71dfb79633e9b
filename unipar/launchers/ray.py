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
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import psutil

from unipar import launch
from unipar.callbacks import Callback, RunInfo, RunResult, StepRecord
from unipar.callbacks.loggers.callback import step_metrics
from unipar.errors import ConfigError
from unipar.launch.elastic import Elastic, ranks
from unipar.launchers import ray_node
from unipar.launchers.base import LauncherOptions, SubmittingLauncher
from unipar.launchers.ray_handle import RayHandle
from unipar.launchers.ray_pools import RayPool, check_nodes, check_pools, selectors
from unipar.launchers.shared import SharedRun
from unipar.launchers.task import Task
from unipar.strategy import Availability
from unipar.utils.devices import DeviceChoice, DeviceRange
from unipar.utils.environ import environ
from unipar.utils.numbers import PositiveFloat, PositiveInt
from unipar.utils.replacing import replacing

log = logging.getLogger("unipar.launch")

_INSTALL = 'pip install "unipar[ray]"'
_OBJECT_STORE = 100 << 20
"""Bytes; Ray's least is some 75 MB, and nothing of a run goes through it."""
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
_VARIABLES_ELASTIC = {
    # Until it knows that a node is lost, Ray waits for room on it, 60 s by default.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
}
"""The same where the number of ranks may change."""


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
    resize_interval: PositiveFloat = 60.0
    """Seconds from one look for nodes that have come to the next, where `devices` is a range."""


class RayLauncher(SubmittingLauncher):
    """Starts one worker of Ray Train on each node, which starts the node's ranks."""

    options_type = RayOptions

    @property
    def elsewhere(self) -> bool:
        return self._address is not None or _connected()

    @property
    def elastic(self) -> bool:
        return self.elsewhere

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

    def resolve_range(
        self, device: DeviceChoice, devices: DeviceRange, num_nodes: int
    ) -> tuple[str, int]:
        asked = f"devices='{devices}' is a range, and launcher 'ray'"
        if not self.elsewhere:
            raise ConfigError(
                f"{asked} has no cluster but this machine, of which no node is lost and to which "
                "none comes. Name a running one, such as launcher='ray:address=auto', or use "
                "launcher='local'."
            )
        if num_nodes > 1:
            raise ConfigError(
                f"{asked} counts the ranks on all nodes together, wherever there is room, and "
                f"num_nodes={num_nodes}. Leave num_nodes out."
            )
        if self.options.pools:
            raise ConfigError(
                f"{asked} takes what nodes there are, and pools say how many there have to be of "
                "each kind. Leave pools out, or give devices a number."
            )
        if devices.most is None:
            raise ConfigError(
                f"{asked} cannot tell how many devices the cluster will have. Say the most, too, "
                f"such as devices='{devices.least}:{2 * devices.least}'."
            )
        return self.resolve_devices(device, devices.most, num_nodes)

    def callbacks(self, directory: Path) -> Sequence[Callback]:
        return [_Report(directory)]

    def start(self, task: Task) -> RayHandle:
        # What cannot travel is refused before Ray is started.
        run = SharedRun(task, python=self.options.python)
        with contextlib.ExitStack() as stack:
            variables = _VARIABLES if self.elsewhere else _VARIABLES | _VARIABLES_HERE
            if task.elastic:
                variables = variables | _VARIABLES_ELASTIC
            unset = {name: text for name, text in variables.items() if name not in os.environ}
            stack.enter_context(environ(unset))
            stack.enter_context(self._connection(task))
            self._check_room(task)
            trainer = _trainer(task, self.options, run.command)
            return RayHandle(run, _needs(task, self.options), trainer, stack.pop_all())

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
        if task.elastic:
            _check_room_for_some(task.elastic, wanted, nodes)
            return
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
        with replacing(self._path) as partial:
            partial.write_text(json.dumps(self._values))


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
            "devices": _devices(task),
            "cpus": options.cpus,
            "sizes": task.elastic.sizes if task.elastic else (),
        },
        scaling_config=ScalingConfig(
            num_workers=_ends(task.elastic) if task.elastic else task.num_nodes,
            use_gpu=task.device_type == "cuda",
            resources_per_worker=_wanted(task, options),
            label_selector=selectors(options.pools),
            placement_strategy="STRICT_SPREAD" if task.num_nodes > 1 else "PACK",
            elastic_resize_monitor_interval_s=options.resize_interval,
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=str(task.directory),
            # Which ends of a group count is decided here where the number of ranks may change.
            failure_config=FailureConfig(max_failures=-1 if task.elastic else task.max_restarts),
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


def _devices(task: Task) -> int:
    """How many ranks a worker of Ray starts."""
    return 1 if task.elastic else task.devices


def _wanted(task: Task, options: RayOptions) -> dict[str, float]:
    """What a worker of Ray must have."""
    wanted = {"CPU": float(_devices(task) * options.cpus)}
    if task.device_type == "cuda":
        wanted["GPU"] = float(_devices(task))
    return wanted


def _ends(elastic: Elastic) -> tuple[int, int]:
    return elastic.sizes[0], elastic.sizes[-1]


def _needs(task: Task, options: RayOptions) -> str:
    """What a run waits for while it has not started."""
    wanted = _amounts(_wanted(task, options))
    if task.elastic:
        return f"{wanted} for each of {ranks(task.elastic.sizes[0])} at least"
    return f"{wanted} on each of {_nodes(task.num_nodes)}"


def _check_room_for_some(
    elastic: Elastic, wanted: Mapping[str, float], nodes: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse a run of whose ranks the cluster will never have room for the least number."""
    fitting, lines = 0, []
    for node in nodes:
        has = node["Resources"]
        fitting += min(int(has.get(name, 0.0) // amount) for name, amount in wanted.items())
        amounts = {name: has.get(name, 0.0) for name in wanted}
        lines.append(f"  {node['NodeManagerHostname']}: {_amounts(amounts)}")
    if fitting < elastic.sizes[0]:
        raise ConfigError(
            f"launcher 'ray': devices='{elastic.asked}' needs {_amounts(wanted)} for each of "
            f"{ranks(elastic.sizes[0])} at least, and the {_nodes(len(nodes))} of the cluster "
            f"ha{'s' if len(nodes) == 1 else 've'} room for {fitting}:\n"
            + "\n".join(lines)
            + "\nLower the first number or cpus, or add nodes to the cluster."
        )


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
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"launcher 'ray': address='{address}' is neither 'auto' nor HOST:PORT, of which PORT "
            "is from 1 to 65535."
        )
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
