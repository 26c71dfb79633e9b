"""Files and values that no run can mean: each is refused with its place, and none takes long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unipar.config import RunConfig
from unipar.errors import ConfigError
from unipar.strategy.registry import make
from unipar.utils.documents import parse_value, read_document


def aliases(first: str, again: Callable[[str], str], levels: int) -> str:
    """Lines of which each holds the one before by its alias."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{level}: &a{level} {again(f'*a{level - 1}')}" for level in range(1, levels)]
    return "\n".join(lines)


NESTED = r"lists and mappings are nested more than 50 deep"
ITSELF = r"a value holds itself, through its own alias"
TOO_MANY = r"line 6: this cannot be used: with its aliases written out it has over 100,000 values"
YAML = {
    "a list in itself": ("seed: 1\na: &a [*a]", rf"line 2: this cannot be used: {ITSELF}"),
    "a mapping in itself": ("a: &a {b: *a}", ITSELF),
    "merged into itself": ("a: &a {<<: *a}", ITSELF),
    "a list as a key": ("seed: 1\n[1, 2]: 3", r"line 2: .* a key is text, and this one is a list"),
    "a mapping as a key": ("? {a: 1}\n: 3", r"line 1: .* a key is text, and this one is a mapping"),
    "digits": ("seed: " + "9" * 5000, r"line 1: this cannot be used: a number has 5000 digits"),
    "digits of base 16": ("seed: 0x" + "9" * 9000, r"a number has 9002 digits"),
    "deep lists": ("a: " + "[" * 900 + "]" * 900, rf"line 1: .*{NESTED}"),
    "deep mappings": ("\n".join(" " * i + "k:" for i in range(200)), rf"line 51: .*{NESTED}"),
    "deep aliases": (aliases("[1]", lambda a: f"[{a}]", 200), NESTED),
    "lists of aliases": (aliases("[x]", lambda a: f"[{','.join([a] * 9)}]", 40), TOO_MANY),
    "merged aliases": (
        aliases("{k: 1}", lambda a: f"{{<<: [{','.join([a] * 9)}]}}", 40),
        TOO_MANY,
    ),
    "no int": ("seed: !!int abc", r"line 1: this cannot be used: 'abc' is no !!int"),
    "an empty int": ("seed: !!int ''", r"'' is no !!int"),
    "no bool": ("seed: !!bool maybe", r"'maybe' is no !!bool"),
    "no time": ("seed: !!timestamp soon", r"'soon' is no !!timestamp"),
    "code": ("seed: !!python/object:os.system x", r"line 1: this is not valid YAML: could not"),
}
TOML = {
    "digits": ("seed = " + "9" * 5000, r"a number has thousands of digits"),
    "digits of base 16": (
        "seed = 0x" + "f" * 5000,
        r"line 1: seed: a whole number of at most 9223",
    ),
    "deep arrays": ("a = " + "[" * 5000 + "]" * 5000, r"its arrays are nested too deeply"),
    "deep keys": (".".join("a" * 900) + " = 1", NESTED),
    "deep tables": ("[" + ".".join("a" * 900) + "]\nb = 1", NESTED),
}
FILES = [("yaml", name) for name in YAML] + [("toml", name) for name in TOML]


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_a_file_that_no_run_can_mean_is_refused_with_its_place(
    tmp_path: Path, kind: str, name: str
) -> None:
    text, says = (YAML if kind == "yaml" else TOML)[name]
    path = tmp_path / f"run.{kind}"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.{kind}.*{says}") as caught:
        RunConfig.build(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", [text for text, _ in YAML.values()], ids=list(YAML))
def test_on_a_command_line_such_a_value_is_text(text: str) -> None:
    assert parse_value(text) == text


def test_aliases_within_reason_are_what_they_stand_for(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("one: &one {a: [1, 2]}\ntwo: {<<: *one, b: *one}\n")
    assert read_document(path).data["two"] == {"a": [1, 2], "b": {"a": [1, 2]}}


def in_itself() -> dict[str, Any]:
    values: dict[str, Any] = {}
    values["checkpoint"] = values
    return values


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (1, r"the config is 1 \(int\)\. Allowed: the path of a YAML or TOML file, a mapping, or a"),
        ([("seed", 1)], r"the config is \[\('seed', 1\)\] \(list\)"),
        ({"seed": 10**5000}, r"seed: a whole number of at most 9223372036854775807 is allowed"),
        (in_itself(), rf"checkpoint: {NESTED}, or in themselves"),
        ({"compile": {"options": [0] * 100_001}}, r"compile: there are more than 100,000 values"),
        ({1: 2}, r"1 \(int\) is no key\. Keys are text\."),
        ({None: 2}, r"None \(NoneType\) is no key"),
        ({"checkpoint": {1: 2}}, r"checkpoint\.1: 1 \(int\) is no key"),
        ({"output_dir": "a\0b"}, r"output_dir: 'a\\x00b' is no path: it holds a NUL character"),
        ({"output_dir": "a\ud800"}, r"output_dir: 'a\\ud800' is no path: surrogates not allowed"),
        ({"resume": "a" * 300}, r"resume: the path 'a{60}'… is too long: a name has at most 255"),
        ({"checkpoint": "a/" * 3000}, r"checkpoint.*is too long: .* a whole path 4000"),
        ("a\0.yaml", r"config file a\x00\.yaml cannot be read: embedded null byte"),
        ("a" * 300 + ".yaml", r"cannot be read: .*File name too long"),
    ],
    ids=[str(number) for number in range(14)],
)
def test_values_that_no_run_can_mean_are_refused(source: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RunConfig.build(source)


def test_so_are_those_of_a_strategy() -> None:
    with pytest.raises(ConfigError, match=r"strategy 'ddp': bucket_cap_mb: a whole number of at"):
        make("ddp", {"bucket_cap_mb": 10**30})
