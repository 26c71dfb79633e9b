"""What ``fit`` is given beside settings is refused in its own words, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from unipar import Callback, Session, fit
from unipar.errors import ConfigError, DataError


def loss(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).mean()


class Odd(torch.utils.data.Dataset):
    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


BAD: list[tuple[dict[str, Any], str]] = [
    ({"callbacks": Callback()}, r"callbacks is a Callback. Pass a list"),
    ({"callbacks": [Callback]}, r"callbacks\[0\] is the class Callback. Pass an instance"),
    ({"callbacks": [3]}, r"callbacks\[0\] is a int"),
    ({"metrics": [loss]}, r"metrics is a list. Pass a mapping of names"),
    ({"metrics": {"a": 3}}, r"metrics\['a'\] is a int. Pass a function of \(predictions, targets"),
    ({"metrics": {"a": dict}}, r"metrics\['a'\] is the class dict.*an instance"),
    ({"metrics": {"loss": loss}}, r"'loss' is the evaluation loss; choose another name"),
    ({"predict": 3}, r"predict is a int. Pass a function predict\(model, batch\)"),
    ({"loss": "mse"}, r"loss is a str. Pass a function loss\(model, batch\)"),
    ({"loss": nn.MSELoss()}, r"loss is a MSELoss. .* called with the model, which it calls"),
    ({"loss": lambda model: model}, r"loss is a function of \(model\), and is called as loss\(mod"),
    ({"loggers": 3}, r"loggers is a int. Pass a list of names or loggers"),
    ({"model": nn.Linear}, r"model function Linear\(in_.*without arguments.*lambda: Linear\("),
    ({"model": nn.Linear(2, 2, device="meta")}, r"\(Linear\) is on the meta device.* function"),
    ({"data": torch.tensor(3.0)}, r"a tensor without dims, a single number"),
    ({"data": Odd(-3)}, r"len\(\) of Odd fails: ValueError: .* >= 0. It must be the number of"),
    ({"data": Odd(8.0)}, r"len\(\) of Odd fails: TypeError: 'float' .* the number of samples"),
    ({"data": Odd(OSError("gone: x"))}, r"len\(\) of Odd fails: OSError: gone: x. It must be"),
    ({"data": DataLoader(Odd(8.0), 4)}, r"len\(\) of Odd fails: TypeError"),
    ({"eval_data": Odd(-3)}, r"len\(\) of Odd fails: ValueError"),
    ({"optimizer": lambda: None}, r"optimizer is a function of \(\), and is called as optimizer"),
    ({"lr_scheduler": lambda: None}, r"lr_scheduler is a function of \(\), and is called as lr_s"),
]


@pytest.mark.parametrize(("given", "says"), BAD, ids=[says[:20] for _, says in BAD])
def test_what_an_argument_does_not_take_is_refused(
    tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    values: dict[str, Any] = {
        "model": nn.Linear(2, 2),
        "data": torch.zeros(8, 2),
        "loss": loss,
        "global_batch_size": 4,
        "output_dir": tmp_path / "run",
        "device": "cpu",
        **given,
    }
    with pytest.raises((ConfigError, DataError), match=says):
        fit(**values)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"seed": -1}, r"seed: -1 was given. Allowed: a whole number of at least 0"),
        ({"seed": "a"}, r"seed: 'a' was given"),
        ({"seed": 1 << 70}, r"seed: a whole number of at most 9223372036854775807"),
        (
            {"on_nan": "explode"},
            r"on_nan: 'explode' was given. Allowed: 'raise', 'skip' or 'ignore'",
        ),
        ({"precision": "fp4"}, r"precision: 'fp4' was given"),
        ({"timeout": -1}, r"timeout: -1 was given. Allowed: a number above 0"),
        ({"device": "tpu"}, r"device: 'tpu' was given. Allowed: 'auto', 'cpu' or 'cuda'"),
    ],
    ids=str,
)
def test_a_session_refuses_what_fit_does(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Session("single", **{"device": "cpu", **given})
