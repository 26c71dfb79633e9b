"""Starting the processes of a run on this machine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from unipar.errors import ConfigError, Terminated, UniparError, WorkerError
from unipar.launch.elastic import Elastic
from unipar.launch.rundir import RunDir
from unipar.launch.worker import WORKER
from unipar.utils.own_path import own_path
from unipar.utils.scratch import scratch, temporary_files, tmpdir_remedy
from unipar.utils.signals import GRACE_PERIOD, TERMINATIONS, takes_over
from unipar.utils.torch_settings import torch_settings
from unipar.utils.version import own_versions
from unipar.world import Placement

if TYPE_CHECKING:
    from unipar.launch.agent import Agent

T = TypeVar("T")

_ELASTIC = "torch.distributed.elastic"
_ELASTIC_EVENTS = "torchelastic-events-null"


def run(
    fn: Callable[[Placement], T],
    *,
    devices: int,
    num_nodes: int = 1,
    device_type: str = "cpu",
    timeout: float = 1800.0,
    max_restarts: int = 0,
    grace_period: float = GRACE_PERIOD,
    save_signal: signal.Signals | None = None,
    directory: Path | None = None,
    elastic: Elastic | None = None,
) -> T:
    """Call ``fn(placement)`` in ``devices`` new processes and return what rank 0's call returns.

    ``fn`` is sent by value, so it may be a lambda or a closure, and may be defined in a script
    without ``if __name__ == "__main__"``, in a notebook or in ``python -c``. Rank 0 prints to this
    process's terminal; what other ranks print is shown with the failure, if they fail. Whatever
    happens, no process, port or file of the run is left when this returns.

    Args:
        fn: what every process runs. Its ``placement`` says which process it is.
        devices: number of processes, one for each device.
        num_nodes: number of machines; more than one takes an external launcher.
        device_type: the kind of device, which ``placement`` carries.
        timeout: how long a collective waits for a rank, in seconds.
        max_restarts: how often the whole group is started again after a rank fails. Errors of
            unipar's own are not retried.
        grace_period: how long the workers have to end after SIGTERM or SIGHUP, in seconds.
        save_signal: a signal that is passed on to the workers, and changes nothing else.
        directory: an empty private one to work in, which the caller removes; left out: made and
            removed here.
        elastic: how the number of processes may change; left out: it does not.

    Raises:
        ConfigError: what was asked cannot be started here.
        UniparError: a rank raised one; it is raised here as it is.
        WorkerError: a rank raised anything else, was killed, or stopped taking part.
        KeyboardInterrupt: the user interrupted the run. The first Ctrl-C goes to the workers as
            SIGINT, so that they can save; the second ends them.
        Terminated: the same for SIGTERM and SIGHUP, which may also have come to a worker alone.
            Those that this process ignores, or has a handler of its own for, are left alone.
    """
    check(devices, num_nodes, device_type)
    # Rank 0 writes to the same place, and what this process printed before came first.
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        files = RunDir(directory or stack.enter_context(scratch()))
        with temporary_files():
            write_payload(fn, files)
            _write_start(
                files,
                devices=devices,
                device_type=device_type,
                timeout=timeout,
                save_signal=save_signal,
                elastic=elastic,
            )
        try:
            _run_agent(
                files,
                devices=devices,
                timeout=timeout,
                max_restarts=max_restarts,
                grace_period=grace_period,
                save_signal=save_signal,
                elastic=elastic,
            )
            if not files.result.exists():
                raise WorkerError("Rank 0 ended before its function had returned.", rank=0)
        except WorkerError as error:
            if not files.has_room():
                # Then a worker could not say how it failed, and may have failed of just that.
                error.args = (f"{error}\nA temporary file cannot be written. {tmpdir_remedy()}",)
            raise
        return read_result(files)


def check(devices: int, num_nodes: int, device_type: str) -> None:
    """Refuse processes that cannot be started on this machine.

    Raises:
        ConfigError: they are on several machines, or have no device.
    """
    if num_nodes > 1:
        raise ConfigError(
            f"num_nodes={num_nodes}, and launcher='local' starts processes on this machine alone. "
            "Name what starts them on several: launcher='slurm', 'ray', 'mpi' or 'torchrun' (see "
            "the page on clusters). Or start the same script on each of them by\n"
            f"  torchrun --nnodes={num_nodes} --nproc-per-node={devices} "
            "--rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500 SCRIPT\n"
            "or, under Slurm,\n"
            f"  srun --nodes={num_nodes} --ntasks-per-node={devices} python SCRIPT"
        )
    if devices < 1:
        raise ConfigError(f"devices={devices}; give 1 or more.")
    if device_type != "cpu":
        available = torch.get_device_module(device_type).device_count()
        if devices > available:
            raise ConfigError(
                f"devices={devices}, but this machine has {available} of type {device_type}. "
                f"Ask for at most {available}, or for device='cpu'."
                if available
                else f"This machine has no device of type {device_type}; use device='cpu'."
            )


def write_payload(fn: Callable[..., Any], directory: RunDir) -> None:
    """Write down what workers run, and how torch is set here.

    Raises:
        ConfigError: it holds what cannot be copied.
    """
    from unipar.launch import travel

    try:
        payload = travel.dumps((torch_settings(), fn))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"The worker processes cannot be sent what they need: {error}. Everything that the "
            "function uses is copied to them, so create open files, locks, connections and "
            "generators inside it."
        ) from error
    directory.payload.write_bytes(payload)


def _write_start(
    directory: RunDir,
    *,
    devices: int,
    device_type: str,
    timeout: float,
    save_signal: signal.Signals | None,
    elastic: Elastic | None,
) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environ = {"OMP_NUM_THREADS": str(max(1, (cores or 1) // devices))}
    if sys.platform == "linux":
        # Otherwise gloo listens on the interface of the host's name, where it has one.
        environ["GLOO_SOCKET_IFNAME"] = "lo"
    start = {
        "path": sys.path,
        "argv": sys.argv,
        "environ": environ,
        "parent": os.getpid(),
        "timeout": timeout,
        "device_type": device_type,
        "save_signal": save_signal,
        "stack_signal": _stack_signal(save_signal),
        "places": [str(place) for place in elastic.places] if elastic else [],
    }
    directory.start.write_text(json.dumps(start))


def write_start_elsewhere(
    directory: RunDir,
    *,
    device_type: str,
    timeout: float,
    save_signal: signal.Signals | None,
    restart: int,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Write down what processes need that another program starts, maybe on another machine."""
    start = {
        "path": own_path(),
        "argv": sys.argv,
        "cwd": os.getcwd(),
        "environ": dict(environ or {}),
        "parent": None,
        "timeout": timeout,
        "device_type": device_type,
        "save_signal": save_signal,
        "restart": restart,
        "versions": own_versions(),
    }
    directory.start.write_text(json.dumps(start))


