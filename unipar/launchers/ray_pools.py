"""Nodes of several kinds in one run on Ray: which labels the nodes of each kind have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, field_validator

from unipar.errors import ConfigError
from unipar.utils.numbers import PositiveInt


class RayPool(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Nodes of one kind."""

    nodes: PositiveInt
    """How many of the run's nodes are of this kind."""
    labels: dict[str, str]
    """Labels of Ray that each of them has, such as `ray.io/accelerator-type: H100`, or what
    `ray start --labels` was given."""

    @field_validator("labels")
    @classmethod
    def _plain(cls, given: dict[str, str]) -> dict[str, str]:
        if not given:
            raise ValueError("give the labels that tell these nodes from others")
        for key, value in given.items():
            # Ray's selectors know more, by which nodes could not be counted before the run starts.
            if value.startswith("!") or "(" in value:
                raise ValueError(f"{key}: give one value, '{value}' is a condition")
        return given

    def __str__(self) -> str:
        return " and ".join(f"{key}={value}" for key, value in self.labels.items())


def selectors(pools: Sequence[RayPool]) -> list[dict[str, str]] | None:
    """What Ray Train takes: the labels of each worker's node, in the order of ranks."""
    return [dict(pool.labels) for pool in pools for _ in range(pool.nodes)] or None


def check_pools(pools: Sequence[RayPool], num_nodes: int) -> None:
    """Refuse pools that are not as many nodes as the run has."""
    total = sum(pool.nodes for pool in pools)
    if pools and total != num_nodes:
        raise ConfigError(
            f"launcher 'ray': pools have {total} nodes together, and num_nodes={num_nodes}. Set "
            f"num_nodes={total}, or change the nodes of the pools."
        )


def check_nodes(pools: Sequence[RayPool], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse pools whose nodes are not there, for which Ray would wait for ever.

    Args:
        pools: what the run asks for.
        nodes: of the cluster that have room, as ``ray.nodes()`` has them.
    """
    for pool in pools:
        found = sum(pool.labels.items() <= node["Labels"].items() for node in nodes)
        if found < pool.nodes:
            has = "\n".join(
                f"  {node['NodeManagerHostname']}: "
                + ", ".join(f"{key}={value}" for key, value in sorted(node["Labels"].items()))
                for node in nodes
            )
            raise ConfigError(
                f"launcher 'ray': a pool asks for {pool.nodes} node(s) with {pool}, and of those "
                f"of the cluster that have room {found} have these labels:\n{has}\nCorrect the "
                "labels, or start nodes with them (`ray start --labels`)."
            )
