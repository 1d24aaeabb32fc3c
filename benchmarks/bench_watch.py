"""What a probe costs: a watched forward over a plain one, interleaved in one run, medians.

    python benchmarks/bench_watch.py            # ratios and peak memory, as a table
    python benchmarks/bench_watch.py --rounds 9
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import subprocess
import sys
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
    config = BertConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width, max_position_embeddings=positions)
    return BertModel(config, add_pooling_layer=False).eval()


def gpt2(positions: int = 1024) -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    return GPT2Model(GPT2Config(n_positions=positions, use_cache=False)).eval()


def ratio(model: nn.Module, ids: torch.Tensor, rounds: int, **options: bool) -> tuple[float, float]:
    """Median watched over median plain, and the plain seconds. A round times both, in turn."""
    plain, watched = [], []
    with torch.no_grad():
        model(input_ids=ids)
        for _ in range(rounds):
            plain.append(timed(lambda: model(input_ids=ids)))
            with rankprobe.attach(model, **options):  # type: ignore[arg-type]
                model(input_ids=ids)  # discovery is paid once
                model(input_ids=ids)
                watched.append(timed(lambda: model(input_ids=ids)))
    return statistics.median(watched) / statistics.median(plain), statistics.median(plain)


def timed(run: Callable[[], object], least: float = 0.05) -> float:
    """Seconds of one call, over as many as fill `least` seconds."""
    calls, start = 0, time.perf_counter()
    while True:
        run()
        calls += 1
        spent = time.perf_counter() - start
        if spent > least:
            return spent / calls


def peak(tokens: int, probed: bool) -> float:
    """Peak resident MB of one process that runs a 12-head layer on `tokens` tokens."""
    code = f"import benchmarks.bench_watch as b; b.run_long({tokens}, {probed})"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def run_long(tokens: int, probed: bool) -> None:
    model = bert(layers=2, positions=tokens)
    ids = torch.randint(0, 1000, (1, tokens))
    with torch.no_grad():
        # Twice plain first, so that what the allocator keeps is not charged to the probe.
        model(input_ids=ids)
        model(input_ids=ids)
        gc.collect()
        if probed:
            with rankprobe.attach(model):
                for _ in range(3):
                    model(input_ids=ids)
        else:
            for _ in range(3):
                model(input_ids=ids)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def extra_per_token(tokens: int, rounds: int) -> tuple[float, float]:
    """Microseconds a token of extra time for hidden-state metrics, and extra over plain with heads, one layer."""
    model = bert(layers=1, positions=tokens)
    ids = torch.randint(0, 1000, (1, tokens))
    hidden, plain = ratio(model, ids, rounds, heads=False)
    return (hidden - 1) * plain / tokens * 1e6, ratio(model, ids, rounds)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(2)
    table = Table("what", "measured", "at most", "seconds plain", title=f"torch {torch.__version__}, CPU, {torch.get_num_threads()} threads, median of {rounds}")
    for name, model, ids in (
        ("bert-base 4 × 256", bert(), torch.randint(0, 1000, (4, 256))),
        ("gpt2 4 × 256", gpt2(), torch.randint(0, 1000, (4, 256))),
    ):
        for what, options, limit in (("hidden states", {"heads": False}, 1.05), ("and all heads", {}, 1.25)):
            found, plain = ratio(model, ids, rounds, **options)
            table.add_row(f"{name}, {what}", f"{found:.3f} ×", f"{limit} ×", f"{plain:.3f}")
    tiny, ids = bert(layers=12, width=64, heads=4), torch.randint(0, 1000, (1, 32))
    for what, options in (("hidden states", {"heads": False}), ("and all heads", {})):
        found, plain = ratio(tiny, ids, rounds, **options)
        table.add_row(f"12 layers, width 64, 32 tokens, {what}", f"{found:.2f} ×", "2.0 ×", f"{plain:.4f}")
    table.add_row("peak memory, 4096 tokens, 12 heads", f"{peak(4096, True) - peak(4096, False):+.0f} MB", "64 MB", "")
    for tokens in (1024, 2048, 4096, 8192):
        extra, heads = extra_per_token(tokens, max(3, rounds // 2))
        table.add_row(f"hidden states, {tokens} tokens, one layer", f"{extra:.2f} µs/token", "flat", "")
        table.add_row(f"all heads, {tokens} tokens, one layer", f"{heads:.2f} ×", "", "")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
