"""Visiting known sites: hooks on the modules around them, and every op seen only in the short stretch that holds a site.

A *window* opens when the last module before a site is entered or left and closes at the next such event, so between the two
there is as little as the addition or the attention kernel itself. The rest of the model runs as if nobody looked.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rankprobe.anatomy import Found
from rankprobe.attention import Attention, from_op
from rankprobe.discover import Tracer, as_attention
from rankprobe.graph import Kind, decomposed, op_key, remove_mode, tensors_in
from rankprobe.measure import Held, Layout, Run, measuring
from rankprobe.sites import AttentionSite, SkipSite, Sum, Tap, call_key, hidden_key, input_key, part_key
from rankprobe.weights import Projections

__all__ = ["Forward", "Hook", "Plan"]


@dataclass(frozen=True, slots=True)
class VisitAttention:
    key: str
    operand: int | None
    flipped: bool
    heads: int
    inner: int
    decoder: bool

    def before(self, forward: Forward, func: Any, args: Any, kwargs: Any) -> None:
        forward.run.attention(self.key, self._read(func, args, kwargs), self.decoder, self.heads, self.inner)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Attention:
        if self.operand is None:
            return from_op(func, args, kwargs)
        matrix = args[self.operand].detach()
        matrix = (matrix.mT if self.flipped else matrix).reshape(-1, *matrix.shape[-2:][:: -1 if self.flipped else 1])
        outer = matrix.shape[0] // (self.heads * self.inner)
        lead = (outer, self.heads) if self.inner == 1 else (outer, self.heads, self.inner)
        return as_attention(matrix, (*lead, *matrix.shape[1:]))


@dataclass(frozen=True, slots=True)
class VisitSkip:
    key: str
    skip: int
    branch: int
    inplace: bool
    layout: Layout
    decoder: bool
    input_key: str | None  # the first of a stack: the skip is the stack's input
    block: str | None  # the first of a block: what the block's output is compared with

    def before(self, forward: Forward, func: Any, args: Any, kwargs: Any) -> None:
        run = forward.run
        held = run.hold(args[self.skip].clone() if self.inplace else args[self.skip], self.layout, self.decoder)
        run.skip(self.key, held, args[self.branch], self.layout)
        given = forward.inputs.pop(self.key, None)
        if given is not None and given.numel() // given.shape[-1] == args[self.skip].shape[:-1].numel():
            given = given.reshape(*args[self.skip].shape[:-1], -1)
            run.contraction(self.key, given, args[self.branch], self.layout, self.decoder)
        if self.input_key is not None:
            run.hidden(self.input_key, held)
        if self.block is not None:
            forward.blocks[self.block] = held


@dataclass(frozen=True, slots=True)
class VisitHidden:
    key: str
    place: int
    layout: Layout
    decoder: bool

    def after(self, forward: Forward, out: Any) -> None:
        tensors = list(tensors_in(out))
        if self.place < len(tensors):
            held = forward.run.hold(tensors[self.place], self.layout, self.decoder)
            forward.run.hidden(self.key, held, forward.blocks.pop(self.key, None))
            forward.seen.add(self.key)


@dataclass(frozen=True, slots=True)
class VisitSum:
    """An addition of branches, where nothing is measured but a part may be taken away."""

    key: str

    def before(self, forward: Forward, func: Any, args: Any, kwargs: Any) -> None:
        pass


@dataclass(frozen=True, slots=True)
class VisitInput:
    """The product that makes an attention call's values: what goes into it is what the layer is given."""

    key: str
    skip: str
    place: int

    def before(self, forward: Forward, func: Any, args: Any, kwargs: Any) -> None:
        if forward.run.theory:
            forward.inputs[self.skip] = args[self.place]


Visit = VisitAttention | VisitSkip | VisitHidden | VisitSum | VisitInput


@dataclass(slots=True)
class Window:
    visits: dict[str, dict[int, list[Visit]]] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)

    def add(self, op: str, ordinal: int, visit: Visit) -> None:
        self.visits.setdefault(op, {}).setdefault(ordinal, []).append(visit)
        self.keys.add(visit.key)


