"""The comparison of a few steps under a strategy with a plain loop beside it."""

from __future__ import annotations

import math

from pydantic import BaseModel


class Comparison(BaseModel, frozen=True):
    """The losses of the same steps, twice.

    Attributes:
        strategy: as ``name:option=value,…``.
        device: ``"cpu"`` or ``"cuda"``.
        devices: the number of processes under the strategy; the plain loop is one.
        precision: under the strategy; the plain loop is in fp32.
        losses: under the strategy, step by step.
        expected: by the plain loop.
        tolerance: the largest relative difference of a loss that rounding explains.
    """

    strategy: str
    device: str
    devices: int
    precision: str
    losses: list[float]
    expected: list[float]
    tolerance: float

    @property
    def step(self) -> int:
        """The step (1-based) that decides: the first that is too far off, or the farthest."""
        return 1 + next(
            (i for i, apart in enumerate(self._differences) if not apart <= self.tolerance),
            max(range(len(self._differences)), key=self._differences.__getitem__),
        )

    @property
    def loss(self) -> float:
        """Of that step, under the strategy."""
        return self.losses[self.step - 1]

    @property
    def expected_loss(self) -> float:
        """Of that step, by the plain loop."""
        return self.expected[self.step - 1]

    @property
    def apart(self) -> float:
        """The relative difference of the two; not a number where one of them is none."""
        return self._differences[self.step - 1]

    @property
    def agrees(self) -> bool:
        """Whether every step's losses are within the tolerance; one that is NaN is not."""
        return all(apart <= self.tolerance for apart in self._differences)

    @property
    def _differences(self) -> list[float]:
        pairs = zip(self.losses, self.expected, strict=True)
        return [abs(one - other) / max(abs(other), math.ulp(0.0)) for one, other in pairs]

    def __str__(self) -> str:
        processes = f"{self.devices} {self.device} process{'' if self.devices == 1 else 'es'}"
        if self.agrees:
            return (
                f"{len(self.losses)} steps under '{self.strategy}' on {processes} agree with plain "
                "PyTorch."
            )
        return (
            f"step {self.step} under '{self.strategy}' on {processes} has loss {self.loss!r}; "
            f"plain PyTorch has {self.expected_loss!r}, and {self.tolerance:g} is the most they "
            "may differ, relatively."
        )


class Refusal(BaseModel, frozen=True):
    """A strategy that does not train the small model on these devices.

    Attributes:
        reason: what it says.
    """

    reason: str

    def __str__(self) -> str:
        return self.reason
