"""One way to print: rich for people, the same as plain text for logs, golden files and `str()`."""

from __future__ import annotations

import io
import math

from rich.console import Console, RenderableType
from rich.table import Table

__all__ = ["bare_table", "html", "number", "plain"]

WIDTH = 80


def plain(thing: RenderableType, width: int = WIDTH) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True, force_terminal=False, legacy_windows=False)
    console.print(thing)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def html(thing: RenderableType, width: int = WIDTH) -> str:
    """A self-contained page; rich escapes what it prints."""
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True, legacy_windows=False)
    console.print(thing)
    return console.export_html(inline_styles=True)


def bare_table(first: str, *columns: str) -> Table:
    """Names on the left, numbers on the right, no lines."""
    table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.1e}"
