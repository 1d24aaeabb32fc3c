"""A forward beside the forward: what each tensor is a sum of, followed op by op.

The model runs as it is. Beside each live tensor go its *parts*, which add up to it, each under a label that says how many
attention calls (or MLPs) its paths have crossed. Every nonlinearity is frozen at the value it really took:

- linear ops act on each part; a sum adds parts of one label; biases and other constants are parts of length 0;
- attention weights, norms' statistics, routing and masks are what they were: constants;
- an activation f is the gate (f(z) − f(0)) / z, however many pointwise ops it is written in; f(0) is a constant;
- a product of two live tensors is split half and half.

Parts belong to a tensor's storage, so views share them, writes through a view change them, and they die with it. An op
without a rule makes its result *unattributed*: a part that is named and measured, never dropped.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rankprobe.errors import RankprobeError
from rankprobe.graph import Kind, Node, Op, decomposed, kind_of, op_key, tensors_in, written_arguments
from rankprobe.measure import measuring
from rankprobe.rules import ACTIVATIONS, FROZEN, JOINT, LINEAR, PRODUCTS, RULES, THROUGH_ZERO, without_dtype

__all__ = ["Crossing", "Label", "Parts", "Shadow", "Strayed", "by_last_head", "by_length", "needed_ops", "onward"]


class Label(NamedTuple):
    """Where a part comes from, how far it has come, and, where that is followed, which heads it came through."""

    source: str  # "tokens", "bias" or "unattributed"
    length: int = 0
    heads: tuple[tuple[int, int], ...] = ()  # attention call and head


class Crossing(NamedTuple):
    """A place where paths become longer: which attention call it is (−1: an MLP), its heads, and groups inside one."""

    call: int
    heads: int = 1
    inner: int = 1


# What becomes of a part there: under which labels it goes on, by all heads (None) or by one.
Route = Callable[[Crossing, Label], Iterable[tuple[Label, int | None]]]


def by_length(cap: int | None = None) -> Route:
    """Count what was crossed, up to `cap`."""

    def route(crossing: Crossing, label: Label) -> Iterable[tuple[Label, int | None]]:
        length = label.length + 1
        yield Label(label.source, length if cap is None else min(cap, length)), None

    return route


def by_last_head(crossing: Crossing, label: Label) -> Iterable[tuple[Label, int | None]]:
    """Remember the last head alone."""
    for head in range(crossing.heads):
        yield Label(label.source, 1, ((crossing.call, head),)), head


def onward(path: tuple[tuple[int, int], ...]) -> Route:
    """Follow one path and every step that it can take from its end; nothing else goes on."""

    def route(crossing: Crossing, label: Label) -> Iterable[tuple[Label, int | None]]:
        so_far = label.heads
        for head in range(crossing.heads):
            longer = (*so_far, (crossing.call, head))
            if so_far == path or longer == path[: len(longer)]:
                yield Label(label.source, len(longer), longer), head

    return route


class Strayed(RankprobeError):
    """The ops are not those of the traced forward."""


UNATTRIBUTED = Label("unattributed")
Parts = dict[Label, Tensor]


def needed_ops(ops: Sequence[Op], nodes: Sequence[Node], wanted: Iterable[Node]) -> set[int]:
    """Numbers of the ops that lie on a way to `wanted` that a part can take."""
    reached = {node.id for node in wanted}
    for node in reversed(nodes):
        if node.id not in reached or node.op in FROZEN or node.kind is Kind.SOFTMAX:
            continue
        if node.kind is Kind.ATTENTION:
            reached.update(p.id for p in node.parents[2:3])
        else:
            reached.update(p.id for p in node.parents)
    return {number for number, op in enumerate(ops) if any(made in reached for made in range(op.start, op.stop))}


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Origin:
    """A tensor z that others are pointwise functions of, and are all that holds it."""

    value: Tensor
    parts: Parts


@dataclass(slots=True)
class _Live:
    """The parts of one storage, laid out as it is."""

    alive: StorageWeakRef
    parts: Parts = field(default_factory=dict)
    place: tuple[Any, ...] = ()  # of the tensor the two below speak of
    origin: _Origin | None = None  # what it is a pointwise function of
    zero: Tensor | None = None  # its value where that is zero: parts are still to be made
    nonzero: bool = False  # whether it may be other than zero there
    origins: weakref.WeakValueDictionary[tuple[Any, ...], _Origin] = field(default_factory=weakref.WeakValueDictionary)


class Shadow(TorchDispatchMode):
    """Follows parts through one forward. `ops` and which of them are `needed` come from a traced one."""

    supports_higher_order_operators = True

    def __init__(
        self,
        ops: Sequence[Op],
        needed: set[int],
        crossings: Mapping[int, Crossing],
        keep: dict[int, str],
        *,
        route: Route,
        sources: bool,
        wide: torch.dtype,
    ) -> None:
        super().__init__()
        self.kept: dict[str, tuple[Tensor, Parts]] = {}
        self.unruled: Counter[str] = Counter()
        self.narrowest: torch.dtype = wide  # that the model itself rounds to on the way
        self._ops = ops
        self._needed = needed
        self._crossings = crossings
        self._keep = keep
        self._route = route
        self.splits = sources
        self._wide = wide
        self.constant = Label("bias" if sources else "tokens", 0)
        self._count = 0
        self._live: dict[int, _Live] = {}

    # -- tensors and their parts ----------------------------------------------------------------------------------

    def is_live(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.untyped_storage()._cdata in self._live

    def source(self, tensor: Tensor) -> None:
        """What the model is given: tokens of length 0."""
        if self.splits and tensor.is_floating_point():
            self._write(tensor, {Label("tokens", 0): self.widen(tensor)})

    def parts(self, tensor: Tensor) -> Parts:
        live = self._live.get(tensor.untyped_storage()._cdata)
        if live is None:
            return {self.constant: self.widen(tensor)}
        if live.zero is not None:
            self._gate(live, tensor)
        return {k: _placed(flat, tensor) for k, flat in live.parts.items()}

    def widen(self, value: Any) -> Any:
        return value.to(self._wide) if isinstance(value, Tensor) and value.is_floating_point() else value

    def _gate(self, live: _Live, tensor: Tensor) -> None:
        """Make the parts of a pointwise function: each of its origin's, times what the function did to their sum."""
        assert live.origin is not None and live.zero is not None
        shape, stride, offset = live.place
        y, z = self.widen(tensor.as_strided(shape, stride, offset)), self.widen(live.origin.value)
        zero = live.zero.expand(y.shape) if live.zero.dim() else live.zero
        gate = ((y - zero) / z).masked_fill_(z.abs() < torch.finfo(self._wide).tiny * 1e4, 0.0)
        parts = {k: part * gate for k, part in live.origin.parts.items()}
        if live.nonzero:
            parts[self.constant] = parts[self.constant] + zero if self.constant in parts else zero.expand(y.shape).clone()
        live.parts = {k: _flat(part, tensor, live.place) for k, part in parts.items()}
        live.zero = None

    def _write(self, out: Tensor, parts: Parts) -> None:
        """`out`, new or written into, now has these parts."""
        storage = out.untyped_storage()
        live = self._live.get(storage._cdata)
        place = _place(out)
        if live is None or live.alive.expired() or _covers(out):
            self._sweep()
            self._live[storage._cdata] = _Live(StorageWeakRef(storage), {k: _flat(p, out, place) for k, p in parts.items()}, place)
            return
        live.origin, live.zero = None, None
        live.origins.clear()
        for label in {**live.parts, **parts}:
            if label not in live.parts:
                live.parts[label] = torch.zeros(_length(out), dtype=self._wide, device=out.device)
            _placed(live.parts[label], out).copy_(parts[label].expand(out.shape) if label in parts else torch.zeros((), device=out.device))

    def _enliven(self, tensor: Tensor) -> None:
        """A constant that is about to be written into: all of its storage is of length 0 so far."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            whole = tensor.detach().as_strided((_length(tensor),), (1,), 0).to(self._wide, copy=True)
            self._live[storage._cdata] = _Live(StorageWeakRef(storage), {self.constant: whole})
        else:
            self.parts(tensor)

    def _sweep(self) -> None:
        for key in [k for k, live in self._live.items() if live.alive.expired()]:
            del self._live[key]

    # -- ops ------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if measuring():
            return func(*args, **kwargs)
        taken_apart = decomposed(self, func, args, kwargs)
        if taken_apart is not NotImplemented:
            return taken_apart
        name, number = op_key(func), self._count
        self._count += 1
        if number >= len(self._ops) or self._ops[number].name != name:
            raise Strayed(f"the model took another way than a moment before (at op {number}, {name}): its paths cannot be followed")
        if number not in self._needed:
            return func(*args, **kwargs)
        crossing = self._crossings.get(number)
        given = list(tensors_in((args, kwargs)))
        if crossing is None and not any(self.is_live(t) for t in given):
            out = func(*args, **kwargs)
            if name == "embedding":
                self.source(out)
        else:
            out = self._follow(func, name, args, kwargs, given, crossing)
        if number in self._keep:
            tensor = next(iter(tensors_in(out)))
            self.kept[self._keep[number]] = (tensor, {k: p.clone() for k, p in self.parts(tensor).items()})
        return out

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], crossing: Crossing | None) -> Any:
        written = [args[i] for i in written_arguments(func) if isinstance(i, int) and i < len(args)]
        if written:
            return self._in_place(func, name, args, kwargs, written[0], crossing)
        out = func(*args, **kwargs)
        results = [t for t in tensors_in(out) if t.is_floating_point()]
        if not results:
            return out
        stores = {t.untyped_storage()._cdata for t in given}
        if all(t.untyped_storage()._cdata in stores for t in results):
            return out  # views
        if self.pointwise(func, name, args, kwargs, results[0]):
            return out
        scaled = name in ("mul", "div") and self.is_live(args[0]) and not self.is_live(args[1]) and args[0].shape == out.shape
        origin = self._origin(args[0]) if scaled else None
        parts = self._rule(func, name, args, kwargs, out)
        if parts is not None:
            self._write(results[0], self._crossed(parts, crossing))
            self._live[results[0].untyped_storage()._cdata].origin = origin
        return out

    def _in_place(self, func: Any, name: str, args: Any, kwargs: Any, target: Tensor, crossing: Crossing | None) -> Any:
        self._enliven(target)
        plain = name.removesuffix("_")
        packet = getattr(torch.ops.aten, plain, None)
        if plain in ("zero", "fill"):
            value = 0.0 if plain == "zero" else args[1]
            parts: Parts | None = {self.constant: torch.as_tensor(value, dtype=self._wide, device=target.device).expand(target.shape)}
        elif packet is None:
            parts = None
        else:
            before = target.clone()
            self._write(before, self.parts(target))
            apart = (before, *args[1:])
            after = packet(*apart, **kwargs)
            if self.pointwise(packet, plain, apart, kwargs, after):
                parts = {k: p.clone() for k, p in self.parts(after).items()}
            else:
                parts = self._rule(packet, plain, apart, kwargs, after)
        out = func(*args, **kwargs)
        if parts is None:
            self.unruled[name] += 1
            parts = {UNATTRIBUTED: self.widen(target)}
        self._write(target, self._crossed(parts, crossing))
        return out

    def _crossed(self, parts: Parts, crossing: Crossing | None) -> Parts:
        if crossing is None:
            return parts
        moved: Parts = {k: part for k, part in parts.items() if k == UNATTRIBUTED}
        for label, part in parts.items():
            for after, head in self._route(crossing, label) if label != UNATTRIBUTED else ():
                piece = part if head is None else _one_head(part, head, crossing)
                moved[after] = moved[after] + piece if after in moved else piece
        return moved

    # -- pointwise functions --------------------------------------------------------------------------------------

    def _origin(self, tensor: Tensor) -> _Origin:
        """What `tensor` is a pointwise function of: itself, if nothing else is known."""
        live = self._live[tensor.untyped_storage()._cdata]
        place = _place(tensor)
        if live.origin is not None and live.place == place:
            return live.origin
        found = live.origins.get(place)
        if found is None:
            found = live.origins[place] = _Origin(tensor, self.parts(tensor))
        return found

    def _at_zero(self, value: Any) -> Any:
        """A factor or summand where the origin is zero."""
        if not self.is_live(value):
            return self.widen(value)
        live = self._live[value.untyped_storage()._cdata]
        if live.zero is not None and live.place == _place(value):
            return live.zero
        return torch.zeros((), dtype=self._wide, device=value.device)

    def _is_gated(self, tensor: Any) -> bool:
        live = self._live.get(tensor.untyped_storage()._cdata) if self.is_live(tensor) else None
        return live is not None and live.zero is not None and live.place == _place(tensor)

    def pointwise(self, func: Any, name: str, args: Any, kwargs: Any, out: Tensor) -> bool:
        """Whether `out` is one more pointwise function of what its operands are functions of. Its parts can wait, then."""
        live = [a for a in args[:2] if self.is_live(a)]
        if name in ACTIVATIONS:
            if not self.is_live(args[0]) or (len(args) > 1 and self.is_live(args[1])) or args[0].shape != out.shape:
                return False
        elif name in ("mul", "div", "add", "sub", "rsub"):
            if any(t.shape != out.shape for t in live) or (name == "div" and self.is_live(args[1])):
                return False
            gated = any(self._is_gated(t) for t in live)
            squared = name == "mul" and len(live) == 2
            if not gated and not squared:
                return False
        else:
            return False
        origins = {id(o): o for o in map(self._origin, live)}
        if len(origins) != 1:
            return False
        at_zero = func(*(self._at_zero(a) for a in args), **{k: self.widen(v) for k, v in kwargs.items()})
        self._write(out, {})
        record = self._live[out.untyped_storage()._cdata]
        record.origin, record.zero, record.place = next(iter(origins.values())), self.widen(at_zero), _place(out)
        record.nonzero = not (name in THROUGH_ZERO or (name in ("mul", "div") and not any(self._may_be_nonzero(t) for t in live[:1])))
        return True

    def _may_be_nonzero(self, tensor: Tensor) -> bool:
        return self._is_gated(tensor) and self._live[tensor.untyped_storage()._cdata].nonzero

    # -- rules ----------------------------------------------------------------------------------------------------

    def _rule(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Parts | None:
        """Parts of the first result; None for a constant."""
        result = next(t for t in tensors_in(out) if t.is_floating_point())
        rule = RULES.get(name)
        if name in FROZEN or kind_of(func) is Kind.SOFTMAX:
            return None
        if rule is not None:
            return rule(self, func, args, kwargs, out)
        if name in PRODUCTS:
            return self.product(lambda a, b: func(a, b, *args[2:], **kwargs), args[0], args[1])
        if name in JOINT:
            return self._joint(func, args, kwargs, JOINT[name])
        if name in LINEAR and self.is_live(args[0]):
            return {k: func(part, *map(self.widen, args[1:]), **without_dtype(kwargs)) for k, part in self.parts(args[0]).items()}
        self.unruled[name] += 1
        return {UNATTRIBUTED: self.widen(result)}

    def product(self, times: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Parts:
        """Bilinear: parts of one factor times the other; of two live factors, half of each."""
        live_a, live_b = self.is_live(a), self.is_live(b)
        whole_a, whole_b = self.widen(a), self.widen(b)
        made: Parts = {}
        if live_a or not live_b:
            for k, part in self.parts(a).items():
                made[k] = times(part, whole_b)
        if live_b:
            for k, part in self.parts(b).items():
                term = times(whole_a, part)
                made[k] = made[k] + term if k in made else term
        return {k: part * 0.5 for k, part in made.items()} if live_a and live_b else made

    def add_up(self, terms: Iterable[tuple[Parts, float]], shape: torch.Size) -> Parts:
        made: Parts = {}
        for parts, factor in terms:
            for k, part in parts.items():
                part = part if factor == 1 else part * factor
                made[k] = made[k] + part if k in made else part
        return {k: part.expand(shape) for k, part in made.items()}

    def _joint(self, func: Any, args: Any, kwargs: Any, slots: tuple[int, ...]) -> Parts:
        given = {i: self.any_parts(args[i], args[0]) for i in slots if i < len(args)}
        fixed = [self.widen(a) if isinstance(a, Tensor) else a for a in args]
        made: Parts = {}
        for label in dict.fromkeys(k for parts in given.values() for k in parts):
            replaced = list(fixed)
            for i, parts in given.items():
                like = fixed[i] if isinstance(fixed[i], Tensor) else torch.as_tensor(float(fixed[i]), dtype=self._wide)
                part = parts[label] if label in parts else torch.zeros_like(like)
                replaced[i] = part if isinstance(args[i], Tensor) else float(part)
            made[label] = func(*replaced, **kwargs)
        return made

    def any_parts(self, value: Any, like: Any) -> Parts:
        if isinstance(value, Tensor):
            return self.parts(value) if value.is_floating_point() else {self.constant: value}
        return {self.constant: torch.as_tensor(float(value), dtype=self._wide)}


def _one_head(part: Tensor, head: int, crossing: Crossing) -> Tensor:
    lead = part.shape[:-2]
    mine = torch.zeros(crossing.heads, crossing.inner, dtype=part.dtype, device=part.device)
    mine[head] = 1.0
    outer = math.prod(lead) // mine.numel()
    return part * mine.flatten().repeat(outer).view(*lead, 1, 1)


# -- memory -----------------------------------------------------------------------------------------------------------


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()


def _length(tensor: Tensor) -> int:
    """Elements of the tensor's storage."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _covers(tensor: Tensor) -> bool:
    return tensor.numel() == _length(tensor) and tensor.is_contiguous()


def _placed(flat: Tensor, tensor: Tensor) -> Tensor:
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _flat(part: Tensor, tensor: Tensor, place: tuple[Any, ...]) -> Tensor:
    """`part`, of the shape that `place` tells, laid out as the storage of `tensor` is."""
    shape, stride, offset = place
    if math.prod(shape) == _length(tensor) and offset == 0 and part.shape == torch.Size(shape) and part.stride() == stride:
        return part.as_strided((part.numel(),), (1,), part.storage_offset()) if _dense(part) else part.contiguous().view(-1)
    flat = torch.zeros(_length(tensor), dtype=part.dtype, device=part.device)
    flat.as_strided(shape, stride, offset).copy_(part.expand(shape))
    return flat


def _dense(part: Tensor) -> bool:
    """Every element of a stretch of memory, once."""
    expected = 1
    for size, stride in sorted(zip(part.shape, part.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
