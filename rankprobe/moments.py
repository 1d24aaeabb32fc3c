"""Running mean, deviation and extremes of many quantities at once, on the device where they arise.

    moments.add({"layer 0": values})    # values: (quantities, samples)
    moments.merge(other)                # batches, processes and machines add up

A forward pass adds all of its quantities in a handful of tensor ops, whatever their number: they are laid end to end.
Nothing waits for the device; `summary()` is where numbers come to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Moments", "Summary"]

# Rows of a state, each (quantities,).
_COUNT, _MEAN, _M2, _LOW, _HIGH, _LOST = range(6)


@dataclass(frozen=True, slots=True)
class Summary:
    """One quantity over its samples. `lost` counts samples whose value was not a finite number."""

    count: int
    mean: float
    std: float
    low: float
    high: float
    lost: int


class Moments:
    def __init__(self) -> None:
        # A forward pass adds the same keys in the same order each time, so states are kept per such layout.
        self._states: dict[tuple[torch.device, tuple[tuple[str, int], ...]], Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        groups: dict[tuple[torch.device, int], list[str]] = {}
        for key, value in values.items():
            groups.setdefault((value.device, value.shape[1]), []).append(key)
        for (device, _), keys in groups.items():
            rows = torch.cat([values[key] for key in keys]) if len(keys) > 1 else values[keys[0]]
            state = _reduce(rows.to(torch.float32 if device.type == "mps" else torch.float64))
            layout = (device, tuple((key, values[key].shape[0]) for key in keys))
            known = self._states.get(layout)
            self._states[layout] = state if known is None else _join(known, state)

    def merge(self, other: Moments) -> None:
        for layout, state in other._states.items():
            known = self._states.get(layout)
            self._states[layout] = state if known is None else _join(known, state)

    def tensors(self) -> list[Tensor]:
        return list(self._states.values())

    def clear(self) -> None:
        self._states.clear()

    def summary(self) -> dict[str, list[Summary]]:
        """Per key, a `Summary` for each of its quantities. Copies to the host."""
        joined: dict[str, Tensor] = {}
        for (_, layout), state in self._states.items():
            host, start = state.cpu().double(), 0
            for key, rows in layout:
                part = host[:, start : start + rows]
                start += rows
                joined[key] = _join(joined[key], part) if key in joined else part
        return {key: [_summary(column) for column in state.T.tolist()] for key, state in joined.items()}


def _reduce(rows: Tensor) -> Tensor:
    good = rows.isfinite()
    values = rows.masked_fill(~good, 0.0)
    count = good.sum(1).to(rows.dtype)
    mean = values.sum(1) / count.clamp(min=1)
    spread = (rows - mean.unsqueeze(1)).masked_fill(~good, 0.0).square().sum(1)
    low = rows.masked_fill(~good, float("inf")).amin(1)
    high = rows.masked_fill(~good, float("-inf")).amax(1)
    return torch.stack((count, mean, spread, low, high, rows.shape[1] - count))


def _join(a: Tensor, b: Tensor) -> Tensor:
    """Chan, Golub and LeVeque's update: exact for means, stable for spreads."""
    count = a[_COUNT] + b[_COUNT]
    share = b[_COUNT] / count.clamp(min=1)
    step = b[_MEAN] - a[_MEAN]
    return torch.stack(
        (
            count,
            a[_MEAN] + step * share,
            a[_M2] + b[_M2] + step.square() * a[_COUNT] * share,
            torch.minimum(a[_LOW], b[_LOW]),
            torch.maximum(a[_HIGH], b[_HIGH]),
            a[_LOST] + b[_LOST],
        )
    )


def _summary(column: list[float]) -> Summary:
    count, mean, spread, low, high, lost = column
    if count == 0:
        mean = low = high = float("nan")
    std = (spread / count) ** 0.5 if count else float("nan")
    return Summary(int(count), mean, std, low, high, int(lost))
