"""A loss of what a rank has of a divided layer is refused; one of what is whole is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unipar.engine import WholeLosses
from unipar.errors import ConfigError


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.column, self.row = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inside = self.column(self.embed(x)).relu()
        # Changed in place, as a residual may be.
        return self.row(inside).mul_(2.0), inside


@pytest.fixture
def model() -> Divided:
    return Divided()


@pytest.fixture
def check(model: Divided) -> WholeLosses:
    parts = {"column.weight": model.column.weight, "row.weight": model.row.weight}
    return WholeLosses(parts, [model.embed, model.row], "zero2")


def test_what_is_whole_may_be_used_in_any_way(model: Divided, check: WholeLosses) -> None:
    output, inside = model(torch.randn(2, 3))
    whole = output.square().sum() + model.embed.weight.sum() + model.row.bias.norm()
    check(whole + inside.detach().sum() + model.row.weight.detach().norm())


@pytest.mark.parametrize("name", ["inside", "column.weight", "row.weight"])
def test_what_is_of_a_part_is_refused(name: str, model: Divided, check: WholeLosses) -> None:
    output, inside = model(torch.randn(2, 3))
    used = inside if name == "inside" else model.get_parameter(name)
    named = name if name != "inside" else "column.weight"
    with pytest.raises(ConfigError, match=f"zero2: the loss depends on '{named}'.*holds a part"):
        check(output.sum() + 0.1 * used.square().sum())


def test_it_leaves_nothing_on_the_module(model: Divided, check: WholeLosses) -> None:
    check.close()
    with pytest.raises(ConfigError, match="holds a part"):
        check(model(torch.randn(2, 3))[0].sum())


def test_of_a_stage_everything_but_its_output_is_refused() -> None:
    stage = Divided()
    check = WholeLosses(dict(stage.named_parameters()), [stage], "hybrid")
    output, _ = stage(torch.randn(2, 3))
    check(output.square().mean())
    with pytest.raises(ConfigError, match=r"hybrid: the loss depends on 'embed\.weight'"):
        check(output.square().mean() + stage.embed.weight.norm())
