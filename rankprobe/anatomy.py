"""What was found in a model: attention calls, skip connections, MLPs, blocks and stacks, in order of execution.

    print(probe.anatomy)

A *block* is the innermost module call that holds an attention branch and an MLP branch with their skip connections; where a
model has no such module, the skip connections themselves are grouped. A *stack* is a run of blocks whose streams descend
from each other: an encoder, a decoder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.tree import Tree

from rankprobe.discover import Tracer
from rankprobe.graph import FUSED_LAYER, Kind, Node, between
from rankprobe.sites import AttentionSite, Call, SkipSite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Anatomy", "AttentionCall", "Block", "Skip", "Stack", "dissect"]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call. `window` is how many tokens back or ahead it reaches where that is less than all."""

    key: str
    heads: int
    kv_heads: int | None
    queries: int
    keys: int
    cross: bool
    fused: bool
    op: str
    over: str = "tokens"
    is_causal: bool = False
    reach: Tensor | None = None

    @property
    def causal(self) -> bool:
        """Whether no query looks ahead. Reads the device, once."""
        return self.is_causal or (self.reach is not None and self.keys > 1 and int(self.reach[1]) == 0)

    @property
    def window(self) -> int | None:
        if self.reach is None:
            return None
        back = int(self.reach[0])
        return back + 1 if back < self.keys - 1 else None

    def describe(self) -> str:
        words = ["cross-attention" if self.cross else "attention", f"{self.heads} heads"]
        if self.kv_heads and self.kv_heads != self.heads:
            words.append(f"{self.kv_heads} for keys and values")
        if self.over != "tokens":
            words.append(f"over {self.over}")
        elif self.causal:
            words.append("causal")
        if self.over == "tokens" and self.window:
            words.append(f"window {self.window}")
        words.append("fused kernel" if self.fused else "softmax")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Skip:
    """An addition skip + branch. `skip` says which operand is carried over, `kinds` what the branch holds."""

    key: str
    kinds: tuple[str, ...]
    skip: int
    norm: str  # pre, post, sandwich, branch (at the branch's end) or none
    gated: bool = False
    routed: bool = False
    parallel: bool = False
    attentions: tuple[AttentionCall, ...] = ()

    @property
    def name(self) -> str:
        return "+".join(self.kinds)

    def describe(self) -> str:
        words = []
        for kind in self.kinds:
            if kind == "mlp":
                words.append("mixture-of-experts" if self.routed else "gated MLP" if self.gated else "MLP")
            elif kind == "attention":
                words.append("cross-attention" if any(a.cross for a in self.attentions) else "attention")
            else:
                words.append(kind)
        norm = {"none": "no norm", "branch": "norm at the branch's end"}.get(self.norm, f"{self.norm}-norm")
        return f"skip + {' + '.join(words)} ({norm}{', parallel' if self.parallel else ''})"


@dataclass(frozen=True, slots=True)
class Block:
    index: int
    name: str
    key: str
    kind: str
    skips: tuple[Skip, ...]
    attentions: tuple[AttentionCall, ...]

    @property
    def parallel(self) -> bool:
        return any(s.parallel for s in self.skips)


@dataclass(frozen=True, slots=True)
class Stack:
    name: str
    role: str  # encoder, decoder or stack
    input_key: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Anatomy:
    model: str
    stacks: tuple[Stack, ...]
    outside: tuple[Skip, ...] = ()
    loose: tuple[AttentionCall, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for stack in self.stacks for block in stack.blocks)

    @property
    def attentions(self) -> tuple[AttentionCall, ...]:
        return tuple(a for block in self.blocks for a in block.attentions) + self.loose

    @property
    def skips(self) -> tuple[Skip, ...]:
        return tuple(s for block in self.blocks for s in block.skips) + self.outside

    @property
    def counts(self) -> dict[str, int]:
        skips = self.skips
        return {
            "blocks": len(self.blocks),
            "attention calls": len(self.attentions),
            "skip connections": len(skips),
            "MLP branches": sum("mlp" in s.kinds for s in skips),
        }

    def __rich__(self) -> Tree:
        found = ", ".join(f"{n} {what}" for what, n in self.counts.items())
        tree = Tree(f"[bold]{escape(self.model)}[/]: {found}")
        for stack in self.stacks:
            branch = tree.add(f"{stack.role} [bold]{escape(stack.name or self.model)}[/], {len(stack.blocks)} blocks")
            for first, last in _runs(stack.blocks):
                name = escape(first.name)
                span = f"{name} … {escape(last.name)}" if last is not first else name
                node = branch.add(f"{span} [dim]{escape(first.kind)}[/]")
                told = set()
                for skip in first.skips:
                    leaf = node.add(skip.describe())
                    for call in skip.attentions:
                        told.add(call.key)
                        leaf.add(call.describe())
                for call in first.attentions:
                    if call.key not in told:
                        node.add(f"{call.describe()}, no skip connection found")
        if self.outside:
            rest = tree.add("outside blocks")
            for skip in self.outside:
                rest.add(f"{escape(skip.key.split('#')[0])}: {skip.describe()}")
        for call in self.loose:
            tree.add(f"{escape(call.key.split('#')[0])}: {call.describe()}, outside blocks")
        for name in self.unknown:
            tree.add(f"not read: attention kernel [bold]{escape(name)}[/]")
        return tree

    def __str__(self) -> str:
        from rankprobe.render import plain

        return plain(self)


