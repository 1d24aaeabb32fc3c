"""One model, run whole and without its parts: how its tokens collapse, and what becomes of its answers.

    print(probe.collapse(**batch))                        # the paper's four variants
    probe.collapse(**batch, dtype=torch.float64)          # on a copy: doubly exponential decay ends float32 in two layers

The decay of a curve r₀, r₁, … is told by its steps dᵢ = log rᵢ₊₁ − log rᵢ above rounding. In a plain exponential they are the
same; in a doubly exponential decay rᵢ₊₁ = C·rᵢᵖ each is p times the one before, and the theorem has p = 3. The *order* is the
geometric mean of dᵢ₊₁/dᵢ; `DOUBLY` is where the line is drawn.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rankprobe.errors import NothingThere, RankprobeError
from rankprobe.graph import tensors_in
from rankprobe.padding import TokenMasks
from rankprobe.render import bare_table, html, number, plain
from rankprobe.report import Layer, Report, numbers_to_json, short, write_text
from rankprobe.theory import Bound, bounds

if TYPE_CHECKING:
    from rankprobe.ablate import Ablation
    from rankprobe.anatomy import Anatomy
    from rankprobe.probe import Probe

__all__ = ["Collapse", "Decay", "Effect", "decay_of", "run_variants"]

VARIANTS = ("full", "no-mlp", "no-skip", "pure-attention")
# An exponential's order is 1 and the theorem's is 3: a line between the two on the scale where orders multiply.
DOUBLY = math.sqrt(3.0)
# A curve that falls by less than this over all layers does not collapse.
FALLS = 10.0
# Residuals of tokens that are equal but for rounding: up to this many units of it, measured 2 in float32 and 8 in float64.
ROUNDING = 16
NAN = float("nan")


@dataclass(frozen=True)
class Decay:
    """How a curve falls: "none", "exponential", "doubly exponential", or "too fast to tell" before it meets rounding."""

    kind: str
    order: float = NAN  # by what each step multiplies the one before
    rate: float = NAN  # factor per layer, geometric mean
    points: int = 0  # above rounding

    def __str__(self) -> str:
        if self.kind == "exponential":
            return f"exponential, × {self.rate:.2g} a layer"
        return f"doubly exponential, order {self.order:.1f}" if self.kind == "doubly exponential" else self.kind


def decay_of(curve: Sequence[float], rounding: float) -> Decay:
    """`rounding`: where values are no longer the model's."""
    end = next((i for i, r in enumerate(curve) if not r > rounding), len(curve))
    logs = [math.log(r) for r in curve[:end]]
    if len(logs) < 2 or (end == len(curve) and logs[0] - logs[-1] < math.log(FALLS)):
        short = end < len(curve)
        return Decay("too fast to tell" if short else "none", points=len(logs))
    steps = [b - a for a, b in itertools.pairwise(logs)]
    rate = math.exp(sum(steps) / len(steps))
    if end < len(curve) and len(steps) < 2:
        return Decay("too fast to tell", rate=rate, points=len(logs))
    order = (steps[-1] / steps[0]) ** (1 / (len(steps) - 1)) if len(steps) > 1 and steps[0] < 0 > steps[-1] else NAN
    return Decay("doubly exponential" if order >= DOUBLY else "exponential", order, rate, len(logs))


@dataclass(frozen=True)
class Effect:
    """What a variant answers, against the intact model. Means over samples (over tokens, where each has an answer)."""

    kl: float = NAN  # divergence of its output distribution from the intact one's, in nats
    agreement: float = NAN  # share of equal top answers
    loss: float = NAN
    accuracy: float = NAN
    change: float = NAN  # of the pooled representation: distance over the intact one's length
    cosine: float = NAN  # of the two


