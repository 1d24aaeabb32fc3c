"""How alike are the tokens? Pure functions of `(batch, tokens, features)` and a token mask, one number per sample.

    residual(x)                       # the paper's: 0 when all tokens are the same vector
    residual(x, mask, norm="fro")     # padded tokens (mask False) count nowhere

Nothing here knows of models or hooks. Inputs are taken to float32 (float64 stays), results stay on the tensor's device,
and nothing waits for the device. A sample with fewer than two tokens has no answer: NaN.

Several metrics of one tensor share work when given one `Tokens`: `t = Tokens(x, mask); residual(t); cosine(t)`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "Tokens",
    "block_influence",
    "branch_ratio",
    "cosine",
    "effective_rank",
    "frequency_ratio",
    "participation_ratio",
    "residual",
    "stable_rank",
    "token_norm",
]

# Tokens that every other token is compared with where all pairs would cost more than the model's own layers: pairwise
# metrics are exact up to this many tokens and use evenly spaced ones beyond.
PAIRED_TOKENS = 64

Norm = Literal["composite", "fro", "1", "inf"]
Centre = Literal["mean", "median"]


class Tokens:
    """A batch of token vectors with its padding taken out, and the intermediate results that metrics share."""

    def __init__(self, x: Tensor, mask: Tensor | None = None) -> None:
        if x.dim() != 3:
            raise ValueError(f"expected (batch, tokens, features), got shape {tuple(x.shape)}")
        self.x = x if x.dtype in (torch.float32, torch.float64) else x.float()
        self.mask = mask
        if mask is not None:
            if mask.shape != x.shape[:2]:
                raise ValueError(f"mask of shape {tuple(mask.shape)} for tokens of shape {tuple(x.shape[:2])}")
            self.absent = mask.logical_not().unsqueeze(-1)
            self.x = self.x.masked_fill(self.absent, 0.0)

    @cached_property
    def count(self) -> Tensor:
        """Tokens per sample, `(batch,)`; NaN where fewer than two, so that what is divided by it has no answer."""
        if self.mask is None:
            n = self.x.shape[1]
            return self.x.new_full((self.x.shape[0],), n if n > 1 else float("nan"))
        count = self.mask.sum(1).to(self.x.dtype)
        return count.masked_fill(count < 2, float("nan"))

    @cached_property
    def norms(self) -> Tensor:
        """Euclidean norm of each token, `(batch, tokens)`, 0 for padding."""
        return torch.linalg.vector_norm(self.x, dim=-1)

    @cached_property
    def size(self) -> Tensor:
        """Frobenius norm, `(batch,)`."""
        return torch.linalg.vector_norm(self.norms, dim=-1)

    @cached_property
    def _sums(self) -> Tensor:
        """`(batch, 2, features)`: sum of the tokens, sum of the tokens divided by their norms."""
        inverse = self.norms.reciprocal()
        inverse = inverse.masked_fill(inverse.isinf(), 0.0)
        weights = torch.stack((torch.ones_like(inverse), inverse), dim=1)
        return torch.bmm(weights, self.x)

    @cached_property
    def mean(self) -> Tensor:
        return self._sums[:, 0] / self.count.unsqueeze(-1)

    @cached_property
    def unit_sum(self) -> Tensor:
        return self._sums[:, 1]

    @cached_property
    def _sizes(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        """The induced norms of the tokens, those of what is not common in them, and the latter's Frobenius norm.

        All in one go and one scratch buffer: fresh memory costs more than the arithmetic.
        """
        room = self.x.abs()
        whole = _induced(room)
        torch.sub(self.x, self.mean.unsqueeze(1), out=room)
        if self.mask is not None:
            room.masked_fill_(self.absent, 0.0)
        size = torch.linalg.vector_norm(torch.linalg.vector_norm(room, dim=-1), dim=-1)
        return whole, _induced(room.abs_()), size

    @property
    def induced(self) -> tuple[Tensor, Tensor]:
        """Largest absolute column sum and largest absolute row sum, `(batch,)` each."""
        return self._sizes[0]

    @property
    def centred_induced(self) -> tuple[Tensor, Tensor]:
        """The same of the tokens less their mean."""
        return self._sizes[1]

    @property
    def centred_size(self) -> Tensor:
        """Frobenius norm of the tokens less their mean."""
        return self._sizes[2]

    def without(self, centre: Tensor) -> Tensor:
        rest = self.x - centre.unsqueeze(1)
        return rest if self.mask is None else rest.masked_fill_(self.absent, 0.0)


def tokens(x: Tensor | Tokens, mask: Tensor | None = None) -> Tokens:
    return x if isinstance(x, Tokens) else Tokens(x, mask)


def residual(x: Tensor | Tokens, mask: Tensor | None = None, *, norm: Norm = "composite", centre: Centre = "mean") -> Tensor:
    """‖X − 1xᵀ‖ / ‖X‖: what of the tokens is not one common vector x.

    `norm="composite"` is the paper's sqrt(‖·‖₁ ‖·‖∞) (largest absolute column sum, largest absolute row sum), `"fro"`
    Frobenius, `"1"` and `"inf"` the two induced norms alone. The mean is the minimiser in the Frobenius norm, the median
    in the 1-norm; in the others the mean's residual is at most 2(1 − 1/n) times the smallest there is, so the composite
    ratio can exceed 1.
    """
    t = tokens(x, mask)
    if norm == "fro" and centre == "mean":
        return t.centred_size / t.size
    if centre == "mean":
        return common_norm(t.centred_induced, norm) / common_norm(t.induced, norm) + 0.0 * t.count
    rest = t.without(_median(t))
    if norm == "fro":
        return torch.linalg.matrix_norm(rest) / t.size
    return common_norm(_induced(rest.abs_()), norm) / common_norm(t.induced, norm) + 0.0 * t.count


def _induced(size: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix norms that vectors' 1-norm and maximum norm induce, given the entries' absolute values."""
    return size.sum(1).amax(-1), size.sum(2).amax(-1)


