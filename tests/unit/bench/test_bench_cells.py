"""What is compared: strategies, sweeps, and the names of cells."""

from __future__ import annotations

import pytest

from unipar import ConfigError
from unipar.benchmark.cells import Cell, make_cells, split_strategies, sweep


def test_strategies_are_cut_where_a_new_one_begins() -> None:
    text = "ddp, fsdp:sharding=hybrid,cpu_offload=true,zero1,deepspeed:native={a: 1, b: 2},horovod"
    assert split_strategies(text) == [
        "ddp",
        "fsdp:sharding=hybrid,cpu_offload=true",
        "zero1",
        "deepspeed:native={a: 1, b: 2}",
        "horovod",
    ]


def test_options_of_a_layout_stay_with_it() -> None:
    stages = "mesh:pp=2,stages=[[tokens,blocks.0],[blocks.1,head]]"
    text = f"mesh:tp=2,dp_shard=2,mesh:cp=2,{stages},virtual_stages=1,fsdp"
    assert split_strategies(text) == [
        "mesh:tp=2,dp_shard=2",
        "mesh:cp=2",
        f"{stages},virtual_stages=1",
        "fsdp",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage=3,ddp", "'stage=3' is an option without a strategy"),
        ("ddp,stage=3", "'stage=3' is an option without a strategy"),
        ("ddp,,fsdp", "nothing between two commas"),
        ("", "nothing between two commas"),
    ],
)
def test_what_cannot_be_cut_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_strategies(text)


def test_a_sweep_stands_for_every_combination() -> None:
    assert sweep("deepspeed:stage=1|2,overlap_comm=true|false") == [
        "deepspeed:stage=1,overlap_comm=true",
        "deepspeed:stage=1,overlap_comm=false",
        "deepspeed:stage=2,overlap_comm=true",
        "deepspeed:stage=2,overlap_comm=false",
    ]
    assert sweep("ddp") == ["ddp"]


@pytest.mark.parametrize("text", ["deepspeed:stage", "deepspeed:stage=1||3", "deepspeed:stage="])
def test_a_sweep_that_cannot_be_read_shows_how_to_write_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"Write a sweep like 'deepspeed:stage=1\|2\|3'"):
        sweep(text)


def test_cells_are_every_combination_once() -> None:
    cells = make_cells(["ddp", "ddp", "fsdp"], [1, 2], ["fp32", "bf16"], [None, 4])
    assert len(cells) == len(set(cells)) == 2 * 2 * 2 * 2
    assert len({cell.key for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("strategies", "devices", "micro", "message"),
    [
        ([], [1], [None], "strategies is empty"),
        (["ddp"], [], [None], "devices is empty"),
        (["ddp"], [0], [None], "0 was given"),
        (["ddp"], [1], [-4], "-4 was given"),
    ],
)
def test_nothing_to_run_is_refused(
    strategies: list[str], devices: list[int], micro: list[int | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_cells(strategies, devices, ["fp32"], micro)


def test_names_of_cells_tell_them_apart() -> None:
    one = Cell(strategy="deepspeed:stage=3", devices=2)
    assert one.key == "deepspeed_stage=3--2x--fp32"
    assert one.label == "deepspeed:stage=3"
    other = Cell(strategy="ddp", precision="bf16", micro_batch_size=4, raw=True)
    assert other.label == "ddp by hand (bf16, micro-batch 4)"
