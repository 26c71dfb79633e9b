"""What is refused and called out of Accelerate scripts, and the rules that their runs keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from telling import told
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from unipar.errors import ConfigError
from unipar.migrate import Migration, migrate_source
from unipar.migrated.accelerated.dispatching import DealtLoader
from unipar.migrated.accelerated.schedulers import Paced
from unipar.world import Placement, World

SCRIPT = """\
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator(gradient_accumulation_steps=4)
loader = DataLoader(list(range(9)), batch_size=2)
model = nn.Linear(1, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt, loader = accelerator.prepare(model, opt, loader)
for x in loader:
    with accelerator.accumulate(model):
        loss = model(x).sum()
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
"""


def migrated(*changes: tuple[str, str], settings: dict[str, str] | None = None) -> Migration:
    text = SCRIPT
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return migrate_source(text, file="train.py", settings=settings)


def refused(*changes: tuple[str, str], settings: dict[str, str] | None = None) -> str:
    migration = migrated(*changes, settings=settings)
    assert migration.refused
    assert not migration.changed
    return told(migration, "refused")


def test_nothing_of_accelerate_is_left() -> None:
    migration = migrated()
    assert not migration.refused
    assert "accelerate " not in migration.code
    assert "import Accelerator" not in migration.code
    assert migration.config == {"strategy": "accelerate"}
    assert "loader = accelerator.deal(loader)\n" in migration.code


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            [
                ("        opt.zero_grad()\n", ""),
                ("        loss = model", "        opt.zero_grad()\n        loss = model"),
            ],
            "train.py:14: refused: opt.zero_grad(): under accumulate() it clears gradients in a "
            "step's last micro-batch, before that one's backward pass: each step is on the last "
            "micro-batch alone, divided by their number, and the others are thrown away. Call "
            "zero_grad() after optimizer.step().",
        ),
        (
            [("        opt.step", "        accelerator.clip_grad_norm_(model.parameters(), 1)\n"
              "        opt.step")],
            "train.py:16: refused: accelerator.clip_grad_norm_(model.parameters(), 1): under "
            "accumulate() it clips what is there after each micro-batch",
        ),
        ([("prepare(model, opt, loader)", "prepare(*[model, opt, loader])")],
         "it cannot be seen what is prepared, or how. Write out what is prepared"),
        ([("accelerator.backward(loss)", "accelerator.backward(loss, retain_graph=True)")],
         "an engine's backward takes a loss and nothing else."),
        ([("        opt.step", "        print(accelerator.distributed_type)\n        opt.step")],
         "`distributed_type` is Accelerate's own; unipar has no counterpart."),
        ([("        opt.step", "        accelerator.sync_gradients = True\n        opt.step")],
         "`sync_gradients` is Accelerate's own"),
        ([("(gradient_accumulation_steps=4)", "(dynamo_backend='inductor')")],
         "unipar has no counterpart of `dynamo_backend='inductor'`. Leave dynamo_backend out."),
        ([("(gradient_accumulation_steps=4)", "(mixed_precision='fp8')")],
         "precision fp8 is not taken over. Use no, bf16 or fp16."),
        ([("(gradient_accumulation_steps=4)",
           "(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config='d.json'))")],
         "unipar.yaml cannot say `hf_ds_config='d.json'`."),
        ([("accelerator = Acc", "other = Accelerator()\naccelerator = Acc")],
         "a second Accelerator, which shares the state of the first."),
        ([("accelerator = Acc", "if torch.cuda.is_available():\n"
           "    accelerator = Accelerator(mixed_precision='bf16')\nelse:\n    accelerator = Acc")],
         "it asks for other settings than the Accelerator of another branch."),
        ([("(gradient_accumulation_steps=4)", "(**{'mixed_precision': 'bf16'})")],
         "its arguments cannot be seen. Write them out, by their names."),
        ([("import DataLoader", "import DataLoader\nfrom accelerate import notebook_launcher"),
          ("for x in", "notebook_launcher(print, (), num_processes=2)\nfor x in")],
         "Call the function itself, which trains on one process"),
        ([("model, opt, loader =", "model, loader ="), ("(model, opt, loader)", "(model, loader)")],
         "train.py:10: refused: torch.optim.SGD(model.parameters(), lr=0.1): this optimizer is not "
         "prepared: it steps, and is cleared, at every micro-batch of an accumulation."),
        ([("model, opt, loader =", "opt, loader ="), ("(model, opt, loader)", "(opt, loader)")],
         "its model is not prepared, so its replicas drift apart. Give it to accelerator.prepare."),
        ([("accelerator.backward(loss)", "loss.backward()")],
         "accelerator.backward divides the loss by the micro-batches of a step, and scales it "
         "under fp16; this does neither. Call accelerator.backward(loss)."),
        ([("import set_seed", "import gather")], ""),
        ([("for x in loader", "set_seed(1, deterministic=True)\nfor x in loader")],
         "deterministic algorithms are torch's to ask for."),
        ([("for x in loader", "torch.hub.load('a', 'b', accelerator)\nfor x in loader")],
         "the Accelerator is given to code that is not seen."),
    ],
)  # fmt: skip
def test_what_is_refused(changes: list[tuple[str, str]], said: str) -> None:
    if not said:  # An import alone is no use.
        assert not migrated(*changes).refused
        return
    assert said in refused(*changes)


def test_a_plain_backward_is_the_same_without_accumulation() -> None:
    plain = ("accelerator.backward(loss)", "loss.backward()")
    assert not migrated(plain, ("gradient_accumulation_steps=4", "")).refused
    half = refused(plain, ("gradient_accumulation_steps=4", "mixed_precision='fp16'"))
    assert "Call accelerator.backward(loss)." in half


def test_clipping_under_its_condition_goes_to_the_strategy() -> None:
    migration = migrated(
        ("        opt.step", "        if accelerator.sync_gradients:\n"
         "            accelerator.clip_grad_norm_(model.parameters(), 0.5)\n        opt.step"),
    )  # fmt: skip
    assert "max_grad_norm=0.5" in migration.code
    assert "sync_gradients" not in migration.code


def test_a_norm_that_is_kept_is_refused_with_a_remedy_that_accelerators_have() -> None:
    said = refused(
        ("        opt.step", "        if accelerator.sync_gradients:\n"
         "            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)\n"
         "        opt.step"),
    )  # fmt: skip
    assert "Put it there, and leave its norm unused." in said
    assert "script.grad_norm" not in said


def test_a_prepared_scheduler_is_called_out_with_its_effect() -> None:
    changes = (
        ("model, opt, loader =", "sched = torch.optim.lr_scheduler.StepLR(opt, 3)\n"
         "model, opt, loader, sched ="),
        ("prepare(model, opt, loader)", "prepare(model, opt, loader, sched)"),
    )  # fmt: skip
    migration = migrated(*changes)
    assert "loader, sched = accelerator.deal(loader), accelerator.pace(sched)" in migration.code
    assert (
        "# unipar: a prepared scheduler takes as many steps in each call as there are processes: "
        "on 2 it is through after half of the calls." in migration.code
    )
    once = migrated(*changes, ("steps=4)", "steps=4, split_batches=True)"))
    assert not [note for note in once.notes if note.kind == "training"]


def test_branches_may_build_the_accelerator_with_other_trackers() -> None:
    migration = migrated(
        ("accelerator = Acc", "if tracks:\n    accelerator = Accelerator(log_with='all', "
         "gradient_accumulation_steps=4)\nelse:\n    accelerator = Acc"),
    )  # fmt: skip
    assert not migration.refused
    assert (
        "if tracks:\n    accelerator = accelerated.Run(log_with='all', "
        "gradient_accumulation_steps=4)\n"
        "else:\n    accelerator = accelerated.Run(gradient_accumulation_steps=4)\n"
    ) in migration.code


def test_a_dictionary_of_the_runs_own_arguments_stays() -> None:
    migration = migrated(
        ("accelerator = Acc", "more = {}\nif tracks:\n    more['log_with'] = 'all'\n"
         "accelerator = Acc"),
        ("steps=4)", "steps=4, **more)"),
    )  # fmt: skip
    assert "accelerated.Run(gradient_accumulation_steps=4, **more)" in migration.code


def test_a_plugin_becomes_options() -> None:
    migration = migrated(
        ("(gradient_accumulation_steps=4)", "(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))")
    )
    strategy = {"name": "accelerate", "plugin": "deepspeed", "stage": 2}
    assert migration.config == {"strategy": strategy}


def test_the_file_of_accelerate_config_becomes_settings() -> None:
    file = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\n"
        "deepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: none\n"
        "num_processes: 2\nuse_cpu: false\n"
    )
    migration = migrated(settings={"default_config.yaml": file, "other.yaml": "a: [1"})
    strategy = {"name": "accelerate", "plugin": "deepspeed", "stage": 3}
    assert migration.config == {"strategy": strategy, "precision": "bf16"}
    said = refused(
        settings={"c.yaml": file.replace("  zero_stage", "  gradient_clipping: 1\n  zero_stage")}
    )
    assert "c.yaml sets gradient_clipping, which belongs into the script." in said
    said = refused(settings={"c.yaml": file.replace("DEEPSPEED", "TP")})
    assert "c.yaml asks for distributed_type TP. Use one of NO, MULTI_GPU" in said


def test_precision_of_the_command_line_is_called_out() -> None:
    migration = migrated(
        ("(gradient_accumulation_steps=4)", "(mixed_precision=args.mp)"),
        ("accelerator = ", "import argparse\nparser = argparse.ArgumentParser()\n"
         "parser.add_argument('--mp', default='bf16')\nargs = parser.parse_args()\naccelerator = "),
    )  # fmt: skip
    assert migration.config["precision"] == "bf16"
    assert "unipar.yaml's `precision` decides now, not the command line: bf16" in migration.code


@pytest.mark.parametrize(
    ("given", "precision"),
    [("'fp16' if args.half else 'no'", "fp32"), ("'no' if args.half else 'bf16'", "bf16")],
)
def test_precision_of_a_flag_is_that_of_a_run_without_it(given: str, precision: str) -> None:
    migration = migrated(
        ("(gradient_accumulation_steps=4)", f"(mixed_precision={given})"),
        ("accelerator = ", "import argparse\nparser = argparse.ArgumentParser()\n"
         "parser.add_argument('--half', action='store_true')\nargs = parser.parse_args()\n"
         "accelerator = "),
    )  # fmt: skip
    assert migration.config["precision"] == precision
    assert f"not the command line: {precision} as it stands" in migration.code


# -- what a migrated script runs on --------------------------------------------------------------


class _Rank(World):
    """One of several ranks, without the others: what is broadcast is what it has."""

    def broadcast(self, value: Any) -> Any:
        return value


def dealt(loader: DataLoader, rank: int, size: int, **how: Any) -> DealtLoader:
    world = _Rank(Placement(rank=rank, size=size))
    given: dict[str, Any] = {"split": False, "even": True, "place": True, **how}
    return DealtLoader(loader, world, enter=lambda loader: None, **given)


@pytest.mark.parametrize("samples", [1, 3, 7, 12, 16, 17])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_batches_are_dealt_as_accelerate_deals_them(
    samples: int, size: int, drop_last: bool, split: bool, even: bool
) -> None:
    theirs = pytest.importorskip("accelerate.data_loader")
    batch = 2 * size if split else 3
    data = TensorDataset(torch.arange(samples))
    for rank in range(size):
        loader = DataLoader(data, batch_size=batch, drop_last=drop_last)
        mine = dealt(loader, rank, size, split=split, even=even)
        expected = theirs.BatchSamplerShard(
            BatchSampler(SequentialSampler(data), batch, drop_last),
            num_processes=size, process_index=rank, split_batches=split, even_batches=even,
        )  # fmt: skip
        assert [b[0].tolist() for b in mine] == list(expected)
        if even or not split:
            assert len(mine) == len(expected)


def test_a_loader_knows_its_end_before_the_batch_is_used() -> None:
    loader = dealt(DataLoader(TensorDataset(torch.arange(10)), batch_size=3), 0, 2)
    ends = [loader.at_end for _ in loader]
    assert ends == [False, True]
    assert loader.remainder == 4


def test_a_stream_is_not_dealt_out() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(4))

    with pytest.raises(ConfigError, match=r"goes over Stream .* cannot be dealt out to 2 ranks"):
        dealt(DataLoader(Stream(), batch_size=2), 0, 2)
    with pytest.raises(ConfigError, match="split_batches cuts each batch into 2 equal parts"):
        dealt(DataLoader(TensorDataset(torch.arange(4)), batch_size=3), 0, 2, split=True)


def test_a_paced_scheduler_steps_once_for_each_rank() -> None:
    class Run:
        step_scheduler_with_optimizer = sync_gradients = True
        adjust_scheduler = True
        split_batches = optimizer_step_was_skipped = False
        num_replicas = 3

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run: Any = Run()
    paced = Paced(scheduler, run)
    optimizer.step()
    paced.step()
    assert paced.get_last_lr() == [0.125]
    run.sync_gradients = False
    paced.step()
    run.sync_gradients, run.optimizer_step_was_skipped = True, True
    paced.step()
    assert paced.get_last_lr() == [0.125]
    run.optimizer_step_was_skipped, run.split_batches = False, True
    paced.step()
    assert paced.get_last_lr() == [0.0625]
