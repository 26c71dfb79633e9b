"""Strategies are found by entry point, and what a user wrote becomes one or a clear refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unipar.errors import ConfigError
from unipar.sizing import Needs, choose
from unipar.strategy import registry

STRATEGY = """
from unipar.strategy import Availability, Capabilities, Strategy, StrategyOptions

class Options(StrategyOptions):
    strategy = "{name}"
    depth: int = 2
    kind: str = "plain"

class Mine(Strategy):
    name = "{name}"
    options_type = Options

    @classmethod
    def availability(cls):
        return Availability({ok}, "it is not built.", "make it")

    def capabilities(self):
        return Capabilities(frozenset({{"fp32"}}), frozenset({{"cpu"}}))

    def prepare(self, spec, world):
        raise NotImplementedError
"""
BID = """
    @classmethod
    def bid(cls, needs):
        return {bid}
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a distribution on the path: ``install(distribution, strategy name, module source)``."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(
        distribution: str,
        name: str,
        source: str | None = None,
        *,
        ok: bool = True,
        bid: float | None = None,
        attribute: str = "Mine",
    ) -> None:
        module = f"{distribution}_strategies"
        text = STRATEGY.format(name=name, ok=ok) if source is None else source
        if bid is not None:
            text += BID.format(bid=bid)
        (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{distribution}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n"
        )
        entry = f"[{registry.GROUP}]\n{name} = {module}:{attribute}\n"
        (info / "entry_points.txt").write_text(entry)

    return put