class Plan:
    """Where the sites of one way through the model are: windows by event, hidden states by module exit.

    heads: visit every attention call, not only the first of a stack, whose shape tells how tokens are laid out.
    deep: all calls, and also the norms of each block, to pass them by, and what goes into each attention layer.
    """

    def __init__(self, tracer: Tracer, stacks: list[list[Found]], heads: bool, deep: bool = False) -> None:
        self.windows: dict[tuple[int, bool, int], Window] = {}
        self.exits: dict[tuple[int, int], list[VisitHidden]] = {}
        self.modules: list[nn.Module] = []
        self.sums: list[Sum] = []
        self.attended: dict[str, tuple[int, int]] = {}  # attention calls that are visited: heads, and groups inside one
        self.norms: dict[str, list[str]] = {}  # by block
        self.norm_exits: dict[tuple[int, int], str] = {}
        self.projections: dict[str, Projections] = {}  # by attention call
        self.unnormed: dict[str, str] = {}  # blocks with a norm that is no module's, and where
        self.rename: dict[str, str] = {}  # from the tracer's keys to the sites' own
        self.keys: set[str] = set()
        self.missing: set[frozenset[str]] = set()
        self.hooked: set[tuple[int, bool]] = set()
        self._slots: dict[int, int] = {}
        self._tracer = tracer
        self._plan(stacks, heads or deep)
        if deep:
            self._dig(stacks)
        del self._tracer

    def _plan(self, stacks: list[list[Found]], heads: bool) -> None:
        tracer = self._tracer
        self._slot(tracer.calls[0].module)
        attended: set[int] = set()
        first_skips: dict[str, tuple[str, bool]] = {}
        for stack in stacks:
            for position, block in enumerate(stack):
                if block.skips:
                    first_skips[block.skips[0].key] = (block.key, position == 0)
                    if position == 0:
                        self.rename[input_key(block.skips[0].key)] = f"{block.key}/input"
                if not heads and position == 0:
                    attended.update(id(a) for a in block.attentions[:1])
                self._output(block)
        inside: set[str] = set()
        for skip in tracer.skips:
            block_key, first = first_skips.get(skip.key, (None, False))
            self._tap(skip.tap, _visit_skip(skip, block_key, first))
            for part in _sums_in(skip.sum):
                inside.add(part.key)
                if part.site == skip.key:
                    self._tap(part.tap, VisitSum(part.key))
        self.sums = [s.sum for s in tracer.skips if s.sum is not None and s.key not in inside]
        for site in tracer.attentions:
            if heads or id(site) in attended:
                self._tap(site.tap, _visit_attention(site))
                self.attended[site.key] = (site.heads, site.inner)

    def _output(self, block: Found) -> None:
        node = block.node
        if node is None:
            return
        self.rename[hidden_key(node)] = block.key
        whole = call_key(block.call.id) if block.by_return else part_key(block.skips[0].key, node) if block.skips else ""
        self.rename[f"{whole}/influence"] = f"{block.key}/influence"
        last = block.skips[-1] if block.skips else None
        layout = last.layout if last else Layout()
        decoder = last.decoder if last else False
        if block.by_return:
            visit = VisitHidden(block.key, block.call.output_place, layout, decoder)
            slot = self._slot(block.call.module)
            self.exits.setdefault((slot, block.call.nth), []).append(visit)
            self.hooked.add((slot, False))
            self.keys.add(block.key)
        else:
            tap = last.tap if last else block.attentions[-1].tap
            self._tap(tap, VisitHidden(block.key, 0, layout, decoder))

    def _dig(self, stacks: list[list[Found]]) -> None:
        for block in (block for stack in stacks for block in stack):
            self._find_norms(block)
            for skip in block.skips:
                found = skip.attentions[0].projections if len(skip.attentions) == 1 else None
                if found is not None and not skip.attentions[0].cross:
                    product = found.value.product
                    self.projections[skip.attentions[0].key] = found
                    self._tap(product.tap, VisitInput(f"{skip.key}/given", skip.key, product.x))

    def _find_norms(self, block: Found) -> None:
        """The module calls in a block that normalise its stream or a branch and do nothing else."""
        tracer = self._tracer
        if block.node is None or not block.skips:
            return
        tokens = {s.skip_node.shape[:-1] for s in block.skips} | {s.skip_node.shape for s in block.skips}
        first = block.skips[0].skip_node.id
        found: dict[int, None] = {}
        for node in tracer.graph.nodes[first : block.node.id + 1]:
            if node.kind is Kind.NORM and tracer.within(node.call, block.call.id) and (node.shape in tokens or node.shape[:-1] in tokens):
                found[node.call] = None
        busy = {n.call for n in tracer.graph.nodes if n.by_weight} | {s.call for s in tracer.skips} | {a.call for a in tracer.attentions}
        for number in found:
            call = tracer.calls[number]
            if any(tracer.within(other, number) for other in busy):
                self.unnormed[block.key] = call.name
                continue
            slot, key = self._slot(call.module), f"{call.name}#{call.nth}/norm"
            self.norm_exits[slot, call.nth] = key
            self.norms.setdefault(block.key, []).append(key)
            self.keys.add(key)
            self.hooked.add((slot, False))

    def _slot(self, module: nn.Module) -> int:
        if id(module) not in self._slots:
            self._slots[id(module)] = len(self.modules)
            self.modules.append(module)
        return self._slots[id(module)]

    def _hookable(self, number: int) -> bool:
        calls = self._tracer.calls
        call = self._tracer.events[number].call
        while call >= 0:
            if calls[call].opaque:
                return False
            call = calls[call].parent
        return True

    def _tap(self, tap: Tap, visit: Visit) -> None:
        tracer, number, ordinal = self._tracer, tap.event, tap.ordinal
        while not self._hookable(number):
            number -= 1
            ordinal += tracer.counts[number][tap.op]
        event = tracer.events[number]
        slot = self._slot(event.module)
        window = self.windows.setdefault((slot, event.entry, event.nth), Window())
        window.add(tap.op, ordinal, visit)
        self.keys.add(visit.key)
        self.hooked.add((slot, event.entry))
        # The next event closes the window.
        following = next((n for n in range(number + 1, len(tracer.events)) if self._hookable(n)), None)
        if following is not None:
            closer = tracer.events[following]
            self.hooked.add((self._slot(closer.module), closer.entry))