def read_result(directory: RunDir) -> Any:
    """What rank 0's call has returned."""
    with directory.result.open("rb") as file:
        return pickle.load(file)


def _stack_signal(save_signal: signal.Signals | None) -> signal.Signals:
    """What asks a worker where it is; the one of the two that the user has not taken."""
    return signal.SIGUSR1 if save_signal == signal.SIGUSR2 else signal.SIGUSR2


def _run_agent(
    directory: RunDir,
    *,
    devices: int,
    timeout: float,
    max_restarts: int,
    grace_period: float,
    save_signal: signal.Signals | None,
    elastic: Elastic | None,
) -> None:
    # Torch's agent is slow to import, and needed only here.
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException

    from unipar.launch.agent import Agent
    from unipar.launch.rendezvous import LoopbackRendezvous
    from unipar.launch.resizing import Resizing

    # CPython 3.11, Lib/subprocess.py.
    flags = util._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]
    spec = WorkerSpec(
        role="unipar",
        local_world_size=devices,
        rdzv_handler=LoopbackRendezvous(directory.root.name),
        entrypoint=sys.executable,
        args=(*flags, "-u", str(WORKER), str(directory.root)),
        max_restarts=max_restarts,
        monitor_interval=0.05,
    )
    agent = Agent(
        spec,
        directory,
        timeout=timeout,
        grace_period=grace_period,
        stack_signal=_stack_signal(save_signal),
        resizing=Resizing(elastic, directory, grace_period) if elastic else None,
    )
    result: Any = None
    with _quiet_elastic(), _signals(agent, save_signal):
        try:
            result = cast(Any, agent.run())
        except SignalException as end:
            raise Terminated(end.sigval) from None
        except UniparError as refused:
            if refused is not agent.failure:
                raise
        finally:
            agent.close()
    if agent.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    if agent.stopped_by:
        raise Terminated(agent.stopped_by)
    if result is None or result.is_failed():
        assert agent.failure is not None
        # The frames of torch's agent, through which it came, say nothing about it.
        raise agent.failure.with_traceback(None)


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep torch's agent from logging each worker's end, unless the user asked by ``LOGLEVEL``."""
    if "LOGLEVEL" in os.environ:
        yield
        return
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_ELASTIC)]
    loggers = [logging.getLogger(name) for name in (*names, _ELASTIC_EVENTS)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        # Not by level, which torch sets again when it first logs an event.
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextlib.contextmanager
def _signals(agent: Agent, save_signal: signal.Signals | None) -> Iterator[None]:
    """Let signals reach the workers for the length of the block; SIGQUIT ends them.

    Torch's agent handles the signals that ``TORCHELASTIC_SIGNALS_TO_HANDLE`` names, and leaves
    its handlers in place; it would also revive signals that the caller ignores (``nohup``).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stopping = [n for n in (signal.SIGINT, *TERMINATIONS) if takes_over(n)]
    before = {number: signal.getsignal(number) for number in (*stopping, signal.SIGQUIT)}
    name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    setting = os.environ.get(name)
    os.environ[name] = "" if before[signal.SIGQUIT] is signal.SIG_IGN else "SIGQUIT"
    for number in stopping:
        signal.signal(number, lambda number, _: agent.stop(signal.Signals(number)))
    if save_signal is not None and signal.getsignal(save_signal) is signal.SIG_DFL:
        before[save_signal] = signal.SIG_DFL
        signal.signal(save_signal, lambda number, _: agent.pass_on(signal.Signals(number)))
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
        if setting is None:
            os.environ.pop(name)
        else:
            os.environ[name] = setting
