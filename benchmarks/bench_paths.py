"""What splitting the output by path length costs, and how exact it is.

python -m benchmarks.bench_paths               # speed and memory, as a table
python -m benchmarks.bench_paths --registry    # completeness on every model of the tests' registry
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import rankprobe
from benchmarks.bench_watch import allocations, bert, peak, timed


def speed(table: Table, rounds: int) -> None:
    for layers in (6, 12, 24):
        measure(table, bert(layers=layers), layers, rounds)


def measure(table: Table, model: Any, layers: int, rounds: int) -> None:
    ids = torch.randint(0, 1000, (4, 128))
    lengths = layers + 1
    with torch.no_grad(), rankprobe.attach(model) as probe:
        probe.paths(input_ids=ids)
        ratios = []
        for _ in range(rounds):
            plain = timed(lambda: model(input_ids=ids))
            ratios.append(timed(lambda: probe.paths(input_ids=ids)) / plain)
        ratio = statistics.median(ratios)
        row = [f"bert-base width, {layers} layers, 4 × 128 tokens, {lengths} lengths"]
        row += [f"{ratio:.1f} plain forwards", f"{ratio / lengths:.2f} × {lengths}", f"1.5 × {lengths}" if layers == 12 else ""]
        table.add_row(*row)
        hidden = torch.randn(4, 128, 768)
        one = allocations(lambda: model.encoder.layer[0](hidden))
        rise = peak(lambda: probe.paths(input_ids=ids)) - peak(lambda: model(input_ids=ids))
        told = f"{rise:.0f} MB, {rise / one:.1f} × one layer's {one:.0f} MB"
        table.add_row("  peak of live tensors over a plain forward", told, "", f"{lengths + 4} × one layer's" if layers == 12 else "")


def completeness(table: Table) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from laws import runs, stir
    from registry import CASES

    for case in CASES:
        for dtype in (torch.float32, torch.float64):
            model, batch = runs(case, dtype)
            stir(model)
            try:
                with rankprobe.attach(model) as probe:
                    split = probe.paths(**batch)
            except RuntimeError as error:
                table.add_row(case.name, str(dtype)[6:], "", "", f"the model does not run: {str(error)[:40]}")
                continue
            table.add_row(
                case.name, str(dtype)[6:], f"{split.completeness:.1e}", f"{split.unattributed:.3f}", f"computes in {split.precision}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--registry", action="store_true")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    if chosen.registry:
        table = Table("model", "dtype", "completeness", "unattributed", "", title="Parts by path length: relative error of their sum")
        completeness(table)
    else:
        table = Table(
            "what", "measured", "a length", "at most", title=f"torch {torch.__version__}, CPU, 2 threads, median of {chosen.rounds}"
        )
        speed(table, chosen.rounds)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
