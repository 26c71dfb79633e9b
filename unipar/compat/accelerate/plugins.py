"""Objects that hold settings, under Accelerate's names: what becomes of each is read at run time.

Every field is one of the real class. Those that a class lists as ``REFUSED`` have to stay at their
defaults; those that it lists as ``IGNORED`` do not change training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from enum import Enum
from typing import Any, ClassVar

from unipar.compat.accelerate.launched import count, fill, number, switch, word
from unipar.compat.checked import Checked
from unipar.compat.deepspeed_config import load_config, read_config
from unipar.compat.runconfig import asked_scale
from unipar.errors import ConfigError


class _Words(str, Enum):
    def __str__(self) -> str:
        return self.value

    @classmethod
    def list(cls) -> Any:
        """Every value."""
        return [one.value for one in cls]


class PrecisionType(_Words):
    """The values of ``mixed_precision``."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class LoggerType(_Words):
    """The values of ``log_with`` that there are here."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    MLFLOW = "mlflow"


class RNGType(_Words):
    """The values of ``rng_types`` that there are here."""

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"


class DDPCommunicationHookType(_Words):
    """How gradients are compressed on their way."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DynamoBackend(_Words):
    """The backend of ``torch.compile``; ``NO`` compiles nothing."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"


@dataclass
class KwargsHandler(Checked):
    """What ``kwargs_handlers`` takes."""


@dataclass
class AutocastKwargs(KwargsHandler):
    """Of :meth:`Accelerator.autocast`; a model's own forward pass has the run's precision."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of the strategy ``ddp``."""

    REFUSED: ClassVar = ("dim", "check_reduction", "comm_wrapper")
    _OPTIONS: ClassVar = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters",
                          "gradient_as_bucket_view", "static_graph")  # fmt: skip

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """The strategy's options; only those that are not Accelerate's defaults."""
        self.check()
        given = {one.name: one for one in fields(self)}
        found = {
            name: getattr(self, name)
            for name in self._OPTIONS
            if getattr(self, name) != given[name].default
        }
        hook = DDPCommunicationHookType(self.comm_hook)
        if hook is DDPCommunicationHookType.POWER_SGD:
            names = {"matrix_approximation_rank": "powersgd_rank",
                     "start_powerSGD_iter": "powersgd_start"}  # fmt: skip
            unknown = sorted({*self.comm_state_option} - {*names})
            if unknown:
                raise ConfigError(
                    f"comm_state_option has {', '.join(unknown)}, which the strategy ddp does not "
                    f"take. It takes {', '.join(names)}."
                )
            found |= {names[key]: value for key, value in self.comm_state_option.items()}
            # PyTorch's default, which Accelerate leaves as it is.
            found = {"powersgd_rank": 1, **found, "compression": "powersgd"}
        elif hook in (DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16):
            found["compression"] = hook.value
        elif hook is not DDPCommunicationHookType.NO:
            raise ConfigError(
                f"comm_hook={hook.value!r} has no counterpart. Use power_sgd, fp16 or bf16."
            )
        return found


@dataclass
class GradScalerKwargs(KwargsHandler):
    """The run's ``loss_scale``."""

    REFUSED: ClassVar = ("enabled",)

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def asked(self) -> dict[str, Any]:
        """What it asks for."""
        return asked_scale(
            initial=self.init_scale, growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor, growth_interval=self.growth_interval,
        )  # fmt: skip


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """The run's ``timeout``; which backends carry what is the strategy's."""

    IGNORED: ClassVar = ("backend", "init_method")

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of ``torch.profiler.profile``."""

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Any = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How micro-batches make a step."""

    IGNORED: ClassVar = ("sync_each_batch",)

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of ``torch.compile``."""

    REFUSED: ClassVar = ("use_regional_compilation",)

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        prefix = "ACCELERATE_DYNAMO_"
        fill(self, {
            "backend": (f"{prefix}BACKEND", word),
            "mode": (f"{prefix}MODE", word),
            "fullgraph": (f"{prefix}USE_FULLGRAPH", switch),
            "dynamic": (f"{prefix}USE_DYNAMIC", switch),
            "use_regional_compilation": (f"{prefix}USE_REGIONAL_COMPILATION", switch),
        })  # fmt: skip

    def compile(self) -> dict[str, Any] | bool:
        """The engine's ``compile``."""
        self.check()
        backend = str(self.backend or "no").lower()
        if backend == "no" or self.disable:
            return False
        rest = {name: getattr(self, name) for name in ("mode", "fullgraph", "dynamic", "options")}
        return {"backend": backend, **{k: v for k, v in rest.items() if v is not None}}


