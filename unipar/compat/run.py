"""The run of a script behind a face, of which a process has one.

Settings stand in ``unipar.yaml`` beside the script; variables such as ``UNIPAR_STRATEGY`` win over
it, and both over what the script asks for by its framework's own arguments.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from unipar.compat.runconfig import ScriptConfig, file_beside_script, read_config
from unipar.errors import ConfigError
from unipar.launch.blame import classify
from unipar.layout import Layout
from unipar.session import Session, find_placement
from unipar.strategy.registry import is_auto, resolve
from unipar.utils.devices import resolve_device_type
from unipar.world import Placement, World, join

log = logging.getLogger("unipar")


class Run:
    """The state of a run, joined and opened or not.

    Attributes:
        config: its settings, once a session is open.
        session: the open one.
        backend: what the script has asked its processes to be joined by, if it has.
        unasked: whether they are joined for the run alone, and the script has not asked for it.
        unsynced: whether what is called now is within a no_sync().
        claim: called with an optimizer that a face was given, which no other is to find.
    """

    def __init__(self) -> None:
        self.config: ScriptConfig | None = None
        self.session: Session | None = None
        self.backend: str | None = None
        self.unasked = self.unsynced = False
        self.claim: Callable[[Optimizer], None] = lambda _: None
        self._asked: dict[str, Any] = {}
        self._world: World | None = None
        self._placement: Placement | None = None
        self._given: Placement | None = None
        self._file: Path | None = None
        self._may_move = False
        self._undo: Callable[[], None] = lambda: None

    def stand(self, place: Placement, file: Path) -> None:
        """Be one of the processes that were started for the run of a script.

        Args:
            place: where this one stands.
            file: the script's settings.
        """
        self._given, self._file = place, file

    def placement(self, device: str = "auto", timeout: timedelta | None = None) -> Placement:
        """Where this process stands; known before it joins the others.

        Args:
            device: what the script asks for.
            timeout: how long a collective waits for a rank, as the script asks; what the processes
                are joined with stays.
        """
        if self._placement is None:
            config = self._settled({"device": device})
            kind, seconds = resolve_device_type(config.device), config.timeout
            if self._given is None:
                self._placement = find_placement(kind, seconds)
            else:
                self._placement = replace(self._given, device_type=kind, timeout=seconds)
        if timeout is not None and self._world is None:
            seconds = self._settled({"timeout": timeout.total_seconds()}).timeout
            self._placement = replace(self._placement, timeout=seconds)
        return self._placement

    def device(self) -> torch.device:
        """This process's device, made the current one if it is a GPU."""
        place = self.placement()
        if place.device_type == "cuda":
            torch.cuda.set_device(place.device)
        return place.device

    def device_type(self, asked: Mapping[str, Any]) -> str:
        """What kind of device models compute on, or will when a session is opened so.

        Args:
            asked: as for :meth:`open`.
        """
        if self._world is not None and not self._may_move:
            return self.placement().device_type
        return resolve_device_type(self._settled(asked).device)

    def world(self, *, may_move: bool = False, asked: bool = True) -> World:
        """The joined processes, in a default group of ``torch.distributed``. Collective at first.

        Before a session is open they are replicas, one each.

        Args:
            may_move: whether a session may compute on GPUs where they are joined on CPUs, as what
                gloo joins may. Where the script's model is decides.
            asked: whether the script asks for them to be joined.
        """
        if self.session is not None:
            return self.session.world
        if self._world is None:
            self.unasked = not (asked or dist.is_initialized())
            on_cpu = self.placement().device_type == "cpu"
            gpus = torch.cuda.is_available() and dist.is_nccl_available()
            self._may_move = may_move and on_cpu and gpus
            with own_randomness(self.device()):
                self._world = join(self.placement(), may_move=self._may_move)
            atexit.register(self.close)
        return self._world

    @contextlib.contextmanager
    def accumulating(self, *, unsynced: bool = True) -> Iterator[None]:
        """A block of passes that no step is to follow, if ``unsynced``; a script's ``no_sync``."""
        before, self.unsynced = self.unsynced, self.unsynced or unsynced
        try:
            yield
        finally:
            self.unsynced = before

    def decides(self, name: str) -> bool:
        """Whether ``unipar.yaml`` or the environment says a setting, whatever the script asks."""
        return name in self._read().model_fields_set

    def asks_for_own_buffers(self) -> bool:
        """Whether the script lets ranks keep buffers of their own (``broadcast_buffers=False``)."""
        asked = self._asked.get("strategy")
        return isinstance(asked, Mapping) and not asked.get("broadcast_buffers", True)

    def may_share_buffers(self) -> bool:
        """Whether the strategy's own options let passes begin with rank 0's buffers."""
        return self.session is None or getattr(
            self.session.strategy.options, "broadcast_buffers", True
        )

    def asks_for_unused(self) -> bool:
        """Whether the script says that passes may leave parameters unused (as DDP's option)."""
        asked = self._asked.get("strategy")
        return isinstance(asked, Mapping) and may_leave_unused(asked)

    def asks_for_replicas(self) -> bool:
        """Whether the script trains whole replicas, whatever strategy runs."""
        divided = self.asks_to_divide()
        return divided is not None and not divided

    def asks_to_divide(self) -> frozenset[str] | None:
        """What the script's own strategy divides; ``None`` if that is not installed."""
        asked = self._asked.get("strategy")
        if asked is None:
            return frozenset()
        with contextlib.suppress(ConfigError):
            return frozenset(resolve(asked).capabilities().sharded)
        return None

    def layout(self, asked: Mapping[str, Any]) -> Layout:
        """How ranks are arranged, or will be when a session is opened so.

        Args:
            asked: as for :meth:`open`.
        """
        if self.session is not None:
            return self.session.world.layout
        config, place = self._settled(asked), self.placement()
        if is_auto(config.strategy):
            return Layout(dp_replicate=place.size)
        return resolve(config.strategy).layout(place)

    def open(self, asked: Mapping[str, Any]) -> Session:
        """Open the session, once. Collective.

        Args:
            asked: settings that the script asks for; of :class:`ScriptConfig`'s fields.

        Raises:
            ConfigError: the settings are wrong, or other than those that the session is open with;
                or the strategy cannot run here.
        """
        if self.session is not None:
            known = {**self.config.model_dump(), **self._asked} if self.config else self._asked
            asked = _of_use(asked, self.config.precision) if self.config else asked
            other = {key for key, value in asked.items() if known.get(key) != value}
            if other:
                raise ConfigError(
                    f"the run is open with {_listed(self._asked) or 'its defaults'}, and is asked "
                    f"for {_listed({key: asked[key] for key in other})} now. Ask for the same "
                    "each time."
                )
            return self.session
        config = self._settled(asked)
        kind = resolve_device_type(config.device)
        if self._world is None:
            self._placement = None
        elif self._may_move:
            self._move(self._world, kind)
        elif kind != self.placement().device_type:
            raise ConfigError(
                f"the processes are joined on {self.placement().device_type} already, and the run "
                f"is asked for device={config.device!r}. Say so before the first collective, as in "
                "PartialState(cpu=True) or init_process_group('gloo'). Or set device in "
                "unipar.yaml."
            )
        self._may_move = False
        place = self.placement(config.device, timedelta(seconds=config.timeout))
        if config.strategy == "auto":
            config = config.model_copy(update={"strategy": "ddp" if place.size > 1 else "single"})
        session = Session(
            config.strategy,
            precision=config.precision,
            loss_scale=config.loss_scale,
            device=config.device,
            timeout=config.timeout,
            on_nan=config.on_nan,
            self_test=config.self_test,
            placement=place,
        )
        with own_randomness(self.device()):
            session.__enter__()
            if self._world is None:
                self._world = join(session.world.placement)
                atexit.register(self.close)
        self.session, self.config = session, config
        self._asked = _of_use(asked, config.precision)
        self._undo = explain_uncaught(session)
        return session

    def _move(self, world: World, kind: str) -> None:
        """Compute on GPUs, if that is where models are, after all have joined on CPUs. Collective.

        Args:
            world: the joined processes.
            kind: where this rank's model is.
        """
        kinds = world.gather(kind)
        if len({*kinds}) > 1:
            raise ConfigError(
                "models are not all on the same kind of device: "
                + ", ".join(f"that of rank {rank} on {one}" for rank, one in enumerate(kinds))
                + ". Put each rank's model on its own GPU, or set device in unipar.yaml."
            )
        place = replace(self.placement(), device_type=kind)
        if place != self.placement():
            with own_randomness(place.device):
                self._world = world.on(place)
            self._placement = place

    def close(self) -> None:
        """End the run, if there is one. Another may follow."""
        session, world, undo, claim = self.session, self._world, self._undo, self.claim
        self.__init__()
        self.claim = claim
        undo()
        if session is not None:
            session.__exit__(None, None, None)
        if world is not None:
            atexit.unregister(self.close)
            world.leave()

    def _read(self) -> ScriptConfig:
        return read_config(self._file or file_beside_script())

    def _settled(self, asked: Mapping[str, Any]) -> ScriptConfig:
        """What is set from outside, and the rest as the script asks for it."""
        config = self._read()
        overridden = {
            key: value
            for key, value in asked.items()
            if key in config.model_fields_set and getattr(config, key) != value
        }
        if overridden:
            log.info(
                "unipar.yaml or the environment decides, not the script: %s instead of %s.",
                _listed({key: getattr(config, key) for key in overridden}), _listed(overridden),
            )  # fmt: skip
        open_to = {key: one for key, one in asked.items() if key not in config.model_fields_set}
        return config.model_copy(
            update=_of_use(open_to, open_to.get("precision", config.precision))
        )


