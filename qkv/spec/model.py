"""Model specifications: frozen dataclasses that describe a model completely. Imports no torch.

`qkv.nn.build(spec)` makes the module. A variant of a model is a field here, not a class, so that score function, mask,
position scheme and placement of the norm can be combined freely.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from dataclasses import replace as replace  # families derive their specs with it
from typing import Any, Literal, TypeVar

from qkv.errors import InputError, did_you_mean, quote

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]
Cell = Literal["lstm", "gru"]
FeatureLayers = Literal["last", "concat_last_4", "scalar_mix"]
HeadKind = Literal["lm", "sequence", "token", "span", "choice", "next_sentence", "pooler"]
Modality = Literal["text", "image"]  # kinds of input
ScoreName = Literal["scaled_dot", "dot", "bilinear", "additive", "mlp"]  # the built-in score functions


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


@dataclass(frozen=True, kw_only=True)
class TransformerStack:
    """A stack of `num_layers` equal blocks."""

    block: Block  # configuration of each block
    num_layers: int  # number of blocks
    causal: bool = False  # each position attends to itself and preceding ones only
    final_norm: bool = False  # normalize the output of the last block
    dropout: float = 0.0  # dropout after the final norm
    relative_position_bias: RelativePositionBias | None = None  # position scheme of T5; None: none
    scale_attn_by_inverse_layer_idx: bool = False  # divide the scores of layer n by n (an option of GPT-2)
    # Scale the initial weights of residual output projections by 1/sqrt(number of residual layers) (GPT-2, 2.3).
    # Affects initialization only, so it is excluded from equality.
    scaled_residual_init: bool = field(default=False, compare=False)

    @property
    def d_model(self) -> int:
        return self.block.self_attention.query_dim


@dataclass(frozen=True, kw_only=True)
class RecurrentEncoder:
    """Recurrent encoder (Hochreiter & Schmidhuber 1997; Cho et al. 2014)."""

    d_model: int  # width of the embeddings that it reads
    hidden_size: int  # state size of one direction
    cell: Cell = "lstm"  # kind of recurrent cell
    layers: int = 1  # number of layers
    bidirectional: bool = True  # read the sequence in both directions
    dropout: float = 0.0  # dropout after each layer

    @property
    def output_dim(self) -> int:
        return self.hidden_size * (2 if self.bidirectional else 1)


@dataclass(frozen=True, kw_only=True)
class RecurrentDecoder:
    """Recurrent decoder that attends at each step, or without attention starts from the encoder's last state."""

    d_model: int  # width of the target embeddings
    encoder_dim: int  # width of the encoder output
    hidden_size: int  # state size
    cell: Cell = "lstm"  # kind of recurrent cell
    layers: int = 1  # number of layers
    attention: Attention | None = None  # attention over the encoder output; None: only its last state is used
    readout: bool = True  # predict from tanh(W [s; c; y]); False: from the state s alone, as in the notes
    dropout: float = 0.0  # dropout after each layer and on the readout


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Front end for tokens: token, position and segment embeddings."""

    vocab_size: int  # number of tokens
    d_model: int  # width of the vectors
    max_length: int = 512  # longest sequence that is accepted
    # position scheme; sinusoid_concat has all sines before all cosines
    position: Literal["sinusoid", "sinusoid_concat", "learned", "none"] = "sinusoid"
    position_offset: int = 0  # unused rows of the learned position table before that of the first position
    padding_idx: int | None = None  # token whose embedding gets no gradient, as in Hugging Face
    num_segments: int = 0  # number of segment embeddings (token types; Devlin et al. 2019); 0: none
    scale_by_sqrt_dim: bool = False  # multiply by sqrt(d_model) before positions are added (Vaswani et al. 2017)
    norm: Norm | None = None  # normalization of the sum
    dropout: float = 0.0  # dropout on the output

    @property
    def modality(self) -> Modality:
        """Kind of input that the front end reads."""
        return "text"

    @property
    def projection_dim(self) -> int:
        """Width of the input of a linear projection per token; 0: tokens are looked up."""
        return 0

    @property
    def fixed_length(self) -> int | None:
        """Length of every sequence; None: texts differ in length."""
        return None


@dataclass(frozen=True, kw_only=True)
class PatchEmbedding:
    """Front end for square images: one vector per patch, after a [CLS] vector (Dosovitskiy et al. 2021)."""

    image_size: int  # side of the image in pixels
    patch_size: int  # side of a patch in pixels
    num_channels: int  # color channels
    d_model: int  # width of the vectors
    dropout: float = 0.0  # dropout on the output

    @property
    def max_length(self) -> int:
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def modality(self) -> Modality:
        """Kind of input that the front end reads."""
        return "image"

    @property
    def projection_dim(self) -> int:
        """Width of the input of a linear projection per patch: its pixels in all channels."""
        return self.num_channels * self.patch_size**2

    @property
    def fixed_length(self) -> int | None:
        """Length of every sequence: all images have the same patches."""
        return self.max_length


@dataclass(frozen=True, kw_only=True)
class Head:
    """Map from hidden states to logits: [dense, activation, norm,] linear.

    Heads that read every token: `lm` (vocabulary), `token` (labels), `span` (start and end of an answer). Heads that
    read one pooled vector per sequence: `sequence` (labels), `choice` (one score), `next_sentence` (two outputs), and
    `pooler`, which returns the dense layer's output.
    """

    kind: HeadKind  # which of these heads
    d_model: int  # width of one layer's hidden states
    num_outputs: int  # number of logits
    num_concat_layers: int = 1  # number of layers whose hidden states are concatenated in the input
    bias: bool = False  # bias of the linear layer
    tie_embeddings: bool = False  # use the target's (else the source's) embedding matrix (Press & Wolf 2017)
    # one vector per sequence: attention with a learned query, the last token, the mean of all; None: the first token
    pool: Attention | Literal["last", "mean"] | None = None
    dense_activation: Activation | None = None  # activation of a dense layer before the linear one; None: no such layer
    norm: Norm | None = None  # normalization after the dense layer
    input_scale: float = 1.0  # factor on the input of the linear layer
    final_logits_bias: bool = False  # add a constant vector, which is no parameter, to the logits
    dropout: float = 0.0  # dropout before the linear layer
    dropout_before_dense: bool = False  # dropout before the dense layer as well (RoBERTa, BART, T5)
    labels: tuple[str, ...] = ()  # names of the outputs
    # The next two determine how logits are interpreted; they change none of them.
    multi_label: bool = False  # any number of labels per example, each with a sigmoid
    subword_pooling: Literal["first", "mean"] = "first"  # the logits of a word of several tokens

    @property
    def is_token_level(self) -> bool:
        """Whether the head reads every token rather than one vector per sequence."""
        return self.kind in ("lm", "token", "span")


def classification_head(kind: HeadKind, d_model: int, labels: tuple[str, ...], **overrides: Any) -> Head:
    """Return a head other than a language model's, with the number of outputs that its kind has."""
    num_outputs = {"span": 2, "choice": 1, "next_sentence": 2, "pooler": d_model}.get(kind, len(labels))
    label_names = labels if kind in ("sequence", "token") else ()
    return Head(kind=kind, d_model=d_model, num_outputs=num_outputs, labels=label_names, **({"bias": True} | overrides))


