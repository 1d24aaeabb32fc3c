"""What a row of forwards measured, a probe's own or one ablation's, and how it is read."""

from __future__ import annotations

import threading
from collections import Counter

from torch import Tensor

from rankprobe.anatomy import Anatomy
from rankprobe.errors import RankprobeError
from rankprobe.measure import Options, Run, quiet
from rankprobe.moments import Moments
from rankprobe.report import Report, make_report

__all__ = ["Readings", "Record"]


class Record:
    """Statistics over forwards, with what went wrong. Several threads may add to it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.moments = Moments()
        self.forwards = 0
        self.notes: Counter[str] = Counter()
        self.problems: dict[str, str] = {}
        self.single: set[str] = set()  # sites that had one token in some forward
        self.last: Run | None = None  # kept tensors

    def add(self, run: Run) -> None:
        with quiet(), self.lock:
            self.forwards += 1
            if run.results:
                self.moments.add(run.results)
            self.problems.update(run.problems)
            self.single |= run.single
            for name in run.masks.unused:
                self.notes[f"the argument {name} fits no hidden state: no token was taken for padding because of it"] += 1
            if run.options.keep:
                self.last = run

    def clear(self) -> None:
        with self.lock:
            self.moments.clear()
            self.forwards = 0
            self.notes.clear()
            self.problems.clear()
            self.single.clear()


class Readings:
    """What can be read off a probe, or off an ablation."""

    variant = ""  # what was taken away

    def __init__(self, options: Options) -> None:
        self.options = options
        self.record = Record()

    @property
    def anatomy(self) -> Anatomy:
        """What was found in the model."""
        raise NotImplementedError

    @property
    def forwards(self) -> int:
        return self.record.forwards

    @property
    def attentions(self) -> list[Tensor]:
        """The last forward's attention matrices, `(samples, heads, queries, keys)`, in order of execution."""
        return list(self._kept("attention").attentions.values())

    @property
    def hidden_states(self) -> list[Tensor]:
        """The last forward's hidden states as the model has them: for each stack its input, then each block's output."""
        run = self._kept("hidden")
        keys = [k for s in self.anatomy.stacks for k in (s.input_key, *(b.key for b in s.blocks))]
        return [run.hidden_states[k] for k in keys if k in run.hidden_states]

    def report(self) -> Report:
        """All forwards so far; a probe's without ablated ones. Here numbers come to the host."""
        if not self.forwards:
            raise RankprobeError(self._nothing())
        return make_report(self.anatomy, self.options, self.record, self.variant)

    def _kept(self, what: str) -> Run:
        if what not in self.options.keep:
            raise RankprobeError(f'nothing was kept: attach with keep=("{what}",)')
        if self.record.last is None:
            raise RankprobeError(self._nothing())
        return self.record.last

    def _nothing(self) -> str:
        raise NotImplementedError
