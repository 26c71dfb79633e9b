"""Files and trackers of an ``Accelerator``."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from unipar.compat.accelerate import checkpoints, files
from unipar.compat.accelerate.settings import Settings
from unipar.compat.accelerate.tracking import GeneralTracker, Trackers
from unipar.compat.accelerate_names import refuse
from unipar.compat.models import PreparedModel
from unipar.compat.run import current
from unipar.errors import ConfigError


class Keeping(Settings):
    """What is kept of a run: weights, checkpoints, numbers."""

    _custom_objects: list[Any]
    _save_hooks: OrderedDict[int, Callable[..., Any]]
    _load_hooks: OrderedDict[int, Callable[..., Any]]
    _trackers: Trackers

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The module itself, as the strategy has made it.

        Args:
            model: that was prepared; another one comes back as it is.
            keep_fp32_wrapper: whether it goes on to compute in ``mixed_precision`` where it is
                called by itself, and to give fp32.
            keep_torch_compile: without effect: the strategy compiles what a module computes.
        """
        is_prepared = isinstance(model, PreparedModel)
        return model.bare_module(in_half=keep_fp32_wrapper) if is_prepared else model

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object on rank 0; the others go on.

        Raises:
            ConfigError: it is a part of what ranks divide.
        """
        files.check_whole(obj, self._models)
        if self.is_main_process:
            files.write(obj, f, safe=safe_serialization)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """A model's state dict at full shapes. Collective where ranks divide it.

        Where they do, only rank 0 has it, and the others get an empty one.
        """
        if isinstance(model, PreparedModel):
            return model.whole_state_dict()
        return model.state_dict()

    def save_model(
        self,
        model: nn.Module,
        save_directory: Any,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights, at full shapes. Collective."""
        state = self.get_state_dict(model)
        if self.is_main_process:
            directory = Path(save_directory)
            files.write_model(state, directory, max_shard_size, safe=safe_serialization)
        self.wait_for_everyone()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have the ``state_dict()`` of these in checkpoints too.

        Raises:
            ConfigError: one has none.
        """
        for one in objects:
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise ConfigError(
                    f"register_for_checkpointing was given a {type(one).__name__}, which has no "
                    "state_dict() and load_state_dict(). Define them."
                )
        self._custom_objects += objects

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have ``hook(models, weights, output_dir)`` called in each :meth:`save_state`.

        Weights that it takes out of the list are in the checkpoint nevertheless.

        Raises:
            ConfigError: the strategy divides the run's state.
        """
        return self._hooked(self._save_hooks, hook, "register_save_state_pre_hook(…)")

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have ``hook(models, input_dir)`` called in each :meth:`load_state`.

        Models that it takes out of the list keep the weights that it has given them.

        Raises:
            ConfigError: the strategy divides the run's state.
        """
        return self._hooked(self._load_hooks, hook, "register_load_state_pre_hook(…)")

    def _hooked(
        self, hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any], call: str
    ) -> RemovableHandle:
        if self._session.capabilities.sharded:
            refuse(call)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Write a checkpoint of everything, which any strategy reads. Collective.

        Returns:
            The directory.
        """
        project = self.project_configuration
        place = checkpoints.place_to_save(project, output_dir, self._session)
        if self._save_hooks:
            # Rank 0 may still be counting those that are numbered.
            self.wait_for_everyone()
            place.mkdir(parents=True, exist_ok=True)
            weights = [self.get_state_dict(one) for one in self._models]
            for hook in self._save_hooks.values():
                hook(self._models, weights, str(place))
        checkpoints.save(place, self._session, self.step, self._schedulers, self._custom_objects)
        project.iteration += 1
        return str(place)

    def load_state(
        self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any
    ) -> None:
        """Take over what :meth:`save_state` has written. Collective."""
        place = checkpoints.place_to_load(self.project_configuration, input_dir)
        models = [*self._models]
        for hook in self._load_hooks.values():
            hook(models, str(place))
        left_out = [one for one in self._models if one not in models]
        states = [copy.deepcopy(one.state_dict()) for one in left_out]
        self.step = checkpoints.load(place, self._session, self._schedulers, self._custom_objects)
        for model, state in zip(left_out, states, strict=True):
            model.load_state_dict(state)

    @property
    def log_with(self) -> list[str]:
        """The names of the trackers that were asked for."""
        return self._trackers.names

    @property
    def trackers(self) -> list[GeneralTracker]:
        """Those that are open on this rank."""
        return self._trackers.open

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Open the trackers."""
        self._trackers.start(project_name, config, self._session.world, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name."""
        found = self._trackers.find(name)
        return getattr(found, "tracker", found) if unwrap else found

    def log(self, values: Any, step: int | None = None, log_kwargs: Any = None) -> None:
        """Give numbers to the trackers."""
        for one in self._trackers.open:
            one.log(values, step=step, **(log_kwargs or {}).get(one.name, {}))

    def end_training(self) -> None:
        """Close the trackers, and end the run. Collective."""
        self._trackers.close()
        current.close()
