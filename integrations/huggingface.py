"""Hugging Face models by id or folder, with what they read."""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from typing import Any

import torch
from rankprobe.integrations import samples
from rankprobe.integrations.loading import PICKLED, Batch, Loaded, Wish, cached_models, chunks, close_to, read_images, read_texts

from rankprobe.errors import RankprobeError

__all__ = ["load_huggingface"]


def load_huggingface(wish: Wish) -> Loaded:
    assert wish.model is not None
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # or transformers asks the hub for a conversion in the background
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    where: dict[str, Any] = {
        "revision": wish.revision,
        "local_files_only": wish.offline,
        "trust_remote_code": wish.trust_remote_code,
    }
    config = _try(wish, transformers.AutoConfig.from_pretrained, wish.model, **where)
    revision = getattr(config, "_commit_hash", None) or ""
    notes: list[str] = []
    made = getattr(transformers, (config.architectures or [""])[0], None) or transformers.AutoModel
    for attention in ("sdpa", "eager"):
        try:
            if wish.random_init:
                build = made._from_config if hasattr(made, "_from_config") else made.from_config
                model = build(config, attn_implementation=attention)
                notes.append("random weights: the architecture alone (--random-init)")
            else:
                more = {"use_safetensors": None if wish.allow_pickle else True, "attn_implementation": attention}
                model = _try(wish, made.from_pretrained, wish.model, config=config, **more, **where)
            break
        except ValueError as error:
            if "attention" not in str(error).lower() or attention == "eager":
                raise RankprobeError(f"{wish.model}: {str(error).splitlines()[0]}") from None
    batches, inputs = _inputs(wish, model, config, where, notes)
    return Loaded(model, batches, wish.model, inputs, revision, notes=notes)


def _try(wish: Wish, do: Any, *args: Any, **kwargs: Any) -> Any:
    """The library's own call, with its long complaints turned into one line and a next step."""
    try:
        return do(*args, **kwargs)
    except OSError as error:
        text, name = str(error), str(wish.model)
        if isinstance(error, OSError) and ("gated" in text or "401" in text or "403" in text):
            reason = "it is gated or private: log in with `hf auth login`, and ask for access on its page"
        elif "safetensors" in text and not wish.allow_pickle:
            reason = PICKLED
        elif Path(name).is_dir():
            reason = f"a folder, but not a model's: {text.splitlines()[0]}"
        elif Path(name).exists() or name.startswith((".", "/", "~")):
            reason = "no such folder"
        else:
            known = cached_models()
            here = f"; on this machine are {', '.join(known[:5])}" if known else "; none is cached on this machine"
            hint = close_to(name, known) or here
            offline = wish.offline or os.environ.get("HF_HUB_OFFLINE") == "1"
            why = "not cached, and --offline keeps from asking" if offline else "no such model, or the hub cannot be reached"
            reason = f"{why}{hint}. A local folder works too, and so does timm/NAME"
        raise RankprobeError(f"{name}: {reason}") from None
    except (KeyError, ImportError, RuntimeError, ValueError) as error:
        if isinstance(error, ValueError) and "attention" in str(error).lower():
            raise
        if Path(str(wish.model)).is_dir() and "model_type" in str(error):
            raise RankprobeError(f"{wish.model}: a folder, but not a model's: no config.json with a model_type") from None
        raise RankprobeError(f"{wish.model}: {type(error).__name__}: {str(error).strip().splitlines()[0]}") from None


def _inputs(wish: Wish, model: Any, config: Any, where: dict[str, Any], notes: list[str]) -> tuple[list[Batch], str]:
    main = getattr(model, "main_input_name", "input_ids")
    takes = set(inspect.signature(model.forward).parameters)
    if main == "pixel_values":
        batches, inputs = _pictures(wish, config, where, notes)
    elif main in ("input_features", "input_values"):
        batches, inputs = _waves(wish, config, where, main, notes)
    else:
        batches, inputs = _words(wish, config, where, notes)
    if "pixel_values" in takes and main == "input_ids" and hasattr(config, "vision_config"):
        pictures, more = _pictures(wish, config.vision_config, where, notes)
        batches = [words | picture for words, picture in zip(batches, pictures, strict=False)]
        inputs = f"{inputs}, and {more}"
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        start = getattr(config, "decoder_start_token_id", None) or getattr(config, "bos_token_id", None) or 0
        for batch in batches:
            rows = len(batch[main])
            ids = batch["input_ids"] if "input_ids" in batch else _ids(wish, config, rows, 16)
            batch["decoder_input_ids"] = torch.cat((torch.full((rows, 1), start), ids[:, :-1]), 1)
        notes.append(
            "the decoder reads the same tokens as the encoder, one place later" if main == "input_ids" else "the decoder reads token ids"
        )
    return [{k: v for k, v in batch.items() if k in takes or "kwargs" in takes} for batch in batches], inputs


