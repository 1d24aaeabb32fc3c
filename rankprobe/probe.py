"""`attach`, and the handle that it gives: hooks go on, forwards are measured, `report()` tells.

    probe = rankprobe.attach(model)
    model(**batch)
    print(probe.report())
    probe.detach()

The first forward of each kind (training or not, with or without a mask, …) is traced op by op; later ones visit the sites
that were found. A forward that strays from the known way is told in the report, and the next one is traced again.
`ablate` has forwards do something else at some of those sites.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from rankprobe import metrics
from rankprobe.ablate import PRESETS, Ablation, caches_in
from rankprobe.anatomy import Anatomy, Stack, dissect
from rankprobe.collapse import VARIANTS, Collapse, evaluating, in_dtype, run_variants
from rankprobe.discover import Tracer
from rankprobe.errors import RankprobeError
from rankprobe.graph import tensors_in
from rankprobe.measure import Options, Run, quiet
from rankprobe.padding import TokenMasks
from rankprobe.paths import Ask, PathSplit, split_paths
from rankprobe.record import Readings
from rankprobe.report import Report
from rankprobe.watch import Forward, Hook, Plan, inert

__all__ = ["Probe", "attach"]

KEEP = ("attention", "hidden")
Spec = bool | float | Iterable[int] | slice | Mapping[Any, Any] | None
# Forwards that may be traced again in a row without finding a new site: a model that drops layers at random takes a new way
# each time.
FRUITLESS = 3


def attach(
    model: nn.Module,
    *,
    heads: bool = False,
    spectrum: bool = False,
    keep: Iterable[str] = (),
    centre: metrics.Centre = "mean",
    mask: Callable[..., Tensor | None] | None = None,
) -> Probe:
    """Watch `model` from its next forward on; its outputs stay bit for bit the same.

    heads: measure every attention head (entropy, residual, weight on the first token) in every forward, not in the first
        alone, which is traced anyway.
    spectrum: also stable ranks and the heads' spectral gaps, by power iteration; slower.
    keep: any of "attention", "hidden": keep the last forward's tensors themselves.
    centre: "mean" or "median", the common vector that residuals are taken from.
    mask: a function of the forward's arguments that gives a (batch, tokens) mask, True for real tokens, where
        rankprobe would not find it by itself.
    """
    return Probe(model, Options(heads, spectrum, _kept(keep), centre, mask))


def _kept(keep: Iterable[str]) -> frozenset[str]:
    kept = frozenset([keep] if isinstance(keep, str) else keep)
    if not kept <= set(KEEP):
        raise RankprobeError(f"keep={sorted(kept - set(KEEP))}: can keep {' and '.join(map(repr, KEEP))}")
    return kept


class Probe(Readings):
    """What `attach` gives. Also a context manager that detaches."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        _check(model)
        super().__init__(options)
        self.model = model
        self._strict = False
        self._anatomy: Anatomy | None = None
        self._plans: dict[Any, Ways] = {}
        self._ablations: list[Ablation] = []
        self._ablated_caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self._fruitless: Counter[Any] = Counter()
        self._installed: Plan | None = None
        self._lock = threading.RLock()
        self._local = threading.local()
        self._handles: list[Any] = []
        self._root: list[Any] = [
            model.register_forward_pre_hook(RootHook(self, True), with_kwargs=True),
            model.register_forward_hook(RootHook(self, False), with_kwargs=True, always_call=True),
        ]
        self._finalizer = weakref.finalize(self, _remove, self._root, self._handles)

    # -- what users read ------------------------------------------------------------------------------------------

    @property
    def anatomy(self) -> Anatomy:
        """What was found in the model."""
        if self._anatomy is None:
            raise RankprobeError(self._nothing())
        return self._anatomy

    def report(self) -> Report:
        self._clean()
        return super().report()

    def ablate(
        self,
        preset: str = "full",
        *,
        skip: Spec | str = None,
        mlp: Spec = None,
        attention: Spec = None,
        heads: Mapping[int | str, Any] | None = None,
        norm: Spec = None,
    ) -> Ablation:
        """A context in which forwards of the model run without some of its parts; `rankprobe.ablate` says what that means.

        skip, mlp, attention: True for all, layer numbers or a slice, a factor from 0.0 to 1.0 instead of a removal, or
            {layer: factor}. skip also: "attention" or "mlp", whose skip connections, or {"attention": …, "mlp": …}.
        heads: {layer: [head, …]}, {layer: {head: factor}}, or an attention call's key for the layer.
        norm: True, layer numbers or a slice: norms that pass their input on.
        preset: "full", "no-mlp", "no-skip", "pure-attention" or "paper-no-skip", to which the others add.
        """
        if preset not in PRESETS:
            raise RankprobeError(f"no preset {preset!r}: there are {', '.join(PRESETS)}")
        own = {"skip": skip, "mlp": mlp, "attention": attention, "heads": heads, "norm": norm}
        asked = PRESETS[preset] | {name: value for name, value in own.items() if value is not None}
        _check_compiled(self.model, "ablated")
        made = Ablation(self, asked)
        if self._anatomy is not None:
            made.understood(self._anatomy)  # what cannot be meant is told now
        return made

    def collapse(
        self,
        *args: Any,
        variants: Iterable[str] | Mapping[str, Mapping[str, Any]] = VARIANTS,
        labels: Tensor | None = None,
        dtype: torch.dtype | None = None,
        **batch: Any,
    ) -> Collapse:
        """Run the model on `batch` whole and without its parts: curves, answers and theory, side by side.

        variants: names of presets, or {name: what `ablate` takes}.
        labels: given to the model if it takes them, and compared with its answers.
        dtype: run a copy of the model in this dtype; in float64 doubly exponential decay is seen three layers deep.
        """
        chosen = variants if isinstance(variants, Mapping) else {name: {"preset": name} for name in variants}
        with in_dtype(self, dtype) as probe:
            return run_variants(probe, [(args, batch, labels)], chosen, lambda _: None)

    def paths(
        self,
        *args: Any,
        at: str | int = "output",
        by: str | Iterable[str] = "attention",
        max_length: int | None = None,
        split_bias: bool = False,
        heads: bool = False,
        strongest: int = 0,
        labels: Tensor | None = None,
        components: bool = False,
        **batch: Any,
    ) -> PathSplit:
        """Split what the model gives for `batch` by the length of the paths that lead to it, exactly.

        at: "output" (logits, else the last hidden state), "logits", "hidden", "pooled", or a block's number.
        by: what a path's length counts: "attention", "mlp", or both.
        max_length: one part for paths that long or longer.
        split_bias: tell what comes from biases from what comes from the tokens.
        heads: also what each head hands on to the output.
        strongest: also so many of the strongest single paths.
        labels: right answers, to grade what each length says.
        components: keep the parts themselves.
        """
        counted = (by,) if isinstance(by, str) else tuple(by)
        ask = Ask(at, counted, max_length, split_bias, components, heads, strongest, labels)
        with self._apart(), evaluating(self.model):
            return split_paths(self, args, batch, ask)

    def reset(self) -> None:
        """Forget what was measured; keep what was found."""
        self.record.clear()

    def detach(self) -> None:
        """Take all hooks off. What was measured can still be read. Detaching twice does no harm."""
        self._clean()
        self._finalizer()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()

    def __repr__(self) -> str:
        found = "nothing run yet" if self._anatomy is None else ", ".join(f"{n} {k}" for k, n in self._anatomy.counts.items())
        return f"<rankprobe.Probe of {type(self.model).__name__}: {self.forwards} forwards, {found}>"

    # -- one forward ----------------------------------------------------------------------------------------------

    def _forward(self) -> Forward | None:
        current = getattr(self._local, "current", None)
        return current if isinstance(current, Forward) else None

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(self._local, "apart", False):
            return
        if torch.compiler.is_compiling():
            raise RankprobeError("a probe cannot look into compiled code: detach it before torch.compile, or run the model uncompiled")
        if getattr(self._local, "depth", 0) > 0 and self._running():
            self._local.depth += 1  # a model that calls itself
            return
        self._clean()
        ablation = self._ablations[-1] if self._ablations and not self._rehearsing() else None
        if ablation is not None:
            self._set_stage(ablation, module, args, kwargs)
        elif any(cache in self._ablated_caches for cache in caches_in((args, kwargs))):
            self.record.notes["a cache that an ablated forward had filled was used outside of the ablation"] += 1
        self._local.depth = 1
        self._local.frame = sys._getframe(2)
        self._local.ablation = ablation
        self._local.way = way = _way(module, args, kwargs)
        with self._lock:
            ways = self._plans.get(way)
            plan = None if ways is None else ways.deep if ablation is not None and ablation.deep else ways.plain
            self._install(plan)
        masks = TokenMasks(module, args, kwargs, self.options.mask)
        theory = ablation is not None and ablation.theory
        run = Run(self.options, masks, self._strict, heads=self.options.heads or plan is None, theory=theory)
        if plan is None:
            tracer = Tracer(module, run, args, kwargs)
            self._local.current = tracer
            tracer.start()
        else:
            forward = Forward(plan, run, None if ablation is None else ablation.edits(plan))
            self._local.current = forward
            forward.entry(0)

    def _end(self, out: Any, failed: bool) -> None:
        if getattr(self._local, "apart", False):
            return
        depth = getattr(self._local, "depth", 0)
        if depth != 1:
            self._local.depth = max(0, depth - 1)
            return
        current, ablation = getattr(self._local, "current", None), self._local.ablation
        self._stop(current)
        if current is None or failed:
            return
        if isinstance(current, Tracer):
            with quiet():
                current.finish(out)
            self._learn(current)
        else:
            assert isinstance(current, Forward)
            current.exit(0, out)
            current.close()
            current.run.finish()
            self._follow(current)
            if ablation is not None:
                ablation.ran(current.seen, out)
                self._ablated_caches.update(caches_in(out))
        if not self._rehearsing():
            (ablation or self).record.add(current.run)

    def _stop(self, current: Tracer | Forward | None) -> None:
        self._local.current = None
        self._local.depth = 0
        self._local.frame = None
        if getattr(self._local, "undo", None) is not None:
            self._local.undo()
            self._local.undo = None
        if isinstance(current, Tracer):
            current.stop()
        elif isinstance(current, Forward):
            current.close()

    def _running(self) -> bool:
        """Whether the forward that began is still under way: Ctrl-C in a model ends it without a word to its hooks."""
        frame, began = sys._getframe(1), getattr(self._local, "frame", None)
        while frame is not None:
            if frame is began:
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def _clean(self) -> None:
        current = getattr(self._local, "current", None)
        if current is not None and not self._running():
            self._stop(current)

    def _learn(self, tracer: Tracer) -> None:
        way = self._local.way
        anatomy, stacks = dissect(tracer, type(self.model).__name__)
        heads = self.options.heads or "attention" in self.options.keep
        plan = Plan(tracer, stacks, heads)
        run = tracer.run
        sites = plan.keys | {a.key for a in tracer.attentions}
        kept = {}
        for key, value in run.results.items():
            name = plan.rename.get(key, key)
            if name.removesuffix("/influence").removesuffix("/input") in sites:
                kept[name] = value
        run.results = kept
        run.hidden_states = {plan.rename[k]: v for k, v in run.hidden_states.items() if k in plan.rename}
        run.problems = {plan.rename.get(k, k): v for k, v in run.problems.items() if not k.startswith("@") or k in plan.rename}
        run.single = {plan.rename[k] for k in run.single if k in plan.rename}
        with self._lock:
            known = self._anatomy
            self._anatomy = anatomy if known is None else _union(known, anatomy)
            if known is not None and self._anatomy == known:
                self._fruitless[way] += 1
            if anatomy.attentions or not anatomy.unknown:
                self._plans[way] = Ways(plan, Plan(tracer, stacks, heads, deep=True))

    def _follow(self, forward: Forward) -> None:
        missing = frozenset(forward.plan.keys - forward.seen)
        if not missing or missing in forward.plan.missing:
            return
        forward.plan.missing.add(missing)
        with self._lock:
            way = self._local.way
            again = self._fruitless[way] < FRUITLESS
            if again:
                self._plans.pop(way, None)
            (self._local.ablation or self).record.notes[
                "a forward took another way through the model and was measured in part"
                + ("; the next was traced anew" if again else "; it varies too much to trace each time")
            ] += 1

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """The probe's own hooks look away, and nothing runs in kernels that hide what they do."""
        self._clean()
        self._install(None)
        fused = torch.backends.mha.get_fastpath_enabled()
        self._local.apart = True
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            self._local.apart = False
            torch.backends.mha.set_fastpath_enabled(fused)

    # -- ablation -------------------------------------------------------------------------------------------------

    def _push(self, ablation: Ablation) -> tuple[Ablation, ...]:
        """Those already there."""
        self._clean()
        outer = tuple(self._ablations)
        self._ablations.append(ablation)
        return outer

    def _pull(self, ablation: Ablation) -> None:
        self._clean()
        self._ablations.remove(ablation)

    def _rehearsing(self) -> bool:
        return getattr(self._local, "rehearsing", False)

    def _set_stage(self, ablation: Ablation, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before an ablated forward: its way is known, and until it ends there are no gradients and no fused layers."""
        ablation.refuse_stale((args, kwargs))
        grad, fused = torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()

        def undo() -> None:
            torch.set_grad_enabled(grad)
            torch.backends.mha.set_fastpath_enabled(fused)

        try:
            torch.set_grad_enabled(False)
            # The kernel that runs a whole nn.TransformerEncoderLayer has no additions to replace.
            if ablation.changes and any(isinstance(m, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) for m in module.modules()):
                torch.backends.mha.set_fastpath_enabled(False)
            if _way(module, args, kwargs) not in self._plans:
                self._rehearse(module, args, kwargs)
        except BaseException:
            undo()
            raise
        self._local.undo = undo

    def _rehearse(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward as the model is, on copies of the arguments: a way must be known before parts of it are left out."""
        cuda = {p.device.index for p in module.parameters() if p.device.type == "cuda"} if torch.cuda.is_available() else set()
        self._local.rehearsing = True
        try:
            with torch.random.fork_rng(devices=[i for i in cuda if i is not None]):
                copies = {id(t): t.detach().clone() for t in tensors_in((args, kwargs))}
                args, kwargs = copy.deepcopy((args, kwargs), copies)  # type: ignore[arg-type]
                module(*args, **kwargs)
        finally:
            self._local.rehearsing = False

    def _install(self, plan: Plan | None) -> None:
        """Hooks for one way at a time: those of another could turn a shortcut off that this one takes."""
        with self._lock:
            if plan is self._installed:
                return
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._installed = plan
            for slot, entry in sorted(plan.hooked) if plan is not None else ():
                if slot == 0:
                    continue  # the root's own hooks do
                assert plan is not None
                module, hook = plan.modules[slot], Hook(self, slot, entry)
                register = module.register_forward_pre_hook if entry else module.register_forward_hook
                self._handles.append(register(hook))  # type: ignore[operator]

    def _nothing(self) -> str:
        name = type(self.model).__name__
        return (
            f"no forward of {name} has run since attach: call the model itself, {name}(…); methods that go around it "
            "(forward_features, get_text_features, a sub-module alone) are seen only by a probe on what they call"
        )


@dataclass(frozen=True, slots=True)
class Ways:
    """One way through a model: to measure it, and to reach heads and norms as well."""

    plain: Plan
    deep: Plan


class RootHook:
    """The hooks on the attached module itself: a forward begins, a forward ends."""

    def __init__(self, probe: Probe, begin: bool) -> None:
        self._probe = weakref.ref(probe)
        self._begin = begin

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, out: Any = None) -> None:
        probe = self._probe()
        if probe is None:
            return
        if self._begin:
            probe._begin(module, args, kwargs)
        else:
            probe._end(out, failed=out is None and sys.exc_info()[0] is not None)

    def __reduce__(self) -> Any:
        return inert, ()


