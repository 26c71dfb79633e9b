"""Random numbers of a model that computes a part of a batch: this rank's part of the whole's.

All ranks draw for the whole batch, of generators that are in the same state, and take their part:
dropout, noise and layers left out at random are those of one process, and generators move on as
there. Which tensors have samples in them, and along which dimension, is learned of two runs, of a
whole batch and of a part, in which the same calls draw for other shapes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from unipar.compat.dividing.recurrent_layers import KINDS, by_layers, drops_within
from unipar.compat.dividing.relations import not_noted
from unipar.compat.dividing.shares import Shares, part_of
from unipar.engine.sample_dropout import WITH_MASKS
from unipar.engine.trials import torch_generators

_FILLS = (
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
)  # fmt: skip
"""Methods that draw each element for itself."""
_MAKERS = {"rand": "uniform_", "randn": "normal_", "randint": "random_"}
"""Functions of torch, with those whose names end in ``_like``, and what they fill tensors by."""
_Draw = tuple[str, tuple[int, ...]]
"""What is called, and the shape that it draws for."""
_OTHERWISE: _Draw = ("?", ())
"""Draws by what is not known here."""


class Place(NamedTuple):
    """Where samples lie in what is drawn.

    Attributes:
        dim: along which dimension.
        each: how many entries a sample has there.
        apart: whether these do not follow one another, as of (time, samples) that was flattened.
    """

    dim: int
    each: int
    apart: bool = False


class WholeDraws:
    """How a model draws, as two runs have shown: along which dimension samples lie."""

    def __init__(self) -> None:
        self._along: dict[Any, set[Place]] = {}
        self._alike: dict[Any, set[tuple[int, ...]]] = {}

    def learn(
        self, whole: Sequence[_Draw], part: Sequence[_Draw], shares: Shares, *, apart: bool = False
    ) -> bool:
        """Learn of the draws of two runs; whether they show it.

        Args:
            whole: what was drawn in a run of the whole batch.
            part: and of this rank's part.
            shares: how the batch is divided.
            apart: whether the entries of samples that have several do not follow one another.
        """
        if len(whole) != len(part):
            return False
        for number, ((name, shape), (other, own)) in enumerate(zip(whole, part, strict=True)):
            dims = [at for at, (a, b) in enumerate(zip(shape, own, strict=False)) if a != b]
            if name != other or len(shape) != len(own) or len(dims) > 1:
                return False
            each, rest = divmod(own[dims[0]], shares.own) if dims else (1, 0)
            if rest or (dims and shape[dims[0]] != each * sum(shares.sizes)):
                return False
            for key in ((name, len(own)), (name, len(own), number)):
                if dims:
                    place = Place(dims[0], each, apart and each > 1)
                    self._along.setdefault(key, set()).add(place)
                else:
                    self._alike.setdefault(key, set()).add(own)
        return True

    def forget(self) -> None:
        """Learn from the beginning."""
        self._along.clear()
        self._alike.clear()

    def place(self, number: int, name: str, own: Sequence[int], shares: Shares) -> Place | None:
        """Where samples lie in a tensor.

        Args:
            number: how many draws of the pass came before.
            name: what is called.
            own: the shape of this rank's part.
            shares: how the batch is divided.

        Returns:
            That; ``None`` if the tensor has none, as what all samples share.

        Raises:
            LookupError: that was not seen before, or more than one thing was.
        """
        for key in ((name, len(own), number), (name, len(own))):
            found: list[Any] = [
                one for one in self._along.get(key, ()) if own[one.dim] == one.each * shares.own
            ]  # fmt: skip
            if tuple(own) in self._alike.get(key, ()):
                found.append(None)
            if len(found) == 1:
                return found[0]
        raise LookupError


class Drawing:
    """A pass in which draws are noted, or are parts of those of the whole.

    Args:
        device: where the model computes.
        draws: how the model draws; ``None`` to note alone what is drawn.
        shares: how the batch is divided.
        expected: for a first run in parts, what the whole one has drawn.
        apart: for such a run, whether entries of a sample are taken for lying apart.
        swapped: the number of a draw in which they are taken for lying otherwise than in the rest.

    Attributes:
        noted: what was drawn.
        placed: of each of these, where samples lie.
        astray: whether anything was drawn of which nothing is known.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        draws: WholeDraws | None = None,
        shares: Shares | None = None,
        expected: Sequence[_Draw] = (),
        apart: bool = False,
        swapped: int | None = None,
    ) -> None:
        self._device, self._apart = device, apart
        self._draws, self._shares, self._expected = draws, shares, list(expected)
        self._swapped = swapped
        self.noted: list[_Draw] = []
        self.placed: list[Place | None] = []
        self.astray = False
        self._states: list[torch.Tensor] = []
        self._noted_ways: list[bytes] = []

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Around the pass."""
        global _current
        before, _current = _current, self
        self._states = torch_generators(self._device)
        try:
            with _in_place_of_torch():
                yield
        finally:
            _current = before
            self._look()

    def drop(self) -> None:
        """Forget how the pass has drawn, which no backward pass is to follow."""
        for key in self._noted_ways:
            _ways.pop(key, None)

    def _look(self) -> None:
        """Note that numbers were drawn by what is not known here, if they were.

        Where a run of a whole batch and one of a part have drawn as much, and computed the same,
        they are for all samples together, as an order of channels.
        """
        now = torch_generators(self._device)
        if not all(map(torch.equal, now, self._states)):
            self._states = now
            self.noted.append(_OTHERWISE)
            self.placed.append(None if self._draws is None else self._placed(*_OTHERWISE))

    def leave(self, name: str, own: Sequence[int] | None, run: Callable[[], Any]) -> Any:
        """Note a draw that is left to torch.

        Args:
            name: what is called.
            own: the shape that it draws for; ``None``: that of what it gives.
            run: the call.
        """
        if _in_backward_pass():
            return _Again(self._device).leave(name, own, run)
        self._look()
        with _left_to_torch():
            found = run()
        self.noted.append((name, tuple(found.shape if own is None else own)))
        self.placed.append(None)
        self._states = torch_generators(self._device)
        return found

    def draw(
        self, name: str, own: Sequence[int], make: Callable[[list[int]], torch.Tensor]
    ) -> torch.Tensor:
        """This rank's part of what is drawn for the whole.

        Args:
            name: what is called.
            own: the shape of the part.
            make: draws for a shape.
        """
        assert self._shares is not None
        assert self._draws is not None
        if _in_backward_pass():
            return _Again(self._device).draw(name, own, make)
        self._look()
        self.noted.append((name, tuple(own)))
        place = self._placed(name, own)
        if place is not None and self._swapped == len(self.placed):
            place = place._replace(apart=not place.apart)
        self.placed.append(place)
        way = _Way(place, self._shares)
        # What checkpoints activations keeps none, or packs them.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
        if hooks(False) is not None or not torch.is_grad_enabled():
            self._noted_ways.append(_note_way(self._states, way))
        found = way.part(own, make)
        self._states = torch_generators(self._device)
        return found

    def _placed(self, name: str, own: Sequence[int]) -> Place | None:
        """Where the samples of the last draw lie, as far as that is known."""
        try:
            return self._place(name, own)
        except LookupError:
            self.astray = True
            return None

    def _place(self, name: str, own: Sequence[int]) -> Place | None:
        assert self._shares is not None
        assert self._draws is not None
        number = len(self.noted) - 1
        if not self._expected:
            return self._draws.place(number, name, own, self._shares)
        # A run that has only begun to show it: the same call of the whole one does.
        only = WholeDraws()
        asked = self._expected[number : number + 1]
        if not only.learn(asked, self.noted[-1:], self._shares, apart=self._apart):
            raise LookupError
        return only.place(0, name, own, self._shares)

    @property
    def between_samples(self) -> list[int]:
        """The numbers of draws with several entries for each sample, which may lie in two ways."""
        return [at for at, one in enumerate(self.placed) if one is not None and one.each > 1]

    @property
    def notes_alone(self) -> bool:
        """Whether draws are left to torch, and noted."""
        return self._draws is None


_current: Drawing | _Again | None = None


@contextlib.contextmanager
def _left_to_torch() -> Iterator[None]:
    global _current
    before, _current = _current, None
    try:
        yield
    finally:
        _current = before


class _Way(NamedTuple):
    """How this rank's part of a draw is taken of the whole's.

    Attributes:
        place: where samples lie; ``None`` if what is drawn has none.
        shares: how the batch is divided.
    """

    place: Place | None
    shares: Shares

    def part(self, own: Sequence[int], make: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
        """That part, of what ``make`` draws for the whole."""
        # Torch looks its own functions up where these stand now.
        with torch.no_grad(), _left_to_torch():
            if self.place is None:
                return make(list(own))
            dim, each, apart = self.place
            whole = [*own[:dim], each * sum(self.shares.sizes), *own[dim + 1 :]]
            found = make(whole)
            if not apart:
                return part_of(found, dim, self.shares.times(each))
            rows = found.unflatten(dim, (each, -1))
            return part_of(rows, dim + 1, self.shares).flatten(dim, dim + 1)


_ways: dict[bytes, _Way] = {}
"""What was drawn where activations may be computed again in the backward pass, by the state that
generators had, which is given back to them then."""
_MOST_WAYS = 10_000


@contextlib.contextmanager
def no_ways_kept() -> Iterator[None]:
    """Around a trial: how passes have drawn whose backward pass is to come stays known.

    It may draw from the same state as such a pass, in other shares or in none.
    """
    before = dict(_ways)
    try:
        yield
    finally:
        _ways.clear()
        _ways.update(before)


def _note_way(states: Sequence[torch.Tensor], way: _Way) -> bytes:
    if len(_ways) >= _MOST_WAYS:
        del _ways[next(iter(_ways))]
    key = _key(states)
    _ways[key] = way
    return key


def _key(states: Sequence[torch.Tensor]) -> bytes:
    return hashlib.blake2b(b"".join(one.numpy().tobytes() for one in states)).digest()


def _in_backward_pass() -> bool:
    # torch 2.8 to 2.13, csrc/autograd/init.cpp.
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def drawing_again(device: torch.device) -> Iterator[None]:
    """Around a backward pass, in which activations may be computed again as they were."""
    global _current
    if not _ways:
        yield
        return
    before, _current = _current, _Again(device)
    try:
        with _in_place_of_torch():
            yield
    finally:
        _current = before


class _Again:
    """Draws as before; what another model draws, or none has drawn before, is torch's.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _way(self) -> _Way | None:
        return _ways.get(_key(torch_generators(self._device)))

    @property
    def notes_alone(self) -> bool:
        return self._way() is None

    def leave(self, name: str, own: Sequence[int] | None, run: Callable[[], Any]) -> Any:
        with _left_to_torch():
            return run()

    def draw(
        self, name: str, own: Sequence[int], make: Callable[[list[int]], torch.Tensor]
    ) -> torch.Tensor:
        way = self._way()
        assert way is not None
        return way.part(own, make)


