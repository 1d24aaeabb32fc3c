"""Taking parts of a model away while it runs, exactly: the addition itself is replaced, nothing is subtracted.

    with probe.ablate(skip=True, mlp=True) as pure:     # or probe.ablate("pure-attention")
        model(**batch)
    print(pure.report())

What is meant, wherever a stream and its branches are added up, skip + attention + MLP, in whatever order and place:

- `skip` removed: the sum is of the branches alone. `mlp` or `attention` removed: of the rest. A number between 0 and 1
  multiplies instead of removing. If nothing would be left, the skip connection stays: the input passes.
- In a parallel block the skip connection is one, around attention and MLP together: `skip="attention"` and `skip="mlp"` both
  mean it, and `skip=True, mlp=True` leaves its attention.
- Layer scale, gates, dropout and stochastic depth belong to the branch and go with it. So do norms at a branch's start or
  end (pre-norm, sandwich); a norm behind the addition (post-norm) stays. `norm=True` makes the norms of a block pass
  their input on.
- Cross-attention is attention: `attention=True` removes it too, `skip=True` its skip connection too.
- A removed head adds zeros to what the output projection takes in.
- Convolutions around which a stream is carried (position encodings, say), and skip connections outside of blocks, stay.

Ablated forwards carry no gradients: what autograd would record is the addition that did not happen.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rankprobe.anatomy import Anatomy, AttentionCall, Block
from rankprobe.errors import NothingThere, RankprobeError
from rankprobe.graph import FUSED_LAYER, tensors_in
from rankprobe.record import Readings
from rankprobe.sites import Sum

if TYPE_CHECKING:
    from rankprobe.probe import Probe
    from rankprobe.watch import Plan

__all__ = ["PRESETS", "Ablation", "Edits", "edits_for"]

# The paper's four variants. Its code keeps the MLP's skip connection where it says "no skip": that is the fifth.
PRESETS: dict[str, dict[str, Any]] = {
    "full": {},
    "no-mlp": {"mlp": True},
    "no-skip": {"skip": True},
    "pure-attention": {"skip": True, "mlp": True},
    "paper-no-skip": {"skip": "attention"},
}
KINDS = ("attention", "mlp")


# -- what is asked for ------------------------------------------------------------------------------------------------


@dataclass
class Wanted:
    """A request in terms of one model's sites: by what each is multiplied."""

    parts: dict[tuple[str, str], float] = field(default_factory=dict)  # by skip connection and "skip", "attention" or "mlp"
    heads: dict[str, dict[int, float]] = field(default_factory=dict)  # by attention call
    norms: set[str] = field(default_factory=set)  # by block

    def join(self, other: Wanted) -> None:
        """Nested contexts add up."""
        for key, scale in other.parts.items():
            self.parts[key] = self.parts.get(key, 1.0) * scale
        for call, heads in other.heads.items():
            mine = self.heads.setdefault(call, {})
            for head, scale in heads.items():
                mine[head] = mine.get(head, 1.0) * scale
        self.norms |= other.norms


def understand(anatomy: Anatomy, asked: Mapping[str, Any]) -> Wanted:
    wanted = Wanted()
    blocks = anatomy.blocks
    skip = asked.get("skip")
    by_kind = skip if isinstance(skip, Mapping) and any(isinstance(k, str) for k in skip) else None
    if isinstance(skip, str):
        by_kind = {skip: True}
    for kind, spec in (by_kind or dict.fromkeys(KINDS, skip)).items():
        if kind not in KINDS:
            raise RankprobeError(f'skip={kind!r}: whose skip connection is "attention" or "mlp"')
        _parts(wanted, anatomy, "skip", kind, spec, lenient=by_kind is None)
    if skip is not None and skip is not False and not wanted.parts:
        raise NothingThere(_none(anatomy, "skip connection around attention or an MLP"))
    for kind in KINDS:
        _parts(wanted, anatomy, kind, kind, asked.get(kind))
    for index in _layers("norm", asked.get("norm"), len(blocks), scales=False):
        wanted.norms.add(blocks[index].key)
    for layer, heads in (asked.get("heads") or {}).items():
        for call in _calls(anatomy, layer):
            wanted.heads[call.key] = _heads(call, layer, heads)
    return wanted