def common_norm(induced: tuple[Tensor, Tensor], norm: Norm = "composite") -> Tensor:
    """The composite norm from the two it is made of, or one of those."""
    columns, rows = induced
    if norm == "composite":
        return columns.sqrt() * rows.sqrt()  # the roots first: the product of two large sums may overflow
    return columns if norm == "1" else rows


def _median(t: Tokens) -> Tensor:
    if t.mask is None:
        ordered = t.x.sort(dim=1).values
        n = ordered.shape[1]
        return (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2
    ordered = t.x.masked_fill(t.absent, float("inf")).sort(dim=1).values
    count = t.mask.sum(1).clamp(min=1)
    middle = torch.stack(((count - 1) // 2, count // 2), dim=1).unsqueeze(-1).expand(-1, -1, ordered.shape[-1])
    return ordered.gather(1, middle).mean(1)


def cosine(x: Tensor | Tokens, mask: Tensor | None = None) -> Tensor:
    """Mean cosine of two different tokens, from the norm of the sum of unit tokens: no tokens × tokens matrix."""
    t = tokens(x, mask)
    n = t.count
    return (t.unit_sum.square().sum(-1) - n) / (n * (n - 1))


def participation_ratio(x: Tensor | Tokens, mask: Tensor | None = None) -> Tensor:
    """Effective rank without a decomposition: (tr C)² / tr C² with C = XXᵀ, i.e. (Σσ²)² / Σσ⁴ of the singular values.

    1 when all tokens lie on one line, min(tokens, features) when all singular values are equal. Not centred. Exact up to
    64 tokens; beyond, the products of different tokens are taken among 64 evenly spaced ones.
    """
    t = tokens(x, mask)
    # tr C² = Σ‖xᵢ‖⁴ + Σ(xᵢ·xⱼ)². Divided by the Frobenius norm first: fourth powers of large activations overflow.
    scale = t.size.reciprocal().unsqueeze(-1)
    fourth = (t.norms * scale).square().square()
    step = -(-t.x.shape[1] // PAIRED_TOKENS)
    some = t.x[:, ::step] * scale.unsqueeze(-1)
    pairs = torch.bmm(some, some.mT).square().sum((1, 2)) - fourth[:, ::step].sum(1)
    if step > 1:
        m = some.shape[1] if t.mask is None else t.mask[:, ::step].sum(1)
        pairs = pairs * (t.count * (t.count - 1) / (m * (m - 1)))
    return (fourth.sum(1) + pairs).clamp(max=1.0).reciprocal() + 0.0 * t.count


def effective_rank(x: Tensor | Tokens, mask: Tensor | None = None) -> Tensor:
    """exp of the entropy of σ/Σσ over the singular values of X (RankMe's). Decomposes, and so waits for a GPU."""
    t = tokens(x, mask)
    values = torch.linalg.svdvals(t.x)
    share = values / values.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp() + 0.0 * t.count


def stable_rank(x: Tensor | Tokens, mask: Tensor | None = None, *, steps: int = 16) -> Tensor:
    """‖X‖_F² / σ₁², σ₁ by power iteration from the tokens' sum: no decomposition, no random numbers."""
    t = tokens(x, mask)
    scaled = t.x / t.size.view(-1, 1, 1)
    # A little of every feature, so that tokens that sum to zero have a start too.
    ramp = torch.linspace(1.0, 2.0, scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
    v = scaled.sum(1) + ramp * 1e-3 / scaled.shape[-1] ** 0.5
    v = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    gain = torch.ones_like(t.size)
    for _ in range(steps):
        v = torch.bmm(scaled.mT, torch.bmm(scaled, v.unsqueeze(-1))).squeeze(-1)
        gain = torch.linalg.vector_norm(v, dim=-1)
        v = v / gain.unsqueeze(-1)
    return gain.reciprocal() + 0.0 * t.count


def frequency_ratio(x: Tensor | Tokens, mask: Tensor | None = None) -> Tensor:
    """High over low frequency: ‖(I − 11ᵀ/n)X‖ / ‖11ᵀX/n‖ (Wang et al. 2022)."""
    t = tokens(x, mask)
    return t.centred_size / (t.count.sqrt() * torch.linalg.vector_norm(t.mean, dim=-1))


def token_norm(x: Tensor | Tokens, mask: Tensor | None = None) -> Tensor:
    """Mean Euclidean norm of a token."""
    t = tokens(x, mask)
    return t.norms.sum(1) / t.count


def branch_ratio(branch: Tensor | Tokens, skip: Tensor | Tokens, mask: Tensor | None = None) -> Tensor:
    """‖branch‖ / ‖skip‖ at an addition skip + branch, Frobenius over the sample's tokens."""
    return tokens(branch, mask).size / tokens(skip, mask).size


def block_influence(before: Tensor | Tokens, after: Tensor | Tokens, mask: Tensor | None = None) -> Tensor:
    """1 − mean over tokens of cos(before, after): how much a block turns its tokens (ShortGPT)."""
    a, b = tokens(before, mask), tokens(after, mask)
    products = torch.linalg.vecdot(a.x, b.x)
    cosines = products / (a.norms * b.norms)
    if a.mask is not None:
        cosines = cosines.masked_fill(a.absent.squeeze(-1), 0.0)
        return 1.0 - cosines.sum(1) / a.mask.sum(1)
    return 1.0 - cosines.mean(1)
