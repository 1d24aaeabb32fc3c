"""From a name to a model and what to show it: Hugging Face ids and folders, timm names, and the embedded default.

Loading is safe unless told otherwise: safetensors only, no code from the repository, and no network with `offline`.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rankprobe.integrations import samples
from torch import nn

from rankprobe.errors import RankprobeError

__all__ = ["Loaded", "Wish", "load"]

PICKLED = "it has no safetensors weights, only pickled ones, which can run code: --allow-pickle, if you trust it"
Batch = dict[str, Any]


@dataclass(frozen=True)
class Wish:
    """How a model is to be loaded and what it is to read."""

    model: str | None = None
    revision: str | None = None
    device: str = "auto"
    dtype: str | None = None
    samples: int = 32
    batch_size: int = 8
    max_length: int = 128
    seed: int = 0
    text: Path | None = None
    images: Path | None = None
    random_init: bool = False
    offline: bool = False
    trust_remote_code: bool = False
    allow_pickle: bool = False


@dataclass
class Loaded:
    model: nn.Module
    batches: list[Batch]
    name: str
    inputs: str  # in words
    revision: str = ""
    labels: list[torch.Tensor] = field(default_factory=list)  # one for each batch
    notes: list[str] = field(default_factory=list)


def load(wish: Wish) -> Loaded:
    """A model in evaluation mode on its device, with its batches there too."""
    if wish.samples < 1 or wish.batch_size < 1 or wish.max_length < 2:
        raise RankprobeError("--samples and --batch-size are at least 1, --max-length at least 2")
    device = _device(wish.device)
    torch.manual_seed(wish.seed)
    if wish.model is None:
        loaded = _default(wish)
    elif wish.model.startswith(("timm/", "hf-hub:", "local-dir:")) and not Path(wish.model).exists():
        from rankprobe.integrations.timm_models import load_timm

        loaded = load_timm(wish)
    else:
        from rankprobe.integrations.huggingface import load_huggingface

        loaded = load_huggingface(wish)
    dtype = _dtype(wish.dtype)
    loaded.model.to(device=device, dtype=dtype) if dtype is not None else loaded.model.to(device)
    loaded.model.eval()
    kept = next((p.dtype for p in loaded.model.parameters() if p.is_floating_point()), torch.float32)

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, kept) if value.is_floating_point() else value.to(device)

    loaded.batches = [{k: place(v) for k, v in batch.items()} for batch in loaded.batches]
    loaded.labels = [label.to(device) for label in loaded.labels]
    return loaded


def _default(wish: Wish) -> Loaded:
    from transformers import BertForTokenClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = default_folder()
    model = BertForTokenClassification.from_pretrained(folder, use_safetensors=True, attn_implementation="sdpa", local_files_only=True)
    ids, labels = samples.sorting(max(wish.samples, 256), wish.seed)
    made = Loaded(model, [{"input_ids": ids}], "the embedded default, a transformer that sorts eight symbols", "")
    made.labels = [labels]
    made.inputs = f"{len(ids)} sequences of 8 symbols out of 10, to be sorted"
    return made


def default_folder() -> Path:
    from importlib.resources import files

    return Path(str(files("rankprobe"))) / "default"


def chunks(items: list[Any], size: int) -> list[list[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def read_texts(wish: Wish) -> tuple[list[str], str]:
    """As many texts as samples are wanted, and where they come from."""
    if wish.text is None:
        found, source = list(samples.TEXTS), f"texts that ship with rankprobe ({len(samples.TEXTS)} different ones)"
    else:
        try:
            whole = wish.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RankprobeError(f"--text {wish.text}: {error}") from None
        found = [part.strip() for part in (whole.split("\n\n") if "\n\n" in whole else whole.splitlines()) if part.strip()]
        source = f"texts from {wish.text.name}"
        if not found:
            raise RankprobeError(f"--text {wish.text}: no text in it")
    return [found[i % len(found)] for i in range(wish.samples)], source


def read_images(wish: Wish, size: tuple[int, int], channels: int) -> tuple[Any, str]:
    """Images as 0 … 1 tensors from us, or as PIL images from a folder."""
    if wish.images is None:
        return samples.images(wish.samples, size, channels, wish.seed), "images made by rankprobe: waves, discs and noise"
    from PIL import Image

    kinds = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
    if not wish.images.is_dir():
        raise RankprobeError(f"--images {wish.images}: not a folder")
    paths = sorted(p for p in wish.images.iterdir() if p.suffix.lower() in kinds)[: wish.samples]
    if not paths:
        raise RankprobeError(f"--images {wish.images}: no {', '.join(sorted(kinds))} in it")
    return [Image.open(p).convert("RGB") for p in paths], f"images from {wish.images.name}"


def close_to(name: str, known: list[str]) -> str:
    """A hint, for a name that was not found."""
    near = difflib.get_close_matches(name, known, 3, 0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def cached_models() -> list[str]:
    """Hugging Face models that are on this machine."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return [p.name.removeprefix("models--").replace("--", "/") for p in sorted(cache.glob("models--*"))] if cache.is_dir() else []


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RankprobeError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise RankprobeError(f"--dtype {name}: may be float32, float64, bfloat16 or float16")
    return dtype
