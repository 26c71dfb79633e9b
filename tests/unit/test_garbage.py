"""The collector is left out for the length of a block, and only there."""

from __future__ import annotations

import gc

import pytest

from unipar.utils.garbage_collection import no_collection


def test_nothing_is_collected_in_the_block_and_as_before_after_it() -> None:
    assert gc.isenabled()
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_import_that_fails_leaves_it_on() -> None:
    with pytest.raises(ModuleNotFoundError), no_collection():
        import unipar.nothing_of_this_name  # noqa: F401  # pyright: ignore
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
