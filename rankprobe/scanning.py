"""One call from a name to a diagnosis: load a model, watch it read, take its parts away, split its output by path length.

print(rankprobe.scan("bert-base-uncased"))
rankprobe.scan()                              # the small model that ships with rankprobe
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from rankprobe._version import __version__
from rankprobe.collapse import VARIANTS, Collapse, run_variants
from rankprobe.paths import PathSplit
from rankprobe.probe import Probe, attach
from rankprobe.render import html, plain
from rankprobe.report import COLOURS, Report, numbers_to_json, write_text
from rankprobe.verdict import UNIFORM

__all__ = ["SCHEMA", "Scan", "scan"]

SCHEMA = 1
# A block that turns its tokens by less than this (1 − cosine) hardly does anything.
IDLE = 0.005
# The share of the output, by projection, at which path lengths are said to carry it.
CARRIED = 0.95


@dataclass(frozen=True)
class Scan:
    """A model's report, its variants, its paths, and how they were had."""

    name: str
    report: Report
    collapse: Collapse
    paths: PathSplit | None
    how: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def advice(self) -> tuple[str, ...]:
        """What it means and what to try next, each with what in this model says so."""
        return tuple(_advice(self))

    def to_json(self) -> str:
        paths = None if self.paths is None else json.loads(self.paths.to_json())
        verdict = dataclasses.asdict(self.report.verdict)
        data = {
            "schema": SCHEMA,
            "name": self.name,
            "verdict": verdict,
            "report": dataclasses.asdict(self.report),
            "collapse": dataclasses.asdict(self.collapse),
            "paths": paths,
            "advice": self.advice,
            "how": self.how,
            "notes": self.notes,
        }
        return json.dumps(numbers_to_json(data), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        write_text(Path(path), self.to_json())

    def __str__(self) -> str:
        return plain(self)

    def _repr_html_(self) -> str:
        return html(self)

    def __rich__(self) -> RenderableType:
        verdict = self.report.verdict
        parts: list[RenderableType] = [
            Text(f"rankprobe: {self.name}", style="bold"),
            Text(verdict.sentence, style=f"bold {COLOURS[verdict.status]}"),
            *(Text(f"  {line}") for line in verdict.evidence),
        ]
        stacks = self.collapse.stacks
        for stack in stacks:
            parts.append(Text(f"\nWhat holds it up: residual by layer{f' of {stack}' if len(stacks) > 1 else ''}", style="bold"))
            parts.append(self.collapse.chart(stack))
            falls = ", ".join(f"{name} {self.collapse.decays[name][stack]}" for name in self.collapse.variants)
            parts.append(Text(f"falls: {falls}", style="dim"))
        parts.append(self.collapse.answers())
        parts.append(Text("\nLayer by layer", style="bold"))
        parts += [self.report.table(stack, len(stacks) > 1) for stack in stacks]
        if self.paths is not None:
            parts += [Text(f"\nWhich path lengths carry {self.paths.at}", style="bold"), self.paths.table()]
            parts.append(Text(f"The parts sum to it within {self.paths.completeness:.1e}.", style="dim"))
            if self.paths.unattributed:
                parts.append(Text(f"Unattributed: {self.paths.unattributed:.3f} ({', '.join(self.paths.unruled)})", style="red"))
        parts.append(Text("\nWhat it means", style="bold"))
        parts += [Text(f"• {line}") for line in self.advice]
        parts.append(Text("\nHow it was measured", style="bold"))
        parts += [Text(f"{key}: {value}", style="dim") for key, value in self.how.items()]
        parts += [Text(f"Note: {line}", style="yellow") for line in self.notes]
        return Group(*parts)


def _advice(scan: Scan) -> list[str]:
    report, collapse = scan.report, scan.collapse
    made: list[str] = []
    stack = collapse.stacks[-1]
    ends = {name: collapse.curve(name, stack=stack)[-1] for name in collapse.variants}
    if "full" in ends and "no-skip" in ends and ends["no-skip"] < 0.5 * ends["full"]:
        fall = f"without them the last layer's residual is {ends['no-skip']:.2g} instead of {ends['full']:.2g}"
        made.append(f"Skip connections hold its rank up: {fall}. Keep them when pruning, merging or distilling.")
    if "full" in ends and "no-mlp" in ends and ends["no-mlp"] < 0.7 * ends["full"]:
        made.append(f"MLPs help: without them the last residual is {ends['no-mlp']:.2g} instead of {ends['full']:.2g}.")
    whole, without = collapse.effects.get("full"), collapse.effects.get("no-skip")
    if whole is not None and without is not None and whole.accuracy == whole.accuracy:
        made.append(f"It shows in its answers: accuracy {whole.accuracy:.3f} whole, {without.accuracy:.3f} without skip connections.")
    if scan.paths is not None:
        carried = 0.0
        for length, projection in zip(scan.paths.lengths, scan.paths.projection, strict=True):
            carried += projection
            if carried >= CARRIED:
                made.append(
                    f"Paths through at most {length} of {scan.paths.lengths[-1]} attention calls carry {carried:.0%} of the output."
                )
                break
    idle = [x for x in report.layers if x.block_influence < IDLE]
    if idle:
        least = min(idle, key=lambda x: x.block_influence)
        made.append(f"{len(idle)} blocks hardly turn their tokens ({least.name}: {least.block_influence:.4f}): try the model without them.")
    heads = [h for x in report.layers for h in x.heads]
    uniform = sum(h.entropy > UNIFORM for h in heads)
    if heads and uniform > len(heads) / 4:
        made.append(f"{uniform} of {len(heads)} heads spread their weight almost evenly: averaging is what makes tokens alike.")
    sinks = sum(h.sink > 0.5 for h in heads)
    if heads and sinks > len(heads) / 4:
        made.append(f"{sinks} of {len(heads)} heads rest on the first token more than half of the time: a sink, not a collapse.")
    if report.verdict.status == "collapsed":
        made.append(
            "Look at the first collapsed layer: its branch ratio and entropy above say whether the skip is too weak or attention too even."
        )
    return made or ["Nothing stands out: tokens stay apart, and no part carries them alone."]


def scan(model: str | None = None, *, tell: Callable[[str, int, int], None] | None = None, paths: bool = True, **wishes: Any) -> Scan:
    """Load `model` (a Hugging Face id or folder, `timm/NAME`; nothing: the embedded default) and diagnose it.

    `wishes` are those of `rankprobe.integrations.loading.Wish`: samples, batch_size, max_length, dtype, device, seed, text, images,
    random_init, revision, offline, trust_remote_code, allow_pickle. `tell` hears what is being done, and how far it is.
    """
    from rankprobe.integrations.loading import Wish, load

    wish = Wish(model=model, **wishes)
    say = tell or (lambda what, done, total: None)
    say("loading", 0, 1)
    loaded = load(wish)
    batches = loaded.batches
    total, done = len(batches) * (2 + len(VARIANTS)) + 1, 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        say(what, done, total)

    say("finding its parts", 0, total)
    with attach(loaded.model, heads=True) as probe:
        with torch.no_grad():
            for batch in batches:
                loaded.model(**batch)
                step("watching")
        report = probe.report()
        labels: list[Any] = list(loaded.labels) or [None] * len(batches)
        calls = [((), batch, label) for batch, label in zip(batches, labels, strict=True)]
        collapse = run_variants(probe, calls, {name: {"preset": name} for name in VARIANTS}, lambda what: step(f"without: {what}"))
        say("paths", done, total)
        split = None
        try:
            split = probe.paths(**batches[0], max_length=24, labels=labels[0]) if paths else None
        except Exception as error:  # the rest of the scan stands without them
            loaded.notes.append(f"its paths could not be followed: {type(error).__name__}: {error}")
        say("paths", total, total)
        how = _how(probe, loaded, wish)
    return Scan(loaded.name, report, collapse, split, how, (*loaded.notes, *report.notes, *report.problems, *collapse.notes))


def _how(probe: Probe, loaded: Any, wish: Any) -> dict[str, str]:
    parameter = next(iter(probe.model.parameters()))
    size = sum(p.numel() for p in probe.model.parameters())
    from importlib.metadata import version

    python = platform.python_version()
    found = ", ".join(f"{n} {what}" for what, n in probe.anatomy.counts.items())
    return {
        "model": f"{type(probe.model).__name__}, {size:,} parameters" + (f", revision {loaded.revision}" if loaded.revision else ""),
        "found": found,
        "read": loaded.inputs,
        "computed": f"in {str(parameter.dtype).removeprefix('torch.')} on {parameter.device}, seed {wish.seed}",
        "paths": "of the first batch",
        "with": f"rankprobe {__version__}, {', '.join(f'{p} {version(p)}' for p in ('torch', 'transformers', 'timm'))}, Python {python}",
    }
