"""A Slurm of two nodes on this machine, with every file and port of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "setpriv")
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ReturnToService=2
MpiDefault=none
SlurmdTimeout=10
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """What of this machine does not do for it; empty if all does."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    lacking = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if lacking:
        return f"no {', '.join(lacking)}; on Debian: apt install slurm-wlm munge"
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"]).returncode:
        return "no right to namespaces of its own; run it as root"
    return ""


class SlurmCluster:
    """Nodes ``n1`` and ``n2``, in namespaces of processes and mounts of their own.

    Everything ends with the block, or with this process.

    Attributes:
        environ: variables with which Slurm's commands reach it.
        unshared: a directory that each node has another of.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.unshared = root, root / "unshared"
        self.unshared.mkdir()
        self.environ = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        root, host = self.root, socket.gethostname().split(".")[0]
        (root / "state").mkdir()
        (root / "hosts").write_text(f"127.0.0.1 localhost {host} n1 n2\n")
        key = root / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        conf = _CONF.format(host=host, root=root, ports=_free_ports(3))
        (root / "slurm.conf").write_text(conf)
        try:
            files = {"key-file": key, "socket": root / "munge.sock", "pid-file": root / "m.pid"}
            files |= {"log-file": root / "munged.log", "seed-file": root / "seed"}
            options = [f"--{name}={path}" for name, path in files.items()]
            # Of the directories above a temporary one it says that others may write to them.
            self._start("munged", ["munged", "--foreground", "--force", *options])
            self.wait(lambda: files["socket"].exists())
            self._start("slurmctld", ["slurmctld", "-D", "-f", str(root / "slurm.conf")])
            for node in ("n1", "n2"):
                self.start_node(node)
            self.wait(self.idle)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started.values():
            process.kill()
            process.wait()

    def start_node(self, node: str) -> None:
        mounts = f"mount --bind {self.root}/hosts /etc/hosts && mount -t tmpfs none {self.unshared}"
        daemon = f"exec slurmd -D -N {node} -f {self.root}/slurm.conf"
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._start(node, [*unshare, "sh", "-c", f"{mounts} && {daemon}"])

    def kill_node(self, node: str) -> None:
        """End its slurmd and every process of a job there, as when its power fails."""
        self._started[node].kill()
        self._started[node].wait()

    def _start(self, name: str, command: list[str]) -> None:
        with (self.root / f"{name}.out").open("ab") as out:
            self._started[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**self.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
            )

    def __call__(self, *command: str) -> str:
        """What one of Slurm's commands prints, whether or not it fails."""
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=60
        ).stdout

    def job(self, number: str) -> dict[str, str]:
        """Slurm's facts of a job, by Slurm's names."""
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", number, "-o")))

    def idle(self) -> bool:
        """Whether nothing is left of any job on any node."""
        return self("sinfo", "-hN", "-p", "main", "-o", "%T").split() == ["idle"] * 2

    def hurry(self, number: str) -> None:
        """Let a job that is queued again start now: Slurm has it wait for two minutes.

        It does so that what is left of the job's last start can end; that is waited for here too.
        """
        self.wait(lambda: self.job(number).get("Restarts") == "1")
        self.wait(lambda: self.idle() and not _processes_of(number))
        # To its nodes, a start within the second in which the last one was revoked is revoked too.
        time.sleep(2)
        self("scontrol", "update", f"JobId={number}", "StartTime=now")

    def clear(self) -> None:
        """End all jobs, and wait until the nodes are idle."""
        self("scancel", "--user=root")
        with contextlib.suppress(TimeoutError):
            self.wait(lambda: not self("squeue", "-h"), 10)
            return
        raise TimeoutError(self("squeue"))

    def wait(self, condition: Callable[[], T | None], seconds: float = 60) -> T:
        """The value of a condition, once it is a true one."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in self.root.glob("*.out"))
                raise TimeoutError(f"not within {seconds:g} s\n{logs}")
            time.sleep(0.2)
        return value


def _processes_of(job: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURM_JOB_ID") == job:
                found.append(process.pid)
    return found


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
