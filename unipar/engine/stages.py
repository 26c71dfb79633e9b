"""Several modules in one engine: the stages of a pipeline that one process has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import torch
from torch import nn


class Stages(nn.ModuleList):
    """Parts of one model, whose tensors go by the names that they have in the whole.

    Each part is a model of its own from which the layers of other stages are missing, as
    ``torch.distributed.pipelining`` takes them: ``layers.3.weight`` is called that in whichever
    stage it is. So optimizers, checkpoints and messages know one model.

    Args:
        stages: modules without a name in common, unless it is the same tensor.

    Raises:
        ValueError: two tensors have one name.
    """

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        super().__init__(stages)
        named = {
            (name, id(value))
            for stage in self
            for name, value in stage.state_dict(keep_vars=True).items()
        }
        counts = Counter(name for name, _ in named)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(
                f"two stages have different tensors named '{twice[0]}'. Let each keep the names of "
                "the whole model: delete the layers of other stages from a copy of it."
            )

    def __getattr__(self, name: str) -> Any:
        """Say why an attribute of the user's model is not here.

        Raises:
            AttributeError: it is none of this list's either.
        """
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(
                f"{error}. It holds the stages of a pipeline that this rank has, and no model as a "
                "whole: their layers go by the names that they have in the model. Take them from "
                "named_modules() (dict(engine.module.named_modules())['blocks.1']), "
                "named_parameters() or state_dict()."
            ) from None

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Yield the modules that names of parameters and buffers are made from."""
        memo = set() if memo is None else memo
        if self not in memo:
            # It has a mode, of training or evaluation, like any module.
            memo.add(self)
            yield prefix, self
        for stage in self:
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The states of all stages as one."""
        return {name: t for stage in self for name, t in stage.state_dict(*args, **kwargs).items()}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Give each stage its own of a state of all.

        Raises:
            RuntimeError: with ``strict``, a name is missing or unknown.
        """
        unknown = state_dict.keys() - self.state_dict().keys()
        if strict and unknown:
            raise RuntimeError(f"no stage has {', '.join(sorted(unknown))}.")
        for stage in self:
            own = {name: state_dict[name] for name in stage.state_dict() if name in state_dict}
            stage.load_state_dict(own, strict=strict, assign=assign)

    def forward(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        """Not for stages, which a schedule runs.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the stages of a pipeline are run by its schedule")
