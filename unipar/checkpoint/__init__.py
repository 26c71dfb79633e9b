"""Portable checkpoints: written under any strategy on N ranks, read under any other on M.

A checkpoint is a directory of safetensors files, sharded as the ranks held them, and a manifest
with checksums. The files carry the sharding metadata of PyTorch's distributed checkpoint, so
``torch.distributed.checkpoint.load`` with a ``HuggingFaceStorageReader`` reads them without unipar.
"""

from unipar.checkpoint.convert import (
    CheckpointImporter,
    from_framework,
    from_safetensors,
    to_safetensors,
)
from unipar.checkpoint.decode import read_manifest
from unipar.checkpoint.describe import Description, describe, verify
from unipar.checkpoint.directory import checkpoints, find, newest
from unipar.checkpoint.inference import load_model
from unipar.checkpoint.initial import StoredWeights, check_weights
from unipar.checkpoint.manifest import Manifest
from unipar.checkpoint.names import step_of
from unipar.checkpoint.restore import load, load_newest
from unipar.checkpoint.retention import Retention
from unipar.checkpoint.save import PendingSave, save, save_async, save_weights, wait_for_pending

__all__ = [
    "CheckpointImporter",
    "Description",
    "Manifest",
    "PendingSave",
    "Retention",
    "StoredWeights",
    "check_weights",
    "checkpoints",
    "describe",
    "find",
    "from_framework",
    "from_safetensors",
    "load",
    "load_model",
    "load_newest",
    "newest",
    "read_manifest",
    "save",
    "save_async",
    "save_weights",
    "step_of",
    "to_safetensors",
    "verify",
    "wait_for_pending",
]
