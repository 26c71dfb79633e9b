"""Portable checkpoints: written under any strategy on N ranks, read under any other on M.

A checkpoint is a directory of safetensors files with checksums, sharded as the ranks held them,
and a manifest. The files carry the sharding metadata of PyTorch's distributed checkpoint, so
``torch.distributed.checkpoint.load`` with a ``HuggingFaceStorageReader`` reads them without unipar.
"""

from unipar.checkpoint.checking import verify
from unipar.checkpoint.convert import (
    CheckpointImporter,
    from_framework,
    from_safetensors,
    to_safetensors,
)
from unipar.checkpoint.copies import HostCopies
from unipar.checkpoint.decode import read_manifest
from unipar.checkpoint.describe import Description, describe
from unipar.checkpoint.directory import checkpoints, find, newest
from unipar.checkpoint.disks import Disks, find_disks, together
from unipar.checkpoint.hosts import put_together
from unipar.checkpoint.inference import load_model
from unipar.checkpoint.initial import StoredWeights, check_weights
from unipar.checkpoint.manifest import Manifest
from unipar.checkpoint.names import step_name, step_of
from unipar.checkpoint.peers import Peers, check_hosts, forget, kept_for_others
from unipar.checkpoint.remote import (
    RemoteDirectory,
    Unreachable,
    everything,
    fetched,
    located,
    tried,
)
from unipar.checkpoint.restore import load, load_newest
from unipar.checkpoint.retention import Retention, keep_newest
from unipar.checkpoint.save import (
    PendingSave,
    save,
    save_async,
    save_weights,
    save_where_room,
    wait_for_pending,
)
from unipar.checkpoint.uploads import Uploads

__all__ = [
    "CheckpointImporter",
    "Description",
    "Disks",
    "HostCopies",
    "Manifest",
    "Peers",
    "PendingSave",
    "RemoteDirectory",
    "Retention",
    "StoredWeights",
    "Unreachable",
    "Uploads",
    "check_hosts",
    "check_weights",
    "checkpoints",
    "describe",
    "everything",
    "fetched",
    "find",
    "find_disks",
    "forget",
    "from_framework",
    "from_safetensors",
    "keep_newest",
    "kept_for_others",
    "load",
    "load_model",
    "load_newest",
    "located",
    "newest",
    "put_together",
    "read_manifest",
    "save",
    "save_async",
    "save_weights",
    "save_where_room",
    "step_name",
    "step_of",
    "to_safetensors",
    "together",
    "tried",
    "verify",
    "wait_for_pending",
]
