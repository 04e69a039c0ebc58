"""ELMo: deep contextualized word vectors from a bidirectional language model over characters.

Peters et al. 2018, https://arxiv.org/abs/1802.05365. A word is read through its characters, so that none is unknown;
two LSTMs predict the next and the previous word. A task reads a learned mean of all layers
(`finetune.feature_layers: scalar_mix`), with the model frozen or not. `original` and `small` are the published sizes;
their HDF5 weights are read by `qkv.load` (docs/memory.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv import spec as s
from qkv.spec.characters import NUM_LETTERS
from qkv.tokenization.template import Template

PAPER = "Peters et al. 2018"
HEAD_NAMES = ("lm", "sequence", "token", "choice", "backbone")
TOKENIZER_TEMPLATE = Template(
    kind="spelled_word",
    special_tokens={"pad": "<pad>", "unk": "<UNK>", "bos": "<S>", "eos": "</S>"},
    single="<S> $A </S>",
    pair="<S> $A </S> $B </S>",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of the recipe's `model` section for ELMo."""

    char_dim: int = 16
    """Width of the vector of a character."""
    filter_widths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)
    """Number of characters that each group of convolution filters reads."""
    filter_counts: tuple[int, ...] = (32, 32, 64, 128, 256, 512, 1024)
    """Number of filters of each group."""
    num_highway: int = 2
    """Number of highway layers over the filters."""
    activation: s.Activation = "relu"
    """Activation of the filters and of the highway layers."""
    max_characters: int = 50
    """Number of bytes of a word that are read, with its beginning and end."""
    d_model: int = 512
    """Width of one direction; a word's vector has both."""
    hidden_size: int = 4096
    """Size of the cells of one direction, which are projected to `d_model`."""
    layers: int = 2
    """Number of LSTM layers."""
    cell_clip: float = 3.0
    """Largest absolute value of a cell."""
    projection_clip: float = 3.0
    """Largest absolute value of a projected state."""
    skip_connections: bool = True
    """Add the input of each layer but the first to its output."""
    dropout: float = 0.1
    """Dropout on the input of each layer, on the output of the last, and before a classification head."""
    max_length: int = 4096
    """Longest text in tokens; a word that is not in the vocabulary has one token per letter."""


PRESETS = {
    "mini": Config(filter_counts=(16, 16, 32, 64, 64, 64, 64), d_model=128, hidden_size=256, num_highway=1),
    "small": Config(d_model=128, hidden_size=1024, num_highway=1),
    "original": Config(),
}


def make_heads(config: Config, vocab_size: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    """Return each head by its name; the language model's is shared by both directions."""
    width, dropout = 2 * config.d_model, config.dropout
    return {
        "lm": s.Head(kind="lm", d_model=config.d_model, num_outputs=vocab_size, bias=True),
        "sequence": s.classification_head("sequence", width, labels, pool="mean", dropout=dropout),
        "choice": s.classification_head("choice", width, labels, pool="mean", dropout=dropout),
        "token": s.classification_head("token", width, labels, dropout=dropout),
    }


def make_spec(
    config: Config,
    *,
    source_vocab_size: int = 30000,
    words: tuple[str, ...] = (),
    head: str = "lm",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """Return a bidirectional language model with one of its heads; `backbone` has none.

    Args:
        config: sizes of the model.
        source_vocab_size: number of words and letters; a vocabulary of fewer tokens than letters has words only.
        words: the text of each token but the letters, by id.
        head: the name of the head.
        labels: the names of a classification head's outputs.
    """
    return s.Model(
        family="elmo",
        source_embedding=s.CharacterEmbedding(
            vocab_size=source_vocab_size,
            d_model=config.d_model,
            max_length=config.max_length,
            words=words,
            letters=source_vocab_size >= NUM_LETTERS,
            char_dim=config.char_dim,
            filter_widths=config.filter_widths,
            filter_counts=config.filter_counts,
            num_highway=config.num_highway,
            activation=config.activation,
            max_characters=config.max_characters,
        ),
        encoder=s.BiLM(
            d_model=config.d_model,
            hidden_size=config.hidden_size,
            layers=config.layers,
            cell_clip=config.cell_clip,
            projection_clip=config.projection_clip,
            skip_connections=config.skip_connections,
            dropout=config.dropout,
        ),
        head=s.select_head(make_heads(config, source_vocab_size, labels), head),
    )
