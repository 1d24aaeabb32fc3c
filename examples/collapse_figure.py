"""Rank collapse on bert-base and albert-base shapes at random initialisation, as a figure.

python examples/collapse_figure.py              # writes examples/collapse.svg, in a minute or two
python examples/collapse_figure.py other.svg

Each model runs whole, without MLPs, without skip connections, and as pure attention, in float64, on 128 random tokens.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel

import rankprobe

COLOURS = {"full": "#1b6f4a", "no-mlp": "#2f6fb3", "no-skip": "#c77700", "pure-attention": "#b3261e"}
WIDTH, HEIGHT, LEFT, TOP, LOWEST = 380, 300, 62, 60, -16


def models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    albert = AlbertConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072)
    return {"bert-base": BertModel(BertConfig(), add_pooling_layer=False).eval(), "albert-base": AlbertModel(albert).eval()}


def panel(title: str, found: rankprobe.Collapse, x0: int) -> list[str]:
    layers = len(found.curve("full")) - 1

    def x(layer: int) -> float:
        return x0 + layer * WIDTH / layers

    def y(residual: float) -> float:
        return TOP + HEIGHT * max(LOWEST, math.log10(max(residual, 1e-300))) / LOWEST

    floor = y(found.rounding)
    lines = [
        f'<text x="{x0}" y="{TOP - 14}" class="title">{title}</text>',
        f'<rect x="{x0}" y="{floor:.1f}" width="{WIDTH}" height="{TOP + HEIGHT - floor:.1f}" class="floor"/>',
        f'<text x="{x0 + WIDTH - 6}" y="{TOP + HEIGHT - 6}" class="small" text-anchor="end">float64 rounding</text>',
    ]
    for power in range(0, LOWEST - 1, -4):
        at = TOP + HEIGHT * power / LOWEST
        lines.append(f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{at}" y2="{at}" class="grid"/>')
        lines.append(f'<text x="{x0 - 8}" y="{at + 4}" text-anchor="end">{"1" if not power else f"1e{power}"}</text>')
    for layer in range(0, layers + 1, 2):
        lines.append(f'<text x="{x(layer):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{layer or "in"}</text>')
    for name in found.variants:
        means, spread = found.curve(name), found.deviation(name)
        upper = [f"{x(i):.1f},{y(m + s):.1f}" for i, (m, s) in enumerate(zip(means, spread, strict=True))]
        lower = [f"{x(i):.1f},{y(max(m - s, m / 10)):.1f}" for i, (m, s) in enumerate(zip(means, spread, strict=True))]
        lines.append(f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{COLOURS[name]}" opacity="0.2"/>')
        points = " ".join(f"{x(i):.1f},{y(m):.1f}" for i, m in enumerate(means))
        dashes = ' stroke-dasharray="6 4"' if name in ("no-mlp", "pure-attention") else ""  # over the one they hide
        lines.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2.5"{dashes}/>')
    lines.append(f'<text x="{x0 + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">layer</text>')
    return lines


def figure(results: dict[str, rankprobe.Collapse]) -> str:
    total = LEFT + len(results) * (WIDTH + 70)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {TOP + HEIGHT + 84}" font-family="sans-serif" font-size="12">',
        "<style>.title{font-size:15px;font-weight:bold}.grid{stroke:#ddd}.floor{fill:#eee}.small{font-size:11px;fill:#777}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" class="title">Relative residual ‖X − 1xᵀ‖ / ‖X‖, random weights, 128 tokens</text>',
    ]
    for place, (title, found) in enumerate(results.items()):
        lines += panel(title, found, LEFT + place * (WIDTH + 70))
    for place, (name, colour) in enumerate(COLOURS.items()):
        at, base = LEFT + place * 190, TOP + HEIGHT + 66
        decay = next(iter(next(iter(results.values())).decays[name].values())).kind
        lines.append(f'<line x1="{at}" x2="{at + 24}" y1="{base - 4}" y2="{base - 4}" stroke="{colour}" stroke-width="3"/>')
        lines.append(f'<text x="{at + 30}" y="{base}">{name}</text><text x="{at + 30}" y="{base + 14}" class="small">falls: {decay}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("collapse.svg")
    ids = torch.randint(0, 30000, (8, 128), generator=torch.Generator().manual_seed(0))
    results = {}
    for name, model in models().items():
        with rankprobe.attach(model) as probe:
            results[name] = probe.collapse(input_ids=ids, dtype=torch.float64)
        print(results[name], end="\n\n")
    path.write_text(figure(results), encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
