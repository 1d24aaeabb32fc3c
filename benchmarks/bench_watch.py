"""What a probe costs: a watched forward over a plain one, interleaved in one run, medians.

python benchmarks/bench_watch.py            # ratios and peak memory, as a table
python benchmarks/bench_watch.py --rounds 9
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import rankprobe


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


def ratio(model: nn.Module, ids: torch.Tensor, rounds: int, **options: bool) -> tuple[float, float]:
    """Watched over plain, the median of rounds that time the two side by side in turn, and the plain seconds."""
    watched = copy.deepcopy(model)
    plain_times, ratios = [], []
    with torch.no_grad(), rankprobe.attach(watched, **options):  # type: ignore[arg-type]
        for _ in range(2):  # discovery is paid once
            model(input_ids=ids)
            watched(input_ids=ids)
        for i in range(rounds):
            order = (model, watched) if i % 2 else (watched, model)
            times = {id(m): timed(lambda m=m: m(input_ids=ids)) for m in order}  # type: ignore[misc]
            plain_times.append(times[id(model)])
            ratios.append(times[id(watched)] / times[id(model)])
    return statistics.median(ratios), statistics.median(plain_times)


def timed(run: Callable[[], object], least: float = 0.2) -> float:
    """Seconds of one call, over as many as fill `least` seconds."""
    calls, start = 0, time.perf_counter()
    while True:
        run()
        calls += 1
        spent = time.perf_counter() - start
        if spent > least:
            return spent / calls


def peak(run: Callable[[], object]) -> float:
    """MB of live tensors at their most while `run` runs, over what was alive before. Resident memory would be the allocator's
    habits as much as ours: it varies by 50 MB between plain runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top / 2**20


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
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    chosen = parser.parse_args()
    rounds = chosen.rounds
    torch.set_num_threads(2)
    table = Table(
        "what",
        "measured",
        "at most",
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
        ):
            found, plain = ratio(model, ids, rounds * 3 if small else rounds, **options)
            table.add_row(f"{name}, {what}", f"{found:.3f} ×", limit, f"{plain:.4f}")
    if chosen.only in "peak memory":
        first, later = extra_peak(4096)
        table.add_row("peak memory, 4096 tokens, 12 heads, traced forward", f"{first:+.0f} MB", "64 MB", "")
        table.add_row("peak memory, 4096 tokens, 12 heads, later ones", f"{later:+.0f} MB", "64 MB", "")
    for tokens in (1024, 2048, 4096, 8192) if chosen.only in "long" else ():
        model, ids = bert(layers=1, positions=tokens), torch.randint(0, 1000, (1, tokens))
        hidden, plain = ratio(model, ids, max(3, rounds // 2))
        heads, _ = ratio(model, ids, max(3, rounds // 3), heads=True)
        extra = (hidden - 1) * plain / tokens * 1e6
        table.add_row(f"long: {tokens} tokens, one layer, default", f"{extra:.1f} µs/token", "flat", f"{plain:.4f}")
        table.add_row(f"long: {tokens} tokens, one layer, heads=True", f"{heads:.2f} ×", "", "")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
