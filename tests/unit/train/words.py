"""A small synthetic spelling task: letters to sounds by rule, which a tiny model learns in seconds."""

from __future__ import annotations

import random
from pathlib import Path

SOUNDS = {"a": "AA", "b": "B", "c": "K", "d": "D", "e": "EH", "f": "F", "g": "G", "i": "IY"}

RECIPE = """
data: {{format: cmudict, train: {folder}/train.dict, valid: {folder}/valid.dict, test: {folder}/test.dict}}
tokenizer:
  source: {{kind: character, lowercase: true}}
  target: {{kind: whitespace}}
model: {{family: {family}, {model}}}
train: {{max_steps: 12, batch_tokens: 200, log_every: 3, warmup_steps: 4, learning_rate: 0.01, average_checkpoints: 2}}
validation: {{every_steps: 4, max_examples: 10}}
seed: 3
"""

SMALL = {
    "transformer": "size: tiny, d_model: 16, heads: 2, layers: 1, d_ff: 32, dropout: 0.1, max_length: 24",
    "rnn": "size: small, d_model: 12, hidden_size: 16, layers: 2, dropout: 0.1, max_length: 24",
}


def word(chance: random.Random) -> str:
    return "".join(chance.choice("abcdefgi") for _ in range(chance.randint(2, 7)))


def write_task(folder: Path, family: str = "transformer", **sizes: int) -> Path:
    """Write three files and a recipe; return the path of the recipe."""
    chance = random.Random(5)
    for part, count in {"train": 120, "valid": 20, "test": 20, **sizes}.items():
        words = [word(chance) for _ in range(count)]
        lines = [f"{w.upper()}  {' '.join(SOUNDS[letter] for letter in w)}\n" for w in words]
        (folder / f"{part}.dict").write_text("".join(lines))
    recipe = folder / f"{family}.yaml"
    recipe.write_text(RECIPE.format(folder=folder, family=family, model=SMALL[family]))
    return recipe
