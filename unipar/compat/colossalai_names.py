"""What becomes of Colossal-AI's names; the tests and the page go by these tables."""

from __future__ import annotations

from typing import NoReturn

from unipar.compat.tables import Row, Table

_ITS_OWN = "It is a part of Colossal-AI's own machinery. Leave it out."
_OLD = "It is an older interface of Colossal-AI's. Write the script for its Booster first."
_HOME = "Its names are those of the package that it stands in. Import them from there."
_MESH = "Name the axes of the strategy mesh in unipar.yaml (docs/strategies.md)."
_DEVICE = "The run's device decides. Call get_accelerator()."
_LORA = (
    "Call peft.get_peft_model(model, config) before booster.boost. booster.save_model writes "
    "adapters beside the base model's weights."
)
_WHOLE = (
    "Strategies take any class of torch.optim, and one of the script's own. Use AdamW, or a class "
    "of your own."
)

TOP = Table(
    "colossalai",
    Row(
        "launch launch_from_openmpi launch_from_slurm launch_from_torch accelerator booster "
        "cluster initialize interface lazy logging nn utils",
        "kept",
    ),
    Row("legacy zero amp moe", "refused", _OLD),
    Row(
        "shardformer pipeline tensor device",
        "refused",
        "Strategies divide models. Use the strategy mesh, or HybridParallelPlugin.",
    ),
    Row("quantization", "refused", "Quantize by the library's own functions."),
    Row("inference", "refused", "It serves models, and trains none."),
    Row(
        "auto_parallel checkpoint_io cli context fx kernel testing version",
        "refused",
        _ITS_OWN,
    ),
)

BOOSTER_MODULE = Table(
    "colossalai.booster",
    Row("Booster Plugin mixed_precision plugin", "kept"),
    Row("Accelerator accelerator", "refused", _DEVICE),
    Row("booster", "kept"),
)

PLUGINS = Table(
    "colossalai.booster.plugin",
    Row(
        "Plugin TorchDDPPlugin TorchFSDPPlugin LowLevelZeroPlugin GeminiPlugin "
        "HybridParallelPlugin MoeHybridParallelPlugin DPPluginBase PipelinePluginBase",
        "kept",
    ),
    Row("*_plugin *_plugin_base plugin_base", "refused", _HOME),
)

PRECISIONS = Table(
    "colossalai.booster.mixed_precision",
    Row("FP16TorchMixedPrecision MixedPrecision mixed_precision_factory", "kept"),
    Row(
        "FP16ApexMixedPrecision FP16NaiveMixedPrecision BF16MixedPrecision FP8MixedPrecision",
        "refused",
        "Pass mixed_precision='fp16' or 'bf16' to the Booster, or set precision in unipar.yaml.",
    ),
    Row("bf16 fp16_* fp8 mixed_precision_base", "refused", _HOME),
)

CLUSTER = Table(
    "colossalai.cluster",
    Row("DistCoordinator", "kept"),
    Row("DeviceMeshManager ProcessGroupManager ProcessGroupMesh", "refused", _MESH),
    Row("device_mesh_manager dist_coordinator process_group_*", "refused", _HOME),
)

OPTIMIZERS = Table(
    "colossalai.nn.optimizer",
    Row("HybridAdam CPUAdam FusedAdam FusedSGD", "kept"),
    Row(
        "Adafactor CAME DistGaloreAwamW DistributedAdaFactor DistributedCAME DistributedLamb "
        "FusedLAMB GaLoreAdafactor GaLoreAdamW GaLoreAdamW8bit Lamb Lars",
        "refused",
        _WHOLE,
    ),
    Row("cast_to_distributed optim2DistOptim get_dist_logger", "refused", _ITS_OWN),
    Row(
        "adafactor came cpu_adam distributed_* fused_* galore hybrid_adam lamb lars nvme_optimizer",
        "refused",
        _HOME,
    ),
)

SCHEDULES = Table(
    "colossalai.nn.lr_scheduler",
    Row(
        "CosineAnnealingLR CosineAnnealingWarmupLR ExponentialLR FlatAnnealingLR "
        "FlatAnnealingWarmupLR LambdaLR LinearWarmupLR MultiStepLR MultiStepWarmupLR "
        "MultiplicativeLR OneCycleLR PolynomialLR PolynomialWarmupLR StepLR",
        "kept",
    ),
    Row("cosine delayed linear multistep onecycle poly torch", "refused", _HOME),
)

NN = Table(
    "colossalai.nn",
    Row("lr_scheduler optimizer", "kept"),
    *SCHEDULES.rows[:1],
    *OPTIMIZERS.rows[:2],
    Row("init *_ Tensor divide layer loss", "refused", "Use torch.nn and torch.nn.init."),
)

LAZY = Table(
    "colossalai.lazy",
    Row(
        "LazyInitContext",
        "ignored",
        "Models are built as ever, each rank's in its host memory, and their first weights are "
        "those of a model that is built without it. A model that no host holds is trained by "
        "unipar.fit with a model function (docs/how-to/large-models.md).",
    ),
    Row("LazyTensor construction pretrained", "refused", _ITS_OWN),
    Row("lazy_init", "refused", _HOME),
)

ACCELERATOR = Table(
    "colossalai.accelerator",
    Row("get_accelerator BaseAccelerator set_accelerator", "kept"),
    Row("auto_set_accelerator", "ignored", "The run's device decides."),
    Row("CpuAccelerator CudaAccelerator NpuAccelerator", "refused", _DEVICE),
    Row("api base_accelerator *_accelerator", "refused", _HOME),
)

