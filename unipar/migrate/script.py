"""What a migrated script calls: its run, and the engines in it.

The run's settings stand in ``unipar.yaml`` beside the script; ``UNIPAR_STRATEGY`` and other
variables of that form override them. A process has one run, which the first call that needs it
opens, so that functions need not hand it around::

    from unipar.migrate import script

    optimizer = script.prepare(model, optimizer=lambda named: SGD([p for _, p in named], 0.1)).optimizer
    for x, y in loader:
        loss = criterion(script.engine(model)(x), y)
        script.backward(loss, optimizer)
        script.engine(optimizer).step()

The random numbers of the script stay its own: neither opening the run nor preparing a model draws
from torch's generators or seeds them.
"""  # noqa: E501

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from unipar.devices import resolve_device_type
from unipar.errors import ConfigError
from unipar.loss import LossSum
from unipar.migrate import exchange
from unipar.migrate.exchange import all_gather, all_reduce
from unipar.migrate.runconfig import ScriptConfig, read_config
from unipar.session import Session, find_placement
from unipar.strategy import Engine, OptimizerFactory
from unipar.world import Placement, World, join

FILE = "unipar.yaml"


class _Prepared(NamedTuple):
    """An engine, and what it is looked up by: its model and its optimizer."""

    engine: Engine
    keys: tuple[Any, ...]


class _Run:
    """The run of this process."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.config: ScriptConfig | None = None
        self.world: World | None = None
        self.file: Path | None = None
        self.placement: Placement | None = None
        self.engines: list[_Prepared] = []
        self.begun: dict[int, int] = {}
        self.share: tuple[int, int] | None = None


_run = _Run()


# -- the run -------------------------------------------------------------------------------------


def open() -> Session:
    """Join the processes under the strategy of ``unipar.yaml``, once. Collective.

    There is a default group of ``torch.distributed`` afterwards, whatever the strategy, so that
    the script's own collectives go on working.

    Raises:
        ConfigError: the settings are wrong, or the strategy cannot run here.
    """
    if _run.session is None:
        config = settings()
        session = Session(
            config.strategy,
            precision=config.precision,
            device=config.device,
            timeout=config.timeout,
            on_nan=config.on_nan,
            placement=_run.placement,
        )
        with _own_randomness():
            session.__enter__()
            _run.world = join(session.world.placement)
        _run.session, _run.config = session, config
        atexit.register(close)
    return _run.session


def session() -> Session:
    """The run's session, which this opens unless it is open. Collective the first time."""
    return open()


def close() -> None:
    """End the run, if it is open."""
    if _run.session is None:
        return
    session, world = _run.session, _run.world
    _run.session = _run.world = _run.config = None
    _run.engines, _run.begun = [], {}
    session.__exit__(None, None, None)
    if world is not None:
        world.leave()


def settings() -> ScriptConfig:
    """What ``unipar.yaml`` and the environment say; defaults where there is no such file.

    Raises:
        ConfigError: every wrong key and value, with file and line.
    """
    return _run.config or read_config(_run.file or _beside_script())


def placement() -> Placement:
    """Where this process stands; known before the run is opened."""
    if _run.session is not None:
        # Frameworks may have set a launcher's variables since.
        return _run.session.world.placement
    config = settings()
    if _run.placement is not None:
        return _run.placement
    return find_placement(resolve_device_type(config.device), config.timeout)


def device() -> torch.device:
    """This process's device, made the current one if it is a GPU."""
    place = placement()
    if place.device_type == "cuda":
        torch.cuda.set_device(place.local_rank)
    return place.device


def world() -> World:
    """The joined processes. Collective the first time."""
    return open().world


def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, **_: Any) -> None:
    """``torch.multiprocessing.spawn`` under unipar: ``fn(local_rank, *args)`` in each process.

    Where a launcher has started this process, ``fn`` is called here.

    Raises:
        WorkerError: a process failed.
    """
    from unipar.spawning import spawn as start

    config = settings()
    run = functools.partial(_spawned, fn, args, _run.file or _beside_script(), list(sys.argv))
    start(run, devices=nprocs, device=config.device, timeout=config.timeout)


