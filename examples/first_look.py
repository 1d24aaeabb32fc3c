"""Rank collapse at first sight: one small transformer with its skip connections, and the same weights without.

python examples/first_look.py
"""

from __future__ import annotations

import torch
from rich.console import Console
from torch import Tensor, nn

import rankprobe


class Block(nn.Module):
    def __init__(self, width: int, heads: int, skip: bool) -> None:
        super().__init__()
        self.heads, self.skip = heads, skip
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        if not self.skip:
            return mixed
        x = x + mixed
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, skip: bool, width: int = 64, heads: int = 4, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, skip) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def main() -> None:
    console = Console()
    torch.manual_seed(0)
    whole, bare = Transformer(skip=True).eval(), Transformer(skip=False).eval()
    bare.load_state_dict(whole.state_dict())
    tokens = torch.randn(16, 32, 64)
    for title, model in (("With skip connections and MLPs", whole), ("The same weights, pure attention", bare)):
        with torch.no_grad(), rankprobe.attach(model) as probe:
            model(tokens)
        console.rule(title)
        console.print(probe.anatomy)
        console.print()
        console.print(probe.report())
        console.print()


if __name__ == "__main__":
    main()