current = Run()


def may_leave_unused(options: Mapping[str, Any]) -> bool:
    """Whether DDP with these options leaves gradients of what no rank has used as they were."""
    return bool(options.get("find_unused_parameters") or options.get("static_graph"))


_WAITED = (
    "unipar: rank {rank} waited for another one, which has ended, is stuck, or calls something "
    "else. If that one shows an error of its own, it is the cause. If not: backward passes, steps, "
    "saves, gathers and barriers are for all ranks, as often and in the same order on each; none "
    "of them stands under an `if` that only some ranks take. Where parameters are divided (fsdp, "
    "zero3), so is each block of a pass: no rank leaves out one that others compute (LayerDrop)."
)


_GONE = (
    "unipar: each of {size} ranks runs the script, and another one may have removed or renamed "
    "this file. Let one of them do so: if int(os.environ.get('RANK', 0)) == 0."
)


def explain_uncaught(session: Session) -> Callable[[], None]:
    """Show an error that ends the script in words of the strategy's, where it has some.

    Nothing else watches ranks that the script's own launcher has started, so one that has waited
    in vain says itself what that comes of.

    Returns:
        What takes that back.
    """
    shown = sys.excepthook

    def show(kind: Any, error: BaseException, trace: Any) -> None:
        explained = session.explained(error)
        if explained is None:
            shown(kind, error, trace)
            if classify(error).is_echo:
                print(_WAITED.format(rank=session.world.rank), file=sys.stderr)
            elif session.world.size > 1 and _removes(error):
                print(_GONE.format(size=session.world.size), file=sys.stderr)
        else:
            shown(type(explained), explained, None)

    def undo() -> None:
        if sys.excepthook is show:
            sys.excepthook = shown

    sys.excepthook = show
    return undo


