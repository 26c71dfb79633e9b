"""How the model is divided, in one place."""

import torch
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

fp32_policy = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32)
wrap_policy = ModuleWrapPolicy({GPT2Block})


def fsdp_settings(device):
    return dict(
        auto_wrap_policy=wrap_policy,
        mixed_precision=fp32_policy,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        sync_module_states=device.type == "cuda",
        limit_all_gathers=True,
        use_orig_params=True,
        device_id=device,
    )
