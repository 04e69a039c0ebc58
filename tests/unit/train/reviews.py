"""Tiny pretrained models and a few hundred reviews in which one word determines the number of stars."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import torch
import yaml

from qkv import families
from qkv.checkpoints import ModelBundle, save
from qkv.nn import build
from qkv.tokenization.tokenizer import train_tokenizer

GOOD, BAD = ("good", "lovely", "fine", "great"), ("bad", "awful", "poor", "sad")
REST = ("the", "a", "this", "cat", "dog", "house", "tea", "is", "was")
SIZES = {"d_model": 32, "heads": 2, "layers": 2, "d_ff": 48, "max_length": 32}
OWN = {"gpt2": {"d_ff": None}, "t5": {"d_kv": 8, "decoder_layers": 2}, "rnn": {"heads": 1, "hidden_size": 32}}
OWN["bart"] = {"decoder_layers": 2, "decoder_heads": 2, "decoder_d_ff": 48}


def reviews(count: int = 120, seed: int = 3) -> list[tuple[str, str]]:
    chance = random.Random(seed)
    found = []
    for number in range(count):
        words = [chance.choice(REST) for _ in range(chance.randint(2, 7))]
        good = number % 2
        words.insert(chance.randrange(len(words)), chance.choice(GOOD if good else BAD))
        found.append((" ".join(words), "5" if good else "1"))
    return found


def write_reviews(path: Path, count: int = 120, extra: list[tuple[str, str]] | None = None) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("review", "stars"), *reviews(count), *(extra or [])])
    return path


def shape_of(family: str) -> Any:
    module = families.get_family(family)
    fields = {key: value for key, value in (SIZES | OWN.get(family, {})).items() if value is not None}
    known = module.Config.__dataclass_fields__
    return module.Config(**{key: value for key, value in fields.items() if key in known})


def write_model(family: str, folder: Path) -> Path:
    """Write a newly initialized model with a tokenizer of its family's kind."""
    module = families.get_family(family)
    lines = [text for text, _ in reviews()] * 3
    tokeniser = train_tokenizer(
        module.TOKENIZER_TEMPLATE.kind, lines, vocab_size=400, template=module.TOKENIZER_TEMPLATE
    )
    torch.manual_seed(5)
    sides = {
        side: tokeniser.vocab_size
        for side in ("source_vocab_size", "target_vocab_size")
        if side in module.make_spec.__kwdefaults__
    }
    save(ModelBundle(build(module.make_spec(shape_of(family), **sides)), tokeniser, tokeniser), folder)
    return folder


def recipe_text(start: Path | None, data: Path, **sections: Any) -> str:
    """Return a recipe that trains a classifier of the reviews for a few steps."""
    plain: dict[str, Any] = {
        "task": "text_classification",
        "model": {"init_from": str(start)},
        "data": {"format": "csv", "train": str(data), "columns": {"text": "review", "label": "stars"}},
        "train": {
            "max_steps": 6,
            "batch_tokens": 256,
            "learning_rate": 0.003,
            "schedule": "linear",
            "warmup_ratio": 0.2,
        },
        "validation": {"every_steps": 3},
    }
    plain["data"]["hold_out"] = {"valid": 0.25}
    plain["train"]["log_every"] = 2
    for name, section in sections.items():
        plain[name] = plain.get(name, {}) | section if isinstance(section, dict) and name != "model" else section
    return yaml.safe_dump(plain)