def _remove(*lists: list[Any]) -> None:
    for handles in lists:
        for handle in handles:
            handle.remove()
        handles.clear()


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise RankprobeError(f"attach takes a torch.nn.Module, not {type(model).__name__}; to load one by name see rankprobe.scan")
    _check_compiled(model, "watched")
    if any(p.is_meta for p in model.parameters()):
        name = next(n for n, p in model.named_parameters() if p.is_meta)
        raise RankprobeError(
            f"{type(model).__name__} has no weights: {name} is on the meta device. Load the model first (model.to_empty, from_pretrained)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise RankprobeError(f"{type(model).__name__} is a TorchScript module, whose inner calls cannot be hooked: attach to the original")


def _check_compiled(model: nn.Module, done: str) -> None:
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            where = f"its module {name}" if name else "it"
            raise RankprobeError(
                f"{type(model).__name__} cannot be {done}: {where} is compiled, and hooks are not run inside compiled code. "
                "Use the model before torch.compile is applied, or the original (compiled._orig_mod)"
            )


def _way(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is likely to decide how a forward goes."""

    def look(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (value.dim(), value.dtype, value.device.type, value.dim() > 1 and value.shape[1] == 1)
        return value if value is None or isinstance(value, (bool, str)) else type(value).__name__

    states = (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.backends.mha.get_fastpath_enabled()),
        *(torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
    )
    return (module.training, states, tuple(map(look, args)), tuple(sorted((k, look(v)) for k, v in kwargs.items() if v is not None)))


def _union(known: Anatomy, new: Anatomy) -> Anatomy:
    """Sites of both, those known first: a call with a cache, say, runs the decoder alone."""
    blocks = {b.key: b for b in known.blocks}
    extra = [Stack(s.name, s.role, s.input_key, rest) for s in new.stacks if (rest := tuple(b for b in s.blocks if b.key not in blocks))]
    # Layers that ran in one kernel before, and now part by part.
    opened = {b.key: b for b in new.blocks if b.key in blocks and b.skips and not blocks[b.key].skips}
    inputs = {s.blocks[0].key: s.input_key for s in new.stacks if s.blocks[0].key in opened}
    stacks = tuple(
        replace(
            s,
            input_key=inputs.get(s.blocks[0].key, s.input_key),
            blocks=tuple(replace(opened[b.key], index=b.index) if b.key in opened else b for b in s.blocks),
        )
        for s in known.stacks
    )
    held = {a.key for a in known.attentions} | {a.key for s in extra for b in s.blocks for a in b.attentions}
    summed = {s.key for s in (*known.skips, *(s for b in opened.values() for s in b.skips))}
    summed |= {s.key for e in extra for b in e.blocks for s in b.skips}
    outside = known.outside + tuple(s for s in new.outside if s.key not in summed)
    loose = known.loose + tuple(a for a in new.loose if a.key not in held)
    if not extra and not opened and len(outside) == len(known.outside) and len(loose) == len(known.loose):
        return known
    return Anatomy(known.model, stacks + tuple(extra), outside, loose, known.unknown + new.unknown)
