"""DeepSpeed scripts: what is rewritten, refused and called out."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from telling import refusal, told

from unipar.migrate import migrate_files, migrate_source
from unipar.migrated.stepped import Warmup

HEAD = """\
import torch, deepspeed
model = torch.nn.Linear(4, 1)
"""
BUILT = "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
CALL = "engine, opt, _, _ = deepspeed.initialize(model=model, optimizer=opt, config=config)\n"
LOOP = """\
for x, y in data:
    loss = (engine(x) - y).square().mean()
    engine.backward(loss)
    engine.step()
"""


def script(config: Any, call: str = CALL, built: str = BUILT) -> str:
    return f"{HEAD}config = {config!r}\n{built}{call}{LOOP}"


SMALL = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}


def test_nothing_of_deepspeed_is_left_and_the_loop_stays() -> None:
    migration = migrate_source(script(SMALL), file="train.py")
    assert migration.code == (
        "import torch\n"
        "from unipar.migrated import script, stepped\n"
        "model = torch.nn.Linear(4, 1)\n"
        "opt = script.prepare(model, optimizer=lambda named: "
        "torch.optim.SGD([p for _, p in named], lr=0.1)).optimizer\n"
        "engine, opt, _, _ = stepped.initialize(model, optimizer=opt, micro_batch_size=4)\n" + LOOP
    )
    assert migration.config == {"strategy": {"name": "deepspeed", "stage": 0}, "device": "cpu"}
    assert migration.launcher == "torchrun"
    assert not migration.notes


@pytest.mark.parametrize(
    ("zero", "options"),
    [
        ({"stage": 1, "overlap_comm": True}, {"stage": 1, "overlap_comm": True}),
        ({"stage": 2, "reduce_bucket_size": 5e8}, {"stage": 2, "reduce_bucket_size": 500_000_000}),
        ({"stage": 2, "stage3_max_live_parameters": 5}, {"stage": 2}),
        ({"stage": 3, "stage3_max_live_parameters": 5}, {"stage": 3, "max_live_parameters": 5}),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
         {"stage": 2, "offload_optimizer": True, "pin_memory": True}),
        ({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local"}},
         {"stage": 3, "offload_parameters": True, "nvme_path": "/local"}),
        ({"stage": 3, "offload_optimizer": {"device": "none"}}, {"stage": 3}),
        ({"stage": 1, "reduce_scatter": False},
         {"stage": 1, "native": {"zero_optimization": {"reduce_scatter": False}}}),
        ({}, {"stage": 0}),
    ],
)  # fmt: skip
def test_zero_becomes_options_of_the_strategy(
    zero: dict[str, Any], options: dict[str, Any]
) -> None:
    migration = migrate_source(script({**SMALL, "zero_optimization": zero}))
    assert migration.config["strategy"] == {"name": "deepspeed", **options}


def test_a_strategy_takes_the_options_that_are_written() -> None:
    options = pytest.importorskip("unipar_deepspeed.options")
    zero = {
        "stage": 3, "overlap_comm": False, "reduce_bucket_size": 2e6, "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": 1e6, "stage3_param_persistence_threshold": 1e4,
        "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
    }  # fmt: skip
    strategy = dict(migrate_source(script({**SMALL, "zero_optimization": zero})).config["strategy"])
    assert strategy.pop("name") == "deepspeed"
    assert options.DeepSpeedOptions(**strategy).persistence_threshold == 10_000


@pytest.mark.parametrize(
    ("section", "optimizer"),
    [
        ({"type": "Adam", "params": {"lr": 0.1}},
         "torch.optim.AdamW([p for _, p in named], lr=0.1, weight_decay=0.0)"),
        ({"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}},
         "torch.optim.Adam([p for _, p in named], lr=0.1)"),
        ({"type": "AdamW", "params": {"betas": [0.9, 0.95], "torch_adam": True}},
         "torch.optim.AdamW([p for _, p in named], betas=(0.9, 0.95))"),
        ({"type": "SGD", "params": {"lr": 0.1}}, "torch.optim.SGD([p for _, p in named], lr=0.1)"),
    ],
)  # fmt: skip
def test_optimizers_of_the_configuration(section: dict[str, Any], optimizer: str) -> None:
    call = CALL.replace("optimizer=opt", "model_parameters=model.parameters()")
    code = migrate_source(script({**SMALL, "optimizer": section}, call, "")).code
    assert f"stepped.initialize(model, optimizer=lambda named: {optimizer}, micro" in code


def test_schedules_of_the_configuration() -> None:
    section = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3}}
    code = migrate_source(script({**SMALL, "scheduler": section})).code
    assert (
        "lr_scheduler=lambda optimizer: "
        "stepped.Warmup(optimizer, max_lr=0.001, total_steps=9, num_steps=3)"
    ) in code


def test_schedules_have_deepspeeds_rates() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = Warmup(optimizer, max_lr=1.0, num_steps=4, total_steps=8)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(8):
        schedule.step()
        rates += schedule.get_last_lr()
    logs = [math.log(n) / math.log(4) for n in (1, 2, 3, 4)]
    assert rates == pytest.approx([0.0, *logs, 1.0, 0.75, 0.5, 0.25])
    again = Warmup(optimizer, max_lr=1.0, num_steps=4, total_steps=8)
    again.load_state_dict(schedule.state_dict())
    again.step()
    assert again.get_last_lr() == [0.0]


def test_clipping_that_nobody_asked_for_is_kept_and_called_out() -> None:
    migration = migrate_source(script({"train_micro_batch_size_per_gpu": 4}))
    assert "max_grad_norm=1.0).optimizer" in migration.code
    assert "DeepSpeed 0.19 then clips gradients to a norm of 1" in told(migration, "training")


def test_half_precision_is_called_out() -> None:
    migration = migrate_source(script({**SMALL, "bf16": {"enabled": True}}))
    assert migration.config["precision"] == "bf16"
    assert "Losses differ by 1e-3" in told(migration, "training")
    cast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    same = migrate_source(script({**SMALL, **cast}))
    assert same.config["precision"] == "bf16"
    assert not told(same, "training")


@pytest.mark.parametrize(
    "given",
    [
        "config='conf/ds.json'",
        "config=json.load(open('conf/ds.json'))",
        "config_params=json.load(open('conf/ds.json'))",
        "args=args",
    ],
)
def test_json_files_are_found(given: str) -> None:
    source = script({}, CALL.replace("config=config", given)).replace("import ", "import json, ", 1)
    settings = {"conf/ds.json": json.dumps(SMALL), "package.json": '{"name": "no settings"}'}
    migration = migrate_files({"train.py": source}, settings=settings)["train.py"]
    assert "optimizer=opt, micro_batch_size=4)" in migration.code
    assert "ds.json is no longer looked at" in told(migration, "changed")


def test_json_files_that_are_not_there_are_refused() -> None:
    source = script({}, CALL.replace("config=config", "config='ds.json'"))
    assert "ds.json is not found beside the script" in refusal(source)
    assert "ds.json is no JSON" in refusal(source, settings={"ds.json": "{'a': 1}"})
    named = script({}, CALL.replace("config=config", "args=args"))
    assert "no JSON file of DeepSpeed's is there" in refusal(named)
    two = {"a.json": json.dumps(SMALL), "b.json": json.dumps(SMALL)}
    assert "beside the script there are a.json, b.json" in refusal(named, settings=two)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("'gradient_clipping': 0.0", "'zero_optimization': {'stage': args.stage}",
         "the stage of ZeRO is decided while it runs"),
        ("'gradient_clipping': 0.0", "'fp16': {'enabled': 'auto'}",
         "whether it computes in fp16 is decided while it runs"),
        ("'gradient_clipping': 0.0", "'fp16': {'enabled': args.half}",
         "whether it computes in fp16 is decided while it runs"),
        ("'gradient_clipping': 0.0", "'sparse_attention': {'mode': 'fixed'}",
         "unipar.yaml cannot say DeepSpeed's `sparse_attention`"),
        ("'gradient_clipping': 0.0", "'zero_optimization': {'zero_hpz_partition_size': 8}",
         "unipar.yaml cannot say `zero_optimization.zero_hpz_partition_size`"),
        (": 4,", ": 'auto',", "is auto, which nobody fills in"),
        ("opt = torch", "config['train_batch_size'] = 8\nopt = torch", "is changed after it was"),
        ("engine.backward(loss)", "loss.backward()", "this backward pass goes around the engine"),
        ("(engine(x)", "(model(x)", "the model is called around the engine"),
        ("(engine(x)", "(engine.module(x)", "the model is called around the engine"),
        ("engine.step()", "engine.step(); engine.zero_grad()", "`zero_grad` is of DeepSpeed's"),
        ("engine.backward(loss)", "engine.backward(loss, retain_graph=True)",
         "`retain_graph=True` is no argument that an engine takes"),
        ("engine.step()", "engine.step(); model.weight.grad.mul_(2)", "gradients are read"),
        ("model = torch", "model = deepspeed.pipe.PipelineModule\nmodel = torch", "pipeline"),
        ("engine.step()", "engine.step(); deepspeed.runtime.utils.see_memory_usage('x')",
         "this is DeepSpeed's own"),
        ("optimizer=opt, ", "optimizer=opt, mpu=mpu, ", "`mpu` is for other divisions"),
        (CALL, CALL + CALL.replace("engine", "other"), "there are two engines"),
        ("optimizer=opt, ", "", "there is no optimizer"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused(old: str, new: str, said: str) -> None:
    source = script(SMALL)
    assert old in source
    assert said in refusal(source.replace(old, new, 1))


def test_other_names_of_deepspeed() -> None:
    source = (
        "import argparse\nimport deepspeed.comm as dist\n"
        "from deepspeed.accelerator import get_accelerator\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int)\n"
        "parser = deepspeed.add_config_arguments(parser)\n"
        "args = parser.parse_args()\n"
        "deepspeed.init_distributed()\n"
        "if args.local_rank == 0 and dist.get_rank() == 0:\n"
        "    print(get_accelerator().device_name(args.local_rank))\n"
    )
    migration = migrate_source(script(SMALL).replace(HEAD, HEAD + source))
    assert "parser = stepped.add_config_arguments(parser)\n" in migration.code
    assert "script.open()\n" in migration.code
    assert "script.placement().local_rank == 0 and torch.distributed.get_rank() == 0" in (
        migration.code
    )
    assert "print(str(script.device()))" in migration.code
    assert "deepspeed" not in migration.code.replace("'deepspeed'", "")


def test_fused_adam_is_torchs() -> None:
    built = (
        "from deepspeed.ops.adam import FusedAdam\nopt = FusedAdam(model.parameters(), lr=0.1)\n"
    )
    code = migrate_source(script(SMALL, CALL, built)).code
    assert "torch.optim.AdamW([p for _, p in named], lr=0.1, weight_decay=0.0)" in code
    other = built.replace("lr=0.1", "adam_w_mode=False")
    assert "instead of adam_w_mode=False use torch.optim.Adam" in refusal(
        script(SMALL, CALL, other)
    )


def test_fused_adam_may_have_another_name() -> None:
    built = (
        "from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam\n"
        "Adam = DeepSpeedCPUAdam if offload else FusedAdam\n"
        "opt = Adam(model.parameters(), lr=0.1)\n"
    )
    code = migrate_source(script(SMALL, CALL, built)).code
    assert "Adam = torch.optim.AdamW if offload else torch.optim.AdamW\n" in code
    assert "Adam([p for _, p in named], lr=0.1, weight_decay=0.0)" in code


def test_settings_may_be_keywords_and_constants() -> None:
    source = script(SMALL).replace(
        f"config = {SMALL!r}\n",
        "STAGE = 2\nHALF = False\n"
        "config = dict(train_micro_batch_size_per_gpu=4, gradient_clipping=0.0,\n"
        "              zero_optimization=dict(stage=STAGE), bf16=dict(enabled=HALF))\n",
    )
    migration = migrate_source(source)
    assert migration.config["strategy"] == {"name": "deepspeed", "stage": 2}
    assert "precision" not in migration.config
    assert "dict(" not in migration.code
    changed = source.replace("HALF))\n", "HALF))\nconfig['bf16'] = other\n")
    assert "changed after it was written" in refusal(changed)


FILE = "with open('conf/ds.json') as file:\n    config = json.load(file)\n"
READ = f"import json\n{FILE}"


@pytest.mark.parametrize("written", [f"config = {SMALL | {'zero_optimization': {}}!r}\n", READ])
@pytest.mark.parametrize(
    "change",
    [
        "config['zero_optimization']['stage'] = args.stage",
        "config['optimizer']['params']['lr'] *= args.lr",
        "config['zero_optimization'].update(stage=2)",
        "zero = config['zero_optimization']\nzero['stage'] = 2",
    ],
)
def test_a_configuration_that_is_changed_is_refused(written: str, change: str) -> None:
    source = script(SMALL).replace(f"config = {SMALL!r}\n", f"{written}{change}\n")
    assert "the configuration is changed after it was written" in refusal(
        source, settings={"conf/ds.json": json.dumps(SMALL)}
    )


def test_another_dictionary_of_that_name_may_be_changed() -> None:
    other = "def other():\n    config = {}\n    config['a'] = 1\n"
    assert migrate_source(other + script(SMALL)).changed


def test_a_script_may_ask_in_which_precision_it_computes() -> None:
    source = script(SMALL) + "if engine.bfloat16_enabled() or engine.fp16_enabled(): ...\n"
    assert "if engine.bfloat16_enabled() or engine.fp16_enabled()" in migrate_source(source).code


def test_settings_in_a_function_are_read_in_the_words_of_the_call() -> None:
    source = script(SMALL, CALL.replace("config=config", "config=settings(args, 2)")).replace(
        f"config = {SMALL!r}\n",
        "def settings(args, stage=1, clip=0.0):\n"
        "    return {'train_micro_batch_size_per_gpu': args.batch, 'gradient_clipping': clip,\n"
        "            'zero_optimization': {'stage': stage}}\n",
    )
    migration = migrate_source(source)
    assert migration.config["strategy"] == {"name": "deepspeed", "stage": 2}
    assert "micro_batch_size=args.batch)" in migration.code


def test_a_file_that_only_imports_it_is_left_alone() -> None:
    assert "no deepspeed.initialize(...) is seen" in refusal("from deepspeed import comm\n")
