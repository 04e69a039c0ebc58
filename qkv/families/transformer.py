"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

`base` and `big` are the paper's Table 3; `tiny` is ours, for small tasks such as pronunciation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkv import spec as s

PAPER = "Vaswani et al. 2017"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a recipe may say of a Transformer."""

    width: int = 512
    heads: int = 8
    layers: int = 6
    decoder_layers: int | None = None  # None: as many as the encoder's
    hidden: int = 2048
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation: s.Activation = "relu"
    gated: bool = False
    norm_first: bool = False
    position: Literal["sinusoid", "learned", "none"] = "sinusoid"
    length: int = 512
    shared: bool = False  # one table for source, target and output, as with the paper's joint vocabulary


SIZES = {
    "tiny": Shape(width=256, heads=4, layers=4, hidden=1024),
    "base": Shape(),
    "big": Shape(width=1024, heads=16, hidden=4096, dropout=0.3),
}


def spec(shape: Shape, *, source: int = 37000, target: int = 37000, start: int = 2, end: int = 3) -> s.Model:
    """An encoder-decoder for vocabularies of the given sizes."""
    attention = s.Attention(width=shape.width, heads=shape.heads, dropout=shape.attention_dropout)
    block = s.Block(
        attention=attention,
        feedforward=s.FeedForward(
            width=shape.width,
            hidden=shape.hidden,
            activation=shape.activation,
            gated=shape.gated,
        ),
        norm_first=shape.norm_first,
        dropout=shape.dropout,
    )
    stack = s.Stack(block=block, depth=shape.layers, final_norm=shape.norm_first)
    embed = s.Embed(
        vocabulary=source,
        width=shape.width,
        length=shape.length,
        position=shape.position,
        scale=True,
        dropout=shape.dropout,
    )
    return s.Model(
        family="transformer",
        source=embed,
        encoder=stack,
        target=s.replace(embed, vocabulary=target),
        decoder=s.replace(
            stack,
            block=s.replace(block, cross=attention),
            depth=shape.decoder_layers or shape.layers,
            causal=True,
        ),
        head=s.Head(kind="lm", width=shape.width, outputs=target, tied=True),
        shared=shape.shared,
        start=start,
        end=end,
    )