@dataclass
class DataLoaderConfiguration(Checked):
    """How data is shared among ranks."""

    REFUSED: ClassVar = ("use_stateful_dataloader",)
    IGNORED: ClassVar = ("non_blocking",)

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration(Checked):
    """Where checkpoints and trackers go."""

    REFUSED: ClassVar = ("save_on_each_node",)

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Trackers go where the project is, unless told otherwise."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class DeepSpeedPlugin(Checked):
    """Options of the strategies ``zero1``, ``zero2``, ``zero3`` and ``deepspeed``."""

    REFUSED: ClassVar = ("transformer_moe_cls_names", "enable_msamp", "msamp_opt_level")
    IGNORED: ClassVar = ("is_train_batch_min", "zero3_init_flag", "zero3_save_16bit_model")

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        prefix = "ACCELERATE_DEEPSPEED_"
        fill(self, {
            "hf_ds_config": (f"{prefix}CONFIG_FILE", word),
            "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", count),
            "gradient_clipping": ("ACCELERATE_GRADIENT_CLIPPING", number),
            "zero_stage": (f"{prefix}ZERO_STAGE", count),
            "offload_optimizer_device": (f"{prefix}OFFLOAD_OPTIMIZER_DEVICE", word),
            "offload_param_device": (f"{prefix}OFFLOAD_PARAM_DEVICE", word),
            "offload_optimizer_nvme_path": (f"{prefix}OFFLOAD_OPTIMIZER_NVME_PATH", word),
            "offload_param_nvme_path": (f"{prefix}OFFLOAD_PARAM_NVME_PATH", word),
            "transformer_moe_cls_names": (f"{prefix}MOE_LAYER_CLS_NAMES", word),
        })  # fmt: skip

    def asked(self) -> dict[str, Any]:
        """What it asks for; see :func:`unipar.compat.deepspeed_config.read_config`."""
        self.check()
        return read_config(self._config())

    def replaces_optimizers(self) -> bool:
        """Whether Accelerate puts DeepSpeed's optimizers for the CPU in the place of a script's."""
        config = self._config()
        device = (config["zero_optimization"].get("offload_optimizer") or {}).get("device")
        return device not in (None, "none") and config.get("zero_force_ds_cpu_optimizer", True)

    def _config(self) -> dict[str, Any]:
        if self.hf_ds_config is not None:
            return self._filled(load_config(self.hf_ds_config))
        zero: dict[str, Any] = {"stage": 2 if self.zero_stage is None else self.zero_stage}
        for name, key in (("optimizer", "offload_optimizer"), ("param", "offload_param")):
            device = getattr(self, f"offload_{name}_device")
            if device not in (None, "none"):
                zero[key] = {"device": device}
                if (path := getattr(self, f"offload_{name}_nvme_path")) not in (None, "none"):
                    zero[key]["nvme_path"] = path
        config: dict[str, Any] = {"zero_optimization": zero}
        if self.gradient_clipping is not None:
            config["gradient_clipping"] = self.gradient_clipping
        if self.gradient_accumulation_steps is not None:
            config["gradient_accumulation_steps"] = self.gradient_accumulation_steps
        return config

    def _filled(self, config: dict[str, Any]) -> dict[str, Any]:
        """A configuration with this one's fields where it leaves them open, as Accelerate does it.

        There is one micro-batch in a step where it does not speak of them (Accelerate 1.15.0,
        utils/dataclasses.py, DeepSpeedPlugin).
        """
        config = {"gradient_accumulation_steps": 1, **config}
        if not isinstance(config.get("zero_optimization"), dict):
            raise ConfigError(
                "DeepSpeedPlugin(hf_ds_config=…): the configuration has no zero_optimization. Say "
                "which stage of ZeRO is meant: {'zero_optimization': {'stage': 2}}."
            )
        zero = config["zero_optimization"]
        for held, key, value in (
            (config, "gradient_accumulation_steps", self.gradient_accumulation_steps),
            (config, "gradient_clipping", self.gradient_clipping),
            (zero, "stage", 2 if self.zero_stage is None else self.zero_stage),
        ):
            if held.get(key) == "auto" and value is not None:
                held[key] = value
        for name, key in (("optimizer", "offload_optimizer"), ("param", "offload_param")):
            device = getattr(self, f"offload_{name}_device")
            if isinstance(zero.get(key), dict) and zero[key].get("device") == "auto":
                zero[key] = {**zero[key], "device": device or "none"}
        return config


