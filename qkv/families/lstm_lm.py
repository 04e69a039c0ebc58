"""The recurrent language model: LSTM or GRU layers over embedded tokens, which predict the next token.

Mikolov et al. 2010; Sundermeyer et al. 2012, "LSTM Neural Networks for Language Modeling"; Zaremba et al. 2014, whose
dropout is between the layers only. The state is the model's memory: it is carried from one segment of a text to the
next (docs/memory.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv import spec as s
from qkv.families import gpt2

PAPER = "Sundermeyer et al. 2012"
HEAD_NAMES = ("lm", "sequence", "token", "span", "choice", "backbone")
TOKENIZER_TEMPLATE = gpt2.TOKENIZER_TEMPLATE


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of the recipe's `model` section for recurrent language models."""

    cell: s.Cell = "lstm"
    """Kind of recurrent cell."""
    d_model: int = 512
    """Width of the embeddings, and with `tie_embeddings` of the last layer."""
    hidden_size: int = 512
    """State size of each layer."""
    layers: int = 2
    """Number of layers."""
    dropout: float = 0.2
    """Dropout on the embeddings, after each layer, and before a classification head."""
    max_length: int = 4096
    """Longest segment of a text in tokens; a text itself can have any length."""
    tie_embeddings: bool = True
    """Use the embedding matrix as output matrix of the language model head."""


PRESETS = {
    "small": Config(d_model=256, hidden_size=256),
    "base": Config(),
    "large": Config(d_model=1500, hidden_size=1500, dropout=0.65),
}


def task_heads(width: int, labels: tuple[str, ...], dropout: float) -> dict[str, s.Head]:
    """Return the heads of tasks by name; those for whole sequences read the last state, which has read all tokens."""
    return {
        "sequence": s.classification_head("sequence", width, labels, pool="last", dropout=dropout),
        "choice": s.classification_head("choice", width, labels, pool="last", dropout=dropout),
        "token": s.classification_head("token", width, labels, dropout=dropout),
        "span": s.classification_head("span", width, labels, dropout=dropout),
    }


def make_spec(
    config: Config,
    *,
    target_vocab_size: int = 50257,
    bos_id: int = -1,
    eos_id: int = -1,
    pad_id: int | None = None,
    head: str = "lm",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """Return a recurrent decoder with one of its heads; `backbone` has none."""
    stack = s.RecurrentStack(
        d_model=config.d_model,
        hidden_size=config.hidden_size,
        output_size=config.d_model if config.tie_embeddings else config.hidden_size,
        cell=config.cell,
        layers=config.layers,
        dropout=config.dropout,
        input_dropout=config.dropout,
        output_dropout=config.dropout,
    )
    embedding = s.Embedding(
        vocab_size=target_vocab_size, d_model=config.d_model, max_length=config.max_length, position="none"
    )
    heads = task_heads(stack.output_dim, labels, config.dropout) | {
        "lm": lm_head(stack, target_vocab_size, config.tie_embeddings)
    }
    return s.Model(
        family="lstm_lm",
        target_embedding=embedding,
        decoder=stack,
        head=s.select_head(heads, head),
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=pad_id,
    )


def lm_head(stack: s.RecurrentStack, vocab_size: int, tie_embeddings: bool) -> s.Head:
    """Return the language model head."""
    width = stack.output_dim
    return s.Head(kind="lm", d_model=width, num_outputs=vocab_size, bias=True, tie_embeddings=tie_embeddings)
