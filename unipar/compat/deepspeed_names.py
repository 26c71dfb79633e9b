"""What becomes of DeepSpeed's names and keys; the face, its tests and its page go by these."""

from __future__ import annotations

from typing import NoReturn

from unipar.compat.tables import Row, Table

_OWN = "It is a part of DeepSpeed's own machinery. Leave it out."
_PIPELINE = (
    "The pipeline engine runs stages of a model of its own kind. Train the model whole, or cut it "
    "by strategy: mesh with pp (docs/how-to/pipeline-parallelism.md)."
)
_EXPERTS = (
    "Experts are layers of the model here. Keep them as torch modules, and divide them by "
    "strategy: mesh with ep (docs/how-to/expert-parallelism.md)."
)
_INFERENCE = "It serves a model that is trained. Leave it in a script of its own."
_TENSOR = (
    "Set tp below strategy: zero1 to zero3 in unipar.yaml, or use strategy: mesh "
    "(docs/how-to/tensor-parallelism.md)."
)
_READ = "It reads a setting of DeepSpeed's own. Look at engine.config."
_GROUPS = "It is a group of ranks of DeepSpeed's own. Use torch.distributed's groups."
_WHOLE = (
    "Strategies hold parameters, gradients and optimizer state each in its own way. Use "
    "engine.module_state_dict(), engine.save_checkpoint, or engine.get_global_grad_norm()."
)
_OPTIMIZER = "It is an optimizer of DeepSpeed's own. Use FusedAdam, or an optimizer of torch."
_CHECKPOINT = (
    "Checkpoints are unipar's: unipar.checkpoint.load_model reads their weights, and unipar "
    "convert reads DeepSpeed's."
)
_SCALES = (
    "Engines scale the losses of fp16 themselves. engine.optimizer.cur_scale is the scale, and "
    "fp16 in the configuration or loss_scale in unipar.yaml says how it begins and changes."
)
_MEASURE = "It measures DeepSpeed's own modules. Use torch.profiler."

TOP = Table(
    "deepspeed",
    Row(
        "initialize init_distributed add_config_arguments get_accelerator DeepSpeedEngine "
        "DeepSpeedDataLoader log_dist logger comm dist zero ops runtime utils accelerator "
        "checkpointing",
        "kept",
    ),
    Row("PipelineModule PipelineEngine DualPipeVEngine DualPipeVModule pipe", "refused", _PIPELINE),
    Row("moe", "refused", _EXPERTS),
    Row(
        "init_inference default_inference_config InferenceEngine DeepSpeedInferenceConfig "
        "DeepSpeedHybridEngine inference model_implementations module_inject "
        "replace_transformer_layer DeepSpeedTransformer*",
        "refused",
        _INFERENCE,
    ),
    Row("tp_model_init *tp_model_init* set_autotp_mode linear", "refused", _TENSOR),
    Row(
        "DeepSpeedConfig DeepSpeedConfigError load_ds_config",
        "refused",
        "Read the JSON file, and hand the dict to initialize.",
    ),
    Row("profiling monitor autotuning", "refused", _MEASURE),
    Row("checkpoint datastates io", "refused", _CHECKPOINT),
    Row(
        "DeepSpeedOptimizer DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable OnDevice compile "
        "constants git_* pkg_version version set_optimizer_flags KV MLA_KV MLA_Q QUERY "
        "NOT_HEAD_BLOCKED MUON_OPTIMIZER resolve_per_head_muon_after_sharding "
        "TORCH_DISTRIBUTED_DEFAULT_PORT",
        "refused",
        _OWN,
    ),
)

PIPE = Table("deepspeed.pipe", Row("*", "refused", _PIPELINE))
MOE = Table("deepspeed.moe", Row("*", "refused", _EXPERTS))

