"""``bench``: the same job under every strategy, side by side."""

from __future__ import annotations

import contextlib
import functools
import inspect
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch import nn

from unipar import launch
from unipar.benchmark import machine
from unipar.benchmark.cells import REFERENCE, Cell, make_cells
from unipar.benchmark.environments import Environments
from unipar.benchmark.job import LEFT_OUT, BenchJob
from unipar.benchmark.modelling import Model
from unipar.benchmark.raw import loop_for
from unipar.benchmark.reference import find_references, reference_cells
from unipar.benchmark.report import html, table
from unipar.benchmark.result import BenchResult, Interconnect, Job
from unipar.benchmark.runner import Runner
from unipar.benchmark.store import Store
from unipar.benchmark.summary import summarize
from unipar.benchmark.time_left import Outlook, Tally
from unipar.benchmark.writing import replace
from unipar.config import RunConfig
from unipar.data import batch_size_of, num_samples_of
from unipar.errors import ConfigError, did_you_mean
from unipar.optimizers.groups import holds_functions
from unipar.strategy import ModelFactory, Precision
from unipar.train import directories
from unipar.train.fit import fit

Show = Callable[[Cell, str], None]


def bench(
    model: nn.Module | ModelFactory,
    data: Any,
    *,
    strategies: Sequence[str],
    devices: Sequence[int] = (1,),
    precisions: Sequence[Precision] = (),
    micro_batch_sizes: Sequence[int] = (),
    steps: int = 50,
    warmup: int = 5,
    repeats: int = 5,
    seed: int = 0,
    output_dir: str | Path | None = None,
    raw: str | Path | None = None,
    pythons: Sequence[str | Path] = (),
    time_limit: float = 600.0,
    trace: bool = False,
    show: Show | None = None,
    look_ahead: Callable[[Outlook], None] | None = None,
    command: str = "",
    run_file: str | Path | None = None,
    **arguments: Any,
) -> BenchResult:
    """Train the same job under every strategy, and compare speed, memory, traffic and losses.

    Every combination of strategy, number of devices, precision and micro-batch is a cell. Each
    repeat of a cell has new processes; the cells take turns, in a new random order each round. A
    cell that cannot run, fails, or takes too long has a reason for a result, and the others go
    on. Called again with the same ``output_dir`` it runs only what is not finished, and reports
    what was asked for before, too.

    Args:
        model: a module, or a function without arguments that builds one.
        data: what :func:`unipar.fit` takes.
        strategies: ``"ddp"``, ``"deepspeed:stage=3"``, or with several values of an option,
            ``"deepspeed:stage=1|2|3"``.
        devices: numbers of processes; the global batch is the same for all.
        precisions: compute dtypes; left out: ``precision``, or fp32.
        micro_batch_sizes: samples of one forward pass on one rank; left out:
            ``micro_batch_size``, or the rank's share of the global batch.
        steps: timed steps of each repeat.
        warmup: steps before them, whose times are discarded.
        repeats: of each cell.
        seed: of the order of the cells, and of the job.
        output_dir: where ``result.json``, ``report.html`` and all trials go; left out: a new
            directory in ``runs``.
        raw: a directory of hand-written loops, ``NAME.py`` for the strategy ``NAME``; see
            :mod:`unipar.benchmark.raw`.
        pythons: interpreters of further environments, for frameworks that are not in this one.
        time_limit: seconds that one repeat of one cell may take.
        trace: keep a Chrome trace of one step of each rank and cell, beside its trial.
        show: called with a cell and what is being done with it.
        look_ahead: called with how many trials are done and how long the rest will take, before the
            first, and then before each.
        command: what runs this again, for the report.
        run_file: the file that describes the job, for the report.
        **arguments: further arguments of :func:`unipar.fit`, but for those about evaluation,
            checkpoints and logging.

    Returns:
        Everything that was measured; it is in ``output_dir`` as well.

    Raises:
        ConfigError: nothing can be run as it is asked for; raised before anything is started.
        KeyboardInterrupt: the benchmark was interrupted; the report has what there was by then.
        SystemExit: likewise, by SIGTERM.
    """
    arguments = {**arguments, "model": model, "data": data, "seed": seed}
    precisions = precisions or [arguments.get("precision", "fp32")]
    cells = make_cells(
        strategies, devices, precisions, micro_batch_sizes or [arguments.get("micro_batch_size")]
    )
    _check(arguments, cells, steps=steps, warmup=warmup, repeats=repeats, time_limit=time_limit)
    job = BenchJob(arguments, warmup, steps)
    environments = Environments(pythons, list(dict.fromkeys(cell.strategy for cell in cells)))
    cells += _by_hand(cells, raw)
    root = Path(output_dir or new_directory()).absolute()
    store = Store.open(root, _identity(job))
    job.write(store.job)
    size = _global_batch_size(arguments)
    probes = {
        count: store.probe(f"{count}-{'-'.join(precisions)}")
        for count in sorted({cell.devices for cell in cells})
    }
    planned = [store.trial(cell, repeat) for cell in cells for repeat in range(repeats)]
    planned += [store.trial(cell, 0) for cell in reference_cells(cells, size)]
    runner = Runner(
        store,
        environments,
        time_limit,
        Path(raw) if raw else None,
        trace,
        show or (lambda *_: None),
        Tally([*probes.values(), store.probe("model"), *planned], environments.seconds),
        look_ahead or (lambda _: None),
    )
    here = machine.describe(environments.versions)
    commit = machine.commit()
    described = Path(run_file).read_text(encoding="utf-8") if run_file else ""
    every = store.ask(cells)

    def summary(interrupted: str) -> BenchResult:
        """From what lies in the directory alone, whoever has put it there."""
        answers = store.answers()
        # What can be known of it without running it.
        known = Model(name=_name(model), parameters=0, flops_per_sample=0.0)
        if "model" in answers:
            known = Model.model_validate(answers.pop("model"))
        found = {cell: store.findings(cell) for cell in every}
        findings = [one for of_cell in found.values() for one in of_cell]
        job = Job(
            model=known.name,
            parameters=known.parameters or max((one.parameters for one in findings), default=0),
            global_batch_size=size,
            items=max((one.items for one in findings), default=0.0),
            steps=steps,
            warmup=warmup,
            repeats=max(repeats, *map(len, found.values())),
            seed=seed,
            flops=size * known.flops_per_sample or None,
            command=command or shlex.join(["python", *sys.argv]),
            run_file=described,
            commit=commit,
        )
        references = find_references(lambda cell: store.finding(cell, 0), every, size)
        return summarize(here, job, every, store, references, _links(answers), interrupted)

    with _terminable(), _reported(root, summary), contextlib.closing(runner):
        for count, directory in probes.items():
            request = {"kind": "probe", "devices": count, "precisions": list(precisions)}
            runner.ask(request, directory, devices=count)
        runner.ask({"kind": "model"}, store.probe("model"))
        find_references(lambda cell: runner.trial(cell, 0), cells, size)
        runner.rounds(cells, repeats, seed)
    return BenchResult.load(root)