def _parts(wanted: Wanted, anatomy: Anatomy, name: str, kind: str, spec: Any, lenient: bool = False) -> None:
    """`lenient`: a layer need not have a skip connection of every kind."""
    blocks = anatomy.blocks
    scales = _layers(name, spec, len(blocks))
    every = spec is True or isinstance(spec, float)
    word = {"attention": "attention", "mlp": "MLP"}[kind]
    around = "attention" if kind == "attention" else "an MLP"
    what = f"skip connection around {around}" if name == "skip" else f"{word} with a skip connection"
    found = False
    for index, scale in scales.items():
        mine = [s for s in blocks[index].skips if kind in s.kinds]
        found = found or bool(mine)
        if not mine and not every and not lenient:
            raise RankprobeError(f"{name}: layer {index} ({blocks[index].name}) has no {what}")
        for site in mine:
            wanted.parts[site.key, name] = min(scale, wanted.parts.get((site.key, name), 1.0))
    if spec is not None and spec is not False and not found and not lenient:
        raise NothingThere(_none(anatomy, what))


def _none(anatomy: Anatomy, what: str) -> str:
    found = ", ".join(f"{n} {kind}" for kind, n in anatomy.counts.items())
    return f"nothing to remove: {anatomy.model} has no {what} in a block ({found}); print(probe.anatomy) shows what was found"


def _layers(name: str, spec: Any, count: int, scales: bool = True) -> dict[int, float]:
    """From True, a scale, layer numbers, a slice or {layer: scale} to the factor of each layer."""
    if spec is None or spec is False:
        return {}
    if spec is True:
        return dict.fromkeys(range(count), 0.0)
    if isinstance(spec, float) and scales:
        return dict.fromkeys(range(count), _scale(name, spec))
    if isinstance(spec, slice):
        chosen = range(*spec.indices(count))
        if not chosen:
            raise RankprobeError(f"{name}={spec}: none of the model's {count} layers")
        return dict.fromkeys(chosen, 0.0)
    if isinstance(spec, Mapping) and scales:
        return {_layer(name, layer, count): _scale(name, scale) for layer, scale in spec.items()}
    if isinstance(spec, (list, tuple, range, set, frozenset)):
        return {_layer(name, layer, count): 0.0 for layer in spec}
    hint = f"; for layer {spec} write [{spec}]" if isinstance(spec, int) else ""
    hint += f", for a factor {float(spec)}" if spec in (0, 1) else ""
    may = "True, a factor from 0.0 to 1.0, layer numbers, a slice or {layer: factor}" if scales else "True, layer numbers or a slice"
    raise RankprobeError(f"{name}={spec!r}: may be {may}{hint}")


def _layer(name: str, layer: Any, count: int) -> int:
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise RankprobeError(f"{name}: a layer is given by its number, not {layer!r}")
    if not -count <= layer < count:
        raise RankprobeError(f"{name}: no layer {layer}; the model's layers are 0 to {count - 1}")
    return layer % count


def _scale(name: str, scale: Any) -> float:
    if scale is True:
        return 0.0
    if not isinstance(scale, (int, float)) or not 0.0 <= scale <= 1.0:
        raise RankprobeError(f"{name}: a factor is from 0.0 (removed) to 1.0 (as it is), not {scale!r}")
    return float(scale)


def _calls(anatomy: Anatomy, layer: Any) -> list[AttentionCall]:
    """A layer's attention, its self-attention where it has both kinds; or the call of that name."""
    if isinstance(layer, str):
        calls = [a for a in anatomy.attentions if a.key == layer]
        if not calls:
            raise RankprobeError(f"heads: no attention call {layer!r}; for example {anatomy.attentions[0].key!r}")
        return calls
    block: Block = anatomy.blocks[_layer("heads", layer, len(anatomy.blocks))]
    if not block.attentions:
        raise RankprobeError(f"heads: layer {layer} ({block.name}) has no attention")
    return [a for a in block.attentions if not a.cross] or list(block.attentions)


def _heads(call: AttentionCall, layer: Any, heads: Any) -> dict[int, float]:
    scales = heads if isinstance(heads, Mapping) else dict.fromkeys(range(call.heads) if heads is True else heads, 0.0)
    for head in scales:
        if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < call.heads:
            raise RankprobeError(f"heads: no head {head!r} in layer {layer}; its {call.heads} heads are 0 to {call.heads - 1}")
    return {head: _scale("heads", scale) for head, scale in scales.items()}


