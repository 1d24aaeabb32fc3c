"""Law 5: an ablated forward is the forward without those parts, bit for bit; and how ablations are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laws
import rankprobe
from laws import assert_same, attached, floats, runs
from references import BLOCKS, PROJECTIONS, Without, by_hand, head_by_hand
from registry import CASES, Case

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
by_name = {case.name: case for case in CASES}
every = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])

ASKED: list[tuple[dict[str, Any], Without]] = [
    ({"skip": True}, Without(skip=("attention", "mlp"))),
    ({"skip": "attention"}, Without(skip=("attention",))),
    ({"skip": "mlp"}, Without(skip=("mlp",))),
    ({"mlp": True}, Without(parts=("mlp",))),
    ({"attention": True}, Without(parts=("attention",))),
    ({"skip": True, "mlp": True}, Without(skip=("attention", "mlp"), parts=("mlp",))),
    ({"skip": True, "attention": True}, Without(skip=("attention", "mlp"), parts=("attention",))),
    ({"skip": 0.5}, Without(skip=("attention", "mlp"), factor=0.5)),
    ({"skip": True, "mlp": True, "attention": True}, Without(skip=("attention", "mlp"), parts=("mlp", "attention"))),
]


@dtypes
@pytest.mark.parametrize("name", BLOCKS)
def test_ablation_is_the_forward_without(name: str, dtype: torch.dtype) -> None:
    model, batch = runs(by_name[name], dtype)
    laws.stir(model)
    fused = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), attached(model) as probe:
        torch.backends.mha.set_fastpath_enabled(False)
        plain = model(**batch)
        with by_hand(name, model, Without()):
            assert_same(model(**batch), plain)  # the hand-written forward is the model's own
        torch.backends.mha.set_fastpath_enabled(fused)
        for asked, without in ASKED:
            with by_hand(name, model, without):
                torch.backends.mha.set_fastpath_enabled(False)
                probe.detach()
                want = model(**batch)
                torch.backends.mha.set_fastpath_enabled(fused)
            probe = attached(model)
            with probe.ablate(**asked):
                have = model(**batch)
            assert_same(have, want)
            assert torch.backends.mha.get_fastpath_enabled() == fused
        probe.detach()


@dtypes
@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_removed_head_adds_zeros(name: str, dtype: torch.dtype) -> None:
    model, batch = runs(by_name[name], dtype)
    laws.stir(model)
    with torch.no_grad():
        with attached(model) as probe:
            model(**batch)
            heads = probe.anatomy.blocks[1].attentions[0].heads
            with probe.ablate(heads={1: [heads - 1]}):
                have = model(**batch)
        with head_by_hand(name, model, heads - 1, heads):
            want = model(**batch)
        assert_same(have, want)


# -- how it is asked for ----------------------------------------------------------------------------------------------


@pytest.fixture
def bert() -> tuple[Any, dict[str, Any]]:
    case = by_name["bert"]
    return case.build(), case.batch()


def ablated(probe: rankprobe.Probe, batch: dict[str, Any], *preset: str, **asked: Any) -> list[Tensor]:
    with torch.no_grad(), probe.ablate(*preset, **asked):
        return floats(probe.model(**batch))


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"mlp": [0, 1, 2]}, {"mlp": True}),
    ({"mlp": slice(None)}, {"mlp": True}),
    ({"mlp": [-1]}, {"mlp": [2]}),
    ({"mlp": {1: 0.0}}, {"mlp": [1]}),
    ({"mlp": {0: 0.5, 1: 0.5, 2: 0.5}}, {"mlp": 0.5}),
    ({"skip": {"attention": [1], "mlp": [1]}}, {"skip": [1]}),
    ({"heads": {1: True}}, {"heads": {1: [0, 1, 2, 3]}}),
    ({"heads": {"encoder.layer.1.attention.self#0/attention0": [2]}}, {"heads": {1: [2]}}),
    ({"heads": {1: {2: 0.0, 3: 1.0}}}, {"heads": {1: [2]}}),
    ({"preset": "pure-attention"}, {"skip": True, "mlp": True}),
    ({"preset": "no-mlp", "skip": True}, {"preset": "pure-attention"}),
    ({"preset": "paper-no-skip"}, {"skip": "attention"}),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_in_other_words(bert: tuple[Any, dict[str, Any]], one: dict[str, Any], other: dict[str, Any]) -> None:
    model, batch = bert
    with rankprobe.attach(model) as probe:
        assert_same(ablated(probe, batch, **one), ablated(probe, batch, **other))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"skip": [3]}, "skip: no layer 3; the model's layers are 0 to 2"),
    ({"mlp": [-4]}, "no layer -4"),
    ({"mlp": slice(5, 9)}, "none of the model's 3 layers"),
    ({"mlp": 1}, r"for layer 1 write \[1\], for a factor 1.0"),
    ({"mlp": 1.5}, "a factor is from 0.0"),
    ({"mlp": ["a"]}, "a layer is given by its number, not 'a'"),
    ({"skip": "norm"}, "whose skip connection"),
    ({"heads": {0: [4]}}, "no head 4 in layer 0; its 4 heads are 0 to 3"),
    ({"heads": {9: [0]}}, "no layer 9"),
    ({"heads": {"elsewhere": [0]}}, "no attention call 'elsewhere'"),
    ({"preset": "no-nothing"}, "no preset 'no-nothing': there are full, no-mlp"),
    ({"norm": 0.5}, "may be True, layer numbers or a slice"),
]


@pytest.mark.parametrize(("asked", "told"), WRONG)
def test_what_cannot_be_meant_is_told(bert: tuple[Any, dict[str, Any]], asked: dict[str, Any], told: str) -> None:
    model, batch = bert
    with rankprobe.attach(model) as probe:
        if "preset" not in asked:  # before anything is known of the model, the first forward tells
            with pytest.raises(rankprobe.RankprobeError, match=told):
                ablated(probe, batch, **asked)
        model(**batch)
        with pytest.raises(rankprobe.RankprobeError, match=told):
            probe.ablate(**asked)
        model(**batch)


def test_nothing_of_that_kind() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = layer

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attention(x, x, x, need_weights=False)[0]

    model, x = Bare(), torch.randn(2, 5, 8)
    with rankprobe.attach(model) as probe:
        model(x)
        with pytest.raises(rankprobe.RankprobeError, match="Bare has no MLP with a skip connection in a block"):
            probe.ablate(mlp=True)


def test_nested_contexts_add_up(bert: tuple[Any, dict[str, Any]]) -> None:
    model, batch = bert
    with torch.no_grad(), rankprobe.attach(model) as probe:
        plain = model(**batch)
        want = ablated(probe, batch, skip=True, mlp=[1])
        quarter = ablated(probe, batch, skip=0.25)
        with probe.ablate(skip=True) as outer:
            alone = floats(model(**batch))
            with probe.ablate(mlp=[1]) as inner:
                assert_same(floats(model(**batch)), want)
            assert_same(floats(model(**batch)), alone)
        with probe.ablate(skip=0.5), probe.ablate(skip=0.5):
            assert_same(floats(model(**batch)), quarter)
        assert_same(model(**batch), plain)
    assert (outer.forwards, inner.forwards, probe.forwards) == (2, 1, 2)


def test_each_variant_has_its_own_report(bert: tuple[Any, dict[str, Any]]) -> None:
    model, batch = bert
    with torch.no_grad(), rankprobe.attach(model, keep=("hidden", "attention"), heads=True) as probe:
        model(**batch)
        with probe.ablate("pure-attention") as pure:
            model(**batch)
            inside = pure.report()
        assert inside.variant == "skip=True, mlp=True" and "BertModel, skip=True, mlp=True" in str(inside)
        assert inside.layers[-1].residual < 0.1 * probe.report().layers[-1].residual
        assert not torch.equal(pure.hidden_states[-1], probe.hidden_states[-1])
        assert torch.equal(pure.attentions[0], probe.attentions[0])  # the first layer's input is the same
        assert not torch.equal(pure.attentions[1], probe.attentions[1])


def test_norms_passed_by(bert: tuple[Any, dict[str, Any]]) -> None:
    model, batch = bert
    with torch.no_grad():
        with rankprobe.attach(model) as probe:
            have = ablated(probe, batch, norm=[1])
        for name, module in list(model.named_modules()):
            if name.startswith("encoder.layer.1.") and isinstance(module, nn.LayerNorm):
                model.get_submodule(name.rpartition(".")[0]).LayerNorm = nn.Identity()
        assert_same(have, floats(model(**batch)))


# -- never silent -----------------------------------------------------------------------------------------------------


def test_a_context_without_a_forward(bert: tuple[Any, dict[str, Any]]) -> None:
    model, _ = bert
    probe = rankprobe.attach(model)
    with pytest.raises(rankprobe.RankprobeError, match="changed nothing: no forward of the model ran inside it"), probe.ablate(mlp=True):
        pass
    with pytest.raises(rankprobe.RankprobeError, match="changed nothing"), probe.ablate(mlp=True):
        model.encoder.layer[0](torch.randn(1, 3, 32))  # goes around the model
    with pytest.raises(ZeroDivisionError), probe.ablate(mlp=True):  # another's exception is not talked over
        raise ZeroDivisionError
    with pytest.raises(rankprobe.RankprobeError, match="no forward has run inside"):
        probe.ablate(mlp=True).report()


def test_what_was_not_reached_is_named() -> None:
    case = by_name["llama"]
    model: Any
    model, batch = case.build(), case.batch()
    layers = model.model.layers if hasattr(model, "model") else model.layers
    with torch.no_grad(), rankprobe.attach(model) as probe:
        model(**batch)
        layers[2].forward = lambda hidden_states, **_: hidden_states  # the layer is dropped behind our back
        with pytest.raises(rankprobe.RankprobeError, match=r"did not reach .*layers\.2.*skip"), probe.ablate(skip=True):
            model(**batch)


def test_a_compiled_module_is_refused(bert: tuple[Any, dict[str, Any]]) -> None:
    model, batch = bert
    probe = rankprobe.attach(model)
    model(**batch)
    model.encoder.layer[1].compile()
    with pytest.raises(rankprobe.RankprobeError, match=r"cannot be ablated: its module encoder.layer.1 is compiled"):
        probe.ablate(mlp=True)


def test_no_gradients_of_what_did_not_happen(bert: tuple[Any, dict[str, Any]]) -> None:
    model, batch = bert
    with rankprobe.attach(model) as probe, probe.ablate(mlp=True):
        out = model(**batch).last_hidden_state
        assert not out.requires_grad and torch.is_grad_enabled()
        with pytest.raises(ValueError, match="input_ids"):
            model(nonsense=1)
        assert torch.is_grad_enabled() and torch.backends.mha.get_fastpath_enabled()


def test_random_numbers_are_not_used_up(bert: tuple[Any, dict[str, Any]]) -> None:
    """The forward that learns the way runs beside the model's own."""
    model, batch = bert
    model.train()
    outs = []
    for known in (True, False):
        with torch.no_grad(), rankprobe.attach(model) as probe:
            if known:
                model(**batch)
            torch.manual_seed(3)
            outs.append(ablated(probe, batch, mlp=True))
    assert_same(outs[0], outs[1])


