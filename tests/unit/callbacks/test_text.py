"""Numbers as people read them."""

from __future__ import annotations

import pytest

from unipar.callbacks import text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (0.125, "0.125"),
        (9.5, "9.5"),
        (950, "950"),
        (999.9, "1.0k"),
        (12_345, "12.3k"),
        (1_234_567, "1.2M"),
        (7e9, "7.0G"),
    ],
)
def test_count(value, expected):
    assert text.count(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 B"),
        (512 * 2**10, "512 KiB"),
        (2**29, "512 MiB"),
        (1000 * 2**20, "1.0 GiB"),
        (80 * 2**30, "80.0 GiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_memory(value, expected):
    assert text.memory(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03"), (273906, "3d 04:05:06")],
)
def test_duration(value, expected):
    assert text.duration(value) == expected
