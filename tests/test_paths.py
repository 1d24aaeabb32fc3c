"""Law 4: parts by path length sum to the output; and they are the right parts."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import laws
import rankprobe
from rankprobe.shadow import Label
from registry import CASES, Case

every = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
by_name = {case.name: case for case in CASES}


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_parts_sum_to_the_output(case: Case, dtype: torch.dtype) -> None:
    laws.parts_sum_to_the_output(case, dtype)


# -- oracles ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.q, self.k, self.v = (nn.Linear(width, heads * 4) for _ in range(3))
        self.o = nn.Linear(heads * 4, width)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, 4)).transpose(1, 2)

    def weights(self, x: Tensor) -> Tensor:
        return (self.split(self.q(x)) @ self.split(self.k(x)).mT / 2).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            mixed = F.scaled_dot_product_attention(self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x)))
        else:
            mixed = self.weights(x) @ self.split(self.v(x))
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class Net(nn.Module):
    """The theorem's network with skip connections: X + Σ P X W + b in every layer, and no more."""

    def __init__(self, layers: int, heads: int, fused: bool = True) -> None:
        super().__init__()
        torch.manual_seed(layers * 10 + heads)
        self.layers = nn.ModuleList(Attention(6, heads, fused) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def enumerate_paths(net: Net, x: Tensor) -> list[Tensor]:
    """Every path by the theorem's formula, one by one: at each layer straight on, or through one head. Biases begin paths too."""
    lengths = [torch.zeros_like(x) for _ in range(len(net.layers) + 1)]
    seen, stream = [], x
    for layer in net.layers:
        assert isinstance(layer, Attention)
        seen.append(layer.weights(stream))
        stream = stream + layer(stream)

    def through(number: int, head: int, y: Tensor) -> Tensor:
        layer: Any = net.layers[number]
        rows = slice(head * 4, head * 4 + 4)
        return seen[number][:, head] @ y @ layer.v.weight[rows].T @ layer.o.weight[:, rows].T

    starts: list[tuple[int, int, Tensor]] = [(0, 0, x)]  # layer to go on from, length so far, what sets out
    for number, layer in enumerate(net.layers):
        starts.append((number + 1, 0, layer.o.bias.expand_as(x)))  # type: ignore[union-attr, operator]
        for head in range(layer.heads):  # type: ignore[arg-type]
            rows = slice(head * 4, head * 4 + 4)
            value = seen[number][:, head] @ layer.v.bias[rows].expand(*x.shape[:2], 4)  # type: ignore[index, union-attr]
            starts.append((number + 1, 1, value @ layer.o.weight[:, rows].T))  # type: ignore[index, union-attr]
    for first, length, begin in starts:
        for choice in itertools.product((None, *range(net.layers[0].heads)), repeat=len(net.layers) - first):  # type: ignore[arg-type]
            y, crossed = begin, length
            for number, head in enumerate(choice, start=first):
                if head is not None:
                    y, crossed = through(number, head, y), crossed + 1
            lengths[crossed] += y
    return lengths


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 3), (2, 2), (3, 2), (4, 3)])
def test_all_paths_one_by_one(layers: int, heads: int, fused: bool) -> None:
    net = Net(layers, heads, fused).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    with torch.no_grad(), rankprobe.attach(net) as probe:
        split = probe.paths(x, components=True)
        want = enumerate_paths(net, x)
    assert split.lengths == tuple(range(layers + 1)) and split.components is not None
    for length, part in enumerate(want):
        torch.testing.assert_close(split.components[Label("tokens", length)], part, rtol=1e-12, atol=1e-12)
    assert split.paths == tuple(math.comb(layers, k) * heads**k for k in range(layers + 1))


class Fixed(nn.Module):
    """Attention that depends on nothing, and nothing else that is not linear: the output is a polynomial in what scales it."""

    scores: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scores", torch.randn(3, 5, 5))
        self.mix = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for scores, mix, mlp in zip(self.scores.unbind(), self.mix, self.mlp, strict=True):
            x = x + scores.softmax(-1) @ mix(x)
            x = x + mlp(x)
        return x


def test_the_parts_are_a_polynomials_coefficients() -> None:
    torch.manual_seed(0)
    model = Fixed().double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    with torch.no_grad(), rankprobe.attach(model) as probe:
        split = probe.paths(x, components=True)
        points = torch.tensor([0.0, 0.3, 0.7, 1.0], dtype=torch.float64)
        outs = []
        for t in points.tolist():
            with probe.ablate(attention=t):
                outs.append(model(x).flatten())
    powers = points[:, None] ** torch.arange(4)
    coefficients = torch.linalg.solve(powers, torch.stack(outs))
    assert split.components is not None
    for length in range(4):
        torch.testing.assert_close(split.components[Label("tokens", length)].flatten(), coefficients[length], rtol=1e-9, atol=1e-10)