# -- what is done about it --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reweigh:
    """An addition whose operands count by other factors, 0 meaning not at all."""

    weights: dict[int, float]  # by position
    inplace: bool

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = {place: weight for place, weight in self.weights.items() if weight}
        if self.inplace:
            into: Tensor = args[0]
            if not kept:
                return into
            if 0 not in kept:
                return into.copy_(self._alone(args, kwargs, kept))
            if self.weights[0] != 1.0:
                into.mul_(self.weights[0])
            return into if len(kept) == 1 else func(*self._scaled(args, skip_first=True), **kwargs)
        if len(kept) > 1:
            return func(*self._scaled(args), **kwargs)
        out: Tensor = func(*args, **kwargs)  # its dtype and layout are what the model goes on with
        return out.copy_(self._alone(args, kwargs, kept)) if kept else out.zero_()

    def _scaled(self, args: tuple[Any, ...], skip_first: bool = False) -> tuple[Any, ...]:
        return tuple(
            a * self.weights[i] if self.weights.get(i, 1.0) != 1.0 and not (skip_first and i == 0) else a for i, a in enumerate(args)
        )

    def _alone(self, args: tuple[Any, ...], kwargs: dict[str, Any], kept: dict[int, float]) -> Tensor:
        """The one operand that is left, as the op would add it."""
        ((place, weight),) = kept.items()
        value: Tensor = args[place]
        if place > 0 and len(args) > 2 and isinstance(args[2], Tensor):  # addcmul: x + value · a · b
            value = args[1] * args[2]
        factor = weight * (kwargs.get("alpha", kwargs.get("value", 1)) if place > 0 else 1)
        return value if factor == 1 else value * factor


@dataclass(frozen=True, slots=True)
class Hush:
    """An attention call whose heads count by other factors."""

    scales: dict[int, float]
    heads: int
    inner: int

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        values: Tensor = next(iter(tensors_in(out)))
        lead = values.shape[:-2]
        factors = torch.ones(self.heads, dtype=values.dtype)
        for head, scale in self.scales.items():
            factors[head] = scale
        outer = math.prod(lead) // (self.heads * self.inner)
        each = factors.repeat_interleave(self.inner).repeat(outer).view(*lead, 1, 1).to(values.device)
        values.mul_(each).masked_fill_(each == 0, 0.0)  # zero also where a head holds Inf
        return out


Edits = dict[str, Callable[..., Any]]  # by site


def edits_for(plan: Plan, wanted: Wanted) -> tuple[Edits, dict[str, str]]:
    """What to do at which site of one way through a model, and all sites that were meant, with their names."""
    edits: Edits = {}
    meant: dict[str, str] = {}
    for total in plan.sums:
        scales = {place: wanted.parts[place] for place in _places(total) if place in wanted.parts}
        if not scales:
            continue
        meant[total.key] = total.site
        # In a sum of sums the skip connection is one: whoever removes it for one branch removes it for all.
        carried = min((s for (_, part), s in scales.items() if part == "skip"), default=1.0)
        if not _weigh(total, scales, carried, edits):
            _weigh(total, scales, 1.0, edits)
    for key, (heads, inner) in plan.attended.items():
        if key in wanted.heads:
            meant[key] = key
            if any(scale != 1.0 for scale in wanted.heads[key].values()):
                edits[key] = Hush(wanted.heads[key], heads, inner)
    for key in wanted.norms:
        if key in plan.unnormed:
            raise RankprobeError(f"norm: {plan.unnormed[key]} normalises among other things, and cannot be passed by")
        for norm in plan.norms.get(key, ()):
            meant[norm] = norm
            edits[norm] = _pass
    return edits, meant


def _pass(args: tuple[Any, ...], out: Any) -> Tensor:
    """What a norm gives that does nothing."""
    given = next((t for t in tensors_in(args) if isinstance(out, Tensor) and t.shape == out.shape), None)
    if given is None:
        raise RankprobeError("norm: a norm that does not give back the shape it was given cannot be passed by")
    return given.to(out.dtype)


def _places(total: Sum) -> list[tuple[str, str]]:
    places = [(total.site, "skip")]
    for term in total.terms.values():
        places += _places(term) if isinstance(term, Sum) else [(total.site, term)]
    return places


