"""How fast a loop goes, by Fabric's names of what it measures."""

from __future__ import annotations

from collections import deque
from typing import Any

from unipar.compat.fabric.ranks import rank_zero_only


class Throughput:
    """Rates over the last updates; a rate is there once the window is full.

    Args:
        available_flops: operations that a device can do in a second; left out: no ``mfu``.
        world_size: how many devices there are; rates of all of them are there with more than one.
        window_size: how many updates a rate is over, 2 at least.
        separator: stands between ``device`` and the name of one device's rate.
    """

    def __init__(
        self,
        available_flops: float | None = None,
        world_size: int = 1,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        if world_size < 1 or window_size < 2:
            raise ValueError(
                f"world_size is {world_size}, of 1 at least, and window_size {window_size}, of 2"
            )
        self.available_flops, self.world_size, self.separator = (
            available_flops, world_size, separator
        )  # fmt: skip
        self._totals = {
            name: deque[float](maxlen=window_size)
            for name in ("time", "batches", "samples", "lengths")
        }
        self._flops = deque[float](maxlen=window_size)

    def update(
        self,
        *,
        time: float,
        batches: int,
        samples: int,
        lengths: int | None = None,
        flops: int | None = None,
    ) -> None:
        """Note how far this device has come.

        Args:
            time: seconds since the start.
            batches: of all updates.
            samples: likewise.
            lengths: likewise, of items in samples, as tokens; in every update or in none.
            flops: operations since the last update.

        Raises:
            ValueError: a total is not above the one before, or samples are fewer than batches, or
                lengths than samples.
        """
        if not batches <= samples <= (samples if lengths is None else lengths):
            raise ValueError(
                f"there are {batches} batches, {samples} samples and lengths of {lengths}: none of "
                "them can be fewer than the one before"
            )
        for name, total in (
            ("time", time), ("batches", batches), ("samples", samples), ("lengths", lengths)
        ):  # fmt: skip
            known = self._totals[name]
            if total is None:
                continue
            if known and total <= known[-1]:
                raise ValueError(f"{name} is {total} after {known[-1]}, and has to rise")
            known.append(total)
        if lengths is not None and len(self._totals["lengths"]) != len(self._totals["samples"]):
            raise RuntimeError("lengths are given in some updates. Give them in all, or in none.")
        if flops is not None:
            self._flops.append(flops)

    def compute(self) -> dict[str, float]:
        """The last totals, and the rates."""
        found = {name: totals[-1] for name, totals in self._totals.items() if totals}
        times = self._totals["time"]
        if len(times) == times.maxlen:
            elapsed = times[-1] - times[0]
            for name in ("batches", "samples", "lengths"):
                totals = self._totals[name]
                if len(totals) == totals.maxlen:
                    kind = "items" if name == "lengths" else name
                    self._add_rate(found, kind, (totals[-1] - totals[0]) / elapsed)
            if len(self._flops) == self._flops.maxlen:
                # The first of them were before the time that has passed.
                rate = (sum(self._flops) - self._flops[0]) / elapsed
                self._add_rate(found, "flops", rate)
                if self.available_flops:
                    found[f"device{self.separator}mfu"] = rate / self.available_flops
        return found

    def _add_rate(self, found: dict[str, float], kind: str, rate: float) -> None:
        found[f"device{self.separator}{kind}_per_sec"] = rate
        if self.world_size > 1:
            found[f"{kind}_per_sec"] = rate * self.world_size

    def reset(self) -> None:
        """Forget all updates."""
        for totals in (*self._totals.values(), self._flops):
            totals.clear()


class ThroughputMonitor(Throughput):
    """:class:`Throughput` of a ``Fabric``, on rank 0, whose loggers have what it measures.

    Args:
        fabric: launched.
        kwargs: of :class:`Throughput`. What devices can do is not known here: ``available_flops``
            gives it, for ``mfu``.

    Attributes:
        step: the last one that was logged.
    """

    def __init__(self, fabric: Any, **kwargs: Any) -> None:
        super().__init__(world_size=fabric.world_size, **kwargs)
        self._fabric = fabric
        self.step = -1
        self.update = rank_zero_only(self.update)
        self.compute = rank_zero_only(self.compute, default={})
        self.compute_and_log = rank_zero_only(self.compute_and_log, default={})
        self.reset = rank_zero_only(self.reset)

    def compute_and_log(self, step: int | None = None, **kwargs: Any) -> dict[str, float]:
        """:meth:`compute`, and log it as of ``step``, or of the one after the last."""
        self.step = self.step + 1 if step is None else step
        found = self.compute(**kwargs)
        self._fabric.log_dict(metrics=found, step=self.step)
        return found
