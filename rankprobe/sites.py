"""What the traced forward writes down: module calls, attention calls and skip connections, and where to find them again.

A site's place is a *tap*: after which module's entry or exit, and as which op of its name since then, it came.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from rankprobe.graph import Node
from rankprobe.measure import Held, Layout

if TYPE_CHECKING:
    from rankprobe.weights import Projections

__all__ = ["AttentionSite", "Call", "Event", "SkipSite", "Sum", "Tap", "call_key", "hidden_key", "input_key", "leaves", "part_key"]


@dataclass(frozen=True, slots=True)
class Event:
    """A module is entered or left, for the `nth` time in this forward."""

    call: int
    module: nn.Module
    entry: bool
    nth: int


@dataclass(frozen=True, slots=True)
class Tap:
    """The `ordinal`-th op called `op` after event number `event`."""

    event: int
    op: str
    ordinal: int


@dataclass(slots=True, eq=False)
class Call:
    """A module being run: a site is a call and not a module, since ALBERT runs one module twelve times."""

    id: int
    parent: int
    name: str
    kind: str
    nth: int
    module: nn.Module
    opaque: bool = False  # takes a shortcut only while nobody hooks it
    exit: int = -1
    output: Node | None = None
    output_place: int = -1  # which of the tensors it returned is the hidden state
    before: Held | None = None  # the stream at its first skip connection


@dataclass(slots=True, eq=False)
class AttentionSite:
    key: str
    call: int
    tap: Tap
    op: str
    operand: int | None  # which operand is the matrix; None: a fused kernel
    flipped: bool
    lead: tuple[int, ...]
    queries: int
    keys: int
    width: int  # features of a value
    heads: int = 0
    inner: int = 1
    kv_heads: int | None = None
    causal: bool = False
    cross: bool = False
    decoder: bool = False
    node: Node | None = None
    key_nodes: tuple[Node, ...] = ()
    projections: Projections | None = None
    reach: Tensor | None = None  # largest distance looked back and ahead: tells causal and window, on the device

    def settle(self) -> None:
        """Tell heads from samples among what stands before queries and keys."""
        groups = math.prod(self.lead)
        if self.heads and len(self.lead) > 1 and self.heads in self.lead:
            axis = len(self.lead) - 1 - self.lead[::-1].index(self.heads)
        elif self.heads and len(self.lead) == 1 and groups % self.heads == 0:
            return
        elif len(self.lead) > 1:
            axis = len(self.lead) - 1
        else:
            self.heads = 1
            return
        self.heads = self.lead[axis]
        self.inner = math.prod(self.lead[axis + 1 :])


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """An addition as the model makes it, and what its operands are, by position.

    `x + (attention + mlp)` and `(x + attention) + mlp` are sums in a sum: a part is taken away where it comes in.
    """

    key: str
    site: str  # the skip connection it belongs to
    tap: Tap
    inplace: bool
    terms: dict[int, str | Sum]  # "skip", what a branch holds, or a sum


@dataclass(slots=True, eq=False)
class SkipSite:
    key: str
    call: int
    tap: Tap
    skip: int  # position of the operand that is carried over
    branch: int
    kinds: tuple[str, ...]  # what the branch holds: attention, mlp, conv, linear
    inplace: bool
    skip_node: Node
    branch_node: Node
    layout: Layout
    decoder: bool
    gated: bool = False
    routed: bool = False
    parallel: bool = False
    pre_norm: bool = False
    inner_norm: bool = False
    attentions: tuple[AttentionSite, ...] = ()
    sum: Sum | None = None
    node: Node | None = None


def leaves(term: str | Sum) -> set[str]:
    """What is added up, in a sum and the sums inside it."""
    return {term} if isinstance(term, str) else {kind for part in term.terms.values() for kind in leaves(part)}


def hidden_key(node: Node) -> str:
    return f"@{node.id}"


def input_key(skip: str) -> str:
    return f"{skip}/input"


def part_key(skip: str, end: Node) -> str:
    return f"@{skip}>{end.id}"


def call_key(call: int) -> str:
    return f"@call{call}"
