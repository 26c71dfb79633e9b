"""Possible values of an expression, from those of its names.

Each expression stands for a set of origins: the calls that made what it may hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from unipar.migrate.literals import argument, constant
from unipar.migrate.migrated_files import absolute
from unipar.migrate.scopes import Scope
from unipar.migrate.source import Source

# Methods of modules and tensors that give back what they are called on, as far as flow goes.
TRANSPARENT = {
    "to", "cuda", "cpu", "train", "eval", "float", "double", "half", "bfloat16", "requires_grad_",
    "module", "share_memory", "apply",
}  # fmt: skip
# Classes whose instances stand for the module that they are given.
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
# Progress bars around what a loop goes over.
TQDM = frozenset(f"tqdm.{module}tqdm" for module in
                 ("", "auto.", "autonotebook.", "notebook.", "rich.", "std."))  # fmt: skip
# Functions that give back their first argument, or its elements.
_PASSING = {*TQDM, "enumerate", "iter", "reversed", "list", "tuple",
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm", "horovod.torch.DistributedOptimizer",
            "torch.distributed.fsdp.fully_shard",
            "torch.distributed._composable.fsdp.fully_shard"}  # fmt: skip

# Methods that give back what they are given: of several arguments, a tuple of them, or one of
# these in this order.
_ACCELERATOR: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("prepare", "prepare_model", "prepare_data_loader", "prepare_optimizer", "prepare_scheduler",
     "unwrap_model", "skip_first_batches"), (),
)  # fmt: skip
FABRIC = tuple(f"{package}.Fabric" for package in (
    "lightning", "lightning.fabric", "lightning.fabric.fabric", "lightning_fabric",
    "lightning_fabric.fabric"))  # fmt: skip
_FABRIC: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("setup", "setup_module", "setup_optimizers", "setup_dataloaders", "to_device"), ()
)
_BOOSTER = {"boost": ("model", "optimizer", "criterion", "dataloader", "lr_scheduler")}
_HANDING_BACK = {**dict.fromkeys(FABRIC, _FABRIC),
                 "accelerate.Accelerator": _ACCELERATOR,
                 "accelerate.accelerator.Accelerator": _ACCELERATOR,
                 "colossalai.booster.Booster": _BOOSTER,
                 "colossalai.booster.booster.Booster": _BOOSTER}  # fmt: skip
# Functions that give back several things at once, and what these are called here.
_TUPLES = {"deepspeed.initialize": ("deepspeed.engine", "deepspeed.optimizer", "deepspeed.loader",
                                    "deepspeed.scheduler")}  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Attributes:
        kind: ``call``, ``external`` (a name of another package), ``function``, ``class``,
            ``self``, ``tuple``, or ``parameter`` (of a function that nobody is seen to call).
        node: the node that makes it; ``None`` for an external name.
        name: what was called, or the external name.
    """

    kind: str
    node: cst.CSTNode | None = field(compare=False)
    name: str = ""
    number: int = 0


Values = frozenset[Origin]
NOTHING: Values = frozenset()


