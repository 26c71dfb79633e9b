"""What the face of PyTorch has in the place of PyTorch's own names; everything else is the same."""

from __future__ import annotations

from unipar.compat.tables import Row, Table

FACE = "unipar.compat.torch"
_NATIVE = "unipar.compat.native"

REPLACED: dict[str, tuple[str, str]] = {
    "torch": (f"{_NATIVE}.calls", "compile save"),
    "torch.nn": (f"{_NATIVE}.wrappers", "DataParallel SyncBatchNorm"),
    "torch.nn.parallel": (f"{_NATIVE}.wrappers", "DataParallel DistributedDataParallel"),
    "torch.nn.parallel.distributed": (f"{_NATIVE}.wrappers", "DistributedDataParallel"),
    "torch.nn.utils": (f"{_NATIVE}.calls", "clip_grad_norm_ clip_grad_value_"),
    "torch.nn.utils.clip_grad": (f"{_NATIVE}.calls", "clip_grad_norm_ clip_grad_value_"),
    "torch.distributed": (
        f"{_NATIVE}.calls",
        "destroy_process_group get_backend get_rank get_world_size init_process_group "
        "is_initialized",
    ),
    "torch.distributed.optim": (f"{_NATIVE}.wrappers", "ZeroRedundancyOptimizer"),
    "torch.distributed.algorithms.join": (f"{_NATIVE}.wrappers", "Join"),
    "torch.distributed.checkpoint.state_dict": (
        f"{_NATIVE}.states",
        "get_model_state_dict get_optimizer_state_dict get_state_dict set_model_state_dict "
        "set_optimizer_state_dict set_state_dict",
    ),
    "torch.distributed.fsdp": (
        f"{_NATIVE}.fsdp",
        "FSDPModule FullyShardedDataParallel fully_shard",
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel": (
        f"{_NATIVE}.fsdp",
        "FullyShardedDataParallel",
    ),
    "torch.distributed._composable.fsdp": (f"{_NATIVE}.fsdp", "FSDPModule fully_shard"),
    "torch.distributed.fsdp.sharded_grad_scaler": (f"{_NATIVE}.scaling", "ShardedGradScaler"),
    "torch.amp": (f"{_NATIVE}.scaling", "GradScaler"),
    "torch.amp.grad_scaler": (f"{_NATIVE}.scaling", "GradScaler"),
    "torch.cuda.amp": (f"{_NATIVE}.scaling", "GradScaler"),
    "torch.cuda.amp.grad_scaler": (f"{_NATIVE}.scaling", "GradScaler"),
}
"""By module of PyTorch: the module that has the face's, and their names."""


def holds_face(module: str) -> bool:
    """Whether a module of PyTorch, or one below it, has names that the face replaces."""
    return any(one == module or one.startswith(f"{module}.") for one in REPLACED)


