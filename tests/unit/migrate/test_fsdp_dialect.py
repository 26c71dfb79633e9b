"""FSDP scripts: what becomes of their settings and states, and what is refused."""

from __future__ import annotations

import pytest
from telling import refusal

from unipar.migrate import migrate_source

ONE = """\
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
dist.init_process_group("gloo")
model = FSDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TWO = """\
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
fully_shard(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """\
for x, y in data:
    opt.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {"wrap": "none"}),
        (", auto_wrap_policy=ModuleWrapPolicy({nn.Linear})", {"wrap": ["Linear"]}),
        (
            ", auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=int(1e3))",
            {"wrap_min_params": 1000},
        ),
        (
            ", auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=1000)",
            {"wrap_min_params": 1000},
        ),
        (
            ", sharding_strategy=ShardingStrategy.SHARD_GRAD_OP",
            {"wrap": "none", "sharding": "grad_op"},
        ),
        (", cpu_offload=CPUOffload(offload_params=True)", {"cpu_offload": True, "wrap": "none"}),
        (", device_id=0, limit_all_gathers=True, use_orig_params=True", {"wrap": "none"}),
    ],
)
def test_arguments_of_the_wrapper_become_options(given: str, expected: dict) -> None:
    head = """\
from functools import partial
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
"""
    source = head + ONE.replace("Linear(4, 1))", f"Linear(4, 1){given})") + LOOP
    migration = migrate_source(source)
    assert migration.config["strategy"] == {"name": "fsdp", **expected}
    assert "model = torch.nn.Linear(4, 1)\n" in migration.code


def test_no_sharding_is_ddp() -> None:
    head = "from torch.distributed.fsdp import ShardingStrategy as How\n"
    source = ONE.replace("Linear(4, 1))", "Linear(4, 1), sharding_strategy=How.NO_SHARD)")
    assert migrate_source(head + source + LOOP).config["strategy"] == "ddp"


def test_blocks_that_are_divided_in_a_loop_are_found_by_the_strategy() -> None:
    loop = "for layer in model:\n    fully_shard(layer)\n"
    source = TWO.replace("fully_shard(model)\n", f"{loop}fully_shard(model)\n") + LOOP
    migration = migrate_source(source)
    assert migration.config["strategy"] == "fsdp"
    assert "for layer in model" not in migration.code


def test_settings_are_followed_through_names_and_taken_out_with_their_last_use() -> None:
    head = "from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy\n"
    lines = (
        "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"
        'options = {"mp_policy": policy}\noptions["offload_policy"] = CPUOffloadPolicy()\n'
    )
    source = TWO.replace("fully_shard(model)", f"{lines}fully_shard(model, **options)")
    migration = migrate_source(head + source + LOOP)
    assert migration.config["strategy"] == {"name": "fsdp", "cpu_offload": True, "wrap": "none"}
    assert migration.config["precision"] == "bf16"
    (warned,) = [note for note in migration.notes if note.kind == "training"]
    assert "losses differ by up to 2^-8 of themselves, towards float32's" in warned.why


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("FSDP(torch.nn.Linear(4, 1))", "FSDP(torch.nn.Linear(4, 1), ignored_modules=[m])",
         "unipar.yaml cannot say ignored_modules"),
        ("FSDP(torch.nn.Linear(4, 1))", "FSDP(torch.nn.Linear(4, 1), process_group=g)",
         "unipar.yaml cannot say process_group"),
        ("FSDP(torch.nn.Linear(4, 1))", "FSDP(torch.nn.Linear(4, 1), sharding_strategy=s)",
         "cannot say the sharding strategy `s`"),
        ("FSDP(torch.nn.Linear(4, 1))",
         "FSDP(torch.nn.Linear(4, 1), mixed_precision=MixedPrecision() if half else None)",
         "what mixed_precision is, is decided while it runs"),
        ('dist.init_process_group("gloo")\n', "", "no init_process_group is seen"),
        ("FSDP(torch.nn.Linear(4, 1))", "torch.nn.Linear(4, 1)\nif big: model = FSDP(model)",
         "whether the model is divided is decided while it runs"),
        ("opt = ", "with FSDP.summon_full_params(model): print(model)\nopt = ",
         "this is FSDP's own"),
    ],
)  # fmt: skip
def test_what_unipar_cannot_say_is_refused(old: str, new: str, said: str) -> None:
    head = "from torch.distributed.fsdp import MixedPrecision\n"
    assert old in ONE
    assert said in refusal(head + ONE.replace(old, new) + LOOP)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch.save(opt.state_dict(), 'a')", "one rank's part of the optimizer's state"),
        ("if dist.get_rank() == 0: print(model.state_dict())", "only some come here"),
        ("with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT): model.state_dict()",
         "they are of one rank's part"),
    ],
)  # fmt: skip
def test_states_of_a_part_are_refused(line: str, said: str) -> None:
    head = "from torch.distributed.fsdp import StateDictType\n"
    assert said in refusal(head + ONE + LOOP + line + "\n")


def test_a_model_that_is_built_on_meta_is_refused() -> None:
    source = TWO.replace("model = ", "with torch.device('meta'):\n    model = ")
    assert "how weights begin is the strategy's" in refusal(source + LOOP)
    emptied = TWO.replace("opt =", "model.to_empty(device='cpu')\nopt =")
    assert "how weights begin is the strategy's" in refusal(emptied + LOOP)


def test_clipping_each_part_by_its_own_norm_is_called_out() -> None:
    clip = "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    opt.step()"
    migration = migrate_source(ONE + LOOP.replace("    opt.step()", clip), file="train.py")
    (note,) = migration.notes
    assert (note.kind, note.line) == ("training", 10)
    assert "a part's norm is about 1/sqrt(n) of the whole" in note.why
    assert "# unipar: each rank clips its part" in migration.code
    right = migrate_source(TWO + LOOP.replace("    opt.step()", clip))
    assert not right.notes
    assert "max_grad_norm=1.0" in right.code


def test_parts_of_models_of_different_seeds_are_called_out() -> None:
    source = TWO.replace("model = ", "torch.manual_seed(dist.get_rank())\nmodel = ") + LOOP
    said = [note.why for note in migrate_source(source).notes if note.kind == "training"]
    assert any("FSDP began with parts of different models" in why for why in said)


def test_state_contexts_go_and_their_blocks_move_left() -> None:
    head = "from torch.distributed.fsdp import StateDictType, FullStateDictConfig\n"
    tail = """\
config = FullStateDictConfig(rank0_only=True)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
    # whole
    weights = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(weights, "a.pt")
opt.load_state_dict(FSDP.optim_state_dict_to_load(model, opt, torch.load("b.pt")))
"""
    code = migrate_source(head + ONE + LOOP + tail).code
    assert code.endswith("""\
# whole
weights = script.gathered(model, rank0_only=True).state_dict()
if dist.get_rank() == 0:
    torch.save(weights, "a.pt")
script.gathered(opt).load_state_dict(torch.load("b.pt"))
""")


def test_a_context_around_a_long_string_stays_as_one_that_does_nothing() -> None:
    head = "from torch.distributed.fsdp import StateDictType\n"
    tail = (
        "with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):\n"
        '    print("""a\n    b""", model.state_dict())\n'
    )
    code = migrate_source(head + ONE + LOOP + tail).code
    assert 'with contextlib.nullcontext():\n    print("""a\n    b"""' in code
    assert "import contextlib\n" in code


def test_full_tensors_of_a_state_dict_are_there_already() -> None:
    tail = "whole = {k: v.full_tensor() for k, v in model.state_dict().items()}\n"
    assert "{k: v for k, v in script.gathered(model).state_dict().items()}" in migrate_source(
        TWO + LOOP + tail
    ).code  # fmt: skip
    tail = "for p in model.parameters(): print(p.full_tensor())\n"
    assert "it cannot be seen that this is of a state dict" in refusal(TWO + LOOP + tail)


def test_a_norm_is_whole_already() -> None:
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    loop = LOOP.replace("    opt.step()", f"    norm = {clip}\n    opt.step()")
    code = migrate_source(TWO + loop + "    print(norm.full_tensor().item())\n").code
    assert "norm = script.grad_norm(script.engine(opt).step())\n    print(norm.item())\n" in code


def test_fp16_wants_its_scaler() -> None:
    head = (
        "from torch.distributed.fsdp import MixedPrecision\n"
        "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n"
        "scaler = ShardedGradScaler()\n"
    )
    half = ONE.replace("4, 1))", "4, 1), mixed_precision=MixedPrecision(torch.float16))")
    scaled = LOOP.replace("loss.backward()", "scaler.scale(loss).backward()").replace(
        "opt.step()", "scaler.step(opt)\n    scaler.update()"
    )
    migration = migrate_source(head + half + scaled)
    assert migration.config["precision"] == "fp16"
    assert "scaler = None\n" in migration.code
    assert any("overflows above 65504" in note.why for note in migration.notes)
    head = head.rpartition("from")[0]
    assert "fp16 without a ShardedGradScaler" in refusal(head + half + LOOP)


def test_an_optimizer_from_before_the_division_is_called_out() -> None:
    lines = TWO.splitlines(keepends=True)
    early = "".join([*lines[:4], lines[5], lines[4]])
    (note,) = migrate_source(early + LOOP).notes
    assert note.kind == "training"
    assert "the model stayed as it was; now it trains" in note.why
    lines = ONE.replace("model = FSDP(torch.nn", "model = torch.nn").splitlines(keepends=True)
    lines[3] = lines[3].replace("1))", "1)")
    for kept in (True, False):
        wrap = f"model = FSDP(model, use_orig_params={kept})\n"
        notes = migrate_source("".join([*lines, wrap]) + LOOP).notes
        assert bool(notes) != kept
    assert not migrate_source(TWO + LOOP).notes
