"""What a probe costs: a watched forward over a plain one, interleaved in one run, medians.

python benchmarks/bench_watch.py            # ratios and peak memory, as a table
python benchmarks/bench_watch.py --rounds 9

Beside each ratio stands that of a second plain copy, timed in the same rounds: how far from 1 that is, is the machine's noise.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import rankprobe
from rankprobe.measure import Run


def bert(layers: int = 12, width: int = 768, heads: int = 12, positions: int = 512) -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=positions,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def tiny() -> nn.Module:
    return bert(layers=12, width=64, heads=4)


def gpt2(positions: int = 1024) -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    return GPT2Model(GPT2Config(n_positions=positions, use_cache=False)).eval()


def ratio(
    model: nn.Module, ids: torch.Tensor, rounds: int, ablated: dict[str, Any] | None = None, **options: bool
) -> tuple[float, float, float]:
    """Watched (and ablated) over plain and plain copy over plain, medians of rounds that time the three in turn, and the plain seconds."""
    arms = (model, copy.deepcopy(model), copy.deepcopy(model))
    plain_times, ratios, controls = [], [], []
    with torch.no_grad(), rankprobe.attach(arms[1], **options) as probe, probe.ablate(**ablated or {}):  # type: ignore[arg-type]
        for _ in range(2):  # discovery is paid once
            for arm in arms:
                arm(input_ids=ids)
        for i in range(rounds):
            times = [0.0, 0.0, 0.0]
            for turn in range(3):
                place = (i + turn) % 3
                times[place] = timed(lambda place=place: arms[place](input_ids=ids))  # type: ignore[misc]
            plain_times.append(times[0])
            ratios.append(times[1] / times[0])
            controls.append(times[2] / times[0])
    return statistics.median(ratios), statistics.median(controls), statistics.median(plain_times)


def at_sites(model: nn.Module, ids: torch.Tensor, rounds: int) -> float:
    """Seconds a forward spends in measurements, timed around each: for where they drown in the noise of the forward."""
    spent = [0.0]
    attempt = Run.attempt

    def clocked(self: Run, *args: Any) -> None:
        start = time.perf_counter()
        attempt(self, *args)
        spent[-1] += time.perf_counter() - start

    with torch.no_grad(), rankprobe.attach(model), mock.patch.object(Run, "attempt", clocked):
        for _ in range(rounds + 2):
            spent.append(0.0)
            model(input_ids=ids)
    return statistics.median(spent[3:])


def timed(run: Callable[[], object], least: float = 0.2) -> float:
    """Seconds of one call, over as many as fill `least` seconds."""
    calls, start = 0, time.perf_counter()
    while True:
        run()
        calls += 1
        spent = time.perf_counter() - start
        if spent > least:
            return spent / calls


def memory_events(run: Callable[[], object]) -> list[int]:
    """Bytes taken (or, negative, given back) by tensors while `run` runs, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    return [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]


def peak(run: Callable[[], object]) -> float:
    """MB of live tensors at their most while `run` runs, over what was alive before. Resident memory would be the allocator's
    habits as much as ours: it varies by 50 MB between plain runs."""
    return max(itertools.accumulate(memory_events(run)), default=0) / 2**20


def allocations(run: Callable[[], object]) -> float:
    """MB of all tensors made while `run` runs: its activations, were they all kept."""
    return sum(n for n in memory_events(run) if n > 0) / 2**20


def extra_peak(tokens: int) -> tuple[float, float]:
    """MB more than a plain forward: the traced forward, a later one."""
    model, ids = bert(layers=2, positions=tokens), torch.randint(0, 1000, (1, tokens))
    with torch.no_grad():
        model(input_ids=ids)
        plain = peak(lambda: model(input_ids=ids))
        with rankprobe.attach(model, heads=True):
            return peak(lambda: model(input_ids=ids)) - plain, peak(lambda: model(input_ids=ids)) - plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--row", default="", help="of those, ratios whose name holds this")
    chosen = parser.parse_args()
    rounds = chosen.rounds
    torch.set_num_threads(2)
    table = Table(
        "what",
        "measured",
        "at most",
        "plain again",
        "seconds plain",
        title=f"torch {torch.__version__}, CPU, {torch.get_num_threads()} threads, median of {rounds}",
    )
    for name, build, shape in (
        ("bert-base 4 × 256", bert, (4, 256)),
        ("gpt2 4 × 256", gpt2, (4, 256)),
        ("12 layers, width 64, 32 tokens", tiny, (1, 32)),
    ):
        if chosen.only not in name:
            continue
        model, ids = build(), torch.randint(0, 1000, shape)
        small = build is tiny
        for what, options, limit in (
            ("default", {}, "2.0 ×" if small else "1.05 ×"),
            ("heads=True", {"heads": True}, "" if small else "1.25 ×"),
            ("pure attention", {"ablated": {"skip": True, "mlp": True}}, "" if small else "1.3 ×"),
            ("without a head each", {"ablated": {"heads": {n: [0] for n in range(12)}}}, "" if small else "1.3 ×"),
        ):
            if chosen.row not in what:
                continue
            found, control, plain = ratio(model, ids, rounds, **options)  # type: ignore[arg-type]
            table.add_row(f"{name}, {what}", f"{found:.3f} ×", limit, f"{control:.3f} ×", f"{plain:.4f}")
    if chosen.only in "peak memory":
        first, later = extra_peak(4096)
        table.add_row("peak memory, 4096 tokens, 12 heads, traced forward", f"{first:+.0f} MB", "64 MB")
        table.add_row("peak memory, 4096 tokens, 12 heads, later ones", f"{later:+.0f} MB", "64 MB")
    for tokens in (1024, 2048, 4096, 8192) if chosen.only in "long" else ():
        model, ids = bert(layers=1, positions=tokens), torch.randint(0, 1000, (1, tokens))
        heads, control, plain = ratio(model, ids, max(3, rounds // 5), heads=True)
        spent = at_sites(model, ids, max(3, rounds // 2)) / tokens
        table.add_row(f"long: {tokens} tokens, one layer, default", f"{spent * 1e6:.1f} µs/token", "flat")
        table.add_row(f"long: {tokens} tokens, one layer, heads=True", f"{heads:.2f} ×", "", f"{control:.3f} ×", f"{plain:.4f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
