"""Law 5: an ablated forward is the forward without those parts, bit for bit; and how ablations are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import laws
from laws import assert_same, attached, runs
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


@every
def test_ablation_comes_and_goes(case: Case) -> None:
    laws.ablation_comes_and_goes(case)
