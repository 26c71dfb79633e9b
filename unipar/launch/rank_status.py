"""Where each rank stands, told through the run's store, for ranks that another launcher started.

There no launching process reads what the ranks leave behind. So each of them tells the store now
and then where it is, and once how it left; a rank whose collective failed reads who is to blame.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from unipar.errors import WorkerError
from unipar.launch.blame import Kind, classify
from unipar.launch.rank_names import ADVICE, SAME, behind, in_step, name_ranks, seen
from unipar.utils import progress_marks
from unipar.utils.progress_marks import Mark
from unipar.world import World
from unipar.world.network import address_towards, meeting_of

T = TypeVar("T")

_OFTEN, _AT_ONCE = 1.0, 64
# Until other ranks have failed by the same, and until the store or a host is given up.
_SETTLE, _PATIENCE = 3.0, 2.0
# How long a rank that a signal has ended keeps the store for the others.
_INTERRUPTED = 0.5
_POLL, _POLL_OWN = 0.2, 0.05


@dataclass(frozen=True)
class Word:
    """The last word of a rank.

    Attributes:
        rank: whose word it is.
        address: its host's, as the store sees it; empty where the store is a file.
        host: its host's name.
        beat: how often it has told; it goes on while the process does.
        when: when it told this, in seconds since the ranks met: the clocks of two hosts need not
            agree on more.
        step: the step it was in, 0 before the first one.
        phase: what it did in that step.
        count: how many such places it has come to.
        since: for how long it had done so, in seconds.
        left: ``"returned"`` or the kind of its failure, once it has left the run.
        title: its failure in a line.
        informed: it needs the store no more: it knows how the store's keeper left, or has left
            itself and read all that it explains its failure by.
    """

    rank: int
    address: str
    host: str
    beat: int = 0
    when: float = 0.0
    step: int = 0
    phase: str = ""
    count: int = 0
    since: float = 0.0
    left: str = ""
    title: str = ""
    informed: bool = False

    @property
    def mark(self) -> Mark | None:
        return Mark(self.step, self.phase, 0.0, self.count) if self.step else None

    @property
    def place(self) -> str:
        return f"{self.host} ({self.address})" if self.address else self.host


class Peers:
    """The ranks of a run, as one of them sees the others.

    Args:
        world: the joined processes.
        store: where they meet, one of torch's; a connection of its own is made to it.
    """

    def __init__(self, world: World, store: Any) -> None:
        self._size, self._timeout = world.size, world.placement.timeout
        self._key = f"unipar/peers/{world.placement.restart}"
        self._store = store.clone()
        # Nor does the process end before a call that waits for the store has given up.
        self._store.set_timeout(timedelta(seconds=_PATIENCE))
        self._meeting = meeting_of(store)
        # Torchrun keeps the store itself; with other launchers it ends with rank 0.
        own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._keeper = 0 if self._meeting and own else None
        # The server ends with the last reference to it, and the process group has the other one.
        self._server = store if self._keeper == world.rank else None
        self._linger, self._silent = 0.0, set[int]()
        # How the keeper of the store left, for when the store is gone with it.
        self._last_of_keeper: Word | None = None
        address = address_towards(self._meeting) if self._meeting else ""
        self._word = Word(world.rank, address, socket.gethostname())
        # The store serves all ranks, and many of them tell it less often.
        self._every = min(max(_OFTEN, world.size / _AT_ONCE), self._timeout / 10)
        self._settle = max(_SETTLE, self._every + 1.0)
        self._ended, self._telling = threading.Event(), threading.Lock()
        self._met = time.monotonic()
        progress_marks.open_marks(None)
        self._tell()

    def begin(self) -> None:
        """Tell the store every now and then, from when all ranks have told it once."""
        self._met = time.monotonic()
        threading.Thread(target=self._go_on, name="unipar-peers", daemon=True).start()

    def leave(self, error: BaseException | None) -> WorkerError | None:
        """Tell how this rank leaves; what to raise if another rank is to blame for ``error``."""
        self._ended.set()
        clean = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        kind = Kind.ERROR if error is None else classify(error)
        title = "" if clean else f"{type(error).__name__}: {error}".splitlines()[0][:500]
        left = "returned" if clean else kind.value
        asks = not clean and kind.is_echo
        self._linger = _INTERRUPTED if kind is Kind.INTERRUPT else self._settle
        try:
            _within(_PATIENCE, lambda: self._tell(left=left, title=title, informed=not asks))
            if not asks:
                return None
            words, self._silent = self._await_the_others()
            found = self._explain(kind, words, self._silent)
            _within(_PATIENCE, lambda: self._tell(informed=True))
            return found
        except (TimeoutError, dist.DistError):
            self._linger = 0.0
            return self._unreachable(kind) if asks else None

    def close(self) -> None:
        """Give the store up; the rank that keeps it waits a moment until no other needs it.

        Call it when this rank's other connections are closed, by which the others fail and leave.
        """
        try:
            if self._server is not None and self._linger:
                silent = self._silent
                self._poll(self._linger, lambda words: _informed(words, silent), _POLL_OWN)
        except (TimeoutError, dist.DistError):
            pass
        finally:
            self._server = None

    # -- through the store -----------------------------------------------------------------------

    @property
    def _now(self) -> float:
        """Seconds since the ranks met."""
        return time.monotonic() - self._met

    def _go_on(self) -> None:
        while not self._ended.wait(self._every):
            try:
                self._tell()
                self._look_after_keeper()
            except dist.DistError:
                # The store is gone. Whether that matters shows when a collective fails.
                return

    def _look_after_keeper(self) -> None:
        """Read how the store's keeper left while the store can still be read."""
        if self._keeper in (None, self._word.rank) or self._last_of_keeper is not None:
            return
        keeper = Word(**json.loads(self._store.get(f"{self._key}/{self._keeper}")))
        if keeper.left:
            self._last_of_keeper = keeper
            self._tell(informed=True)

    def _tell(self, **more: Any) -> None:
        # A rank that leaves tells so beside the thread that tells where it is.
        with self._telling:
            self._tell_next(**more)

    def _tell_next(self, **more: Any) -> None:
        mark = progress_marks.own_mark()
        at = {"step": mark.step, "phase": mark.phase, "count": mark.count} if mark else {}
        since = time.monotonic() - mark.time if mark else 0.0
        beat = self._word.beat + 1
        self._word = replace(self._word, beat=beat, when=self._now, since=since, **at, **more)
        self._store.set(f"{self._key}/{self._word.rank}", json.dumps(asdict(self._word)))

    def _read(self) -> list[Word]:
        """The words of the other ranks."""
        keys = [f"{self._key}/{rank}" for rank in range(self._size) if rank != self._word.rank]
        return [Word(**json.loads(value)) for value in self._store.multi_get(keys)]

    def _poll(
        self, seconds: float, enough: Callable[[list[Word]], bool], every: float = _POLL
    ) -> list[Word]:
        deadline = time.monotonic() + seconds
        while True:
            words = _within(_PATIENCE, self._read)
            if enough(words) or time.monotonic() > deadline:
                return words
            time.sleep(every)

    def _await_the_others(self) -> tuple[list[Word], set[int]]:
        """Their words, once they say who is to blame or no more can be expected; who is silent."""
        before = {word.rank: word.beat for word in _within(_PATIENCE, self._read)}
        words = self._poll(self._settle, lambda words: bool(_culprit(words)) or _heard(words, ()))
        return words, {word.rank for word in words if word.beat == before[word.rank]}

    # -- who is to blame -------------------------------------------------------------------------

    def _explain(self, kind: Kind, words: list[Word], quiet: set[int]) -> WorkerError:
        culprit = _culprit(words)
        if culprit is not None:
            where = in_step("failed", culprit.mark)
            return _error(f"Rank {culprit.rank} {where}: {culprit.title}", culprit)
        missing = [word for word in words if not word.left and kind is not Kind.APART]
        cut = [word for word in missing if word.rank in quiet and not self._reaches(word)]
        if cut:
            return self._cut_off(cut)
        if missing:
            return self._missing(kind, missing, quiet)
        returned = [word.rank for word in words if word.left == "returned"]
        if returned:
            return _error(
                f"Rank {self._word.rank} {in_step('was', self._word.mark)} in a collective that "
                f"{name_ranks(returned)} did not take part in, having already returned. {SAME}.",
                self._word,
            )
        apart = behind({word.rank: word.mark for word in (*words, self._word)})
        text = "The ranks were in different collectives, or one came too late"
        where = (f"rank {w.rank} {in_step('failed', w.mark)}" for w in _sorted(words, self._word))
        one = next((word for word in (*words, self._word) if word.rank == apart), None)
        return _error(f"{text}: {', '.join(where)}. {ADVICE}", one)

    def _missing(self, kind: Kind, missing: list[Word], quiet: set[int]) -> WorkerError:
        """The error for ranks that have told nothing of a failure."""
        if kind is Kind.LOST:
            text = f"The connection to a rank was lost {in_step('', self._word.mark).strip()}"
        else:
            text = f"A rank did not answer within timeout={self._timeout:g} s"
        lines = []
        for word in missing:
            alive = (
                "its process answers, and its training does not go on"
                if word.rank not in quiet
                else "its process does not answer: it has ended, or was stopped"
            )
            ago = word.since + self._silence(word)
            at = seen(word.mark, ago) if word.mark else "not seen in any step"
            lines.append(f"rank {word.rank} was {at}, on {word.place}; {alive}")
        return _error(f"{text}; {'; '.join(lines)}. {ADVICE}", missing[0])

    def _cut_off(self, cut: list[Word]) -> WorkerError:
        """The error for hosts of which nothing comes any more."""
        hosts = sorted({word.place for word in cut})
        ranks = name_ranks([word.rank for word in cut])
        ago = min(map(self._silence, cut))
        return _error(
            f"Link or host: nothing has come for {ago:.0f} s from {ranks} on {', '.join(hosts)}, "
            f"and that host cannot be reached from {self._word.place}. No rank is to blame; "
            "look at the network between the hosts, and at the one that is silent."
        )

    def _unreachable(self, kind: Kind) -> WorkerError:
        """The error for a store that does not answer."""
        last = self._last_of_keeper
        if last is not None and (last.left == "returned" or not Kind(last.left).is_echo):
            return self._explain(kind, [last], set())
        assert self._meeting is not None, "a store in a file answers"
        host, port = self._meeting
        what = f"the run's store at {host}:{port}"
        answers = _connects(self._meeting)
        if answers is None:
            return _error(
                f"Link or host: {what} cannot be reached from {self._word.place}. No rank is to "
                f"blame; look at the network between the hosts, and at {host}."
            )
        if self._keeper is None:
            return _error(f"A rank was lost, and {what}, which the launcher keeps, has ended.")
        gone = "does not answer" if answers else "has ended"
        waited = f" within timeout={self._timeout:g} s" if kind is Kind.TIMEOUT else ""
        keeper = Word(self._keeper, host, host)
        return _error(
            f"Rank {self._keeper} did not answer{waited}, and {what}, which it keeps, {gone}: its "
            f"process on {host} {'was stopped' if answers else 'is gone'}. Rank {self._word.rank} "
            f"{in_step('noticed', self._word.mark)}.",
            keeper,
        )

    def _silence(self, word: Word) -> float:
        """Seconds since the rank told this."""
        return max(0.0, self._now - word.when)

    def _reaches(self, word: Word) -> bool:
        if self._meeting is None or word.address == self._word.address:
            return True
        host, port = self._meeting
        near_store = word.address.startswith("127.") or word.address == "::1"
        return _connects((host if near_store else word.address, port)) is not None


