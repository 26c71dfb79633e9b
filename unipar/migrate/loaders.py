"""The data that the training loop goes over."""

from __future__ import annotations

from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan

LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
SAMPLER = (
    "torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler"
)  # fmt: skip


def rewrite_samplers(plan: Plan) -> None:
    """Let samplers ask the run which share of the data is this rank's."""
    for source, call in plan.calls(*SAMPLER):
        hidden = next((one for one in call.args if one.star), None)
        if hidden is not None:
            plan.refuse(
                call,
                f"which ranks share the data may be hidden in `{source.code(hidden)}`.",
                "Write the arguments out: num_replicas=..., rank=...",
            )
            continue
        given = [
            one for position, one in enumerate(call.args)
            if (one.keyword is not None and one.keyword.value in ("num_replicas", "rank"))
            or (one.keyword is None and position in (1, 2))
        ]  # fmt: skip
        for one in given:
            name = one.keyword.value if one.keyword else ("num_replicas", "rank")[
                list(call.args).index(one) - 1]  # fmt: skip
            value = "data_size" if name == "num_replicas" else "data_rank"
            plan.replace(one.value, f"script.world().{value}")
        if not given and call.args:
            last = call.args[-1]
            plan.replace(
                last, last,
                ", num_replicas=script.world().data_size, rank=script.world().data_rank",
            )  # fmt: skip
        if constant(argument(call, None, "drop_last")) is True:
            plan.tell(call, "drop_last leaves samples out of each epoch, as before.")
