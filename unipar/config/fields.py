"""The fields of a run, typed and documented; pydantic at the edge, plain values inside."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    FieldSerializationInfo,
    SerializeAsAny,
    Tag,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from unipar.config.merging import merge
from unipar.config.optimizers import (
    BY_NAME,
    GROUPED,
    OptimizerConfig,
    OptimizerGroups,
    SchedulerConfig,
    form,
)
from unipar.data import check_shares
from unipar.errors import ConfigError
from unipar.launchers import LauncherOptions
from unipar.launchers import registry as launchers
from unipar.strategy import (
    ActivationCheckpointing,
    DropoutSeed,
    LossScale,
    OnNaN,
    Precision,
    SelfTest,
    StrategyOptions,
)
from unipar.strategy.registry import as_mapping
from unipar.utils.devices import device_range
from unipar.utils.documents import Document, KeyPath, read_document
from unipar.utils.matmul_precision import MatmulPrecision
from unipar.utils.numbers import NonNegativeInt, PositiveFloat, PositiveInt
from unipar.utils.signals import GRACE_PERIOD
from unipar.utils.urls import URL
from unipar.utils.validation import check_plain, config_error, refuse_objects

IMPORT_KEYS = ("model", "data", "eval_data", "loss", "metrics", "predict", "callbacks")
"""What a run file names by import path, and a call of ``fit`` gives as arguments."""


CHECKPOINTING = ("off", "full", "selective")
"""The words for ``activation_checkpointing``; any other is the name of a class."""

_LONGEST_NAME = 255
_LONGEST_PATH = 4000
"""Bytes; of the 4096 of Linux the names inside of a run's directory need some."""

_ModelT = TypeVar("_ModelT", bound=BaseModel)


class Unset(Enum):
    """The type of :data:`UNSET`."""

    UNSET = "unset"


UNSET = Unset.UNSET
"""An argument that was not given, where ``None`` would mean something."""


def _possible(path: Path) -> Path:
    """Refuse what no file system could hold; what one does not hold yet is made later."""
    try:
        names = [os.fsencode(name) for name in path.absolute().parts]
    except UnicodeEncodeError as error:
        raise ValueError(f"{str(path)[:60]!r} is no path: {error.reason}") from error
    if any(b"\0" in name for name in names):
        raise ValueError(f"{str(path)[:60]!r} is no path: it holds a NUL character")
    longest = max(names, key=len, default=b"")
    if len(longest) > _LONGEST_NAME or sum(len(name) + 1 for name in names) > _LONGEST_PATH:
        raise ValueError(
            f"the path {str(path)[:60]!r}… is too long: a name has at most {_LONGEST_NAME} bytes, "
            f"and a whole path {_LONGEST_PATH}"
        )
    return path


RunPath = Annotated[Path, AfterValidator(_possible)]
RunUrl = Annotated[str, Field(pattern=URL)]


def _number_of(devices: Any) -> Any:
    """A number of devices, ``"auto"``, or a range of numbers."""
    if isinstance(devices, dict) and len(devices) == 1 and [*devices.values()] == [None]:
        # What YAML, and so a flag, makes of 2: without quotes.
        devices = f"{next(iter(devices))}:"
    if isinstance(devices, str) and devices.isdecimal():
        devices = int(devices)
    number = isinstance(devices, int) and not isinstance(devices, bool) and devices > 0
    if number or devices == "auto":
        return devices
    try:
        found = device_range(devices)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if found is None:
        raise ValueError(
            f"{devices!r} was given. Allowed: a whole number above 0, 'auto', or a range such as "
            "'2:8' or '2:' (up to all devices)"
        )
    return devices


_Range = Annotated[str, Field(pattern=r"^[1-9]\d*:([1-9]\d*)?$")]
Devices = Annotated[PositiveInt | Literal["auto"] | _Range, BeforeValidator(_number_of)]


def _written_as(field: str | None, given: Any) -> Any:
    """A strategy or a launcher as a mapping with ``name``, or its name alone if that is all.

    Raises:
        ConfigError: it is written in no way that is known.
    """
    written = (as_mapping if field == "strategy" else launchers.as_mapping)(given)
    return written if len(written) > 1 else written["name"]


