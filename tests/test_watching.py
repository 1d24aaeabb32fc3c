"""A probe keeps working where models are really used: generation, training, wrappers, threads, interrupts."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import threading
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import rankprobe
from laws import assert_same, attached, state_of
from rankprobe.moments import Moments
from registry import BY_NAME


@pytest.fixture
def bert() -> nn.Module:
    return BY_NAME["bert"].build()


@pytest.fixture
def llama() -> nn.Module:
    return BY_NAME["llama"].build()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return BY_NAME["bert"].batch()


def test_generate_with_a_cache(llama: Any) -> None:
    ids = torch.randint(3, 64, (2, 6))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "min_new_tokens": 5}
    plain = llama.generate(ids, **settings)
    with attached(llama) as probe:
        assert torch.equal(llama.generate(ids, **settings), plain)
        report = probe.report()
    assert probe.forwards == 5
    assert report.problems == ()
    # Only the prompt has tokens to compare; every step has attention rows.
    assert all(layer.samples == 2 for layer in report.layers)
    rows = probe.record.moments.summary()[probe.anatomy.attentions[0].key]
    assert rows[0].count == 2 * 5


def test_a_key_value_cache_is_attended_to_in_full(llama: Any) -> None:
    """Two halves with a cache see what one whole forward sees."""
    ids = torch.randint(3, 64, (2, 8))
    with torch.no_grad(), attached(llama, keep=("attention",)) as probe:
        llama(ids)
        whole = probe.attentions
        cache = llama(ids[:, :5], use_cache=True).past_key_values
        llama(ids[:, 5:], past_key_values=cache, use_cache=True)
        for full, half in zip(whole, probe.attentions, strict=True):
            torch.testing.assert_close(half, full[:, :, 5:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    def grads(probed: bool) -> tuple[list[Tensor], Any]:
        model: Any = BY_NAME["llama"].build().train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        probe = attached(model) if probed else None
        ids = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            model(ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None], probe and probe.report()

    plain, _ = grads(False)
    watched, report = grads(True)
    assert_same(watched, plain)
    # The recomputation in the backward pass is not counted again.
    assert report.forwards == 3 and all(layer.samples == 6 for layer in report.layers)


def test_autocast_measures_in_float32(bert: nn.Module, batch: dict[str, Tensor]) -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = bert(**batch)
        with attached(bert, keep=("hidden", "attention")) as probe:
            for _ in range(2):
                assert_same(bert(**batch), plain)
    assert probe.attentions[0].dtype == torch.float32
    assert probe.report().watched == probe.report().found


def test_inference_mode_then_not(bert: nn.Module, batch: dict[str, Tensor]) -> None:
    with attached(bert) as probe:
        for _ in range(2):
            with torch.inference_mode():
                bert(**batch)
            bert(**batch).last_hidden_state.sum().backward()
    assert probe.report().layers[0].samples == 8


def test_training_and_evaluation_in_turn() -> None:
    """Each has its own way (a fused layer kernel in one, dropout in the other), and neither spoils the other's numbers."""
    case = BY_NAME["nn.TransformerEncoder"]
    model, batch = case.build(), case.batch()
    with torch.no_grad():
        plain = model(**batch)
        with attached(model) as probe:
            for _ in range(2):
                assert_same(model(**batch), plain)
                model.train()
                model(**batch)
                model.eval()
            assert_same(model(**batch), plain)
    report = probe.report()
    assert report.problems == ()
    assert report.forwards == 5
    assert len(report.layers) == 3


def test_another_way_through_the_model_is_traced_anew() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.short, self.long = BY_NAME["handwritten"].build(), BY_NAME["nn.MultiheadAttention"].build()

        def forward(self, x: Tensor) -> Tensor:
            return self.long(x) if x.shape[1] > 8 else self.short(x)

    model = Fork()
    with torch.no_grad(), attached(model) as probe:
        model(torch.randn(2, 7, 16))
        assert probe.report().found["blocks"] == 3
        for _ in range(3):
            model(torch.randn(2, 12, 16))
        report = probe.report()
    assert report.found["blocks"] == 6 and report.watched["blocks"] == 6
    assert any("another way" in note for note in report.notes)


