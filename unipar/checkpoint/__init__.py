"""Portable checkpoints: written under any strategy, read under any other."""

from unipar.checkpoint.directory import Retention, checkpoints, find, newest
from unipar.checkpoint.load import load, load_model
from unipar.checkpoint.manifest import Manifest, read_manifest
from unipar.checkpoint.save import PendingSave, save, save_async, save_weights

__all__ = [
    "Manifest",
    "PendingSave",
    "Retention",
    "checkpoints",
    "find",
    "load",
    "load_model",
    "newest",
    "read_manifest",
    "save",
    "save_async",
    "save_weights",
]
