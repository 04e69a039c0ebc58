"""Model specifications: frozen dataclasses that describe a model completely. Imports no torch.

`qkv.nn.build(spec)` makes the module. A variant of a model is a field here, not a class, so that score function, mask,
position scheme and placement of the norm can be combined freely.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from dataclasses import replace as replace  # families derive their specs with it
from typing import Any, Literal, TypeVar

from qkv.errors import InputError, did_you_mean, quote
from qkv.spec.attention import Activation as Activation
from qkv.spec.attention import Attention as Attention
from qkv.spec.attention import Block as Block
from qkv.spec.attention import FeedForward as FeedForward
from qkv.spec.attention import Norm as Norm
from qkv.spec.attention import RelativePositionBias as RelativePositionBias
from qkv.spec.attention import RelativePositions as RelativePositions
from qkv.spec.attention import ScoreName as ScoreName
from qkv.spec.bilm import BiLM as BiLM

Cell = Literal["lstm", "gru"]
FeatureLayers = Literal["last", "concat_last_4", "scalar_mix"]
HeadKind = Literal["lm", "sequence", "token", "span", "choice", "next_sentence", "pooler"]
Modality = Literal["text", "image"]  # kinds of input


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Clusters of a vocabulary that is sorted by frequency: rarer words have narrower vectors (Baevski & Auli 2019)."""

    cutoffs: tuple[int, ...]  # first word of each cluster but the first one
    embed_dim: int  # width of the vectors of the first cluster
    divisor: int = 1  # factor by which the vectors of a cluster are narrower than those of the one before

    @property
    def starts(self) -> tuple[int, ...]:
        """First word of each cluster."""
        return 0, *self.cutoffs

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of the vectors of each cluster."""
        return tuple(self.embed_dim // self.divisor**cluster for cluster in range(len(self.starts)))

    def sizes(self, vocab_size: int) -> tuple[int, ...]:
        """Return the number of words of each cluster."""
        ends = *self.cutoffs, vocab_size
        return tuple(end - start for start, end in zip(self.starts, ends, strict=True))


@dataclass(frozen=True, kw_only=True)
class TransformerStack:
    """A stack of `num_layers` equal blocks."""

    block: Block  # configuration of each block
    num_layers: int  # number of blocks
    causal: bool = False  # each position attends to itself and preceding ones only
    final_norm: bool = False  # normalize the output of the last block
    dropout: float = 0.0  # dropout after the final norm
    relative_position_bias: RelativePositionBias | None = None  # position scheme of T5; None: none
    memory_length: int = 0  # preceding tokens of a text whose hidden states each layer attends to as well; 0: no memory
    reuse_length: int | None = None  # tokens of a segment, from its start, that enter the memory; None: all
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
class BagOfWords:
    """Encoder without layers: the hidden state of a token is its embedding, whatever stands around it."""

    d_model: int  # width of the embeddings that it reads
    dropout: float = 0.0  # dropout on the hidden states

    @property
    def output_dim(self) -> int:
        return self.d_model

    @property
    def layers(self) -> int:
        return 0


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
class RecurrentStack:
    """Decoder-only recurrent network, whose state is its memory (Mikolov et al. 2010; Merity et al. 2018)."""

    d_model: int  # width of the embeddings that it reads
    hidden_size: int  # state size of all layers but the last
    output_size: int | None = None  # state size of the last layer; None: hidden_size
    cell: Cell = "lstm"  # kind of recurrent cell
    layers: int = 1  # number of layers
    dropout: float = 0.0  # dropout between layers
    input_dropout: float = 0.0  # dropout on the input of the first layer
    output_dropout: float = 0.0  # dropout on the output of the last layer
    locked_dropout: bool = False  # one dropout mask for all tokens of a sequence (Gal & Ghahramani 2016)
    weight_dropout: float = 0.0  # DropConnect on the hidden-to-hidden matrices (Wan et al. 2013)

    @property
    def output_dim(self) -> int:
        return self.output_size or self.hidden_size

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        """State size of each layer."""
        return (self.hidden_size,) * (self.layers - 1) + (self.output_dim,)


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
    query_vector: bool = False  # learned vector in place of tokens that are predicted (the query stream of XLNet)
    norm: Norm | None = None  # normalization of the sum
    dropout: float = 0.0  # dropout on the output
    word_dropout: float = 0.0  # dropout of whole tokens, the same in all sequences of a batch (Gal & Ghahramani 2016)
    clusters: Clusters | None = None  # narrower vectors of rarer tokens (adaptive embedding); None: all of one width

    @property
    def is_adaptive(self) -> bool:
        """Whether rarer tokens have narrower vectors."""
        return self.clusters is not None

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
    clusters: Clusters | None = None  # outputs in clusters (adaptive softmax, Grave et al. 2017); None: one softmax
    tie_projections: tuple[bool, ...] = ()  # whether each cluster uses the projection of the embedding
    # one vector per sequence: attention with a learned query, the last token, the mean of all, or the last token, the
    # maximum and the mean concatenated (Howard & Ruder 2018); `final`: the state in which each direction of a
    # bidirectional recurrent encoder ends; None: the first token
    pool: Attention | Literal["last", "mean", "concat", "final"] | None = None
    dense_activation: Activation | None = None  # activation of a dense layer before the linear one; None: no such layer
    dense_size: int | None = None  # width of the dense layer; None: d_model
    norm: Norm | None = None  # normalization after the dense layer
    input_scale: float = 1.0  # factor on the input of the linear layer
    final_logits_bias: bool = False  # add a constant vector, which is no parameter, to the logits
    dropout: float = 0.0  # dropout before the linear layer
    # span heads only: number of the best starts for each of which ends are scored, and whether there is an answer (Yang
    # et al. 2019); 0: starts and ends are scored independently
    start_beams: int = 0
    dropout_before_dense: bool = False  # dropout before the dense layer as well (RoBERTa, BART, T5)
    batch_norm: bool = False  # batch normalization of the inputs of the dense and of the linear layer (ULMFiT)
    labels: tuple[str, ...] = ()  # names of the outputs
    # The next two determine how logits are interpreted; they change none of them.
    multi_label: bool = False  # any number of labels per example, each with a sigmoid
    subword_pooling: Literal["first", "mean"] = "first"  # the logits of a word of several tokens

    @property
    def softmax(self) -> Literal["plain", "adaptive"] | None:
        """How a language model head normalizes; None: it is another head."""
        if self.kind != "lm":
            return None
        return "plain" if self.clusters is None else "adaptive"

    @property
    def pooled_dim(self) -> int:
        """Width of the vectors that the first layer of the head reads."""
        if isinstance(self.pool, Attention):
            return self.num_concat_layers * self.pool.output_dim
        num_vectors = 3 if self.pool == "concat" and not self.is_token_level else 1
        return num_vectors * self.num_concat_layers * self.d_model

    @property
    def dense_dim(self) -> int:
        """Width of the dense layer, if the head has one."""
        return self.dense_size or (self.pool.output_dim if isinstance(self.pool, Attention) else self.d_model)

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
    encoder: TransformerStack | RecurrentEncoder | BagOfWords | BiLM | None = None  # None: a decoder-only model
    decoder: TransformerStack | RecurrentDecoder | RecurrentStack | None = None  # None: an encoder-only model
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

    @property
    def has_memory(self) -> bool:
        """Whether the model carries memory from one segment of a text to the next (`qkv.nn.memory`)."""
        stack = self.encoder if self.decoder is None else self.decoder
        if isinstance(stack, TransformerStack):
            return stack.memory_length > 0
        return isinstance(stack, RecurrentStack | BiLM)

    @property
    def has_token_types(self) -> bool:
        """Whether the model distinguishes segments of a text (A and B), as BERT and XLNet do."""
        if self.decoder is not None or not isinstance(self.source_embedding, Embedding):
            return False
        stack = self.encoder
        positions = stack.block.self_attention.relative_positions if isinstance(stack, TransformerStack) else None
        return self.source_embedding.num_segments > 0 or (positions is not None and positions.segments)


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
    only_if_nonzero = isinstance(spec, Head | FeedForward | TransformerStack | RecurrentStack)
    has_dropout = "dropout" in field_values and not isinstance(spec, LoraConfig)
    if has_dropout and new_dropout is not None and (field_values["dropout"] or not only_if_nonzero):
        changes["dropout"] = new_dropout
    copy: Spec = replace(instance, **changes)
    return copy