def test_without_output_projections_all_is_of_length_zero() -> None:
    net = Net(3, 2)
    for layer in net.layers:
        nn.init.zeros_(layer.o.weight)  # type: ignore[union-attr, arg-type]
    with rankprobe.attach(net) as probe:
        split = probe.paths(torch.randn(2, 5, 6))
    assert split.share[0] == pytest.approx(1.0) and split.share[1:] == (0.0, 0.0, 0.0)


def test_single_paths_and_heads_one_by_one() -> None:
    """In a net of 3 layers with 2 heads a wide enough search meets all 27 paths."""
    net = Net(3, 2).double()
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    with torch.no_grad(), rankprobe.attach(net) as probe:
        split = probe.paths(x, heads=True, strongest=27)
        seen, stream = [], x
        for layer in net.layers:
            seen.append(layer.weights(stream))  # type: ignore[operator]
            stream = stream + layer(stream)
        size = float(stream.norm())

        def through(number: int, head: int, y: Tensor) -> Tensor:
            layer: Any = net.layers[number]
            rows = slice(head * 4, head * 4 + 4)
            return seen[number][:, head] @ y @ layer.v.weight[rows].T @ layer.o.weight[:, rows].T

        parts: dict[tuple[tuple[int, int], ...], Tensor] = {}
        for choice in itertools.product((None, 0, 1), repeat=3):
            path = tuple((number, head) for number, head in enumerate(choice) if head is not None)
            y = x
            for number, head in path:
                y = through(number, head, y)
            parts[path] = y
        assert {p.heads: pytest.approx(p.share, rel=1e-10) for p in split.strongest} == {
            p: float(y.norm()) / size for p, y in parts.items()
        }
        assert [p.share for p in split.strongest] == sorted((p.share for p in split.strongest), reverse=True)
        for told in split.heads:
            number = int(told.call.split(".")[1].split("#")[0])
            want = sum(y for p, y in parts.items() if p and p[-1] == (number, told.head))
            assert told.share == pytest.approx(float(want.norm()) / size, rel=1e-10)  # type: ignore[union-attr]
        for told in split.calls:
            number = int(told.call.split(".")[1].split("#")[0])
            want = sum(y for p, y in parts.items() if p and p[-1][0] == number)
            assert told.share == pytest.approx(float(want.norm()) / size, rel=1e-10)  # type: ignore[union-attr]
        assert (len(split.heads), len(split.calls)) == (6, 3)
        # The other way, attention made anew along the path.
        longer = next(p for p in split.strongest if len(p.heads) == 2)
        with probe.ablate(**longer.ablation):
            out = net(x)
        y = x
        for number, head in longer.heads:
            seen[number] = net.layers[number].weights(y)  # type: ignore[operator]
            y = through(number, head, y)
        torch.testing.assert_close(out, y, rtol=1e-10, atol=1e-12)


# -- answers ----------------------------------------------------------------------------------------------------------


def test_answers_by_length() -> None:
    case = by_name["gpt2"]
    torch.manual_seed(0)
    model, batch = case.build().double(), case.batch()
    ids = batch["input_ids"]
    mask = batch["attention_mask"].bool()
    with torch.no_grad(), rankprobe.attach(model) as probe:
        split = probe.paths(**batch, components=True, labels=ids)
        logits = model(**batch).logits
    assert split.components is not None and split.at == "logits"
    keep = mask[:, 1:]
    right = ids[:, 1:][keep]
    short = sum(split.components[Label("tokens", n)] for n in (0, 1))
    answer = short[:, :-1][keep]  # type: ignore[index]
    whole = logits[:, :-1][keep]
    assert split.up_to[1].loss == pytest.approx(float(F.cross_entropy(answer, right)))
    assert split.up_to[1].accuracy == pytest.approx(float((answer.argmax(-1) == right).double().mean()))
    assert split.up_to[1].kl == pytest.approx(
        float(F.kl_div(answer.log_softmax(-1), whole.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean())
    )
    assert split.up_to[-1].kl == pytest.approx(0.0, abs=1e-12) and split.up_to[-1].agreement == 1.0
    centred = whole - whole.mean(-1, keepdim=True)
    assert sum(split.contribution) == pytest.approx(float(centred.gather(-1, right[:, None]).mean()))
    assert "Answers from some lengths alone" in str(split) and max(map(len, str(split).splitlines())) <= 80


# -- nonlinearities ---------------------------------------------------------------------------------------------------


class Activated(nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attention, self.activation = Attention(6, 2, True), activation
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(self.activation(self.up(x)))


def written_out(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: F.gelu(x, approximate="tanh"), written_out),
        (F.silu, lambda x: x * torch.sigmoid(x)),
        (lambda x: F.relu(x).square(), lambda x: torch.pow(torch.relu(x), 2)),
        (F.relu, lambda x: x.clone().relu_()),
        (lambda x: F.glu(torch.cat((x, x.flip(1)), -1)), lambda x: x * torch.sigmoid(x.flip(1))),
    ],
    ids=["gelu", "silu", "relu²", "in place", "glu"],
)
def test_an_activation_is_one_gate_however_it_is_written(one: Any, other: Any) -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    found = []
    for activation in (one, other):
        model = Activated(activation).double()
        with rankprobe.attach(model) as probe:
            split = probe.paths(x, components=True)
        assert split.completeness < 1e-14 and split.components is not None
        found.append(split.components)
    for label in found[0]:
        torch.testing.assert_close(found[0][label], found[1][label], rtol=1e-10, atol=1e-12)


