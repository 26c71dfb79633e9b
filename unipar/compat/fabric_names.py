"""What becomes of Fabric's names; the tests and the page go by these tables."""

from __future__ import annotations

from typing import NoReturn

from unipar.compat.tables import Row, Table

_BY_OPTIONS = "Say strategy and its options in unipar.yaml (docs/strategies.md)."
_ITS_OWN = "It is a part of Fabric's own machinery. Leave it out."
_TPU = "unipar trains on CPUs and CUDA GPUs."
_PRECISION = (
    "Use precision='bf16-mixed', '16-mixed' or '32-true', or precision: fp8 in unipar.yaml."
)
_ITS_OWN_LOOP = (
    "It has a loop of its own, or is a part of it, which only the Trainer runs: call unipar.fit, "
    "or write the loop with Fabric."
)

TOP = Table(
    "lightning_fabric",
    Row(
        "Fabric seed_everything is_wrapped accelerators fabric loggers plugins strategies "
        "utilities wrappers",
        "kept",
    ),
    Row("disable_possible_user_warnings", "ignored", "Fabric's warnings are not given here."),
    Row("connector cli", "refused", _ITS_OWN),
    Row("package_available", "refused", "Use importlib.util.find_spec."),
)

LIGHTNING = Table(
    "lightning",
    Row("Fabric seed_everything fabric", "kept"),
    Row(
        "LightningModule",
        "refused",
        "Derive the model from torch.nn.Module, or import it from Lightning itself, `from "
        "lightning.pytorch import LightningModule`: it is an nn.Module, and its training_step "
        "leads to the engine after fabric.setup. Its self.log and self.optimizers() do not.",
    ),
    Row("Trainer LightningDataModule Callback pytorch app", "refused", _ITS_OWN_LOOP),
)

STRATEGIES = Table(
    "lightning_fabric.strategies",
    Row(
        "DDPStrategy FSDPStrategy DeepSpeedStrategy ModelParallelStrategy ParallelStrategy "
        "SingleDeviceStrategy Strategy",
        "kept",
    ),
    Row(
        "DataParallelStrategy",
        "refused",
        "One process drives several GPUs. Use strategy='ddp', or strategy: dp in unipar.yaml.",
    ),
    Row("*XLA* *TPU*", "refused", _TPU),
    Row("STRATEGY_REGISTRY", "refused", f"Strategies are found by entry points. {_BY_OPTIONS}"),
)

PLUGINS = Table(
    "lightning_fabric.plugins",
    Row(
        "MixedPrecision HalfPrecision DoublePrecision FSDPPrecision DeepSpeedPrecision Precision",
        "kept",
    ),
    Row(
        "ClusterEnvironment LightningEnvironment TorchElasticEnvironment SLURMEnvironment "
        "MPIEnvironment LSFEnvironment KubeflowEnvironment",
        "ignored",
        "The launcher is found by itself.",
    ),
    Row("XLA* TPU*", "refused", _TPU),
    Row("TransformerEnginePrecision", "refused", _PRECISION),
    Row(
        "BitsandbytesPrecision", "refused", "Quantize layers by bitsandbytes, before fabric.setup."
    ),
    Row(
        "CheckpointIO TorchCheckpointIO",
        "refused",
        "fabric.save and load write and read files themselves. Leave it out, or write what is the "
        "script's own where fabric.is_global_zero holds.",
    ),
    Row("collectives", "refused", "Use fabric.all_gather, all_reduce and broadcast."),
)

ACCELERATORS = Table(
    "lightning_fabric.accelerators",
    Row("Accelerator CPUAccelerator CUDAAccelerator find_usable_cuda_devices", "kept"),
    Row("MPSAccelerator *XLA* *TPU*", "refused", _TPU),
    Row("ACCELERATOR_REGISTRY", "refused", _ITS_OWN),
)

LOGGERS = Table("lightning_fabric.loggers", Row("CSVLogger Logger TensorBoardLogger", "kept"))

UTILITIES = Table(
    "lightning_fabric.utilities",
    Row(
        "AttributeDict Throughput ThroughputMonitor is_shared_filesystem measure_flops "
        "move_data_to_device rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn "
        "suggested_max_num_workers",
        "kept",
    ),
    Row("disable_possible_user_warnings", "ignored", "Fabric's warnings are not given here."),
    Row(
        "get_available_flops",
        "refused",
        "Take it from the GPU's data sheet, as in ThroughputMonitor(fabric, available_flops=…).",
    ),
    Row("LightningEnum *Exception", "refused", _ITS_OWN),
    Row("consolidate_checkpoint", "refused", "Use `unipar convert` on such a directory."),
)