def test_the_torch_strategies_are_found_without_importing_them() -> None:
    code = (
        "import sys\nfrom unipar.strategy import registry\n"
        "assert {'single', 'ddp', 'dp', 'fsdp'} <= set(registry.names())\n"
        "assert not [m for m in sys.modules if m.startswith('unipar_torch')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_another_distribution_adds_a_strategy(install: Any) -> None:
    install("alpha", "alpha")
    assert "alpha" in registry.names()
    assert registry.resolve("alpha").options.model_dump() == {"depth": 2, "kind": "plain"}
    (info,) = [one for one in registry.table() if one.name == "alpha"]
    assert (info.distribution, info.availability.ok) == ("alpha 1.5", True)
    assert info.capabilities is not None


def test_every_way_to_write_a_strategy_gives_the_same(install: Any) -> None:
    install("beta", "beta")
    options = registry.strategy_class("beta").options_type.model_validate({"depth": 3})
    for written in ("beta:depth=3", {"name": "beta", "depth": 3}, options):
        assert registry.resolve(written).options == options


def test_an_unknown_name_gives_the_nearest_and_the_installed() -> None:
    with pytest.raises(ConfigError, match=r"no strategy 'fdsp'\. Did you mean 'fsdp'\?") as caught:
        registry.resolve("fdsp")
    assert f"Installed: {', '.join(registry.names())}, auto." in str(caught.value)
    assert {"ddp", "dp", "fsdp", "single"} <= set(registry.names())


def test_a_wrong_option_gives_the_nearest_and_the_allowed() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'sharing'\. Did you mean 'sharding'\?"):
        registry.resolve("fsdp:sharing=full")
    with pytest.raises(ConfigError) as caught:
        registry.resolve("fsdp:sharding=hybird")
    said = str(caught.value)
    for part in ("strategy 'fsdp'", "'hybird' was given", "'full'", "Did you mean 'hybrid'?"):
        assert part in said


def test_an_engine_has_options_of_its_own_where_only_engines_look_at_them() -> None:
    strategy = registry.resolve("ddp:bucket_cap_mb=5,shard_optimizer=true")
    strategy.left_by_setup = True  # pyright: ignore[reportAttributeAccessIssue]
    own: Any = registry.for_engine(strategy, {"find_unused_parameters": True})
    assert registry.inline(own.options) == (
        "ddp:bucket_cap_mb=5.0,find_unused_parameters=true,shard_optimizer=true"
    )
    assert own.left_by_setup
    assert registry.inline(strategy.options) == "ddp:bucket_cap_mb=5.0,shard_optimizer=true"
    assert registry.for_engine(strategy, {}) is strategy
    with pytest.raises(ConfigError, match=r"has no shard_optimizer of its own.* of bucket_cap_mb"):
        registry.for_engine(strategy, {"shard_optimizer": False})
    with pytest.raises(ConfigError, match="bucket_cap_mb"):
        registry.for_engine(strategy, {"bucket_cap_mb": -1})
    with pytest.raises(ConfigError, match="may have its own of none"):
        registry.for_engine(registry.resolve("single"), {"bucket_cap_mb": 5})


def test_two_distributions_with_one_name_are_named(install: Any) -> None:
    install("gamma", "shared")
    install("delta", "shared")
    assert registry.names().count("shared") == 1
    with pytest.raises(ConfigError, match=r"offered by delta 1\.5 .* and gamma 1\.5 .*uninstall"):
        registry.resolve("shared")


def test_a_strategy_that_fails_to_import_says_why_and_spoils_nothing_else(install: Any) -> None:
    install("broken", "broken", "import a_library_that_is_not_there\n")
    with pytest.raises(ConfigError, match=r"broken 1\.5 fails to import.*a_library_that_is_not_"):
        registry.resolve("broken")
    (info,) = [one for one in registry.table() if one.name == "broken"]
    assert not info.availability.ok
    assert info.availability.remedy == "pip install --force-reinstall broken"
    assert registry.resolve("ddp").name == "ddp"


def test_an_entry_point_that_is_no_strategy_is_refused(install: Any) -> None:
    install("odd", "odd", "Mine = dict\n")
    with pytest.raises(ConfigError, match=r"is no subclass of unipar\.Strategy"):
        registry.resolve("odd")


def test_auto_takes_the_best_bid_and_of_equals_the_first_by_name(install: Any) -> None:
    needs = Needs(2, None, 1 << 30)
    install("zeta", "zeta", bid=1e6)
    install("eta", "eta", bid=1e6)
    install("absent", "absent", bid=1e9, ok=False)
    assert choose(needs).name == "eta"


def test_auto_without_a_bidder_says_why_for_each(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("absent", "absent", bid=1.0, ok=False)
    install("shy", "shy", bid=0.0)
    install("silent", "silent")
    monkeypatch.setattr(registry, "names", lambda: ["absent", "shy", "silent"])
    with pytest.raises(ConfigError) as caught:
        choose(Needs(3, None, 1 << 30))
    assert "absent: it is not built. make it" in str(caught.value)
    for name in ("shy", "silent"):
        assert f"{name}: not offered for 3 device(s)" in str(caught.value)


def test_auto_is_refused_with_options_and_without_a_run() -> None:
    with pytest.raises(ConfigError, match="'auto' takes no options"):
        registry.resolve("auto:depth=3")
    with pytest.raises(ConfigError, match="'auto' needs a run to choose for"):
        registry.resolve("auto")


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("ddp:static_graph", "'static_graph' is not option=value"),
        ("ddp:a=1,a=2", "'a' is given twice"),
        ({"sharding": "full"}, "has no name"),
        (3, "was given. Allowed: a name"),
    ],
)
def test_what_is_no_strategy_is_refused(written: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        registry.resolve(written)


VALUES = st.one_of(
    st.integers(-1000, 1000),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.lists(st.integers(0, 9), max_size=3),
    st.from_regex(r"[a-z]{2,8}", fullmatch=True).filter(
        lambda s: s not in ("true", "false", "null")
    ),
)


@given(st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True), VALUES, max_size=4))
def test_an_inline_strategy_reads_back_as_written(options: dict[str, Any]) -> None:
    options.pop("name", None)

    def text(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    inline = ",".join(f"{key}={text(value)}" for key, value in options.items())
    written = f"x:{inline}" if options else "x"
    assert registry.as_mapping(written) == {"name": "x", **options}


@given(st.text(max_size=30))
def test_any_text_is_a_strategy_or_a_config_error(text: str) -> None:
    try:
        parsed = registry.as_mapping(text)
    except ConfigError:
        return
    assert isinstance(parsed["name"], str)