def test_the_gate_is_f_of_z_over_z() -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    model = Activated(F.gelu).double()
    with torch.no_grad(), rankprobe.attach(model) as probe:
        split = probe.paths(x, components=True)
        attended = model.attention(x)
        bias = model.attention.o.bias
        y = x + attended
        z = model.up(y)
        gate = F.gelu(z) / z
        crossed = attended - bias
        want = crossed + (crossed @ model.up.weight.T * gate) @ model.down.weight.T
    assert split.components is not None
    torch.testing.assert_close(split.components[Label("tokens", 1)], want, rtol=1e-10, atol=1e-12)


class Odd(nn.Module):
    """With an op that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(6, 2, True)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.attention(x)
        return y + 0.1 * torch.cumprod(y, -1)


def test_what_has_no_rule_is_named_and_measured() -> None:
    model = Odd().double()
    with rankprobe.attach(model) as probe:
        split = probe.paths(torch.randn(2, 5, 6, dtype=torch.float64))
    assert split.unruled == {"cumprod": 1} and split.unattributed > 0 and split.completeness < 1e-14
    assert "ops without a rule (cumprod" in str(split)


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bert() -> tuple[nn.Module, dict[str, Any]]:
    case = by_name["bert"]
    model = case.build().double()
    laws.stir(model)
    return model, case.batch()


def test_a_cap_gathers_the_rest(bert: tuple[nn.Module, dict[str, Any]]) -> None:
    model, batch = bert
    with rankprobe.attach(model) as probe:
        whole = probe.paths(**batch, components=True).components
        capped = probe.paths(**batch, components=True, max_length=1)
    assert whole is not None and capped.components is not None and capped.capped
    rest = sum(part for label, part in whole.items() if label.length >= 1)
    torch.testing.assert_close(capped.components[Label("tokens", 1)], rest)
    assert " 1+ " in str(capped)


def test_biases_apart(bert: tuple[nn.Module, dict[str, Any]]) -> None:
    model, batch = bert
    with rankprobe.attach(model) as probe:
        whole = probe.paths(**batch, components=True)
        apart = probe.paths(**batch, components=True, split_bias=True)
    assert whole.components is not None and apart.components is not None and apart.completeness < 1e-14
    assert apart.share == pytest.approx(whole.share) and sum(apart.bias_share) > 0 and not whole.bias_share
    for label, part in whole.components.items():
        both = [apart.components[k] for k in (label, Label("bias", label.length)) if k in apart.components]
        torch.testing.assert_close(sum(both), part)


def test_by_mlp_and_by_both(bert: tuple[nn.Module, dict[str, Any]]) -> None:
    model, batch = bert
    with rankprobe.attach(model) as probe:
        mlps, both = probe.paths(**batch, by="mlp"), probe.paths(**batch, by=("attention", "mlp"))
        assert (mlps.lengths[-1], both.lengths[-1]) == (3, 6)
        assert max(mlps.completeness, both.completeness) < 1e-14
        with pytest.raises(rankprobe.RankprobeError, match='"attention", "mlp" or both'):
            probe.paths(**batch, by="norm")


def test_at_a_block(bert: tuple[nn.Module, dict[str, Any]]) -> None:
    model, batch = bert
    with rankprobe.attach(model) as probe:
        first, last = probe.paths(**batch, at=0), probe.paths(**batch, at=-1)
        assert first.lengths == (0, 1) and last.share == probe.paths(**batch).share
        for at, told in ((7, "blocks are 0 to 2"), ("logits", "gives no such output"), ("there", "may be 'output'")):
            with pytest.raises(rankprobe.RankprobeError, match=told):
                probe.paths(**batch, at=at)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_followed_in_float32(dtype: torch.dtype) -> None:
    case = by_name["gpt2"]
    model = case.build().to(dtype)
    with rankprobe.attach(model) as probe:
        split = probe.paths(**case.batch(), components=True)
    assert split.components is not None and {p.dtype for p in split.components.values()} == {torch.float32}
    assert split.completeness < 0.02 and split.precision == str(dtype).removeprefix("torch.")


def test_prints_and_saves(bert: tuple[nn.Module, dict[str, Any]], tmp_path: Path) -> None:
    model, batch = bert
    with rankprobe.attach(model) as probe:
        split = probe.paths(**batch)
    assert max(map(len, str(split).splitlines())) <= 80
    split.to_json(tmp_path / "paths.json")
    assert json.loads((tmp_path / "paths.json").read_text())["share"] == list(split.share)
    assert split.metrics()["share.1"] == split.share[1]


def test_a_training_model_is_split_in_evaluation() -> None:
    case = by_name["bert"]
    model = case.build().train()
    with rankprobe.attach(model) as probe:
        assert probe.paths(**case.batch()).completeness < 1e-5
    assert all(m.training for m in model.modules())