class Expressions:
    """The values of a program's expressions.

    Args:
        sources: its files, by the names of their modules.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = sources
        self._env: dict[Any, Values] = {}
        self._made: dict[tuple[str, int], Origin] = {}
        self._grown = False
        self._known: dict[int, Values] | None = None  # Answers, once the sets no longer grow.
        self._home = {id(node): source for source in sources.values() for node in source.nodes}

    # -- asking ----------------------------------------------------------------------------------

    def source(self, node: cst.CSTNode) -> Source:
        return self._home[id(node)]

    def names(self, expression: cst.CSTNode) -> set[str]:
        """The names of other packages that an expression may stand for: ``torch.optim.SGD``."""
        return {one.name for one in self.values(expression) if one.kind == "external"}

    def functions(self, expression: cst.CSTNode) -> list[cst.FunctionDef]:
        """The functions of the program that an expression may stand for."""
        return [
            one.node for one in self.values(expression) if isinstance(one.node, cst.FunctionDef)
            and one.kind == "function"
        ]  # fmt: skip

    def values(self, node: cst.CSTNode | None) -> Values:
        """Where what an expression may hold comes from."""
        if self._known is None or node is None:
            return self._values(node)
        if id(node) not in self._known:
            self._known[id(node)] = self._values(node)
        return self._known[id(node)]

    def _values(self, node: cst.CSTNode | None) -> Values:
        if isinstance(node, cst.Name):
            return self._name(node)
        if isinstance(node, cst.Attribute):
            return self._attribute(node)
        if isinstance(node, cst.Call):
            return self._call(node)
        if isinstance(node, (cst.Tuple, cst.List)):
            return self._sequence(node)
        if isinstance(node, cst.Dict):
            return self._dict(node)
        if isinstance(node, cst.Subscript):
            return self._subscript(node)
        if isinstance(node, cst.IfExp):
            return self.values(node.body) | self.values(node.orelse)
        if isinstance(node, cst.BooleanOperation):
            return self.values(node.left) | self.values(node.right)
        if isinstance(node, (cst.NamedExpr, cst.Await)):
            return self.values(node.value if isinstance(node, cst.NamedExpr) else node.expression)
        return NOTHING

    def is_module(self, origin: Origin) -> bool:
        """Return whether a call may build a torch module: unless its class is seen to be none."""
        made = self._env.get(("class of", origin), NOTHING)
        return not made or any(self._derived(id(one.node), set()) for one in made)

    def _derived(self, class_: int, seen: set[int]) -> bool:
        if class_ in seen:
            return False
        seen.add(class_)
        for base in self._env.get(("bases", class_), NOTHING):
            if base.kind == "external" and base.name != "object":
                return True
            if base.kind == "class" and self._derived(id(base.node), seen):
                return True
        return False

    # -- expressions -----------------------------------------------------------------------------

    def _name(self, node: cst.Name) -> Values:
        scope = self.source(node).scope(node)
        return NOTHING if scope is None else self.named(self.source(node), scope, node.value)

    def named(self, source: Source, scope: Scope, name: str) -> Values:
        """Find what a name may hold in a scope."""
        found: set[Origin] = set()
        for one in scope[name]:
            if one.imported:
                found |= self._imported(source, one.imported)
            elif one.scope is None:
                found.add(Origin("external", None, name))
            else:
                found |= self._env.get(("name", id(one.scope), name), NOTHING)
        return frozenset(found)

    def _imported(self, source: Source, name: str) -> Values:
        name = absolute(name, source.module)
        for module in (name, name.rpartition(".")[0]):
            if module in self.sources:
                if module == name:
                    return frozenset({Origin("external", None, name)})
                scope = self.sources[module].scope(self.sources[module].tree)
                key = ("name", id(scope), name.rpartition(".")[2])
                return self._env.get(key, NOTHING)
        return frozenset({Origin("external", None, name)})

    def _attribute(self, node: cst.Attribute) -> Values:
        base, attribute = self.values(node.value), node.attr.value
        found: set[Origin] = set()
        for one in base:
            if one.kind == "external":
                found |= self._imported(self.source(node), f"{one.name}.{attribute}")
                continue
            owner = self._owner(one)
            stored = self._env.get(("field", owner, attribute), NOTHING)
            found |= stored
            if not stored and isinstance(owner, int):
                found |= self._inherited(owner, attribute, set())
        if attribute == "module":
            found |= {
                one for one in base
                if one.kind == "call" and not one.name.endswith(WRAPPERS)
            }  # fmt: skip
        return frozenset(found)

    def _owner(self, one: Origin) -> Any:
        """What the fields of a value are kept under: its class, or itself."""
        node = one.node
        if one.kind == "self":
            return id(node)
        if one.kind == "call" and isinstance(node, cst.Call):
            for made in self._env.get(("class of", one), NOTHING):
                return id(made.node)
        return id(node) if one.kind == "class" else one

    def _inherited(self, owner: int, attribute: str, seen: set[int]) -> Values:
        found = self._env.get(("field", owner, attribute), NOTHING)
        if found or owner in seen:
            return found
        seen.add(owner)
        for base in self._env.get(("bases", owner), NOTHING):
            found |= self._inherited(id(base.node), attribute, seen)
        return found

    def _call(self, node: cst.Call) -> Values:
        found: set[Origin] = set()
        called = self.values(node.func)
        for one in called:
            if one.kind == "function":
                found |= self._env.get(("return", id(one.node)), NOTHING)
            elif one.kind == "class":
                origin = self._origin("call", node, _class_name(one.node))
                self._grow(("class of", origin), frozenset({one}))
                found.add(origin)
            elif one.kind == "external":
                if one.name == "getattr" and len(node.args) > 1:
                    found |= self._named_attribute(node)
                elif one.name in _PASSING and node.args:
                    first = next((a for a in node.args if a.keyword is None), node.args[0])
                    found |= self.values(first.value)
                else:
                    made = self._origin("call", node, one.name)
                    found.add(made)
                    for index, part in enumerate(_TUPLES.get(one.name, ())):
                        held = frozenset({self._origin("call", node, part)})
                        self._grow(("field", made, index), held)
                if one.name.endswith(WRAPPERS):
                    found |= self.values(argument(node, 0, "module"))
        if isinstance(node.func, cst.Attribute) and node.func.attr.value in TRANSPARENT:
            found |= self.values(node.func.value)
        if isinstance(node.func, cst.Attribute):
            for one in self.values(node.func.value):
                order = _HANDING_BACK.get(one.name, {}).get(node.func.attr.value)
                if order is not None:
                    found |= self._handed_back(node, order)
        return frozenset(found or {self._origin("call", node, "")})

    def _named_attribute(self, node: cst.Call) -> Values:
        """``getattr(torch.optim, name)``; where the name is not seen, some class of a package."""
        name = constant(node.args[1].value)
        last = name if isinstance(name, str) else "Some"
        of = [one.name for one in self.values(node.args[0].value) if one.kind == "external"]
        found = frozenset(Origin("external", None, f"{one}.{last}") for one in of)
        return found or frozenset({self._origin("call", node, "getattr")})

    def _handed_back(self, node: cst.Call, order: tuple[str, ...]) -> Values:
        given = [one.value for one in node.args if one.keyword is None and not one.star]
        if order:
            given = [argument(node, index, name) for index, name in enumerate(order)]
        elif len(given) == 1:
            return self.values(given[0])
        origin = self._origin("tuple", node)
        for index, one in enumerate(given):
            self._grow(("field", origin, index), self.values(one))
        return frozenset({origin})

    def _sequence(self, node: cst.Tuple | cst.List) -> Values:
        origin = self._origin("tuple", node)
        for index, element in enumerate(node.elements):
            self._grow(("field", origin, index), self.values(element.value))
        return frozenset({origin})

    def _dict(self, node: cst.Dict) -> Values:
        origin = self._origin("tuple", node)
        for element in node.elements:
            if isinstance(element, cst.DictElement):
                key = constant(element.key)
                if isinstance(key, (str, int)):
                    self._grow(("field", origin, key), self.values(element.value))
        return frozenset({origin})

    def _subscript(self, node: cst.Subscript) -> Values:
        index = node.slice[0].slice if len(node.slice) == 1 else None
        key = constant(index.value) if isinstance(index, cst.Index) else None
        found: Values = NOTHING
        if not isinstance(key, (str, int)):
            return self._any_function(self.values(node.value))
        for one in self.values(node.value):
            found |= self._env.get(("field", self._owner(one), key), NOTHING)
        return found

    def _any_function(self, tables: Values) -> Values:
        """What a dict of functions or classes of other packages may give for some key."""
        found: Values = NOTHING
        for one in tables:
            for element in one.node.elements if isinstance(one.node, cst.Dict) else ():
                found |= self.values(element.value)
        return found if all(one.kind == "external" for one in found) else NOTHING

    def _origin(self, kind: str, node: cst.CSTNode, name: str = "") -> Origin:
        key = (kind + name, id(node))
        if key not in self._made:
            self._made[key] = Origin(kind, node, name, len(self._made))
        return self._made[key]

    def _grow(self, key: Any, values: Values) -> None:
        old = self._env.get(key, NOTHING)
        if not values <= old:
            self._env[key] = old | values
            self._grown = True


def _class_name(node: cst.CSTNode | None) -> str:
    return node.name.value if isinstance(node, cst.ClassDef) else ""