@dataclass(frozen=True)
class Collapse:
    """Layer × variant × metric, with deviations over samples; what it does to the answers; the theory beside it."""

    model: str
    reports: dict[str, Report]
    effects: dict[str, Effect]
    rounding: float
    dtype: str
    bounds: tuple[Bound, ...] = ()
    notes: tuple[str, ...] = ()
    decays: dict[str, dict[str, Decay]] = field(default_factory=dict)  # by variant and stack

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(self.reports)

    @property
    def stacks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(x.stack for x in next(iter(self.reports.values())).layers))

    def rows(self, variant: str, stack: str | None = None) -> list[Layer]:
        """A stack's input, then its layers; of the first stack unless told."""
        if variant not in self.reports:
            raise RankprobeError(f"no variant {variant!r}: there are {', '.join(self.reports)}")
        report, stack = self.reports[variant], self.stacks[0] if stack is None else stack
        return [x for x in (*report.inputs, *report.layers) if x.stack == stack]

    def curve(self, variant: str, metric: str = "residual", stack: str | None = None) -> list[float]:
        return [getattr(x, metric) for x in self.rows(variant, stack)]

    def deviation(self, variant: str, metric: str = "residual", stack: str | None = None) -> list[float]:
        return [x.std.get(metric, NAN) for x in self.rows(variant, stack)]

    def metrics(self) -> dict[str, float]:
        """Flat: `no-skip.layer.3.residual`, `no-skip.kl`."""
        flat = {f"{name}.{key}": value for name, report in self.reports.items() for key, value in report.metrics().items()}
        for name, effect in self.effects.items():
            flat |= {f"{name}.{key}": value for key, value in dataclasses.asdict(effect).items() if not math.isnan(value)}
        return flat

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON, whole or not at all."""
        write_text(Path(path), json.dumps(numbers_to_json(dataclasses.asdict(self)), indent=1, allow_nan=False) + "\n")

    # -- print ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return plain(self)

    def _repr_html_(self) -> str:
        return html(self)

    def __rich__(self) -> RenderableType:
        samples = max(x.samples for x in next(iter(self.reports.values())).layers)
        parts: list[RenderableType] = [
            Text(f"rankprobe: {self.model}, whole and without its parts", style="bold"),
            Text(f"residual ‖X − 1xᵀ‖/‖X‖ in the paper's norm, mean of {samples} samples,", style="dim"),
            Text(f"in {self.dtype}: below {self.rounding:.0e} all is rounding", style="dim"),
        ]
        for stack in self.stacks:
            if len(self.stacks) > 1:
                parts.append(Text(f"\n{stack}", style="bold"))
            parts += [self.chart(stack), self._table(stack)]
        parts += [self.answers(), *self._theory()]
        parts += [Text(f"Note: {line}", style="yellow") for line in self.notes]
        return Group(*parts)

    def chart(self, stack: str) -> Text:
        """Powers of ten down, layers across, a letter for each variant."""
        curves = {name: self.curve(name, stack=stack) for name in self.variants}
        marks = _marks(self.variants)
        lowest = min((r for curve in curves.values() for r in curve if r > 0), default=1.0)
        bottom = max(-16, min(-1, math.floor(math.log10(lowest))))
        length = max(map(len, curves.values()))
        wide = max(1, min(4, 70 // length))
        grid = [[" "] * (length * wide) for _ in range(-bottom + 1)]
        for name, curve in curves.items():
            for i, r in enumerate(curve):
                if r > 0 and i * wide < 70:
                    row = min(-bottom, max(0, round(-math.log10(r))))
                    cell = grid[row][i * wide]
                    grid[row][i * wide] = marks[name] if cell == " " else "*"
        lines = [f"{'1' if not row else f'1e-{row}':>6} │{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
        names = ", ".join(f"{mark} {name}" for name, mark in marks.items())
        return Text("\n".join(["", *lines, f"{'':>6} └{'─' * min(70, length * wide)}", f"{'':>8}{names}, * several"]))

    def _table(self, stack: str) -> Table:
        table = bare_table("layer", *self.variants)
        for rows in zip(*(self.rows(name, stack) for name in self.variants), strict=True):
            label = f"{rows[0].index:>2} {short(rows[0].name)}" if rows[0].index >= 0 else "   input"
            table.add_row(Text(label), *(number(x.residual) for x in rows))
        table.add_row(Text("falls", style="bold"), *(Text(str(self.decays[name][stack])) for name in self.variants))
        return table

    def answers(self) -> RenderableType:
        names = [f.name for f in dataclasses.fields(Effect) if any(not math.isnan(getattr(e, f.name)) for e in self.effects.values())]
        if not names:
            return Text()
        titles = {"kl": "KL (nats)", "agreement": "same top answer", "change": "pooled output changes by"}
        table = bare_table("answers", *(titles.get(name, name) for name in names))
        for variant, effect in self.effects.items():
            table.add_row(Text(variant), *(number(getattr(effect, name)) for name in names))
        return Group(Text(), table)

    def _theory(self) -> list[RenderableType]:
        if not self.bounds:
            return []
        table = bare_table("layer", "measured", "by its attention", "the paper's bound")
        for bound in self.bounds:
            table.add_row(Text(short(bound.name, 24)), number(bound.measured), number(bound.contraction), number(bound.cubic))
        return [Text("\nBy what a layer of pure attention multiplies ‖X − 1xᵀ‖", style="bold"), table]


def _marks(names: Iterable[str]) -> dict[str, str]:
    marks: dict[str, str] = {}
    for name in names:
        # no-mlp and no-skip by what is missing
        letters = [c for c in name.removeprefix("no-") + name + "abcdefghijklmnopqrstuvwxyz" if c.isalnum()]
        marks[name] = next(c for c in letters if c not in marks.values())
    return marks


# -- running ----------------------------------------------------------------------------------------------------------


Call = tuple[tuple[Any, ...], dict[str, Any], Tensor | None]  # arguments, named ones, labels


def run_variants(probe: Probe, calls: Sequence[Call], variants: Mapping[str, Mapping[str, Any]], tell: Callable[[str], None]) -> Collapse:
    """`tell` hears of every forward."""
    model = probe.model
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    rounding = ROUNDING * torch.finfo(dtype).eps
    calls = [_prepared(model, dtype, *call) for call in calls]

    def run(variant: Ablation) -> list[Any]:
        outs = []
        with variant:
            for args, batch, _ in calls:
                outs.append(model(*args, **batch))
                tell(variant.variant)
        return outs

    reports: dict[str, Report] = {}
    effects: dict[str, Effect] = {}
    theory: tuple[Bound, ...] = ()
    notes: list[str] = []
    with torch.no_grad(), evaluating(model):
        whole = probe.ablate()
        intact = run(whole)
        for name, asked in variants.items():
            variant, outs = whole, intact
            if asked != {"preset": "full"}:
                try:
                    variant = probe.ablate(**asked)
                except NothingThere as error:
                    notes.append(f"no variant {name}: {error}")
                    continue
                variant.theory = asked == {"preset": "pure-attention"}
                outs = run(variant)
            reports[name] = variant.report()
            notes += [f"{name}, {line}" for line in (*reports[name].notes, *reports[name].problems)]
            effects[name] = _mean([_effect(probe, out, first, *call) for out, first, call in zip(outs, intact, calls, strict=True)])
            if variant.theory:
                theory, unread = bounds(variant, rounding)
                notes += unread
    made = Collapse(probe.anatomy.model, reports, effects, rounding, str(dtype).removeprefix("torch."), theory)
    decays = {name: {stack: decay_of(made.curve(name, stack=stack), rounding) for stack in made.stacks} for name in reports}
    if dtype != torch.float64 and any(d.kind == "too fast to tell" for by_stack in decays.values() for d in by_stack.values()):
        notes.append(f"{made.dtype} ends at about {rounding:.0e}; with dtype=torch.float64 the decay is seen further down")
    return dataclasses.replace(made, decays=decays, notes=tuple(notes))


@contextmanager
def in_dtype(probe: Probe, dtype: torch.dtype | None) -> Iterator[Probe]:
    """The probe itself, or one on a copy of its model in another dtype."""
    if dtype is None or all(p.dtype == dtype for p in probe.model.parameters()):
        yield probe
        return
    model = copy.deepcopy(probe.model).to(dtype)
    with type(probe)(model, probe.options) as other:
        yield other


def _prepared(model: nn.Module, dtype: torch.dtype, args: tuple[Any, ...], batch: dict[str, Any], labels: Tensor | None) -> Call:
    args, batch = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, batch))
    if labels is not None and "labels" in inspect.signature(model.forward).parameters:
        batch = {**batch, "labels": labels}
    return args, uncached(model, batch), labels


def _mean(effects: list[Effect]) -> Effect:
    """Over batches, which are taken to be of one size."""
    return Effect(*(sum(values) / len(values) for values in zip(*map(dataclasses.astuple, effects), strict=True)))


def uncached(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Nothing is generated, so nothing need be kept for it."""
    return {"use_cache": False, **batch} if "use_cache" in inspect.signature(model.forward).parameters else batch


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout, and afterwards every module as it was."""
    training = [m for m in model.modules() if m.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


# -- answers ----------------------------------------------------------------------------------------------------------


def _effect(probe: Probe, out: Any, whole: Any, args: Any, kwargs: Any, labels: Tensor | None) -> Effect:
    labels = kwargs.get("labels", labels)
    logits, before = _logits(out, probe.model), _logits(whole, probe.model)
    masks = TokenMasks(probe.model, args, kwargs, probe.options.mask)
    if logits is None or before is None:
        after, earlier = (_pooled(x, masks) for x in (out, whole))
        if after is None or earlier is None:
            return Effect()
        change = torch.linalg.vector_norm(after - earlier, dim=-1) / torch.linalg.vector_norm(earlier, dim=-1)
        return Effect(change=float(change.mean()), cosine=float(torch.cosine_similarity(after, earlier, dim=-1).mean()))
    exact = torch.promote_types(logits.dtype, torch.float32)
    p, q = before.to(exact).log_softmax(-1), logits.to(exact).log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    same = (logits.argmax(-1) == before.argmax(-1)).float()
    mask = masks.find_any(logits) if logits.dim() > 2 else None
    if mask is not None:
        kl, same = kl[mask], same[mask]
    loss, accuracy = _graded(out, logits, labels, probe.anatomy)
    return Effect(float(kl.mean()), float(same.mean()), loss, accuracy)


def _logits(out: Any, model: nn.Module) -> Tensor | None:
    """By name; or a model's only output, one row a sample, unless it says that it has no classes."""
    if isinstance(out, Mapping):
        return next((v for k, v in out.items() if k.startswith("logits") and isinstance(v, Tensor)), None)
    if isinstance(out, Tensor) and out.dim() == 2 and getattr(model, "num_classes", 1) > 0:
        return out
    return None


