"""The output as an exact sum over path lengths: how much of it crossed no attention call, one, two, …

    split = probe.paths(**batch)
    print(split)
    split.share[2], split.residual[2]      # norm of what crossed two, over the output's; how alike its tokens are
    split.completeness                     # how far the parts' sum is from the model's real output

A model of L layers with H heads and skip connections has C(L, k)·Hᵏ paths of length k. All of them are summed, in about L + 1
forward passes' work: `rankprobe/shadow.py` says how. `heads=True` also tells what each head hands on to the output, and
`strongest=n` finds single paths, head by head: the n with the largest norm among those a beam search meets.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rankprobe import metrics
from rankprobe.ablate import caches_in
from rankprobe.anatomy import Found, dissect
from rankprobe.collapse import answers_for_next, uncached
from rankprobe.discover import Tracer
from rankprobe.errors import RankprobeError
from rankprobe.graph import Kind, Node, between, tensors_in
from rankprobe.measure import Run, quiet
from rankprobe.padding import TokenMasks
from rankprobe.render import bare_table, html, number, plain
from rankprobe.report import numbers_to_json, write_text
from rankprobe.shadow import Crossing, Label, Parts, Route, Shadow, Strayed, by_last_head, by_length, needed_ops, onward

if TYPE_CHECKING:
    from rankprobe.probe import Probe

__all__ = ["Ask", "HeadShare", "Kept", "PathSplit", "SinglePath", "split_paths"]

NAN = float("nan")


@dataclass(frozen=True)
class Kept:
    """What the model would answer from some of its parts alone."""

    kl: float  # divergence from the whole model's distribution, in nats
    agreement: float  # share of equal top answers
    loss: float = NAN
    accuracy: float = NAN


@dataclass(frozen=True)
class HeadShare:
    """What one head, or all of an attention call, hands on to the output: the paths that cross it last."""

    call: str
    head: int | None
    share: float


@dataclass(frozen=True)
class SinglePath:
    """One way through the model: the heads it crosses, as (block, head), straight on elsewhere."""

    heads: tuple[tuple[int, int], ...]
    share: float
    # What `ablate` takes to run the model along this path alone. Attention is then made anew from what comes along it, as in the
    # paper's experiment, where the share above has it frozen, as in the theorem.
    ablation: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class PathSplit:
    """The parts of one tensor, by the length of the paths that lead to it."""

    model: str
    at: str
    by: tuple[str, ...]
    lengths: tuple[int, ...]
    share: tuple[float, ...]  # norm of a part over that of the whole
    residual: tuple[float, ...]  # relative residual of a part, the paper's norm, mean over samples
    projection: tuple[float, ...]  # of a part onto the whole, over its squared norm: these sum to 1
    paths: tuple[int, ...]  # how many there are of each length; empty where stacks feed each other
    completeness: float
    unattributed: float = 0.0  # share of what passed through ops without a rule
    unruled: dict[str, int] = field(default_factory=dict)  # those ops
    precision: str = "float32"  # the lowest that the model itself rounds to on the way
    capped: bool = False  # the last length means that or longer
    bias_share: tuple[float, ...] = ()  # norms of what comes from biases alone, with split_bias=True
    contribution: tuple[float, ...] = ()  # to the chosen answer's logit, over the mean logit
    only: tuple[Kept, ...] = ()  # answers from paths of one length
    up_to: tuple[Kept, ...] = ()  # answers from paths of at most that length
    heads: tuple[HeadShare, ...] = ()
    calls: tuple[HeadShare, ...] = ()
    strongest: tuple[SinglePath, ...] = ()
    components: dict[Label, Tensor] | None = field(default=None, repr=False, compare=False)

    def metrics(self) -> dict[str, float]:
        flat = {"completeness": self.completeness, "unattributed": self.unattributed}
        for i, length in enumerate(self.lengths):
            flat |= {f"share.{length}": self.share[i], f"residual.{length}": self.residual[i]}
        return {k: v for k, v in flat.items() if not math.isnan(v)}

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        data = dataclasses.asdict(dataclasses.replace(self, components=None))
        text = json.dumps(numbers_to_json(data), indent=1, allow_nan=False) + "\n"
        if path is not None:
            write_text(Path(path), text)
        return text

    def __str__(self) -> str:
        return plain(self)

    def _repr_html_(self) -> str:
        return html(self)

    def __rich__(self) -> RenderableType:
        crossed = " and ".join({"attention": "attention calls", "mlp": "MLPs"}[b] for b in self.by)
        parts: list[RenderableType] = [
            Text(f"rankprobe: {self.model}, {self.at}, by how many {crossed} a path crosses", style="bold"),
            self.table(),
            Text(
                f"The parts sum to the real output within {self.completeness:.1e} of its norm; it computes in {self.precision}.",
                style="dim",
            ),
        ]
        if self.unattributed:
            names = ", ".join(f"{name} × {n}" for name, n in self.unruled.items())
            parts.append(
                Text(f"Unattributed: {self.unattributed:.3f} of the output passed through ops without a rule ({names})", style="red")
            )
        if self.only:
            parts += [Text("\nAnswers from some lengths alone", style="bold"), self._answers()]
        if self.heads:
            best = sorted(self.heads, key=lambda h: -h.share)[:8]
            parts.append(Text("\nHeads that hand on most", style="bold"))
            parts += [Text(f"{h.share:.3f}  head {h.head} of {h.call}") for h in best]
        if self.strongest:
            parts.append(Text("\nStrongest single paths found: block.head → …", style="bold"))
            parts += [
                Text(f"{number(p.share)}  {' → '.join(f'{b}.{h}' for b, h in p.heads) or 'straight through'}") for p in self.strongest
            ]
        return Group(*parts)

    def _label(self, i: int) -> str:
        return f"{self.lengths[i]}{'+' if self.capped and i == len(self.lengths) - 1 else ''}"

    def table(self) -> Table:
        more = [*(("of biases",) if self.bias_share else ()), *(("paths",) if self.paths else ())]
        table = bare_table("length", "share", "", "projection", "residual", *more)
        table.columns[0].justify, table.columns[2].justify = "right", "left"
        top = max(self.share, default=1.0)
        for i in range(len(self.lengths)):
            bar = "█" * max(1 if self.share[i] else 0, round(20 * self.share[i] / top))
            cells = [self._label(i), number(self.share[i]), bar, f"{self.projection[i]:+.3f}", number(self.residual[i])]
            cells += [number(self.bias_share[i])] if self.bias_share else []
            cells += [_count(self.paths[i])] if self.paths else []
            table.add_row(*cells)
        return table

    def _answers(self) -> Table:
        graded = not math.isnan(self.only[0].accuracy)
        told = ("KL", "agrees", *(("loss", "accuracy") if graded else ()))
        table = bare_table("length", "to its logit", *(f"{t} of it" for t in told), *(f"{t} up to it" for t in told))
        for i in range(len(self.lengths)):
            cells = [self._label(i), f"{self.contribution[i]:+.3f}"]
            for kept in (self.only[i], self.up_to[i]):
                cells += [number(kept.kl), number(kept.agreement)]
                cells += [number(kept.loss), number(kept.accuracy)] if graded else []
            table.add_row(*cells)
        return table


def _count(paths: int) -> str:
    return f"{paths:,}" if paths < 10**7 else f"{float(paths):.1e}"


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """What `Probe.paths` was asked for."""

    at: str | int = "output"
    by: tuple[str, ...] = ("attention",)
    max_length: int | None = None
    split_bias: bool = False
    components: bool = False
    heads: bool = False
    strongest: int = 0
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.by or set(self.by) - {"attention", "mlp"}:
            raise RankprobeError(f'by={self.by}: paths are measured by "attention", "mlp" or both')
        if self.max_length is not None and self.max_length < 1:
            raise RankprobeError(f"max_length={self.max_length}: at least 1, for paths that cross anything")


def split_paths(probe: Probe, args: tuple[Any, ...], batch: dict[str, Any], ask: Ask) -> PathSplit:
    if any(int(cache.get_seq_length()) > 0 for cache in caches_in((args, batch))):
        raise RankprobeError("paths lead through all tokens: give the whole sequence, and no cache that holds its beginning")
    batch = uncached(probe.model, batch)
    try:
        return _Splitter(probe, args, batch, ask).split()
    except Strayed:
        return _Splitter(probe, args, batch, ask).split()  # a model that remembers something from its first forward on


class _Splitter:
    """One traced forward, and shadowed ones that know from it which ops matter."""

    def __init__(self, probe: Probe, args: tuple[Any, ...], batch: dict[str, Any], ask: Ask) -> None:
        self.model, self.args, self.batch, self.ask = probe.model, args, batch, ask
        self.masks = TokenMasks(self.model, args, batch, probe.options.mask)
        tracer, out = self._trace(probe)
        self.anatomy, stacks = dissect(tracer, type(self.model).__name__)
        self.blocks = [b for stack in stacks for b in stack]
        node, self.at = _target(tracer, self.blocks, out, ask.at)
        maker = {made: number for number, op in enumerate(tracer.ops) for made in range(op.start, op.stop)}
        if node.id not in maker:
            raise RankprobeError(f"at={ask.at!r}: no op of the model makes it")
        self.maker = maker[node.id]
        self.ops = tracer.ops
        self.needed = needed_ops(tracer.ops, tracer.graph.nodes, [node])
        self.sites = tracer.attentions
        attended = {maker[n]: Crossing(self.sites.index(site), site.heads, site.inner) for n, site in tracer.by_node.items()}
        mlps = {maker[n.id]: Crossing(-1) for n in _mlp_ends(tracer)}
        self.attended = attended
        self.crossings = (attended if "attention" in ask.by else {}) | (mlps if "mlp" in ask.by else {})
        self.lone = len(stacks) == 1 and not any(a.cross for a in self.sites)
        self.wide = torch.float64 if any(p.dtype == torch.float64 for p in self.model.parameters()) else torch.float32

    def _trace(self, probe: Probe) -> tuple[Tracer, Any]:
        """A forward that is seen op by op and measured nowhere."""
        run = Run(dataclasses.replace(probe.options, keep=frozenset()), self.masks)
        tracer = Tracer(self.model, run, self.args, self.batch)
        with torch.no_grad():
            tracer.start()
            try:
                out = self.model(*self.args, **self.batch)
            finally:
                tracer.stop()
            with quiet():
                tracer.finish(out)
        return tracer, out

    def follow(self, crossings: Mapping[int, Crossing], route: Route, sources: bool = False) -> tuple[Shadow, Tensor, Parts]:
        shadow = Shadow(self.ops, self.needed, crossings, {self.maker: "at"}, route=route, sources=sources, wide=self.wide)
        with torch.no_grad():
            for tensor in tensors_in((self.args, self.batch)):
                shadow.source(tensor)
            with shadow:
                self.model(*self.args, **self.batch)
        whole, parts = shadow.kept["at"]
        return shadow, whole, parts

    def follow_lengths(self) -> tuple[Shadow, Tensor, Parts]:
        return self.follow(self.crossings, by_length(self.ask.max_length), self.ask.split_bias)

    def split(self) -> PathSplit:
        ask = self.ask
        shadow, whole, parts = self.follow_lengths()
        with torch.no_grad(), quiet():
            made = self._measure(shadow, whole, parts)
        if ask.heads:
            heads, calls = self._shares()
            made = dataclasses.replace(made, heads=heads, calls=calls)
        if ask.strongest:
            made = dataclasses.replace(made, strongest=tuple(self._strongest(ask.strongest)))
        return made

    def _shares(self) -> tuple[tuple[HeadShare, ...], tuple[HeadShare, ...]]:
        """Of each head, and of each attention call."""
        _, whole, parts = self.follow(self.attended, by_last_head)
        size, names = self._norm(whole), [site.key for site in self.sites]
        heads: list[HeadShare] = []
        together: dict[int, Tensor] = {}
        with quiet():
            for label, part in sorted(((k, p) for k, p in parts.items() if k.heads), key=lambda kp: kp[0]):
                call, head = label.heads[0]
                heads.append(HeadShare(names[call], head, self._norm(part) / size))
                together[call] = together[call] + part if call in together else part
            calls = tuple(HeadShare(names[call], None, self._norm(part) / size) for call, part in together.items())
        return tuple(heads), calls

    # -- measuring ------------------------------------------------------------------------------------------------

    def _mask(self, x: Tensor) -> Tensor | None:
        if x.dim() != 3:
            return None
        return self.masks.find_any(x)

    def _kept(self, x: Tensor) -> Tensor:
        """Without padding."""
        mask = self._mask(x)
        return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)

    def _norm(self, x: Tensor) -> float:
        return float(torch.linalg.vector_norm(self._kept(x).double()))

    def _residual(self, x: Tensor | None) -> float:
        if x is None or x.dim() != 3 or x.shape[1] < 2:
            return NAN
        return float(metrics.residual(x, self._mask(x)).nanmean())

    def _measure(self, shadow: Shadow, whole: Tensor, parts: Parts) -> PathSplit:
        ask, size = self.ask, self._norm(whole)
        wide = whole.to(self.wide)
        lengths = range(1 + max((k.length for k in parts), default=0))
        lost = [p for k, p in parts.items() if k.source == "unattributed"]
        by_length: list[Tensor | None] = []
        for length in lengths:
            mine = [p for k, p in parts.items() if k.length == length and k.source != "unattributed"]
            by_length.append(torch.stack(mine).sum(0) if mine else None)
        total = torch.stack([p.double() for p in parts.values()]).sum(0)

        def projection(part: Tensor | None) -> float:
            return 0.0 if part is None else float((self._kept(part).double() * self._kept(wide).double()).sum()) / size**2

        bias = [self._norm(parts[label]) / size if (label := Label("bias", n)) in parts else 0.0 for n in lengths]
        counted = [a.heads for a in self.sites] if ask.by == ("attention",) and self.lone else None
        return PathSplit(
            model=type(self.model).__name__,
            at=self.at,
            by=ask.by,
            lengths=tuple(lengths),
            share=tuple(0.0 if p is None else self._norm(p) / size for p in by_length),
            residual=tuple(map(self._residual, by_length)),
            projection=tuple(map(projection, by_length)),
            paths=_path_counts(counted, len(lengths), ask.max_length),
            completeness=self._norm(wide.double() - total) / size,
            unattributed=self._norm(torch.stack(lost).sum(0)) / size if lost else 0.0,
            unruled=dict(shadow.unruled),
            precision=str(min(shadow.narrowest, whole.dtype, key=lambda d: -torch.finfo(d).eps)).removeprefix("torch."),
            capped=ask.max_length is not None and lengths[-1] == ask.max_length,
            bias_share=tuple(bias) if ask.split_bias else (),
            components=parts if ask.components else None,
            **(self._answers(wide, by_length) if self.at == "logits" or ask.labels is not None else {}),
        )

    def _answers(self, whole: Tensor, parts: Sequence[Tensor | None]) -> dict[str, Any]:
        """What each length says, and what all up to it say."""
        mask, labels = self._mask(whole), self.ask.labels
        if labels is not None and labels.dim() != whole.dim() - 1:
            raise RankprobeError(f"labels of shape {tuple(labels.shape)} for answers of shape {tuple(whole.shape)}")
        if labels is not None and whole.dim() == 3 and answers_for_next(self.anatomy):
            mask = None if mask is None else mask[:, 1:]  # each token's answer is for the next
            whole, labels = whole[:, :-1], labels[:, 1:]
            parts = [None if p is None else p[:, :-1] for p in parts]
        counted = torch.ones(whole.shape[:-1], dtype=torch.bool, device=whole.device) if mask is None else mask
        if labels is not None:
            counted = counted & (labels != -100)
        target = whole[counted]
        right = None if labels is None else labels[counted]
        chosen = (target.argmax(-1) if right is None else right).unsqueeze(-1)

        def kept(answer: Tensor) -> Kept:
            p, q = target.log_softmax(-1), answer.log_softmax(-1)
            kl = float((p.exp() * (p - q)).sum(-1).mean())
            same = float((answer.argmax(-1) == target.argmax(-1)).float().mean())
            if right is None:
                return Kept(kl, same)
            loss = float(torch.nn.functional.cross_entropy(answer, right))
            return Kept(kl, same, loss, float((answer.argmax(-1) == right).float().mean()))

        contribution, only, up_to = [], [], []
        so_far = torch.zeros_like(target)
        for part in parts:
            mine = torch.zeros_like(target) if part is None else part[counted]
            so_far = so_far + mine
            contribution.append(float((mine.gather(-1, chosen).squeeze(-1) - mine.mean(-1)).mean()))
            only.append(kept(mine))
            up_to.append(kept(so_far))
        return {"contribution": tuple(contribution), "only": tuple(only), "up_to": tuple(up_to)}

    # -- single paths ---------------------------------------------------------------------------------------------

    def _strongest(self, count: int) -> Iterator[SinglePath]:
        """A beam search: from the strongest paths of each length, every step they can take."""
        home = {id(a): number for number, block in enumerate(self.blocks) for a in block.attentions}
        beam: list[tuple[tuple[int, int], ...]] = [()]
        found: dict[tuple[tuple[int, int], ...], float] = {}
        while beam:
            stepped: dict[tuple[tuple[int, int], ...], float] = {}
            for path in beam:
                _, whole, parts = self.follow(self.attended, onward(path))
                with quiet():
                    size = self._norm(whole)
                    for label, part in parts.items():
                        if len(label.heads) == len(path) + 1 or label.heads == () == path:
                            stepped[label.heads] = self._norm(part) / size
            found |= stepped
            weakest = sorted(found.values(), reverse=True)[:count][-1]
            best = sorted((p for p in stepped if p), key=lambda p: -stepped[p])[:count]
            beam = [p for p in best if stepped[p] >= weakest]
        for path in sorted(found, key=lambda p: -found[p])[:count]:
            crossed = {home[id(self.sites[call])]: head for call, head in path if id(self.sites[call]) in home}
            widths = {home[id(self.sites[call])]: self.sites[call].heads for call, _ in path if id(self.sites[call]) in home}
            others = [n for n, block in enumerate(self.blocks) if n not in crossed and any("attention" in s.kinds for s in block.skips)]
            asked: dict[str, Any] = {
                "skip": {"attention": list(crossed)},
                "heads": {block: [h for h in range(widths[block]) if h != head] for block, head in crossed.items()},
                "attention": others,
            }
            steps = tuple((home.get(id(self.sites[call]), -1), head) for call, head in path)
            yield SinglePath(steps, found[path], {k: v for k, v in asked.items() if v and v != {"attention": []}})


def _target(tracer: Tracer, blocks: list[Found], out: Any, at: str | int) -> tuple[Node, str]:
    names = {
        "output": ("logits", "last_hidden_state"),
        "logits": ("logits",),
        "hidden": ("last_hidden_state",),
        "pooled": ("pooler_output",),
    }
    node: Node | None = None
    name = ""
    if isinstance(at, int):
        if not -len(blocks) <= at < len(blocks):
            raise RankprobeError(f"at={at}: the model's blocks are 0 to {len(blocks) - 1}")
        node, name = blocks[at].node, f"the output of {blocks[at].call.name or 'the model'}"
    elif at not in names:
        raise RankprobeError(f"at={at!r}: may be {', '.join(map(repr, names))} or a block's number")
    else:
        named = [n for n in names[at] if isinstance(out, Mapping) and isinstance(out.get(n), Tensor)]
        if named:
            node, name = tracer.graph.node(out[named[0]]), named[0]
        elif at == "hidden" and blocks:
            node, name = blocks[-1].node, "the last block's output"
        elif at == "output" or (at == "logits" and isinstance(out, Tensor)):
            first = next((t for t in tensors_in(out) if t.is_floating_point()), None)
            node, name = (None if first is None else tracer.graph.node(first)), at
    if node is None:
        raise RankprobeError(f"at={at!r}: the model gives no such output")
    return node, name


def _mlp_ends(tracer: Tracer) -> list[Node]:
    """The last products of MLP branches: what is added behind them, biases say, has crossed nothing yet."""
    found: dict[int, Node] = {}
    for skip in tracer.skips:
        if "mlp" not in skip.kinds or "attention" in skip.kinds:
            continue
        earlier: set[int] = set()  # what a product further on is made of
        for node in reversed(between(skip.skip_node, skip.branch_node)):
            if node.by_weight and node.kind is Kind.MULTIPLY and node.id not in earlier:
                found[node.id] = node
            if node.id in earlier or node.by_weight:
                earlier.update(p.id for p in node.parents)
    return list(found.values())


def _path_counts(heads: list[int] | None, lengths: int, cap: int | None) -> tuple[int, ...]:
    """How many ways there are to cross k of the attention calls of a stack, by one head each: the coefficients of Π (1 + H·t)."""
    if heads is None:
        return ()
    counts = [1]
    for h in heads:
        counts = [a + h * b for a, b in zip([*counts, 0], [0, *counts], strict=True)]
    if cap is not None and cap < len(counts):
        counts = [*counts[:cap], sum(counts[cap:])]
    return tuple((*counts, *[0] * lengths)[:lengths])
