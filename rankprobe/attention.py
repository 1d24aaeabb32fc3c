"""Attention matrices a few rows at a time, whichever kernel the model used.

Where the model made the matrix itself, its rows are read. Where a fused kernel kept it to itself, rows are computed again
from the same queries, keys, mask, bias and scale, in float32 or better: no full matrix need exist. `Attention` hides the
difference; `head_metrics` and `matrix` work on either.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["HEAD_METRICS", "SPECTRAL_METRICS", "Attention", "deviation", "from_op", "head_metrics", "matrix", "spectral_gap"]

HEAD_METRICS = ("entropy", "residual", "sink")
SPECTRAL_METRICS = ("spectral_gap",)

# Bytes of attention rows computed at a time: what stays in a core's cache, or what fills an accelerator. A few such blocks are
# alive at once.
BLOCK_BYTES = {"cpu": 2 << 20, "other": 8 << 20}


# A score that no softmax gives any weight, finite so that it can be multiplied with that weight.
HIDDEN = -1e30


class Rows(NamedTuple):
    """A piece of attention matrices: which groups and queries, the weights, how many keys each row may see, its entropy."""

    groups: slice
    queries: slice
    p: Tensor  # (groups, queries, keys), float32 or better, to be overwritten at will; keys past its width have no weight
    seen: Tensor  # (groups, queries)
    entropy: Tensor | None


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention call: its matrices `(…, queries, keys)`, given or still to be computed."""

    lead: tuple[int, ...]  # what stands before queries and keys: samples, windows, heads
    queries: int
    keys: int
    weights: Tensor | None = None  # (prod(lead), queries, keys)
    q: Tensor | None = None  # (*lead, queries, width)
    k: Tensor | None = None  # (*lead, keys, width), fewer heads where they are shared
    bias: Tensor | None = None  # broadcastable to (*lead, queries, keys); boolean: True may be seen
    causal: bool = False
    scale: float = 1.0

    @property
    def groups(self) -> int:
        return math.prod(self.lead)

    @property
    def kv_heads(self) -> int | None:
        return self.k.shape[-3] if self.k is not None and self.k.dim() > 3 else None

    def parts(self) -> tuple[Tensor, ...]:
        """What differs from call to call: the matrix, copied lest it change, or queries and keys."""
        if self.weights is not None:
            return (self.weights.clone(),)
        assert self.q is not None and self.k is not None
        return self.q.detach(), self.k.detach()

    def repeated(self, parts: list[Tensor], count: int) -> Attention:
        """`count` calls like this one as one: `parts` are their matrices, or their queries and keys, laid end to end."""
        given: dict[str, Any] = {"weights": parts[0]} if self.weights is not None else {"q": parts[0], "k": parts[1]}
        bias = self.bias
        if bias is not None and bias.dim() == len(self.lead) + 2 and bias.shape[0] > 1:
            bias = bias.repeat(count, *(1,) * (bias.dim() - 1))
        return dataclasses.replace(self, lead=(self.lead[0] * count, *self.lead[1:]), bias=bias, **given)

    def blocks(self, entropy: bool = False) -> Iterator[Rows]:
        """The matrix in pieces of a size that suits the device, each group's rows in order."""
        item = 8 if self.dtype == torch.float64 else 4
        block = BLOCK_BYTES["cpu" if self.device.type == "cpu" else "other"]
        rows = max(1, min(self.queries, block // (item * self.keys)))
        if self.weights is not None:
            step = max(1, block // (item * self.keys * rows))
            for g in range(0, self.groups, step):
                for r in range(0, self.queries, rows):
                    p = self.weights[g : g + step, r : r + rows].to(self.dtype, copy=True)
                    told = _entropy(p) if entropy else None
                    yield Rows(slice(g, g + p.shape[0]), slice(r, r + p.shape[1]), p, (p != 0).sum(-1), told)
            return
        assert self.q is not None and self.k is not None
        inner = self.groups // self.lead[0]
        step = max(1, block // (item * self.keys * rows * inner))
        if step == 1:
            rows = max(1, min(rows, block // (item * self.keys * inner)))
        repeats = self.lead[-1] // self.k.shape[-3]
        for b in range(0, self.lead[0], step):
            k = self.k[b : b + step]
            if repeats > 1:
                k = k.repeat_interleave(repeats, dim=-3)
            k = k.to(self.dtype).flatten(0, -3).mT
            q = (self.q[b : b + step] * self.scale).to(self.dtype).flatten(0, -3)
            for r in range(0, self.queries, rows):
                scores = torch.bmm(q[:, r : r + rows], k[..., : r + rows] if self.causal else k)
                seen = self._hide(scores, b, r)
                p = scores.softmax(-1)  # several times faster than `exp` where keys are hidden
                told = None
                if entropy:  # of softmax(s) is log Σ exp(s − max s) − Σ p (s − max s), and the sum is 1 / max p
                    told = -p.amax(-1).log() - scores.sub_(scores.amax(-1, keepdim=True)).mul_(p).sum(-1)
                if self.bias is not None:
                    p.masked_fill_((seen == 0).unsqueeze(-1), 0.0)  # a row that may see nothing
                start = b * inner
                yield Rows(slice(start, start + p.shape[0]), slice(r, r + p.shape[1]), p, seen, told)

    @property
    def _given(self) -> Tensor:
        tensor = self.weights if self.weights is not None else self.q
        assert tensor is not None
        return tensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self._given.dtype == torch.float64 else torch.float32

    @property
    def device(self) -> torch.device:
        return self._given.device

    def _hide(self, scores: Tensor, b: int, r: int) -> Tensor:
        """Mask and bias `scores`, (groups, rows, keys), in place; how many keys each row may see, (groups, rows)."""
        seen, keys = None, scores.shape[-1]
        if self.bias is not None:
            bias = self.bias
            if bias.dim() < len(self.lead) + 2:
                bias = bias.reshape((1,) * (len(self.lead) + 2 - bias.dim()) + tuple(bias.shape))
            lead = (scores.shape[0] * self.lead[0] // self.groups, *self.lead[1:])
            bias = bias[b : b + lead[0]] if bias.shape[0] > 1 else bias
            bias = bias[..., r : r + scores.shape[-2], :] if bias.shape[-2] > 1 else bias
            bias = bias[..., :keys]
            wide = scores.view(*lead, *scores.shape[1:])
            if bias.dtype == torch.bool:
                wide += torch.zeros(bias.shape, dtype=scores.dtype, device=scores.device).masked_fill_(~bias, HIDDEN)
                shown = bias
            else:
                wide += bias.clamp(min=max(HIDDEN, torch.finfo(bias.dtype).min))
                shown = bias > torch.finfo(bias.dtype).min / 2
            seen = shown.expand(*shown.shape[:-1], keys).sum(-1).expand(wide.shape[:-1]).reshape(scores.shape[:-1])
        if self.causal:
            scores += scores.new_full(scores.shape[1:], HIDDEN).triu_(r + 1)
            below = torch.arange(r + 1, r + 1 + scores.shape[-2], device=scores.device).clamp(max=keys)
            seen = below if seen is None else torch.minimum(seen, below)
        if seen is None:
            return torch.full((), keys, device=scores.device).expand(scores.shape[:-1])
        return seen.expand(scores.shape[:-1])


def from_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attention:
    """Read the call of a fused kernel by the names in its schema, which the kernels share."""
    named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    if "qkv_weight" in named:
        return _from_layer(named)
    q, k = named["query"], named["key"]
    bias = named.get("attn_mask") if named.get("attn_mask") is not None else named.get("attn_bias")
    scale = named.get("scale")
    return Attention(
        lead=tuple(q.shape[:-2]),
        queries=q.shape[-2],
        keys=k.shape[-2],
        q=q,
        k=k,
        bias=bias,
        causal=bool(named.get("is_causal", False)),
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
    )


def _from_layer(named: dict[str, Any]) -> Attention:
    """A whole layer (or nn.MultiheadAttention) in one kernel: project the queries and keys as it does."""
    x = named.get("src", named.get("query"))
    assert x is not None
    heads = named.get("num_heads", named.get("num_head"))
    assert isinstance(heads, int)
    present = None
    if x.is_nested:
        lengths = x._nested_tensor_size()[:, 0].to(x.device)
        x = x.to_padded_tensor(0.0)
        present = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
    if named.get("norm_first"):
        x = torch.nn.functional.layer_norm(x, x.shape[-1:], named["norm_weight_1"], named["norm_bias_1"], named["eps"])
    qkv = torch.nn.functional.linear(x, named["qkv_weight"], named["qkv_bias"])
    q, k, _ = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    mask, kind = named.get("mask"), named.get("mask_type")
    bias = present[:, None, None] if present is not None else None
    if mask is not None:  # True hides; type 0: queries × keys, 1: samples × keys, 2: all four axes
        shown = mask.logical_not() if mask.dtype == torch.bool else mask
        bias = shown if kind == 0 or shown.dim() == 4 else shown[:, None, None]
    return Attention(tuple(q.shape[:-2]), q.shape[-2], k.shape[-2], q=q, k=k, bias=bias, scale=q.shape[-1] ** -0.5)


def key_mask(attention: Attention) -> Tensor | None:
    """`(samples, keys)`: False for a key that no query may see, i.e. padding; None where no mask tells."""
    bias = attention.bias
    if bias is None or bias.dim() != 4 or bias.shape[0] not in (1, attention.lead[0]) or bias.shape[-2] == 1 == attention.queries:
        return None
    shown = bias if bias.dtype == torch.bool else bias > torch.finfo(bias.dtype).min / 2
    return shown.any(dim=-2).any(dim=1).expand(attention.lead[0], attention.keys)


def row_mask(attention: Attention, mask: Tensor | None) -> Tensor | None:
    """A `(samples, queries)` mask for every group, `(groups, queries)`."""
    if mask is None or mask.shape != (attention.lead[0], attention.queries):
        return None
    middle = (1,) * (len(attention.lead) - 1)
    wide = mask.view(mask.shape[0], *middle, mask.shape[1])
    return wide.expand(*attention.lead, attention.queries).reshape(attention.groups, attention.queries)


def head_metrics(attention: Attention, mask: Tensor | None = None) -> Tensor:
    """`(len(HEAD_METRICS), groups)` over the rows that `mask` `(samples, queries)` admits.

    entropy: mean over rows of the row's entropy over that of a uniform row on the keys it may see (0 one key, 1 uniform).
    residual: ‖P − 1pᵀ‖ / ‖P‖, Frobenius, p the mean row. sink: mean weight on the first token.
    """
    rows_in = row_mask(attention, mask)
    device = attention.device
    total = torch.zeros(4, attention.groups, dtype=attention.dtype, device=device)  # entropy, its rows, squares, rows
    sums = torch.zeros(attention.groups, attention.keys, dtype=attention.dtype, device=device)
    shift: Tensor | None = None
    for groups, rows, p, seen, entropy in attention.blocks(entropy=True):
        assert entropy is not None
        keep = None if rows_in is None else rows_in[groups, rows]
        entropy = entropy / seen.log()
        told = seen > 1 if keep is None else (seen > 1) & keep
        if shift is None or rows.start == 0:
            # Squares are summed about the first rows' mean: near-uniform rows would cancel otherwise.
            shift = p.new_zeros(p.shape[0], 1, attention.keys)
            shift[..., : p.shape[2]] = p.mean(1, keepdim=True)
        off = p.sub_(shift[..., : p.shape[2]])
        if keep is not None:
            off = off.masked_fill_(~keep.unsqueeze(-1), 0.0)
        sums[groups, : off.shape[2]] += off.sum(1)
        total[0, groups] += entropy.masked_fill(~told, 0.0).sum(1)
        total[1, groups] += told.sum(1)
        total[2, groups] += torch.linalg.vector_norm(off, dim=(1, 2)).square()
        total[3, groups] += off.shape[1] if keep is None else keep.sum(1)
        if rows.stop == attention.queries:
            n = total[3, groups]
            about = sums[groups]
            squares = (total[2, groups] - about.square().sum(1) / n).clamp(min=0.0)  # ‖P − 1pᵀ‖²
            mean = shift.squeeze(1) + about / n.unsqueeze(1)
            sums[groups] = mean
            size = squares + n * mean.square().sum(1)
            total[2, groups] = (squares / size).sqrt().masked_fill(n < 2, float("nan"))
    first: Tensor = sums[:, 0]
    if rows_in is not None and attention.queries == attention.keys:
        first = sums.gather(1, rows_in.to(torch.uint8).argmax(1, keepdim=True)).squeeze(1)
    return torch.stack((total[0] / total[1], total[2], first))


def _entropy(p: Tensor) -> Tensor:
    """Of rows as distributions: with a sink they sum to less than 1, and mixed over heads they have negative entries."""
    size = p.abs()
    total = size.sum(-1)
    return total.log() - (size * size.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(-1) / total


def matrix(attention: Attention) -> Tensor:
    """All of it, `(groups, queries, keys)`: what `keep=("attention",)` stores."""
    if attention.weights is not None:
        return attention.weights.detach().clone()
    out: Tensor | None = None
    for groups, rows, p, *_ in attention.blocks():
        if out is None:
            out = p.new_zeros(attention.groups, attention.queries, attention.keys)
        out[groups, rows, : p.shape[2]] = p
    assert out is not None
    return out


def deviation(attention: Attention, mask: Tensor | None = None) -> Tensor:
    """`(1, groups)`: ‖P − 1p̄ᵀ‖ in the paper's norm, p̄ the mean row: by how much attention can carry differences on."""
    rows_in = row_mask(attention, mask)
    dtype, device = attention.dtype, attention.device
    mean = torch.zeros(attention.groups, attention.keys, dtype=dtype, device=device)
    columns = torch.zeros_like(mean)
    widest = torch.zeros(attention.groups, dtype=dtype, device=device)
    for groups, rows, p, *_ in attention.blocks():
        keep = 1.0 if rows_in is None else rows_in[groups, rows].unsqueeze(-1)
        mean[groups, : p.shape[2]] += (p * keep).sum(1)
    mean /= attention.queries if rows_in is None else rows_in.sum(1, keepdim=True)
    for groups, rows, p, *_ in attention.blocks():
        size = (torch.nn.functional.pad(p, (0, attention.keys - p.shape[2])) - mean[groups].unsqueeze(1)).abs_()
        if rows_in is not None:
            size *= rows_in[groups, rows].unsqueeze(-1)
        columns[groups] += size.sum(1)
        widest[groups] = torch.maximum(widest[groups], size.sum(2).amax(1))
    return (columns.amax(1).sqrt() * widest.sqrt()).unsqueeze(0)


def spectral_gap(attention: Attention, mask: Tensor | None = None, steps: int = 32) -> Tensor:
    """`(1, groups)`: 1 − σ₂/σ₁ of each matrix, by power iteration on two vectors at a time; 1 for a matrix of rank 1."""
    rows_in = row_mask(attention, mask)
    dtype, keys, device = attention.dtype, attention.keys, attention.device
    place = torch.arange(keys, dtype=dtype, device=device)
    start = torch.stack((torch.ones_like(place), torch.cos(2.4 * place)), dim=1)
    v = start.expand(attention.groups, keys, 2)
    sizes = v.new_ones(attention.groups, 2)
    for _ in range(steps):
        v = _orthonormal(v)
        image = torch.zeros_like(v)
        for groups, rows, p, *_ in attention.blocks():
            if rows_in is not None:
                p = p * rows_in[groups, rows].unsqueeze(-1)
            image[groups, : p.shape[2]] += torch.bmm(p.mT, torch.bmm(p, v[groups, : p.shape[2]]))
        sizes = torch.linalg.vecdot(v, image, dim=1).clamp(min=0.0)
        v = image
    return (1.0 - (sizes[:, 1] / sizes[:, 0]).sqrt()).unsqueeze(0)


def _orthonormal(v: Tensor) -> Tensor:
    a, b = _unit(v[..., 0]), _unit(v[..., 1])
    for _ in range(2):  # what is left of near-parallel vectors is rounding: once more takes that out too
        b = _unit(b - torch.linalg.vecdot(a, b).unsqueeze(-1) * a)
    return torch.stack((a, b), dim=-1)


def _unit(v: Tensor) -> Tensor:
    return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp(min=1e-30)
