"""`attach`, and the handle that it gives: hooks go on, forwards are measured, `report()` tells.

    probe = rankprobe.attach(model)
    model(**batch)
    print(probe.report())
    probe.detach()

The first forward of each kind (training or not, with or without a mask, …) is traced op by op; later ones visit the sites
that were found. A forward that strays from the known way is told in the report, and the next one is traced again.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from rankprobe import metrics
from rankprobe.anatomy import Anatomy, Stack, dissect
from rankprobe.discover import Tracer
from rankprobe.errors import RankprobeError
from rankprobe.measure import Options, Run, quiet
from rankprobe.moments import Moments
from rankprobe.padding import TokenMasks
from rankprobe.report import Report, make_report
from rankprobe.watch import Forward, Hook, Plan, inert

__all__ = ["Probe", "attach"]

KEEP = ("attention", "hidden")
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


class Probe:
    """What `attach` gives. Also a context manager that detaches."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        _check(model)
        self.model = model
        self.options = options
        self.forwards = 0
        self.notes: Counter[str] = Counter()
        self.problems: dict[str, str] = {}
        self.moments = Moments()
        self._strict = False
        self._anatomy: Anatomy | None = None
        self._plans: dict[Any, Plan] = {}
        self._fruitless: Counter[Any] = Counter()
        self._installed: Plan | None = None
        self._lock = threading.RLock()
        self._local = threading.local()
        self._last: Run | None = None
        self._single: set[str] = set()
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

    @property
    def attentions(self) -> list[Tensor]:
        """The last forward's attention matrices, `(samples, heads, queries, keys)`, in order of execution."""
        return list(self._kept_run("attention").attentions.values())

    @property
    def hidden_states(self) -> list[Tensor]:
        """The last forward's hidden states as the model has them: for each stack its input, then each block's output."""
        run = self._kept_run("hidden")
        keys = [k for s in self.anatomy.stacks for k in (s.input_key, *(b.key for b in s.blocks))]
        return [run.hidden_states[k] for k in keys if k in run.hidden_states]

    def report(self) -> Report:
        """All forwards so far. Here numbers come to the host."""
        self._clean()
        if self._anatomy is None:
            raise RankprobeError(self._nothing())
        return make_report(self)

    def reset(self) -> None:
        """Forget what was measured; keep what was found."""
        self.moments.clear()
        self.forwards = 0
        self.notes.clear()
        self.problems.clear()
        self._single.clear()

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
        if torch.compiler.is_compiling():
            raise RankprobeError("a probe cannot look into compiled code: detach it before torch.compile, or run the model uncompiled")
        if getattr(self._local, "depth", 0) > 0 and self._running():
            self._local.depth += 1  # a model that calls itself
            return
        self._clean()
        self._local.depth = 1
        self._local.frame = sys._getframe(2)
        way = _way(module, args, kwargs)
        with self._lock:
            plan = self._plans.get(way)
            if plan is not None:
                self._install(plan)
        self._local.way = way
        masks = TokenMasks(module, args, kwargs, self.options.mask)
        run = Run(self.options, masks, self._strict, heads=self.options.heads or plan is None)
        if plan is None:
            self._install(None)
            tracer = Tracer(module, run, args, kwargs)
            self._local.current = tracer
            tracer.start()
        else:
            forward = Forward(plan, run)
            self._local.current = forward
            forward.entry(0)

    def _end(self, out: Any, failed: bool) -> None:
        depth = getattr(self._local, "depth", 0)
        if depth != 1:
            self._local.depth = max(0, depth - 1)
            return
        current = getattr(self._local, "current", None)
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
        self._commit(current.run)

    def _stop(self, current: Tracer | Forward | None) -> None:
        self._local.current = None
        self._local.depth = 0
        self._local.frame = None
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
        plan = Plan(tracer, stacks, self.options.heads or "attention" in self.options.keep)
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
                self._plans[way] = plan

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
            self.notes[
                "a forward took another way through the model and was measured in part"
                + ("; the next was traced anew" if again else "; it varies too much to trace each time")
            ] += 1

    def _commit(self, run: Run) -> None:
        with quiet(), self._lock:
            self.forwards += 1
            if run.results:
                self.moments.add(run.results)
            self.problems.update(run.problems)
            self._single |= run.single
            for name in run.masks.unused:
                self.notes[f"the argument {name} fits no hidden state: no token was taken for padding because of it"] += 1
            if self.options.keep:
                self._last = run

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

    def _kept_run(self, what: str) -> Run:
        if what not in self.options.keep:
            raise RankprobeError(f'nothing was kept: attach with keep=("{what}",)')
        if self._last is None:
            raise RankprobeError(self._nothing())
        return self._last

    def _nothing(self) -> str:
        name = type(self.model).__name__
        return (
            f"no forward of {name} has run since attach: call the model itself, {name}(…); methods that go around it "
            "(forward_features, get_text_features, a sub-module alone) are seen only by a probe on what they call"
        )


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
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            where = f"its module {name}" if name else "it"
            raise RankprobeError(
                f"{type(model).__name__} cannot be watched: {where} is compiled, and hooks are not run inside compiled code. "
                "Attach before torch.compile is applied, or to the original (compiled._orig_mod)"
            )
    if any(p.is_meta for p in model.parameters()):
        name = next(n for n, p in model.named_parameters() if p.is_meta)
        raise RankprobeError(
            f"{type(model).__name__} has no weights: {name} is on the meta device. Load the model first (model.to_empty, from_pretrained)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise RankprobeError(f"{type(model).__name__} is a TorchScript module, whose inner calls cannot be hooked: attach to the original")


def _way(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is likely to decide how a forward goes."""

    def look(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (value.dim(), value.dtype, value.device.type, value.dim() > 1 and value.shape[1] == 1)
        return value if value is None or isinstance(value, (bool, str)) else type(value).__name__

    states = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    return (module.training, states, tuple(map(look, args)), tuple(sorted((k, look(v)) for k, v in kwargs.items() if v is not None)))


def _union(known: Anatomy, new: Anatomy) -> Anatomy:
    """Sites of both, those known first: a call with a cache, say, runs the decoder alone."""
    blocks = {b.key for b in known.blocks}
    extra = [Stack(s.name, s.role, s.input_key, rest) for s in new.stacks if (rest := tuple(b for b in s.blocks if b.key not in blocks))]
    held = {a.key for a in known.attentions} | {a.key for s in extra for b in s.blocks for a in b.attentions}
    summed = {s.key for s in known.skips} | {s.key for e in extra for b in e.blocks for s in b.skips}
    outside = known.outside + tuple(s for s in new.outside if s.key not in summed)
    loose = known.loose + tuple(a for a in new.loose if a.key not in held)
    if not extra and len(outside) == len(known.outside) and len(loose) == len(known.loose):
        return known
    return Anatomy(known.model, known.stacks + tuple(extra), outside, loose, known.unknown + new.unknown)
