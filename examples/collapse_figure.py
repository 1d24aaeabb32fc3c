"""Rank collapse on bert-base and albert-base shapes at random initialisation, as a figure.

python examples/collapse_figure.py              # writes examples/collapse.svg, in a minute or two
python examples/collapse_figure.py other.svg

Each model runs whole, without MLPs, without skip connections, and as pure attention, in float64, on 128 random tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from figure import Curve, Panel, figure
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel

import rankprobe

COLOURS = {"full": "#1b6f4a", "no-mlp": "#2f6fb3", "no-skip": "#c77700", "pure-attention": "#b3261e"}
HIDDEN = ("no-mlp", "pure-attention")  # dashed, over those they would hide


def models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    albert = AlbertConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072)
    return {"bert-base": BertModel(BertConfig(), add_pooling_layer=False).eval(), "albert-base": AlbertModel(albert).eval()}


def panel(title: str, found: rankprobe.Collapse) -> Panel:
    curves = [Curve(found.curve(v), COLOURS[v], found.deviation(v), v in HIDDEN) for v in found.variants]
    return Panel(title, curves, "layer", -16, {0: "in"}, found.rounding)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("collapse.svg")
    ids = torch.randint(0, 30000, (8, 128), generator=torch.Generator().manual_seed(0))
    results = {}
    for name, model in models().items():
        with rankprobe.attach(model) as probe:
            results[name] = probe.collapse(input_ids=ids, dtype=torch.float64)
        print(results[name], end="\n\n")
    falls = {v: next(iter(found.kind for found in results["bert-base"].decays[v].values())) for v in COLOURS}
    legend = [(colour, name, f"falls: {falls[name]}") for name, colour in COLOURS.items()]
    title = "Relative residual ‖X − 1xᵀ‖ / ‖X‖, random weights, 128 tokens, float64"
    path.write_text(figure(title, [panel(name, found) for name, found in results.items()], legend), encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