def _spawned(
    fn: Callable[..., Any], args: tuple[Any, ...], file: Path, argv: list[str], place: Placement
) -> None:
    sys.argv = argv
    _run.file, _run.placement = file, place
    try:
        fn(place.local_rank, *args)
    finally:
        close()


# -- engines -------------------------------------------------------------------------------------


def prepare(
    model: nn.Module, *, optimizer: OptimizerFactory, max_grad_norm: float | None = None
) -> Engine:
    """Put a model under the strategy, then build its optimizer. Collective.

    Args:
        model: stays usable as it is; calls that lead to a loss go through :func:`engine`.
        optimizer: called with the named parameters once they have their final form.
        max_grad_norm: the 2-norm that gradients are clipped to in each step.

    Raises:
        ConfigError: the strategy cannot do it, or the optimizer holds other parameters.
    """
    run = open()
    number = len(_run.engines)
    with _own_randomness():
        engine = run.prepare(
            model,
            optimizer=_checked(optimizer),
            max_grad_norm=max_grad_norm,
            name="model" if number == 0 else f"model{number + 1}",
        )
    _run.engines.append(_Prepared(engine, (model, engine.module, engine.optimizer)))
    return engine


def engine(of: Any = None) -> Engine:
    """The engine of a model or of its optimizer; left out: the only one.

    Raises:
        ConfigError: it was not prepared.
    """
    if of is None and len(_run.engines) == 1:
        return _run.engines[0].engine
    for one in reversed(_run.engines):
        if any(of is key for key in one.keys):
            return one.engine
    what = "this run" if of is None else f"this {type(of).__name__}"
    raise ConfigError(
        f"{what} has {'not one engine' if of is None else 'no engine'}: call "
        "script.prepare(model, optimizer=...) before the model is trained."
    )


def backward(loss: torch.Tensor, of: Any = None) -> None:
    """Add gradients as ``loss.backward()`` under DDP does.

    A step is then on the mean over ranks of the sum of the losses since the last one, each as the
    script has scaled it. Where :func:`split` has cut the batch, ranks count by their samples, so
    that the step is that of the whole batch.

    Args:
        loss: scalar tensor.
        of: the optimizer or model; left out: the only one.
    """
    one = engine(of)
    first = _run.begun.get(id(one)) != one.num_steps
    _run.begun[id(one)] = one.num_steps
    if _run.share is not None:
        samples, all_samples = _run.share
        share = samples * world().data_size / all_samples
        loss = loss if share == 1 else loss * share
    one.backward(LossSum(loss, 1.0 if first else 0.0))


def no_sync() -> AbstractContextManager[None]:
    """Nothing: an engine knows by itself when gradients are to be reduced."""
    return contextlib.nullcontext()


def autocast(enabled: bool | None = None) -> torch.autocast:
    """Autocast to the run's precision, which is none under ``fp32``.

    Args:
        enabled: whether the script asks for half precision, which the settings must do as well.

    Raises:
        ConfigError: they do not.
    """
    precision = settings().precision
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if enabled is not None and bool(enabled) != (dtype is not None):
        raise ConfigError(
            f"the script asks for autocast with enabled={bool(enabled)}, and {FILE} has precision: "
            f"{precision}. Set precision: {'bf16 or fp16' if enabled else 'fp32'} there, or in "
            "UNIPAR_PRECISION."
        )
    return torch.autocast(device().type, dtype or torch.bfloat16, enabled=dtype is not None)


# -- data and files ------------------------------------------------------------------------------


def split(loader: DataLoader) -> DataLoader:
    """Let each rank have its share of each batch, in the order that the loader has on one rank.

    On one rank the loader itself. ``batch_size`` stays what it is over all ranks.

    Raises:
        ConfigError: the loader is of a stream, or its batches are built by hand.
    """
    ranks = world()
    if ranks.data_size == 1:
        return loader
    if loader.batch_sampler is None or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"this DataLoader goes over {type(loader.dataset).__name__} without a batch sampler, "
            f"which cannot be divided among {ranks.data_size} ranks. "
            "Use a map-style dataset and a batch_size, or run on one process."
        )
    from unipar.migrate.sharing import SharedLoader

    return SharedLoader(loader, ranks, _set_share)


