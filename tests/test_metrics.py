"""Every metric against NumPy or SciPy in float64, written out the long way; Hypothesis chooses shapes, masks and scales."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from rankprobe import attention, metrics
from rankprobe.moments import Moments

Array = NDArray[np.float64]


@st.composite
def token_batches(draw: st.DrawFn, most: int = 12) -> tuple[Tensor, Tensor | None]:
    b, n, d = draw(st.integers(1, 3)), draw(st.integers(2, most)), draw(st.integers(1, 9))
    seed = draw(st.integers(0, 2**16))
    scale = draw(st.sampled_from([1e-12, 1e-3, 1.0, 1e3, 1e12]))
    common = draw(st.sampled_from([0.0, 1.0, 100.0]))
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(b, n, d, generator=generator, dtype=torch.float64)
        + common * torch.randn(b, 1, d, generator=generator, dtype=torch.float64)
    ) * scale
    if not draw(st.booleans()):
        return x, None
    mask = torch.rand(b, n, generator=generator) < 0.7
    mask[:, :2] = True
    return x, mask


def samples(x: Tensor, mask: Tensor | None) -> list[Array]:
    return [x[i][mask[i]].numpy() if mask is not None else x[i].numpy() for i in range(x.shape[0])]


def composite(x: Array) -> float:
    return float(np.sqrt(np.abs(x).sum(0).max() * np.abs(x).sum(1).max()))


def pairwise(x: Array) -> float:
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    n = len(x)
    return float(((unit @ unit.T).sum() - n) / (n * (n - 1)))


def rank_me(x: Array) -> float:
    s = np.linalg.svd(x, compute_uv=False)
    p = s / s.sum()
    return float(np.exp(-(p[p > 0] * np.log(p[p > 0])).sum()))


def gram_ratio(x: Array) -> float:
    s = np.linalg.svd(x, compute_uv=False) ** 2
    return float(s.sum() ** 2 / (s**2).sum())


def centred(x: Array) -> Array:
    return x - x.mean(0)


ORACLES = {
    "residual": (lambda t, m: metrics.residual(t, m), lambda x: composite(centred(x)) / composite(x)),
    "residual_median": (lambda t, m: metrics.residual(t, m, centre="median"), lambda x: composite(x - np.median(x, 0)) / composite(x)),
    "residual_fro": (lambda t, m: metrics.residual(t, m, norm="fro"), lambda x: np.linalg.norm(centred(x)) / np.linalg.norm(x)),
    "residual_1": (lambda t, m: metrics.residual(t, m, norm="1"), lambda x: np.linalg.norm(centred(x), 1) / np.linalg.norm(x, 1)),
    "residual_inf": (lambda t, m: metrics.residual(t, m, norm="inf"), lambda x: np.linalg.norm(centred(x), np.inf) / np.linalg.norm(x, np.inf)),  # noqa: E501
    "cosine": (metrics.cosine, pairwise),
    "participation_ratio": (metrics.participation_ratio, gram_ratio),
    "effective_rank": (metrics.effective_rank, rank_me),
    "frequency_ratio": (metrics.frequency_ratio, lambda x: np.linalg.norm(centred(x)) / np.linalg.norm(np.ones((len(x), 1)) * x.mean(0))),
    "token_norm": (metrics.token_norm, lambda x: np.linalg.norm(x, axis=1).mean()),
}  # fmt: skip


@pytest.mark.parametrize("name", ORACLES)
@given(batch=token_batches())
@settings(max_examples=60, deadline=None)
def test_metric_is_what_numpy_says(name: str, batch: tuple[Tensor, Tensor | None]) -> None:
    ours, oracle = ORACLES[name]
    x, mask = batch
    got = ours(x, mask).numpy()
    want = np.array([oracle(s) for s in samples(x, mask)])
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ORACLES)
@given(batch=token_batches(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=20, deadline=None)
def test_lower_precision_is_taken_to_float32(name: str, batch: tuple[Tensor, Tensor | None], dtype: torch.dtype) -> None:
    ours, _ = ORACLES[name]
    x, mask = batch
    x = (x / x.abs().max()).to(dtype)
    if not x.float().norm(dim=-1).all():
        return
    torch.testing.assert_close(ours(x, mask), ours(x.float(), mask))
    torch.testing.assert_close(ours(x.float(), mask).double(), ours(x.double(), mask), rtol=2e-3, atol=2e-3)


@given(batch=token_batches())
@settings(max_examples=40, deadline=None)
def test_stable_rank_finds_the_largest_singular_value(batch: tuple[Tensor, Tensor | None]) -> None:
    x, mask = batch
    got = metrics.stable_rank(x, mask, steps=400).numpy()
    want = np.array([np.linalg.norm(s) ** 2 / np.linalg.norm(s, 2) ** 2 for s in samples(x, mask)])
    np.testing.assert_allclose(got, want, rtol=2e-2)


@given(batch=token_batches(), noise=st.floats(0.01, 3.0))
@settings(max_examples=40, deadline=None)
def test_two_tensor_metrics(batch: tuple[Tensor, Tensor | None], noise: float) -> None:
    x, mask = batch
    y = x + noise * x.abs().max() * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    pairs = list(zip(samples(x, mask), samples(y, mask), strict=True))
    np.testing.assert_allclose(metrics.branch_ratio(y, x, mask), [np.linalg.norm(b) / np.linalg.norm(a) for a, b in pairs], rtol=1e-9)
    turned = [1 - np.mean([u @ v / (np.linalg.norm(u) * np.linalg.norm(v)) for u, v in zip(a, b, strict=True)]) for a, b in pairs]
    np.testing.assert_allclose(metrics.block_influence(x, y, mask), turned, rtol=1e-7, atol=1e-9)


@given(batch=token_batches(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_padding_counts_nowhere(batch: tuple[Tensor, Tensor | None], seed: int) -> None:
    x, mask = batch
    if mask is None:
        return
    junk = torch.where(mask.unsqueeze(-1), x, torch.full_like(x, float("nan")))
    for name, (ours, _) in ORACLES.items():
        torch.testing.assert_close(ours(junk, mask), ours(x, mask), msg=name)


@given(batch=token_batches(most=6))
@settings(max_examples=25, deadline=None)
def test_the_mean_is_within_twice_of_the_best_centre(batch: tuple[Tensor, Tensor | None]) -> None:
    """‖X − 1xᵀ‖∞ has a linear program for its minimiser: the largest row sum of absolute values."""
    x, _ = batch
    for sample in samples(x / x.abs().max(), None):
        n, d = sample.shape
        cost = np.r_[np.zeros(d), np.zeros(n * d), 1.0]
        rows, bound = [], []
        for i in range(n):
            for j in range(d):
                for sign in (1, -1):  # |x_ij − c_j| ≤ t_ij
                    row = np.zeros(d + n * d + 1)
                    row[j], row[d + i * d + j] = -sign, -1
                    rows.append(row)
                    bound.append(-sign * sample[i, j])
            row = np.zeros(d + n * d + 1)
            row[d + i * d : d + (i + 1) * d], row[-1] = 1, -1
            rows.append(row)
            bound.append(0.0)
        best = scipy.optimize.linprog(cost, rows, bound, bounds=[(None, None)] * d + [(0, None)] * (n * d + 1)).fun
        ours = float(metrics.residual(torch.from_numpy(sample)[None], norm="inf")) * np.linalg.norm(sample, np.inf)
        assert best - 1e-9 <= ours <= 2 * (1 - 1 / n) * best + 1e-9


def test_median_minimises_the_1_norm_and_mean_the_frobenius_norm() -> None:
    x = torch.randn(4, 9, 5, dtype=torch.float64)
    for norm, centre in (("1", "median"), ("fro", "mean")):
        best = metrics.residual(x, norm=norm, centre=centre)  # type: ignore[arg-type]
        for _ in range(20):
            other = x - (x.mean(1, keepdim=True) + 0.1 * torch.randn(4, 1, 5, dtype=x.dtype))
            size = torch.linalg.matrix_norm(other, ord=1 if norm == "1" else "fro") / torch.linalg.matrix_norm(
                x, ord=1 if norm == "1" else "fro"
            )
            assert (best <= size + 1e-12).all()


def test_identical_tokens_have_no_residual_and_one_token_has_no_answer() -> None:
    same = torch.ones(2, 5, 3) * torch.tensor([[[1.0]], [[-7.0]]])
    assert metrics.residual(same).abs().max() < 1e-6
    torch.testing.assert_close(metrics.cosine(same), torch.ones(2))
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 0] = True  # one token, then none
    for ours, _ in ORACLES.values():
        assert ours(torch.randn(2, 5, 3), mask).isnan().all()


def test_long_sequences_are_paired_with_evenly_spaced_tokens() -> None:
    x = torch.randn(2, 1000, 32, dtype=torch.float64)
    exact = torch.tensor([gram_ratio(s) for s in samples(x, None)], dtype=torch.float64)
    torch.testing.assert_close(metrics.participation_ratio(x), exact, rtol=0.1, atol=0)


# -- attention --------------------------------------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> tuple[attention.Attention, Tensor, Tensor | None]:
    """A fused call, its matrix computed by hand, and a mask of query rows."""
    b, h, n, d = draw(st.integers(1, 2)), draw(st.sampled_from([2, 4])), draw(st.integers(2, 9)), draw(st.integers(1, 5))
    shared = draw(st.sampled_from([1, 2]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    q = torch.randn(b, h, n, d, generator=generator, dtype=torch.float64) * draw(st.sampled_from([0.01, 1.0, 20.0]))
    k = torch.randn(b, h // shared, n, d, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["none", "causal", "bool", "bias"]))
    bias, rows = None, None
    scores = q @ k.repeat_interleave(shared, 1).mT * 0.3
    if kind == "causal":
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    elif kind == "bool":
        rows = torch.ones(b, n, dtype=torch.bool)
        rows[-1, -1] = False
        bias = rows[:, None, None].expand(b, 1, n, n)
        scores = scores.masked_fill(~bias, float("-inf"))
    elif kind == "bias":
        bias = torch.randn(1, h, n, n, generator=generator, dtype=torch.float64)
        scores = scores + bias
    call = attention.Attention((b, h), n, n, q=q, k=k, bias=bias, causal=kind == "causal", scale=0.3)
    return call, scores.softmax(-1).flatten(0, 1), rows


@given(made=calls(), block=st.sampled_from([64, 500, 1 << 20]))
@settings(max_examples=80, deadline=None)
def test_heads_are_what_numpy_says_in_any_block_size(made: tuple[attention.Attention, Tensor, Tensor | None], block: int) -> None:
    call, p, rows = made
    whole = attention.BLOCK_BYTES["cpu"]
    try:
        attention.BLOCK_BYTES["cpu"] = block
        got = attention.head_metrics(call, rows).numpy()
        given_matrix = attention.head_metrics(attention.Attention(call.lead, call.queries, call.keys, weights=p), rows).numpy()
        full = attention.matrix(call)
    finally:
        attention.BLOCK_BYTES["cpu"] = whole
    torch.testing.assert_close(full, p)
    wide = attention.row_mask(call, rows)
    want = []
    for g in range(p.shape[0]):
        m = p[g][wide[g]].numpy() if wide is not None else p[g].numpy()
        seen = [(row > 0).sum() for row in m]
        entropies = [-(r[r > 0] * np.log(r[r > 0])).sum() / np.log(s) for r, s in zip(m, seen, strict=True) if s > 1]
        rest = np.linalg.norm(m - m.mean(0)) / np.linalg.norm(m) if len(m) > 1 else np.nan
        want.append([np.mean(entropies) if entropies else np.nan, rest, m.mean(0)[0]])
    np.testing.assert_allclose(got, np.array(want).T, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(given_matrix, np.array(want).T, rtol=1e-7, atol=1e-9)


@given(made=calls())
@settings(max_examples=30, deadline=None)
def test_spectral_gap_needs_no_decomposition(made: tuple[attention.Attention, Tensor, Tensor | None]) -> None:
    call, p, _ = made
    got = attention.spectral_gap(call, steps=600)[0].numpy()
    values = np.linalg.svd(p.numpy(), compute_uv=False)
    np.testing.assert_allclose(got, 1 - values[:, 1] / values[:, 0], atol=2e-2)


# -- moments ----------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    split=st.integers(0, 5),
    shift=st.sampled_from([0.0, 1e6]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_moments_stream_and_merge(sizes: list[int], split: int, shift: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(3, n, generator=generator, dtype=torch.float64) + shift for n in sizes]
    batches[0][1, 0] = float("nan")
    left, right = Moments(), Moments()
    for i, values in enumerate(batches):
        (left if i < split else right).add({"a": values[:2], "b": values[2:]})
    left.merge(right)
    summary = left.summary()
    rows = [*summary["a"], *summary["b"]]
    every = torch.cat(batches, 1).numpy()
    for row, got in zip(every, rows, strict=True):
        good = row[np.isfinite(row)]
        assert got.count == len(good) and got.lost == len(row) - len(good)
        if len(good):
            np.testing.assert_allclose(
                [got.mean, got.std, got.low, got.high],
                [good.mean(), good.std(), good.min(), good.max()],
                rtol=1e-9,
                atol=1e-6 * (shift > 0) + 1e-12,
            )
