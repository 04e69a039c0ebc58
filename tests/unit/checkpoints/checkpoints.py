"""Small checkpoint folders in Hugging Face's format, written without transformers: a BERT with a real tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch

from qkv import ModelBundle, build, save
from qkv.families import bert

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "the",
    "mat",
    "un",
    "##happy",
    "##ly",
]
SHAPE = bert.Config(d_model=12, heads=2, layers=2, d_ff=16, max_length=16)


def checkpoint(folder: Path, head: str = "masked_lm", labels: tuple[str, ...] = ("bad", "good", "so so")) -> Path:
    """Write a checkpoint with any of BERT's heads, and vocab.txt for a tokenizer."""
    torch.manual_seed(3)
    model = build(bert.make_spec(SHAPE, source_vocab_size=len(WORDS), head=head, labels=labels))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    save(ModelBundle(model.eval()), folder, "huggingface")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    return folder
