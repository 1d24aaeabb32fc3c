"""timm models by name, with images as their own configuration wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rankprobe.integrations.loading import Loaded, Wish, close_to, read_images

from rankprobe.errors import RankprobeError

__all__ = ["load_timm"]


def load_timm(wish: Wish) -> Loaded:
    import logging

    import timm
    from timm.data import create_transform, resolve_model_data_config

    assert wish.model is not None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    name = wish.model.removeprefix("timm/")
    if wish.allow_pickle is False and name.startswith("local-dir:"):
        folder = Path(name.removeprefix("local-dir:"))
        if not folder.is_dir():
            raise RankprobeError(f"{wish.model}: no such folder")
        if not any(folder.glob("*.safetensors")) and not wish.random_init:
            raise RankprobeError(
                f"{wish.model}: no safetensors weights, only pickled ones, which can run code: --allow-pickle, if you trust it"
            )
    try:
        model = timm.create_model(name, pretrained=not wish.random_init)
    except RuntimeError as error:
        known = timm.list_models()
        raise RankprobeError(f"{wish.model}: {_why(error)}{close_to(name.split('.')[0], known)}") from None
    except Exception as error:
        hint = "; --random-init takes its architecture without weights" if ":" not in name else ""
        raise RankprobeError(f"{wish.model}: its weights cannot be had ({_why(error)}){hint}") from None
    config: dict[str, Any] = resolve_model_data_config(model)
    channels, *size = config["input_size"]
    given, source = read_images(wish, (size[0], size[1]), channels)
    if wish.images is None:
        mean, std = (torch.tensor(config[k]).view(-1, 1, 1) for k in ("mean", "std"))
        pixels = (given - mean) / std
    else:
        transform = create_transform(**config, is_training=False)
        pixels = torch.stack([transform(image) for image in given])
    notes = ["random weights: the architecture alone (--random-init)"] if wish.random_init else []
    revision = str(getattr(model, "pretrained_cfg", {}).get("tag", ""))
    batches = [{"x": part} for part in pixels.split(wish.batch_size)]
    return Loaded(model, batches, wish.model, f"{len(pixels)} {source}, {size[0]} × {size[1]}", revision, notes=notes)


def _why(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
