"""Which tokens are padding. Told by the caller, else by the forward's own arguments, else by the attention masks.

By convention an argument of shape (batch, tokens) with "mask" in its name is such a mask; "padding" in the name turns its
meaning round (True hides), and a `decoder_` or `tgt_` one speaks of the decoder's tokens alone. A mask with four axes, here
or in a fused kernel's call, tells padding by the keys that no query may see.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TokenMasks", "is_decoder_argument", "named_arguments"]

_DECODER = ("decoder_", "tgt_", "target_", "labels")
# Masks over queries × keys, heads, pixels or pretraining targets.
_NOT_TOKENS = {
    *("src_mask", "tgt_mask", "memory_mask", "attn_mask", "head_mask", "decoder_head_mask", "cross_attn_head_mask"),
    *("pixel_mask", "pixel_attention_mask", "bool_masked_pos", "masked_lm_labels", "mask_time_indices"),
}

MaskFunction = Callable[..., Tensor | None]


class TokenMasks:
    """The masks of one forward; `find` gives the one for tokens of a given shape, True for a real token."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: MaskFunction | None) -> None:
        self._masks: list[tuple[bool | None, Tensor]] = []
        self._ends: dict[tuple[int, int], Tensor] = {}
        self.unused: list[str] = []  # arguments that were taken for masks and fit nothing yet
        if given is not None:
            told = given(*args, **kwargs)
            if told is not None:
                self._masks.append((None, told.bool()))
            return
        for name, value in named_arguments(module, args, kwargs):
            if not isinstance(value, Tensor) or "mask" not in name or name in _NOT_TOKENS:
                continue
            shown = _shown(name, value)
            if shown is not None:
                self._masks.append((is_decoder_argument(name), shown))
                self.unused.append(name)

    def infer(self, mask: Tensor | None) -> None:
        """A `(samples, keys)` mask read off an attention call."""
        if mask is not None:
            self._masks.append((None, mask))

    def find(self, samples: int, tokens: int, decoder: bool = False, keys: int = 0) -> Tensor | None:
        """The mask of `tokens` tokens, or the end of a mask for all `keys` where the others are in a key-value cache."""
        for whose, mask in self._masks:
            if (whose is not None and whose is not decoder) or mask.shape[0] != samples:
                continue
            if mask.shape[1] == tokens or mask.shape[1] == keys > tokens:
                self.unused.clear()
                return mask if mask.shape[1] == tokens else self._end_of(mask, tokens)
        return None

    def find_any(self, x: Tensor) -> Tensor | None:
        """The mask of `x`, (samples, tokens, …), be it an encoder's or a decoder's."""
        found = self.find(x.shape[0], x.shape[1])
        return found if found is not None else self.find(x.shape[0], x.shape[1], decoder=True)

    def _end_of(self, mask: Tensor, tokens: int) -> Tensor:
        """Cut once: sites that share a mask are known by sharing the tensor."""
        if (id(mask), tokens) not in self._ends:
            self._ends[id(mask), tokens] = mask[:, -tokens:]
        return self._ends[id(mask), tokens]

    def known(self, samples: int, keys: int) -> bool:
        return any(mask.shape == (samples, keys) for _, mask in self._masks)

    def samples(self, groups: int, tokens: int) -> int | None:
        """The batch size of a mask for `tokens` tokens that divides `groups`: samples × heads laid out flat."""
        return next((m.shape[0] for _, m in self._masks if m.shape[1] == tokens and groups % m.shape[0] == 0), None)


def is_decoder_argument(name: str) -> bool:
    return name.startswith(_DECODER)


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """A forward's arguments with their names."""
    names = _names(type(module).forward) if args else ()
    rest = (f"argument_{i}" for i in range(len(names), len(args)))
    return [*zip((*names, *rest), args, strict=False), *kwargs.items()]


@functools.cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _shown(name: str, mask: Tensor) -> Tensor | None:
    if mask.dim() == 2:
        if mask.is_floating_point() and "padding" in name:  # additive: -inf hides
            return mask >= 0
        return mask.logical_not() if "padding" in name else mask > 0
    if mask.dim() == 4:
        shown = mask if mask.dtype == torch.bool else mask > (torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else 0)
        return shown.any(dim=-2).any(dim=1)
    return None
