"""What becomes of Accelerate's names; the tests and the page go by these tables."""

from __future__ import annotations

from typing import NoReturn

from unipar.compat.tables import Row, Table

_BY_OPTIONS = "It is an option of a strategy: name it in unipar.yaml (docs/strategies.md)."
_LARGE = (
    "It spreads a model for inference over devices. Load the model on one, or train it under fsdp "
    "or zero3, which divide it."
)
_ITS_OWN = "It is a part of Accelerate's own machinery. Leave it out."

TOP = Table(
    "accelerate",
    Row(
        "Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration "
        "DeepSpeedPlugin DistributedDataParallelKwargs DistributedType "
        "FullyShardedDataParallelPlugin GradScalerKwargs InitProcessGroupKwargs PartialState "
        "ProfileKwargs find_executable_batch_size notebook_launcher debug_launcher "
        "is_rich_available skip_first_batches synchronize_rng_states accelerator data_loader "
        "launchers logging optimizer scheduler state tracking utils",
        "kept",
    ),
    Row(
        "cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_empty_weights "
        "init_on_device infer_auto_device_map load_checkpoint_and_dispatch "
        "load_checkpoint_in_model prepare_pippy",
        "refused",
        _LARGE,
    ),
    Row("ParallelismConfig", "refused", f"Use strategy: mesh. {_BY_OPTIONS}"),
    Row("rich", "refused", "Import rich itself."),
    Row("big_modeling hooks inference", "refused", _LARGE),
    Row("checkpointing commands parallelism_config", "refused", _ITS_OWN),
)

UTILS = Table(
    "accelerate.utils",
    Row(
        "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin "
        "DistributedDataParallelKwargs DistributedType DynamoBackend "
        "FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin "
        "InitProcessGroupKwargs KwargsHandler LoggerType PrecisionType ProfileKwargs "
        "ProjectConfiguration RNGType TorchDynamoPlugin",
        "kept",
    ),
    Row(
        "set_seed synchronize_rng_state synchronize_rng_states find_executable_batch_size "
        "release_memory extract_model_from_parallel is_compiled_module tqdm save load "
        "wait_for_everyone",
        "kept",
    ),
    Row(
        "gather gather_object reduce broadcast broadcast_object_list pad_across_processes "
        "send_to_device concatenate find_batch_size convert_to_fp32 convert_outputs_to_fp32 "
        "recursively_apply slice_tensors honor_type is_torch_tensor listify",
        "kept",
    ),
    Row(
        "is_*_available",
        "kept",
    ),
    Row(
        "MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME "
        "SAFE_WEIGHTS_NAME "
        "SAMPLER_NAME SCALER_NAME SCHEDULER_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME",
        "kept",
    ),
    Row("write_basic_config", "ignored", "Settings stand in unipar.yaml."),
    Row(
        "DummyOptim DummyScheduler",
        "refused",
        "Build the optimizer and the scheduler in the script; every strategy takes them.",
    ),
    Row(
        "DeepSpeed* HfDeepSpeedConfig get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed "
        "GatheredParameters prepare_deepspeed_cmd_env deepspeed_required",
        "refused",
        "DeepSpeed's objects are behind the strategies zero1, zero2 and zero3, which take its "
        "configuration by DeepSpeedPlugin(hf_ds_config=…) or in unipar.yaml.",
    ),
    Row(
        "fsdp2_* load_fsdp_* save_fsdp_* merge_fsdp_weights *_fsdp_ram_efficient_loading "
        "ensure_weights_retied get_fsdp2_grad_scaler",
        "refused",
        "Use accelerator.save_state, load_state and save_model, which work under any strategy.",
    ),
    Row(
        "*bnb* Bnb* load_and_quantize_model", "refused", "Quantize by the library's own functions."
    ),
    Row("*Config", "refused", _BY_OPTIONS),
    Row(
        "*megatron* Megatron* *TrainStep avg_losses_across_data_parallel_group "
        "gather_across_data_parallel_groups",
        "refused",
        "There is no strategy of Megatron-LM's. Use strategy: mesh.",
    ),
    Row(
        "FP8RecipeKwargs AORecipeKwargs MSAMPRecipeKwargs TERecipeKwargs convert_model* *fp8* "
        "*transformer_engine* has_ao_layers filter_first_and_last_linear_layers torchao_required",
        "refused",
        "Use mixed_precision='fp8', or precision: fp8 in unipar.yaml.",
    ),
    Row("TorchTensorParallelPlugin get_model_tp_size model_has_dtensor", "refused", _BY_OPTIONS),
    Row(
        "SageMaker* ComputeEnvironment *sagemager* *_launch* LAUNCH* PrepareForLaunch "
        "prepare_*_env prepare_tpu _filter_args purge_accelerate_environment",
        "refused",
        "Start the script by torchrun, or another launcher of unipar's.",
    ),
    Row(
        "compile_regions* has_compiled_regions get_mixed_precision_context_manager get_grad_scaler",
        "refused",
        "The strategy does it: pass dynamo_backend or mixed_precision to the Accelerator.",
    ),
    Row(
        "*device_map* *offload* *Offload* PrefixedDataset set_module_tensor_to_device "
        "load_checkpoint_in_model load_state_dict get_balanced_memory get_max_memory "
        "get_max_layer_size calculate_maximum_sizes compute_module_sizes align_module_device "
        "named_module_tensors extract_submodules_state_dict CustomDtype dtype_byte_size "
        "convert_file_size_to_int id_tensor_storage check_tied_* find_tied_parameters "
        "retie_parameters is_peft_model get_module_children_bottom_up",
        "refused",
        _LARGE,
    ),
    Row(
        "are_libraries_initialized check_cuda_p2p_ib_support check_os_kernel clear_environment "
        "clean_state_dict_for_safetensors convert_bytes convert_dict_to_env_variables "
        "copy_tensor_to_devices find_device get_cpu_distributed_information "
        "get_current_device_type get_data_structure get_gpu_info get_int_from_env "
        "get_pretty_name ignorant_find_batch_size initialize_tensors install_xla "
        "is_habana_gaudi1 is_namedtuple is_port_in_use is_tensor_information merge_dicts "
        "pad_input_tensors parse_choice_from_env parse_flag_from_env patch_environment "
        "recursive_getattr set_numa_affinity str_to_bool CannotPadNestedTensorWarning "
        "TensorInformation compare_versions is_torch_version *_PYTORCH_VERSION "
        "*_PATTERN_NAME TORCH_*",
        "refused",
        _ITS_OWN,
    ),
)