def _links(answers: Mapping[str, Any]) -> list[Interconnect]:
    """By number of devices; of one that was measured twice, the later, with all precisions."""
    links: dict[int, Interconnect] = {}
    for answer in answers.values():
        link = Interconnect.model_validate(answer)
        flops = links[link.devices].matmul_flops if link.devices in links else {}
        links[link.devices] = link.model_copy(
            update={"matmul_flops": {**flops, **link.matmul_flops}}
        )
    return [links[count] for count in sorted(links)]


def new_directory() -> Path:
    """Where a benchmark goes that nobody has named a place for."""
    return directories.unused(Path("runs", time.strftime("bench-%Y%m%d-%H%M%S")))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Have SIGTERM end it as Ctrl-C does, with a report, unless the program has its own way."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def end(number: int, _: object) -> None:
        # Whoever is in a hurry sends it twice, and would have no report then.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _reported(root: Path, summary: Callable[[str], BenchResult]) -> Iterator[None]:
    """Whatever happens, leave a report of what there is, which says so."""
    interrupted = ""
    try:
        yield
    except KeyboardInterrupt:
        interrupted = "it was interrupted"
        raise
    except SystemExit:
        interrupted = "it was ended by SIGTERM"
        raise
    except Exception as error:
        interrupted = f"it failed ({type(error).__name__}: {error})"
        raise
    finally:
        result = summary(interrupted)
        result.save(root / "result.json")
        replace(root / "table.md", table.markdown(result))
        replace(root / "table.csv", table.csv(result))
        html.write(result, root / "report.html")


