"""What a report says, prints and saves."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankprobe
import rankprobe.report
from laws import attached
from registry import BY_NAME


@pytest.fixture
def report() -> rankprobe.Report:
    case = BY_NAME["t5"]
    model = case.build()
    with torch.no_grad(), attached(model, spectrum=True) as probe:
        model(**case.batch())
        model(**case.batch())
    return probe.report()


def test_saved_and_loaded(report: rankprobe.Report, tmp_path: Path) -> None:
    report.save(tmp_path / "r.json")
    again = rankprobe.load(tmp_path / "r.json")
    assert again.metrics() == report.metrics()
    assert str(again) == str(report)
    assert again.verdict == report.verdict
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]


def test_prints_within_eighty_columns(report: rankprobe.Report) -> None:
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    for stack in ("encoder.block", "decoder.block"):
        assert stack in text
    assert "Watched 4 of 4 blocks, 6 of 6 attention calls" in text


def test_no_number_is_cut_short() -> None:
    """The widest names and numbers that come up: a module deep in a shared stack, values from 1e-9 to 1e9."""
    layer = rankprobe.report.Layer(10, "albert.encoder.albert_layer_groups.0.albert_layers.0 (call 11)", "s", samples=4)
    numbers = {"residual": 1.2e-9, "cosine": -0.123, "effective_rank": 1234.56, "block_influence": 1.23e-9, "residual_fro": 0.5}
    skips = (rankprobe.report.SkipRatio("mlp", 1.234e9),)
    heads = (rankprobe.report.Head(0.0, 0.1, 0.1), rankprobe.report.Head(1.0, 0.1, 0.1))
    wide = dataclasses.replace(layer, **numbers, std={"residual": 1.5e-10}, skips=skips, heads=heads)  # type: ignore[arg-type]
    text = str(rankprobe.Report("m", 1, {}, {}, (), (wide,)))
    row = next(line for line in text.splitlines() if line.startswith("10 "))
    assert row.split()[-7:] == ["1.2e-09", "1.5e-10", "-0.123", "1234.6", "1.2e+09", "1.2e-09", "0.00–1.00"]
    assert max(map(len, text.splitlines())) <= 80


def test_heads_are_measured_once_by_default_and_always_on_request() -> None:
    case = BY_NAME["bert"]
    for heads, samples in ((False, 2), (True, 6)):
        model = case.build()
        with torch.no_grad(), attached(model, heads=heads) as probe:
            for _ in range(3):
                model(**case.batch())
        report = probe.report()
        assert report.watched == report.found
        assert [len(layer.heads) for layer in report.layers] == [4, 4, 4]
        assert probe.record.moments.summary()[probe.anatomy.attentions[2].key][0].count == samples
        assert any("first forward only, 2 samples" in note for note in report.notes) is not heads


def test_metrics_are_flat_and_finite(report: rankprobe.Report) -> None:
    metrics = report.metrics()
    assert {"layer.0.residual", "layer.3.head.0.entropy", "input.1.cosine", "layer.2.branch_ratio", "layer.0.stable_rank"} <= set(metrics)
    assert all(isinstance(v, float) for v in metrics.values())


def test_html_shows_hostile_names_as_text(tmp_path: Path) -> None:
    class Hostile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("</script><b>[/foo]", BY_NAME["nn.MultiheadAttention"].build())

        def forward(self, x: Tensor) -> Tensor:
            return next(self.children())(x)

    model = Hostile()
    with torch.no_grad(), attached(model) as probe:
        model(torch.randn(2, 7, 16))
    report = probe.report()
    report.to_html(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "</script><b>" not in page and "&lt;b&gt;[/foo]" in page
    assert "<b>[/foo]" in str(report) and "<b>[/foo]" in str(probe.anatomy)
    assert "<pre" in report._repr_html_()


class Bare(nn.Module):
    """Attention without skip connections: the paper's case."""

    class Layer(nn.Module):
        def __init__(self, sharp: float) -> None:
            super().__init__()
            self.sharp = sharp
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.out(nn.functional.scaled_dot_product_attention((q * self.sharp)[:, None], k[:, None], v[:, None])[:, 0])

    def __init__(self, sharp: float = 1.0, skip: float = 0.0) -> None:
        super().__init__()
        self.skip = skip
        self.layers = nn.ModuleList(self.Layer(sharp) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.skip * x + layer(x) if self.skip else layer(x)
        return x


def judged(model: nn.Module, x: Tensor) -> Any:
    with torch.no_grad(), attached(model) as probe:
        model(x)
    return probe.report().verdict


def test_verdicts() -> None:
    x = torch.randn(4, 12, 16)
    collapsed = judged(Bare(), x)
    assert str(collapsed) == "collapsed" and collapsed.layer is not None and collapsed.layer <= 2
    assert any("uniform attention" in e for e in collapsed.evidence)
    assert any("no skip connection" in e for e in collapsed.evidence)
    weak = judged(Bare(skip=0.01), x)
    assert str(weak) == "collapsed" and any("weak skips" in e for e in weak.evidence)
    assert str(judged(Bare(skip=1.0), x)) == "healthy"
    peaked = judged(Bare(sharp=1e5, skip=1.0), x)
    assert str(peaked) == "at risk" and "opposite of rank collapse" in peaked.reason
    alike = judged(Bare(skip=1.0), torch.randn(4, 1, 16).expand(4, 12, 16) + 0.01 * torch.randn(4, 12, 16))
    assert str(alike) == "healthy" and "came in so" in alike.reason


def test_golden_terminal_output() -> None:
    """The report of a fixed model, to the letter; REFRESH=1 writes it anew."""
    import os

    torch.manual_seed(0)
    model = Bare(skip=1.0).double()
    with torch.no_grad(), attached(model) as probe:
        model(torch.randn(4, 12, 16, dtype=torch.float64))
    text = f"{probe.anatomy}\n\n{probe.report()}\n"
    golden = Path(__file__).parent / "golden" / "report.txt"
    if os.environ.get("REFRESH"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_importing_is_light() -> None:
    check = "import sys, rankprobe; sys.exit(bool({'transformers', 'timm', 'scipy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
    check = "import sys, rankprobe.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
    import rankprobe.integrations

    assert rankprobe.integrations.__doc__


def test_the_command_answers() -> None:
    out = subprocess.run([sys.executable, "-m", "rankprobe", "--version"], capture_output=True, text=True)
    assert out.returncode == 0 and out.stdout == f"rankprobe {rankprobe.__version__}\n"
    assert subprocess.run([sys.executable, "-m", "rankprobe", "nonsense"], capture_output=True).returncode == 2


def test_first_look() -> None:
    out = subprocess.run([sys.executable, "examples/first_look.py"], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert out.returncode == 0, out.stderr
    assert "Healthy" in out.stdout and "Collapsed at layer 1" in out.stdout
