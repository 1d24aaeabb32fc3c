"""Each way to go wrong gets a sentence that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankprobe
from laws import attached
from rankprobe import RankprobeError
from registry import BY_NAME


@pytest.fixture
def model() -> Any:
    return BY_NAME["bert"].build()


def test_not_a_module() -> None:
    with pytest.raises(RankprobeError, match=r"takes a torch.nn.Module, not str"):
        rankprobe.attach("bert-base-uncased")  # type: ignore[arg-type]


def test_no_attention() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with attached(model) as probe:
        model(torch.randn(2, 3, 4))
    with pytest.raises(RankprobeError, match="no attention found in Sequential"):
        probe.report()


def test_a_forward_that_never_ran(model: Any) -> None:
    with attached(model) as probe:
        model.embeddings(torch.tensor([[3, 4]]))
    for ask in (probe.report, lambda: probe.anatomy):
        with pytest.raises(RankprobeError, match="no forward of BertModel has run"):
            ask()


def test_not_a_number_is_told_by_layer(model: Any) -> None:
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight[0, 0] = float("nan")
        with attached(model) as probe:
            model(**BY_NAME["bert"].batch())
    report = probe.report()
    assert [layer.nonfinite for layer in report.layers] == [0, 2, 2]
    assert str(report.verdict) == "collapsed" and report.verdict.layer == 1
    assert "NaN or Inf" in str(report)


def test_one_token_only(model: Any) -> None:
    with torch.no_grad(), attached(model) as probe:
        model(input_ids=torch.tensor([[3], [4]]))
    with pytest.raises(RankprobeError, match="one token only"):
        probe.report()


def test_a_sample_of_padding_alone(model: Any) -> None:
    batch = BY_NAME["bert"].batch()
    batch["attention_mask"][0] = 0
    with torch.no_grad(), attached(model) as probe:
        model(**batch)
    report = probe.report()
    assert report.layers[0].samples == 1
    assert any("1 samples had fewer than two tokens" in note for note in report.notes)


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(8, 2)
    with pytest.raises(RankprobeError, match="on the meta device"):
        rankprobe.attach(model)


def test_wrong_keep(model: Any) -> None:
    with pytest.raises(RankprobeError, match="can keep 'attention' and 'hidden'"):
        rankprobe.attach(model, keep=("attentions",))
    with attached(model) as probe:
        model(**BY_NAME["bert"].batch())
    with pytest.raises(RankprobeError, match=r'attach with keep=\("hidden",\)'):
        _ = probe.hidden_states


def test_a_mask_that_fits_nothing_is_told(model: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = BY_NAME["handwritten"].build()

        def forward(self, x: Tensor, token_mask: Tensor) -> Tensor:
            return self.inner(x)

    odd = Odd()
    with torch.no_grad(), attached(odd) as probe:
        odd(torch.randn(2, 7, 16), token_mask=torch.ones(2, 50))
    assert any("token_mask fits no hidden state" in note for note in probe.report().notes)
    with torch.no_grad(), attached(odd, mask=lambda x, token_mask: token_mask[:, :7]) as probe:
        odd(torch.randn(2, 7, 16), token_mask=torch.tensor([[1] * 7, [1] + [0] * 6]))
    assert probe.report().layers[0].samples == 1


def test_a_measurement_that_fails_is_told_and_the_model_goes_on(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankprobe import metrics

    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no such luck")

    batch = BY_NAME["bert"].batch()
    with torch.no_grad():
        expected = model(**batch).last_hidden_state
        monkeypatch.setattr(metrics, "cosine", broken)
        with rankprobe.attach(model) as probe:
            assert torch.equal(model(**batch).last_hidden_state, expected)
            assert torch.equal(model(**batch).last_hidden_state, expected)
    assert any("no such luck" in line for line in probe.report().problems)


def test_files_that_are_no_report(tmp_path: Path) -> None:
    for text, message in (("", "not a report"), ("{}", "schema"), ('{"schema": 1}', "not a whole report"), ("[1]", "schema")):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(RankprobeError, match=message):
            rankprobe.load(tmp_path / "r.json")
    with pytest.raises(RankprobeError, match="no such file"):
        rankprobe.load(tmp_path / "absent.json")
