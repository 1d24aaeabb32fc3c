"""Blocks written out by hand, with the library's own weights, that leave out what an ablation is to remove.

Each function is a block's forward pass with every sum of a stream and its branches made by `without.join`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor, nn


@dataclass(frozen=True)
class Without:
    skip: tuple[str, ...] = ()  # whose skip connections
    parts: tuple[str, ...] = ()  # which branches
    factor: float = 0.0  # what is left of the skip connections

    def join(self, x: Tensor, **branches: Tensor) -> Tensor:
        left = [branch for kind, branch in branches.items() if kind not in self.parts]
        if not left:
            return x
        total = left[0]
        for branch in left[1:]:
            total = total + branch
        if not set(self.skip) & set(branches):
            return x + total
        return x * self.factor + total if self.factor else total


def bert(without: Without, self: Any, x: Tensor, mask: Any = None, *_: Any, **kwargs: Any) -> Tensor:
    heads, _ = self.attention.self(x, attention_mask=mask)
    x = self.attention.output.LayerNorm(without.join(x, attention=self.attention.output.dense(heads)))
    out: Tensor = self.output.LayerNorm(without.join(x, mlp=self.output.dense(self.intermediate(x))))
    return out


def albert(without: Without, self: Any, x: Tensor, mask: Any = None, **kwargs: Any) -> Tensor:
    attention = self.attention
    seen: list[Tensor] = []
    with _told(attention.output_dropout, seen):  # what comes before the sum inside
        attention(x, mask)
    x = attention.LayerNorm(without.join(x, attention=seen[0]))
    out: Tensor = self.full_layer_layer_norm(without.join(x, mlp=self.ffn_output(self.activation(self.ffn(x)))))
    return out


def gpt2(without: Without, self: Any, x: Tensor, past_key_values: Any = None, attention_mask: Any = None, *_: Any, **kwargs: Any) -> Tensor:
    x = without.join(x, attention=self.attn(self.ln_1(x), attention_mask=attention_mask)[0])
    return without.join(x, mlp=self.mlp(self.ln_2(x)))


def llama(without: Without, self: Any, x: Tensor, **kwargs: Any) -> Tensor:
    """Mixtral's too, whose MLP is a mixture."""
    x = without.join(x, attention=self.self_attn(hidden_states=self.input_layernorm(x), **kwargs)[0])
    return without.join(x, mlp=self.mlp(self.post_attention_layernorm(x)))


def gptj(without: Without, self: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    normed = self.ln_1(x)
    return without.join(x, attention=self.attn(normed, *args, **kwargs)[0], mlp=self.mlp(normed)), None


def t5_self(without: Without, self: Any, x: Tensor, attention_mask: Any = None, position_bias: Any = None, **kwargs: Any) -> Any:
    out, bias, *_ = self.SelfAttention(self.layer_norm(x), mask=attention_mask, position_bias=position_bias, **kwargs)
    return without.join(x, attention=out), bias, None


def t5_cross(without: Without, self: Any, x: Tensor, key_value_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
    out, bias, *_ = self.EncDecAttention(self.layer_norm(x), mask=attention_mask, key_value_states=key_value_states, **kwargs)
    return without.join(x, attention=out), bias, None


def t5_mlp(without: Without, self: Any, x: Tensor) -> Tensor:
    return without.join(x, mlp=self.DenseReluDense(self.layer_norm(x)))


def xlnet_attention(without: Without, self: Any, h: Tensor, *args: Any, **kwargs: Any) -> Any:
    seen: list[Tensor] = []
    with _told(self.dropout, seen):
        type(self).forward(self, h, *args, **kwargs)
    return self.layer_norm(without.join(h, attention=seen[-1])), None


def xlnet_mlp(without: Without, self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.layer_norm(without.join(x, mlp=self.layer_2(self.activation_function(self.layer_1(x)))))
    return out


def vit(without: Without, self: Any, x: Tensor, **kwargs: Any) -> Tensor:
    x = without.join(x, attention=self.ls1(self.attn(self.norm1(x))))
    return without.join(x, mlp=self.ls2(self.mlp(self.norm2(x))))


def swin(without: Without, self: Any, x: Tensor) -> Tensor:
    x = without.join(x, attention=self._attn(self.norm1(x)))
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    return without.join(flat, mlp=self.mlp(self.norm2(flat))).reshape(x.shape)


def torch_encoder(without: Without, self: Any, x: Tensor, *_: Any, src_key_padding_mask: Any = None, **kwargs: Any) -> Tensor:
    attended = self.self_attn(x, x, x, key_padding_mask=src_key_padding_mask, need_weights=False)[0]
    x = self.norm1(without.join(x, attention=attended))
    out: Tensor = self.norm2(without.join(x, mlp=self.linear2(self.activation(self.linear1(x)))))
    return out


# Case of the registry: module class and its forward; the output projection of its attention.
BLOCKS: dict[str, dict[str, Callable[..., Any]]] = {
    "bert": {"BertLayer": bert},
    "albert": {"AlbertLayer": albert},
    "gpt2": {"GPT2Block": gpt2},
    "llama": {"LlamaDecoderLayer": llama},
    "mixtral": {"MixtralDecoderLayer": llama},
    "gptj": {"GPTJBlock": gptj},
    "t5": {"T5LayerSelfAttention": t5_self, "T5LayerCrossAttention": t5_cross, "T5LayerFF": t5_mlp},
    "xlnet": {"XLNetRelativeAttention": xlnet_attention, "XLNetFeedForward": xlnet_mlp},
    "timm/vit_tiny_patch16_224": {"Block": vit},
    "timm/swin_tiny_patch4_window7_224": {"SwinTransformerBlock": swin},
    "nn.TransformerEncoder": {"TransformerEncoderLayer": torch_encoder},
}

PROJECTIONS = {
    "bert": "encoder.layer.1.attention.output.dense",
    "gpt2": "h.1.attn.c_proj",
    "llama": "layers.1.self_attn.o_proj",
    "gptj": "h.1.attn.out_proj",
    "timm/vit_tiny_patch16_224": "blocks.1.attn.proj",
    "timm/swin_tiny_patch4_window7_224": "layers.0.blocks.1.attn.proj",
}


@contextmanager
def by_hand(name: str, model: nn.Module, without: Without) -> Iterator[None]:
    """`model` with its blocks written out by hand."""
    patches = [
        mock.patch.object(module, "forward", partial(BLOCKS[name][type(module).__name__], without, module))
        for module in model.modules()
        if type(module).__name__ in BLOCKS[name]
    ]
    assert patches
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def head_by_hand(name: str, model: nn.Module, head: int, heads: int) -> Iterator[None]:
    """`model` with one head's features zeroed on their way into the output projection."""

    def hush(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        width = x.shape[-1] // heads
        x[..., head * width : (head + 1) * width] = 0.0
        return (x, *args[1:])

    (projection,) = (m for path, m in model.named_modules() if path.endswith(PROJECTIONS[name]))
    handle = projection.register_forward_pre_hook(hush)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _told(module: nn.Module, seen: list[Tensor]) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _m, _a, out: seen.append(out))
    try:
        yield
    finally:
        handle.remove()
