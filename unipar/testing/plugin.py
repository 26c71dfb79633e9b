"""The pytest plugin, which pytest loads wherever unipar is installed.

It must not be noticed by test suites that have nothing to do with the kit: it imports nothing, and
its options exist only where the command line names ``unipar.testing``, or where a ``conftest.py``
calls :func:`add_options`::

    pytest --pyargs unipar.testing --strategy ddp --strategy fsdp:sharding=hybrid --world-sizes 1,2

It runs every case at 1, 2 and 4 ranks. With ``-m "not thorough"`` it does so at 2, and elsewhere
where the number of ranks matters to a case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from unipar.testing import PRELOAD

if TYPE_CHECKING:
    from unipar.testing.checkpoints import Saved
    from unipar.testing.kit import Kits
    from unipar.testing.pool import WorldPools

_ADDED = "_unipar_options_added"


def add_options(parser: pytest.Parser) -> None:
    """Add the kit's options to a test suite's own; call it in ``pytest_addoption``."""
    if getattr(parser, _ADDED, False):
        return
    setattr(parser, _ADDED, True)
    group = parser.getgroup("unipar", "unipar's conformance kit")
    group.addoption(
        "--strategy",
        action="append",
        dest="unipar_strategies",
        metavar="NAME[:option=value,…]",
        help="strategy to run the kit against; may be given several times",
    )
    group.addoption(
        "--world-sizes",
        dest="unipar_world_sizes",
        metavar="N,N,…",
        help="numbers of ranks to run it at (default: 1,2,4)",
    )
    group.addoption(
        "--device-type",
        dest="unipar_device_type",
        default="cpu",
        choices=["cpu", "cuda"],
        help="where the ranks run (default: cpu); all share a machine's only GPU",
    )
    group.addoption(
        "--parity-json",
        dest="unipar_parity_json",
        metavar="FILE",
        help="write the largest differences from the reference to FILE",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> None:
    own = str(Path(__file__).parent)
    if any(arg.startswith("unipar.testing") or own in str(Path(arg).resolve()) for arg in args):
        add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "thorough: proves at greater length what another test proves as well; "
        'left out by -m "not thorough"',
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "conformance_proof" not in metafunc.fixturenames:
        return
    from unipar.testing.selection import proofs

    parameters = [
        pytest.param(proof, id=str(proof), marks=[pytest.mark.thorough] if proof.thorough else [])
        for proof in proofs(metafunc.config, metafunc.module)
    ]
    metafunc.parametrize("conformance_proof", parameters)


def preload(session: pytest.Session, tests: Path, function: str) -> None:
    """Have the ranks of pools begin with a framework imported, where all of them run its tests.

    Other tests are to have a torch that it has not changed. Those that ask for no ranks have it
    whatever the ranks begin with.

    Args:
        session: whose tests have been collected.
        tests: the folder of the framework's own.
        function: imports it, as ``module:function``.
    """
    others = [item for item in session.items if tests not in item.path.parents]
    if not any("world_pool" in getattr(item, "fixturenames", ()) for item in others):
        os.environ[PRELOAD] = function


@pytest.fixture(scope="session")
def world_pool(request: pytest.FixtureRequest) -> Iterator[WorldPools]:
    """``world_pool(2).run(fn, *args)`` calls ``fn(placement, *args)`` on two running ranks."""
    from unipar.testing.pool import WorldPools

    pools = WorldPools(request.config.getoption("unipar_device_type", None) or "cpu")
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def forked_programs() -> Iterator[None]:
    """Python programs that a module's tests start, and the ranks of those, begin with torch."""
    from unipar.testing import programs

    with programs.forked_programs():
        yield


@pytest.fixture
def new_interpreters() -> Iterator[None]:
    """They do not in this test."""
    from unipar.testing import programs

    with programs.new_interpreters():
        yield


@pytest.fixture(scope="session")
def saved_checkpoints(world_pool: WorldPools, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """``saved_checkpoints[Where("fsdp", 2)]`` is a checkpoint that other places can resume."""
    from unipar.testing.checkpoints import Saved

    return Saved(world_pool, tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="session")
def conformance_kits(request: pytest.FixtureRequest, world_pool: WorldPools) -> Iterator[Kits]:
    """The kits of this session; ``--parity-json`` writes what they have measured at its end."""
    from unipar.testing.kit import Kits

    kits = Kits(world_pool)
    yield kits
    path = request.config.getoption("unipar_parity_json", None)
    if path:
        kits.measurements.write(Path(path))
