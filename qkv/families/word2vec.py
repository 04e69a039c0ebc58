"""word2vec: word vectors learned by predicting the words around a word, or a word from those around it.

Mikolov et al. 2013, https://arxiv.org/abs/1301.3781 and https://arxiv.org/abs/1310.4546. The model is an embedding and
an output matrix of the same shape; the objectives `skipgram` and `cbow` train both (`qkv.objectives.word2vec`). The
vectors of a trained model are its embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qkv import spec as s
from qkv.tokenization.template import Template

PAPER = "Mikolov et al. 2013"
HEAD_NAMES = ("word_lm", "sequence", "token", "choice", "backbone")
TOKENIZER_TEMPLATE = Template(
    kind="word",
    special_tokens={"pad": "<pad>", "unk": "<unk>", "bos": "<s>", "eos": "</s>"},
    pair="$A </s> $B",
    lowercase=True,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of the recipe's `model` section for word vectors."""

    d_model: int = 100
    """Width of the vectors."""
    max_length: int = 1000
    """Words of a text that are read together; a window ends where such a chunk ends."""


PRESETS = {"base": Config(), "large": Config(d_model=300)}


def make_heads(config: Config, vocab_size: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    """Return each head by its name; `word_lm` is the output matrix of word2vec."""
    return {
        "word_lm": s.Head(kind="lm", d_model=config.d_model, num_outputs=vocab_size),
        "sequence": s.classification_head("sequence", config.d_model, labels, pool="mean"),
        "choice": s.classification_head("choice", config.d_model, labels, pool="mean"),
        "token": s.classification_head("token", config.d_model, labels),
    }


def make_spec(
    config: Config, *, source_vocab_size: int = 30000, head: str = "word_lm", labels: tuple[str, ...] = ("no", "yes")
) -> s.Model:
    """Return a model of word vectors with one of its heads; `backbone` has none."""
    return s.Model(
        family="word2vec",
        source_embedding=s.Embedding(
            vocab_size=source_vocab_size, d_model=config.d_model, max_length=config.max_length, position="none"
        ),
        encoder=s.BagOfWords(d_model=config.d_model),
        head=s.select_head(make_heads(config, source_vocab_size, labels), head),
        init_std=1 / (config.d_model * math.sqrt(12)),  # that of the uniform distribution in ±1 / (2 d_model)
    )
