"""The bytes that a step keeps, as the table of the docs has them."""

from __future__ import annotations

import pytest

from measure.speed import activations

TENSOR = 4 * activations.ROWS * activations.LENGTH * activations.WIDTH
"""Bytes of a block's input."""


@pytest.fixture(scope="module")
def found() -> dict[str, activations.Kept]:
    return {name: activations.step(**asked) for name, asked in activations.SETTINGS.items()}


def per_block(found: dict[str, activations.Kept], name: str) -> float:
    """What each block keeps on the device, in tensors of the size of its input."""
    outside = found["`activation_offload=True`"].after_forward
    return (found[name].after_forward - outside) / TENSOR / activations.LAYERS


def test_less_is_kept_from_nothing_to_selective_to_full(
    found: dict[str, activations.Kept],
) -> None:
    nothing, selective, full, offload, both = found
    # Inputs of norms 2, of products 1 + 1 + 1 + 4, of attention 3, of the activation function 4;
    # and the scales of norms and attention.
    assert per_block(found, nothing) == pytest.approx(16, abs=0.1)
    # Its input, products 3 + 1 + 4 + 1, attention 1.
    assert per_block(found, selective) == pytest.approx(11, abs=0.1)
    assert per_block(found, full) == pytest.approx(1, abs=0.1)
    assert found[nothing].most > found[selective].most > found[full].most > found[offload].most
    assert found[both].most < found[full].most


def test_what_is_offloaded_is_on_the_host_and_nothing_of_it_on_the_device(
    found: dict[str, activations.Kept],
) -> None:
    nothing, _, full, offload, both = found
    # The scales of norms are moved, too.
    for kept, left in ((nothing, offload), (full, both)):
        moved = found[kept].after_forward - found[left].after_forward
        assert found[left].on_host == pytest.approx(moved, rel=0.001)


def test_selective_repeats_no_product(found: dict[str, activations.Kept]) -> None:
    nothing, selective, full, *_ = found
    assert found[selective].operations == found[nothing].operations < found[full].operations
