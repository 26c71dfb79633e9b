"""The proof: both scripts are run, and the losses that they compute are compared."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from unipar.benchmark.machine import processor
from unipar.errors import ConfigError
from unipar.migrate.launchers import REPORTS, command
from unipar.migrate.notebooks import SUFFIX, Notebook
from unipar.utils.scratch import scratch

TOLERANCE = 1e-5
"""Relative difference up to which losses agree: what summing in another order makes in fp32."""
_ALONE = (
    "Without a GPU, Accelerate lets the processes of the original train each by itself, on all of\n"
    "the data, unless it says Accelerator(cpu=True); those of the migrated script train together.\n"
    "Compare on one, --processes 1; or --record where the original has GPUs, and --against here."
)
PROCESSES = 2
"""How many a launcher starts, unless it is told."""
_MOST_BYTES = 200 * 2**20


@dataclass(frozen=True)
class Proof:
    """The losses of both runs.

    Attributes:
        original: by rank, in the order in which ``backward()`` was called.
        migrated: likewise.
        tolerance: relative difference up to which they agree.
        about: what there is to say about the runs, in lines.
        steps: of an optimizer, that some of the original's losses come after.
        moved: how far norms of its weights are from the first then, relatively; ``None`` where
            they could not be read.
    """

    original: Mapping[int, Sequence[float]]
    migrated: Mapping[int, Sequence[float]]
    tolerance: float = TOLERANCE
    about: str = ""
    steps: int = 0
    moved: float | None = None

    @property
    def difference(self) -> float:
        """The largest relative difference; infinite where one run has losses the other lacks."""
        if self.original.keys() != self.migrated.keys() or not self.original:
            return float("inf")
        worst = 0.0
        for rank, losses in self.original.items():
            others = self.migrated[rank]
            if len(losses) != len(others):
                return float("inf")
            for a, b in zip(losses, others, strict=True):
                if a != b:
                    apart = abs(a - b) / max(abs(a), abs(b), 1e-30)
                    worst = max(worst, apart if apart == apart else float("inf"))
        return worst

    @property
    def agrees(self) -> bool:
        """Whether they are equal up to the tolerance."""
        return self.difference <= self.tolerance

    @property
    def shows(self) -> bool:
        """Whether a loss of either is a number other than zero, so that there is one to compare."""
        return any(
            one != 0 and math.isfinite(one)
            for run in (self.original, self.migrated)
            for losses in run.values()
            for one in losses
        )


@dataclass(frozen=True)
class Run:
    """A run of one script.

    Attributes:
        losses: by rank, in the order in which ``backward()`` was called.
        device: what they were computed on.
        formats: the floating-point formats from parameters to the first loss.
        drawn: whether random numbers were drawn on an accelerator.
        versions: of Python, torch, and the frameworks that the script has imported.
        steps: of an optimizer, that some of the losses come after.
        moved: how far norms of weights are from the first then; ``None`` where none could be read.
        alone: whether its processes trained each by itself.
    """

    losses: dict[int, list[float]]
    device: str
    formats: tuple[str, ...]
    drawn: bool
    versions: Mapping[str, str]
    steps: int
    moved: float | None
    alone: bool = False


def verify(
    root: Path,
    script: str,
    migrated: Mapping[str, str],
    config: str,
    *,
    launcher: str,
    arguments: Sequence[str] = (),
    steps: int = 20,
    processes: int | None = None,
    seed: int = 0,
    timeout: float = 600.0,
    environ: Mapping[str, str] | None = None,
    launched: Mapping[str, str] | None = None,
) -> Proof:
    """Run a script as it is under its own launcher, then migrated under unipar.

    Each runs in a copy of the directory, so that neither finds what the other has written.

    Args:
        root: the directory that the script runs in.
        script: its path from there.
        migrated: the rewritten files, by their paths from there.
        config: the text of ``unipar.yaml``.
        launcher: what starts the script: a name among :data:`unipar.migrate.launchers.LAUNCHERS`.
        arguments: its command line.
        steps: backward passes to compare; more, until an optimizer has stepped among them.
        processes: how many, where the launcher starts several; 2 unless given. Of a script that
            runs as one process, how many the migrated one has, beside that: what is compared is
            then the mean of their losses.
        seed: of the generators, in both.
        timeout: seconds for each run.
        environ: more variables for the migrated run.
        launched: those that the original's own launcher sets.

    Raises:
        ConfigError: a run fails, computes no loss or takes no step, or no loss of either is a
            number other than zero; or several processes are asked for of a script that starts them
            itself.
    """
    where = {"arguments": arguments, "steps": steps, "seed": seed, "timeout": timeout}
    start = command(launcher, processes or PROCESSES)
    first = run_of(root, script, {}, start, name="original", environ=launched, **where)
    files = with_config(script, migrated, config)

    def proof(losses: Mapping[int, Sequence[float]], about: str = "") -> Proof:
        return Proof(first.losses, losses, about=about, steps=first.steps, moved=first.moved)

    if launcher != "python" or processes in (None, 1):
        ranks = losses_of(root, script, files, start, environ=environ, **where)
        found = checked(proof(ranks))
        return replace(found, about=_ALONE) if first.alone and not found.agrees else found
    if len(first.losses) > 1:
        raise ConfigError(
            f"{script} starts its own processes, so it alone says how many it has. Leave "
            "--processes out, and give what the script reads: --args '...'."
        )
    start = command("torchrun", processes)
    ranks = losses_of(root, script, files, start, environ=environ, **where)
    about = f"The migrated script ran on {len(ranks)} processes, the original on one."
    if len({len(losses) for losses in ranks.values()}) > 1:
        return proof(ranks, about)
    means = [sum(losses) / len(ranks) for losses in zip(*ranks.values(), strict=True)]
    return checked(proof({0: means}, about))


def with_config(script: str, migrated: Mapping[str, str], config: str) -> dict[str, str]:
    """The rewritten files, and ``unipar.yaml`` where the script finds it."""
    return {**migrated, (PurePosixPath(script).parent / "unipar.yaml").as_posix(): config}


def checked(proof: Proof) -> Proof:
    """Refuse losses that would show nothing."""
    if not proof.shows:
        raise ConfigError(
            "every loss is zero or no finite number, so there is nothing to compare. Let the "
            "script learn something: give other arguments with --args '...', or more --steps."
        )
    return proof


def losses_of(
    root: Path, script: str, files: Mapping[str, str], launcher: Sequence[str], **how: Any
) -> dict[int, list[float]]:
    """The losses of :func:`run_of`, by rank."""
    return run_of(root, script, files, launcher, **how).losses


def run_of(
    root: Path,
    script: str,
    files: Mapping[str, str],
    launcher: Sequence[str],
    *,
    name: str = "migrated",
    arguments: Sequence[str] = (),
    steps: int = 20,
    seed: int = 0,
    timeout: float = 600.0,
    environ: Mapping[str, str] | None = None,
) -> Run:
    """Run a script in a copy of its directory, and note what ``backward()`` is called on.

    Args:
        root: the directory.
        script: the script's path from there; a notebook's code is run as a script.
        files: other text for some of its files.
        launcher: the command that is given the script.
        name: what messages call the run.
        arguments: the script's command line.
        steps: backward passes after which it is ended, once an optimizer has stepped among them.
        seed: of the generators.
        timeout: seconds.
        environ: more variables.

    Returns:
        The losses, and how they were computed.

    Raises:
        ConfigError: it fails, calls ``backward()`` nowhere, or only before any step.
    """
    with scratch() as temporary:
        work, losses = temporary / "work", temporary / "losses"
        _copy(root, work)
        losses.mkdir()
        for path, code in files.items():
            (work / path).write_bytes(code.encode())
        environment = {
            "UNIPAR_CAPTURE_DIR": str(losses),
            "UNIPAR_CAPTURE_LOCK": str(temporary),
            "UNIPAR_CAPTURE_STEPS": str(steps),
            "UNIPAR_CAPTURE_SEED": str(seed),
            **(environ or {}),
        }
        runs = _as_script(work, script) if script.endswith(SUFFIX) else script
        _run(name, [*launcher, runs, *arguments], work, environment, timeout)
        found = {int(path.stem): json.loads(path.read_text()) for path in losses.iterdir()}
    if not found:
        raise ConfigError(
            f"the {name} script ended without calling backward() once, so there is nothing to "
            "compare. Give it the arguments that it trains with: --args '...'."
        )
    taken = max(one["stepped"] for one in found.values())
    moved = [one["moved"] for one in found.values() if one["moved"] is not None]
    if taken < 1 or (moved and not any(moved)):
        passes = max(len(one["losses"]) for one in found.values())
        raise ConfigError(
            f"of the {name} script "
            + (f"{taken} steps of an optimizer were seen, which changed no weight, "
               if taken else "no step of an optimizer was seen ")
            + f"among the {passes} backward passes that were run, so its losses do not show that "
            "it trains. Let it train for longer: --args '...', or more --steps."
        )  # fmt: skip
    first = found[min(found)]
    device = f"CPU ({processor()})" if first["device"] == "cpu" else first["device"]
    return Run(
        {rank: one["losses"] for rank, one in sorted(found.items())}, device,
        tuple(first["formats"]), any(one["drawn"] for one in found.values()), first["versions"],
        taken, max(moved, default=None), first["alone"],
    )  # fmt: skip


def _as_script(work: Path, notebook: str) -> str:
    """Write the code of a notebook as a script beside it."""
    path = (work / notebook).with_name(f"{Path(notebook).stem}_notebook.py")
    path.write_text(Notebook(notebook, (work / notebook).read_text("utf-8")).script, "utf-8")
    return path.relative_to(work).as_posix()


def _copy(root: Path, to: Path) -> None:
    """A copy of a directory; links to what is in it, where that is large."""
    ignored = (".git", ".venv", "__pycache__")
    files = [p for p in root.rglob("*") if p.is_file() and not set(ignored) & set(p.parts)]
    if sum(p.stat().st_size for p in files) <= _MOST_BYTES:
        shutil.copytree(root, to, ignore=shutil.ignore_patterns(*ignored))
        return
    to.mkdir()
    for one in root.iterdir():
        if one.suffix == ".py":
            shutil.copy2(one, to)
        elif one.is_dir() and any(one.rglob("*.py")) and one.name not in ignored:
            shutil.copytree(one, to / one.name, ignore=shutil.ignore_patterns(*ignored))
        elif one.name not in ignored:
            (to / one.name).symlink_to(one.resolve())


def _run(
    name: str, command: list[str], work: Path, more: Mapping[str, str], timeout: float
) -> None:
    capture = Path(__file__).parent / "capture"
    path = [str(capture), str(work), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "OMP_NUM_THREADS": "1",
        # NVIDIA's libraries would compute in 10 bits what a script computes in fp32.
        "NVIDIA_TF32_OVERRIDE": "0",
        **os.environ,
        **more,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONHASHSEED": "0",
    }
    process = subprocess.Popen(
        command, cwd=work, env=environment, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the {name} script did not come to its end in {timeout:.0f} s. "
            "Ask for fewer with --steps, or give it less to do with --args."
        ) from error
    finally:
        _kill(process)
    if process.returncode:
        said, where = _last_words(output), ""
        if re.search("No such file or directory: '[^/]", said):
            where = (
                "\nIt ran in a copy of the directory that is migrated; what lies outside is not "
                "beside that. Give such paths in full: --args '...'."
            )
        raise ConfigError(
            f"the {name} script failed ({' '.join(command)} gave {process.returncode}):\n"
            f"{said}{where}"
        )


def _kill(process: subprocess.Popen[str]) -> None:
    """End a launcher and all that it has started, for some put their workers into new sessions."""
    started = []
    if process.poll() is None:
        started = psutil.Process(process.pid).children(recursive=True)
    # Also what has outlived the launcher: ranks, or a rank's compiler.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _last_words(output: str) -> str:
    """The end of what a script wrote, without the launcher's own report below it."""
    lines = itertools.takewhile(
        lambda line: not any(place in line for place in REPORTS), output.splitlines()
    )
    return "\n".join([*lines][-30:])