ENGINE = Table(
    "DeepSpeedEngine",
    Row(
        "backward step forward train eval is_gradient_accumulation_boundary "
        "set_gradient_accumulation_boundary save_checkpoint load_checkpoint save_16bit_model "
        "save_fp16_model module_state_dict load_module_state_dict get_lr get_type get_mom "
        "get_global_grad_norm gradient_accumulation_steps train_batch_size "
        "train_micro_batch_size_per_gpu set_train_batch_size set_train_micro_batch_size "
        "gradient_clipping fp16_enabled bfloat16_enabled zero_optimization "
        "zero_optimization_stage optimizer_name optimizer_params scheduler_name scheduler_params "
        "steps_per_print wall_clock_breakdown was_step_applied deepspeed_io get_data_parallel_rank "
        "get_batch_info dataloader_drop_last destroy zero_grad scale module optimizer lr_scheduler "
        "client_optimizer client_lr_scheduler basic_optimizer training_data training_dataloader "
        "collate_fn config device dist_backend world_size global_rank local_rank dp_world_size "
        "mp_world_size data_parallel_group mpu losses pipeline_parallelism has_moe_layers "
        "sequence_parallel_size global_steps global_samples micro_steps skipped_steps no_sync "
        "loss_scale dynamic_loss_scale initial_dynamic_scale",
        "kept",
    ),
    Row(
        "allreduce_gradients",
        "ignored",
        "Gradients are summed once a step.",
    ),
    Row(
        "empty_partition_cache dump_state print_forward_breakdown is_compiled timers tput_timer "
        "monitor",
        "ignored",
        "It is of DeepSpeed's memory and logs.",
    ),
    Row(
        "compile compile_* *_compile_* *deepcompile_* "
        "get_autosp_backend get_autotp_backend",
        "refused",
        "The strategy compiles the model as it has divided it: use unipar.Session.prepare with "
        "compile, or leave it out.",
    ),
    Row(
        "offload_states reload_states",
        "refused",
        "What lies in host memory is an option of the strategy: offload_optimizer and "
        "offload_parameters, or cpu_offload.",
    ),
    Row("coalesce_grad_reduction", "refused", "Use gradient_accumulation_steps."),
    Row("dynamic_loss_scale_args", "refused", _SCALES),
    Row("load_universal_checkpoint load_moe_state_dict checkpoint_* ", "refused", _CHECKPOINT),
    Row(
        "*curriculum* data_* random_ltd_* set_data_post_process_func",
        "refused",
        "DeepSpeed's data efficiency has no counterpart. Choose the data in the script.",
    ),
    Row(
        "all_gather_scalar allreduce_* sparse_* buffered_allreduce_fallback",
        "refused",
        "Use torch.distributed, or deepspeed.comm.",
    ),
    Row(
        "get_*parallel_* is_first_weights_partition_group *_group seq_dp_world_size mesh_device",
        "refused",
        _GROUPS,
    ),
    Row(
        "checkpoint_engine loaded_checkpoint_* save_zero_checkpoint save_non_zero_checkpoint",
        "refused",
        _CHECKPOINT,
    ),
    Row(
        "engine_timers* enable_backward_allreduce gradient_average inside_no_sync_ctxt flatten "
        "unflatten module_forward_* moe_layers num_experts gate_modules optimized_linear_* "
        "param_names scale_wrt_gas use_ds_comm warn_unscaled_loss dont_change_device zenflow",
        "refused",
        "It is the state of DeepSpeed's own engine.",
    ),
    Row(
        "zero_* *_enabled *_config aio_* amp_* autotp_* autotuning_* bf16_* fp16_* clip_* "
        "collect_* communication_data_type cpuadam_* flops_profiler_* get_data_types "
        "get_optimizer_configuration get_wall_clock_timers gradient_predivide_factor is_* "
        "log_level managed_* memory_breakdown optimizer_legacy_fusion postscale_gradients "
        "super_offload torch_autocast_* use_node_local_storage uses_*",
        "refused",
        _READ,
    ),
)  # fmt: skip

OPTIMIZER = Table(
    "engine.optimizer",
    Row("cur_scale loss_scale overflow", "kept"),
    Row(
        "loss_scaler loss_scale_config dynamic_loss_scale custom_loss_scaler external_loss_scale "
        "override_loss_scale torch_autocast_gradscaler",
        "refused",
        _SCALES,
    ),
    Row("has_overflow check_overflow overflow_checker", "refused",
        "The engine looks for overflows as it steps. Look at engine.optimizer.overflow after it."),
    Row("clip_grad _global_grad_norm scaled_global_norm", "refused",
        "Look at engine.gradient_clipping(), and at engine.get_global_grad_norm() after a step."),
    Row("get_lr set_lr", "refused",
        "Look at engine.get_lr(), and set lr in the groups of optimizer.param_groups."),
    Row("refresh_fp32_params update_lp_params", "refused",
        "Weights are fp32, and no others are to follow them. Leave it out."),
    Row("*", "refused", _WHOLE),
)  # fmt: skip