def test_two_probes_see_the_same(bert: nn.Module, batch: dict[str, Tensor]) -> None:
    with torch.no_grad(), attached(bert) as one, attached(bert) as two:
        for _ in range(3):
            bert(**batch)
    assert one.report() == two.report()


def test_a_probe_on_a_submodule(bert: Any, batch: dict[str, Tensor]) -> None:
    """The mask has four axes there; padding is told by the keys that nobody may see."""
    with torch.no_grad(), attached(bert) as whole, attached(bert.encoder) as part:
        for _ in range(2):
            bert(**batch)
    for a, b in zip(whole.report().layers, part.report().layers, strict=True):
        assert a.residual == pytest.approx(b.residual, rel=1e-6)


def test_padding_changes_nothing(bert: nn.Module) -> None:
    ids = torch.randint(3, 64, (3, 6))
    padded = torch.cat((ids, torch.zeros(3, 5, dtype=torch.long)), 1)
    mask = torch.cat((torch.ones_like(ids), torch.zeros(3, 5, dtype=torch.long)), 1)
    with torch.no_grad(), attached(bert) as plain, attached(bert.eval()) as both:
        bert(input_ids=ids, attention_mask=torch.ones_like(ids))
        plain.detach()
        both.reset()
        bert(input_ids=padded, attention_mask=mask)
    for a, b in zip(plain.report().layers, both.report().layers, strict=True):
        assert a.residual == pytest.approx(b.residual, rel=1e-4)
        assert a.effective_rank == pytest.approx(b.effective_rank, rel=1e-4)
        for h, k in zip(a.heads, b.heads, strict=True):
            assert h.entropy == pytest.approx(k.entropy, rel=1e-4)
            assert h.residual == pytest.approx(k.residual, rel=1e-3, abs=1e-5)


def test_peft(llama: Any) -> None:
    from peft import LoraConfig, get_peft_model

    ids = torch.randint(3, 64, (2, 6))
    with torch.no_grad():
        wrapped = get_peft_model(llama, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]))
        plain = wrapped(ids)
        with attached(wrapped) as probe:
            for _ in range(2):
                assert_same(wrapped(ids).logits, plain.logits)
    assert probe.report().watched == probe.report().found == {"blocks": 3, "attention calls": 3, "skip connections": 6, "MLP branches": 3}


def test_wrapped_by_peft_after_attaching(llama: Any) -> None:
    from peft import LoraConfig, get_peft_model

    ids = torch.randint(3, 64, (2, 6))
    with torch.no_grad(), attached(llama) as probe:
        llama(ids)
        wrapped = get_peft_model(llama, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]))
        for _ in range(3):
            wrapped(ids)
    assert probe.report().problems == ()
    assert probe.forwards == 4


