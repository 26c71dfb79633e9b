"""What a user may ask of ``mesh``: the sizes of its axes, and how each is used."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.utils.torch_versions import check_split_passes
from unipar_torch.fsdp import ShardingOptions
from unipar_torch.stage_orders import SPLITTING, ScheduleName, num_virtual

_BELONG = {
    "tp": ("sequence_parallel", "async_tp", "loss_parallel", "plan"),
    "cp": ("cp_kind", "sequence_dims"),
    "pp": ("schedule", "virtual_stages", "stages"),
    "ep": ("experts",),
}
"""Options that say how an axis is used, and nothing without it."""
_UNPROVED = (("pp", "cp"), ("pp", "ep"), ("cp", "ep"), ("tp", "ep"))
"""Axes that the conformance kit has not proved to train together as a plain loop does."""
_SHARDING = (*ShardingOptions.model_fields, "sharding")
"""Options that say how FSDP divides parameters."""


class MeshOptions(ShardingOptions):
    """Sizes of the axes, how each is used, and what ``fully_shard`` lets one tune."""

    strategy: ClassVar[str] = "mesh"

    dp_replicate: int = Field(
        default=1, ge=1, description="Copies of the sharded model, each on other samples."
    )
    dp_shard: int | None = Field(
        default=None,
        ge=1,
        description="Ranks on other samples that divide parameters, gradients and optimizer. "
        "Default: what the other axes leave of the processes.",
    )
    tp: int = Field(
        default=1, ge=1, description="Ranks that divide each layer, on the same samples."
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Between divided layers each rank of 'tp' has a part of the sequence.",
    )
    async_tp: bool = Field(
        default=False,
        description="With sequence_parallel and compile, on GPUs: sequences are exchanged while "
        "the matrix products that need them run.",
    )
    loss_parallel: bool = Field(
        default=False,
        description="In training each rank of 'tp' keeps its part of the logits, and cross-entropy "
        "is computed from the parts.",
    )
    plan: dict[str, str] | None = Field(
        default=None,
        description="Layers that 'tp' divides, and how: patterns of names, in which * stands for "
        "one part, to 'colwise', 'rowwise', 'colwise_gather_output', 'rowwise_split_input', "
        "'embedding_rowwise', 'embedding_colwise' or 'replicated_with_grad_allreduce'. Default: "
        "the model's own plan, or one found by tracing its blocks.",
    )
    pp: int = Field(
        default=1, ge=1, description="Ranks that have some of the layers each, as stages."
    )
    schedule: ScheduleName = Field(
        default="1f1b",
        description="In which order stages run their micro-batches: all forward passes first "
        "('gpipe'), a forward and a backward pass in turn ('1f1b'), the same with several stages "
        "on each rank ('interleaved'), or with two, and gradients of weights computed later than "
        "those of inputs ('zero-bubble', 'dualpipev').",
    )
    virtual_stages: int | None = Field(
        default=None,
        ge=1,
        description="Stages on each rank of 'pp'. Default: 2 where the schedule is 'interleaved'; "
        "other schedules have a number of their own.",
    )
    stages: tuple[tuple[str, ...], ...] | None = Field(
        default=None,
        description="Names of the modules of each stage, all blocks in their order; what two "
        "stages need is named in both. Default: as the model says, or by the order of its "
        "modules, such that the largest stage has the fewest parameters.",
    )
    cp: int = Field(
        default=1, ge=1, description="Ranks that hold a part of each sequence, of the same samples."
    )
    cp_kind: Literal["ring", "all_gather", "ulysses"] = Field(
        default="ring",
        description="How attention sees all of a sequence: keys and values go round a 'ring', or "
        "come all at once ('all_gather'); or ranks exchange positions for heads ('ulysses').",
    )
    sequence_dims: dict[str, int] | None = Field(
        default=None,
        description="Which dimension of which tensor of a batch is the sequence that 'cp' divides: "
        "keys of the batch, or places ('0') in a tuple. Default: dimension 1 of integer tensors of "
        "at least two dimensions, and of what has the same size there.",
    )
    ep: int = Field(
        default=1,
        ge=1,
        description="Ranks that divide the experts of each layer, among those on other samples: "
        "it divides dp_shard.",
    )
    experts: tuple[str, ...] | None = Field(
        default=None,
        description="Modules that hold the experts which 'ep' divides: patterns of names, in which "
        "* stands for one part. Default: those of the model's own plan, or those whose forward "
        "takes (hidden_states, top_k_index, top_k_weights).",
    )
    sharding: Literal["full", "grad_op"] = Field(
        default="full",
        description="'full' frees parameters after each use; 'grad_op' keeps them from forward to "
        "backward.",
    )

    @property
    def keeps_gathered(self) -> bool:
        return self.sharding == "grad_op"

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.pp * num_virtual(self.schedule, self.virtual_stages)

    def shards(self, layout: Layout) -> bool:
        """Whether FSDP divides parameters: among several ranks, or since an option of it is set."""
        return layout.dp_replicate * layout.fsdp > 1 or any(map(self._is_set, _SHARDING))

    def _is_set(self, option: str) -> bool:
        return getattr(self, option) != type(self).model_fields[option].default

    def check_stages(self, layout: Layout) -> None:
        """Refuse what does not go together in a pipeline, once its processes are known.

        Args:
            layout: how they are arranged.

        Raises:
            ConfigError: options of FSDP are set that nothing uses, or the schedule is none for it,
                or for this torch.
        """
        if layout.batch > 1:
            if self.schedule in SPLITTING:
                raise ConfigError(
                    f"mesh: schedule='{self.schedule}' with dp_shard={layout.dp_shard}, "
                    f"dp_replicate={layout.dp_replicate} is not built: it computes gradients of "
                    "weights when FSDP has let go of these. Set schedule='1f1b' or 'interleaved', "
                    f"or start {layout.pp * layout.tp} processes."
                )
            return
        if self.schedule in SPLITTING:
            check_split_passes(self.schedule)
        for option in _SHARDING:
            if self._is_set(option):
                raise ConfigError(
                    f"mesh: {option}={getattr(self, option)} says how ranks on other samples "
                    f"divide parameters, and all {layout.size} processes of this run are on the "
                    f"same samples (dp_replicate=1, dp_shard=1, pp={layout.pp}): each has its "
                    f"stages whole. Start {2 * layout.size} processes, or leave {option} out."
                )

    @model_validator(mode="after")
    def _axes_are_used(self) -> MeshOptions:
        for axis, options in _BELONG.items():
            if getattr(self, axis) > 1:
                continue
            for option in options:
                if option in self.model_fields_set and getattr(self, option) not in (None, False):
                    raise ValueError(
                        f"{option} says how the ranks of {axis} are used, and {axis} is 1. Set "
                        f"{axis}=2 or more, or leave {option} out"
                    )
        return self

    @model_validator(mode="after")
    def _mixes_are_proved(self) -> MeshOptions:
        for one, other in _UNPROVED:
            if getattr(self, one) > 1 and getattr(self, other) > 1:
                raise ValueError(
                    f"{one}={getattr(self, one)} with {other}={getattr(self, other)} is not built. "
                    "Leave one of them out"
                )
        if self.pp > 1:
            num_virtual(self.schedule, self.virtual_stages)
            for option in ("cpu_offload", "sequence_parallel", "loss_parallel"):
                if getattr(self, option):
                    raise ValueError(f"{option} with pp is not built. Leave one of them out")
        if self.async_tp and not self.sequence_parallel:
            raise ValueError(
                "async_tp is about exchanges of divided sequences. Set sequence_parallel=true, or "
                "leave async_tp out"
            )
        if self.loss_parallel and self.cp > 1:
            raise ValueError("loss_parallel with cp is not built. Leave one of them out")
        return self
