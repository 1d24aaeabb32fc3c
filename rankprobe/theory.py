"""The theorem beside the measurement: by what one layer of pure attention multiplies the residual.

With P the attention of a head and p̄ its mean row, P·1 = 1, so what is not common to all tokens after the layer is

    res(Σ P X W) = Σ (P − 1p̄ᵀ) res(X) W,     W = W_V W_O,

and the paper's norm is submultiplicative. Three factors on ‖res(X)‖, each at least the one before:

- *measured*: ‖res(out)‖ / ‖res(X)‖, mean over samples;
- *by its attention*: Σ ‖P − 1p̄ᵀ‖ ‖W‖ over heads, with the largest ‖P − 1p̄ᵀ‖ among samples;
- *the paper's*: 4 Σ ‖W_Q W_Kᵀ‖₁ ‖W‖ · scale · ‖res(X)‖². Here is the cube: the less is left, the faster it goes. It holds where
  the scores of a row differ by at most 1.256.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankprobe.weights import norms

if TYPE_CHECKING:
    from rankprobe.ablate import Ablation

__all__ = ["Bound", "bounds"]


@dataclass(frozen=True)
class Bound:
    """By what one attention layer multiplies the residual."""

    name: str
    residual: float  # going in
    measured: float
    contraction: float  # from its attention and weights
    cubic: float  # the paper's


def bounds(ablation: Ablation, rounding: float) -> tuple[tuple[Bound, ...], list[str]]:
    """For every attention layer whose weights could be read, as far as there is more to measure than `rounding`; and a word on
    the others."""
    summary = ablation.record.moments.summary()
    weights = {key: found for plan in ablation.plans for key, found in plan.projections.items()}
    made: list[Bound] = []
    left: list[str] = []
    for block in ablation.anatomy.blocks:
        for skip in block.skips:
            if "attention" not in skip.kinds:
                continue
            hidden = summary.get(block.key)
            if hidden is not None and not hidden[0].mean > rounding:
                continue
            rows, call = summary.get(f"{skip.key}/theory"), skip.attentions[0] if len(skip.attentions) == 1 else None
            deviation = summary.get(f"{call.key}/deviation") if call is not None else None
            read = norms(weights[call.key]) if call is not None and call.key in weights else None
            if rows is None or deviation is None or read is None or call is None or deviation[0].count != rows[0].count:
                left.append(block.name)
                continue
            scores, values = read
            contraction = sum(d.high * v for d, v in zip(deviation, values, strict=True))
            slope = 4 * weights[call.key].scale * sum(s * v for s, v in zip(scores, values, strict=True))
            made.append(Bound(block.name, rows[0].mean, rows[2].mean, contraction, slope * rows[0].high ** 2))
    if not left:
        return tuple(made), []
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    why = "not plain projections around a fused kernel (rotary positions, eager or windowed attention, norms or gates between)"
    return tuple(made), [f"no bound for {left[0]}{more}: {why}"]