REFUSED = Table(
    "calls",
    Row("loss.backward(retain_graph=True)", "refused",
        "Under a strategy that divides gradients, and in a script with ranks of its own. Add "
        "losses, and call it once."),
    Row("LBFGS Own(params).step(closure)", "refused",
        "On ranks with data of their own: an engine runs the model once in a step, as optimizers "
        "of torch.optim but LBFGS do with a closure. Use one of these."),
    Row("SGD([*a.parameters(),*b.parameters()])", "refused",
        "On such ranks: an engine trains one nn.Module that is called as a whole. Put them into "
        "one."),
    Row("loss.backward();opt1.step();opt2.step()", "refused",
        "Under a strategy that divides gradients: a loss trains one model. Put both into one "
        "nn.Module with one optimizer, or use ddp."),
    Row("ddp=DDP(model);SGD(model.a.parameters());Adam(model.b.parameters())", "refused",
        "Under every strategy: what is wrapped is trained by one optimizer. Give it all "
        "parameters, in groups; or use ddp, and wrap each part for itself: model.a=DDP(model.a)."),
    Row("p.grad", "refused",
        "Under a strategy that divides gradients, until they are cleared, and what is put there "
        "before a backward pass under one that divides gradients or an optimizer's state. Scale "
        "the loss, clip by clip_grad_norm_, or use ddp."),
    Row("loss.backward()", "refused",
        "After optimizer.step() without optimizer.zero_grad(), under such a strategy: PyTorch "
        "would add to the gradients of the last step."),
    Row("model(x)", "refused",
        "In a script that knows nothing of ranks, where x is another on each of them: seed what it "
        "draws."),
    Row("clip_grad_value_ clip_grad_norm_(norm_type=1)", "refused",
        "Under a strategy that divides gradients, as of some parameters of a model alone: these "
        "clip by the 2-norm of all. Use clip_grad_norm_, or ddp."),
    Row("clip_grad_norm_", "refused",
        "Before scaler.unscale_(optimizer), where it would clip scaled gradients; and, under a "
        "strategy that divides gradients or on ranks with data of their own, before another "
        "backward pass of the step. Clip after the last."),
    Row("clip_grad_norm_(error_if_nonfinite=True)", "refused",
        "Under a strategy that divides gradients, and clips them in the step. Leave it out: a step "
        "that is not finite ends the run, or on_nan: skip leaves it out; or use ddp."),
    Row("scaler.update(new_scale)", "refused",
        "Once an engine scales in the GradScaler's place, by a scale that adapts. Give "
        "GradScaler(init_scale=…, growth_interval=…) how it begins and grows."),
    Row("optimizer.add_param_group", "refused",
        "After the first forward pass, under a strategy that divides state: add the group before, "
        "or use ddp. And, on ranks with data of their own, of parameters of another model, whose "
        "gradients no rank would sum: give these an optimizer of their own, and clear both "
        "before each loss."),
    Row("optimizer.param_groups[0]['params']=… optimizer.param_groups.pop()", "refused",
        "By the next step, where add_param_group is. Under fsdp groups may lose parameters, and "
        "get others of the model."),
    Row("optimizer.state[p]", "refused",
        "Under zero1, zero2, zero3 and ddp with shard_optimizer, which have state in tensors of "
        "their own, or on another rank. Use ddp; what is saved and loaded is whole."),
    Row("functional_call(model,weights,x) p.register_hook", "refused",
        "Under fsdp, the former also under zero3: passes are by what is gathered of weights, and "
        "so are gradients. Under fsdp weights may be changed in place, and by p.data = f(p.data), "
        "also those of a list from before; or use ddp."),
    Row("autocast()", "refused",
        "Around some forward passes of training and not around others: engines compute all of them "
        "in one precision, that of the first."),
    Row("DistributedDataParallel(process_group=…) ddp.register_comm_hook ddp.reducer",
        "refused", "They are DDP's own. The strategy ddp has the option `compression`."),
    Row("FSDP(process_group=…,ignored_modules=…,param_init_fn=…)", "refused",
        "The strategy fsdp divides whole models over all ranks, or by its option `sharding`."),
    Row("MixedPrecisionPolicy(cast_forward_inputs=False) "
        "MixedPrecision(cast_root_forward_inputs=False)", "refused",
        "With a param_dtype, to which the strategy fsdp casts what a model is called with. Leave "
        "param_dtype out, and call the model under torch.autocast."),
    Row("get_optimizer_state_dict(model,[one,other])", "refused",
        "Of a model that is trained, and so are set_optimizer_state_dict and their like: an engine "
        "steps a model by one optimizer. Use the others' own state_dict()."),
    Row("fully_shard(part,mp_policy=…);fully_shard(model)", "refused",
        "Where policies differ in param_dtype: strategies compute all that is trained in one "
        "precision. Give all modules one policy; or none, and have torch.autocast around what is "
        "to be in half precision."),
    Row("model._ddp_params_and_buffers_to_ignore", "refused",
        "On several ranks, but for parameters that are frozen and the same on all of them, and "
        "for buffers under broadcast_buffers=False: strategies sum the gradients of all that is "
        "trained, and give ranks the same weights and buffers. Freeze these, or keep them in a "
        "module that is not wrapped."),
    Row("FSDP.summon_full_params", "refused", "Read model.state_dict() on all ranks."),
    Row("ZeroRedundancyOptimizer", "refused",
        "The strategy divides the state: strategy: {name: ddp, shard_optimizer: true}."),
    Row("ddp.join() Join", "refused",
        "Ranks run as many steps as each other. Use a DistributedSampler."),
    Row("torch.jit.script", "refused",
        "Of a model that is trained, on ranks with data of their own. Leave it out, or use "
        "torch.compile."),
    Row("model.state_dict() optimizer.state_dict()", "refused",
        "In a script with ranks of its own, under a strategy that divides state: call "
        "unipar.compat.torch.whole_state_dict(model) on all ranks."),
    Row("init_process_group(init_method='file://…')", "refused",
        "Start the processes with torchrun, or give tcp://host:port, rank and world_size."),
)  # fmt: skip
"""Calls that are refused where they are made: each names itself, and what to do."""

TABLES = (REFUSED,)
