"""What a probe has measured, as data that prints itself.

report.layers[3].residual, report.layers[3].heads[0].entropy, report.verdict
report.metrics()            # one flat dict, for any tracker
report.save("r.json"); rankprobe.load("r.json")
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rankprobe.errors import RankprobeError
from rankprobe.measure import Options
from rankprobe.moments import Summary
from rankprobe.render import html, plain
from rankprobe.verdict import Verdict, judge

if TYPE_CHECKING:
    from rankprobe.anatomy import Anatomy, AttentionCall, Block
    from rankprobe.record import Record

__all__ = ["Head", "Layer", "Report", "SkipRatio", "load", "make_report"]

SCHEMA = 1
NAN = float("nan")
COLOURS = {"healthy": "green", "at risk": "yellow", "collapsed": "red", "unknown": "magenta"}


@dataclass(frozen=True)
class Head:
    """One attention head, averaged over samples."""

    entropy: float  # of a row, over that of a uniform row on the keys it may see
    residual: float  # of the matrix to its mean row, Frobenius
    sink: float  # weight on the first token
    spectral_gap: float = NAN  # 1 − σ₂/σ₁, with spectrum=True


@dataclass(frozen=True)
class SkipRatio:
    kind: str
    branch_ratio: float  # ‖branch‖ / ‖skip‖


@dataclass(frozen=True)
class Layer:
    """A hidden state: a block's output, or what goes into a stack. Means over samples; `std` has the deviations."""

    index: int
    name: str
    stack: str
    samples: int = 0
    nonfinite: int = 0
    residual: float = NAN
    residual_fro: float = NAN
    cosine: float = NAN
    effective_rank: float = NAN
    frequency_ratio: float = NAN
    token_norm: float = NAN
    stable_rank: float = NAN
    block_influence: float = NAN
    std: dict[str, float] = field(default_factory=dict)
    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)
    skips: tuple[SkipRatio, ...] = ()
    heads: tuple[Head, ...] = ()

    @property
    def branch_ratio(self) -> float:
        """The largest ‖branch‖/‖skip‖ of the layer's skip connections."""
        return max((s.branch_ratio for s in self.skips), default=NAN)


@dataclass(frozen=True)
class Report:
    model: str
    forwards: int
    found: dict[str, int]
    watched: dict[str, int]
    inputs: tuple[Layer, ...]
    layers: tuple[Layer, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    variant: str = ""  # what was taken away

    @cached_property
    def verdict(self) -> Verdict:
        return judge(self)

    def metrics(self) -> dict[str, float]:
        """Flat: `layer.3.residual`, `layer.3.head.0.entropy`, `input.0.residual`."""
        flat: dict[str, float] = {}
        for what, layers in (("input", self.inputs), ("layer", self.layers)):
            for number, layer in enumerate(layers):
                for name in (*LAYER_FIELDS, "branch_ratio"):
                    flat[f"{what}.{number}.{name}"] = getattr(layer, name)
                for h, head in enumerate(layer.heads):
                    for item in dataclasses.fields(head):
                        flat[f"{what}.{number}.head.{h}.{item.name}"] = getattr(head, item.name)
        return {key: value for key, value in flat.items() if not math.isnan(value)}

    # -- files ----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON, whole or not at all."""
        write_text(
            Path(path), json.dumps({"schema": SCHEMA, **numbers_to_json(dataclasses.asdict(self))}, indent=1, allow_nan=False) + "\n"
        )

    def to_html(self, path: str | os.PathLike[str]) -> None:
        write_text(Path(path), html(self))

    # -- print ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return plain(self)

    def _repr_html_(self) -> str:
        return html(self)

    def __rich__(self) -> RenderableType:
        verdict = self.verdict
        head = Text(verdict.sentence, style=f"bold {COLOURS[verdict.status]}")
        parts: list[RenderableType] = [Text(f"rankprobe: {self.model}{', ' * bool(self.variant)}{self.variant}", style="bold"), head]
        parts += [Text(f"  {line}") for line in verdict.evidence]
        parts.append(Text())
        stacks = dict.fromkeys(x.stack for x in self.layers)
        for stack in stacks:
            parts.append(self.table(stack, len(stacks) > 1))
        found = ", ".join(f"{self.watched[k]} of {n} {k}" for k, n in self.found.items())
        samples = max((x.samples for x in self.layers), default=0)
        parts.append(Text(f"Watched {found}; {self.forwards} forwards, {samples} samples.", style="dim"))
        parts.append(Text("residual: ‖X − 1xᵀ‖/‖X‖ in the paper's norm, 0 when all tokens are one vector.", style="dim"))
        parts += [Text(f"Note: {line}", style="yellow") for line in self.notes]
        parts += [Text(f"Not measured: {line}", style="red") for line in self.problems]
        return Group(*parts)

    def table(self, stack: str, titled: bool) -> Table:
        title = escape(stack) if titled and stack else None
        table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False, title=title, title_justify="left")
        has_heads = any(x.heads for x in self.layers)
        table.add_column("layer", overflow="ellipsis", no_wrap=True)
        for name in ("residual", "±", "cosine", "eff.rank", "branch", "turn", *(("entropy",) if has_heads else ())):
            table.add_column(name, justify="right", no_wrap=True)
        for layer in (*(x for x in self.inputs if x.stack == stack), *(x for x in self.layers if x.stack == stack)):
            entropies = [h.entropy for h in layer.heads if not math.isnan(h.entropy)]
            span = f"{min(entropies):.2f}–{max(entropies):.2f}" if entropies else ""
            label = f"{layer.index:>2} {short(layer.name)}" if layer.index >= 0 else "   input"
            cells = [
                _number(layer.residual), _number(layer.std.get("residual", NAN)), _number(layer.cosine), _number(layer.effective_rank),
                _number(layer.branch_ratio), _number(layer.block_influence), *((span,) if has_heads else ()),
            ]  # fmt: skip
            if layer.nonfinite:
                cells[0] = "NaN"
            table.add_row(Text(label), *cells)
        return table


