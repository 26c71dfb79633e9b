"""Putting a checkpoint together from what the hosts of a run hold of it, on disks and in memory."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from unipar.checkpoint.checking import verify
from unipar.checkpoint.decode import read_manifest
from unipar.checkpoint.directory import candidates, publish
from unipar.checkpoint.disks import Disks, together
from unipar.checkpoint.files import digest
from unipar.checkpoint.manifest import MANIFEST
from unipar.checkpoint.names import TEMPORARY, step_name
from unipar.checkpoint.pieces import Pieces, pieces
from unipar.errors import CheckpointError
from unipar.world import World

logger = logging.getLogger("unipar")

_Key: TypeAlias = tuple[int, str]
"""The step of a checkpoint, and the digest of its manifest: a step may have been saved twice."""


@dataclass(frozen=True)
class _Held:
    """What a host holds of a checkpoint.

    Attributes:
        num_files: how many files the whole has.
        sizes: the bytes of each that is here.
        on_disk: whether the directory itself has all of them.
    """

    num_files: int
    sizes: Mapping[str, int]
    on_disk: bool


def put_together(directory: Path, memory: Path | None, disks: Disks, world: World) -> int | None:
    """Give every disk the whole of the newest checkpoint that hosts hold between them. Collective.

    What a host lacks comes from another one that has it.

    Args:
        directory: of the checkpoints, on each host's disk.
        memory: where this host keeps files of others, if it does.
        disks: that ``directory`` lies on.
        world: the run's processes.

    Returns:
        its step; ``None`` where hosts have no checkpoint between them, or one that cannot be put
        together, which is logged.
    """
    hosts = sorted(set(disks.writers))
    takes_part = world.rank in hosts
    held, paths = _look(directory, memory) if takes_part else ({}, {})
    told = world.gather(held)
    key = _newest([told[host] for host in hosts])
    if key is None:
        return None
    holders = {host: told[host][key] for host in hosts if key in told[host]}
    if len(holders) == len(hosts) and all(one.on_disk for one in holders.values()):
        return key[0]
    group: Any = None
    if len(hosts) > 1:
        timeout = timedelta(seconds=world.placement.timeout)
        group = dist.new_group(hosts, backend="gloo", timeout=timeout)
    final = directory / step_name(key[0])
    partial = directory / f"{TEMPORARY}{final.name}-gathered"
    error: str | None = None

    def fill() -> None:
        nonlocal error
        error = _fill(partial, paths.get(key, {}), holders, world.rank, group)

    together(world, fill if takes_part else None)
    if group is not None:
        dist.destroy_process_group(group)
    error = next(filter(None, world.gather(error)), None)
    if error is None:
        together(world, (lambda: publish(partial, final)) if takes_part else None)
        logger.info("step %d was put together from what hosts hold of it", key[0])
        return key[0]
    if takes_part:
        shutil.rmtree(partial, ignore_errors=True)
    if world.is_main:
        logger.warning("step %d cannot be put together from what hosts hold: %s", key[0], error)
    return None


def _look(
    directory: Path, memory: Path | None
) -> tuple[dict[_Key, _Held], dict[_Key, dict[str, Path]]]:
    """What is here of each checkpoint, and where."""
    wholes: dict[_Key, dict[str, int]] = {}
    paths: dict[_Key, dict[str, Path]] = {}
    on_disk: dict[_Key, int] = {}
    for place in filter(None, (directory, memory)):
        for path in candidates(place):
            try:
                manifest = read_manifest(path)
                key = manifest.step, digest((path / MANIFEST).read_bytes())
            except (CheckpointError, OSError):
                # Whatever reads checkpoints says it; here another host's may do.
                continue
            sizes = {name: info.size for name, info in manifest.files.items()}
            wholes[key] = sizes | {MANIFEST: (path / MANIFEST).stat().st_size}
            here = paths.setdefault(key, {})
            for name, size in wholes[key].items():
                if (path / name).is_file() and (path / name).stat().st_size == size:
                    here.setdefault(name, path / name)
            if place == directory:
                on_disk[key] = len(here)
    held = {
        key: _Held(
            len(wholes[key]),
            {name: wholes[key][name] for name in here},
            on_disk.get(key) == len(wholes[key]),
        )
        for key, here in paths.items()
    }
    return held, paths


def _newest(told: Sequence[Mapping[_Key, _Held]]) -> _Key | None:
    """The newest checkpoint of which hosts hold every file between them."""
    for key in sorted({key for held in told for key in held}, reverse=True):
        holders = [held[key] for held in told if key in held]
        if len({name for one in holders for name in one.sizes}) == holders[0].num_files:
            return key
    return None


def _fill(
    partial: Path,
    own: Mapping[str, Path],
    holders: Mapping[int, _Held],
    rank: int,
    group: Any,
) -> str | None:
    """Make the whole checkpoint at ``partial``, with the other hosts; what went wrong."""
    sizes = {name: size for one in holders.values() for name, size in one.sizes.items()}
    moved = Pieces()
    with moved.kept(partial):
        shutil.rmtree(partial, ignore_errors=True)
        for name, path in own.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            _link(path, partial / name)
    hosts = 1 if group is None else dist.get_world_size(group)
    order = {name: place for place, name in enumerate(sorted(sizes))}
    for name, start, length in pieces(sizes):
        have = sorted(host for host, one in holders.items() if name in one.sizes)
        if len(have) == hosts:
            continue
        # In turn, so that no host sends all that several have.
        source = have[order[name] % len(have)]
        if rank == source:
            piece = moved.read(own[name], start, length)
        else:
            piece = torch.empty(length, dtype=torch.uint8)
        if length:
            dist.broadcast(piece, source, group=group)
        if name not in own:
            moved.take(partial / name, piece)
    if moved.error is None:
        try:
            verify(partial)
        except CheckpointError as error:
            return str(error)
    return moved.error


def _link(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except OSError:
        # Memory is another file system, and not all know links.
        shutil.copyfile(path, to)