def _removes(error: BaseException) -> bool:
    """Whether an error is that a file is gone which the script was about to remove or to rename."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, FileNotFoundError) and any(
        re.search(r"(remove|unlink|rename|replace|rmdir|rmtree|move)\w*\(", one.line or "")
        for one in frames
    )


def explain_spawned() -> None:
    """Show errors likewise in processes that the script starts by ``torch.multiprocessing.spawn``.

    It catches what they end by, and hands the traceback to the process that has started them.
    """
    # The package has the function under the module's name. torch 2.8 to 2.13.
    spawning: Any = importlib.import_module("torch.multiprocessing.spawn")
    spawning._wrap = _explaining


def _explaining(fn: Callable[..., Any], *args: Any) -> None:
    _wrapped(functools.partial(_explained, fn), *args)


_wrapped = importlib.import_module("torch.multiprocessing.spawn")._wrap


def _explained(fn: Callable[..., Any], *args: Any) -> None:
    try:
        fn(*args)
    except Exception as error:
        explained = current.session.explained(error) if current.session is not None else None
        if explained is None:
            raise
        raise explained from error


@contextlib.contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Give the generators back as they were, so that the script's random numbers stay its own."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _of_use(asked: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """What a script asks for, which may scale losses whatever it computes in."""
    return {key: one for key, one in asked.items() if key != "loss_scale" or precision == "fp16"}


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in sorted(settings.items()))