class KeepBest(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Which checkpoint is the best one."""

    metric: str
    """Name of an evaluation metric, or `loss` for the evaluation loss."""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher is better."""


class CheckpointConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """When to save, where, and what to keep."""

    directory: RunPath | RunUrl | None = None
    """Where checkpoints go: a path, or a URL (`s3://`, `gs://`, `hf://`, others of fsspec's) that
    they are copied to from `checkpoints` in `output_dir`; left out: there."""
    every_steps: PositiveInt | None = None
    """Steps between checkpoints."""
    every_minutes: PositiveFloat | None = None
    """Minutes between checkpoints."""
    keep_last: PositiveInt | None = 2
    """How many of the newest to keep; null keeps all."""
    keep_local: PositiveInt = 1
    """How many of the newest to keep in `output_dir` where `directory` is a URL."""
    peers: NonNegativeInt = 0
    """In the memory of how many other hosts the files of each host are kept too, where `directory`
    is a URL and hosts have disks of their own: a run that has lost a host goes on without the
    URL."""
    keep_best: KeepBest | None = None
    """Also keep the best by an evaluation metric, and save where an evaluation is the best so
    far."""
    async_: bool | Literal["auto"] = Field(
        default="auto",
        validation_alias=AliasChoices("async", "async_"),
        serialization_alias="async",
    )
    """Whether training goes on while a checkpoint is written, from a copy in host memory, which is
    kept for the next one; auto: where every host has room for it and a tenth of its memory
    besides, looked at before each save."""
    save_final: bool = True
    """Whether to save when the run ends or is interrupted."""

    @model_validator(mode="after")
    def _check_peers(self) -> CheckpointConfig:
        if self.peers and self.remote is None:
            raise ValueError(
                f"peers={self.peers} keeps files of hosts with disks of their own in other hosts' "
                "memory, and without a URL as directory all hosts share one. Give a URL "
                "(directory='s3://…'), or leave peers out"
            )
        return self

    @property
    def remote(self) -> str | None:
        """The URL that checkpoints are copied to, if there is one."""
        return self.directory if isinstance(self.directory, str) else None


class RunFields(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The fields that a run file and a call of ``fit`` share."""

    strategy: str | Mapping[str, Any] | SerializeAsAny[StrategyOptions] = "auto"
    """Which framework runs it: a name, `name:option=value,…`, a mapping with `name`, or `auto`."""
    launcher: str | Mapping[str, Any] | SerializeAsAny[LauncherOptions] = "local"
    """What starts the processes: `local` (this machine), `mpi`, `torchrun`, `slurm`, `ray`,
    `kubernetes`, or another that is installed; a name, `name:option=value,…`, or a mapping with
    `name`. Where a launcher has started this process already, its processes are joined."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to train on; auto takes the accelerator if there is one."""
    devices: Devices = "auto"
    """Processes on each node; auto is one for each accelerator, or one on a CPU. A range, such as
    `"2:8"` or `"2:"` (up to all devices), lets the run go on with other numbers of them when some
    are lost, and when `unipar runs resize` asks for it."""
    num_nodes: PositiveInt = 1
    """Number of machines."""
    global_batch_size: PositiveInt | None = None
    """Samples of one optimizer step over all processes; left out: the DataLoader's batch size."""
    micro_batch_size: PositiveInt | Literal["auto"] | None = None
    """Samples of one forward pass on one process; auto finds the largest that fits in memory;
    left out: the process's whole share of the global batch."""
    shares: tuple[PositiveFloat, ...] | Literal["auto"] | None = None
    """One positive number for each data-parallel rank: each takes its part of every global batch in
    proportion, and `micro_batch_size` is that of the largest part; auto measures how fast ranks
    are; left out: equal parts."""
    epochs: PositiveInt | None = None
    """Passes over the data; 1 unless `steps` is given."""
    steps: PositiveInt | None = None
    """Optimizer steps in all, counted from the first start of the run; instead of `epochs`."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations; left out: at the end of each epoch."""
    precision: Precision = "fp32"
    """Compute dtype; weights and reductions are fp32 in all of them. fp8 is bf16 with linear layers
    in float8, by torchao."""
    loss_scale: LossScale | None = None
    """How the scale of losses in precision fp16 begins and changes; left out: as PyTorch's does."""
    float32_matmul_precision: MatmulPrecision | None = None
    """How exactly matrix products of fp32 tensors are computed: highest (fp32), high (TF32 on GPUs,
    or three products in bf16), medium (bf16); left out: as torch is set, highest by default."""
    max_grad_norm: PositiveFloat | None = None
    """The 2-norm that the whole gradient is clipped to."""
    activation_checkpointing: ActivationCheckpointing = "off"
    """Recompute activations in the backward pass: off; full (each repeated block); selective
    (likewise, but for what takes long to compute); or names of module classes."""
    activation_offload: bool = False
    """Whether what repeated blocks save for the backward pass waits for it in host memory."""
    compile: bool | dict[str, Any] = False
    """Whether to use torch.compile, or its keyword arguments."""
    seed: NonNegativeInt = 0
    """Seed of the data order, the model's initial weights and dropout."""
    dropout_seed: DropoutSeed = "rank"
    """What dropout draws its random numbers for: each rank, as torch does; or each sample, so that
    its masks do not depend on the number of ranks and micro-batches."""
    initial_weights: Literal["model", "by_name"] | RunPath = "model"
    """Where a model function's first weights come from: as it computes them, the whole model on one
    host (model); each tensor by itself, under a seed of its name (by_name); or a checkpoint or
    safetensors, by path."""
    shuffle: bool | None = None
    """Whether each epoch sees the samples in a new order; left out: yes, unless a DataLoader
    without shuffling is given."""
    num_workers: NonNegativeInt | None = None
    """Data-loading processes of each rank; left out: the DataLoader's, or 0."""
    checkpoint: CheckpointConfig | Literal[False] = CheckpointConfig()
    """When to save and what to keep; false saves nothing."""
    resume: Literal["auto"] | RunPath | RunUrl | None = None
    """Continue from the newest checkpoint of this run if there is one (auto), or from a path or a
    URL."""
    timeout: PositiveFloat = 1800.0
    """Seconds that a collective waits for a missing rank."""
    max_restarts: NonNegativeInt = 0
    """How often a failed group of processes is started again from its newest checkpoint."""
    grace_period: PositiveFloat = GRACE_PERIOD
    """Seconds that a run has after SIGTERM or SIGHUP to finish its step and save."""
    save_signal: Literal["SIGUSR1", "SIGUSR2", "none"] = "SIGUSR1"
    """The signal that makes a run save and go on. The other of the two asks processes where they
    are when they hang."""
    on_nan: OnNaN = "raise"
    """What a loss that is not finite does: stop the run, skip the step, or nothing. `fit` and
    `engine.train_step` leave buffers (statistics of batch norms) as they were, too, where such a
    step is skipped."""
    output_dir: RunPath | None = None
    """Where the run's files go; left out: a new directory in `runs`, named by time."""
    loggers: tuple[str, ...] = ()
    """Where else metrics go, besides metrics.jsonl: tensorboard, wandb, mlflow, trackio,
    prometheus."""
    progress: bool = True
    """Whether rank 0 shows a progress bar (plain lines when not in a terminal)."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is logged."""
    log_every: PositiveInt = 10
    """Steps between logged metrics, and between looks at how much memory was held."""
    self_test: SelfTest = "auto"
    """Whether a few steps of a tiny model under the strategy are compared with a plain loop first,
    once for a machine and its versions; auto does so on GPUs. One that differs is refused."""

    @property
    def save_signal_number(self) -> signal.Signals | None:
        """The signal itself, or ``None``."""
        return None if self.save_signal == "none" else signal.Signals[self.save_signal]

    @model_validator(mode="before")
    @classmethod
    def _default_length(cls, given: Any) -> Any:
        if (
            isinstance(given, Mapping)
            and given.get("steps") is None
            and given.get("epochs") is None
        ):
            return {**given, "epochs": 1}
        return given

    @field_validator("strategy", "launcher", mode="before")
    @classmethod
    def _one_way_to_write_it(cls, given: Any, info: ValidationInfo) -> Any:
        try:
            written = _written_as(info.field_name, given)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return given if isinstance(given, (StrategyOptions, LauncherOptions)) else written

    @field_serializer("strategy", "launcher")
    def _written(self, given: Any, info: FieldSerializationInfo) -> Any:
        return _written_as(info.field_name, given)

    @field_validator("shares", mode="before")
    @classmethod
    def _positive_shares(cls, given: Any) -> Any:
        try:
            return given if given is None or given == "auto" else check_shares(given)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _class_names(cls, given: Any) -> Any:
        if isinstance(given, bool):
            return "full" if given else "off"
        if inspect.isclass(given) or (isinstance(given, str) and given not in CHECKPOINTING):
            given = (given,)
        if isinstance(given, (list, tuple, set, frozenset)):
            return tuple(one.__name__ if inspect.isclass(one) else one for one in given)
        return given

    @field_validator("compile")
    @classmethod
    def _plain_arguments(cls, given: Any) -> Any:
        refuse_objects(
            given if isinstance(given, dict) else {},
            "A backend goes by the name that torch._dynamo.register_backend gives it; "
            "Session.prepare(compile=…) takes functions.",
        )
        return given

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _checkpoint_shorthand(cls, given: Any) -> Any:
        if given is True:
            return {}
        return {"directory": given} if isinstance(given, (str, Path)) else given

    @field_validator("resume", mode="before")
    @classmethod
    def _resume_none(cls, given: Any) -> Any:
        return None if given in ("none", False) else given

    @field_validator("loggers", mode="before")
    @classmethod
    def _one_logger(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _fits_together(self) -> RunFields:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"epochs ({self.epochs}) and steps ({self.steps}) are both given; give one of them."
            )
        size, micro = self.global_batch_size, self.micro_batch_size
        if size is not None and isinstance(micro, int) and micro > size:
            raise ValueError(
                f"micro_batch_size ({micro}) is larger than global_batch_size ({size}). A global "
                "batch is divided among processes, then into micro-batches: make "
                f"micro_batch_size at most {size} / number of processes."
            )
        if self.loss_scale is not None and self.precision != "fp16":
            raise ValueError(
                f"loss_scale is given, and precision is '{self.precision}': losses are scaled in "
                "fp16 alone. Set precision to 'fp16', or leave loss_scale out."
            )
        if self.checkpoint is False and self.resume == "auto":
            raise ValueError(
                "resume is 'auto' and checkpoint is false, so there is nothing to resume from. "
                "Set checkpoint to where the run's checkpoints are, or resume to a path."
            )
        return self


class RunConfig(RunFields, frozen=True):
    """Everything about a run that is a plain value."""

    optimizer: Annotated[
        Annotated[OptimizerConfig, Tag(BY_NAME)] | Annotated[OptimizerGroups, Tag(GROUPED)],
        Discriminator(form),
    ] = OptimizerConfig(name="adamw")
    """An optimizer of torch.optim by its lower-cased name, with its arguments; or several by names
    of their own, each with its params and lr_scheduler."""
    lr_scheduler: SchedulerConfig | None = None
    """A scheduler of torch.optim.lr_scheduler by its lower-cased name, with its arguments."""

    @field_validator("optimizer", "lr_scheduler", mode="before")
    @classmethod
    def _name_only(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @classmethod
    def build(
        cls, source: RunConfig | Mapping[str, Any] | str | Path | None = None, **overrides: Any
    ) -> RunConfig:
        """Make a config from a file or mapping, and from arguments that win over it.

        Args:
            source: a YAML or TOML file, a mapping, or another config.
            overrides: fields by name; those that are :data:`UNSET` do not count.

        Raises:
            ConfigError: a key is unknown, a value is not allowed, or fields contradict each other;
                every problem is listed, with file and line where there is a file.
        """
        document = read_document(source) if isinstance(source, (str, Path)) else None
        if document is not None:
            values = document.data
        elif isinstance(source, RunConfig):
            values = source.model_dump(exclude_unset=True, by_alias=True)
        elif source is None or isinstance(source, Mapping):
            values = dict(source or {})
        else:
            raise ConfigError(
                f"the config is {source!r:.60} ({type(source).__name__}). Allowed: the path of a "
                "YAML or TOML file, a mapping, or a RunConfig."
            )
        _refuse_import_paths(values, document)
        given = {key: value for key, value in overrides.items() if value is not UNSET}

        def where(key: KeyPath) -> str:
            return document.where(key) if document and not holds(given, key) else ""

        return validate(cls, merge(values, given), where=where)


def validate(
    model: type[_ModelT],
    values: Mapping[str, Any],
    *,
    where: Callable[[KeyPath], str] = lambda key: "",
) -> _ModelT:
    """Validate ``values`` as a ``model``.

    Args:
        model: the pydantic model.
        values: all values, merged.
        where: tells where a key was set, such as a file and line, or an empty string.

    Raises:
        ConfigError: every problem, with its key, what was given and what is allowed.
    """
    subject = "this run cannot start"
    check_plain(values, subject, where)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise config_error(error, model, values, subject=subject, where=where) from error


def holds(values: Any, key: KeyPath) -> bool:
    """Return whether nested mappings hold ``key``."""
    for part in key:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def _refuse_import_paths(values: Mapping[str, Any], document: Document | None) -> None:
    for key in IMPORT_KEYS:
        if key in values:
            place = f"{document.where((key,))}: " if document else ""
            raise ConfigError(
                f"{place}'{key}' is an import path for `unipar train`. "
                f"A call of fit takes it as an argument: fit(…, {key}=…); remove it here."
            )