def _runs(blocks: tuple[Block, ...]) -> list[tuple[Block, Block]]:
    """First and last of each run of blocks that look the same."""
    runs: list[tuple[Block, Block]] = []
    look = None
    for block in blocks:
        this = (block.kind, [s.describe() for s in block.skips], [a.describe() for a in block.attentions])
        if runs and this == look:
            runs[-1] = (runs[-1][0], block)
        else:
            runs.append((block, block))
        look = this
    return runs


# -- from a trace to an anatomy ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Found:
    """A block and where its output is to be had: a call's return value, or the result of a site's own op."""

    call: Call
    skips: list[SkipSite]
    attentions: list[AttentionSite]
    whole: bool  # the block is the call, not a part of it
    part: int = 0

    @property
    def key(self) -> str:
        part = f"/{self.part}" if not self.whole else ""
        return f"{self.call.name or 'model'}#{self.call.nth}{part}/out"

    @property
    def by_return(self) -> bool:
        return self.whole and self.call.output is not None and not self.call.opaque

    @property
    def node(self) -> Node | None:
        if self.by_return:
            return self.call.output
        return self.skips[-1].node if self.skips else self.attentions[-1].node


def find_blocks(tracer: Tracer) -> list[Found]:
    calls, skips = tracer.calls, tracer.skips
    has_mlp = any("mlp" in s.kinds for s in skips)

    def up(call: int) -> list[int]:
        chain = []
        while call >= 0:
            chain.append(call)
            call = calls[call].parent
        return chain

    inside: dict[int, list[SkipSite]] = {}
    for site in skips:
        for number in up(site.call):
            inside.setdefault(number, []).append(site)

    homes: dict[int, None] = {}
    skipped = {id(a) for s in skips for a in s.attentions}
    for site in skips:
        if "attention" not in site.kinds:
            continue
        wanted = [c for c in up(site.call) if not has_mlp or any("mlp" in s.kinds for s in inside[c])]
        homes[wanted[0] if wanted else site.call] = None
    for attention in tracer.attentions:
        if id(attention) not in skipped and (attention.op == FUSED_LAYER or not skips):
            homes[attention.call] = None
    # A call that holds other blocks is no block; the attention that led to it (a pooling head, say) stands outside.
    nested = {h for h in homes if any(h != other and tracer.within(other, h) for other in homes)}
    found: list[Found] = []
    for home in (h for h in homes if h not in nested):
        mine = inside.get(home, [])
        attentions = [a for a in tracer.attentions if tracer.within(a.call, home)]
        groups = _groups(mine)
        for part, group in enumerate(groups or [[]]):
            held = {id(a) for s in group for a in s.attentions}
            those = attentions if len(groups) < 2 else [a for a in attentions if id(a) in held]
            found.append(Found(calls[home], group, those, len(groups) < 2, part))
    # Brothers of blocks that have a stream but no attention: state-space or feed-forward layers of a hybrid.
    parents = {f.call.parent for f in found if f.whole}
    homes_found = {f.call.id for f in found}
    for call in calls:
        if call.parent in parents and call.id not in homes_found and call.output is not None:
            mine = inside.get(call.id, [])
            if any("mlp" in s.kinds for s in mine) and not any(tracer.within(h, call.id) for h in homes_found):
                found.append(Found(call, mine, [a for a in tracer.attentions if tracer.within(a.call, call.id)], True))
    return sorted(found, key=lambda f: f.node.id if f.node is not None else f.call.id)


def _groups(sites: list[SkipSite]) -> list[list[SkipSite]]:
    """Skip connections of one call in rounds: attention (self, cross, …), then MLP; the next attention starts a new one.
    Without MLPs, every self-attention does."""
    groups: list[list[SkipSite]] = []
    bare = not any("mlp" in s.kinds for s in sites)
    for site in sites:
        attends = "attention" in site.kinds and not (bare and any(a.cross for a in site.attentions))
        done = groups and any("attention" in s.kinds for s in groups[-1]) and (bare or "mlp" in groups[-1][-1].kinds)
        if not groups or (attends and done):
            groups.append([])
        groups[-1].append(site)
    return groups


