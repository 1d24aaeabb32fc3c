"""The command line. Imports torch only inside commands that need it: `--help` answers at once."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Annotated

import typer

from rankprobe._version import __version__

__all__ = ["app", "main"]

app = typer.Typer(help="See whether the tokens inside a transformer collapse onto each other.", no_args_is_help=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rankprobe {__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version and stop.")] = False,
) -> None:
    pass


@app.command()
def env() -> None:
    """Versions and devices, for a bug report."""
    print(f"rankprobe {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for package in ("torch", "transformers", "timm", "rich", "numpy"):
        try:
            print(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            print(f"{package} is not installed")
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"devices: {', '.join(devices) or 'cpu only'}, {torch.get_num_threads()} threads")


def main() -> None:
    sys.exit(app())