LAYER_FIELDS = (
    *("residual", "residual_fro", "cosine", "effective_rank", "stable_rank", "frequency_ratio"),
    *("token_norm", "block_influence"),
)


def short(name: str, width: int = 16) -> str:
    return name if len(name) <= width else "…" + name[-(width - 1) :]


def _number(value: float) -> str:
    """At most seven characters."""
    if math.isnan(value):
        return "–"
    size = abs(value)
    if size == 0 or 1e-3 <= size < 1e4:
        return f"{value:.{3 if size < 10 else 2 if size < 100 else 1}f}"
    return f"{value:.1e}"


def make_report(anatomy: Anatomy, options: Options, record: Record, variant: str = "") -> Report:
    summary = record.moments.summary()
    if not anatomy.attentions:
        raise RankprobeError(_no_attention(anatomy))

    def layer(index: int, name: str, stack: str, key: str, block: Block | None) -> Layer:
        rows = dict(zip(options.hidden_metrics, summary.get(key, ()), strict=False))
        influence = summary.get(f"{key}/influence", [None])[0]
        unfinished = rows.pop("unfinished", None)
        first = rows.get("residual_fro")
        skips = tuple(SkipRatio(s.name, summary[s.key][0].mean) for s in block.skips if s.key in summary) if block else ()
        heads = tuple(h for a in block.attentions for h in _heads(a, summary, options)) if block else ()
        return Layer(
            index=index, name=name, stack=stack, samples=first.count if first else 0,
            nonfinite=round(unfinished.mean * unfinished.count) if unfinished else 0,
            block_influence=influence.mean if influence else NAN,
            std={k: s.std for k, s in rows.items()}, low={k: s.low for k, s in rows.items()}, high={k: s.high for k, s in rows.items()},
            skips=skips, heads=heads, **{k: s.mean for k, s in rows.items()},
        )  # fmt: skip

    inputs: list[Layer] = []
    layers: list[Layer] = []
    for stack in anatomy.stacks:
        if stack.input_key in summary:
            inputs.append(layer(-1, "input", stack.name, stack.input_key, None))
        layers += [
            layer(b.index if len(anatomy.stacks) == 1 else len(layers) + i, b.name, stack.name, b.key, b)
            for i, b in enumerate(stack.blocks)
        ]

    def seen(calls: tuple[AttentionCall, ...]) -> int:
        return sum(a.key in summary for a in calls)

    watched = {
        "blocks": sum(b.key in summary for b in anatomy.blocks),
        "attention calls": seen(anatomy.attentions),
        "skip connections": sum(s.key in summary for s in anatomy.skips),
        "MLP branches": sum(s.key in summary for s in anatomy.skips if "mlp" in s.kinds),
    }
    notes = [f"{text} ({n} forwards)" for text, n in record.notes.items()]
    rows = next((summary[a.key] for a in anatomy.attentions if a.key in summary), None)
    if rows and not options.heads and record.forwards > 1:
        notes.append(f"heads were measured in the first forward only, {rows[0].count + rows[0].lost} samples (heads=True: in all)")
    for name in anatomy.unknown:
        notes.append(f"the attention kernel {name} is not one rankprobe can read: its heads were not measured")
    single = [b for b in anatomy.blocks if b.key in record.single]
    if single:
        notes.append(f"{single[0].name} and {len(single) - 1} more had one token in some forwards, which compares with nothing")
    absent = [x for x in layers if x.samples == 0 and not x.nonfinite]
    if absent and len(absent) == len(layers) and not any(b.key in summary for b in anatomy.blocks) and record.single:
        raise RankprobeError(f"{anatomy.model} was run with one token only: rank collapse compares tokens, give it two or more")
    lost = [x for x in layers if summary.get(_key(anatomy, x)) and summary[_key(anatomy, x)][1].lost and not x.nonfinite]
    if lost:
        count = summary[_key(anatomy, lost[0])][1].lost
        notes.append(f"{count} samples had fewer than two tokens that are not padding, and count nowhere")
    problems = tuple(f"{key}: {text}" for key, text in record.problems.items())
    return Report(anatomy.model, record.forwards, anatomy.counts, watched, tuple(inputs), tuple(layers), tuple(notes), problems, variant)


