"""From a name to a diagnosis: what is loaded, what it reads, what is told, and what cannot be done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import rankprobe
from rankprobe.cli import app

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
FEW = ["--samples", "4", "--batch-size", "2", "--quiet", "--offline"]


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["scan", *args])


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, vocab_size=90))
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=90, n_positions=40))
    if kind == "vit":
        return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, image_size=32, patch_size=8))
    if kind == "t5":
        config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=90)
        return transformers.T5ForConditionalGeneration(config)
    if kind == "whisper":
        config = transformers.WhisperConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
            decoder_ffn_dim=48, vocab_size=90, max_source_positions=20, num_mel_bins=8, max_target_positions=40, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
        )  # fmt: skip
        return transformers.WhisperForConditionalGeneration(config)
    text = {**SMALL, "vocab_size": 90, "max_position_embeddings": 32, "bos_token_id": 88, "eos_token_id": 89}
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


# -- the embedded default ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default() -> rankprobe.Scan:
    return rankprobe.scan()


def test_the_default_sorts_and_does_not_without_skips(default: rankprobe.Scan) -> None:
    effects = default.collapse.effects
    assert effects["full"].accuracy >= 0.98
    assert effects["no-skip"].accuracy < 0.5 and effects["pure-attention"].accuracy < 0.5
    assert default.report.verdict.status == "healthy"
    assert default.paths is not None and default.paths.completeness < 1e-5 and default.paths.up_to[-1].accuracy >= 0.98
    assert any("Skip connections hold its rank up" in line for line in default.advice)


def test_the_default_scan_has_all_its_parts(default: rankprobe.Scan) -> None:
    text = str(default)
    places = [
        text.index(part) for part in ("Healthy", "What holds it up", "Layer by layer", "Which path lengths", "What it means", "How it was")
    ]
    assert places == sorted(places)
    assert max(map(len, text.splitlines())) <= 80


def test_the_default_is_small_and_safe() -> None:
    folder = Path(rankprobe.__file__).parent / "default"
    assert sum(p.stat().st_size for p in folder.iterdir()) < 2 << 20
    assert {p.suffix for p in folder.iterdir()} == {".json", ".safetensors"}


def test_json_is_what_was_measured(default: rankprobe.Scan, tmp_path: Path) -> None:
    default.save(tmp_path / "scan.json")
    data = json.loads((tmp_path / "scan.json").read_text())
    assert data["schema"] == 1 and data["verdict"]["status"] == "healthy"
    assert [x["residual"] for x in data["report"]["layers"]] == [x.residual for x in default.report.layers]
    assert data["paths"]["share"] == list(default.paths.share)  # type: ignore[union-attr]


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit", "t5", "whisper", "clip"])
def test_a_local_folder(kind: str, tmp_path: Path) -> None:
    model(kind).save_pretrained(tmp_path)
    out = run(str(tmp_path), *FEW, "--json")
    assert out.exit_code == 0, out.stderr
    data = json.loads(out.stdout)
    assert data["paths"]["completeness"] < 1e-5 and data["report"]["found"]["attention calls"] > 0
    assert ("image" if kind == "vit" else "random features" if kind == "whisper" else "token ids") in data["how"]["read"]
    assert any("no image processor" in n or "no feature extractor" in n or "no tokenizer" in n for n in data["notes"])


def test_a_tokenizer_is_used_where_there_is_one(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    raw = Tokenizer(models.BPE(vocab={chr(i): i for i in range(90)}, merges=[], unk_token=chr(0)))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=chr(1)).save_pretrained(tmp_path)
    transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, vocab_size=90)).save_pretrained(tmp_path)
    text = tmp_path / "mine.txt"
    text.write_text("HELLO WORLD.\nTHE QUICK BROWN FOX JUMPS OVER THE LAZY DOG.\n")
    found = json.loads(run(str(tmp_path), *FEW, "--json", "--text", str(text)).stdout)
    assert found["how"]["read"].startswith("4 texts from mine.txt")


def test_a_timm_name_without_weights() -> None:
    out = run("timm/vit_tiny_patch16_224", "--random-init", "--samples", "2", "--quiet")
    assert out.exit_code == 0, out.stderr
    assert "12 attention calls" in out.stdout and "random weights" in out.stdout


def test_a_hostile_name_is_text(tmp_path: Path) -> None:
    folder = tmp_path / "[/foo]</script>%0A::error"
    folder.mkdir(parents=True)
    model("bert").save_pretrained(folder)
    out = run(str(folder), *FEW)
    assert out.exit_code == 0 and "[/foo]</script>%0A::error" in out.stdout.replace("\n", "")


# -- what cannot be done ----------------------------------------------------------------------------------------------


def test_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    model("bert").save_pretrained(tmp_path / "bert")
    pickled = tmp_path / "pickled"
    model("bert").save_pretrained(pickled)
    torch.save({}, pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    bert = str(tmp_path / "bert")
    for args, told in [
        (["no-such-model"], "not cached, and --offline keeps from asking"),
        ([str(tmp_path / "nowhere")], "no such folder"),
        ([str(tmp_path / "empty")], "not a model's"),
        ([str(pickled)], "--allow-pickle"),
        (["timm/vit_tiny_patch16_22", "--random-init"], "did you mean vit_tiny_patch16_224"),
        (["timm/resnet18", "--random-init"], "no attention found in ResNet"),
        ([bert, "--dtype", "int8"], "may be float32"),
        ([bert, "--device", "nowhere"], "--device nowhere"),
        ([bert, "--text", "absent.txt"], "--text absent.txt"),
        ([bert, "--text", __file__], "no tokenizer for --text"),
        ([bert, "--samples", "0"], "at least 1"),
        ([bert, "--output", str(tmp_path / "no" / "scan.json")], "no such folder"),
    ]:
        out = run(*FEW, *args)
        assert out.exit_code == 2, (args, out.stdout)
        assert out.stderr.startswith("rankprobe: ") and out.stderr.count("\n") == 1 and told in out.stderr, out.stderr
        assert not out.stdout


def test_a_gated_model_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("You are trying to access a gated repo.\n401 Client Error.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    out = run("meta-llama/Something")
    assert out.exit_code == 2 and "hf auth login" in out.stderr


def test_help_imports_no_torch() -> None:
    code = "import sys; from rankprobe.cli import app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
