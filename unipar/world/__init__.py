"""The processes of a run: where each stands, how they meet, and the core's own collectives."""

from __future__ import annotations

from unipar.world.placement import Placement
from unipar.world.processes import Flag, Gathering, LossReduction, World, join, joined

__all__ = ["Flag", "Gathering", "LossReduction", "Placement", "World", "join", "joined"]
