"""Whether ranks step alike: by the same hyperparameters, passes and weights."""

from __future__ import annotations

from torch.optim import Optimizer

from unipar.engine.alike import fingerprint, refuse_unlike
from unipar.engine.reducer import Reducer
from unipar.engine.replicas import Replicas
from unipar.world import World


class Agreement:
    """What ranks are to have in common in a step, as one number that goes with its loss.

    Nobody waits for another rank where they do.

    Args:
        optimizer: of the engine; ``None`` where nothing steps.
        world: the joined processes.
        reducer: the engine's, which may keep a trail of passes.

    Attributes:
        replicas: looks at what each rank has whole; ``None`` where nobody does.
    """

    def __init__(self, optimizer: Optimizer | None, world: World, reducer: Reducer) -> None:
        self.replicas: Replicas | None = None
        self._optimizer = optimizer if world.size > 1 else None
        self._world, self._reducer = world, reducer
        self._late = self._looked_at_late = 0

    def fingerprint(self, steps: int) -> int:
        """Return the number: of hyperparameters, and of those that :meth:`note_late` has noted.

        And of what passes came to since the last one, and of what each rank has whole, where that
        has to be alike.

        Args:
            steps: how many were taken before this one.
        """
        if self._optimizer is None:
            return 0
        before, self._late = self._late, 0
        # Of several passes that seem to be a step's last, the first has it.
        self._looked_at_late = before or self._looked_at_late
        if self._reducer.trail is not None:
            before = hash((before, self._reducer.trail.take()))
        if self.replicas is not None:
            before = hash((before, self.replicas.take(steps)))
        return fingerprint(self._optimizer, before)

    def note_step(self) -> None:
        """The optimizer has stepped."""
        if self.replicas is not None:
            self.replicas.note_step()

    def note_late(self) -> None:
        """Note hyperparameters as they are after a step's loss has gone, for the next one's."""
        if self._optimizer is not None:
            self._late = fingerprint(self._optimizer)

    def refuse(self) -> None:
        """Say what ranks do not have in common. Collective.

        Raises:
            ConfigError: they may not go on with it.
        """
        assert self._optimizer is not None
        self.refuse_passes()
        stepped_unlike = len(set(self._world.gather(self._looked_at_late))) > 1
        explained = not stepped_unlike and self.replicas is not None and self.replicas.explain()
        refuse_unlike(self._optimizer, self._world, explained=explained)

    def refuse_passes(self) -> None:
        """Refuse passes that came to other parts of the model on other ranks. Collective."""
        if self._reducer.trail is not None:
            self._reducer.trail.refuse_unlike()

    def forget(self) -> None:
        """Begin another step."""
        self._looked_at_late = 0
