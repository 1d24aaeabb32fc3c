"""A figure of a few panels side by side, log scale, drawn as SVG by hand: no plotting library needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT, LEFT, TOP, GAP = 380, 300, 62, 60, 70


@dataclass
class Curve:
    values: Sequence[float]
    colour: str
    spread: Sequence[float] = ()
    dashed: bool = False


@dataclass
class Panel:
    title: str
    curves: list[Curve]
    xlabel: str
    lowest: int  # power of ten
    xticks: dict[int, str] = field(default_factory=dict)
    floor: float = 0.0  # below, all is rounding
    step: int = 4  # powers of ten between grid lines

    def draw(self, x0: int) -> list[str]:
        last = max(len(c.values) for c in self.curves) - 1

        def x(place: int) -> float:
            return x0 + place * WIDTH / last

        def y(value: float) -> float:
            return TOP + HEIGHT * min(1.0, max(self.lowest, math.log10(max(value, 1e-300))) / self.lowest)

        lines = [f'<text x="{x0}" y="{TOP - 14}" class="title">{self.title}</text>']
        if self.floor:
            top = y(self.floor)
            lines.append(f'<rect x="{x0}" y="{top:.1f}" width="{WIDTH}" height="{TOP + HEIGHT - top:.1f}" class="floor"/>')
            lines.append(f'<text x="{x0 + WIDTH - 6}" y="{TOP + HEIGHT - 6}" class="small" text-anchor="end">rounding</text>')
        for power in range(0, self.lowest - 1, -self.step):
            at = TOP + HEIGHT * power / self.lowest
            lines.append(f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
            lines.append(f'<text x="{x0 - 8}" y="{at + 4:.1f}" text-anchor="end">{"1" if not power else f"1e{power}"}</text>')
        for place in range(0, last + 1, 1 if last < 8 else 2):
            label = self.xticks.get(place, str(place))
            lines.append(f'<text x="{x(place):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{label}</text>')
        for curve in self.curves:
            points = [(x(i), v) for i, v in enumerate(curve.values) if not math.isnan(v)]
            if curve.spread:
                both = list(zip(points, curve.spread, strict=True))
                band = [f"{px:.1f},{y(v + s):.1f}" for (px, v), s in both]
                band += [f"{px:.1f},{y(max(v - s, v / 10)):.1f}" for (px, v), s in reversed(both)]
                lines.append(f'<polygon points="{" ".join(band)}" fill="{curve.colour}" opacity="0.2"/>')
            way = " ".join(f"{px:.1f},{y(v):.1f}" for px, v in points)
            dashes = ' stroke-dasharray="6 4"' if curve.dashed else ""
            lines.append(f'<polyline points="{way}" fill="none" stroke="{curve.colour}" stroke-width="2.5"{dashes}/>')
        lines.append(f'<text x="{x0 + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">{self.xlabel}</text>')
        return lines


def figure(title: str, panels: list[Panel], legend: list[tuple[str, str, str]]) -> str:
    """`legend`: colour, name and a smaller line below it."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + len(panels) * (WIDTH + GAP)} {TOP + HEIGHT + 84}" '
        'font-family="sans-serif" font-size="12">',
        "<style>.title{font-size:15px;font-weight:bold}.grid{stroke:#ddd}.floor{fill:#eee}.small{font-size:11px;fill:#777}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" class="title">{title}</text>',
    ]
    for place, panel in enumerate(panels):
        lines += panel.draw(LEFT + place * (WIDTH + GAP))
    for place, (colour, name, below) in enumerate(legend):
        at, base = LEFT + place * 190, TOP + HEIGHT + 66
        lines.append(f'<line x1="{at}" x2="{at + 24}" y1="{base - 4}" y2="{base - 4}" stroke="{colour}" stroke-width="3"/>')
        lines.append(f'<text x="{at + 30}" y="{base}">{name}</text><text x="{at + 30}" y="{base + 14}" class="small">{below}</text>')
    return "\n".join([*lines, "</svg>", ""])