LOGGING = Table(
    "colossalai.logging",
    Row("DistributedLogger disable_existing_loggers get_dist_logger", "kept"),
    Row("List Optional", "refused", "Import it from typing."),
    Row("logger", "refused", _HOME),
)

UTILS = Table(
    "colossalai.utils",
    Row(
        "MultiTimer Timer conditional_context disposable ensure_path_exists get_current_device "
        "is_ddp_ignored set_seed",
        "kept",
    ),
    Row(
        "TensorDetector free_storage get_non_persistent_buffers_set multi_tensor_applier "
        "multi_tensor_apply tensor_detector memory model rank_recorder safetensors",
        "refused",
        _ITS_OWN,
    ),
    Row("common timer", "refused", _HOME),
)

INTERFACE = Table(
    "colossalai.interface",
    Row("ModelWrapper OptimizerWrapper", "kept"),
    Row("AMPModelMixin", "refused", _ITS_OWN),
    Row("model optimizer pretrained", "refused", _HOME),
)

MODULES = {
    "": TOP, "accelerator": ACCELERATOR, "booster": BOOSTER_MODULE,
    "booster.mixed_precision": PRECISIONS, "booster.plugin": PLUGINS, "cluster": CLUSTER,
    "interface": INTERFACE, "lazy": LAZY, "logging": LOGGING, "nn": NN,
    "nn.lr_scheduler": SCHEDULES, "nn.optimizer": OPTIMIZERS, "utils": UTILS,
}  # fmt: skip
"""By what follows the package in a module's name."""

BOOSTER = Table(
    "Booster",
    Row(
        "backward boost execute_pipeline load_lr_scheduler load_model load_optimizer no_sync "
        "save_lr_scheduler save_model save_optimizer",
        "kept",
    ),
    Row("enable_lora save_lora_as_pretrained", "refused", _LORA),
)

PLUGIN = Table(
    "plugins",
    Row(
        "prepare_dataloader support_no_sync support_lora control_precision control_device "
        "control_checkpoint_io supported_devices supported_precisions "
        "enable_pipeline_parallelism",
        "kept",
    ),
    Row("enable_lora add_lora_params_to_optimizer get_param_group_id", "refused", _LORA),
    Row(
        "configure get_checkpoint_io no_sync execute_pipeline",
        "refused",
        "Call the Booster's own methods: boost, save_model, no_sync, execute_pipeline.",
    ),
    Row(
        "dp_group tp_group pp_group sp_group mixed_dp_group pg_mesh shard_config",
        "refused",
        "Ranks share a layer, or a sample, by the strategy's own groups. Reduce numbers over all "
        "ranks, by torch.distributed.",
    ),
)

OPTIMIZER = Table(
    "optimizers that were boosted",
    Row(
        "add_param_group backward clip_grad_by_norm defaults get_grad_norm load_state_dict "
        "param_groups parameters state_dict step unwrap zero_grad",
        "kept",
    ),
    Row(
        "backward_by_grad",
        "refused",
        "An engine's backward pass takes a loss and nothing else.",
    ),
    Row(
        "clip_grad_by_value",
        "refused",
        "Strategies clip by the 2-norm, over whatever ranks divide. Use clip_grad_by_norm.",
    ),
    Row(
        "scale_loss unscale_grad",
        "refused",
        "Engines scale losses, and unscale gradients before they clip them. Leave it out.",
    ),
)

CALLS = Table(
    "calls",
    Row(
        "Booster.backward(loss,optimizer,inputs=…) optimizer.backward(loss,retain_graph=True)",
        "refused",
        "An engine's backward pass takes a loss and nothing else. Add losses, and call it once.",
    ),
    Row(
        "boost(torch.compile(model))",
        "refused",
        "The strategy divides the model itself. Pass that.",
    ),
    Row(
        "Booster.save_model(prefix=…) Booster.save_optimizer(prefix=…)",
        "refused",
        "Name another directory instead.",
    ),
    Row(
        "HybridParallelPlugin(pp_size=2)",
        "refused",
        "Stages take whole steps. Set another strategy in unipar.yaml, such as fsdp or mesh:tp=2: "
        "execute_pipeline then computes the same, each rank with all layers. For stages, use "
        "unipar.fit with mesh:pp=2.",
    ),
    Row(
        "HybridAdam(bias_correction=False) HybridAdam(nvme_offload_fraction=…) "
        "FusedAdam(amsgrad=…)",
        "refused",
        "PyTorch's Adam has no counterpart. Leave it out.",
    ),
    Row(
        "LowLevelZeroPlugin(use_fp8=True) GeminiPlugin(master_weights=False) "
        "HybridParallelPlugin(fp8_communication=True)",
        "refused",
        "Weights and sums over ranks are fp32. Set precision: fp8 in unipar.yaml, or leave it out.",
    ),
    Row(
        "LowLevelZeroPlugin(extra_dp_size=…) HybridParallelPlugin(custom_policy=…) "
        "HybridParallelPlugin(enable_sequence_parallelism=True) "
        "TorchFSDPPlugin(auto_wrap_policy=…)",
        "refused",
        "No strategy is found that divides a model so. Name one in unipar.yaml, which then "
        "decides, and these are without effect.",
    ),
)

TABLES = (*MODULES.values(), BOOSTER, PLUGIN, OPTIMIZER, CALLS)
_OWNERS = {"Booster": BOOSTER, "plugin": PLUGIN, "optimizer": OPTIMIZER}


def refuse(call: str) -> NoReturn:
    """Raise the error of a call that is refused.

    Raises:
        ConfigError: always.
    """
    owner, _, name = call.partition(".")
    table = _OWNERS.get(owner)
    if table is not None and table.find(name) is not None:
        table.refuse(name, call)
    CALLS.refuse(call, call)