CONFIG = Table(
    "the configuration",
    Row(
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "gradient_clipping optimizer scheduler zero_optimization fp16 bf16 bfloat16 "
        "torch_autocast dataloader_drop_last aio",
        "kept",
    ),
    Row(
        "steps_per_print wall_clock_breakdown dump_state memory_breakdown log_level comms_logger "
        "flops_profiler timers tensorboard wandb csv_monitor comet",
        "ignored",
        "It writes logs. Log in the script, by engine.get_lr() and the like.",
    ),
    Row(
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather "
        "disable_python_gc activation_checkpointing graph_harvesting compile pipeline "
        "use_data_before_expert_parallelism use_data_before_expert_parallelism_ vocabulary_size",
        "ignored",
        "It is about speed or memory of DeepSpeed's own; strategies have options of theirs.",
    ),
    Row(
        "prescale_gradients gradient_predivide_factor communication_data_type "
        "seq_parallel_communication_data_type data_types",
        "ignored",
        "Gradients are summed in fp32 and averaged once; with torch_autocast too, where DeepSpeed "
        "sums those of linear layers in its dtype.",
    ),
    Row("checkpoint nebula datastates_ckpt", "ignored", "Checkpoints are unipar's."),
    Row("amp", "refused", "Use bf16 or fp16."),
    Row(
        "gradient_allreduce_op",
        "refused",
        "A step is on the mean over ranks. Multiply the loss, and use mean.",
    ),
    Row(
        "managed_gradient_accumulation",
        "refused",
        "Use gradient_accumulation_steps, or engine.set_gradient_accumulation_boundary.",
    ),
    Row("sparse_gradients", "refused", "Use dense embeddings, with sparse=False."),
    Row(
        "curriculum_learning data_efficiency progressive_layer_drop",
        "refused",
        "It changes what is trained on or through. Do it in the script.",
    ),
    Row(
        "compression_training quantize_training weight_quantization eigenvalue sparse_attention",
        "refused",
        "It changes the model. Build the model so.",
    ),
    Row("tensor_parallel", "refused", _TENSOR),
    Row("expert_parallel", "refused", _EXPERTS),
    Row(
        "sequence_parallel_size",
        "refused",
        "Use strategy: mesh with cp (docs/how-to/context-parallelism.md).",
    ),
    Row(
        "elasticity",
        "refused",
        "Give train_batch_size, and let unipar change the number of ranks "
        "(docs/how-to/elastic.md).",
    ),
    Row("autotuning hybrid_engine", "refused", "Leave it out."),
)

FP16 = Table(
    "fp16",
    Row("enabled loss_scale initial_scale_power loss_scale_window", "kept"),
    Row(
        "hysteresis consecutive_hysteresis min_loss_scale",
        "ignored",
        "Each overflow halves the loss scale at once, and there is no lowest one. Set "
        "loss_scale.backoff_factor in unipar.yaml where it is to fall more slowly.",
    ),
    Row("auto_cast fp16_master_weights_and_grads", "ignored",
        "Weights and gradients are fp32, and autocast computes in fp16."),
)  # fmt: skip

ZERO = Table(
    "zero_optimization",
    Row(
        "stage overlap_comm reduce_bucket_size allgather_bucket_size contiguous_gradients "
        "round_robin_gradients stage3_prefetch_bucket_size stage3_param_persistence_threshold "
        "stage3_max_live_parameters sub_group_size offload_optimizer offload_param cpu_offload "
        "reduce_scatter use_multi_rank_bucket_allreduce memory_efficient_linear "
        "stage3_module_granularity_threshold stage3_model_persistence_threshold",
        "kept",
    ),
    Row(
        "allgather_partitions stage3_max_reuse_distance stage3_gather_*_on_model_save "
        "stage3_allgather_sequential stage3_use_all_reduce_for_fetch_params cpu_offload_param "
        "cpu_offload_use_pin_memory elastic_checkpoint load_from_fp32_weights legacy_stage1 "
        "log_trace_cache_warnings override_module_apply parameter_alignment compute_grad_norm "
        "pipeline_loading_checkpoint enable_sanity_checks leaf_module "
        "save_muon_momentum_buffer_in_memory",
        "ignored",
        "It is about speed, memory or files of DeepSpeed's own.",
    ),
    Row(
        "ignore_unused_parameters",
        "ignored",
        "Set unused_parameters below strategy in unipar.yaml: without it a step in which no rank "
        "has used a parameter is an error.",
    ),
    Row(
        "zero_quantized_* zenflow zero_hpz_partition_size mics_*",
        "refused",
        "It changes what is exchanged between ranks. Leave it out.",
    ),
)

NATIVE = (
    "aio", "reduce_scatter", "use_multi_rank_bucket_allreduce", "memory_efficient_linear",
    "stage3_module_granularity_threshold", "stage3_model_persistence_threshold",
)  # fmt: skip
"""Keys that go on to DeepSpeed as they are, where a strategy of its own runs."""

ZERO_MODULE = Table(
    "deepspeed.zero",
    Row("Init GatheredParameters", "kept"),
    Row("register_external_parameter", "ignored",
        "Strategies find out themselves which parameters a module uses."),
    Row("ZeroParamStatus ZeroParamType DeepSpeed* *", "refused", _WHOLE),
)  # fmt: skip

