"""How long a collective waits is what the script says, where ``unipar.yaml`` does not."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from unipar.compat.run import current

ASKED = timedelta(seconds=77)


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    current.close()


def by_accelerator() -> None:
    from unipar.compat.accelerate import Accelerator
    from unipar.compat.accelerate.utils import InitProcessGroupKwargs

    Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=ASKED)])


def by_partial_state() -> None:
    from unipar.compat.accelerate import PartialState

    PartialState(timeout=ASKED)


def by_deepspeed() -> None:
    from unipar.compat import deepspeed

    deepspeed.init_distributed(timeout=ASKED)


def by_fabric() -> None:
    from unipar.compat.fabric import Fabric
    from unipar.compat.fabric.strategies import DDPStrategy

    Fabric(strategy=DDPStrategy(timeout=ASKED)).launch()


def by_torch() -> None:
    dist = importlib.import_module("unipar.compat.torch.distributed")
    dist.init_process_group("gloo", timeout=ASKED)


CALLS = [by_accelerator, by_partial_state, by_deepspeed, by_fabric, by_torch]


@pytest.fixture(autouse=True)
def one_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")


@pytest.mark.parametrize("ask", CALLS)
def test_what_the_script_asks_for_is_kept(ask: Callable[[], None]) -> None:
    ask()
    assert current.placement().timeout == 77


@pytest.mark.parametrize("ask", CALLS)
def test_what_is_set_from_outside_goes_before_it(
    ask: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIPAR_TIMEOUT", "55")
    ask()
    assert current.placement().timeout == 55