def _weigh(total: Sum, scales: dict[tuple[str, str], float], carried: float, edits: Edits) -> bool:
    """Write down what becomes of `total` and the sums in it. False: nothing is left of it."""
    weights = {}
    for place, term in total.terms.items():
        if isinstance(term, Sum):
            weights[place] = float(_weigh(term, scales, carried, edits))
        else:
            weights[place] = carried if term == "skip" else scales.get((total.site, term), 1.0)
    edits.pop(total.key, None)
    if any(weight != 1.0 for weight in weights.values()):
        edits[total.key] = Reweigh(weights, total.inplace)
    return any(weights.values())


# -- the context ------------------------------------------------------------------------------------------------------


class Ablation(Readings):
    """What `probe.ablate` gives: a context in which the model runs without some of its parts, and what was measured there."""

    def __init__(self, probe: Probe, asked: dict[str, Any]) -> None:
        super().__init__(probe.options)
        asked = {name: value for name, value in asked.items() if value is not None and value is not False}
        self.variant = ", ".join(f"{name}={value!r}" for name, value in asked.items()) or "full"
        self.theory = False  # also measure what the theorem speaks of
        self._probe = probe
        self._asked = asked
        self._outer: tuple[Ablation, ...] = ()
        self._edits: dict[Plan, Edits] = {}
        self._meant: dict[str, str] = {}
        self._reached: set[str] = set()
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def anatomy(self) -> Anatomy:
        return self._probe.anatomy

    def understood(self, anatomy: Anatomy) -> Wanted:
        # Layers that one kernel ran whole show their parts only once they are to change, and so are run apart.
        if any(a.op == FUSED_LAYER for a in anatomy.attentions):
            return Wanted()
        return understand(anatomy, self._asked)

    @property
    def changes(self) -> bool:
        """Whether anything is asked for but factors of 1."""
        return any(value != 1.0 or value is True for a in (*self._outer, self) for value in a._asked.values())

    @property
    def deep(self) -> bool:
        """Whether more is to be reached than additions."""
        return self.theory or any(name in a._asked for a in (*self._outer, self) for name in ("heads", "norm"))

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The ways that forwards inside took."""
        return tuple(self._edits)

    def edits(self, plan: Plan) -> Edits:
        """What to do on one way through the model, for this and all contexts around it."""
        if plan not in self._edits:
            total = Wanted()
            for ablation in (*self._outer, self):
                mine = ablation.understood(self.anatomy)
                ablation._meant |= edits_for(plan, mine)[1]
                total.join(mine)
            self._edits[plan] = edits_for(plan, total)[0]
        return self._edits[plan]

    def ran(self, seen: set[str], out: Any) -> None:
        """A forward inside came to its end."""
        self._caches.update(caches_in(out))
        for ablation in (*self._outer, self):
            ablation._reached |= seen

    def refuse_stale(self, given: Any) -> None:
        """Keys and values that an intact forward left would mix with this one's."""
        for cache in caches_in(given):
            if cache not in self._caches and int(cache.get_seq_length()) > 0:
                raise RankprobeError(
                    f"ablate({self.variant}): the cache holds keys and values of {int(cache.get_seq_length())} tokens that ran outside "
                    "this context. Begin inside it with an empty cache, or pass none"
                )
            self._caches.add(cache)

    def __enter__(self) -> Ablation:
        self._outer = self._probe._push(self)
        self._edits.clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._probe._pull(self)
        if kind is not None:
            return
        missed = sorted(name for key, name in self._meant.items() if key not in self._reached)
        if not (self.forwards or self._reached):
            raise RankprobeError(f"ablate({self.variant}) changed nothing: no forward of the model ran inside it")
        if missed or (self.changes and not self._meant):
            names = ", ".join(missed[:3]) + (f" and {len(missed) - 3} more" if len(missed) > 3 else "")
            raise RankprobeError(f"ablate({self.variant}) did not reach {names or 'any part of the way the model took'}")

    def __repr__(self) -> str:
        return f"<rankprobe.Ablation {self.variant}: {self.forwards} forwards>"

    def _nothing(self) -> str:
        return f"no forward has run inside ablate({self.variant})"


def caches_in(value: Any) -> Iterator[Any]:
    """Key-value caches among a forward's arguments or results, known by how they tell their length."""
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ():
        if callable(getattr(item, "get_seq_length", None)):
            yield item
        elif isinstance(item, (Mapping, tuple, list)):
            yield from caches_in(item)