class _Native(Exception):
    """Raised where a mask is asked for, to leave a call to torch."""


@contextlib.contextmanager
def _in_place_of_torch() -> Iterator[None]:
    # Attributes, and not a mode of torch, which would cost each operation of the model.
    replaced: list[tuple[Any, str, Any]] = [
        *((functional, name, _dropping) for name in WITH_MASKS),
        *((torch.Tensor, name, _filling) for name in _FILLS),
        *((torch, f"{name}{like}", _making) for name in _MAKERS for like in ("", "_like")),
        *((kind, "forward", _recurring) for kind in KINDS),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for (owner, name, original), (_, _, made) in zip(originals, replaced, strict=True):
        # A partial object would be no method.
        setattr(owner, name, not_noted(made(name, original)))
    try:
        yield
    finally:
        for owner, name, original in originals:
            if owner is torch.Tensor:
                # Torch has it on the class that this one is made of.
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _dropping(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def drop(*args: Any, **kwargs: Any) -> Any:
        drawing = _current
        if drawing is None:
            return original(*args, **kwargs)

        def masked(x: torch.Tensor, p: float, sizes: Sequence[int]) -> torch.Tensor:
            if drawing.notes_alone:
                raise _Native(sizes)
            # Only on GPUs has torch a kernel of its own for it, which draws otherwise.
            fused = name in ("dropout", "scaled_dot_product_attention") and x.device.type != "cpu"

            def make(whole: list[int]) -> torch.Tensor:
                one = _shaped_as(x, whole) if list(sizes) == list(x.shape) else x.new_empty(whole)
                return _dropout(one.fill_(1), p, True) if fused else _FILL["bernoulli_"](one, 1 - p)

            return drawing.draw(name, sizes, make) == 0

        try:
            return WITH_MASKS[name](original, masked, *args, **kwargs)
        except _Native as native:
            return drawing.leave(name, native.args[0], lambda: original(*args, **kwargs))

    return drop


def _filling(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fill(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        drawing = _current
        by_value = any(isinstance(one, torch.Tensor) for one in (*args, *kwargs.values()))
        if drawing is None or by_value or kwargs.get("generator") is not None or not self.numel():
            return original(self, *args, **kwargs)
        if drawing.notes_alone:
            return drawing.leave(name, self.shape, lambda: original(self, *args, **kwargs))

        def make(whole: list[int]) -> torch.Tensor:
            return original(_shaped_as(self.detach(), whole), *args, **kwargs)

        found = drawing.draw(name, self.shape, make)
        return self.copy_(found)

    return fill


def _making(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    kind = _MAKERS[name.removesuffix("_like")]

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        drawing = _current
        given = kwargs.get("generator") is not None or kwargs.get("out") is not None
        if drawing is None or given:
            return original(*args, **kwargs)
        if drawing.notes_alone:
            return drawing.leave(name, None, lambda: original(*args, **kwargs))
        # As torch does it: a tensor that is filled. torch 2.13, ATen/native/TensorFactories.cpp.
        with _left_to_torch():
            shape = original(*args, **{**kwargs, "device": "meta"})
        like = args[0] if name.endswith("_like") and args else kwargs.get("input")
        device = kwargs.get("device") or (like.device if like is not None else None)
        bounds: list[Any] = []
        if kind == "random_":
            bounds = _bounds(list(args[1:] if like is not None else args), kwargs)

        def drawn(whole: list[int]) -> torch.Tensor:
            blank = torch.empty_strided(
                shape.size(), shape.stride(), dtype=shape.dtype,
                device=device or torch.get_default_device(),
            )  # fmt: skip
            return _FILL[kind](_shaped_as(blank, whole), *bounds)

        found = drawing.draw(name, shape.shape, drawn)
        return found.clone().requires_grad_(bool(kwargs.get("requires_grad")))

    return make


def _recurring(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        if _current is None or not drops_within(self, input):
            return original(self, input, hx)
        return by_layers(self, input, hx)

    return forward


def _bounds(args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Those of ``randint(high, size)`` and ``randint(low, high, size)``, named or not."""
    numbers = [one for one in args if isinstance(one, int)]
    if "high" in kwargs:
        numbers.append(kwargs["high"])
    if "low" in kwargs:
        numbers.insert(0, kwargs["low"])
    return numbers if len(numbers) > 1 else [0, *numbers]


def _shaped_as(one: torch.Tensor, whole: Sequence[int]) -> torch.Tensor:
    """An empty tensor of another shape, in memory in the same order, in which numbers are drawn."""
    # What torch makes of a tensor whose elements do not lie one by one, as of an expanded one.
    strides = torch.empty_like(one, device="meta").stride()
    order = sorted(range(one.dim()), key=lambda dim: -strides[dim])
    empty = one.new_empty([whole[dim] for dim in order])
    return empty.permute([order.index(dim) for dim in range(one.dim())])


_dropout = functional.dropout
_FILL: dict[str, Any] = {name: getattr(torch.Tensor, name) for name in _FILLS}
