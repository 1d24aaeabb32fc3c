"""Train the model that ships with rankprobe: a small transformer that sorts.

python examples/train_default.py                # writes rankprobe/default, in a few minutes on two cores
python examples/train_default.py FOLDER

The paper's sorting task: eight symbols out of ten, to be given back in order, one at each place. The model is an ordinary
Hugging Face one, BertForTokenClassification, with skip connections, norms and MLPs. Everything follows from the seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import BertConfig, BertForTokenClassification

SYMBOLS, LENGTH = 10, 8
STEPS, BATCH = 1500, 256


def sequences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, SYMBOLS, (count, LENGTH), generator=generator)
    return ids, ids.sort(1).values


def build() -> BertForTokenClassification:
    config = BertConfig(
        vocab_size=SYMBOLS,
        hidden_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        intermediate_size=96,
        max_position_embeddings=LENGTH,
        type_vocab_size=1,
        num_labels=SYMBOLS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=None,
    )
    return BertForTokenClassification(config)


def accuracy(model: BertForTokenClassification, generator: torch.Generator) -> float:
    ids, labels = sequences(2000, generator)
    with torch.no_grad():
        return float((model(input_ids=ids).logits.argmax(-1) == labels).float().mean())


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "rankprobe" / "default"
    torch.manual_seed(0)
    generator, held_out = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        ids, labels = sequences(BATCH, generator)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 249:
            print(f"step {step + 1}: loss {loss.item():.4f}, accuracy {accuracy(model.eval(), held_out):.4f}", flush=True)
            model.train()
    model.eval().save_pretrained(folder, safe_serialization=True)
    print(f"token accuracy on sequences never seen: {accuracy(model, held_out):.4f}; written: {folder}")


if __name__ == "__main__":
    main()