def _key(anatomy: Any, layer: Layer) -> str:
    return next((b.key for b in anatomy.blocks if b.name == layer.name), "")


def _heads(call: Any, summary: dict[str, list[Summary]], options: Options) -> list[Head]:
    rows = summary.get(call.key)
    if rows is None:
        return []
    columns = {name: rows[i * call.heads : (i + 1) * call.heads] for i, name in enumerate(options.head_metrics)}
    return [Head(**{name: values[h].mean for name, values in columns.items()}) for h in range(call.heads)]


def _no_attention(anatomy: Anatomy) -> str:
    name = anatomy.model
    if anatomy.unknown:
        kernels = ", ".join(anatomy.unknown)
        return f"{name} uses an attention kernel rankprobe cannot read ({kernels}): load it with SDPA or eager attention"
    return (
        f"no attention found in {name}: no softmax feeds a product with values, and no fused attention kernel ran. "
        "Is it a transformer, and did the forward reach its blocks?"
    )


def numbers_to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: numbers_to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [numbers_to_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_text(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent or ".", prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> Report:
    """A report saved with `Report.save`."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RankprobeError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RankprobeError(f"{path} is not a report: {error}") from None
    schema = data.pop("schema", None) if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise RankprobeError(f"{path} is not a report of schema {SCHEMA} (it says {schema!r}): save it anew with this version of rankprobe")
    try:
        return Report(
            **{
                **data,
                "inputs": tuple(_layer(x) for x in data["inputs"]),
                "layers": tuple(_layer(x) for x in data["layers"]),
                "notes": tuple(data["notes"]),
                "problems": tuple(data["problems"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise RankprobeError(f"{path} is not a whole report: {error}") from None


def _layer(data: dict[str, Any]) -> Layer:
    numbers = _numbers(data)
    numbers["skips"] = tuple(SkipRatio(**_numbers(s)) for s in data["skips"])
    numbers["heads"] = tuple(Head(**_numbers(h)) for h in data["heads"])
    for name in ("std", "low", "high"):
        numbers[name] = _numbers(data[name])
    return Layer(**numbers)


def _numbers(data: dict[str, Any]) -> dict[str, Any]:
    return {k: NAN if v is None else v for k, v in data.items()}
