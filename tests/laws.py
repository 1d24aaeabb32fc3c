"""The laws of the design, each a function of a model and a batch, run on every case of the registry and on nothing else's terms."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rankprobe
from rankprobe.graph import tensors_in
from rankprobe.paths import Ask, _Splitter
from rankprobe.probe import Probe
from registry import Batch, Case


def attached(model: nn.Module, **options: Any) -> Probe:
    """A probe whose own failures are not excused."""
    probe = rankprobe.attach(model, **{"heads": True, **options})
    probe._strict = True
    return probe


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}


def floats(value: Any) -> list[Tensor]:
    return [t for t in tensors_in(value) if t.is_floating_point()]


def assert_same(a: Any, b: Any) -> None:
    """Bit for bit, NaN included."""
    left, right = list(tensors_in(a)), list(tensors_in(b))
    assert len(left) == len(right) > 0
    for x, y in zip(left, right, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert torch.equal(x.nan_to_num(), y.nan_to_num()) and torch.equal(x.isnan(), y.isnan())


def runs(case: Case, dtype: torch.dtype) -> tuple[nn.Module, Batch]:
    model = case.build().to(dtype)
    return model, cast(case.batch(), dtype)


# -- 1. non-interference ----------------------------------------------------------------------------------------------


def outputs_are_untouched(case: Case, dtype: torch.dtype) -> None:
    model, batch = runs(case, dtype)
    with torch.no_grad():
        before = model(**batch)
        with attached(model) as probe:
            first, second = model(**batch), model(**batch)
        assert probe.forwards == 2
        after = model(**batch)
    for out in (first, second, after):
        assert_same(out, before)


def training_is_untouched(case: Case, dtype: torch.dtype) -> None:
    """Outputs, gradients and the random numbers drawn, in training mode, over two steps."""

    def step(probed: bool) -> tuple[list[Any], list[Tensor | None], Tensor]:
        torch.manual_seed(3)
        model, batch = runs(case, dtype)
        model.train()
        probe = attached(model) if probed else None
        outs = []
        torch.manual_seed(4)
        numpy.random.seed(4)  # wav2vec2 masks with it
        for _ in range(2):
            out = model(**batch)
            sum(t.float().square().mean() for t in floats(out) if t.requires_grad).backward()  # type: ignore[union-attr]
            outs.append([t.detach() for t in floats(out)])
        if probe is not None:
            assert probe.report().watched["attention calls"] > 0
        return outs, [p.grad for p in model.parameters()], torch.get_rng_state()

    outs, grads, state = step(False)
    probed_outs, probed_grads, probed_state = step(True)
    assert_same(probed_outs, outs)
    assert torch.equal(state, probed_state)
    assert any(g is not None for g in grads)
    for a, b in zip(grads, probed_grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert b is not None
            assert_same(a, b)


# -- 2. and 3. true attention, true hidden states ---------------------------------------------------------------------


def library_answers(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Attentions as the library's own eager path returns them, hidden states as its default path does, in order of
    execution."""
    model, batch = case.build(), case.batch()
    with torch.no_grad():
        out = model(**batch, output_hidden_states=True, return_dict=True)
        eager = case.build(attn_implementation="eager")(**batch, output_attentions=True, return_dict=True)
    towers = ("vision_model_output", "text_model_output")
    if towers[0] in out:
        return [a for t in towers for a in eager[t].attentions], [h for t in towers for h in out[t].hidden_states]
    if "decoder_attentions" in eager:
        crossed = zip(eager.decoder_attentions, eager.cross_attentions, strict=True)
        attentions = [*eager.encoder_attentions, *itertools.chain.from_iterable(crossed)]
        return attentions, [*out.encoder_hidden_states, *out.decoder_hidden_states]
    return list(eager.attentions), list(out.hidden_states)


def token_rows(case: Case, queries: int) -> Tensor | None:
    mask = case.batch().get("attention_mask")
    return mask.bool() if mask is not None and mask.shape[1] == queries else None


def attention_is_true(case: Case) -> None:
    """What was captured beside SDPA equals what eager returns, to 1e-5 in every row of a real token.

    A row of a padded query may see nothing; eager then spreads it evenly and SDPA does not, and it counts nowhere."""
    expected, _ = library_answers(case)
    model, batch = case.build(attn_implementation="eager") if case.twofold else case.build(), case.batch()
    with torch.no_grad(), attached(model, keep=("attention",)) as probe:
        for _ in range(2):  # the forward that discovers, and one that visits
            model(**batch)
            got = probe.attentions
            pairs = match(expected, got)
            for a, b in pairs:
                rows = token_rows(case, a.shape[2]) if a.shape[0] == b.shape[0] else None
                if rows is not None:
                    keep = rows[:, None, :, None]
                    a, b = a * keep, b * keep
                torch.testing.assert_close(b.float(), a.float(), atol=1e-5, rtol=0)


