"""The first forward after `attach`: every op is seen once, and the model's parts are recognised as they pass.

An addition of two equally shaped tensors is a *skip connection* when one operand is an ancestor of the other through at
least one product with a weight. (That product is what keeps `x + 0.044·x³` inside a GELU from counting.) An *attention call*
is a fused kernel, or a product of two activations one of which came out of a softmax: the matrix that multiplies the values.

Each site is written down as a *tap*: after which module's entry or exit, and as which op of its kind since then, it came.
That is enough for later forwards to visit it without looking at anything else. The sites are measured here as well, so
that the first forward counts like any other.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rankprobe.attention import Attention, from_op
from rankprobe.graph import (
    FUSED_LAYER,
    Graph,
    Kind,
    Node,
    Op,
    between,
    decomposed,
    kind_of,
    moved_from,
    op_key,
    remove_mode,
    shape_of,
    tensors_in,
    terms,
    written_arguments,
)
from rankprobe.measure import Held, Layout, Run, arrange, by_head, measuring, quiet
from rankprobe.padding import is_decoder_argument, named_arguments
from rankprobe.sites import AttentionSite, Call, Event, SkipSite, Sum, Tap, call_key, hidden_key, input_key, leaves, part_key
from rankprobe.weights import Product, Projections, columns_of, made_by, read_product

__all__ = ["Tracer", "as_attention"]

_ADDITIONS = {"add", "add_", "addcmul", "addcmul_"}
_KEEPS_WEIGHT = {"index", "index_select", "select", "gather", "slice", "narrow"}
_ROUTING = {"topk", "_grouped_mm", "index_add", "index_add_", "scatter_add", "scatter_add_", "index_put_", "index_put"}
_OWN = ("aten", "prims", "prim")


@dataclass(slots=True)
class _Weights:
    """A tensor that came out of a softmax and has only been moved, scaled or mixed over heads since."""

    shape: tuple[int, ...]
    softmax: Node
    undropped: AttentionSite | None = None  # where it was last seen before dropout


class Tracer(TorchDispatchMode):
    """Watches one forward of `root`, from `start` to `stop`; then `finish`, and read the lists."""

    supports_higher_order_operators = True

    def __init__(self, root: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.run = run
        self.graph = Graph()
        self.events: list[Event] = []
        self.counts: list[Counter[str]] = []
        self.calls: list[Call] = []
        self.attentions: list[AttentionSite] = []
        self.skips: list[SkipSite] = []
        self.ops: list[Op] = []
        self.unknown: Counter[str] = Counter()  # attention by name, but of no kind we can read
        self._thread = threading.get_ident()
        self._names = {id(module): name for name, module in root.named_modules()}
        self._nth: Counter[int] = Counter()
        self._open: list[int] = []
        self._weights: dict[int, _Weights] = {}  # by node
        self.by_node: dict[int, AttentionSite] = {}
        self._adds: dict[int, Tap] = {}  # by node
        self._last: dict[int, SkipSite] = {}  # by call: the newest skip connection inside
        self._sites: Counter[str] = Counter()
        self._measured: set[str] = set()
        self._starts: list[tuple[str, Held]] = []  # the stream at the last two skip connections
        self._parameters = {p.untyped_storage()._cdata: weakref.ref(p) for p in root.parameters() if not p.is_nested}
        self._products: dict[int, Product] = {}  # by node
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for name, value in named_arguments(root, args, kwargs):
            for tensor in tensors_in(value):
                node = self._source(tensor)
                node.decoder |= is_decoder_argument(name)
                node.stream |= tensor.is_floating_point() and "mask" not in name
        self.enter(root)

    # -- modules --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        # Hooks for all modules at once, not one on each: nn.TransformerEncoderLayer leaves its fused kernel, and so its
        # numbers, as soon as one of its own modules has a hook.
        register = nn.modules.module
        self._handles.append(register.register_module_forward_pre_hook(lambda module, args: self.enter(module)))
        self._handles.append(register.register_module_forward_hook(lambda module, args, out: self.leave(module, out)))
        self.__enter__()

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        remove_mode(self)

    def enter(self, module: nn.Module) -> None:
        if threading.get_ident() != self._thread:
            return
        parent = self._open[-1] if self._open else -1
        name = self._names.get(id(module))
        if name is None:
            name = f"{self.calls[parent].name}.<{type(module).__name__}>"
        call = Call(len(self.calls), parent, name, type(module).__name__, self._nth[id(module)], module)
        self._nth[id(module)] += 1
        self.calls.append(call)
        self._open.append(call.id)
        self._event(call, True)

    def leave(self, module: nn.Module, output: Any) -> None:
        if threading.get_ident() != self._thread or len(self._open) < 2:
            return
        while self._open and self.calls[self._open[-1]].module is not module:
            self._open.pop()  # a module that raised, and whose caller went on
        if not self._open:
            return
        call = self.calls[self._open[-1]]
        self._hidden(call, output)
        self._open.pop()
        self._event(call, False)

    def finish(self, output: Any) -> None:
        """The root returned."""
        self._hidden(self.calls[0], output)
        self.run.finish()
        for site in self.attentions:
            site.settle()
            if site.key in self.run.results:
                self.run.results[site.key] = arrange(self.run.results[site.key], site.heads, site.inner)
            if site.key in self.run.attentions:
                self.run.attentions[site.key] = by_head(self.run.attentions[site.key], site.heads, site.inner)

    def _event(self, call: Call, entry: bool) -> None:
        if not entry:
            call.exit = len(self.events)
        self.events.append(Event(call.id, call.module, entry, call.nth))
        self.counts.append(Counter())

    def _hidden(self, call: Call, output: Any) -> None:
        """Which of the tensors that `call` returns is the stream after its last skip connection, if any."""
        last = self._last.get(call.id)
        before, call.before = call.before, None
        inside = (
            {site.node.id for site in self.attentions if site.node is not None and self.within(site.call, call.id)}
            if last is None
            else set()
        )
        if (last is None or last.node is None) and not inside:
            return
        for place, tensor in enumerate(tensors_in(output)):
            if not tensor.is_floating_point() or tensor.dim() < 2:
                continue
            node = self.graph.node(tensor)
            if node is None:
                continue
            if last is not None and last.node is not None:
                if not any(term is last.node for term in terms(node, norms=True)):
                    continue
                layout, decoder = last.layout, last.decoder
            else:
                layout, decoder = Layout(), node.decoder
                if tensor.dim() != 3 or not any(a.id in inside for a in _near(node)):
                    continue
            call.output, call.output_place = node, place
            self._measure_hidden(hidden_key(node), tensor, layout, decoder)
            if before is not None:
                self._measure_hidden(call_key(call.id), tensor, layout, decoder, before)
            return

    def _measure_hidden(self, key: str, tensor: Tensor, layout: Layout, decoder: bool, before: Held | None = None) -> None:
        if key not in self._measured:
            self._measured.add(key)
            self.run.attempt(key, lambda: self.run.hidden(key, self.run.hold(tensor, layout, decoder), before))

    # -- ops ------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if measuring():
            return func(*args, **kwargs)
        parts = decomposed(self, func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        name, kind = op_key(func), kind_of(func)
        tap = Tap(len(self.events) - 1, name, self.counts[-1][name])
        self.counts[-1][name] += 1
        parents = [self._source(t) for t in tensors_in((args, kwargs))]
        if kind is Kind.MOVE and getattr(func, "namespace", "aten") not in _OWN:
            if any(p.weight for p in parents):
                kind = Kind.MULTIPLY
            if "attn" in name or "attention" in name:
                self.unknown[name] += 1
        attention = skip = None
        with quiet():
            if kind is Kind.ATTENTION:
                attention = self._fused(func, args, kwargs, tap)
            elif kind is Kind.MULTIPLY:
                attention = self._product(name, args, tap)
            elif name in _ADDITIONS:
                skip = self._addition(name, args, tap)
            dropped = self._dropout(name, args, parents, tap)

        out = func(*args, **kwargs)

        first = len(self.graph.nodes)
        node = self._bind(func, name, kind, parents, args, kwargs, out)
        self.ops.append(Op(name, first, len(self.graph.nodes)))
        if node is None:
            return out
        if node.by_weight and kind is Kind.MULTIPLY:
            product = read_product(tap, name, args, next(iter(tensors_in(out))), [p.weight for p in parents], self._parameters)
            if product is not None:
                self._products[node.id] = product
            self._output_projection(parents, product)
        self._track_weights(name, kind, node, parents, dropped)
        if name in ("add", "add_") and len(parents) == 2:
            self._adds[node.id] = tap
        if attention is not None:
            attention.node = node
            self.by_node[node.id] = attention
        if skip is not None:
            skip.node = node
            for number in self._open:
                self._last[number] = skip
            result = next(iter(tensors_in(out)))
            self._measure_hidden(hidden_key(node), result, skip.layout, skip.decoder)
            for start, held in self._starts:
                self._measure_hidden(part_key(start, node), result, skip.layout, skip.decoder, held)
        return out

    def _source(self, tensor: Tensor) -> Node:
        found = self.graph.node(tensor)
        if found is None:
            try:
                weight = tensor.untyped_storage()._cdata in self._parameters
            except (RuntimeError, NotImplementedError):
                weight = False
            found = self.graph.source(tensor, "parameter" if weight else "source", weight)
        return found

    def _bind(self, func: Any, name: str, kind: Kind, parents: list[Node], args: Any, kwargs: Any, out: Any) -> Node | None:
        written = [args[i] if isinstance(i, int) and i < len(args) else kwargs.get(i) for i in written_arguments(func)]
        targets = list(tensors_in(written))
        results = targets or list(tensors_in(out))
        if not results:
            return None
        first: Node | None = None
        for tensor in results:
            node = self.graph.add(name, kind, parents, shape_of(tensor), self._open[-1])
            node.weight = bool(parents) and (
                all(p.weight for p in parents) or (name in _KEEPS_WEIGHT and parents[0].weight and len(parents[0].shape) > 2)
            )
            node.by_weight = kind in (Kind.MULTIPLY, Kind.ATTENTION) and any(p.weight for p in parents)
            node.noise = name in ("bernoulli_", "bernoulli", "native_dropout") or (
                name in ("div_", "div", "mul_", "_to_copy") and bool(parents) and parents[0].noise
            )
            node.stream = tensor.is_floating_point() and (node.by_weight or name == "embedding" or any(p.stream for p in parents))
            node.decoder = any(p.decoder for p in parents)
            self.graph.bind(tensor, node, written=bool(targets))
            first = first or node
        return first

    # -- attention ------------------------------------------------------------------------------------------------

    def _site(self, what: str) -> str:
        call = self.calls[self._open[-1]]
        stem = f"{call.name or 'model'}#{call.nth}/{what}"
        self._sites[stem] += 1
        return f"{stem}{self._sites[stem] - 1}"

    def _fused(self, func: Any, args: Any, kwargs: Any, tap: Tap) -> AttentionSite:
        call = from_op(func, args, kwargs)
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        key = named.get("key", named.get("src"))
        value = named.get("value", key)
        width = value.shape[-1] if "qkv_weight" not in named else call.q.shape[-1]  # type: ignore[union-attr]
        if tap.op == FUSED_LAYER:
            self.calls[self._open[-1]].opaque = True
        site = self._attention(call, tap, None, False, width, (self._source(key),))
        if "qkv_weight" in named:
            site.heads = call.lead[-1]
        site.kv_heads = call.kv_heads
        if "value" in named and "qkv_weight" not in named:
            made = [columns_of(named[part], self._source(named[part]), self._products) for part in ("query", "key", "value")]
            if made[0] is not None and made[1] is not None and made[2] is not None:
                site.projections = Projections(made[0], made[1], made[2], call.scale)
        return site

    def _attention(
        self, call: Attention, tap: Tap, operand: int | None, flipped: bool, width: int, keys: tuple[Node, ...]
    ) -> AttentionSite:
        site = AttentionSite(
            self._site("attention"), self._open[-1], tap, tap.op, operand, flipped, call.lead, call.queries, call.keys, width,
            causal=call.causal, key_nodes=keys, decoder=any(k.decoder for k in keys),
        )  # fmt: skip
        self.run.attempt(site.key, self.run.attention, site.key, call, site.decoder)
        site.reach = _reach(call)
        self.attentions.append(site)
        return site

    def _product(self, name: str, args: Any, tap: Tap) -> AttentionSite | None:
        """Is this the product of an attention matrix and its values?"""
        first = 1 if name in ("baddbmm", "addmm", "addbmm") else 0
        operands = [a for a in args[first : first + 2] if isinstance(a, Tensor)]
        if len(operands) != 2 or operands[0].dim() != operands[1].dim() or operands[0].dim() < 2 or "conv" in name:
            return None
        nodes = [self._source(t) for t in operands]
        found = [self._weights.get(n.id) for n in nodes]
        if (found[0] is None) == (found[1] is None) or any(n.weight for n in nodes):
            return None
        side = 0 if found[0] is not None else 1
        weights = found[side]
        assert weights is not None
        matrix = operands[side] if side == 0 else operands[side].mT
        matrix = matrix.reshape(-1, *matrix.shape[-2:])
        width = operands[1 - side].shape[-1 if side == 0 else -2]
        if weights.undropped is not None and weights.undropped.queries == matrix.shape[1]:
            site = weights.undropped
            site.width = width
            return site
        call = as_attention(matrix, weights.shape)
        return self._attention(call, tap, first + side, side == 1, width, _keys_of(weights.softmax))

    def _dropout(self, name: str, args: Any, parents: list[Node], tap: Tap) -> AttentionSite | None:
        """An attention matrix about to be thinned out by dropout is measured as it was before."""
        thinned = name == "native_dropout" or (name in ("dropout", "dropout_") and args[2])
        if not thinned and not (name == "mul" and len(parents) == 2 and parents[1].noise):
            return None
        weights = self._weights.get(parents[0].id)
        if weights is None or weights.undropped is not None:
            return None
        matrix = args[0].detach()
        shape = tuple(matrix.shape)
        call = as_attention(matrix.reshape(-1, *shape[-2:]), shape if len(shape) > 3 else weights.shape)
        return self._attention(call, tap, 0, False, 1, _keys_of(weights.softmax))

    def _track_weights(self, name: str, kind: Kind, node: Node, parents: list[Node], dropped: AttentionSite | None) -> None:
        shape = tuple(node.shape)
        if kind is Kind.SOFTMAX and len(shape) > 1:
            self._weights[node.id] = _Weights(shape, node)
            return
        size = math.prod(shape)
        for parent in parents:
            weights = self._weights.get(parent.id)
            if weights is None or len(shape) < 2:
                continue
            before = math.prod(parent.shape)
            # Moved, sliced, scaled or mixed over heads; anything that grows is no longer the matrix, but for padding.
            if size > before and name not in ("expand", "repeat", "cat", "constant_pad_nd"):
                continue
            if kind in (Kind.ATTENTION, Kind.NORM) or (kind is Kind.MULTIPLY and not (node.by_weight and size == before)):
                continue
            if name in ("sum", "mean", "argmax", "topk", "amax", "max", "gt", "eq"):
                continue
            kept = shape if len(shape) > 3 or len(weights.shape) <= 3 or shape[-2:] != weights.shape[-2:] else weights.shape
            self._weights[node.id] = _Weights(kept, weights.softmax, dropped or weights.undropped)
            return

    def _output_projection(self, parents: list[Node], product: Product | None) -> None:
        """The product after an attention call tells its heads: features in, over features of one value."""
        live = next((p for p in parents if not p.weight), None)
        if live is None or len(live.shape) < 2:
            return
        for term in terms(live, limit=24):
            site = self.by_node.get(term.id)
            if site is not None and site.projections is not None and site.projections.output is None:
                site.projections.output = product
            if site is None or site.heads:
                continue
            for features in (live.shape[-1], live.shape[1]):
                if features % site.width == 0 and _possible(features // site.width, site.lead):
                    site.heads = features // site.width
                    break
            return

    # -- skip connections -----------------------------------------------------------------------------------------

    def _addition(self, name: str, args: Any, tap: Tap) -> SkipSite | None:
        operands = list(args[:3]) if name.startswith("addcmul") else list(args[:2])
        if not all(isinstance(t, Tensor) and t.is_floating_point() and t.is_nested is operands[0].is_nested for t in operands):
            return None
        if name.startswith("addcmul"):  # x + gate · branch: the larger factor is the branch
            branch = 1 if operands[1].dim() >= operands[2].dim() and operands[1].shape == operands[0].shape else 2
            sides: tuple[tuple[int, int], ...] = ((0, branch),)
        else:
            sides = ((0, 1), (1, 0))
        for skip, branch in sides:
            if shape_of(operands[skip]) != shape_of(operands[branch]) or operands[skip].dim() < 2:
                return None
            found = self._skip(operands, skip, branch)
            if found is not None:
                start, way, parallel = found
                return self._make_skip(name, operands, skip, branch, start, way, parallel, tap)
        return None

    def _skip(self, operands: list[Tensor], skip: int, branch: int) -> tuple[Node, list[Node], bool] | None:
        a, b = self._source(operands[skip]), self._source(operands[branch])
        # A branch ends in features: the product of queries and keys, to which a bias is added, does not.
        if not any(t.by_weight or t.kind in (Kind.NORM, Kind.ATTENTION) or t.id in self.by_node for t in terms(b)):
            return None
        way = between(a, b) if a.id < b.id else []
        if any(n.by_weight for n in way):
            return a, way, False
        if b.id < a.id and between(b, a):
            return None
        # Parallel and gated blocks, class tokens, pooled streams: what is carried over is a sum, a product or a part of the
        # ancestor.
        own = {term.id for term in terms(b, limit=16)}
        sums = [term for term in terms(a, limit=16) if term.shape == a.shape]
        for term in (*moved_from(a), *sums):
            if term.id in own or term.weight or not term.stream or term is a:
                continue
            way = between(term, b) if term.id < b.id else []
            if any(n.by_weight for n in way):
                return term, way, any(t.op in ("add", "add_") for t in terms(a, limit=4) if t.id > term.id)
        return None

    def _make_skip(
        self, name: str, operands: list[Tensor], skip: int, branch: int, start: Node, way: list[Node], parallel: bool, tap: Tap
    ) -> SkipSite:
        a, b = self._source(operands[skip]), self._source(operands[branch])
        attentions = tuple(self.by_node[n.id] for n in way if n.id in self.by_node)
        key = self._site("skip")
        held = self._branch(key, start, b)
        total = Sum(key, key, tap, name.endswith("_"), {skip: self._carried(start, a), branch: held})
        kinds = tuple(sorted(leaves(held)))
        for call in attentions:
            call.cross = not any(between(start, k) for k in call.key_nodes if k.id > start.id)
        on_way = {n.id for n in way}
        first = next((i for i, n in enumerate(way) if n.by_weight), len(way))
        last = max((i for i, n in enumerate(way) if n.by_weight), default=-1)
        x = operands[skip]
        site = SkipSite(
            key=key,
            call=self._open[-1],
            tap=tap,
            skip=skip,
            branch=branch,
            kinds=kinds,
            inplace=total.inplace,
            skip_node=start,
            branch_node=b,
            layout=Layout(channels_first=x.dim() == 4 and way[last].op.endswith("convolution") and way[last].shape == x.shape),
            decoder=start.decoder,
            gated=any(n.op in ("mul", "mul_", "glu", "_thnn_fused_glu") and _two_weighed(n, on_way, start) for n in way),
            routed=any(n.op in _ROUTING for n in way),
            parallel=parallel or len(kinds) > 1,
            pre_norm=any(n.kind is Kind.NORM for n in way[:first]),
            inner_norm=any(n.kind is Kind.NORM for n in way[last + 1 :]),
            attentions=attentions,
            sum=total,
        )
        if len(attentions) == 1 and attentions[0].projections is not None:
            projections = attentions[0].projections
            if projections.output is None or made_by(b, self._products) is not projections.output:
                attentions[0].projections = None  # a norm or a gate stands between
        if site.inplace:
            x = x.clone()
        self.run.attempt(site.key, self._measure_skip, site, x, operands[branch])
        self.skips.append(site)
        return site

    def _branch(self, key: str, start: Node, node: Node) -> str | Sum:
        """What a branch holds: attention if a way through it crosses a call of it, unless it adds such a part to another."""

        def attends(way: list[Node]) -> bool:
            return any(n.id in self.by_node for n in way)

        way = between(start, node)
        if not attends(way):
            return _weighing(way)
        for term in terms(node, limit=16):
            if term.id <= start.id or term.id not in self._adds:
                continue
            sides = [between(start, part) if part.id > start.id else [] for part in term.parents]
            if all(any(n.by_weight for n in side) for side in sides) and not all(map(attends, sides)):
                tap = self._adds[term.id]
                parts: dict[int, str | Sum] = {i: self._branch(key, start, part) for i, part in enumerate(term.parents)}
                return Sum(f"{key}/{term.id}", key, tap, term.op.endswith("_"), parts)
        return "attention"

    def _carried(self, start: Node, node: Node) -> str | Sum:
        """What a skip operand is: the stream, or the stream with another branch of the same block added to it already."""
        if node is not start:
            near = {term.id for term in terms(node, limit=16)}
            for site in reversed(self.skips):
                if site.skip_node is start and site.node is not None and site.node.id in near and site.sum is not None:
                    return site.sum
        return "skip"

    def _measure_skip(self, site: SkipSite, x: Tensor, branch: Tensor) -> None:
        held = self.run.hold(x, site.layout, site.decoder)
        self.run.skip(site.key, held, branch, site.layout)
        self.run.hidden(input_key(site.key), held)
        self._starts = [*self._starts[-1:], (site.key, held)]
        for number in self._open:
            call = self.calls[number]
            if call.before is None and self._last.get(number) is None:
                call.before = held

    def within(self, call: int, outer: int) -> bool:
        while call > outer:
            call = self.calls[call].parent
        return call == outer


def as_attention(matrix: Tensor, shape: tuple[int, ...]) -> Attention:
    """A given matrix `(groups, queries, keys)` whose groups were laid out as `shape` says."""
    lead = tuple(shape[:-2])
    if not lead or math.prod(lead) != matrix.shape[0]:
        lead = (matrix.shape[0],)
    return Attention(lead, matrix.shape[1], matrix.shape[2], weights=matrix)


def _possible(heads: int, lead: tuple[int, ...]) -> bool:
    return heads in lead if len(lead) > 1 else lead[0] % heads == 0


def _keys_of(softmax: Node) -> tuple[Node, ...]:
    """Operands of the products that made the scores."""
    for term in terms(softmax.parents[0], limit=32):
        if term.kind is Kind.MULTIPLY and not term.by_weight:
            return term.parents
    return softmax.parents


def _near(node: Node) -> list[Node]:
    """What `node` came from, up to one product with a weight back."""
    found = list(terms(node, norms=True))
    for term in tuple(found):
        if term.by_weight:
            for parent in term.parents:
                found.extend(terms(parent, norms=True))
    return found


def _weighing(way: list[Node]) -> str:
    products = [n for n in way if n.by_weight]
    kernels = [p.shape[2:] for n in products if "conv" in n.op for p in n.parents if p.weight and len(p.shape) > 2]
    if len(kernels) >= len(products) and any(size > 1 for kernel in kernels for size in kernel):
        return "conv"
    return "mlp" if len(products) > 1 else "linear"


def _two_weighed(product: Node, on_way: set[int], start: Node) -> bool:
    """A product of two activations each of which came through weights of its own: a gate."""
    if len(product.parents) != 2 or not all(p.id in on_way for p in product.parents):
        return product.op in ("glu", "_thnn_fused_glu")
    return all(any(t.by_weight for t in terms(p, limit=12)) for p in product.parents)


def _reach(call: Attention) -> Tensor | None:
    """`(2,)`, on the device: how far back and how far ahead any query looks."""
    if call.queries != call.keys or call.causal:
        return None
    reach: Tensor | None = None
    for _, rows, p, *_ in call.blocks():
        seen = (p > 0).any(0)
        row = torch.arange(rows.start, rows.start + seen.shape[0], device=p.device).unsqueeze(1)
        ahead = torch.arange(call.keys, device=p.device) - row
        both = torch.stack((-ahead, ahead)).masked_fill(~seen, 0).amax((1, 2))
        reach = both if reach is None else torch.maximum(reach, both)
    return reach
