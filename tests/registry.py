"""Tiny models, one of each kind of transformer: built from configs, seeded, a few layers, milliseconds each.

A `Case` knows how to build its model and a batch for it, and which answers the library itself can give to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[..., nn.Module]
    batch: Callable[[], Batch]
    blocks: int  # what the model's own config says
    attentions: int
    mlps: int
    oracle: str = ""  # "hf": the library returns attentions and hidden states
    twofold: bool = False  # the library's own SDPA and eager outputs differ: its attentions are compared on eager
    why: str = ""  # the reason for what is left out


def text(vocab: int = 64, samples: int = 2, length: int = 9, padded: bool = True, side: str = "right") -> Callable[[], Batch]:
    def make() -> Batch:
        ids = torch.randint(3, vocab, (samples, length), generator=torch.Generator().manual_seed(7))
        if not padded:
            return {"input_ids": ids}
        mask = torch.ones_like(ids)
        mask[-1, -3:] = 0
        return {"input_ids": ids, "attention_mask": mask if side == "right" else mask.flip(1)}

    return make


def pixels(size: int, samples: int = 2, name: str = "pixel_values", channels: int = 3) -> Callable[[], Batch]:
    return lambda: {name: torch.randn(samples, channels, size, size, generator=torch.Generator().manual_seed(7))}


def _hf(kind: str, auto: str, **config: Any) -> Callable[..., nn.Module]:
    def build(**options: Any) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        made = transformers.AutoConfig.for_model(kind, **config)
        return getattr(transformers, auto).from_config(made, **options).eval()

    return build


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
LLAMA = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
VISION = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16, "patch_size": 4}


def hf(kind: str, config: dict[str, Any], batch: Callable[[], Batch] | None = None, *, auto: str = "AutoModel", blocks: int = 3,
       attentions: int | None = None, mlps: int | None = None, **more: Any) -> Case:  # fmt: skip
    n = blocks if attentions is None else attentions
    name = more.pop("name", kind)
    return Case(
        name, _hf(kind, auto, **config), batch or text(), blocks, n, blocks if mlps is None else mlps, more.pop("oracle", "hf"), **more
    )


def _seq2seq() -> Batch:
    batch = text()()
    decoder = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(decoder)
    mask[0, -2:] = 0
    return {**batch, "decoder_input_ids": decoder, "decoder_attention_mask": mask}


def _whisper() -> Batch:
    features = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(7))
    return {"input_features": features, "decoder_input_ids": torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(8))}


def _wav2vec() -> Batch:
    waves = torch.randn(2, 600, generator=torch.Generator().manual_seed(7))
    mask = torch.ones(2, 600, dtype=torch.long)
    mask[1, 300:] = 0
    return {"input_values": waves, "attention_mask": mask}


def _clip() -> Batch:
    return {**text(padded=True)(), **pixels(16)()}


def timm_model(
    name: str, batch: Callable[[], Batch], *, blocks: int, attentions: int | None = None, mlps: int | None = None, **config: Any
) -> Case:
    def build() -> nn.Module:
        import timm

        torch.manual_seed(0)
        return timm.create_model(name, pretrained=False, num_classes=5, **config).eval()

    n = blocks if attentions is None else attentions
    return Case(f"timm/{name}", build, batch, blocks, n, blocks if mlps is None else mlps)


class Handwritten(nn.Module):
    """Blocks with nothing but parameters, `softmax` and `@`: no modules to hold on to."""

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 3) -> None:
        super().__init__()
        self.heads = heads
        shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 2 * width), "down": (2 * width, width)}
        for name, shape in shapes.items():
            setattr(self, name, nn.ParameterList([nn.Parameter(torch.randn(shape) * 0.2) for _ in range(layers)]))

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        b, n, d = x.shape
        layers: Any = zip(self.qkv, self.out, self.up, self.down, strict=True)  # type: ignore[arg-type]
        for qkv, out, up, down in layers:
            q, k, v = (x @ qkv).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
            scores = q @ k.mT / q.shape[-1] ** 0.5
            if key_padding_mask is not None:
                scores = scores.masked_fill(key_padding_mask[:, None, None], torch.finfo(scores.dtype).min)
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d) @ out
            x = x + torch.relu(x @ up) @ down
        return x


class WithMultihead(nn.Module):
    """`nn.MultiheadAttention` in a hand-written pre-norm block."""

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
            self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm1(x)
            x = x + self.attention(y, y, y, need_weights=False)[0]
            return x + self.mlp(self.norm2(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(16, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _plain(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return build().eval()

    return made


def _vectors(name: str, padding: str | None = None, width: int = 16) -> Callable[[], Batch]:
    def make() -> Batch:
        batch: Batch = {name: torch.randn(2, 7, width, generator=torch.Generator().manual_seed(7))}
        if padding:
            hidden = torch.zeros(2, 7, dtype=torch.bool)
            hidden[1, 5:] = True
            batch[padding] = hidden
        return batch

    return make


def _encoder(**more: Any) -> Callable[[], nn.Module]:
    return _plain(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **more), 3))


T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}

HUGGING_FACE = [
    hf("bert", SMALL),
    hf("roberta", {**SMALL, "pad_token_id": 0}),
    hf("albert", {**SMALL, "embedding_size": 16, "num_hidden_groups": 1}),
    hf("distilbert", {"vocab_size": 64, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 32}),
    hf("electra", {**SMALL, "embedding_size": 16}),
    hf("deberta-v2", {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "max_relative_positions": 16}),
    hf("xlnet", {"vocab_size": 64, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48}),
    hf("modernbert", {**SMALL, "local_attention": 4, "global_attn_every_n_layers": 2, "pad_token_id": 0}),
    hf("gpt2", GPT, text(side="left"), auto="AutoModelForCausalLM"),
    hf("gptj", {**GPT, "rotary_dim": 4}, auto="AutoModelForCausalLM"),
    hf("gpt_neox", SMALL, auto="AutoModelForCausalLM"),
    hf("opt", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32}),
    hf("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    hf("falcon", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "new_decoder_architecture": True, "num_kv_heads": 2}),
    hf("falcon", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "alibi": True, "parallel_attn": False, "multi_query": False}, name="falcon-alibi", twofold=True, why="with ALiBi its SDPA and eager outputs differ by 0.1, without a probe"),
    hf("mpt", {"vocab_size": 64, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 32, "expansion_ratio": 2}),
    hf("phi", SMALL),
    hf("llama", LLAMA, text(side="left"), auto="AutoModelForCausalLM"),
    hf("mistral", {**LLAMA, "sliding_window": 4}),
    hf("gemma2", {**LLAMA, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    hf("qwen3", LLAMA),
    hf("mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    hf("gpt_oss", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),
    hf("cohere", LLAMA),
    hf("t5", T5, _seq2seq, blocks=4, attentions=6),
    hf("bart", SEQ2SEQ, _seq2seq, blocks=4, attentions=6),
    hf("whisper", {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}, _whisper, blocks=4, attentions=6),
    hf("wav2vec2", {**SMALL, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}, _wav2vec),
    hf("vit", VISION, pixels(16)),
    hf("beit", {**VISION, "use_relative_position_bias": True}, pixels(16)),
    hf("swin", {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}, pixels(16), blocks=4),
    hf("swinv2", {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}, pixels(16), blocks=4),
    hf("dinov2", VISION, pixels(16)),
    hf("clip", {"text_config": {**SMALL, "num_hidden_layers": 2, "eos_token_id": 2}, "vision_config": {**VISION, "num_hidden_layers": 2}, "projection_dim": 16}, _clip, blocks=4),
]  # fmt: skip

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}
TIMM = [
    timm_model("vit_tiny_patch16_224", pixels(16, name="x"), blocks=3, **VIT),
    timm_model("vit_small_patch14_reg4_dinov2", pixels(16, name="x"), blocks=3, **VIT),
    timm_model("deit_tiny_distilled_patch16_224", pixels(16, name="x"), blocks=3, **VIT),
    timm_model("beit_base_patch16_224", pixels(16, name="x"), blocks=3, **VIT),
    timm_model("eva02_tiny_patch14_224", pixels(16, name="x"), blocks=3, **VIT),
    timm_model("swin_tiny_patch4_window7_224", pixels(32, name="x"), blocks=4, img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)),
    timm_model("swinv2_tiny_window8_256", pixels(32, name="x"), blocks=4, img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)),
    timm_model("cait_xxs24_224", pixels(16, name="x"), blocks=5, img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=4),
    timm_model("xcit_nano_12_p16_224", pixels(32, name="x"), blocks=5, img_size=32, embed_dim=32, depth=3, num_heads=4),
    timm_model("pvt_v2_b0", pixels(64, name="x"), blocks=4, depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32), num_heads=(1, 2, 2, 4)),
    timm_model("mvitv2_tiny", pixels(64, name="x"), blocks=10, img_size=64),
    timm_model("levit_128s", pixels(128, name="x"), blocks=3, attentions=5, mlps=5, img_size=128, embed_dim=(32, 48, 64), num_heads=(2, 3, 4), depth=(1, 1, 1), key_dim=8),
    timm_model("twins_svt_small", pixels(64, name="x"), blocks=4, img_size=64, embed_dims=(16, 32, 32, 64), num_heads=(1, 2, 2, 4), depths=(1, 1, 1, 1)),
    timm_model("hiera_tiny_224", pixels(64, name="x"), blocks=4, img_size=(64, 64), embed_dim=16, stages=(1, 1, 1, 1)),
    timm_model("maxvit_rmlp_pico_rw_256", pixels(64, name="x"), blocks=4, img_size=64, depths=(1, 1), embed_dim=(32, 64), stem_width=(8, 32), head_hidden_size=32),
    timm_model("coat_lite_tiny", pixels(64, name="x"), blocks=4, img_size=64, embed_dims=(64, 64, 64, 64), serial_depths=(1, 1, 1, 1), num_heads=8),
    timm_model("convit_tiny", pixels(16, name="x"), blocks=3, img_size=16, patch_size=4, embed_dim=8, depth=3, num_heads=4, local_up_to_layer=2),
    timm_model("volo_d1_224", pixels(64, name="x"), blocks=20, img_size=64),
    timm_model("naflexvit_base_patch16_gap", pixels(16, name="x"), blocks=3, patch_size=4, embed_dim=32, depth=3, num_heads=4),
]  # fmt: skip

PLAIN = [
    Case("nn.TransformerEncoder", _encoder(), _vectors("src", "src_key_padding_mask"), 3, 3, 0, why="its fast path runs a layer in one kernel, so no MLP is seen"),
    Case("nn.TransformerEncoder-unmasked", _encoder(norm_first=True), _vectors("src"), 3, 3, 0, why="as above"),
    Case("nn.MultiheadAttention", _plain(WithMultihead), _vectors("x"), 3, 3, 3),
    Case("handwritten", _plain(Handwritten), _vectors("x", "key_padding_mask"), 3, 3, 3),
]  # fmt: skip

CASES = [*HUGGING_FACE, *TIMM, *PLAIN]
BY_NAME = {case.name: case for case in CASES}
