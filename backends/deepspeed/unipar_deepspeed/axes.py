"""DeepSpeed's own ways to divide a model or a batch: those that are refused, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unipar_deepspeed.options import ZeROOptions

NOT_OFFERED = {
    "pp": "DeepSpeed's pipeline engine runs a PipelineModule, a model that is written as a list of "
    "layers, and no model as it is. Use 'mesh:pp=2', which cuts an unchanged model into stages",
    "cp": "DeepSpeed divides sequences (Ulysses) only for attention that is its own or that it "
    "registers with transformers, and by 'sequence_parallel_size' alone the stages 0 to 2 leave "
    "gradients of the parts unsummed without a word (0.19.8). It is not proved here. Use "
    "'mesh:cp=2,cp_kind=ulysses', the same exchange of positions for heads",
    "ep": "DeepSpeed's experts are layers of its own (deepspeed.moe.layer.MoE), with which a model "
    "has to be rewritten, and its AutoEP, which puts such in the place of those of transformers, "
    "is not proved here. Use 'mesh:ep=2', which divides the experts of an unchanged model",
}
"""Axes that one may ask for by the names that ``mesh`` has for them, and what to use."""

NATIVE = {
    "tensor_parallel": "the option tp",
    "pipeline": "no option: pp is not offered",
    "sequence_parallel_size": "no option: cp is not offered",
    "data_parallel_size": "no option: cp is not offered",
    "expert_parallel": "no option: ep is not offered",
}
"""Keys of DeepSpeed's own configuration that arrange ranks, and what they follow from."""


def refuse_axes(given: Mapping[str, Any]) -> None:
    """Refuse axes that DeepSpeed has and that are not offered here.

    Raises:
        ValueError: one was asked for; it says why not, and what to use.
    """
    for axis, why in NOT_OFFERED.items():
        if axis in given:
            raise ValueError(f"{axis}={given[axis]} cannot be had: {why}")


def check_tensor_parallel(options: ZeROOptions, stage: int) -> None:
    """Refuse what tensor parallelism is not proved with.

    Raises:
        ValueError: it was asked for together with that.
    """
    if options.tp == 1:
        return
    if stage == 0:
        raise ValueError(
            f"tp={options.tp} is not proved with stage 0. Set stage=1 or more, or use "
            f"'mesh:tp={options.tp}'"
        )
    for name in ("offload_optimizer", "offload_parameters", "nvme_path"):
        if getattr(options, name):
            raise ValueError(
                f"{name} is not proved with tp={options.tp}. Leave one of them out, or use "
                f"'mesh:tp={options.tp},cpu_offload=true'"
            )
