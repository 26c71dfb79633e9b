"""Checkpoints and weights of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unipar import checkpoint
from unipar.compat.deepspeed_config import zero_stage
from unipar.compat.deepspeed_kept import COUNTS, read_kept, write_kept
from unipar.compat.deepspeed_names import refuse
from unipar.compat.readable import check_readable
from unipar.compat.run import current, own_randomness
from unipar.engine import COMPUTE_DTYPES
from unipar.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from unipar.compat.deepspeed.parts import EngineModel

log = logging.getLogger("unipar")


class Keeping(nn.Module):
    """What is kept of an engine."""

    module: nn.Module
    config: dict[str, Any]
    lr_scheduler: Any
    global_steps: int
    train_batch_size: Callable[[], int]
    _model: EngineModel
    _precision: str

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint that any strategy and number of ranks loads. Collective.

        Args:
            save_dir: holds checkpoints, each in a directory of its tag.
            tag: left out: ``global_step`` and the number of updates.
            client_state: kept beside it; plain values and tensors. Rank 0's, or each rank's where
                the configuration asks for stage 3 of ZeRO.
            save_latest: whether it is what ``load_checkpoint`` takes without a tag.
            exclude_frozen_parameters: refused.

        Raises:
            CheckpointError: it cannot be written.
            ConfigError: ``client_state`` holds other objects.
        """
        if exclude_frozen_parameters:
            refuse("save_checkpoint(exclude_frozen_parameters=True)")
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        scheduler = self.lr_scheduler
        own = {
            "client_state": dict(client_state or {}),
            "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
            **{key: getattr(self, key) for key in COUNTS},
        }
        check_readable(own["client_state"], "save_checkpoint: client_state")
        session, world = current.session, current.world()
        assert session is not None
        path = checkpoint.save(
            Path(save_dir) / name, self._engines(), world, step=self.global_steps,
            progress={"seed": 0}, strategy=session.strategy.name,
        )  # fmt: skip
        # DeepSpeed 0.19.8, runtime/engine.py, _get_ckpt_name: then each rank has a file.
        each = zero_stage(self.config) == 3
        if each or world.is_main:
            write_kept(path, world.rank, own, ranks=world.size if each else 1)
        if world.is_main and save_latest:
            (Path(save_dir) / "latest").write_text(name)
        world.barrier()
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Take over a checkpoint of :meth:`save_checkpoint`, or of ``unipar convert``. Collective.

        Args:
            load_dir: holds checkpoints.
            tag: which; left out: the latest.
            load_module_strict: has to be true.
            load_optimizer_states: whether more than weights is restored.
            load_lr_scheduler_states: whether the scheduler is set to where it was.
            load_module_only: whether weights alone are loaded; scheduler and counts stay.
            custom_load_fn: refused.

        Returns:
            Where it is, and the ``client_state`` that this rank has saved, or rank 0 where this
            one has none in it; twice ``None`` where there is no checkpoint.

        Raises:
            CheckpointError: it is of another program, or DeepSpeed's own; or of none of this
                face's, and more than weights is asked for.
        """
        if not load_module_strict:
            refuse("load_checkpoint(load_module_strict=False)")
        if custom_load_fn is not None:
            refuse("load_checkpoint(custom_load_fn=…)")
        world = current.world()
        directory = world.broadcast(_asked_for(Path(load_dir), tag))
        if directory is None:
            if world.is_main:
                log.warning(
                    "load_checkpoint(%s): there is no file 'latest' in it, and no tag was given, "
                    "so that nothing is loaded, as in DeepSpeed: training begins anew.", load_dir
                )  # fmt: skip
            return None, None
        if any(directory.glob("*model_states.pt")):
            raise CheckpointError(
                f"{directory} is DeepSpeed's own checkpoint. Convert it: unipar convert --from "
                f"deepspeed {directory} {directory}-unipar, and load what that writes: "
                f"engine.load_checkpoint('{directory}-unipar')."
            )
        path = checkpoint.find(directory)
        kept = read_kept(path, world)
        if kept is None and not load_module_only:
            raise CheckpointError(
                f"{path} has no engine.pt: neither engine.save_checkpoint nor unipar convert "
                "--from deepspeed has written it, and nothing tells of steps and client_state. "
                "Convert what DeepSpeed itself has saved anew; or load weights alone: "
                "load_module_only=True."
            )
        everything = load_optimizer_states and not load_module_only
        scheduled = load_lr_scheduler_states and not load_module_only
        if scheduled and self.lr_scheduler is not None and kept and kept["lr_scheduler"] is None:
            raise CheckpointError(
                f"{path} was saved without a scheduler, and this engine has one, which would begin "
                "anew. Say load_lr_scheduler_states=False, and it does."
            )
        # DeepSpeed leaves a script's random numbers as they are.
        with own_randomness(world.device):
            found = checkpoint.load(
                path, self._engines(), world, optimizer=everything, scheduler=False
            )
        if everything and found.weights_only and world.is_main:
            log.warning("%s holds weights alone: the optimizer starts over.", path)
        if kept is None:
            return str(directory), {}
        if kept["global_samples"] is None:
            # Files of older DeepSpeeds do not tell, and newer ones take this.
            kept["global_samples"] = kept["global_steps"] * self.train_batch_size()
        for key in () if load_module_only else COUNTS:
            setattr(self, key, kept[key])
        if scheduled and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(kept["lr_scheduler"])
        return str(directory), kept["client_state"]

    def _engines(self) -> dict[str, Any]:
        training = self._model.training_by
        if training is None:
            raise ConfigError(
                "this engine has no optimizer, so there is nothing to go on with. Save "
                "engine.module.state_dict()."
            )
        # Whichever it is of several, it is saved as the only one.
        return {"model": training.engine}

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's state dict at full shapes. Collective where ranks divide it.

        Where they do, only rank 0 has it, and the others get an empty one.
        """
        state = self._model.whole_state_dict()
        # The empty one of another rank says so itself where it is read.
        if exclude_frozen_parameters and state:
            frozen = {n for n, one in self.module.named_parameters() if not one.requires_grad}
            state = {name: one for name, one in state.items() if name not in frozen}
        if prefix and state:
            state = {f"{prefix}{name}": one for name, one in state.items()}
        if destination is None:
            return state
        destination.update(state)
        return destination

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None,
        fetch_z3_params: bool = False, z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:  # fmt: skip
        """Take over the weights below ``module``, where the strategy has no copies of them."""
        if custom_load_fn is not None:
            refuse("load_checkpoint(custom_load_fn=…)")
        self.module.load_state_dict(checkpoint["module"], strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model's weights in the run's precision, at full shapes. Collective."""
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        dtype = COMPUTE_DTYPES[self._precision] if self._precision != "fp32" else None  # pyright: ignore[reportArgumentType]
        if current.placement().rank == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            # DeepSpeed 0.19.8, _cast_module_mixed_precision of runtime/engine.py.
            buffers = {name for name, _ in self.module.named_buffers()}
            halved = {n: one.to(dtype) if one.is_floating_point() and n not in buffers else one
                      for n, one in state.items()}  # fmt: skip
            torch.save(halved, Path(save_dir) / save_filename)
        current.world().barrier()
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """:meth:`module_state_dict` on rank 0, which scripts for stage 3 save."""
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return state if current.placement().rank == 0 else None

    def destroy(self) -> None:
        """Let go of the engine, which trains no more; another may take its place."""
        training = self._model.training_by
        if training is not None and current.session is not None:
            name = training.engine.spec.name
            if current.session.engines.get(name) is training.engine:
                current.session.release(name)


def _asked_for(directory: Path, tag: str | int | None) -> Path | None:
    """Where a checkpoint is, by its tag, or the latest; or what ``unipar convert`` has written."""
    latest = directory / "latest"
    if tag is not None:
        return directory / str(tag)
    if latest.is_file():
        return directory / latest.read_text().strip()
    try:
        checkpoint.find(directory)
    except CheckpointError:
        return None
    return directory