def select_head(heads: dict[str, Head], name: str) -> Head | None:
    """Return a family's head by its name; `backbone` is no head."""
    if name == "backbone":
        return None
    if name not in heads:
        raise InputError(f"head: this family has no {quote(name)}; {did_you_mean(name[:60], ['backbone', *heads])}")
    return heads[name]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adaptation: W x + alpha / rank * B A x, where W is frozen (Hu et al. 2022)."""

    rank: int = 8  # rows of A and columns of B
    alpha: float = 16.0  # numerator of the scaling factor
    dropout: float = 0.0  # dropout on the input of A
    target_modules: tuple[str, ...] = ("q", "v")  # layers of every block: q, k, v, o of attentions; up, gate, down


@dataclass(frozen=True, kw_only=True)
class Model:
    """A whole model: an encoder, a decoder, or both, with a head."""

    family: str  # name of the family in `qkv.families`
    encoder: TransformerStack | RecurrentEncoder | None = None  # None: a decoder-only model
    decoder: TransformerStack | RecurrentDecoder | None = None  # None: an encoder-only model
    source_embedding: Embedding | PatchEmbedding | None = None  # front end of the encoder
    target_embedding: Embedding | None = None  # front end of the decoder
    head: Head | None = None  # None: the model returns hidden states
    aux_head: Head | None = None  # a second head on the same hidden states, such as BERT's next-sentence head
    share_embeddings: bool = False  # source and target use one embedding table
    bos_id: int = 2  # first token of a decoder's input; -1: a decoder-only model without one
    eos_id: int = 3  # token that ends a sequence; -1: a decoder-only model without one
    pad_id: int | None = None  # padding token in Hugging Face's config; unused here, kept for export
    suppress_tokens: tuple[int, ...] = ()  # tokens that are never generated
    init_std: float | None = None  # standard deviation of the initial weights; None: Glorot initialization
    # Input of the head: the last layer, the last four concatenated (Devlin et al. 2019, 5.3), or a learned weighted
    # mean of all layers (Peters et al. 2018).
    feature_layers: FeatureLayers = "last"
    lora: LoraConfig | None = None  # None: no LoRA weights


Spec = TypeVar("Spec")


def input_embedding(model: Model) -> Embedding | PatchEmbedding:
    """Return the front end that reads a model's input: the source's, or the target's of a decoder-only model."""
    embedding = model.source_embedding if model.source_embedding is not None else model.target_embedding
    assert embedding is not None  # every model has one
    return embedding


def with_dropout(spec: Spec, dropout: float | None, attention_dropout: float | None) -> Spec:
    """Return a copy with dropout and attention dropout replaced; None keeps the current value.

    Heads, feed-forward layers and stacks are changed only if they already use dropout.
    """
    instance: Any = spec
    field_values = {f.name: getattr(instance, f.name) for f in fields(instance)}
    changes: dict[str, Any] = {
        name: with_dropout(value, dropout, attention_dropout)
        for name, value in field_values.items()
        if is_dataclass(value)
    }
    new_dropout = attention_dropout if isinstance(spec, Attention) else dropout
    only_if_nonzero = isinstance(spec, Head | FeedForward | TransformerStack)
    has_dropout = "dropout" in field_values and not isinstance(spec, LoraConfig)
    if has_dropout and new_dropout is not None and (field_values["dropout"] or not only_if_nonzero):
        changes["dropout"] = new_dropout
    copy: Spec = replace(instance, **changes)
    return copy
