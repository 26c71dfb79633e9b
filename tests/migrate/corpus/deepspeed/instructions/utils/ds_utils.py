MICRO_BATCH_SIZE, GLOBAL_BATCH_SIZE = 4, 16


def get_train_ds_config(offload, dtype="fp32", stage=2, max_out_tokens=512):
    device = "cpu" if offload else "none"
    if dtype == "fp16":
        data_type, dtype_config = "fp16", {"enabled": True, "loss_scale_window": 100}
    elif dtype == "bf16":
        data_type, dtype_config = "bfloat16", {"enabled": True}
    else:
        data_type, dtype_config = "bfloat16", {"enabled": False}
    return {
        "train_batch_size": GLOBAL_BATCH_SIZE,
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "steps_per_print": 100,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        data_type: dtype_config,
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }
