"""The recurrent encoder-decoder: Sutskever et al. 2014; with attention Bahdanau et al. 2015, Luong et al. 2015.

The subject of "Sequence to Sequence models: Attention Models" in the notes: `attention: none` is its "simple
translation model", the other values are its scores g(h, s). With a head for sequences or tokens only the encoder is
used, a BiLSTM: "Use case #1: sequence classification with RNNs", which pools the states by attention with a learned
query, or with `attention: none` takes the last state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from qkv import spec as s
from qkv.errors import InputError, did_you_mean
from qkv.families.heads import HEAD_NAMES

__all__ = ["HEAD_NAMES", "PAPER", "PRESETS", "Config", "make_spec"]

PAPER = "Bahdanau et al. 2015"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of the recipe's `model` section for recurrent models."""

    attention: Literal["none", "dot", "scaled_dot", "bilinear", "additive", "mlp"] | str = "additive"
    """Score function of the attention: a built-in one, a registered one, or `none` for no attention."""
    heads: int = 1
    """Number of attention heads."""
    cell: s.Cell = "lstm"
    """Kind of recurrent cell."""
    d_model: int = 256
    """Width of the embeddings."""
    hidden_size: int = 512
    """State size of the decoder; each direction of a bidirectional encoder has half of it."""
    layers: int = 1
    """Number of encoder layers."""
    decoder_layers: int = 1
    """Number of decoder layers."""
    bidirectional: bool = True
    """Let the encoder read the source in both directions."""
    readout: bool = True
    """Predict from tanh(W [state; context; previous word]) instead of from the state alone."""
    dropout: float = 0.2
    """Dropout on the embeddings, after each recurrent layer, on the readout and before a classification head."""
    max_length: int = 512
    """Longest source and longest target in tokens."""


PRESETS = {
    "small": Config(d_model=128, hidden_size=256),
    "base": Config(),
    "big": Config(d_model=512, hidden_size=1024, layers=2, decoder_layers=2),
}


def make_spec(
    config: Config,
    *,
    source_vocab_size: int = 30000,
    target_vocab_size: int = 30000,
    bos_id: int = 2,
    eos_id: int = 3,
    head: str = "seq2seq_lm",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """Return an encoder-decoder for vocabularies of the given sizes, or with a classification head the encoder alone.

    The encoder output has the width of the decoder state.
    """
    if head not in HEAD_NAMES:
        raise InputError(f"head: this family has no '{head}'; {did_you_mean(head, HEAD_NAMES)}")
    if config.bidirectional and config.hidden_size % 2:
        raise InputError(f"model.hidden_size: {config.hidden_size} does not divide into two directions; make it even")
    encoder = _encoder_spec(config)
    attention = None
    if config.attention != "none":
        attention = s.Attention(
            query_dim=config.hidden_size,
            kv_dim=encoder.output_dim,
            heads=config.heads,
            score_fn=config.attention,
            use_projections=False,
        )
    embedding = s.Embedding(
        vocab_size=source_vocab_size,
        d_model=config.d_model,
        max_length=config.max_length,
        position="none",
        dropout=config.dropout,
    )
    encoder_model = s.Model(family="rnn", source_embedding=embedding, encoder=encoder, bos_id=bos_id, eos_id=eos_id)
    if head not in ("seq2seq_lm", "backbone"):
        # `token` and `span` do not use the pool; it stays because saved models have its weights
        head_spec = s.classification_head(
            cast("s.HeadKind", head), encoder.output_dim, labels, pool=attention or "last", dropout=config.dropout
        )
        return s.replace(encoder_model, head=head_spec)
    decoder = s.RecurrentDecoder(
        d_model=config.d_model,
        encoder_dim=encoder.output_dim,
        hidden_size=config.hidden_size,
        cell=config.cell,
        layers=config.decoder_layers,
        attention=attention,
        readout=config.readout,
        dropout=config.dropout,
    )
    return s.replace(
        encoder_model,
        target_embedding=s.replace(embedding, vocab_size=target_vocab_size),
        decoder=decoder,
        head=None
        if head == "backbone"
        else s.Head(kind="lm", d_model=config.hidden_size, num_outputs=target_vocab_size, bias=True),
    )


def _encoder_spec(config: Config) -> s.RecurrentEncoder:
    hidden_per_direction = config.hidden_size // 2 if config.bidirectional else config.hidden_size
    return s.RecurrentEncoder(
        d_model=config.d_model,
        hidden_size=hidden_per_direction,
        cell=config.cell,
        layers=config.layers,
        bidirectional=config.bidirectional,
        dropout=config.dropout,
    )
