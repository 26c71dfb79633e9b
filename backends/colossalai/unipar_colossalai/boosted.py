"""What Colossal-AI makes of a module, as a loss function sees it."""

from __future__ import annotations

from unipar.engine import SeenAsModule


class Boosted(SeenAsModule):
    """Calls what Colossal-AI has wrapped around the user's module."""

    passed_by = "what Colossal-AI has wrapped around the model"