def _sums_in(total: Sum | None) -> list[Sum]:
    """The sums that are terms of `total`, and of those."""
    found = []
    for term in total.terms.values() if total is not None else ():
        if isinstance(term, Sum):
            found += [term, *_sums_in(term)]
    return found


def _visit_attention(site: AttentionSite) -> VisitAttention:
    return VisitAttention(site.key, site.operand, site.flipped, site.heads, site.inner, site.decoder)


def _visit_skip(site: SkipSite, block: str | None, first: bool) -> VisitSkip:
    name = f"{block}/input" if first else None
    return VisitSkip(site.key, site.skip, site.branch, site.inplace, site.layout, site.decoder, name, block)


class Forward(TorchDispatchMode):
    """One watched forward in one thread. `edits` tells, by site, what is done instead of what the model does there."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around every call that only compiled code needs

    def __init__(self, plan: Plan, run: Run, edits: Mapping[str, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.plan = plan
        self.edits = edits or {}
        self.run = run
        self.blocks: dict[str, Held] = {}
        self.inputs: dict[str, Tensor] = {}  # by skip connection: what its attention layer was given
        self.seen: set[str] = set()
        self.strayed: set[str] = set()  # sites whose window did not hold them
        self._window: Window | None = None
        self._due: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._times: Counter[tuple[int, bool]] = Counter()

    def entry(self, slot: int) -> None:
        self.close()
        self._start(slot, True)

    def exit(self, slot: int, out: Any, args: Any = ()) -> Any:
        """A module was left. What it is to have returned instead, if that is to change."""
        self.close()
        nth = self._times[slot, False]
        norm, instead = self.plan.norm_exits.get((slot, nth)), None
        if norm is not None:
            self.seen.add(norm)
            if norm in self.edits:
                instead = out = self.edits[norm](args, out)
        for visit in self.plan.exits.get((slot, nth), ()):
            self.run.attempt(visit.key, visit.after, self, out)
        self._start(slot, False)
        return instead

    def _start(self, slot: int, entry: bool) -> None:
        nth = self._times[slot, entry]
        self._times[slot, entry] = nth + 1
        window = self.plan.windows.get((slot, entry, nth))
        if window is not None:
            self._window, self._due, self._counts = window, set(window.keys), Counter()
            self.__enter__()

    def close(self) -> None:
        if self._window is not None:
            self._window = None
            remove_mode(self)
            self.strayed |= self._due

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if measuring():
            return func(*args, **kwargs)
        parts = decomposed(self, func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        name = op_key(func)
        known = self._window.visits.get(name) if self._window is not None else None
        if known is None:
            return func(*args, **kwargs)
        visits = known.get(self._counts[name], ())
        self._counts[name] += 1
        edit = None
        for visit in visits:
            if not isinstance(visit, VisitHidden):
                self.run.attempt(visit.key, visit.before, self, func, args, kwargs)
                edit = edit or self.edits.get(visit.key)
        out = func(*args, **kwargs) if edit is None else edit(func, args, kwargs)
        for visit in visits:
            if isinstance(visit, VisitHidden):
                self.run.attempt(visit.key, visit.after, self, out)
            self._due.discard(visit.key)
            self.seen.add(visit.key)
        return out


class Hook:
    """A module hook that knows its probe weakly, and turns into nothing in a pickled or copied model."""

    def __init__(self, probe: Any, slot: int, entry: bool) -> None:
        self._probe = weakref.ref(probe)
        self._slot = slot
        self._entry = entry

    def __call__(self, module: nn.Module, args: Any, out: Any = None) -> Any:
        probe = self._probe()
        forward = probe._forward() if probe is not None else None
        if forward is None:
            return None
        return forward.entry(self._slot) if self._entry else forward.exit(self._slot, out, args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return inert, ()


def ignore(*_: Any) -> None:
    """What is left of a hook in a copy of a watched model."""


def inert() -> Callable[..., None]:
    return ignore
