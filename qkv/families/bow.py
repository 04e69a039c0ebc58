"""Bag of words: a linear classifier of the mean of word embeddings, the baseline that knows no order of words.

"Single input, single output" of the notes: `p(y | x) ∝ exp(θ_y · f(x))`, a maximum entropy classifier. Its features are
counts of words; with embeddings at least as wide as there are labels, their product with the head is any θ. With a head
for tokens, each word is tagged by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv import spec as s
from qkv.families import word2vec

PAPER = "Joulin et al. 2017"
HEAD_NAMES = ("sequence", "token", "span", "choice", "backbone")
TOKENIZER_TEMPLATE = word2vec.TOKENIZER_TEMPLATE


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of the recipe's `model` section for bags of words."""

    d_model: int = 256
    """Width of the embeddings."""
    dropout: float = 0.2
    """Dropout on the embeddings and before the head."""
    max_length: int = 512
    """Longest text in tokens."""


PRESETS = {"small": Config(d_model=128), "base": Config()}


def make_spec(
    config: Config, *, source_vocab_size: int = 30000, head: str = "sequence", labels: tuple[str, ...] = ("no", "yes")
) -> s.Model:
    """Return a bag of words with one of its heads; `backbone` has none."""
    kinds: dict[str, s.HeadKind] = {"sequence": "sequence", "token": "token", "span": "span", "choice": "choice"}
    heads = {
        name: s.classification_head(
            kind,
            config.d_model,
            labels,
            dropout=config.dropout,
            pool="mean" if name in ("sequence", "choice") else None,
        )
        for name, kind in kinds.items()
    }
    return s.Model(
        family="bow",
        source_embedding=s.Embedding(
            vocab_size=source_vocab_size,
            d_model=config.d_model,
            max_length=config.max_length,
            position="none",
            dropout=config.dropout,
        ),
        encoder=s.BagOfWords(d_model=config.d_model),
        head=s.select_head(heads, head),
    )
