"""``slurm``: a job of one fit, submitted by sbatch, that goes on by itself."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field, field_validator

from unipar.errors import ConfigError
from unipar.launch.entry import REFUSED
from unipar.launchers.base import LauncherOptions, SubmittingLauncher
from unipar.launchers.shared import SharedRun
from unipar.launchers.slurm_job import SlurmHandle
from unipar.launchers.task import Task
from unipar.strategy import Availability
from unipar.utils.logs import logging_to_terminal
from unipar.utils.numbers import NonNegativeInt, PositiveInt

_COMMANDS = ("sbatch", "srun", "scontrol", "scancel")
# For the processes to leave, and the batch script to queue the job again, after the grace period.
_MARGIN = 30
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}")
# The process becomes another program, for submitit's own handlers of signals end with it; it stays
# the same one for Slurm.
_BECOME = (
    "import os, sys; os.execv(sys.executable, "
    "[sys.executable, *{arguments!r}, os.environ.get('SLURM_RESTART_COUNT', '0')])"
)
_OURS = {
    "job-name": "it is the run's directory (output_dir)",
    "nodes": "it is num_nodes",
    "ntasks": "it is devices times num_nodes",
    "ntasks-per-node": "it is devices",
    "array": "one fit is one job; submit several by calling fit for each",
    "signal": "it is grace_period and what it takes to leave",
    "output": "the logs are in the run's directory",
    "error": "the logs are in the run's directory",
    "open-mode": "a job that is queued again adds to its logs",
    "requeue": "it is the option 'requeue'",
    "no-requeue": "it is the option 'requeue'",
    "wrap": "the script is unipar's",
}


class SlurmOptions(LauncherOptions, frozen=True):
    """Options of ``slurm``; those that are sbatch's have sbatch's names."""

    launcher: ClassVar[str] = "slurm"

    partition: str | None = None
    """Left out, as everything below: as Slurm or `SBATCH_PARTITION` and the like have it."""
    account: str | None = None
    """Whom it is charged to."""
    qos: str | None = None
    """Quality of service."""
    time: str | None = None
    """The time limit, such as `"4:00:00"` or `"2-12"`, in quotes. The run goes on after it."""
    constraint: str | None = None
    """Features that the nodes must have."""
    gres: str | None = None
    """What a node must have, such as `gpu:a100:8`; left out: with `device="cuda"`, `devices`."""
    cpus_per_task: PositiveInt | None = None
    """Processor cores of each process, its data-loading processes included."""
    mem: str | None = None
    """Memory of each node, such as `64G`, or `0` for all of it; a number alone is of megabytes."""
    exclusive: bool = False
    """Whether no other job may share the nodes."""
    sbatch: dict[str, str | int | bool] = Field(default={})
    """Any other of sbatch's options by its long name, such as `{"mail-type": "END"}`."""
    srun: tuple[str, ...] = ()
    """More arguments of srun, such as `--container-image=…`."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the processes start, such as `module load cuda`."""
    python: str | None = None
    """The interpreter on the nodes, or a command that runs one; left out: this one's path."""
    requeue: bool = True
    """Whether the job is queued again after a time limit, a preemption or a failed node."""
    max_requeues: NonNegativeInt = 100
    """How often SIGTERM, at the time limit or for another job, may make it be queued again."""

    @field_validator("mem", mode="before")
    @classmethod
    def _mem(cls, mem: Any) -> Any:
        # Without quotes, YAML and the command line take 0 for a number.
        whole = isinstance(mem, int) and not isinstance(mem, bool) and mem >= 0
        return str(mem) if whole else mem

    @field_validator("time", mode="before")
    @classmethod
    def _time(cls, time: Any) -> Any:
        if time is None or (isinstance(time, str) and _TIME.fullmatch(time)):
            return time
        raise ValueError(
            f"{time!r} is no time limit as sbatch takes it: write '30' (minutes), '4:00:00' or "
            "'2-12:00:00' (days first), in quotes; YAML takes 4:00:00 for a number of seconds"
        )

    @field_validator("sbatch")
    @classmethod
    def _sbatch(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            plain = name.lstrip("-").replace("_", "-")
            if name != plain:
                raise ValueError(f"write {name!r} as sbatch's long option without dashes: {plain}")
            if value is False:
                raise ValueError(f"{plain}: leave it out; an option without a value is true")
            if plain in _OURS:
                raise ValueError(f"{plain} cannot be given: {_OURS[plain]}")
            if plain.replace("-", "_") in cls.model_fields:
                raise ValueError(f"{plain} is an option of the launcher's own; give it there")
        return given


class SlurmLauncher(SubmittingLauncher):
    """Submits one job by submitit, and follows it; the job goes on without this process.

    A job that is asked to end by SIGTERM saves, ends, and is queued again by its own batch script,
    as is one that fails and has restarts left: the script knows by the exit code of srun.
    """

    options_type = SlurmOptions

    @classmethod
    def availability(cls) -> Availability:
        if importlib.util.find_spec("submitit") is None:
            return Availability(
                False, "submitit is not installed", "Run: pip install 'unipar[slurm]'"
            )
        return Availability(True)

    def rendered(self, task: Task) -> str:
        # submitit 1.5.4, slurm/slurm.py; nothing public gives the script without submitting it.
        executor = self._executor(task)
        return executor._make_submission_file_text(executor._submitit_command_str, "")

    def run(self, task: Task) -> Any:
        with logging_to_terminal("info", main=True):
            # The batch script starts the job again, whether or not this process still runs.
            return self.once(task)

    def start(self, task: Task) -> SlurmHandle:
        for command in _COMMANDS:
            if shutil.which(command) is None:
                raise ConfigError(
                    f"launcher 'slurm': there is no command '{command}' on PATH. Run this where "
                    "jobs are submitted, such as a login node; `unipar train RUN_FILE --launcher "
                    "slurm --dry-run` shows the batch script anywhere."
                )
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        executor = self._executor(task)
        run = SharedRun(task)
        # What sbatch says is in the error.
        said = io.StringIO()
        try:
            with _outside_of_jobs(), contextlib.redirect_stderr(said):
                job = executor.submit(exec, _BECOME.format(arguments=run.command[1:]))
        except (FailedJobError, FailedSubmissionError) as error:
            raise ConfigError(
                f"sbatch refuses the job:\n{str(error).strip()}\nThe launcher's options are "
                "sbatch's; `unipar train RUN_FILE --dry-run` shows the batch script."
            ) from error
        return SlurmHandle(job.job_id, run, executor.folder)

    def _executor(self, task: Task) -> Any:
        import submitit

        class Anywhere(submitit.SlurmExecutor):
            """Renders the script where Slurm is not installed, too."""

            @classmethod
            def affinity(cls) -> int:
                return 2

        executor = Anywhere(task.directory / "slurm", python=self.options.python)
        executor.update_parameters(**self._parameters(task))
        return executor

    def _parameters(self, task: Task) -> dict[str, Any]:
        """The script's options, by submitit's names, which are sbatch's with underscores.

        Raises:
            ConfigError: they contradict the run's.
        """
        options = self.options
        if task.max_restarts and not options.requeue:
            raise ConfigError(
                f"max_restarts={task.max_restarts}, and launcher 'slurm' has requeue=False: a job "
                "starts again by being queued again. Set one of them otherwise."
            )
        named = ("partition", "account", "qos", "time", "constraint", "gres", "mem")
        parameters: dict[str, Any] = {
            "job_name": task.name,
            "nodes": task.num_nodes,
            "ntasks_per_node": task.devices,
            "cpus_per_task": options.cpus_per_task,
            "exclusive": options.exclusive or None,
            "setup": list(options.setup) or None,
            "teardown": self._after(task),
            # Submitit's default for it, as for the time, is one of its own.
            "wckey": None,
            **{name: getattr(options, name) for name in named},
        }
        asks_for_gpus = any(name.startswith("gpus") for name in options.sbatch)
        if task.device_type == "cuda" and options.gres is None and not asks_for_gpus:
            parameters["gpus_per_node"] = task.devices
        # Ranks find out by themselves that another is gone, and say so; no collective waits longer.
        srun = ["--kill-on-bad-exit=0", f"--wait={math.ceil(task.timeout) + _MARGIN}"]
        if options.cpus_per_task is not None:
            # Since Slurm 22.05 srun does not take it from the job.
            srun.append(f"--cpus-per-task={options.cpus_per_task}")
        parameters["srun_args"] = [*srun, *options.srun]
        parameters["additional_parameters"] = {
            "signal": f"TERM@{math.ceil(task.grace_period) + _MARGIN}",
            ("requeue" if options.requeue else "no-requeue"): True,
            **options.sbatch,
        }
        return parameters

    def _after(self, task: Task) -> list[str]:
        """Lines of the batch script: whether the job is queued again."""
        if not self.options.requeue:
            return ["exit $?"]
        failures = shlex.quote(str(task.directory / "failures"))
        again = 'scontrol requeue "$SLURM_JOB_ID"'
        lines = [
            "status=$?",
            "case $status in",
            "# Done; refused, which no restart changes; interrupted by SIGINT.",
            f"0 | {REFUSED} | 130) ;;",
            "# Ended by SIGTERM, after saving: the time limit is near, or another job comes first.",
            f'143) [ "${{SLURM_RESTART_COUNT:-0}}" -lt {self.options.max_requeues} ] && {again} ;;',
        ]
        if task.max_restarts:
            lines += [
                "# Failed.",
                f"*) echo $status >> {failures}",
                f'   [ "$(wc -l < {failures})" -le {task.max_restarts} ] && {again} ;;',
            ]
        return [*lines, "esac", "exit $status"]


@contextlib.contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Hide what Slurm has told this process of a job that it is itself a part of."""
    from submitit.helpers import clean_env

    keep = {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or name.startswith("SBATCH_")
    }
    with clean_env():
        os.environ.update(keep)
        yield
