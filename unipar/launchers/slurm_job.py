"""A job of Slurm, as its queue and the files that its ranks leave show it."""

from __future__ import annotations

import logging
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from unipar.errors import Terminated, UniparError
from unipar.launchers.handle import Status
from unipar.launchers.shared import LAST_LINES, SharedHandle, SharedRun

log = logging.getLogger("unipar.launch")

# Slurm's names of states; any other is one of a job that runs.
_WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD",
     "SPECIAL_EXIT"}
)  # fmt: skip
_FAILED = frozenset(
    {"FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED",
     "LAUNCH_FAILED", "REVOKED"}
)  # fmt: skip
_GONE = "no longer known to Slurm"
# Seconds between two questions to Slurm, which answers everybody's: more as a state lasts.
_OFTEN, _SELDOM, _PART = 0.5, 15.0, 10
_ANSWER = 60.0
# After scancel: longer than Slurm leaves processes between SIGTERM and SIGKILL.
_CANCELED = 120.0
# Seconds in which a file of another machine shows here.
_APPEARS = 30.0


class SlurmHandle(SharedHandle):
    """A job, which its batch script or Slurm may start several times.

    Args:
        job_id: its number.
        run: the directory of its ranks.
        folder: where its script and logs are, by submitit's names.
    """

    outlives = True
    poll = 0.5

    def __init__(self, job_id: str, run: SharedRun, folder: Path) -> None:
        self.name, self.job_id = f"Slurm job {job_id}", job_id
        self._run, self._folder = run, folder
        self._facts: dict[str, str] = {"JobState": "PENDING"}
        self._since, self._asked = time.monotonic(), float("-inf")
        self._silent = False
        self._shown, self._earlier = "", ""
        log.info("%s is submitted (to end it: scancel %s). Logs: %s", self.name, job_id, folder)

    def status(self) -> Status:
        self._ask()
        state = self._facts["JobState"]
        if state in _WAITING:
            return Status.WAITING
        if state == _GONE:
            returned = self._run.attempt.returned(0).exists()
            return Status.SUCCEEDED if returned else Status.FAILED
        ends = {"COMPLETED": Status.SUCCEEDED, "CANCELLED": Status.CANCELED}
        return Status.FAILED if state in _FAILED else ends.get(state, Status.RUNNING)

    def output(self) -> str:
        earlier, self._earlier = self._earlier, ""
        return earlier + self._run.output.read()

    def cancel(self) -> None:
        # It says itself why it cannot.
        subprocess.run(["scancel", self.job_id], check=False)
        deadline = time.monotonic() + _CANCELED
        while not self.status().ended:
            if time.monotonic() > deadline:
                log.warning("%s has not ended within %g s of scancel.", self._state(), _CANCELED)
                return
            time.sleep(self.poll)

    def result(self) -> Any:
        succeeded = self.status() is Status.SUCCEEDED
        deadline = time.monotonic() + _APPEARS
        while succeeded and not self._all_returned() and time.monotonic() < deadline:
            time.sleep(self.poll)
        try:
            return self._run.result(self._ending())
        except Terminated:
            log.warning("%s; it was asked to end, and is not queued again.", self._state())
            raise

    # -- the queue -------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask Slurm for the job's state, unless it was a moment ago."""
        now = time.monotonic()
        attempt = self._run.attempt
        ends = attempt.returned(0).exists() or attempt.record(0).exists()
        often = _OFTEN if ends else min(max((now - self._since) / _PART, _OFTEN), _SELDOM)
        if now - self._asked < often:
            return
        self._asked = now
        facts = self._show()
        if facts is None:
            return
        if facts["JobState"] != self._facts["JobState"]:
            self._since = now
        restart = int(facts.get("Restarts", self._run.restart))
        if restart != self._run.restart:
            self._started_again(restart)
        self._facts = facts
        self._tell()

    def _show(self) -> dict[str, str] | None:
        """Slurm's facts of the job by Slurm's names; ``None`` while it does not answer."""
        command = ["scontrol", "show", "job", self.job_id, "--oneliner"]
        try:
            shown = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER)
            error = shown.stderr.strip()
        except subprocess.TimeoutExpired:
            shown, error = None, f"no answer within {_ANSWER:g} s"
        if shown is not None and shown.returncode == 0:
            self._silent = False
            return dict(re.findall(r"(?:^| )(\w+)=(\S*)", shown.stdout))
        if "Invalid job id" in error:
            return {"JobState": _GONE}
        if not self._silent:
            log.warning("Slurm does not tell of job %s, and is asked again: %s", self.job_id, error)
        self._silent = True
        return None

    def _tell(self) -> None:
        """Show what has changed in the queue."""
        if self._facts["JobState"] in _WAITING:
            reason = self._facts.get("Reason", "None")
            text = f"{self.name} waits" + (f": {reason}" if reason != "None" else "")
        elif self._facts["JobState"] == "RUNNING":
            text = f"{self.name} runs on {self._facts.get('NodeList')}"
        else:
            return
        if text != self._shown:
            log.info("%s.", text)
        self._shown = text

    def _started_again(self, restart: int) -> None:
        # What rank 0 printed last may not have been read yet.
        self._earlier += self._run.output.read()
        try:
            self._run.result("its job was taken off its nodes.")
            why = "its job was queued again."
        except Terminated as end:
            why = f"it was asked to end ({end.signal.name})."
        except (UniparError, KeyboardInterrupt) as error:
            why = (str(error) or "it was interrupted.").splitlines()[0]
        log.warning("%s is queued again (start %d): %s", self.name, restart + 1, why)
        self._run.restarted(restart)

    # -- its end ---------------------------------------------------------------------------------

    def _all_returned(self) -> bool:
        # To list a directory of another machine brings what is known of it up to date.
        found = {path.name for path in self._run.attempt.directory.glob("*.returned")}
        return len(found) == self._run.size and self._run.files.result.exists()

    def _state(self) -> str:
        facts = [
            f"{key}={self._facts[key]}"
            for key in ("Reason", "ExitCode", "NodeList")
            if self._facts.get(key) not in (None, "None", "(null)", "")
        ]
        return f"{self.name} is {self._facts['JobState']} ({', '.join(facts)})"

    def _ending(self) -> str:
        text = f"{self._state()}."
        logs = list(self._folder.glob(f"{self.job_id}_*_log.*"))
        if not logs:
            return (
                f"{text} No log of it is in {self._folder}, which has to be on a file system that "
                "all its machines share: set output_dir to such a place."
            )
        lines: list[str] = []
        # The batch script writes to rank 0's, and has the last word.
        for rank in reversed(range(self._run.size)):
            path = self._folder / f"{self.job_id}_{rank}_log.err"
            if path.exists():
                lines += path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join([text, *lines[-LAST_LINES:]])