def match(expected: list[Tensor], got: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair by order; a library that returns one attention a stage (Swin) is paired with the last of each shape."""
    if len(expected) < len(got):
        last: dict[torch.Size, Tensor] = {g.shape: g for g in got}
        assert len(last) == len(expected), f"{len(got)} attentions against the library's {len(expected)}"
        got = list(last.values())
    assert len(expected) == len(got)
    for a, b in zip(expected, got, strict=True):
        if a.shape != b.shape:  # heads last or sequence first
            a = next(a.permute(p) for p in itertools.permutations(range(a.dim())) if a.permute(p).shape == b.shape)
        yield a, b


def hidden_states_are_true(case: Case) -> None:
    """Each of the library's hidden states is one of ours, in order; its last may be after a final norm, which is a
    function of ours and not among them."""
    _, expected = library_answers(case)
    model, batch = case.build(), case.batch()
    with torch.no_grad(), attached(model, keep=("hidden",)) as probe:
        for _ in range(2):
            model(**batch)
            got = iter(probe.hidden_states)
            missed = 0
            for want in expected:
                found = False
                rest, got = itertools.tee(got)
                for have in rest:
                    if same_tokens(want, have):
                        found, got = True, rest
                        break
                missed += not found
            stacks = len(probe.anatomy.stacks)
            assert missed <= stacks, f"{missed} of {len(expected)} hidden states not found"
            assert len(expected) - missed >= case.blocks / 2


def same_tokens(want: Tensor, have: Tensor) -> bool:
    if want.numel() != have.numel():
        return False
    shapes = [have] + ([have.transpose(0, 1)] if have.dim() == 3 else [])
    return any(torch.allclose(want.reshape(-1), h.reshape(-1), atol=1e-5) for h in shapes if h.numel() == want.numel())


# -- 6. nothing left behind -------------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> Any:
    import torch.nn.modules.module as registry
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    hooks = [
        (name, [list(getattr(m, kind)) for kind in vars(m) if kind.endswith("_hooks") or "hooks_" in kind], m.training, sorted(vars(m)))
        for name, m in model.named_modules()
    ]
    globals_ = [len(getattr(registry, kind)) for kind in dir(registry) if kind.startswith("_global_") and "hooks" in kind]
    config = copy.deepcopy(vars(getattr(model, "config", nn.Module())))
    return hooks, globals_, config, len(_get_current_dispatch_mode_stack()), torch.is_grad_enabled()


class Stop(Exception):
    pass


def nothing_is_left_behind(case: Case) -> None:
    model, batch = case.build(), case.batch()
    with torch.no_grad():
        model(**batch)  # the library's own lazy hooks
        seen: list[str] = []
        modules = list(model.modules())
        theirs = modules[len(modules) // 2].register_forward_hook(lambda *_: seen.append("ours came and went"))
        before = state_of(model)
        for ending in ("detach", "exception in discovery", "exception later", "collected", "twice"):
            leave(ending, model, batch)
            assert state_of(model) == before, ending
        seen.clear()
        model(**batch)
        theirs.remove()


def leave(ending: str, model: nn.Module, batch: Batch) -> None:
    probe = attached(model)
    if ending != "exception in discovery":
        model(**batch)
        model(**batch)
    if ending.startswith("exception"):
        last = list(model.modules())[-1]

        def fail(*_: Any) -> None:
            raise Stop

        reached = last.register_forward_pre_hook(fail) if _is_called(model, batch, last) else model.register_forward_hook(fail)
        try:
            model(**batch)
        except Stop:
            pass
        else:
            raise AssertionError("the exception did not come through")
        reached.remove()
    if ending == "twice":
        other = attached(model)
        model(**batch)
        assert other.forwards == 1 and probe.forwards == 3
        probe.detach()
        model(**batch)
        assert other.forwards == 2 and other.report().watched["attention calls"] > 0
        other.detach()
    if ending != "collected":
        probe.detach()
        probe.detach()


def _is_called(model: nn.Module, batch: Batch, module: nn.Module) -> bool:
    called: list[bool] = []
    handle = module.register_forward_pre_hook(lambda *_: called.append(True))
    model(**batch)
    handle.remove()
    return bool(called)


# -- 7. no host round trip --------------------------------------------------------------------------------------------


def no_host_round_trip(case: Case) -> str | None:
    """On fake `cuda` tensors, which raise on `.item()`. The model's own words where it fails on those without a probe."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = case.build()
    mode, batch = FakeTensorMode(), case.batch()
    with mode, torch.no_grad():
        for module in model.modules():
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    if tensor is not None:
                        fake = mode.from_tensor(tensor).to("cuda")
                        own[name] = nn.Parameter(fake) if isinstance(tensor, nn.Parameter) else fake  # type: ignore[assignment]
        batch = {k: mode.from_tensor(v).to("cuda") if isinstance(v, Tensor) else v for k, v in batch.items()}
        try:
            model(**batch)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        with attached(model) as probe:
            for _ in range(3):
                model(**batch)
            states = probe.record.moments.tensors()
            assert states and all(t.device.type == "cuda" for t in states)
            assert probe.forwards == 3
            with probe.ablate("no-skip", heads={0: [0]}):
                model(**batch)
            with probe._apart():
                _, _, parts = _Splitter(probe, (), batch, Ask()).follow_lengths()
            assert len(parts) > 1 and all(p.device.type == "cuda" for p in parts.values())
    return None


class HostReads(TorchDispatchMode):
    """Counts ops whose result the host has to wait for."""

    WAITS = ("_local_scalar_dense", "item", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in self.WAITS
        return func(*args, **(kwargs or {}))


def no_reads_but_the_models_own(case: Case) -> None:
    """A forward with a probe makes as many host reads as one without, traced or not."""
    model, batch = case.build(), case.batch()

    def reads() -> int:
        with torch.no_grad(), HostReads() as mode:
            model(**batch)
        return mode.count

    reads()
    plain = reads()
    with attached(model):
        assert [reads() for _ in range(3)] == [plain] * 3


# -- 8. never silent --------------------------------------------------------------------------------------------------


def the_report_tells(case: Case) -> None:
    model, batch = case.build(), case.batch()
    with torch.no_grad(), attached(model) as probe:
        model(**batch)
        once = probe.report()
        model(**batch)
        report = probe.report()
    found = report.found
    assert (found["blocks"], found["attention calls"], found["MLP branches"]) == (case.blocks, case.attentions, case.mlps)
    assert report.problems == ()
    if report.watched != found:  # only with the reason in words
        assert any("one token" in note for note in report.notes)
    assert len(report.layers) == case.blocks
    measured = [x for x in report.layers if x.samples]
    assert measured
    for layer in measured:
        assert 0 <= layer.residual <= 2 and 0 <= layer.residual_fro <= 1 and -1.001 <= layer.cosine <= 1.001
        assert layer.effective_rank >= 0.999
        for head in layer.heads:
            assert -1e-5 <= head.entropy <= 1 + 1e-4 and abs(head.sink) <= 1 + 1e-5
            assert 0 <= head.residual <= 1 or all(
                a.queries == 1 for b in probe.anatomy.blocks if b.name == layer.name for a in b.attentions
            )
    # The forward that discovers and the one that visits measure the same.
    for a, b in zip(once.layers, report.layers, strict=True):
        assert (a.residual != a.residual) == (b.residual != b.residual)
        if a.residual == a.residual:
            assert abs(a.residual - b.residual) <= 1e-6
    assert all(len(line) <= 80 for line in str(report).splitlines())
    assert str(probe.anatomy)


# -- 5. exact ablation ------------------------------------------------------------------------------------------------


def stir(model: nn.Module) -> None:
    """Weights that start at zero, or near it, would hide what is removed behind them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 0 and float(parameter.abs().max()) < 1e-3:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def differ(a: Any, b: Any) -> bool:
    return any(x.shape != y.shape or not torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(floats(a), floats(b), strict=True))


def ablation_comes_and_goes(case: Case) -> None:
    """With factor 1 nothing changes, without its parts everything does, and afterwards all is as it was."""
    model, batch = case.build(), case.batch()
    stir(model)
    asked: list[dict[str, Any]] = [{"skip": True}, {"attention": True}, {"skip": 0.5}, {"heads": {0: [0]}}]
    if case.mlps:
        asked += [{"mlp": True}, {"skip": True, "mlp": True}]
    with torch.no_grad():
        model(**batch)  # the library's own lazy hooks
        plain, before = model(**batch), state_of(model)
        with attached(model, heads=False) as probe:
            unchanged: list[dict[str, Any]] = [{"skip": 1.0}, {"attention": 1.0}]
            for factor in unchanged:
                with probe.ablate(**factor):
                    assert_same(model(**batch), plain)
            for spec in asked:
                with probe.ablate(**spec) as variant:
                    assert differ(model(**batch), plain), spec
                assert variant.report().layers and variant.forwards == 1
                assert_same(model(**batch), plain)
            assert probe.forwards == len(asked)
        assert state_of(model) == before
        assert_same(model(**batch), plain)


# -- 4. completeness --------------------------------------------------------------------------------------------------


def parts_sum_to_the_output(case: Case, dtype: torch.dtype) -> None:
    model, batch = runs(case, dtype)
    stir(model)
    with torch.no_grad():
        try:
            plain = model(**batch)
        except RuntimeError:
            assert dtype == torch.float64 and case.name in ("mixtral", "gpt_oss")  # grouped products know no float64
            return
        before = state_of(model)
        with attached(model) as probe:
            split = probe.paths(**batch)
            assert probe.forwards == 0
            assert_same(model(**batch), plain)
        assert state_of(model) == before
    # Norms that compute in float32 round whatever the model's dtype is.
    assert split.completeness < (1e-10 if dtype == torch.float64 and split.precision == "float64" else 1e-5)
    assert split.unattributed == 0.0 and not split.unruled
    assert split.lengths[-1] > 0 and split.share[1] > 0
    assert abs(sum(split.projection) - 1) < 1e-4