def _check(
    arguments: dict[str, Any],
    cells: Sequence[Cell],
    *,
    steps: int,
    warmup: int,
    repeats: int,
    time_limit: float,
) -> None:
    for name, value, least in (("warmup", warmup, 1), ("repeats", repeats, 1)):
        if value < least:
            raise ConfigError(f"{name}={value}; give {least} or more.")
    if steps < warmup:
        raise ConfigError(
            f"steps={steps} are timed after warmup={warmup} that are discarded: time at least as "
            "many as are discarded."
        )
    if time_limit <= 0:
        raise ConfigError(f"time_limit={time_limit:g}; give a number of seconds above 0.")
    if launch.detect() is not None:
        raise ConfigError(
            "a benchmark starts its own processes, and a launcher has started this one: run it "
            "without torchrun, srun or mpirun."
        )
    html.require()
    known = set(inspect.signature(fit).parameters)
    for name in arguments:
        if name not in known:
            raise ConfigError(f"bench takes no argument '{name}'.{did_you_mean(name, known)}")
    if arguments.get("shares") is not None:
        raise ConfigError(
            "a benchmark takes no shares: they are of one number of devices, and it compares "
            "several, beside one process as the reference. Leave shares out (--set shares=null), "
            "and compare the step times of runs of fit (metrics.jsonl)."
        )
    _global_batch_size(arguments)
    for cell in cells:
        _config(arguments, cell)


def _config(arguments: dict[str, Any], cell: Cell) -> RunConfig:
    """The run of a cell as its config says it; refuses fields that no run could have."""
    given = BenchJob(arguments, 1, 1).of(cell, 1)
    objects = ("model", "data", "loss")
    plain = {
        key: value
        for key, value in given.items()
        if key not in objects and not holds_functions(value)
    }
    # Which options a strategy has is known to the environment that has the strategy.
    return RunConfig.build(**{**plain, "strategy": REFERENCE})


def _by_hand(cells: Sequence[Cell], raw: str | Path | None) -> list[Cell]:
    if raw is None:
        return []
    found = [
        cell.model_copy(update={"raw": True})
        for cell in cells
        if loop_for(cell.strategy, Path(raw)) is not None
    ]
    if not found:
        raise ConfigError(
            f"{raw} has no hand-written loop for any of the strategies: a loop for 'ddp' would be "
            f"{Path(raw, 'ddp.py')}."
        )
    return found


def _global_batch_size(arguments: dict[str, Any]) -> int:
    size = arguments.get("global_batch_size") or batch_size_of(arguments["data"])
    if size is None:
        raise ConfigError(
            "global_batch_size is not set, and the data has no batch size of its own. "
            "Set global_batch_size, the samples of one step over all devices."
        )
    return size


def _identity(job: BenchJob) -> dict[str, Any]:
    """What tells one job from another: results of different ones are not comparable."""
    arguments = job.arguments
    config = _config(arguments, Cell(strategy=REFERENCE)).model_dump(
        mode="json",
        by_alias=True,
        exclude={"strategy", "devices", "precision", "micro_batch_size", *LEFT_OUT},
    )
    objects = {
        name: _described(arguments[name])
        for name in ("model", "data", "loss", "optimizer", "lr_scheduler")
        if name in arguments and arguments[name] is not None
    }
    samples = num_samples_of(arguments["data"])
    return {**config, **objects, "samples": samples, "steps": job.steps, "warmup": job.warmup}


def _name(thing: Any) -> str:
    """Name a class, a function, or an object's class."""
    thing = getattr(thing, "func", thing)
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def _described(thing: Any) -> str:
    """Its name, and what else tells it from others of that name."""
    if isinstance(thing, nn.Module):
        return f"{_name(thing)} of {sum(p.numel() for p in thing.parameters())} parameters"
    if isinstance(thing, functools.partial):
        return f"{_name(thing)}({', '.join(f'{k}={v!r}' for k, v in thing.keywords.items())})"
    if isinstance(thing, Mapping) and holds_functions(thing):
        return f"{{{', '.join(f'{key}: {_described(value)}' for key, value in thing.items())}}}"
    plain = (str, int, float, list, tuple, BaseModel, Mapping)
    return repr(thing) if isinstance(thing, plain) else _name(thing)
