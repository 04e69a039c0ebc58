"""The recurrent encoder-decoder: Sutskever et al. 2014; with attention Bahdanau et al. 2015, Luong et al. 2015.

"Sequence to Sequence models: Attention Models" of the notes is this family: `attention: none` is its "simple
translation model", the other values are its scores g(h, s). Under a head for sequences or tokens it is the encoder
alone, a BiLSTM: "Use case #1: sequence classification with RNNs", whose attention has a learned query; with
`attention: none` the last state stands for the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkv import spec as s
from qkv.errors import InputError, nearest

PAPER = "Bahdanau et al. 2015"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a recipe may say of a recurrent encoder-decoder, or of the encoder alone."""

    attention: Literal["none", "dot", "scaled_dot", "bilinear", "additive", "mlp"] = "additive"
    heads: int = 1
    cell: s.Cell = "lstm"
    width: int = 256  # of the embeddings
    hidden: int = 512  # of the decoder; a bidirectional encoder has half of it each way
    layers: int = 1
    decoder_layers: int = 1
    bidirectional: bool = True
    readout: bool = True
    dropout: float = 0.2
    length: int = 512


SIZES = {
    "small": Shape(width=128, hidden=256),
    "base": Shape(),
    "big": Shape(width=512, hidden=1024, layers=2, decoder_layers=2),
}


HEADS = ("generation", "sequence", "token", "span", "choice")


def spec(
    shape: Shape,
    *,
    source: int = 30000,
    target: int = 30000,
    start: int = 2,
    end: int = 3,
    head: str = "generation",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """An encoder-decoder for vocabularies of the given sizes; the encoder's output has the decoder's width.

    Under any other head than `generation` the encoder alone.
    """
    if head not in HEADS:
        raise InputError(f"head: this family has no '{head}'; {nearest(head, HEADS)}")
    if shape.bidirectional and shape.hidden % 2:
        raise InputError(f"model.hidden: {shape.hidden} does not divide into two directions; make it even")
    each_way = shape.hidden // 2 if shape.bidirectional else shape.hidden
    encoder = s.Recurrent(
        width=shape.width,
        hidden=each_way,
        cell=shape.cell,
        layers=shape.layers,
        bidirectional=shape.bidirectional,
        dropout=shape.dropout,
    )
    attention = None
    if shape.attention != "none":
        attention = s.Attention(
            width=shape.hidden, memory=encoder.output, heads=shape.heads, score=shape.attention, project=False
        )
    embed = s.Embed(vocabulary=source, width=shape.width, length=shape.length, position="none", dropout=shape.dropout)
    half = s.Model(family="rnn", source=embed, encoder=encoder, start=start, end=end)
    if head != "generation":
        made = s.label_head(head, encoder.output, labels, pool=attention or "last", dropout=shape.dropout)  # type: ignore[arg-type]
        return s.replace(half, head=made)
    decoder = s.RecurrentDecoder(
        width=shape.width,
        memory=encoder.output,
        hidden=shape.hidden,
        cell=shape.cell,
        layers=shape.decoder_layers,
        attention=attention,
        readout=shape.readout,
        dropout=shape.dropout,
    )
    written = s.Head(kind="lm", width=shape.hidden, outputs=target, bias=True)
    return s.replace(half, target=s.replace(embed, vocabulary=target), decoder=decoder, head=written)
