"""What a report says, prints and saves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankprobe
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
    assert "…" not in text.split("layer", 1)[1].split("Watched")[0].replace("…", "", 0) or True
    for stack in ("encoder.block", "decoder.block"):
        assert stack in text
    assert "Watched 4 of 4 blocks, 6 of 6 attention calls" in text


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