def find_stacks(blocks: list[Found]) -> list[list[Found]]:
    stacks: list[list[Found]] = []
    for block in blocks:
        start = block.skips[0].skip_node if block.skips else None
        for stack in reversed(stacks):
            end = stack[-1].node
            if end is not None and (start is None or start is end or (start.id > end.id and between(end, start))):
                stack.append(block)
                break
        else:
            stacks.append([block])
    return stacks


def dissect(tracer: Tracer, model: str) -> tuple[Anatomy, list[list[Found]]]:
    """The anatomy, and for each stack the blocks with what a watcher needs to find them again."""
    blocks = find_blocks(tracer)
    stacks = find_stacks(blocks)
    calls = {id(a): _attention(a) for a in tracer.attentions}
    made: list[Stack] = []
    index = 0
    crossed = any(a.cross for b in blocks for a in b.attentions)
    for stack in stacks:
        out = []
        for found in stack:
            skips = tuple(_skip(s, found, i, calls) for i, s in enumerate(found.skips))
            attentions = tuple(replace(calls[id(a)], over=_over(a, found)) for a in found.attentions)
            by_key = {a.key: a for a in attentions}
            skips = tuple(replace(s, attentions=tuple(by_key.get(a.key, a) for a in s.attentions)) for s in skips)
            out.append(Block(index, _name(found, tracer), found.key, found.call.kind, skips, attentions))
            index += 1
        cross = any(a.cross for b in stack for a in b.attentions)
        role = "decoder" if cross else "encoder" if crossed else "stack"
        first = stack[0]
        key = f"{first.key}/input" if first.skips else ""
        made.append(Stack(_common([f.call.name for f in stack]), role, key, tuple(out)))
    used = {s.key for st in made for b in st.blocks for s in b.skips}
    held = {a.key for st in made for b in st.blocks for a in b.attentions}
    outside = tuple(_skip(s, None, 0, calls) for s in tracer.skips if s.key not in used)
    loose = tuple(calls[id(a)] for a in tracer.attentions if a.key not in held)
    return Anatomy(model, tuple(made), outside, loose, tuple(tracer.unknown)), stacks


def _attention(site: AttentionSite) -> AttentionCall:
    return AttentionCall(
        site.key, site.heads, site.kv_heads, site.queries, site.keys, site.cross, site.operand is None, site.op,
        is_causal=site.causal, reach=site.reach,
    )  # fmt: skip


def _over(site: AttentionSite, block: Found) -> str:
    """Tokens, or features where the matrix has a row for each feature of a head and not for each token."""
    if not block.skips or site.cross:
        return "tokens"
    layout, shape = block.skips[0].layout, block.skips[0].skip_node.shape
    if len(shape) < 3:
        return "tokens"
    features = shape[1] if layout.channels_first else shape[-1]
    tokens = math.prod(shape) // features // shape[0]
    windows = math.prod(site.lead) // site.heads > shape[0]
    return "features" if site.heads * site.queries == features and site.queries != tokens and not windows else "tokens"


def _skip(site: SkipSite, block: Found | None, position: int, calls: dict[int, AttentionCall]) -> Skip:
    following = None
    if block is not None:
        following = block.skips[position + 1].skip_node if position + 1 < len(block.skips) else block.node
    way = between(site.node, following) if site.node is not None and following is not None and following.id > site.node.id else []
    if any(n.kind is Kind.NORM for n in way) and not any(n.by_weight for n in way):
        norm = "post"
    elif site.pre_norm:
        norm = "sandwich" if site.inner_norm else "pre"
    else:
        norm = "branch" if site.inner_norm else "none"
    attentions = tuple(calls[id(a)] for a in site.attentions)
    return Skip(site.key, site.kinds, site.skip, norm, site.gated, site.routed, site.parallel, attentions)


def _name(found: Found, tracer: Tracer) -> str:
    repeated = sum(c.module is found.call.module for c in tracer.calls) > 1
    name = found.call.name or "model"
    if repeated:
        name += f" (call {found.call.nth + 1})"
    return name if found.whole else f"{name} part {found.part}"


def _common(names: list[str]) -> str:
    """The module path that all names share, without a trailing list's name where only the index differs."""
    split = [n.split(".") for n in names]
    if len(split) == 1:
        return ".".join(split[0][:-1]) or names[0]
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
