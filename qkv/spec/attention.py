"""Specifications of a Transformer block: attention, position schemes of its scores, feed-forward layer, norm.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]
ScoreName = Literal["scaled_dot", "dot", "bilinear", "additive", "mlp"]  # the built-in score functions


@dataclass(frozen=True, kw_only=True)
class RelativePositions:
    """Scores with a term per distance: projected sinusoids, and learned biases on the queries (Dai et al. 2019).

    The sinusoids of a distance have the width of the queries; dropout on them is that of the block.
    """

    max_distance: int | None = None  # distance from which on all share an encoding; None: no limit
    segments: bool = False  # a further term for keys of another segment than the query's (Yang et al. 2019, 2.5)
    window: int | None = None  # keys that a query attends to at most, its own included; None: all


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Configuration of one attention layer: query and key/value dimensions, number of heads, score function.

    Vaswani et al. 2017; Bahdanau et al. 2015.
    """

    query_dim: int  # width of the queries
    kv_dim: int | None = None  # width of the states that keys and values come from; None: query_dim
    heads: int = 1  # number of heads
    head_dim: int | None = None  # size of one head's query and key; None: query_dim / heads
    v_head_dim: int | None = None  # size of one head's value; None: that of its key
    score_fn: ScoreName | str = "scaled_dot"  # comparison of query and key: a built-in or registered score function
    score_hidden_dim: int | None = None  # hidden size of the additive and mlp scores; None: the key's size
    use_projections: bool = True  # False: states are used as query, key and value without W_q, W_k, W_v, W_o (RNNs)
    score_scale: float = 1.0  # factor on the scores, in addition to that of the score function
    bias: bool = True  # biases of the query, key and value projections
    output_bias: bool | None = None  # bias of the output projection; None: as `bias`
    dropout: float = 0.0  # dropout on the attention weights
    relative_positions: RelativePositions | None = None  # position scheme of Transformer-XL and XLNet; None: none

    @property
    def effective_kv_dim(self) -> int:
        return self.query_dim if self.kv_dim is None else self.kv_dim

    @property
    def q_head_dim(self) -> int:
        """Size of one head's query; only a projection can change it."""
        return (self.head_dim or self.query_dim // self.heads) if self.use_projections else self.query_dim // self.heads

    @property
    def k_head_dim(self) -> int:
        return self.q_head_dim if self.use_projections else self.effective_kv_dim // self.heads

    @property
    def effective_v_head_dim(self) -> int:
        return (self.v_head_dim or self.k_head_dim) if self.use_projections else self.effective_kv_dim // self.heads

    @property
    def output_dim(self) -> int:
        """Width of the output: query_dim after W_o, or the concatenated context vectors of all heads without it."""
        return self.query_dim if self.use_projections else self.heads * self.effective_v_head_dim


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """Position-wise feed-forward layer: activation(x W1 + b1) W2 + b2, or its gated form (Shazeer 2020)."""

    d_model: int  # width of input and output
    d_ff: int  # width of the hidden layer
    activation: Activation = "relu"  # activation of the hidden layer
    gated: bool = False  # multiply the hidden layer by a second linear layer
    bias: bool = True  # biases of all linear layers
    dropout: float = 0.0  # dropout after the activation


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Layer normalization (Ba et al. 2016) or RMS normalization (Zhang & Sennrich 2019)."""

    kind: Literal["layer", "rms"] = "layer"  # which of the two
    eps: float = 1e-5  # added to the variance


@dataclass(frozen=True, kw_only=True)
class Block:
    """Transformer block: self-attention, optional cross-attention, feed-forward; each with a residual and a norm."""

    self_attention: Attention  # attention over the block's own input
    feedforward: FeedForward  # the last sublayer
    cross_attention: Attention | None = None  # attention over the encoder output; None: no such sublayer
    norm: Norm = Norm()  # normalization of every sublayer
    norm_first: bool = False  # pre-norm (Xiong et al. 2020); False: the post-norm of Vaswani et al.
    dropout: float = 0.0  # dropout on the output of every sublayer


@dataclass(frozen=True, kw_only=True)
class RelativePositionBias:
    """Learned bias on the scores per head and distance; large distances share buckets (Raffel et al. 2020).

    One table serves all layers of a stack. In a causal stack all buckets are for preceding positions.
    """

    num_buckets: int = 32  # number of distances with a bias of their own
    max_distance: int = 128  # distance from which on all share the last bucket
