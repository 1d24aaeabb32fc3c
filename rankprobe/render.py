"""One way to print: rich for people, the same as plain text for logs, golden files and `str()`."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

__all__ = ["html", "plain"]

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