def test_data_parallel_and_threads(bert: nn.Module, batch: dict[str, Tensor]) -> None:
    """Without a GPU, DataParallel calls its module; its threads are run here by hand."""
    with torch.no_grad():
        wrapped = nn.DataParallel(bert)
        with attached(wrapped) as probe:
            for _ in range(2):
                wrapped(**batch)
        assert probe.report().watched == probe.report().found
        with attached(bert) as probe:
            bert(**batch)
            for _ in range(4):
                threads = [threading.Thread(target=lambda: bert(**batch)) for _ in range(2)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
    assert probe.forwards == 9
    assert all(layer.samples == 18 for layer in probe.report().layers)


def test_compiled_models_are_refused(bert: nn.Module) -> None:
    with pytest.raises(rankprobe.RankprobeError, match="compiled"):
        rankprobe.attach(torch.compile(bert))  # type: ignore[arg-type]
    bert.compile()
    with pytest.raises(rankprobe.RankprobeError, match="compiled"):
        rankprobe.attach(bert)


def test_compiling_a_watched_model_is_never_a_silent_nothing() -> None:
    case = BY_NAME["nn.MultiheadAttention"]
    model, batch = case.build(), case.batch()
    with torch.no_grad(), attached(model) as probe:
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            compiled(**batch)
        assert probe.forwards == 2
        assert probe.report().watched == probe.report().found


def test_pickled_and_copied_models_work_and_are_not_watched(bert: nn.Module, batch: dict[str, Tensor]) -> None:
    with torch.no_grad(), attached(bert) as probe:
        expected = bert(**batch)
        bert(**batch)
        for clone in (copy.deepcopy(bert), pickle.loads(pickle.dumps(bert))):
            assert_same(clone(**batch), expected)
        buffer = io.BytesIO()
        torch.save(bert, buffer)
        assert probe.forwards == 2


def test_ctrl_c_in_the_middle(bert: Any, batch: dict[str, Tensor]) -> None:
    """KeyboardInterrupt passes hooks by; the probe cleans up the next time it is touched."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt  # not by a signal, which a background job ignores

    with torch.no_grad():
        bert(**batch)
        before = state_of(bert)
        for warm in (False, True):
            probe = attached(bert)
            if warm:
                bert(**batch)
            trap = bert.encoder.layer[1].output.dense.register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                bert(**batch)
            trap.remove()
            bert(**batch)
            assert probe.forwards == 1 + warm
            with_trap = bert.encoder.layer[1].output.dense.register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                bert(**batch)
            with_trap.remove()
            probe.detach()
            assert state_of(bert) == before


def test_memory_stays_flat_over_two_thousand_forwards() -> None:
    case = BY_NAME["nn.MultiheadAttention"]
    model, batch = case.build(), case.batch()
    process = psutil.Process()
    with torch.no_grad(), attached(model) as probe:
        for _ in range(300):
            model(**batch)
        gc.collect()
        before = process.memory_info().rss
        tensors = sum(isinstance(o, Tensor) for o in gc.get_objects())
        for _ in range(2000):
            model(**batch)
        gc.collect()
        assert sum(isinstance(o, Tensor) for o in gc.get_objects()) <= tensors + 5
        assert process.memory_info().rss - before < 8 << 20
    assert probe.report().layers[0].samples == 2 * 2300


def test_nothing_is_kept_alive_between_forwards(bert: nn.Module, batch: dict[str, Tensor]) -> None:
    with torch.no_grad(), attached(bert) as probe:
        bert(**batch)
        bert(**batch)
        gc.collect()
        held = [o for o in gc.get_objects() if isinstance(o, Tensor) and not isinstance(o, nn.Parameter) and o.numel() >= 9 * 32]
        buffers = {id(b) for b in bert.buffers()}
        assert [tuple(t.shape) for t in held if id(t) not in buffers and t.shape[-1] == 32] == []
        assert probe.forwards == 2


def test_statistics_of_batches_are_those_of_their_samples(bert: nn.Module) -> None:
    ids = torch.randint(3, 64, (6, 8))
    with torch.no_grad(), attached(bert) as whole:
        bert(input_ids=ids)
    with torch.no_grad(), attached(bert) as parts:
        for row in ids.split(2):
            bert(input_ids=row)
    for a, b in zip(whole.report().layers, parts.report().layers, strict=True):
        assert a.samples == b.samples == 6
        for name in ("residual", "cosine", "effective_rank"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-5)
            assert a.std[name] == pytest.approx(b.std[name], rel=1e-3, abs=1e-6)
            assert a.low[name] == pytest.approx(b.low[name], rel=1e-5)


def test_probes_of_several_processes_merge(bert: nn.Module) -> None:
    ids = torch.randint(3, 64, (4, 8))
    with torch.no_grad(), attached(bert) as whole:
        bert(input_ids=ids)
    merged = Moments()
    for part in ids.split(2):
        with torch.no_grad(), attached(bert) as probe:
            bert(input_ids=part)
        merged.merge(probe.record.moments)
    for key, rows in whole.record.moments.summary().items():
        for a, b in zip(rows, merged.summary()[key], strict=True):
            assert a.count == b.count
            assert a.mean == pytest.approx(b.mean, rel=1e-4, abs=1e-6) or math.isnan(a.mean)
