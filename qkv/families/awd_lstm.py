"""AWD-LSTM: an LSTM language model with DropConnect and locked dropout; the backbone of ULMFiT.

Merity et al. 2018, "Regularizing and Optimizing LSTM Language Models"; Howard & Ruder 2018, "Universal Language Model
Fine-tuning for Text Classification", whose rates are the defaults here, as in fastai. The other parts of the paper are
settings of training: `data.random_bptt`, `objective.clm.activation_penalty` and `temporal_penalty`, and
`train.optimizer: nt_asgd` (docs/memory.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv import spec as s
from qkv.families import lstm_lm

__all__ = ["HEAD_NAMES", "PAPER", "PRESETS", "TOKENIZER_TEMPLATE", "Config", "make_spec", "task_heads"]

PAPER = "Merity et al. 2018"
HEAD_NAMES = lstm_lm.HEAD_NAMES
TOKENIZER_TEMPLATE = lstm_lm.TOKENIZER_TEMPLATE
_CLASSIFIER_HIDDEN = 50  # hidden units of ULMFiT's classifier


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of the recipe's `model` section for AWD-LSTM."""

    d_model: int = 400
    """Width of the embeddings, and with `tie_embeddings` of the last layer."""
    hidden_size: int = 1152
    """State size of the other layers."""
    layers: int = 3
    """Number of layers."""
    word_dropout: float = 0.02
    """Probability that a token's embedding is zero everywhere in a batch."""
    input_dropout: float = 0.25
    """Dropout on the embeddings, with one mask per sequence."""
    dropout: float = 0.15
    """Dropout between layers, with one mask per sequence."""
    weight_dropout: float = 0.2
    """DropConnect on the hidden-to-hidden matrices."""
    output_dropout: float = 0.1
    """Dropout on the output of the last layer, with one mask per sequence."""
    classifier_dropout: float = 0.1
    """Dropout of the layers of a classification head."""
    max_length: int = 4096
    """Longest segment of a text in tokens; a text itself can have any length."""
    tie_embeddings: bool = True
    """Use the embedding matrix as output matrix of the language model head."""


PRESETS = {
    "small": Config(d_model=200, hidden_size=400, layers=2),
    "base": Config(),
    # the rates of the paper for the Penn Treebank
    "paper": Config(
        hidden_size=1150, word_dropout=0.1, input_dropout=0.4, dropout=0.25, weight_dropout=0.5, output_dropout=0.4
    ),
}


def task_heads(width: int, labels: tuple[str, ...], dropout: float) -> dict[str, s.Head]:
    """Return the heads of tasks by name.

    That for sequences is ULMFiT's: the last state, the maximum and the mean of all, and a hidden layer, with batch
    normalization, since the mean of a feature over all texts is far larger than its variation.
    """
    heads = lstm_lm.task_heads(width, labels, dropout)
    sequence_head = s.replace(
        heads["sequence"],
        pool="concat",
        dense_activation="relu",
        dense_size=_CLASSIFIER_HIDDEN,
        batch_norm=True,
        dropout_before_dense=dropout > 0,
    )
    return heads | {"sequence": sequence_head}


def make_spec(
    config: Config,
    *,
    target_vocab_size: int = 60000,
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
        layers=config.layers,
        dropout=config.dropout,
        input_dropout=config.input_dropout,
        output_dropout=config.output_dropout,
        weight_dropout=config.weight_dropout,
        locked_dropout=True,
    )
    embedding = s.Embedding(
        vocab_size=target_vocab_size,
        d_model=config.d_model,
        max_length=config.max_length,
        position="none",
        word_dropout=config.word_dropout,
    )
    heads = task_heads(stack.output_dim, labels, config.classifier_dropout) | {
        "lm": lstm_lm.lm_head(stack, target_vocab_size, config.tie_embeddings)
    }
    return s.Model(
        family="awd_lstm",
        target_embedding=embedding,
        decoder=stack,
        head=s.select_head(heads, head),
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=pad_id,
    )