COMM = Table(
    "deepspeed.comm",
    Row(
        "init_distributed is_initialized is_available get_rank get_world_size get_local_rank "
        "get_world_group get_global_rank get_all_ranks_from_group new_group barrier "
        "monitored_barrier destroy_process_group broadcast broadcast_object_list all_reduce "
        "inference_all_reduce all_reduce_coalesced all_gather all_gather_object "
        "all_gather_into_tensor all_gather_coalesced reduce reduce_scatter "
        "reduce_scatter_tensor all_to_all all_to_all_single gather scatter send recv isend irecv "
        "batch_isend_irecv P2POp ProcessGroup ReduceOp GradBucket",
        "kept",
    ),
    Row("configure log_summary reset_log", "ignored", "It is of DeepSpeed's logs."),
    Row("initialize_mesh_device", "refused", "Use strategy: mesh."),
    Row("*", "refused", _OWN),
)

UTILS = Table(
    "deepspeed.utils",
    Row("logger log_dist RepeatingLoader see_memory_usage", "kept"),
    Row(
        "*z3_leaf* instrument_w_nvtx",
        "ignored",
        "It is about speed of DeepSpeed's own.",
    ),
    Row("safe_* *hp_* *_hp *fragment* map_to_flat_opt_states", "refused", _WHOLE),
    Row("zero_to_fp32 *zero_checkpoint*", "refused", _CHECKPOINT),
    Row("*parallel_* groups mpu mesh_device", "refused", _GROUPS),
    Row("*", "refused", _OWN),
)

RUNTIME = Table(
    "deepspeed.runtime",
    Row(
        "DeepSpeedEngine DeepSpeedDataLoader RepeatingLoader see_memory_usage zero lr_schedules",
        "kept",
    ),
    Row("pipe PipelineEngine PipelineModule", "refused", _PIPELINE),
    Row("*", "refused", _OWN),
)

SCHEDULES = Table(
    "deepspeed.runtime.lr_schedules",
    Row("WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest", "kept"),
    Row(
        "add_tuning_arguments parse_arguments get_config_from_args get_lr_from_config override_*",
        "refused",
        "Name the scheduler in the configuration, or build it.",
    ),
    Row("*", "refused", _OWN),
)

ADAM = Table(
    "deepspeed.ops.adam",
    Row("FusedAdam DeepSpeedCPUAdam", "kept"),
    Row("*", "refused", _OPTIMIZER),
)
OPS = Table("deepspeed.ops", Row("adam", "kept"), Row("*", "refused", _OPTIMIZER))

CHECKPOINTING = Table(
    "deepspeed.checkpointing",
    Row("checkpoint non_reentrant_checkpoint", "kept"),
    Row(
        "configure is_configured reset set_num_layers partition_activations_in_checkpoint",
        "ignored",
        "Activations are computed again in the backward pass, and none are divided or moved.",
    ),
    Row("*", "refused", "Use torch.utils.checkpoint."),
)

ACCELERATOR = Table(
    "get_accelerator()",
    Row(
        "device_name current_device_name current_device device device_count set_device "
        "is_available synchronize empty_cache memory_allocated max_memory_allocated "
        "memory_reserved max_memory_reserved memory_cached max_memory_cached memory_stats "
        "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached total_memory "
        "available_memory random manual_seed manual_seed_all initial_seed get_rng_state "
        "set_rng_state default_generator is_bf16_supported is_fp16_supported supported_dtypes "
        "communication_backend_name on_accelerator pin_memory is_pinned Stream stream "
        "current_stream default_stream Event range_push range_pop lazy_call "
        "is_synchronized_device",
        "kept",
    ),
    Row("*", "refused", _OWN),
)

CALLS = Table(
    "calls",
    Row("initialize(mpu=…) initialize(mesh_param=…)", "refused",
        "Ranks are divided otherwise than by data. Use strategy: mesh."),
    Row("engine.backward(loss,retain_graph=True)", "refused",
        "An engine's backward pass takes a loss and nothing else. Add losses, and call it once."),
    Row("load_checkpoint(load_module_strict=False) load_checkpoint(custom_load_fn=…)", "refused",
        "Weights are loaded by name, all of them. Load others before initialize, by "
        "model.load_state_dict."),
    Row("save_checkpoint(exclude_frozen_parameters=True)", "refused",
        "Checkpoints hold the whole model. Leave it out."),
    Row("optimizer.step() optimizer.zero_grad()", "refused",
        "The engine steps and clears. Call engine.step()."),
    Row("engine.train_batch() engine.eval_batch()", "refused", _PIPELINE),
)  # fmt: skip

TABLES = (TOP, CONFIG, FP16, ZERO, ENGINE, OPTIMIZER, CALLS, ZERO_MODULE, COMM, UTILS, RUNTIME,
          SCHEDULES, OPS, ADAM, CHECKPOINTING, ACCELERATOR)  # fmt: skip


def refuse(call: str) -> NoReturn:
    """Raise the error of a call that is refused.

    Raises:
        ConfigError: always.
    """
    CALLS.refuse(call.replace(" ", ""), call)