_SHARDING = {
    "FULL_SHARD": "full", "TRUE": "full", "SHARD_GRAD_OP": "grad_op", "FALSE": "grad_op",
    "HYBRID_SHARD": "hybrid", "1": "full", "2": "grad_op", "4": "hybrid",
}  # fmt: skip
"""By the name of what is divided, or its number in files of ``accelerate config``."""


@dataclass
class FullyShardedDataParallelPlugin(Checked):
    """Options of the strategy ``fsdp``."""

    REFUSED: ClassVar = ("mixed_precision_policy", "ignored_modules", "param_init_fn",
                         "activation_checkpointing_offload")  # fmt: skip
    IGNORED: ClassVar = (
        "fsdp_version", "backward_prefetch", "state_dict_type", "state_dict_config",
        "optim_state_dict_config", "limit_all_gathers", "use_orig_params", "sync_module_states",
        "forward_prefetch", "cpu_ram_efficient_loading",
    )  # fmt: skip

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Any = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        fill(self, {"fsdp_version": ("FSDP_VERSION", count)})
        if self.fsdp_version == 2:
            fill(self, {"reshard_after_forward": ("FSDP_RESHARD_AFTER_FORWARD", word)})
        elif self.reshard_after_forward is None:
            fill(self, {"sharding_strategy": ("FSDP_SHARDING_STRATEGY", word)})
        fill(self, {
            "auto_wrap_policy": ("FSDP_AUTO_WRAP_POLICY", word),
            "cpu_offload": ("FSDP_OFFLOAD_PARAMS", switch),
            "ignored_modules": ("FSDP_IGNORED_MODULES", word),
            "activation_checkpointing": ("FSDP_ACTIVATION_CHECKPOINTING", switch),
            "activation_checkpointing_offload": (
                "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", switch,
            ),
            "transformer_cls_names_to_wrap": ("FSDP_TRANSFORMER_CLS_TO_WRAP", word),
            "min_num_params": ("FSDP_MIN_NUM_PARAMS", count),
        })  # fmt: skip

    def options(self) -> dict[str, Any]:
        """The strategy, with its options."""
        self.check()
        found: dict[str, Any] = {"name": "fsdp"}
        asked = self.reshard_after_forward
        asked = self.sharding_strategy if asked is None else asked
        if asked is not None:
            word = getattr(asked, "name", str(asked)).upper()
            if word not in _SHARDING:
                raise ConfigError(
                    f"FullyShardedDataParallelPlugin asks for {word}, and the strategy fsdp does "
                    f"{', '.join(one for one in _SHARDING)}. Use strategy: ddp for NO_SHARD."
                )
            found["sharding"] = _SHARDING[word]
        if getattr(self.cpu_offload, "offload_params", self.cpu_offload):
            found["cpu_offload"] = True
        return found | self._wrapping()

    def _wrapping(self) -> dict[str, Any]:
        policy = self.auto_wrap_policy
        if policy is None:
            return {}
        word = policy.lower() if isinstance(policy, str) else ""
        names = self.transformer_cls_names_to_wrap
        if word == "transformer_based_wrap":
            listed = names.split(",") if isinstance(names, str) else names
            return {"wrap": tuple(listed)} if listed else {}
        if word == "size_based_wrap":
            return {"wrap_min_params": self.min_num_params} if self.min_num_params else {}
        if word == "no_wrap":
            return {"wrap": "none"}
        raise ConfigError(
            f"auto_wrap_policy={policy!r} is a function, which strategies do not take. Give "
            "'transformer_based_wrap' with transformer_cls_names_to_wrap, or min_num_params with "
            "'size_based_wrap'."
        )


PLUGINS: tuple[type[Checked], ...] = (
    AutocastKwargs, DataLoaderConfiguration, DeepSpeedPlugin, DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin, GradientAccumulationPlugin, GradScalerKwargs,
    InitProcessGroupKwargs, ProfileKwargs, ProjectConfiguration, TorchDynamoPlugin,
)  # fmt: skip
"""Those whose fields are the real ones'."""


def handlers(given: Iterable[KwargsHandler]) -> dict[type[KwargsHandler], KwargsHandler]:
    """The handlers by their class.

    Raises:
        ConfigError: one is none, is there twice, or asks for what cannot be had.
    """
    found: dict[type[KwargsHandler], KwargsHandler] = {}
    for one in given:
        kind = type(one)
        if not isinstance(one, KwargsHandler) or kind in found:
            raise ConfigError(
                f"kwargs_handlers holds {kind.__name__}"
                + (" twice." if kind in found else ", which is no handler of this face.")
                + " Give one of each of AutocastKwargs, DistributedDataParallelKwargs, "
                "GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs."
            )
        one.check()
        found[kind] = one
    return found
