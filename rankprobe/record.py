"""What a row of forwards measured: a probe's own, or one ablation's."""

from __future__ import annotations

import threading
from collections import Counter

from rankprobe.measure import Run, quiet
from rankprobe.moments import Moments

__all__ = ["Record"]


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