def watch(world: World) -> Peers | None:
    """The peers of this process; ``None`` where the launching process watches, or there are none.

    Call it on all ranks, when they have joined.
    """
    if world.size == 1 or progress_marks.watched() or not dist.is_initialized():
        return None
    # torch 2.13, distributed/distributed_c10d.py; nothing public gives the store of the group.
    peers = Peers(world, dist.distributed_c10d._get_default_store())
    # Whoever asks for a word finds one.
    world.barrier()
    peers.begin()
    return peers


def _culprit(words: Iterable[Word]) -> Word | None:
    own = [w for w in words if w.left and w.left != "returned" and not Kind(w.left).is_echo]
    return min(own, key=lambda word: word.when, default=None)


def _heard(words: Iterable[Word], silent: Collection[int]) -> bool:
    return all(word.left or word.rank in silent for word in words)


def _informed(words: Iterable[Word], silent: Collection[int]) -> bool:
    return all(word.informed or word.rank in silent for word in words)


def _sorted(words: list[Word], own: Word) -> list[Word]:
    return sorted((*words, own), key=lambda word: word.rank)


def _error(text: str, word: Word | None = None) -> WorkerError:
    return WorkerError(
        text, rank=None if word is None else word.rank, step=(word.step or None) if word else None
    )


def _connects(meeting: tuple[str, int]) -> bool | None:
    """Return whether something listens there; ``None`` if not even the host says no."""
    try:
        socket.create_connection(meeting, timeout=_PATIENCE).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _within(seconds: float, fn: Callable[[], T]) -> T:
    """``fn()``, unless it takes longer: a store behind a cut link may never answer.

    Raises:
        TimeoutError: it does.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            results.append(fn())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="unipar-peers-ask", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
