"""Loading weights into a bare model; no engine, no optimizer, no process group."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from unipar.checkpoint.decode import read_manifest
from unipar.checkpoint.initial import StoredWeights, pick_engine, read_any
from unipar.checkpoint.manifest import Manifest
from unipar.checkpoint.remote import fetched
from unipar.state import LocalState, named_weights
from unipar.strategy import ModelFactory, build_model
from unipar.utils.torch_versions import meta_device
from unipar.utils.urls import is_url
from unipar.world import Placement, World


def load_model(
    path: str | Path, model: nn.Module | ModelFactory, *, engine: str | None = None
) -> nn.Module:
    """Load a checkpoint's weights into a model, for inference.

    Args:
        path: a checkpoint, a directory of them (the newest is taken), the URL of either, or a file
            or directory of safetensors in the Hugging Face layout. Experts that have tensors of
            their own there, by the hub's names, fill a model that holds all of a layer in one.
        model: a module, or a function that builds one. A function is called under ``meta`` if all
            that the model holds is stored, so that its initialization costs nothing.
        engine: which engine's weights; needed only where several were saved.

    Returns:
        the module, its weights replaced in place.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model (differences are listed).
    """
    if is_url(path):
        with fetched(str(path), _weight_files) as copy:
            return _load(read_manifest(copy), model, engine)
    return _load(read_any(path), model, engine)


def _weight_files(manifest: Manifest) -> set[str]:
    engines = manifest.engines.values()
    tensors = (tensor for engine in engines for tensor in engine.weights.values())
    return {chunk.file for tensor in tensors for chunk in tensor.chunks}


def _load(manifest: Manifest, model: nn.Module | ModelFactory, engine: str | None) -> nn.Module:
    index = pick_engine(manifest, engine)
    module = model if isinstance(model, nn.Module) else _build(model)
    weights, aliases = named_weights(module)
    states = [LocalState.of(name, tensor) for name, tensor in weights.items()]
    StoredWeights(manifest, index, World(Placement())).fill(states, aliases)
    return module


def _build(factory: ModelFactory) -> nn.Module:
    with meta_device():
        module = build_model(factory)
    if _holds_more_than_weights(module):
        return build_model(factory)
    # Not ``to_empty``: it gives tied parameters storage of their own.
    made: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor, device="cpu")
                    made[id(tensor)] = (
                        nn.Parameter(empty, tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else empty
                    )
                held[name] = made[id(tensor)]  # pyright: ignore[reportArgumentType]
    return module


def _holds_more_than_weights(module: nn.Module) -> bool:
    """Whether the model computes tensors that no checkpoint holds, which meta leaves empty."""
    stored = {id(value) for value in module.state_dict(keep_vars=True).values()}
    for part in module.modules():
        if any(
            buffer is not None and id(buffer) not in stored for buffer in part._buffers.values()
        ):
            return True
        if any(isinstance(value, torch.Tensor) for value in vars(part).values()):
            return True
    return False