ACCELERATOR = Table(
    "Accelerator",
    Row(
        "accumulate autocast backward check_trigger clear clip_grad_norm_ clip_grad_value_ device "
        "dispatch_batches distributed_type end_training even_batches free_memory gather "
        "gather_for_metrics get_state_dict get_tracker gradient_accumulation_steps init_trackers "
        "is_last_process is_local_main_process is_main_process join_uneven_inputs load_state "
        "local_main_process_first local_process_index log logging_dir main_process_first "
        "mixed_precision multi_device num_processes on_last_process on_local_main_process "
        "on_local_process on_main_process on_process optimizer_step_was_skipped "
        "pad_across_processes prepare prepare_data_loader prepare_model prepare_optimizer "
        "prepare_scheduler print process_index profile project_dir reduce "
        "register_for_checkpointing register_load_state_pre_hook register_save_state_pre_hook "
        "save save_iteration save_model save_state set_trigger should_save_model "
        "skip_first_batches split_batches split_between_processes no_sync sync_gradients "
        "trigger_sync_in_backward unwrap_model use_distributed use_seedable_sampler "
        "verify_device_map wait_for_everyone",
        "kept",
    ),
    Row("unscale_gradients", "ignored", "Engines unscale gradients before they clip them."),
    Row("non_blocking", "ignored", "Copies to a GPU overlap wherever they can."),
    Row(
        "deepspeed_plugin deepspeed_ulysses_dl_adapter parallelism_config maybe_context_parallel "
        "torch_device_mesh *_parallel_rank data_parallel_shard_rank "
        "is_composable_parallelism_enabled is_fsdp2",
        "refused",
        _BY_OPTIONS,
    ),
    Row("fp8_backend", "refused", "Use mixed_precision='fp8', or precision: fp8 in unipar.yaml."),
    Row("lomo_backward", "refused", "Its optimizer steps within the backward pass. Use AdamW."),
    Row(
        "use_stateful_dataloader",
        "refused",
        "Use skip_first_batches to go on within an epoch.",
    ),
)

CALLS = Table(
    "calls",
    Row(
        "Accelerator.backward(loss,retain_graph=…)",
        "refused",
        "An engine's backward pass takes a loss and nothing else. Add losses, and call it once.",
    ),
    Row(
        "Accelerator(torch_tp_plugin=…) Accelerator(megatron_lm_plugin=…) "
        "Accelerator(parallelism_config=…)",
        "refused",
        f"Use strategy: mesh. {_BY_OPTIONS}",
    ),
    Row(
        "Accelerator(deepspeed_plugins={…})",
        "refused",
        "A run has one strategy. Give one plugin.",
    ),
    Row(
        "kwargs_handlers=[AutocastKwargs(enabled=False)]",
        "refused",
        "Models compute in the run's precision. Use mixed_precision='no', or autocast() around "
        "what is to be in fp32.",
    ),
    Row(
        "prepare_data_loader(slice_fn_for_dispatch=…)",
        "refused",
        "Batches are cut along their first dimension. Use dispatch_batches=False.",
    ),
    Row(
        "prepare(torch.compile(model))",
        "refused",
        "The strategy compiles the model as it has divided it. Pass the model itself, and "
        "dynamo_backend='inductor' to the Accelerator.",
    ),
    Row(
        "register_save_state_pre_hook(…) register_load_state_pre_hook(…)",
        "refused",
        "Under strategies that divide the run's state: they are given whole weights. Use ddp; or "
        "write what is the script's own beside save_state, or register_for_checkpointing it.",
    ),
    Row(
        "LocalSGD(enabled=True)",
        "refused",
        "Strategies reduce gradients in every step, and weights never differ between ranks. Use "
        "more gradient_accumulation_steps, or enabled=False.",
    ),
    Row(
        "notebook_launcher(num_processes>1)",
        "refused",
        "A notebook is one process here. Call unipar.fit with devices, or write a script and start "
        "it by torchrun.",
    ),
)

TABLES = (TOP, UTILS, ACCELERATOR, CALLS)


def refuse(call: str) -> NoReturn:
    """Raise the error of a call that is refused.

    Raises:
        ConfigError: always.
    """
    found = ACCELERATOR if ACCELERATOR.find(call.removeprefix("Accelerator.")) else CALLS
    key = call.removeprefix("Accelerator.") if found is ACCELERATOR else call.replace(" ", "")
    found.refuse(key, call)
