"""From numbers to a sentence: healthy, at risk or collapsed, at which layer, and what points to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankprobe.report import Layer, Report

__all__ = ["Verdict", "judge"]

# Frobenius residual r: r² is the share of the tokens' energy that is not one common vector.
COLLAPSED = 0.1  # 99 % of the energy is common to all tokens: what tells them apart is a hundredth
AT_RISK = 0.3  # 91 %
# A layer is blamed only if it is worse than what came in: tokens that are alike in the input are the input's doing.
FALL = 0.5
# Entropy of a row over that of a uniform row.
UNIFORM = 0.95
PEAKED = 0.05
# A head counts towards the layer's evidence when most of its samples agree, so a layer is uniform or peaked when most heads are.
MOST = 0.5
# ‖branch‖/‖skip‖ at which the skip carries less than a tenth of what is added to it.
WEAK_SKIP = 10.0


@dataclass(frozen=True, slots=True)
class Verdict:
    status: str  # healthy, at risk or collapsed
    layer: int | None
    name: str
    reason: str
    evidence: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.status

    @property
    def sentence(self) -> str:
        where = f" at layer {self.layer} ({self.name})" if self.layer is not None else ""
        return f"{self.status.capitalize()}{where}: {self.reason}"


def judge(report: Report) -> Verdict:
    bad = [x for x in report.layers if x.nonfinite]
    if bad:
        worst = bad[0]
        return Verdict(
            "collapsed",
            worst.index,
            worst.name,
            f"NaN or Inf in {worst.nonfinite} of {worst.samples + worst.nonfinite} samples; later layers inherit it",
        )
    measured = [x for x in report.layers if x.residual_fro == x.residual_fro]
    if not measured:
        return Verdict("unknown", None, "", "no layer had two tokens or more to compare")
    worst = min(measured, key=lambda x: x.residual_fro)
    came_in = _input_of(report, worst)
    if worst.residual_fro < AT_RISK:
        share = 1 - worst.residual_fro**2
        if came_in == came_in and worst.residual_fro > FALL * came_in:
            return Verdict(
                "healthy", None, worst.name,
                f"tokens are alike ({share:.1%} of their energy is common) but came in so: "
                f"Frobenius residual {came_in:.3g} before the first block",
            )  # fmt: skip
        status, limit = ("collapsed", COLLAPSED) if worst.residual_fro < COLLAPSED else ("at risk", AT_RISK)
        first = next(x for x in measured if x.residual_fro < limit)
        common = f"{1 - first.residual_fro**2:.1%} of the tokens' energy is one common vector"
        reason = f"{common} (Frobenius residual {first.residual_fro:.3g}, cosine {first.cosine:.3g})"
        return Verdict(status, first.index, first.name, reason, tuple(_evidence(report, first)))
    peaked = [x for x in report.layers if x.heads and _share(x, lambda e: e < PEAKED) > MOST]
    if peaked:
        first = peaked[0]
        return Verdict(
            "at risk", first.index, first.name,
            "attention-entropy collapse, the opposite of rank collapse: most heads look at a single token "
            f"(mean entropy {_entropy(first):.2g})",
            tuple(_evidence(report, first)),
        )  # fmt: skip
    reason = f"tokens stay apart; the lowest Frobenius residual is {worst.residual_fro:.3g} at layer {worst.index} ({worst.name})"
    return Verdict("healthy", None, worst.name, reason)


def _evidence(report: Report, layer: Layer) -> list[str]:
    found = []
    until = [x for x in report.layers if x.stack == layer.stack and x.index <= layer.index]
    uniform = [x for x in until if x.heads and _share(x, lambda e: e > UNIFORM) > MOST]
    if uniform:
        found.append(f"uniform attention: most heads average over all they see in {len(uniform)} of {len(until)} layers so far")
    weak = [(x, s) for x in until for s in x.skips if s.branch_ratio > WEAK_SKIP]
    if weak:
        x, s = weak[0]
        found.append(f"weak skips: at layer {x.index} the {s.kind} branch is {s.branch_ratio:.3g} times its skip")
    bare = [x for x in until if x.heads and not x.skips]
    if bare:
        found.append(f"no skip connection around attention in {len(bare)} of {len(until)} layers")
    return found


def _share(layer: Layer, test: Callable[[float], bool]) -> float:
    entropies = [h.entropy for h in layer.heads if h.entropy == h.entropy]
    return sum(map(test, entropies)) / len(entropies) if entropies else 0.0


def _entropy(layer: Layer) -> float:
    entropies = [h.entropy for h in layer.heads if h.entropy == h.entropy]
    return sum(entropies) / max(1, len(entropies))


def _input_of(report: Report, layer: Layer) -> float:
    return next((x.residual_fro for x in report.inputs if x.stack == layer.stack), float("nan"))