FABRIC = Table(
    "Fabric",
    Row(
        "accelerator all_gather all_reduce autocast backward barrier broadcast call clip_gradients "
        "device global_rank init_module init_tensor is_global_zero launch load load_raw local_rank "
        "log log_dict logger loggers no_backward_sync node_rank print rank_zero_first run save "
        "seed_everything setup setup_dataloaders setup_module setup_optimizers sharded_model "
        "strategy to_device world_size",
        "kept",
    ),
)

CALLS = Table(
    "calls",
    Row(
        "Fabric(precision='transformer-engine') DeepSpeedStrategy(precision='bf16-true'/'16-true')",
        "refused",
        _PRECISION,
    ),
    Row("Fabric(accelerator='mps'/'tpu')", "refused", f"{_TPU} Use accelerator='auto'."),
    Row("Fabric(strategy='dp'/'xla'/'xla_fsdp'/'single_xla'/'single_tpu')", "refused", _BY_OPTIONS),
    Row(
        "Fabric(strategy=…)",
        "refused",
        f"It is a class of the script's own, whose methods nothing here calls. {_BY_OPTIONS}",
    ),
    Row(
        "Fabric(plugins=…)",
        "refused",
        "Plugins are for the precision, and for launchers, which are found by themselves.",
    ),
    Row(
        "MixedPrecision(scaler=…)",
        "refused",
        "Engines scale by PyTorch's rule, in precision 16-mixed. Give a torch.amp.GradScaler, or "
        "leave it out.",
    ),
    Row(
        "Fabric(devices=[1,3])",
        "refused",
        "Set CUDA_VISIBLE_DEVICES=1,3 before the program starts, and say devices=2.",
    ),
    Row(
        "SingleDeviceStrategy(…)",
        "refused",
        "Say devices=1, and set CUDA_VISIBLE_DEVICES before the program starts.",
    ),
    Row(
        "ModelParallelStrategy(…)",
        "refused",
        "Say strategy: mesh with tp_size in unipar.yaml, which divides layers by a plan. What "
        "stands there is taken instead of this.",
    ),
    Row(
        "FSDPStrategy(device_mesh=…)",
        "refused",
        "Give two numbers, as in device_mesh=(2, 4), with sharding_strategy='HYBRID_SHARD'.",
    ),
    Row(
        "DeepSpeedStrategy(config={'gradient_accumulation_steps':…})",
        "refused",
        "Accumulate in the loop: call fabric.backward(loss / n) n times, then optimizer.step().",
    ),
    Row(
        "Fabric.setup(scheduler=…)",
        "refused",
        "DeepSpeed steps it by itself, and no other strategy does. Leave it out of setup, and call "
        "scheduler.step() after optimizer.step().",
    ),
    Row(
        "Fabric.backward(loss,retain_graph=…)",
        "refused",
        "An engine's backward pass takes a loss and nothing else. Add losses, and call it once.",
    ),
    Row(
        "Fabric.clip_gradients(norm_type=…)",
        "refused",
        "Strategies clip by the 2-norm. Use max_norm alone, or clip_val.",
    ),
    Row(
        "Fabric.all_gather(group=…) Fabric.all_reduce(group=…)",
        "refused",
        "Ranks exchange among all. Use torch.distributed for groups of the script's own.",
    ),
    Row(
        "Fabric.save('s3://…') CSVLogger('s3://…') TensorBoardLogger('s3://…')",
        "refused",
        "Files are written to this machine. Give a path, and copy what is there where "
        "fabric.is_global_zero holds: fsspec.filesystem('s3').put(path, url).",
    ),
    Row(
        "Fabric.load('s3://…')",
        "refused",
        "Files are read from this machine. Get it first, as by fsspec.filesystem('s3').get(url, "
        "path) where fabric.local_rank is 0, and call fabric.barrier().",
    ),
    Row(
        "torch.compile(fabric.setup(model))",
        "refused",
        "The strategy compiles the model as it has divided it: compile it before, "
        "fabric.setup(torch.compile(model)).",
    ),
)

_WORDS = {
    "Fabric(precision='transformer-engine')": "transformer-engine transformer-engine-float16",
    "Fabric(accelerator='mps'/'tpu')": "mps tpu",
    "Fabric(strategy='dp'/'xla'/'xla_fsdp'/'single_xla'/'single_tpu')":
        "dp xla xla_fsdp single_xla single_tpu",
}  # fmt: skip
REFUSED_WORDS = {word: call for call, words in _WORDS.items() for word in words.split()}
"""Words that an argument of ``Fabric`` may be in Fabric, and the call that stands for each."""

TABLES = (TOP, LIGHTNING, FABRIC, STRATEGIES, PLUGINS, ACCELERATORS, LOGGERS, UTILITIES, CALLS)


def refuse(call: str, shown: str = "") -> NoReturn:
    """Raise the error of a call that is refused.

    Args:
        call: in the table.
        shown: what the message calls it.

    Raises:
        ConfigError: always.
    """
    CALLS.refuse(call.replace(" ", ""), shown or call)
