"""The command line. Imports torch only inside commands that need it: `--help` answers at once."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from rankprobe._version import __version__
from rankprobe.errors import RankprobeError

__all__ = ["app", "main"]

app = typer.Typer(help="See whether the tokens inside a transformer collapse onto each other.", no_args_is_help=True, rich_markup_mode=None)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rankprobe {__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version and stop.")] = False,
) -> None:
    pass


Model = Annotated[str | None, typer.Argument(help="A Hugging Face id or folder, or timm/NAME. None: the model that ships with rankprobe.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps …")]
Dtype = Annotated[str | None, typer.Option(help="float32, float64, bfloat16 or float16. As the weights are, unless given.")]
Samples = Annotated[int, typer.Option(help="Texts or images to read.")]
BatchSize = Annotated[int, typer.Option(help="How many at a time.")]
MaxLength = Annotated[int, typer.Option(help="Tokens of a text.")]
Seed = Annotated[int, typer.Option(help="For random weights and inputs.")]
TextFile = Annotated[Path | None, typer.Option("--text", help="A text file to read: a text a paragraph, or a line.")]
ImageFolder = Annotated[Path | None, typer.Option("--images", help="A folder of images to read.")]
RandomInit = Annotated[bool, typer.Option("--random-init", help="The architecture with random weights.")]
Offline = Annotated[bool, typer.Option("--offline", help="Ask no server.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Pickle = Annotated[bool, typer.Option("--allow-pickle", help="Load pickled weights, which can run code.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Debug = Annotated[bool, typer.Option("--debug", help="The whole traceback of an error.")]


@app.command()
def scan(
    model: Model = None,
    revision: Revision = None,
    device: Device = "auto",
    dtype: Dtype = None,
    samples: Samples = 32,
    batch_size: BatchSize = 8,
    max_length: MaxLength = 128,
    seed: Seed = 0,
    text: TextFile = None,
    images: ImageFolder = None,
    random_init: RandomInit = False,
    offline: Offline = False,
    trust_remote_code: Remote = False,
    allow_pickle: Pickle = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also save the scan as JSON.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """From a model's name to a diagnosis: does it collapse, where, what holds it up, which path lengths carry it."""
    with _failing(debug), _progress(quiet) as tell:
        if output is not None and not output.parent.is_dir():
            raise RankprobeError(f"--output {output}: no such folder")
        from rankprobe.scanning import scan as run

        found = run(
            model,
            tell=tell,
            revision=revision,
            device=device,
            dtype=dtype,
            samples=samples,
            batch_size=batch_size,
            max_length=max_length,
            seed=seed,
            text=text,
            images=images,
            random_init=random_init,
            offline=offline,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
        )
        if output is not None:
            found.save(output)
    _show(found.to_json() if json else found)


def _show(thing: Any) -> None:
    if isinstance(thing, str):
        sys.stdout.write(thing)
        return
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 80, markup=False, highlight=False).print(thing)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """What is being done, how far, and how long it will take, on standard error and only for people."""
    if quiet or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


@contextmanager
def _failing(debug: bool) -> Iterator[None]:
    """What could not be done is one line on standard error and exit code 2; Ctrl-C is 130."""
    try:
        yield
    except RankprobeError as error:
        if debug:
            raise
        _die(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        raise typer.Exit(130) from None
    except Exception as error:
        if debug:
            raise
        if "out of memory" in str(error).lower() or isinstance(error, MemoryError):
            _die("out of memory: lower --batch-size, --max-length or --samples, or use --dtype bfloat16")
        _die(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]} (--debug shows where)")


def _die(line: str) -> None:
    sys.stderr.write(f"rankprobe: {' '.join(line.split())}\n")
    raise typer.Exit(2)


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
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.exit(app())