def _set_share(share: tuple[int, int] | None) -> None:
    _run.share = share


def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """``torch.save`` on rank 0, which the others wait for. Collective."""
    ranks = world()
    if ranks.is_main:
        torch.save(obj, f, *args, **kwargs)
    ranks.barrier()


def whole(of: Any) -> Any:
    """A model or an optimizer, for its state dict.

    Raises:
        ConfigError: the strategy divides it among ranks, so that its state dict is a part.
    """
    sharded = open().capabilities.sharded if is_prepared(of) else frozenset()
    if sharded & ({"parameters"} if isinstance(of, nn.Module) else {"parameters", "optimizer"}):
        raise ConfigError(
            f"strategy '{open().strategy.name}' divides {', '.join(sorted(sharded))} among ranks, "
            f"so the state dict of this {type(of).__name__} is only a part. Save with "
            "script.session().save(directory) on all ranks, and load with its load(directory)."
        )
    return of


def is_prepared(of: Any) -> bool:
    """Whether a model or an optimizer belongs to an engine of this run."""
    return any(of is key for one in _run.engines for key in one.keys)


def gathered(of: Any, *, rank0_only: bool = False) -> Any:
    """A model or an optimizer, for state dicts of full tensors under any strategy.

    Their ``state_dict()`` and ``load_state_dict(...)`` are collective. An optimizer's is by the
    names of parameters. A model that is not prepared yet is as it is.

    Args:
        of: the model or the optimizer.
        rank0_only: whether the other ranks get nothing.
    """
    from unipar.migrate.gathering import GatheredModel, GatheredOptimizer, Unprepared

    ranks = world()
    for one in reversed(_run.engines):
        if of is one.engine.optimizer:
            return GatheredOptimizer(one.engine, ranks, rank0_only=rank0_only)
        if any(of is key for key in one.keys):
            return GatheredModel(one.engine, ranks, rank0_only=rank0_only)
    return Unprepared(of, ranks)


def broadcast_weights(model: nn.Module) -> None:
    """Give all ranks rank 0's parameters and buffers. Collective.

    Nothing where the strategy divides them: whatever sets them there does so on all ranks.
    """
    if not open().capabilities.sharded & {"parameters"}:
        exchange.broadcast_weights(model, world())


def broadcast_optimizer(optimizer: torch.optim.Optimizer, *, counted: bool = True) -> None:
    """Give all ranks rank 0's optimizer state, as ``hvd.broadcast_optimizer_state``. Collective.

    Where it has no state yet, Horovod takes a step on gradients of zero, which makes some, counts
    as the first, and decays weights; and so does this.

    Args:
        optimizer: of a prepared model.
        counted: whether the state of that step stays.

    Raises:
        ConfigError: the strategy cannot take that step.
    """
    holder = next((e for e, keys in _run.engines if any(optimizer is key for key in keys)), None)
    whole = not open().capabilities.sharded & {"parameters", "optimizer"}
    exchange.broadcast_optimizer(optimizer, world(), holder, whole=whole, counted=counted)


# -- within --------------------------------------------------------------------------------------


def _beside_script() -> Path:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return (Path(main).resolve().parent if main else Path.cwd()) / FILE


def _checked(optimizer: OptimizerFactory) -> OptimizerFactory:
    """Refuse an optimizer that would go on updating what the strategy has replaced."""

    def build(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        final = list(named)
        built = optimizer(iter(final))
        own = {id(parameter) for _, parameter in final}
        if any(id(p) not in own for group in built.param_groups for p in group["params"]):
            raise ConfigError(
                "the optimizer was given parameters that are not the model's final ones, which "
                "would never be updated. Build its groups inside the function that "
                "script.prepare calls."
            )
        return built

    return build


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    place = device()
    with torch.random.fork_rng([place] if place.type == "cuda" else []):
        yield


# `open` hides the built-in one in this module, which uses it nowhere.
__all__ = [
    "ScriptConfig", "all_gather", "all_reduce", "autocast", "backward", "broadcast_optimizer",
    "broadcast_weights", "close", "device", "engine", "gathered", "is_prepared", "no_sync", "open",
    "placement", "prepare", "save", "session", "settings", "spawn", "split", "whole", "world",
]  # fmt: skip
