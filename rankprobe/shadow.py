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


# Their results are taken for constants: what they are made of does not pass.
_FROZEN = {
    *("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "logsumexp", "rsqrt", "sqrt", "reciprocal", "var"),
    *("var_mean", "std", "linalg_vector_norm", "norm", "amax", "amin", "max", "min", "argmax", "argmin", "topk", "sort", "any", "all"),
    *("eq", "ne", "gt", "lt", "ge", "le", "isnan", "isinf", "sign", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros"),
    *(
        "new_ones",
        "new_full",
        "new_empty",
        "bernoulli",
        "rand_like",
        "randn_like",
        "floor",
        "ceil",
        "round",
        "one_hot",
        "histc",
        "bincount",
    ),
}
# Linear in the first argument.
_LINEAR = {
    *("clone", "contiguous", "sum", "mean", "neg", "index", "index_select", "gather", "roll", "flip", "repeat", "cumsum", "tril", "triu"),
    *("_unsafe_view", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_avg_pool1d", "avg_pool1d", "im2col", "col2im", "pixel_shuffle"),
    *("pixel_unshuffle", "repeat_interleave", "masked_select", "reflection_pad1d", "reflection_pad2d", "replication_pad2d", "take"),
    *("upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    *("upsample_linear1d", "upsample_nearest1d", "constant_pad_nd", "unfold", "native_channel_shuffle", "view", "expand", "permute"),
    *(
        "diff",
        "trace",
        "rot90",
        "take_along_dim",
        "upsample_nearest3d",
        "avg_pool3d",
        "view_copy",
        "expand_copy",
        "permute_copy",
        "slice_copy",
    ),
}
# Linear in several arguments together.
_JOINT: dict[str, tuple[int, ...]] = {
    "where": (1, 2),
    "index_put": (0, 2),
    "_index_put_impl": (0, 2),
    "index_add": (0, 3),
    "scatter": (0, 3),
    "scatter_add": (0, 3),
    "slice_scatter": (0, 1),
    "select_scatter": (0, 1),
    "masked_scatter": (0, 2),
    "index_copy": (0, 3),
    "copy": (0, 1),
}
_ACTIVATIONS = {
    *(
        "gelu",
        "relu",
        "silu",
        "tanh",
        "sigmoid",
        "erf",
        "exp",
        "expm1",
        "log",
        "log1p",
        "sin",
        "cos",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
    ),
    *(
        "leaky_relu",
        "elu",
        "softplus",
        "mish",
        "clamp",
        "clamp_min",
        "clamp_max",
        "abs",
        "relu6",
        "threshold",
        "selu",
        "celu",
        "log_sigmoid",
    ),
    *(
        "pow",
        "square",
        "prelu",
        "_prelu_kernel",
        "softsign",
        "tan",
        "atan",
        "hardshrink",
        "softshrink",
        "nan_to_num",
        "log_sigmoid_forward",
    ),
}
# Activations that are zero at zero, as most are.
_THROUGH_ZERO = {"gelu", "relu", "silu", "tanh", "erf", "sin", "hardswish", "leaky_relu", "elu", "mish", "abs", "relu6", "pow", "square"}
_PRODUCTS = {"mul", "mm", "bmm", "matmul", "dot", "mv", "_grouped_mm"}


def needed_ops(ops: Sequence[Op], nodes: Sequence[Node], wanted: Iterable[Node]) -> set[int]:
    """Numbers of the ops that lie on a way to `wanted` that a part can take."""
    reached = {node.id for node in wanted}
    for node in reversed(nodes):
        if node.id not in reached or node.op in _FROZEN or node.kind is Kind.SOFTMAX:
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
        self._constant = Label("bias" if sources else "tokens", 0)
        self._count = 0
        self._live: dict[int, _Live] = {}

    # -- tensors and their parts ----------------------------------------------------------------------------------

    def is_live(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.untyped_storage()._cdata in self._live

    def source(self, tensor: Tensor) -> None:
        """What the model is given: tokens of length 0."""
        if self.splits and tensor.is_floating_point():
            self._write(tensor, {Label("tokens", 0): self._widen(tensor)})

    def parts(self, tensor: Tensor) -> Parts:
        live = self._live.get(tensor.untyped_storage()._cdata)
        if live is None:
            return {self._constant: self._widen(tensor)}
        if live.zero is not None:
            self._gate(live, tensor)
        return {k: _placed(flat, tensor) for k, flat in live.parts.items()}

    def _widen(self, value: Any) -> Any:
        return value.to(self._wide) if isinstance(value, Tensor) and value.is_floating_point() else value

    def _gate(self, live: _Live, tensor: Tensor) -> None:
        """Make the parts of a pointwise function: each of its origin's, times what the function did to their sum."""
        assert live.origin is not None and live.zero is not None
        shape, stride, offset = live.place
        y, z = self._widen(tensor.as_strided(shape, stride, offset)), self._widen(live.origin.value)
        zero = live.zero.expand(y.shape) if live.zero.dim() else live.zero
        gate = ((y - zero) / z).masked_fill_(z.abs() < torch.finfo(self._wide).tiny * 1e4, 0.0)
        parts = {k: part * gate for k, part in live.origin.parts.items()}
        if live.nonzero:
            parts[self._constant] = parts[self._constant] + zero if self._constant in parts else zero.expand(y.shape).clone()
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
            self._live[storage._cdata] = _Live(StorageWeakRef(storage), {self._constant: whole})
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
        if self._pointwise(func, name, args, kwargs, results[0]):
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
            parts: Parts | None = {self._constant: torch.as_tensor(value, dtype=self._wide, device=target.device).expand(target.shape)}
        elif packet is None:
            parts = None
        else:
            before = target.clone()
            self._write(before, self.parts(target))
            apart = (before, *args[1:])
            after = packet(*apart, **kwargs)
            if self._pointwise(packet, plain, apart, kwargs, after):
                parts = {k: p.clone() for k, p in self.parts(after).items()}
            else:
                parts = self._rule(packet, plain, apart, kwargs, after)
        out = func(*args, **kwargs)
        if parts is None:
            self.unruled[name] += 1
            parts = {UNATTRIBUTED: self._widen(target)}
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
            return self._widen(value)
        live = self._live[value.untyped_storage()._cdata]
        if live.zero is not None and live.place == _place(value):
            return live.zero
        return torch.zeros((), dtype=self._wide, device=value.device)

    def _is_gated(self, tensor: Any) -> bool:
        live = self._live.get(tensor.untyped_storage()._cdata) if self.is_live(tensor) else None
        return live is not None and live.zero is not None and live.place == _place(tensor)

    def _pointwise(self, func: Any, name: str, args: Any, kwargs: Any, out: Tensor) -> bool:
        """Whether `out` is one more pointwise function of what its operands are functions of. Its parts can wait, then."""
        live = [a for a in args[:2] if self.is_live(a)]
        if name in _ACTIVATIONS:
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
        at_zero = func(*(self._at_zero(a) for a in args), **{k: self._widen(v) for k, v in kwargs.items()})
        self._write(out, {})
        record = self._live[out.untyped_storage()._cdata]
        record.origin, record.zero, record.place = next(iter(origins.values())), self._widen(at_zero), _place(out)
        record.nonzero = not (name in _THROUGH_ZERO or (name in ("mul", "div") and not any(self._may_be_nonzero(t) for t in live[:1])))
        return True

    def _may_be_nonzero(self, tensor: Tensor) -> bool:
        return self._is_gated(tensor) and self._live[tensor.untyped_storage()._cdata].nonzero

    # -- rules ----------------------------------------------------------------------------------------------------

    def _rule(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Parts | None:
        """Parts of the first result; None for a constant."""
        result = next(t for t in tensors_in(out) if t.is_floating_point())
        rule = _RULES.get(name)
        if name in _FROZEN or kind_of(func) is Kind.SOFTMAX:
            return None
        if rule is not None:
            return rule(self, func, args, kwargs, out)
        if name in _PRODUCTS:
            return self._product(lambda a, b: func(a, b, *args[2:], **kwargs), args[0], args[1])
        if name in _JOINT:
            return self._joint(func, args, kwargs, _JOINT[name])
        if name in _LINEAR and self.is_live(args[0]):
            return {k: func(part, *map(self._widen, args[1:]), **_without_dtype(kwargs)) for k, part in self.parts(args[0]).items()}
        self.unruled[name] += 1
        return {UNATTRIBUTED: self._widen(result)}

    def _product(self, times: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Parts:
        """Bilinear: parts of one factor times the other; of two live factors, half of each."""
        live_a, live_b = self.is_live(a), self.is_live(b)
        whole_a, whole_b = self._widen(a), self._widen(b)
        made: Parts = {}
        if live_a or not live_b:
            for k, part in self.parts(a).items():
                made[k] = times(part, whole_b)
        if live_b:
            for k, part in self.parts(b).items():
                term = times(whole_a, part)
                made[k] = made[k] + term if k in made else term
        return {k: part * 0.5 for k, part in made.items()} if live_a and live_b else made

    def _sum(self, terms: Iterable[tuple[Parts, float]], shape: torch.Size) -> Parts:
        made: Parts = {}
        for parts, factor in terms:
            for k, part in parts.items():
                part = part if factor == 1 else part * factor
                made[k] = made[k] + part if k in made else part
        return {k: part.expand(shape) for k, part in made.items()}

    def _joint(self, func: Any, args: Any, kwargs: Any, slots: tuple[int, ...]) -> Parts:
        given = {i: self._any_parts(args[i], args[0]) for i in slots if i < len(args)}
        fixed = [self._widen(a) if isinstance(a, Tensor) else a for a in args]
        made: Parts = {}
        for label in dict.fromkeys(k for parts in given.values() for k in parts):
            replaced = list(fixed)
            for i, parts in given.items():
                like = fixed[i] if isinstance(fixed[i], Tensor) else torch.as_tensor(float(fixed[i]), dtype=self._wide)
                part = parts[label] if label in parts else torch.zeros_like(like)
                replaced[i] = part if isinstance(args[i], Tensor) else float(part)
            made[label] = func(*replaced, **kwargs)
        return made

    def _any_parts(self, value: Any, like: Any) -> Parts:
        if isinstance(value, Tensor):
            return self.parts(value) if value.is_floating_point() else {self._constant: value}
        return {self._constant: torch.as_tensor(float(value), dtype=self._wide)}


# -- rules by op ------------------------------------------------------------------------------------------------------

Rule = Callable[[Shadow, Any, Any, Any, Any], Parts | None]


def _add(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    name = op_key(func)
    alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    first, second = {"add": (1, alpha), "sub": (1, -alpha), "rsub": (-alpha, 1)}[name]
    return s._sum(((s._any_parts(args[0], out), first), (s._any_parts(args[1], out), second)), out.shape)


def _addmm(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    times = torch.bmm if args[1].dim() == 3 else torch.mm
    product = s._product(times, args[1], args[2])
    return s._sum(((s.parts(args[0]), kwargs.get("beta", 1)), (product, kwargs.get("alpha", 1))), out.shape)


def _addcmul(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    return s._sum(((s.parts(args[0]), 1), (s._product(torch.mul, args[1], args[2]), kwargs.get("value", 1))), out.shape)


def _linear(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    product = s._product(torch.nn.functional.linear, args[0], args[1])
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    return product if bias is None else s._sum(((product, 1), (s.parts(bias), 1)), out.shape)


def _convolution(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    product = s._product(lambda x, w: func(x, w, None, *args[3:], **kwargs), args[0], args[1])
    if args[2] is None:
        return product
    bias = {k: p.view(-1, *(1,) * (out.dim() - 2)) for k, p in s.parts(args[2]).items()}
    return s._sum(((product, 1), (bias, 1)), out.shape)


def _div(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts | None:
    if not s.is_live(args[0]) or kwargs.get("rounding_mode") is not None:
        return None
    below = s._widen(args[1])
    return {k: part / below for k, part in s.parts(args[0]).items()}


def _to_copy(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    s.narrowest = min(s.narrowest, out.dtype, key=lambda d: -torch.finfo(d).eps)
    return {k: part.to(out.device) for k, part in s.parts(args[0]).items()}


def _cat(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    pieces = [s.parts(t) for t in args[0]]
    blank = [s._widen(t) for t in args[0]]
    labels = dict.fromkeys(k for parts in pieces for k in parts)
    return {
        k: func([p[k] if k in p else torch.zeros_like(b) for p, b in zip(pieces, blank, strict=True)], *args[1:], **kwargs) for k in labels
    }


def _masked_fill(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    made = {k: part.masked_fill(args[1], 0.0) for k, part in s.parts(args[0]).items()}
    if isinstance(args[2], Tensor) or args[2] != 0:
        base = made.get(s._constant, torch.zeros_like(s._widen(out)))
        made[s._constant] = base.expand(out.shape).masked_fill(args[1], s._widen(args[2]))
    return made


def _pad(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    made = {k: torch.nn.functional.pad(part, list(args[1])) for k, part in s.parts(args[0]).items()}
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    if value:
        edge = torch.nn.functional.pad(torch.zeros_like(s._widen(args[0])), list(args[1]), value=value)
        made[s._constant] = made[s._constant] + edge if s._constant in made else edge
    return made


def _layer_norm(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    x, shape, weight, bias = args[0], args[1], args[2], args[3]
    dims = tuple(range(-len(shape), 0))
    if isinstance(out, tuple):
        rstd = s._widen(out[2])
    else:
        eps = args[4] if len(args) > 4 else 1e-5
        rstd = (s._widen(x).var(dims, correction=0, keepdim=True) + eps).rsqrt()
    factor = rstd if weight is None else rstd * s._widen(weight)
    made = {k: (part - part.mean(dims, keepdim=True)) * factor for k, part in s.parts(x).items()}
    return made if bias is None else s._sum(((made, 1), (s.parts(bias), 1)), x.shape)


def _rms_norm(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    weight = args[2]
    rstd = s._widen(out[1])
    return {k: part * rstd if weight is None else part * rstd * s._widen(weight) for k, part in s.parts(args[0]).items()}


def _group_norm(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    x, weight, bias, samples, channels, _, groups = args[:7]
    rstd = s._widen(out[2]).view(samples, groups, 1)
    wide = (1, channels, *(1,) * (x.dim() - 2))

    def apply(part: Tensor) -> Tensor:
        split = part.reshape(samples, groups, -1)
        normed = ((split - split.mean(-1, keepdim=True)) * rstd).view(x.shape)
        return normed if weight is None else normed * s._widen(weight).view(wide)

    made = {k: apply(part) for k, part in s.parts(x).items()}
    return made if bias is None else s._sum(((made, 1), ({k: p.view(wide) for k, p in s.parts(bias).items()}, 1)), x.shape)


def _batch_norm(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    x, weight, bias, mean, variance = args[:5]
    eps = args[-1]
    wide = (1, -1, *(1,) * (x.dim() - 2))
    factor = (s._widen(variance) + eps).rsqrt() * (1 if weight is None else s._widen(weight))
    shift = (0 if bias is None else s._widen(bias)) - s._widen(mean) * factor
    made = {k: part * factor.view(wide) for k, part in s.parts(x).items()}
    return s._sum(((made, 1), ({s._constant: shift.view(wide)}, 1)), x.shape)


def _attention(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    """The kernel itself, on each part of the values: it is linear in them once queries and keys are given."""
    named = [a.name for a in func._schema.arguments]
    place = named.index("value")
    wide = [s._widen(a) for a in args]
    more = {k: s._widen(v) for k, v in kwargs.items()}
    made = {}
    for k, part in s.parts(args[place]).items():
        wide[place] = part
        made[k] = next(iter(tensors_in(func(*wide, **more))))
    return made


def _max_pool(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    values, places = out
    flat = places.flatten(-2)
    return {k: part.flatten(-2).gather(-1, flat).view(values.shape) for k, part in s.parts(args[0]).items()}


def _glu(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    dim = args[1] if len(args) > 1 else -1
    first, second = args[0].chunk(2, dim)
    gate = second.sigmoid()
    s._pointwise(torch.ops.aten.sigmoid, "sigmoid", (second,), {}, gate)
    return s._product(torch.mul, first, gate)


def _dropout(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    return s.parts(args[0])


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "rsub"), _add),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    **dict.fromkeys(("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution"), _convolution),
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("native_layer_norm", "layer_norm"), _layer_norm),
    **dict.fromkeys(("_native_batch_norm_legit_no_training", "native_batch_norm", "cudnn_batch_norm"), _batch_norm),
    "addcmul": _addcmul,
    "linear": _linear,
    "div": _div,
    "_to_copy": _to_copy,
    "masked_fill": _masked_fill,
    "constant_pad_nd": _pad,
    "_fused_rms_norm": _rms_norm,
    "native_group_norm": _group_norm,
    "sdpa": _attention,
    "max_pool2d_with_indices": _max_pool,
    "glu": _glu,
    "native_dropout": _dropout,
    "dropout": _dropout,
}


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


def _without_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k != "dtype"}
