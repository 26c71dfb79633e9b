"""Horovod scripts: what is rewritten, refused and called out."""

from __future__ import annotations

import pytest
from telling import refusal, told

from unipar.migrate import migrate_source

SCRIPT = """\
import torch
import horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for x, y in data:
    opt.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    opt.step()
"""
WRAP = "opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters())"
ADAM = SCRIPT.replace("optim.SGD", "optim.AdamW")


def test_nothing_of_horovod_is_left() -> None:
    migration = migrate_source(SCRIPT, file="train.py")
    assert migration.code == (
        "import torch\n"
        "from unipar.migrated import script\n"
        "script.open()\n"
        "model = torch.nn.Linear(4, 1)\n"
        "opt = script.prepare(model, optimizer=lambda named: "
        "torch.optim.SGD([p for _, p in named], lr=0.1)).optimizer\n"
        "script.broadcast_weights(model)\n"
        "for x, y in data:\n"
        "    loss = (script.engine(model)(x) - y).square().mean()\n"
        "    script.backward(loss, opt)\n"
        "    script.engine(opt).step()\n"
    )
    assert migration.config == {
        "strategy": {"name": "horovod", "broadcast_buffers": False},
        "device": "cpu",
    }
    assert migration.launcher == "horovodrun"
    assert not migration.notes


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("compression=hvd.Compression.fp16", {"compression": "fp16"}),
        ("compression=hvd.Compression.none", {}),
        ("backward_passes_per_step=n", {}),
        ("op=hvd.Average", {}),
        ("gradient_predivide_factor=2.0", {"gradient_predivide_factor": 2.0}),
        ("num_groups=3", {"num_groups": 3}),
        ("groups=3", {"num_groups": 3}),
        ("sparse_as_dense=True", {"sparse_as_dense": True}),
    ],
)
def test_options_go_to_the_settings(option: str, setting: dict[str, object]) -> None:
    migration = migrate_source(
        SCRIPT.replace("named_parameters())", f"named_parameters(), {option})")
    )
    assert migration.config["strategy"] == {
        "name": "horovod",
        "broadcast_buffers": False,
        **setting,
    }
    assert "hvd" not in migration.code


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("s())", "s(), op=hvd.Adasum)", "Adasum is another update than that by the average"),
        ("s())", "s(), op=hvd.Sum)", "for hvd.Sum multiply the loss by hvd.size()"),
        ("s())", "s(), op=hvd.Adasum if a else hvd.Average)", "Adasum is another update"),
        ("s())", "s(), process_set=even)", "unipar.yaml cannot say `process_set=even`"),
        ("s())", "s(), num_groups=n)", "cannot say `num_groups=n`"),
        ("opt = hvd", "other = hvd", "it steps the optimizer inside, which does not wait until"),
        ("import torch\n", "import torch, horovod\nhorovod.run(main, np=2)\n",
         "Call the function itself, and start the script with torchrun or horovodrun."),
        ("s())", "s(), compression=squeeze)", "it cannot be seen what compresses gradients"),
        (WRAP, f"if hvd.size() > 1: {WRAP}", "whether the optimizer is wrapped is decided"),
        (WRAP, "", "not wrapped in hvd.DistributedOptimizer, so its model's replicas drift apart"),
        ("hvd.init()", "if many: hvd.init()", "whether the run is distributed is decided"),
        ("hvd.init()", "hvd.init(comm=[0, 1])", "sets of ranks are for other divisions"),
        ("root_rank=0", "root_rank=1", "it is another rank than 0, or it is decided"),
        ("model.state_dict()", "weights", "it cannot be seen which model's weights these are"),
        ("    opt.step()", "    opt.step()\nhvd.join()", "ranks run different numbers of steps"),
        ("    opt.step()", "    opt.step()\nhvd.alltoall(x)", "this is Horovod's own"),
        ("    opt.step()", "    opt.step()\nhelp(hvd)", "this is Horovod's own"),
        ("for x", "state = hvd.elastic.TorchState(model)\nfor x", "the number of ranks may change"),
        ("Linear(4, 1)", "Sequential(hvd.SyncBatchNorm(3))", "the strategy converts the model"),
        ("    opt.step()", "    opt.step()\nhvd.allreduce(x, op=how)", "how it is reduced"),
        ("    opt.step()", "    opt.step()\nhvd.allreduce(x, prescale_factor=2)", "has no counter"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused(old: str, new: str, said: str) -> None:
    assert said in refusal(SCRIPT.replace(old, new, 1))


def test_a_fresh_optimizers_hidden_step_is_kept_and_called_out() -> None:
    line = "hvd.broadcast_optimizer_state(opt, root_rank=0)\n"
    migration = migrate_source(ADAM.replace("for x", f"{line}for x"))
    assert "script.broadcast_optimizer(opt)\n" in migration.code
    assert (
        "Horovod takes a step on gradients of zero here, which shrinks weights by lr * "
        "weight_decay once, and counts as Adam's first, so that its next is 0.74 times as long."
    ) in told(migration, "training")
    plain = migrate_source(SCRIPT.replace("for x", f"{line}for x"))
    assert not told(plain, "training")


def test_parts_that_gradients_are_divided_in_are_rounding_alone() -> None:
    migration = migrate_source(SCRIPT.replace("s())", "s(), gradient_predivide_factor=args.f)", 1))
    assert "gradient_predivide_factor" not in str(migration.config)
    assert "which differs in rounding alone" in told(migration, "changed")


def test_the_state_that_wrapping_throws_away_is_called_out() -> None:
    early = ADAM.replace(WRAP, f"hvd.broadcast_optimizer_state(opt, root_rank=0)\n{WRAP}")
    assert "script.broadcast_optimizer(opt, counted=False)" in migrate_source(early).code
    loaded = migrate_source(ADAM.replace(WRAP, f"opt.load_state_dict(old)\n{WRAP}"))
    assert "threw this state away, so that moments began at zero; it is kept" in told(
        loaded, "training"
    )


def test_clipping_without_synchronize_is_called_out() -> None:
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    bare = migrate_source(SCRIPT.replace("    opt.step()", f"    {clip}\n    opt.step()"))
    assert "max_grad_norm=1.0" in bare.code
    assert "gradients were clipped while Horovod averaged them" in told(bare, "training")
    complete = migrate_source(
        SCRIPT.replace(
            "    opt.step()",
            f"    opt.synchronize()\n    {clip}\n    with opt.skip_synchronize():\n"
            "        opt.step()  # after clipping",
        )
    )
    assert not told(complete, "training")
    assert complete.code.endswith("    script.engine(opt).step()  # after clipping\n")


def test_compression_that_the_command_line_decides_is_called_out() -> None:
    migration = migrate_source(
        SCRIPT.replace(
            WRAP,
            "how = hvd.Compression.fp16 if args.half else hvd.Compression.none\n"
            + WRAP.replace("s())", "s(), compression=how)"),
        )
    )
    assert "was decided while it runs; now they are not" in told(migration, "training")
    assert "how =" not in migration.code


def test_a_file_that_only_imports_it_is_left_alone() -> None:
    assert "no hvd.init() is seen" in refusal("from horovod.torch import rank\n")


@pytest.mark.parametrize(
    ("call", "becomes"),
    [
        ("hvd.allreduce(x, name='x')", "script.all_reduce(x)"),
        ("hvd.allreduce(x, average=False)", 'script.all_reduce(x, "sum")'),
        ("hvd.allreduce(x, op=hvd.Max)", 'script.all_reduce(x, "max")'),
        ("hvd.allgather(x, name='x')", "script.all_gather(x)"),
        ("hvd.allgather_object(hvd.rank())", "script.world().gather(script.world().rank)"),
        ("hvd.broadcast_object(x, 0)", "script.world().broadcast(x)"),
        ("hvd.local_size()", "script.placement().local_size"),
        ("hvd.barrier()", "script.world().barrier()"),
    ],
)  # fmt: skip
def test_exchanges_between_ranks(call: str, becomes: str) -> None:
    assert migrate_source(f"{SCRIPT}z = {call}\n").code.endswith(f"z = {becomes}\n")


@pytest.mark.parametrize(
    ("line", "rest"),
    [
        ("import os, horovod.torch as hvd", "import os"),
        ("from horovod import torch as hvd", ""),
        ("try:\n    import horovod.torch as hvd\nexcept ImportError:\n    hvd = None",
         "try:\n    pass\nexcept ImportError:\n    hvd = None"),
    ],
)  # fmt: skip
def test_imports_go(line: str, rest: str) -> None:
    code = migrate_source(SCRIPT.replace("import horovod.torch as hvd", line)).code
    assert rest in code
    assert "horovod" not in code


FLAGGED = """\
import argparse
import torch
import torch.nn.functional as F
import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--use-mixed-precision", action="store_true", default=False)
args = parser.parse_args()
hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train_mixed_precision(scaler):
    for data, target in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(data), target)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()


def train_epoch():
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()


def test():
    model.eval()
    with torch.no_grad():
        for data, target in loader:
            print(F.cross_entropy(model(data), target))


if args.use_mixed_precision:
    train_mixed_precision(torch.amp.GradScaler("cuda"))
else:
    train_epoch()
test()
"""


def test_a_training_forward_outside_the_autocast_of_a_script_is_refused() -> None:
    said = refusal(FLAGGED)
    (line,) = said.splitlines()
    assert line.startswith("train.py:32: refused: model(data): the script has autocast, and this ")
    assert "with enabled=args.amp, where a flag decides, in place of two branches" in line


def test_autocast_with_a_flag_takes_the_place_of_two_branches() -> None:
    begin, end = FLAGGED.index("def train_epoch"), FLAGGED.index("def test()")
    one = (FLAGGED[:begin] + FLAGGED[end:]).replace("\nelse:\n    train_epoch()", "")
    asked = "enabled=args.use_mixed_precision"
    one = one.replace("torch.float16", f"torch.float16, {asked}").replace(
        'if args.use_mixed_precision:\n    train_mixed_precision(torch.amp.GradScaler("cuda"))',
        f'train_mixed_precision(torch.amp.GradScaler("cuda", {asked}))',
    )
    migration = migrate_source(one)
    assert migration.changed, [str(note) for note in migration.notes]
    assert migration.config["precision"] == "fp32"
    assert "script.engine(model)(data), target)\n        script.backward" in migration.code
    assert "print(F.cross_entropy(model(data), target))" in migration.code


@pytest.mark.parametrize("decorator", ["torch.no_grad()", "torch.inference_mode()"])
def test_what_only_evaluates_needs_no_autocast(decorator: str) -> None:
    bare = FLAGGED.replace("    with torch.no_grad():\n", "    if True:\n")
    assert len(refusal(bare).splitlines()) == 2
    source = bare.replace("def test():", f"@{decorator}\ndef test():")
    assert len(refusal(source).splitlines()) == 1
