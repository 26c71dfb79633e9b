"""What is left of a function that travels by value."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable

import pytest

from unipar.launch import travel


def made() -> Callable[[], Callable[[], None]]:
    def outer() -> Callable[[], None]:
        def inner() -> None:
            raise ValueError("the cause")

        return inner

    return outer


def test_tracebacks_have_the_files_and_lines_of_functions() -> None:
    """cloudpickle 3.1.3 takes them away, of functions within functions too."""
    arrived = pickle.loads(travel.dumps(made()))
    assert arrived.__code__ == made().__code__
    with pytest.raises(ValueError, match="the cause") as caught:
        arrived()()
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.line) == (__file__, 'raise ValueError("the cause")')