def test_generating_inside() -> None:
    model: Any = by_name["gpt2"].build()
    ids = torch.randint(1, 60, (1, 5))
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad(), rankprobe.attach(model) as probe:
        plain = model.generate(ids, **how)
        with probe.ablate("no-skip"):
            tokens = model.generate(ids, **how)
            whole = model(tokens, use_cache=False).logits  # no cache: what each token would have been
        assert torch.equal(whole[:, 4:-1].argmax(-1), tokens[:, 5:])
        assert torch.equal(model.generate(ids, **how), plain)


def test_a_stale_cache_is_refused() -> None:
    model: Any = by_name["gpt2"].build()
    ids = torch.randint(1, 60, (1, 5))
    with torch.no_grad(), rankprobe.attach(model) as probe:
        cache = model(ids, use_cache=True).past_key_values
        with probe.ablate("no-skip"):
            with pytest.raises(rankprobe.RankprobeError, match="holds keys and values of 5 tokens that ran outside"):
                model(ids[:, -1:], past_key_values=cache)
            own = model(ids, use_cache=True).past_key_values
            model(ids[:, -1:], past_key_values=own)
        model(ids[:, -1:], past_key_values=own)
        assert any("cache that an ablated forward had filled" in note for note in probe.report().notes)


@every
def test_ablation_comes_and_goes(case: Case) -> None:
    laws.ablation_comes_and_goes(case)
