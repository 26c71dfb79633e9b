"""How hypothesis runs here."""

from __future__ import annotations

from hypothesis import settings

# No time limit on an example: the machine that runs the tests has other work too.
settings.register_profile("unipar", deadline=None, max_examples=50)
settings.load_profile("unipar")
