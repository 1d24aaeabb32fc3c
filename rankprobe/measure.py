"""One forward's measurements: what is computed at an attention call, at a skip connection and at a block's output.

The same functions serve the first forward, which finds the sites, and all later ones, which visit them. Nothing here waits
for the device, draws random numbers or keeps a graph for gradients.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import torch
from torch import Tensor

from rankprobe import attention as attn
from rankprobe import metrics
from rankprobe.attention import Attention
from rankprobe.metrics import Tokens
from rankprobe.padding import TokenMasks

__all__ = ["HIDDEN_METRICS", "SPECTRUM_METRICS", "Layout", "Options", "Run", "measuring", "quiet"]

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

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Options:
    heads: bool = True
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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No gradients, no autocast to half precision, and no probe looking."""
    _busy.depth += 1
    try:
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for device in ("cpu", torch.accelerator.current_accelerator(check_available=False)):
                kind = getattr(device, "type", device)
                if kind is not None and torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        _busy.depth -= 1


def _careful(method: Callable[P, None]) -> Callable[P, None]:
    """A measurement that fails must not fail the model: it is written down, by site, and told in the report."""

    @functools.wraps(method)
    def careful(*args: P.args, **kwargs: P.kwargs) -> None:
        run, site = args[0], args[1]
        assert isinstance(run, Run)
        try:
            method(*args, **kwargs)
        except Exception as error:
            if run.strict:
                raise
            run.problems[str(site)] = f"{type(error).__name__}: {error}"

    return careful


@dataclass
class Run:
    """Results of one forward, by site: `(quantities, samples)` each."""

    options: Options
    masks: TokenMasks
    results: dict[str, Tensor] = field(default_factory=dict)
    attentions: dict[str, Tensor] = field(default_factory=dict)
    hidden_states: dict[str, Tensor] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    single: set[str] = field(default_factory=set)  # sites that had one token only
    strict: bool = False
    _shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # of the last self-attention: groups, inner groups, queries, keys
    _recent: list[tuple[tuple[Any, ...], Tensor, Tokens]] = field(default_factory=list)

    def tokens(self, x: Tensor, layout: Layout, decoder: bool) -> Tokens:
        """`x` as (batch, tokens, features) without padding. The last few are remembered: a block's output is the next
        one's skip."""
        x = self._padded(x)
        place = (x.data_ptr() if not _is_fake(x) else id(x), x.shape, x.stride(), None if x.is_inference() else x._version)
        for known, held, found in self._recent:
            if known == place and held.device == x.device:
                return found
        laid = self._lay_out(x.detach(), layout)
        mask = self.masks.find(laid.shape[0], laid.shape[1], decoder, self._shape[3])
        found = Tokens(laid, mask)
        self._recent = [*self._recent[-1:], (place, x, found)]
        return found

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
        groups, heads, queries, _ = self._shape
        first, second = x.shape[0], x.shape[1]
        sequence_first = first == queries != second and groups % second == 0 and (heads == 0 or second * heads == groups)
        return x.transpose(0, 1) if sequence_first else x

    @_careful
    def hidden(self, site: str, x: Tensor, layout: Layout, decoder: bool, before: Tokens | None = None) -> None:
        with quiet():
            t = self.tokens(x, layout, decoder)
            if "hidden" in self.options.keep:
                self.hidden_states[site] = self._padded(x).detach().clone()
            if t.x.shape[1] < 2:
                self.single.add(site)
                return
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
            self.results[site] = torch.stack(rows)
            if before is not None and before.x.shape == t.x.shape:
                self.results[f"{site}/influence"] = metrics.block_influence(before, t).unsqueeze(0)

    @_careful
    def skip(self, site: str, skip: Tensor, branch: Tensor, layout: Layout, decoder: bool) -> None:
        with quiet():
            stream = self.tokens(skip, layout, decoder)
            size = metrics.Tokens(self._lay_out(self._padded(branch).detach(), layout), stream.mask).size
            self.results[site] = (size / stream.size).unsqueeze(0)

    @_careful
    def attention(self, site: str, call: Attention, decoder: bool, heads: int = 0, inner: int = 1) -> None:
        """`heads` 0: not known yet; results stay `(quantities, groups)` and are arranged later."""
        with quiet():
            if len(call.lead) == 1:
                samples = self.masks.samples(call.groups, call.queries)
                if samples:
                    call = _with_lead(call, (samples, call.groups // samples))
            self.masks.infer(attn.key_mask(call))
            self._shape = (call.groups, heads * inner or (call.lead[-1] if len(call.lead) > 1 else 0), call.queries, call.keys)
            mask = self.masks.find(call.lead[0], call.queries, decoder, call.keys)
            if "attention" in self.options.keep:
                full = attn.matrix(call)
                self.attentions[site] = full if not heads else by_head(full, heads, inner)
            if self.options.heads:
                rows = attn.head_metrics(call, mask)
                if self.options.spectrum:
                    rows = torch.cat((rows, attn.spectral_gap(call, mask)))
                self.results[site] = rows if not heads else arrange(rows, heads, inner)


def arrange(rows: Tensor, heads: int, inner: int) -> Tensor:
    """`(quantities, groups)` to `(quantities × heads, samples)`."""
    split = rows.view(rows.shape[0], -1, heads, inner)
    return split.permute(0, 2, 1, 3).reshape(rows.shape[0] * heads, -1)


def by_head(full: Tensor, heads: int, inner: int) -> Tensor:
    """`(groups, queries, keys)` to `(samples, heads, queries, keys)`."""
    split = full.view(-1, heads, inner, *full.shape[1:])
    return split.transpose(1, 2).flatten(0, 1)


def _with_lead(call: Attention, lead: tuple[int, ...]) -> Attention:
    import dataclasses

    return dataclasses.replace(call, lead=lead)


def _nested_mask(x: Tensor) -> Tensor:
    sizes = x._nested_tensor_size()[:, 0]
    longest = x.to_padded_tensor(0.0).shape[1]
    return (torch.arange(longest) < sizes.unsqueeze(1)).to(x.device)


def _is_fake(x: Tensor) -> bool:
    return type(x) is not Tensor and type(x).__name__ == "FakeTensor"
