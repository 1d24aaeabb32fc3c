"""What a model is shown when nobody says otherwise: texts, images and sounds that ship with rankprobe, all made by us."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["TEXTS", "images", "sorting", "sounds"]

TEXTS = (
    "The ferry leaves at half past six, and the harbour is already full of gulls.",
    "Wer früh am Markt ist, bekommt die besten Kirschen und hört die neuesten Geschichten.",
    "To sharpen a chisel, keep its bevel flat on the stone and let the weight of the hand do the work. A burr along the edge tells you "
    "when to turn it over. Polish both sides until the burr falls off, and try the edge on a piece of soft pine.",
    "La biblioteca cierra a las ocho, pero el portero siempre deja cinco minutos más.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total / len(values)",
    "Why does a kettle sing before it boils? Bubbles form at the hot bottom, rise into cooler water, and collapse with a small click; "
    "thousands of clicks a second make the note. When the whole pot is hot they no longer collapse, and the song stops.",
    "Il pleut depuis trois jours; la rivière a pris la couleur du thé.",
    "Rain.",
    "Dear Ms Okafor, thank you for your letter of the third. The roof will be mended before the winter, as agreed, and the scaffolding "
    "will stand for two weeks at most. We are sorry about the noise.",
    "The theorem says nothing about speed. It says only that, if the sequence converges at all, the limit does not depend on where it "
    "began; how long you have to wait is a different question, and usually the one that matters.",
    "今日は風が強いので、洗濯物は中に干しました。",
    "Two eggs, a cup of flour, a pinch of salt, milk until it runs off the spoon. Rest it for an hour. Fry thin.",
    "В саду осталась одна яблоня, и та уже не цветёт.",
    "Minutes of the meeting: present were seven members; the treasurer reported a balance of 1,204.50; the motion to buy a second boat "
    "was put off until spring; the kettle is to be replaced at once.",
    "SELECT name, count(*) FROM visits WHERE day > '2024-01-01' GROUP BY name ORDER BY 2 DESC;",
    "She had counted the stairs so often that she no longer knew whether there were forty-one or forty-two, and on the last night she "
    "did not count them at all but sat down in the middle and listened to the house.",
)


def images(count: int, size: tuple[int, int], channels: int, seed: int) -> Tensor:
    """(count, channels, height, width) in 0 … 1: waves, discs and noise, each image its own mixture."""
    generator = torch.Generator().manual_seed(seed)
    height, width = size
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    made = []
    for _ in range(count):
        a, b, c, d, r = torch.rand(5, generator=generator).tolist()
        waves = torch.sin(2 * math.pi * ((1 + 6 * a) * x * math.cos(b * 6) + (1 + 6 * a) * y * math.sin(b * 6)))
        disc = ((x - c + 0.5) ** 2 + (y - d + 0.5) ** 2 < (0.2 + 0.5 * r) ** 2).float()
        tint = torch.rand(channels, 1, 1, generator=generator)
        noise = torch.rand(channels, height, width, generator=generator)
        made.append((0.4 * tint * (waves + 1) / 2 + 0.4 * disc * (1 - tint) + 0.2 * noise).clamp(0, 1))
    return torch.stack(made)


def sounds(count: int, samples: int, rate: int, seed: int) -> Tensor:
    """(count, samples): gliding tones over a little noise."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(samples) / rate
    start, glide = 100 + 400 * torch.rand(2, count, 1, generator=generator)
    tone = torch.sin(2 * math.pi * (start * time + glide * time**2 / 2))
    return 0.5 * tone + 0.05 * torch.randn(count, samples, generator=generator)


def sorting(count: int, seed: int, symbols: int = 10, length: int = 8) -> tuple[Tensor, Tensor]:
    """The task of the embedded model: symbols, and the same in order."""
    ids = torch.randint(0, symbols, (count, length), generator=torch.Generator().manual_seed(seed))
    return ids, ids.sort(1).values