def _pooled(out: Any, masks: TokenMasks) -> Tensor | None:
    """One vector a sample: the model's own pooling, else the mean over tokens that are not padding."""
    given = out.get("pooler_output") if isinstance(out, Mapping) else None
    x = given if given is not None else next((t for t in tensors_in(out) if t.is_floating_point()), None)
    if x is None or x.dim() < 2:
        return None
    x = x.float() if x.dtype != torch.float64 else x
    if x.dim() != 3:
        return x.flatten(1)
    mask = masks.find_any(x)
    if mask is None:
        return x.mean(1)
    return (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def answers_for_next(anatomy: Anatomy) -> bool:
    """Whether each token's answer is for the one behind it: a lone causal stack."""
    return len(anatomy.stacks) == 1 and all(a.causal for a in anatomy.attentions)


def _graded(out: Any, logits: Tensor, labels: Tensor | None, anatomy: Anatomy) -> tuple[float, float]:
    """Loss and accuracy. A lone causal stack answers for the next token; labels of −100 do not count."""
    if labels is None or labels.is_floating_point() or labels.dim() != logits.dim() - 1:
        loss = out.get("loss") if isinstance(out, Mapping) else None
        return (NAN if loss is None else float(loss)), NAN
    if logits.dim() == 3 and answers_for_next(anatomy):
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    counted = labels != -100
    told = out.get("loss") if isinstance(out, Mapping) else None
    loss = torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=-100) if told is None else told
    return float(loss), float((logits.argmax(-1) == labels)[counted].float().mean())
