"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

`base` and `big` are those of the paper's Table 3; `tiny` is ours, for small tasks such as pronunciation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkv import spec as s
from qkv.families.heads import HEAD_NAMES, with_head

__all__ = ["HEAD_NAMES", "PAPER", "PRESETS", "Config", "make_spec"]

PAPER = "Vaswani et al. 2017"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of the recipe's `model` section for the Transformer."""

    d_model: int = 512
    """Width of the hidden states."""
    heads: int = 8
    """Number of attention heads per layer."""
    layers: int = 6
    """Number of encoder layers."""
    decoder_layers: int | None = None
    """Number of decoder layers; null for the value of `layers`."""
    d_ff: int = 2048
    """Width of the feed-forward layers."""
    dropout: float = 0.1
    """Dropout on the embeddings and on the output of every sublayer."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""
    activation: s.Activation = "relu"
    """Activation of the feed-forward layers."""
    gated: bool = False
    """Use gated feed-forward layers (Shazeer 2020)."""
    norm_first: bool = False
    """Use pre-norm blocks (Xiong et al. 2020) instead of the paper's post-norm."""
    position: Literal["sinusoid", "learned", "none"] = "sinusoid"
    """Position scheme: sinusoids, a learned table, or none."""
    max_length: int = 512
    """Longest source and longest target in tokens."""
    share_embeddings: bool = False
    """Use one embedding table for source, target and output, as the paper does with its joint vocabulary."""


PRESETS = {
    "tiny": Config(d_model=256, heads=4, layers=4, d_ff=1024),
    "base": Config(),
    "big": Config(d_model=1024, heads=16, d_ff=4096, dropout=0.3),
}


def make_spec(
    config: Config,
    *,
    source_vocab_size: int = 37000,
    target_vocab_size: int = 37000,
    bos_id: int = 2,
    eos_id: int = 3,
    head: str = "seq2seq_lm",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """Return an encoder-decoder for vocabularies of the given sizes; `with_head` describes its other heads."""
    attention = s.Attention(query_dim=config.d_model, heads=config.heads, dropout=config.attention_dropout)
    block = s.Block(
        self_attention=attention,
        feedforward=s.FeedForward(
            d_model=config.d_model, d_ff=config.d_ff, activation=config.activation, gated=config.gated
        ),
        norm_first=config.norm_first,
        dropout=config.dropout,
    )
    stack = s.TransformerStack(block=block, num_layers=config.layers, final_norm=config.norm_first)
    embedding = s.Embedding(
        vocab_size=source_vocab_size,
        d_model=config.d_model,
        max_length=config.max_length,
        position=config.position,
        scale_by_sqrt_dim=True,
        dropout=config.dropout,
    )
    model = s.Model(
        family="transformer",
        source_embedding=embedding,
        encoder=stack,
        target_embedding=s.replace(embedding, vocab_size=target_vocab_size),
        decoder=s.replace(
            stack,
            block=s.replace(block, cross_attention=attention),
            num_layers=config.decoder_layers or config.layers,
            causal=True,
        ),
        head=s.Head(kind="lm", d_model=config.d_model, num_outputs=target_vocab_size, tie_embeddings=True),
        share_embeddings=config.share_embeddings,
        bos_id=bos_id,
        eos_id=eos_id,
    )
    return model if head == "seq2seq_lm" else with_head(model, head, labels)