def _words(wish: Wish, config: Any, where: dict[str, Any], notes: list[str]) -> tuple[list[Batch], str]:
    import transformers

    length = min(wish.max_length, _positions(config))
    texts, source = read_texts(wish)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(wish.model, **where)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        made = []
        for part in chunks(texts, wish.batch_size):
            batch = tokenizer(part, return_tensors="pt", padding=True, truncation=True, max_length=length)
            made.append(dict(batch))
        ids = torch.cat([batch["input_ids"].flatten() for batch in made])
        if int(ids.max()) >= _vocabulary(config):
            raise ValueError("it speaks of more tokens than the model has embeddings")
        unknown = 0.0 if tokenizer.unk_token_id is None else float((ids == tokenizer.unk_token_id).float().mean())
        if unknown > 0.5 or len(ids.unique()) < 8:
            raise ValueError("it knows hardly any word")  # what transformers makes of a folder without one
    except Exception as error:
        if wish.text is not None:
            raise RankprobeError(f"{wish.model}: no tokenizer for --text: {str(error).strip().splitlines()[0]}") from None
        notes.append(f"no tokenizer could be used ({str(error).strip().splitlines()[0][:80]}): it reads random token ids")
        rows = [min(wish.batch_size, wish.samples - i) for i in range(0, wish.samples, wish.batch_size)]
        length = min(length, 64)
        return [{"input_ids": _ids(wish, config, n, length, i)} for i, n in enumerate(rows)], f"{wish.samples} × {length} random token ids"
    return made, f"{len(texts)} {source}, up to {length} tokens"


def _ids(wish: Wish, config: Any, rows: int, length: int, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(wish.seed + number)
    return torch.randint(min(5, _vocabulary(config) - 1), _vocabulary(config), (rows, length), generator=generator)


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _vocabulary(config: Any) -> int:
    return int(getattr(_text_config(config), "vocab_size", None) or 1000)


def _positions(config: Any) -> int:
    text = _text_config(config)
    found = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    # RoBERTa's kind counts positions from behind the padding token.
    return max(2, int(found) - 2) if isinstance(found, int) and found > 0 else 1 << 30


def _pictures(wish: Wish, config: Any, where: dict[str, Any], notes: list[str]) -> tuple[list[Batch], str]:
    import transformers

    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    given, source = read_images(wish, (height, width), getattr(config, "num_channels", 3))
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(wish.model, **where)
        pixels = processor(images=list(given), return_tensors="pt", **({} if wish.images else {"do_rescale": False}))["pixel_values"]
    except Exception as error:
        if wish.images is not None:
            raise RankprobeError(f"{wish.model}: no image processor for --images: {str(error).splitlines()[0]}") from None
        notes.append("no image processor: images are scaled to −1 … 1")
        pixels = given * 2 - 1
    return [{"pixel_values": part} for part in pixels.split(wish.batch_size)], f"{len(pixels)} {source}"


def _waves(wish: Wish, config: Any, where: dict[str, Any], main: str, notes: list[str]) -> tuple[list[Batch], str]:
    import transformers

    waves = samples.sounds(wish.samples, 16000, 16000, wish.seed)
    try:
        extractor = transformers.AutoFeatureExtractor.from_pretrained(wish.model, **where)
        whole = extractor(list(waves.numpy()), sampling_rate=16000, return_tensors="pt")[main]
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:80]
        if main == "input_features":
            notes.append(f"no feature extractor ({why}): it reads random features")
            bins, frames = int(getattr(config, "num_mel_bins", 80)), 2 * int(getattr(config, "max_source_positions", 100))
            whole = torch.randn(wish.samples, bins, frames, generator=torch.Generator().manual_seed(wish.seed))
            return [{main: part} for part in whole.split(wish.batch_size)], f"{wish.samples} × {frames} frames of random features"
        notes.append(f"no feature extractor ({why}): it reads the waves as they are")
        whole = waves
    return [{main: part} for part in whole.split(wish.batch_size)], f"{wish.samples} gliding tones of one second"
