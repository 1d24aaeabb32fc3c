"""One forward's measurements: what is computed at an attention call, at a skip connection and at a block's output.

The same functions serve the first forward, which finds the sites, and all later ones, which visit them. Nothing here waits
for the device, draws random numbers or keeps a graph for gradients.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rankprobe import attention as attn
from rankprobe import metrics
from rankprobe.attention import Attention
from rankprobe.metrics import Tokens
from rankprobe.padding import TokenMasks

__all__ = ["HIDDEN_METRICS", "SPECTRUM_METRICS", "Held", "Layout", "Options", "Run", "measuring", "quiet"]

HIDDEN_METRICS = (
    "residual",
    "residual_fro",
    "cosine",
    "effective_rank",
    "frequency_ratio",
    "token_norm",
    "unfinished",
)
SPECTRUM_METRICS = ("stable_rank",)

# Elements up to which a measurement is put off and done together with others, and how many may wait in all: 16 MB.
SMALL = 1 << 16
WAITING = 1 << 22


@dataclass(frozen=True, slots=True)
class Options:
    heads: bool = False
    spectrum: bool = False
    keep: frozenset[str] = frozenset()
    centre: metrics.Centre = "mean"
    mask: Callable[..., Tensor | None] | None = None

    @property
    def hidden_metrics(self) -> tuple[str, ...]:
        return HIDDEN_METRICS + (SPECTRUM_METRICS if self.spectrum else ())

    @property
    def head_metrics(self) -> tuple[str, ...]:
        return attn.HEAD_METRICS + (attn.SPECTRAL_METRICS if self.spectrum else ())


@dataclass(frozen=True, slots=True)
class Layout:
    """How a hidden state is laid out, where it is not (batch, tokens, features)."""

    channels_first: bool = False


class _Busy(threading.local):
    depth = 0


_busy = _Busy()


def measuring() -> bool:
    """Whether this thread is inside a measurement, whose ops are no part of the model: another probe must not see them."""
    return _busy.depth > 0


class quiet:
    """No gradients, no autocast to half precision, and no probe looking. Entered at every site, so it is kept lean."""

    __slots__ = ("_autocast", "_grad")

    def __enter__(self) -> None:
        _busy.depth += 1
        if _busy.depth == 1:
            self._grad = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)
            self._autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
            for kind in self._autocast:
                torch.set_autocast_enabled(kind, False)

    def __exit__(self, *_: object) -> None:
        _busy.depth -= 1
        if _busy.depth == 0:
            torch._C._set_grad_enabled(self._grad)
            for kind in self._autocast:
                torch.set_autocast_enabled(kind, True)


class Held:
    """A hidden state as (batch, tokens, features) with its token mask, kept until it is measured."""

    __slots__ = ("_tokens", "given", "mask", "small", "x")

    def __init__(self, given: Tensor, x: Tensor, mask: Tensor | None) -> None:
        self.given = given
        self.small = x.numel() <= SMALL
        self.x = x.clone() if self.small else x  # what is measured later must not change until then
        self.mask = mask
        self._tokens: Tokens | None = None

    @property
    def tokens(self) -> Tokens:
        if self._tokens is None:
            self._tokens = Tokens(self.x, self.mask)
        return self._tokens


@dataclass(slots=True)
class _Batch:
    """Measurements put off because they look alike: one function for all, and for each its site and tensors."""

    measure: Callable[[list[Tensor], int], Tensor]
    arrange: tuple[int, int]
    parts: list[tuple[Tensor, ...]] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)


@dataclass
class Run:
    """Results of one forward, by site: `(quantities, samples)` each.

    Where tensors are small, what a measurement costs is its dozens of ops and not their arithmetic. Those are put off, and
    the sites of a forward that look alike are measured together by `finish`.
    """

    options: Options
    masks: TokenMasks
    strict: bool = False
    heads: bool = False  # whether this forward measures them
    theory: bool = False  # whether it measures what the theorem speaks of
    results: dict[str, Tensor] = field(default_factory=dict)
    attentions: dict[str, Tensor] = field(default_factory=dict)
    hidden_states: dict[str, Tensor] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    single: set[str] = field(default_factory=set)  # sites that had one token only
    _shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # of the last attention: groups, groups a sample, queries, keys
    _recent: tuple[tuple[Any, ...], Tensor, Held] | None = None
    _later: dict[tuple[Any, ...], _Batch] = field(default_factory=dict)
    _waiting: int = 0

    def attempt(self, site: str, do: Callable[..., object], *args: Any) -> None:
        """A measurement that fails must not fail the model: it is written down, by site, and told in the report."""
        try:
            with quiet():
                do(*args)
        except Exception as error:
            if self.strict:
                raise
            self.problems[site] = f"{type(error).__name__}: {error}"

    # -- hidden states --------------------------------------------------------------------------------------------

    def hold(self, x: Tensor, layout: Layout, decoder: bool) -> Held:
        """The last is remembered: a block's output is the next one's skip."""
        x = self._padded(x)
        place = (x.data_ptr() if not _is_fake(x) else id(x), x.shape, x.stride(), None if x.is_inference() else x._version)
        if self._recent is not None and self._recent[0] == place and self._recent[1].device == x.device:
            return self._recent[2]
        laid = self._lay_out(x.detach(), layout)
        held = Held(x, laid, self.masks.find(laid.shape[0], laid.shape[1], decoder, self._shape[3]))
        self._recent = (place, x, held)
        return held

    def _padded(self, x: Tensor) -> Tensor:
        if not x.is_nested:
            return x
        self.masks.infer(_nested_mask(x))
        return x.to_padded_tensor(0.0)

    def _lay_out(self, x: Tensor, layout: Layout) -> Tensor:
        if x.dim() == 2:
            return x.unsqueeze(0)
        if x.dim() > 3:
            return x.flatten(2).mT if layout.channels_first else x.flatten(1, -2)
        if layout.channels_first:
            return x.mT
        groups, each, queries, _ = self._shape
        first, second = x.shape[0], x.shape[1]
        sequence_first = first == queries != second and groups % second == 0 and (each == 0 or second * each == groups)
        return x.transpose(0, 1) if sequence_first else x

    def hidden(self, site: str, held: Held, before: Held | None = None) -> None:
        """A hidden state, and how far it was turned since `before`."""
        if "hidden" in self.options.keep:
            self.hidden_states[site] = held.given.detach().clone()
        if held.x.shape[1] < 2:
            self.single.add(site)
            return
        self._measure(site, self._hidden_rows, held)
        if before is not None and before.x.shape == held.x.shape:
            self._measure(f"{site}/influence", _influence_rows, before, held)

    def skip(self, site: str, stream: Held, branch: Tensor, layout: Layout) -> None:
        branch = self._padded(branch).detach()
        self._measure(site, _ratio_rows, stream, Held(branch, self._lay_out(branch, layout), stream.mask))

    def contraction(self, site: str, given: Tensor, branch: Tensor, layout: Layout, decoder: bool) -> None:
        """What is not common to all tokens, in the paper's norm, before and after an attention layer, and the ratio."""
        sizes = []
        for x in (given, branch):
            laid = self._lay_out(x.detach(), layout)
            t = Tokens(laid, self.masks.find(laid.shape[0], laid.shape[1], decoder, self._shape[3]))
            sizes.append(metrics.common_norm(t.centred_induced))
        self.results[f"{site}/theory"] = torch.stack((*sizes, sizes[1] / sizes[0]))

    def _measure(self, site: str, rows: Callable[..., Tensor], *given: Held) -> None:
        first = given[0]
        if not first.small:
            self.results[site] = rows(*(held.tokens for held in given))
            return
        mask = first.mask

        def together(parts: list[Tensor], count: int) -> Tensor:
            wide = None if mask is None else mask.repeat(count, 1)
            return rows(*(Tokens(part, wide) for part in parts))

        key = (rows, first.x.shape, first.x.dtype, first.x.device, id(mask))
        self._put_off(key, together, site, tuple(held.x for held in given))

    def _hidden_rows(self, t: Tokens) -> Tensor:
        rows = [
            metrics.residual(t, centre=self.options.centre),
            metrics.residual(t, norm="fro"),
            metrics.cosine(t),
            metrics.participation_ratio(t),
            metrics.frequency_ratio(t),
            metrics.token_norm(t),
            t.size.isfinite().logical_not().to(t.x.dtype),
        ]
        if self.options.spectrum:
            rows.append(metrics.stable_rank(t))
        return torch.stack(rows)

    # -- attention ------------------------------------------------------------------------------------------------

    def attention(self, site: str, call: Attention, decoder: bool, heads: int = 0, inner: int = 1) -> None:
        """`heads` 0: not known yet; results stay `(quantities, groups)` and are arranged later."""
        if len(call.lead) == 1:
            samples = self.masks.samples(call.groups, call.queries)
            if samples:
                call = dataclasses.replace(call, lead=(samples, call.groups // samples))
        if not self.masks.known(call.lead[0], call.keys):
            self.masks.infer(attn.key_mask(call))
        self._shape = (call.groups, heads * inner or (call.lead[-1] if len(call.lead) > 1 else 0), call.queries, call.keys)
        if "attention" in self.options.keep:
            full = attn.matrix(call)
            self.attentions[site] = full if not heads else by_head(full, heads, inner)
        if not self.heads and not self.theory:
            return
        mask = self.masks.find(call.lead[0], call.queries, decoder, call.keys)
        if self.theory and heads:
            self.results[f"{site}/deviation"] = arrange(attn.deviation(call, mask), heads, inner)
        if not self.heads:
            return
        if call.groups * call.queries * call.keys > SMALL:
            rows = self._head_rows(call, mask)
            self.results[site] = rows if not heads else arrange(rows, heads, inner)
            return
        parts = call.parts()

        def together(parts: list[Tensor], count: int) -> Tensor:
            wide = None if mask is None else mask.repeat(count, 1)
            return self._head_rows(call.repeated(parts, count), wide)

        alike = ((t.shape, t.dtype, t.device) for t in parts)
        key = (call.lead, call.causal, call.scale, id(call.bias), id(mask), heads, inner, *alike)
        self._put_off(key, together, site, parts, (heads, inner))

    def _head_rows(self, call: Attention, mask: Tensor | None) -> Tensor:
        rows = attn.head_metrics(call, mask)
        return torch.cat((rows, attn.spectral_gap(call, mask))) if self.options.spectrum else rows

    # -- what was put off -----------------------------------------------------------------------------------------

    def _put_off(
        self,
        key: tuple[Any, ...],
        measure: Callable[[list[Tensor], int], Tensor],
        site: str,
        parts: tuple[Tensor, ...],
        arrange: tuple[int, int] = (0, 1),
    ) -> None:
        batch = self._later.get(key)
        if batch is None:
            batch = self._later[key] = _Batch(measure, arrange)
        batch.parts.append(parts)
        batch.sites.append(site)
        self._waiting += sum(t.numel() for t in parts)
        if self._waiting > WAITING:
            self.finish()

    def finish(self) -> None:
        """Measure what was put off."""
        later, self._later, self._waiting = self._later, {}, 0
        for batch in later.values():
            before = len(self.problems)
            self.attempt(batch.sites[0], self._finish, batch)
            if len(self.problems) > before:
                self.problems.update(dict.fromkeys(batch.sites, self.problems[batch.sites[0]]))

    def _finish(self, batch: _Batch) -> None:
        count = len(batch.parts)
        rows = batch.measure([torch.cat(part) if count > 1 else part[0] for part in zip(*batch.parts, strict=True)], count)
        heads, inner = batch.arrange
        for site, piece in zip(batch.sites, rows.split(rows.shape[1] // count, dim=1), strict=True):
            self.results[site] = arrange(piece, heads, inner) if heads else piece


def _influence_rows(before: Tokens, after: Tokens) -> Tensor:
    return metrics.block_influence(before, after).unsqueeze(0)


def _ratio_rows(skip: Tokens, branch: Tokens) -> Tensor:
    return metrics.branch_ratio(branch, skip).unsqueeze(0)


def arrange(rows: Tensor, heads: int, inner: int) -> Tensor:
    """`(quantities, groups)` to `(quantities × heads, samples)`."""
    split = rows.view(rows.shape[0], -1, heads, inner)
    return split.permute(0, 2, 1, 3).reshape(rows.shape[0] * heads, -1)


def by_head(full: Tensor, heads: int, inner: int) -> Tensor:
    """`(groups, queries, keys)` to `(samples, heads, queries, keys)`."""
    split = full.view(-1, heads, inner, *full.shape[1:])
    return split.transpose(1, 2).flatten(0, 1)


def _nested_mask(x: Tensor) -> Tensor:
    sizes = x._nested_tensor_size()[:, 0]
    longest = x.to_padded_tensor(0.0).shape[1]
    return (torch.arange(longest) < sizes.unsqueeze(1)).to(x.device)


def _is_fake(x: Tensor) -> bool:
    return type(x) is not Tensor and type(x).__name__ == "FakeTensor"
