"""Building a model without its values, and computing these later, one tensor at a time.

The function that builds a model runs over tensors on the meta device, which take no memory, and
each operation that would have given one a value is noted. What a tensor holds is computed on the
host by repeating the operations that it depends on, and no others. The idea is that of torchdistX
(https://github.com/pytorch/torchdistx, ``deferred_init``).

Random numbers are drawn under seeds of their own: of a tensor's name, so that they do not depend on
which tensors are computed, in what order, or how many processes compute them.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from unipar.errors import ConfigError, UniparError, first_few
from unipar.utils.torch_versions import meta_device

_META, _HOST = torch.device("meta"), torch.device("cpu")
_aten = torch.ops.aten
_EMPTY = {
    *(_aten.empty, _aten.empty_like, _aten.empty_strided),
    *(_aten.new_empty, _aten.new_empty_strided),
}
_WHOLE = {
    *(_aten.normal_, _aten.uniform_, _aten.fill_, _aten.zero_, _aten.copy_),
    *(_aten.bernoulli_, _aten.exponential_, _aten.random_, _aten.log_normal_),
}
"""What gives every element of its first argument a value, whatever it had before."""
_NONE: Mapping[int, int] = {}
_MOVES_MEMORY = {_aten.resize_, _aten.set_}


class DeferredModel:
    """A model on the meta device, and how to compute what its tensors hold.

    Args:
        build: builds the model; called once.
        seed: of the random numbers, with the names of the tensors.

    Attributes:
        module: what was built; its tensors have shapes and no values.

    Raises:
        ConfigError: ``build`` needs a value while it runs, draws from a generator of its own,
            computes with what has no values, or does with a tensor's memory what cannot be
            repeated.
    """

    def __init__(self, build: Callable[[], nn.Module], seed: int) -> None:
        self._recorder = _Recorder()
        drawing = _TruncatedNormal(self._recorder).installed()
        own = _seed(seed, "", 0)
        # What torch 2.8 imports to draw on the meta device cannot be imported while noting.
        meta_device()
        try:
            with torch.random.fork_rng([]):
                torch.default_generator.manual_seed(own)
                with self._recorder, _AsOnTheHost(self._recorder), drawing:
                    self.module = build()
                self._reseeded = torch.default_generator.initial_seed() != own
        except UniparError:
            raise
        except Exception as error:
            raise ConfigError(
                "the model function fails where tensors have no values yet, as they have none "
                "while it runs so that each can be computed or read by itself: "
                f"{type(error).__name__}: {error} Let it not ask what random tensors hold, or use "
                "initial_weights='model'."
            ) from error
        self._tensors = {
            **dict(self.module.named_parameters(remove_duplicate=False)),
            **dict(self.module.named_buffers(remove_duplicate=False)),
        }
        self._seeds: dict[int, int] = {}
        for name, tensor in self._named():
            for place, number in enumerate(self._draws(tensor)):
                # What a second tensor is computed of as well, it shall find equal.
                self._seeds.setdefault(number, _seed(seed, name, place))

    def check(self, names: Collection[str]) -> None:
        """Refuse tensors of which nothing says what they hold, or that shall hold something else.

        Raises:
            ConfigError: some are never given a value; or are drawn at random, and the function has
                seeded torch's generator; or what they are computed of has been changed since.
        """
        # Now, when every rank comes to know of it, and not the one that computes a tensor.
        for number in {n for name in names for n in self._steps(self._tensors[name])}:
            for one in tree_leaves(self._recorder.steps[number].arguments):
                if isinstance(one, _Constant):
                    one.check()
        drawn = [name for name in names if self._reseeded and self._draws(self._tensors[name])]
        if drawn:
            raise ConfigError(
                f"the model function seeds torch's generator (torch.manual_seed), and "
                f"{first_few(drawn)} would not be drawn under that seed: each tensor is drawn "
                "under a seed made of the run's and its name. Leave the seed to the run (seed=…), "
                "or use initial_weights='model'."
            )
        empty = [name for name in names if self._is_empty(self._tensors[name])]
        if empty:
            raise ConfigError(
                f"the model function gives {first_few(empty)} no values: they are made by "
                "torch.empty, or on the meta device, and left so. Let the function initialize them "
                "(torch.nn.init), or read them from a file by initial_weights='path/of/weights'."
            )

    def compute(self, name: str) -> torch.Tensor:
        """The value of a parameter or buffer, whole, on the host; equal each time."""
        return self._value(self._tensors[name])

    def compute_attributes(self) -> None:
        """Give values to tensors that modules hold as plain attributes."""
        for _, part, key, value in self._attributes():
            setattr(part, key, tree_map(lambda v: self._value(v) if _is_meta(v) else v, value))

    def _attributes(self) -> Iterator[tuple[str, nn.Module, str, Any]]:
        for path, part in self.module.named_modules():
            for key, value in list(vars(part).items()):
                own = key not in {"_parameters", "_buffers", "_modules"}
                if own and tree_any(_is_meta, value):
                    yield path, part, key, value

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for name, tensor in self._tensors.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor
        for path, _, key, value in self._attributes():
            for place, one in enumerate(filter(_is_meta, tree_leaves(value))):
                yield f"{path}.{key}[{place}]", one

    def _draws(self, tensor: torch.Tensor) -> list[int]:
        return [number for number in self._steps(tensor) if self._recorder.steps[number].random]

    def _steps(self, tensor: torch.Tensor) -> list[int]:
        return self._recorder.steps_of(_place(tensor)) if tensor.is_meta else []

    def _is_empty(self, tensor: torch.Tensor) -> bool:
        if not tensor.is_meta or not tensor.numel():
            return False
        steps = [self._recorder.steps[number] for number in self._steps(tensor)]
        return all(step.function.overloadpacket in _EMPTY for step in steps)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._recorder.compute(tensor, self._seeds)


@dataclass(frozen=True)
class _Constant:
    """A tensor with values among those without, as it was when it was used."""

    tensor: torch.Tensor
    digest: str

    def check(self) -> None:
        # Its version does not tell of changes through NumPy.
        if digest(self.tensor) != self.digest:
            raise ConfigError(
                f"the model function computes with a tensor of shape {tuple(self.tensor.shape)} "
                "that it changes afterwards, so that what was computed of it cannot be computed "
                "again. Let it change a copy (tensor.clone()), or use initial_weights='model'."
            )


@dataclass(frozen=True)
class _Step:
    """One operation.

    Attributes:
        function: of ATen.
        arguments: positional ones, and those by name.
        results: what it gave.
        reads: the memory that its result depends on.
        writes: the memory that it gives values.
        overwrites: those of ``writes`` of which nothing from before is left.
        dtype: torch's default while it ran.
    """

    function: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    results: Any
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    dtype: torch.dtype

    @property
    def random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.function.tags

    def repeat(self, memory: dict[int, torch.UntypedStorage]) -> None:
        """Do it over real memory, and add what it makes."""

        def real(value: Any) -> Any:
            if isinstance(value, _Constant):
                return value.tensor.detach().to(_HOST)
            return _real(value, memory) if _is_meta(value) else value

        args, kwargs = tree_map(real, self.arguments)
        if "device" in kwargs:
            kwargs["device"] = _HOST
        torch.set_default_dtype(self.dtype)
        results = tree_leaves(self.function(*args, **kwargs))
        for noted, made in zip(tree_leaves(self.results), results, strict=True):
            if not _is_meta(noted) or _place(noted) in memory:
                continue
            shaped = (
                (noted.stride(), noted.storage_offset()),
                (made.stride(), made.storage_offset()),
            )
            if shaped[0] == shaped[1]:
                memory[_place(noted)] = made.untyped_storage()
            else:
                _real(noted, memory).copy_(made)


class _Recorder(TorchDispatchMode):
    """Moves what is made to the meta device, and notes the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        # Held, so that no other can have the number of one that is gone.
        self._known: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, dict(kwargs or {}))

    def _run(self, func: Any, *arguments: Any) -> Any:
        leaves = tree_leaves(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        given = list(filter(_is_meta, tensors))
        if tensors and not given:
            # As torch.tensor([…]) makes them; what is computed of such alone has values, too.
            return func(*arguments[0], **arguments[1])
        if func is _aten._local_scalar_dense.default and self.is_certain(tensors[0]):
            return self.compute(tensors[0]).item()
        _refuse_generators(leaves, func)
        if not self._known.keys() >= set(map(_place, given)):
            raise ConfigError(
                f"the model function calls {func} on a tensor on the meta device that it has not "
                "made, and that has no values. Let it make all that it computes with, or use "
                "initial_weights='model'."
            )
        changed = [one for one in _changed(func, *arguments) if isinstance(one, torch.Tensor)]
        if func.overloadpacket in _MOVES_MEMORY or not all(map(_is_meta, changed)):
            raise ConfigError(
                f"the model function calls {func} on a tensor, which cannot be repeated for one "
                "tensor at a time. Let it make a new one, or use initial_weights='model'."
            )
        noted = tree_map(_as_it_is, arguments)
        args, kwargs = tree_map(_stand_in, arguments)
        if "device" in kwargs:
            kwargs["device"] = _META
        results = func(*args, **kwargs)
        self.note(func, noted, tree_map(_as_it_is, results), set(map(_place, changed)))
        return results

    def note(self, func: Any, noted: Any, results: Any, changed: set[int]) -> None:
        """Note an operation.

        Args:
            func: it.
            noted: its arguments, positional ones and those by name, as they were.
            results: what it has returned, likewise.
            changed: the memory that it changes.
        """
        given = [leaf for leaf in tree_leaves(noted) if _is_meta(leaf)]
        returned = [leaf for leaf in tree_leaves(results) if _is_meta(leaf)]
        made = {_place(one) for one in returned} - self._known.keys()
        if not changed and not made:
            return  # A view: a tensor is found by its place in memory.
        for one in (*given, *returned):
            self._known.setdefault(_place(one), one.untyped_storage())
        over = set(made)
        whole = func.overloadpacket in _WHOLE or isinstance(func, _TruncatedNormal)
        if whole and _covers(given[0]):
            over.add(_place(given.pop(0)))
        reads, writes = frozenset(map(_place, given)), frozenset(changed | made)
        step = _Step(
            *(func, noted, results, reads, writes, frozenset(over - reads)),
            dtype=torch.get_default_dtype(),
        )
        for place in writes:
            self._writers[place].append(len(self.steps))
        self.steps.append(step)

    def compute(self, tensor: torch.Tensor, seeds: Mapping[int, int] = _NONE) -> torch.Tensor:
        """What a tensor holds, on the host.

        Args:
            tensor: made by operations that were noted.
            seeds: of the random numbers that operations draw, by their numbers.
        """
        if not tensor.is_meta:
            return tensor.detach().to(_HOST)
        memory: dict[int, torch.UntypedStorage] = {}
        dtype = torch.get_default_dtype()
        with torch.no_grad(), torch.random.fork_rng([]):
            try:
                for number in self.steps_of(_place(tensor)):
                    if self.steps[number].random:
                        torch.default_generator.manual_seed(seeds[number])
                    self.steps[number].repeat(memory)
            finally:
                torch.set_default_dtype(dtype)
        value = _real(tensor, memory).resolve_conj().resolve_neg()
        # A part of a larger one would keep that in memory.
        return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()

    def is_certain(self, tensor: torch.Tensor) -> bool:
        """Whether it is computed of what is known already."""
        steps = [self.steps[number] for number in self.steps_of(_place(tensor))]
        return not any(step.random or step.function.overloadpacket in _EMPTY for step in steps)

    def steps_of(self, place: int) -> list[int]:
        """The numbers of the operations that the values at a place depend on, in their order."""
        needed = {place}
        chosen: set[int] = set()
        pending = [-number for number in self._writers[place]]
        heapq.heapify(pending)
        while pending:
            number = -heapq.heappop(pending)
            step = self.steps[number]
            if number in chosen or not step.writes & needed:
                continue
            chosen.add(number)
            needed -= step.overwrites
            for read in step.reads - needed:
                needed.add(read)
                for earlier in self._writers[read]:
                    if earlier < number:
                        heapq.heappush(pending, -earlier)
        return sorted(chosen)


class _AsOnTheHost(TorchFunctionMode):
    """Lets tensors without values say that they are on the host.

    Functions that initialize leave alone what is on the meta device, and say nothing (torch 2.13,
    nn/init.py, ``is_meta``; so do models of transformers 5.23).
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and args[0].is_meta and self._recorder.is_certain(args[0]):
            with _disable_current_modes():
                return self._recorder.compute(args[0]).tolist()
        if func == _IS_META:
            return False
        if func == _DEVICE and func(*args) == _META:
            return _HOST
        if func is torch.Tensor.__deepcopy__ and type(args[0]) is torch.Tensor:
            # Torch's own copies memory, which is no operation.
            one, memo = args
            return memo.setdefault(id(one), one.detach().clone().requires_grad_(one.requires_grad))
        return func(*args, **(kwargs or {}))


_IS_META, _DEVICE = torch.Tensor.is_meta.__get__, torch.Tensor.device.__get__  # pyright: ignore


class _TruncatedNormal:
    """Draws until all numbers are within bounds: as a whole one operation of a recorder.

    It asks for values while it draws (torch 2.13, nn/init.py, ``_no_grad_trunc_normal_``).
    """

    tags = frozenset({torch.Tag.nondeterministic_seeded})

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self.overloadpacket = self._draw = init._no_grad_trunc_normal_

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._draw(tensor, *args, **kwargs)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        setattr(init, self._draw.__name__, self._noted)
        try:
            yield
        finally:
            setattr(init, self._draw.__name__, self._draw)

    def _noted(
        self, tensor: torch.Tensor, *args: Any, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            if not tensor.is_meta:
                return self._draw(tensor, *args, generator=generator)
            _refuse_generators([generator], "trunc_normal_")
            with _disable_current_modes():
                noted = _as_it_is(tensor)
            self._recorder.note(self, ((noted, *args), {}), noted, {_place(tensor)})
        return tensor


def _refuse_generators(values: Iterable[Any], func: Any) -> None:
    if any(isinstance(value, torch.Generator) for value in values):
        raise ConfigError(
            f"the model function draws random numbers from a generator of its own ({func}), whose "
            "numbers depend on what was drawn before. Let it draw from torch's default generator, "
            "which is seeded for each tensor, or use initial_weights='model'."
        )


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def digest(tensor: torch.Tensor) -> str:
    """A checksum of a tensor's values, on the host."""
    values = tensor.detach().to(_HOST).resolve_conj().resolve_neg().contiguous().reshape(-1)
    found: Any = values.view(torch.uint8).numpy()
    return xxhash.xxh3_64_hexdigest(memoryview(found))


def _as_it_is(value: Any) -> Any:
    """What stays as it is when the function gives a tensor other memory (``p.data = …``,
    ``p.to(dtype)``) or another shape (``p.t_()``)."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach() if value.is_meta else _Constant(value, digest(value))


def _stand_in(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)


def _changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation changes in place, by its schema (``Tensor(a!)``)."""
    written = [
        (place, argument.name)
        # torch 2.13, _ops.py: nothing public says it.
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    values = (args[at] if at < len(args) else kwargs.get(name) for at, name in written)
    return tree_leaves(list(values))


def _place(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory (torch 2.13, storage.py), which its views share."""
    return tensor.untyped_storage()._cdata


def _covers(tensor: torch.Tensor) -> bool:
    """Whether it is all of its memory."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _real(noted: torch.Tensor, memory: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """The tensor on the host that has the shape and the place of one on the meta device."""
    place = _place(noted)
    if place not in memory:
        memory[place] = torch.UntypedStorage(noted.untyped_storage().nbytes())
    real = torch.empty(0, dtype=noted.dtype).set_(
        memory[place], noted.storage_offset(), noted.shape, noted.stride()
    )
    # Conjugates and negatives are views, too.
    real = real.conj() if noted.is_conj() else real
    return _aten._neg_view.default(real) if noted.is_neg() else real


def _seed(seed: int, name: str, place: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{place}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
