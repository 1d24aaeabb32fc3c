"""The four variants side by side: curves, decay, answers, and the theory beside them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, BertConfig, BertForSequenceClassification, BertModel, GPT2Config, GPT2LMHeadModel

import rankprobe
from rankprobe import attention
from rankprobe.collapse import decay_of
from rankprobe.theory import bounds
from registry import CASES

by_name = {case.name: case for case in CASES}


def tokens(samples: int = 4, length: int = 24, vocab: int = 60) -> Tensor:
    return torch.randint(1, vocab, (samples, length), generator=torch.Generator().manual_seed(0))


# -- decay ------------------------------------------------------------------------------------------------------------

CURVES = [
    ([0.9] * 12, "none"),
    ([0.9 * 0.95**i for i in range(12)], "none"),
    ([0.9 * 0.5**i for i in range(12)], "exponential"),
    ([0.9 * 0.03**i for i in range(12)], "exponential"),  # meets rounding at the tenth
    ([0.5 ** (3**i) for i in range(6)], "doubly exponential"),
    ([0.5 ** (2**i) for i in range(8)], "doubly exponential"),
    ([0.5, 1e-3, 1e-18], "too fast to tell"),
    ([0.5, 1e-18], "too fast to tell"),
]


@pytest.mark.parametrize(("curve", "kind"), CURVES)
def test_decay_is_told_apart(curve: list[float], kind: str) -> None:
    assert decay_of(curve, 1e-15).kind == kind


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
def test_the_order_is_what_made_the_curve(order: float) -> None:
    logs = [-0.5]
    step = -1.0
    for _ in range(3):
        logs.append(logs[-1] + step)
        step *= order
    found = decay_of([math.exp(x) for x in logs], 1e-15)
    assert found.order == pytest.approx(order) and found.points == 4


# -- the shapes the paper speaks of -----------------------------------------------------------------------------------


def base(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "bert":
        return BertModel(BertConfig(num_hidden_layers=4), add_pooling_layer=False).eval()
    return AlbertModel(AlbertConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072, num_hidden_layers=4)).eval()


@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_pure_attention_falls_doubly_exponentially(kind: str) -> None:
    """bert-base and albert-base widths, random weights, 128 tokens; four layers, since the third meets rounding."""
    model = base(kind)
    with rankprobe.attach(model) as probe:
        found = probe.collapse(input_ids=tokens(2, 128, 30000), dtype=torch.float64)
    (stack,) = found.stacks
    assert found.decays["pure-attention"][stack].kind == "doubly exponential"
    assert 2.2 < found.decays["pure-attention"][stack].order < 3.5
    assert found.decays["full"][stack].kind == "none"
    assert found.curve("pure-attention")[-1] < 1e-12 < 0.1 < found.curve("full")[-1]
    assert next(model.parameters()).dtype == torch.float32
    for bound in found.bounds:
        assert bound.measured <= bound.contraction <= bound.cubic
    assert len(found.bounds) == 2  # the layers above rounding


# -- answers ----------------------------------------------------------------------------------------------------------


def small_bert(**more: Any) -> dict[str, Any]:
    return {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64, **more}


def test_answers_of_a_classifier() -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**small_bert(num_labels=5, initializer_range=0.3))).train()
    ids, labels = tokens(16), torch.arange(16) % 5
    with rankprobe.attach(model) as probe:
        found = probe.collapse(input_ids=ids, labels=labels)
        assert all(m.training for m in model.modules())
        model.eval()
        with torch.no_grad():
            whole = model(input_ids=ids).logits.double()
            with probe.ablate("no-skip"):
                out = model(input_ids=ids, labels=labels)
    p, q = whole.softmax(-1).numpy(), out.logits.double().softmax(-1).numpy()
    effect = found.effects["no-skip"]
    assert effect.kl == pytest.approx(float((p * np.log(p / q)).sum(-1).mean()), rel=1e-4)
    assert effect.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).mean()))
    assert effect.loss == pytest.approx(float(out.loss), rel=1e-6)
    assert effect.accuracy == pytest.approx(float((q.argmax(-1) == labels.numpy()).mean()))
    assert found.effects["full"].kl == 0.0 and found.effects["full"].agreement == 1.0


def test_answers_of_a_language_model_are_for_the_next_token() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=32)).eval()
    ids = tokens()
    labels = ids.masked_fill(torch.arange(24) < 4, -100)
    with rankprobe.attach(model) as probe, torch.no_grad():
        found = probe.collapse(input_ids=ids, labels=labels)
        logits = model(input_ids=ids).logits
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100]
    assert found.effects["full"].accuracy == pytest.approx(float(right.float().mean()))


def test_padding_has_no_answer() -> None:
    torch.manual_seed(0)
    model = BertModel(BertConfig(**small_bert()), add_pooling_layer=False).eval()
    ids = tokens()
    mask = (torch.arange(24) < torch.tensor([[24], [20], [9], [3]])).long()
    other = ids.masked_fill(mask == 0, 7)
    with rankprobe.attach(model) as probe:
        one, two = (probe.collapse(input_ids=x, attention_mask=mask) for x in (ids, other))
    assert one.effects["no-mlp"].change == pytest.approx(two.effects["no-mlp"].change, rel=1e-5)
    assert one.curve("no-mlp") == pytest.approx(two.curve("no-mlp"), rel=1e-5)


@pytest.mark.parametrize("name", ["t5", "whisper", "clip", "timm/vit_tiny_patch16_224", "timm/swin_tiny_patch4_window7_224", "handwritten"])
def test_any_model(name: str, tmp_path: Path) -> None:
    case = by_name[name]
    model, batch = case.build(), case.batch()
    with rankprobe.attach(model) as probe:
        found = probe.collapse(**batch)
        assert probe.forwards == 0
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    assert all(len(found.curve(v, stack=s)) == len(found.deviation(v, stack=s)) > 1 for v in found.variants for s in found.stacks)
    effect = found.effects["pure-attention"]
    assert effect.kl > 0 or effect.change > 0
    found.save(tmp_path / "collapse.json")
    assert json.loads((tmp_path / "collapse.json").read_text())["reports"].keys() == set(found.variants)
    assert found.metrics()["no-skip.layer.0.residual"] == found.curve("no-skip")[1]


def test_other_variants_by_name_and_by_hand() -> None:
    model = BertModel(BertConfig(**small_bert()), add_pooling_layer=False).eval()
    with rankprobe.attach(model) as probe:
        found = probe.collapse(input_ids=tokens(), variants={"half": {"skip": 0.5}, "headless": {"heads": {0: True}}})
        assert found.variants == ("half", "headless")
        with pytest.raises(rankprobe.RankprobeError, match="no variant 'full': there are half, headless"):
            found.curve("full")
        with pytest.raises(rankprobe.RankprobeError, match="no preset 'nothing'"):
            probe.collapse(input_ids=tokens(), variants=["nothing"])


def test_a_variant_that_cannot_be_is_told() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attention(x, x, x, need_weights=False)[0]

    with rankprobe.attach(Bare().eval()) as probe:
        found = probe.collapse(torch.randn(2, 5, 8))
    assert found.variants == ("full", "no-skip")
    assert any(note.startswith("no variant no-mlp: nothing to remove") for note in found.notes)


# -- theory -----------------------------------------------------------------------------------------------------------


def paper_norm(matrix: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.abs(matrix).sum(0).max() * np.abs(matrix).sum(1).max()))


def bert_weights(model: Any, layer: int) -> tuple[np.ndarray[Any, Any], ...]:
    block = model.encoder.layer[layer].attention
    return tuple(m.weight.detach().double().numpy().T for m in (block.self.query, block.self.key, block.self.value, block.output.dense))


def gpt2_weights(model: Any, layer: int) -> tuple[np.ndarray[Any, Any], ...]:
    block = model.h[layer].attn
    return (*np.split(block.c_attn.weight.detach().double().numpy(), 3, axis=1), block.c_proj.weight.detach().double().numpy())


def vit_weights(model: Any, layer: int) -> tuple[np.ndarray[Any, Any], ...]:
    block = model.blocks[layer].attn
    return (*np.split(block.qkv.weight.detach().double().numpy().T, 3, axis=1), block.proj.weight.detach().double().numpy().T)


@pytest.mark.parametrize(("kind", "read"), [("bert", bert_weights), ("gpt2", gpt2_weights), ("vit", vit_weights)])
def test_bounds_are_those_of_the_weights(kind: str, read: Any) -> None:
    """Against the weights taken from the modules by name, and attention kept whole."""
    torch.manual_seed(0)
    batch: dict[str, Any] = {"input_ids": tokens(3)}
    model: Any
    if kind == "bert":
        model = BertModel(BertConfig(**small_bert()), add_pooling_layer=False)
    elif kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=32)).transformer
        batch["use_cache"] = False
    else:
        model, batch = by_name["timm/vit_tiny_patch16_224"].build(), by_name["timm/vit_tiny_patch16_224"].batch()
    model = model.double().eval()
    batch = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    with torch.no_grad(), rankprobe.attach(model, keep=("attention",)) as probe:
        variant = probe.ablate("pure-attention")
        variant.theory = True
        with variant:
            model(**batch)
        found, unread = bounds(variant, 0.0)
        assert not unread and len(found) == len(probe.anatomy.blocks)
    for layer, bound in enumerate(found):
        q, k, v, o = read(model, layer)
        p = variant.attentions[layer].numpy()
        heads = p.shape[1]
        width = q.shape[1] // heads
        contraction = slope = 0.0
        for h in range(heads):
            cols = slice(h * width, (h + 1) * width)
            off = p[:, h] - p[:, h].mean(1, keepdims=True)
            size = paper_norm(v[:, cols] @ o[cols])
            contraction += max(map(paper_norm, off)) * size
            slope += 4 / np.sqrt(width) * np.abs(q[:, cols] @ k[:, cols].T).sum(0).max() * size
        assert bound.contraction == pytest.approx(contraction, rel=1e-6)
        assert bound.cubic == pytest.approx(slope * variant.record.moments.summary()[_given(variant, layer)][0].high ** 2, rel=1e-6)
        assert bound.measured <= bound.contraction * (1 + 1e-9) + 1e-9  # rounding, in the last layer


def _given(variant: rankprobe.Ablation, layer: int) -> str:
    return f"{variant.anatomy.blocks[layer].skips[0].key}/theory"


def test_what_goes_into_an_attention_layer_is_measured() -> None:
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=32)).transformer.double().eval()
    seen: list[tuple[Tensor, Tensor]] = []
    for block in model.h:
        block.attn.register_forward_hook(lambda _m, args, out: seen.append((args[0], out[0])))
    with torch.no_grad(), rankprobe.attach(model) as probe:
        model(tokens(3), use_cache=False)
        variant = probe.ablate("pure-attention")
        variant.theory = True
        with variant:
            seen.clear()
            model(tokens(3), use_cache=False)
    for layer, bound in enumerate(bounds(variant, 0.0)[0]):
        before, after = ([paper_norm((x - x.mean(0)).numpy()) for x in side] for side in seen[layer])
        assert bound.residual == pytest.approx(np.mean(before), rel=1e-9)
        assert bound.measured == pytest.approx(np.mean([b / a for a, b in zip(before, after, strict=True)]), rel=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_deviation_in_blocks(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(2, 2, 3, 7, 4, dtype=torch.float64).unbind(0)
    call = attention.Attention((2, 3), 7, 7, q=q, k=k, causal=causal, scale=0.5)
    mask = torch.arange(7) < torch.tensor([[7], [5]])
    full = attention.matrix(call).numpy()
    want = []
    for g, p in enumerate(full):
        rows = p[mask[g // 3].numpy()]
        want.append(paper_norm(rows - rows.mean(0)))
    monkeypatch.setitem(attention.BLOCK_BYTES, "cpu", 200)
    np.testing.assert_allclose(attention.deviation(call, mask)[0].numpy(), want, rtol=1e-10)
