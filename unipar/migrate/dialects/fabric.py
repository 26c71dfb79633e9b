"""Lightning Fabric: its face is imported in its place, and the script stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from unipar.compat.fabric_names import (
    ACCELERATORS,
    CALLS,
    LIGHTNING,
    LOGGERS,
    PLUGINS,
    REFUSED_WORDS,
    STRATEGIES,
    TOP,
    UTILITIES,
)
from unipar.compat.fabric_names import FABRIC as MEMBERS
from unipar.compat.tables import Table
from unipar.migrate.dialects.base import Row
from unipar.migrate.dialects.face import FaceDialect
from unipar.migrate.expressions import FABRIC
from unipar.migrate.literals import constant
from unipar.migrate.plan import Plan
from unipar.migrate.tracing import keywords

FACE = "unipar.compat.fabric"


class Fabric(FaceDialect):
    """A script that has its loop itself, and a Fabric do the rest."""

    name: ClassVar[str] = "fabric"
    title: ClassVar[str] = "Lightning Fabric"
    marks: ClassVar[tuple[str, ...]] = ("lightning_fabric.", "lightning.fabric.", *FABRIC)
    trains: ClassVar[tuple[str, ...]] = FABRIC
    package: ClassVar[str] = "lightning_fabric"
    face: ClassVar[str] = FACE
    modules: ClassVar[Mapping[str, Table | None]] = {
        "": TOP, "accelerators": ACCELERATORS, "fabric": None, "loggers": LOGGERS,
        "plugins": PLUGINS, "strategies": STRATEGIES, "utilities": UTILITIES, "wrappers": None,
    }  # fmt: skip
    members: ClassVar[Table | None] = MEMBERS
    main: ClassVar[tuple[str, ...]] = FABRIC
    together: ClassVar[tuple[str, ...]] = ("save",)
    whole: ClassVar[str] = "fabric.save(path, {{'model': model}})"
    whole_state: ClassVar[str] = "fabric.save(path, {{'optimizer': optimizer}})"
    calls: ClassVar[tuple[Table, ...]] = (CALLS, LIGHTNING)
    rows: ClassVar[tuple[Row, ...]] = (
        Row("from lightning_fabric import Fabric", f"from {FACE} import Fabric"),
        Row("from lightning.fabric.strategies import FSDPStrategy",
            f"from {FACE}.strategies import FSDPStrategy"),
        Row("from lightning_fabric.utilities.seed import seed_everything",
            f"from {FACE}.utilities import seed_everything"),
        Row("import lightning as L", "import unipar.compat.lightning as L"),
    )  # fmt: skip

    def rewrite(self, plan: Plan) -> None:
        plan.launcher = "python"
        super().rewrite(plan)
        for other in (_Dotted(), _Lightning()):
            other.rewrite(plan)
        for _, call in plan.calls(*FABRIC):
            for name, given in (keywords(plan, call) or {}).items():
                found = [one for one in map(constant, given) if str(one) in REFUSED_WORDS]
                row = CALLS.find(REFUSED_WORDS[str(found[0])]) if found else None
                if row is not None:
                    plan.refuse(call, f"the face refuses {name}={found[0]!r}.", row.why)


class _Dotted(FaceDialect):
    """The same modules under the name that they have in ``lightning``."""

    package: ClassVar[str] = "lightning.fabric"
    face: ClassVar[str] = FACE
    modules: ClassVar[Mapping[str, Table | None]] = Fabric.modules


class _Lightning(FaceDialect):
    """The package that Fabric is a part of; the rest of it is Lightning's own."""

    package: ClassVar[str] = "lightning"
    face: ClassVar[str] = "unipar.compat.lightning"
    modules: ClassVar[Mapping[str, Table | None]] = {"": LIGHTNING}

    def inside(self, module: str) -> str | None:
        # What is below is another dialect's, or models and loggers, which need no face.
        return "" if module == self.package else None
