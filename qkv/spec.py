"""What a model is, as data: frozen dataclasses, JSON in and out. Imports no torch.

`qkv.nn.build(spec)` makes the module. A variant is a field here, never a class of its own, so that
score x mask x position x norm placement stays a product that nobody has to enumerate.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from qkv.errors import InputError, did_you_mean

__all__ = ["LoraConfig", "Attention", "Block", "Embedding", "FeedForward", "Head", "Model", "Norm", "PatchEmbedding", "RecurrentEncoder"]
__all__ += ["FeatureLayers", "RecurrentDecoder", "RelativePositionBias", "TransformerStack", "select_head", "from_json", "classification_head", "replace", "to_json"]

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]
Cell = Literal["lstm", "gru"]
FeatureLayers = Literal["last", "concat_last_4", "scalar_mix"]
ScoreName = Literal["scaled_dot", "dot", "bilinear", "additive", "mlp"]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Who asks, what is looked at, and how the two are compared (Vaswani et al. 2017; Bahdanau et al. 2015)."""

    query_dim: int  # of what asks
    kv_dim: int | None = None  # width of what is looked at; None: the same
    heads: int = 1
    head_dim: int | None = None  # size of one head's query and key; None: width / heads
    v_head_dim: int | None = None  # size of one head's value; None: as the key
    score_fn: ScoreName = "scaled_dot"
    score_hidden_dim: int | None = None  # hidden width of the additive and MLP scores; None: as the key
    use_projections: bool = True  # False: states serve as query, key and value as they are, the RNN's way
    score_scale: float = 1.0  # times what the score itself scales by
    bias: bool = True
    output_bias: bool | None = None  # of the output's projection; None: as `bias`
    dropout: float = 0.0

    @property
    def effective_kv_dim(self) -> int:
        return self.query_dim if self.kv_dim is None else self.kv_dim

    @property
    def q_head_dim(self) -> int:
        """One head's query: the key's size where there is a projection to make it so."""
        return (self.head_dim or self.query_dim // self.heads) if self.use_projections else self.query_dim // self.heads

    @property
    def k_head_dim(self) -> int:
        return self.q_head_dim if self.use_projections else self.effective_kv_dim // self.heads

    @property
    def effective_v_head_dim(self) -> int:
        return (self.v_head_dim or self.k_head_dim) if self.use_projections else self.effective_kv_dim // self.heads

    @property
    def output_dim(self) -> int:
        """Width of the answer: back to the asker's width by W_o, or the joined contexts as they are."""
        return self.query_dim if self.use_projections else self.heads * self.effective_v_head_dim


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """Position-wise: activation(x W1 + b1) W2 + b2, or the gated form (Shazeer 2020)."""

    d_model: int
    d_ff: int
    activation: Activation = "relu"
    gated: bool = False
    bias: bool = True
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Norm:
    kind: Literal["layer", "rms"] = "layer"
    eps: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class Block:
    """Self-attention, cross-attention where `cross_attention` is given, feed-forward; each with residual and norm."""

    self_attention: Attention
    feedforward: FeedForward
    cross_attention: Attention | None = None
    norm: Norm = Norm()
    norm_first: bool = False  # pre-norm (Xiong et al. 2020); False is the paper's post-norm
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RelativePositionBias:
    """A learned number a head for each distance, added to the scores; far distances share buckets (Raffel et al. 2020).

    One table serves all layers of a stack. In a causal stack all buckets look back.
    """

    num_buckets: int = 32
    max_distance: int = 128  # from which on all share the last bucket


@dataclass(frozen=True, kw_only=True)
class TransformerStack:
    """`num_layers` blocks of one shape."""

    block: Block
    num_layers: int
    causal: bool = False
    final_norm: bool = False
    dropout: float = 0.0  # behind the final norm
    relative_position_bias: RelativePositionBias | None = None
    scale_attn_by_inverse_layer_idx: bool = False  # the n-th layer's scores are divided by n (an option of GPT-2's)
    # fresh matrices that write into the residual stream are smaller by the root of how many there are (Radford et al.
    # 2019). It says how training begins, not what is computed: models that differ in it alone are the same model
    scaled_residual_init: bool = field(default=False, compare=False)

    @property
    def d_model(self) -> int:
        return self.block.self_attention.query_dim


@dataclass(frozen=True, kw_only=True)
class RecurrentEncoder:
    """A recurrent encoder (Hochreiter & Schmidhuber 1997; Cho et al. 2014)."""

    d_model: int
    hidden_size: int
    cell: Cell = "lstm"
    layers: int = 1
    bidirectional: bool = True
    dropout: float = 0.0

    @property
    def output_dim(self) -> int:
        return self.hidden_size * (2 if self.bidirectional else 1)


@dataclass(frozen=True, kw_only=True)
class RecurrentDecoder:
    """A recurrent decoder that attends at each step, or, with no attention, starts from the encoder's last state."""

    d_model: int  # of the target embedding
    encoder_dim: int  # width of the encoder's output
    hidden_size: int
    cell: Cell = "lstm"
    layers: int = 1
    attention: Attention | None = None
    readout: bool = True  # predict from tanh(W [s; c; y]); False: from the state s alone, as on the slides
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Tokens to vectors, with positions."""

    vocab_size: int
    d_model: int
    max_length: int = 512  # the longest sequence that is taken
    position: Literal["sinusoid", "sinusoid_concat", "learned", "none"] = "sinusoid"  # sinusoid_concat: all sines, then all cosines
    position_offset: int = 0  # rows of the learned table that stand before the first position's
    padding_idx: int | None = None  # a token whose vector is not trained by being looked up, as Hugging Face has it
    num_segments: int = 0  # kinds of segment, each with a vector that is added (Devlin et al. 2019); 0: none
    scale_by_sqrt_dim: bool = False  # multiply by sqrt(width) before positions are added, as Vaswani et al. do
    norm: Norm | None = None
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PatchEmbedding:
    """A square image to vectors: one a patch, behind one that stands for the whole image (Dosovitskiy et al. 2021)."""

    image_size: int  # pixels a side
    patch_size: int
    num_channels: int
    d_model: int
    dropout: float = 0.0

    @property
    def max_length(self) -> int:
        return (self.image_size // self.patch_size) ** 2 + 1


HeadKind = Literal["lm", "sequence", "token", "span", "choice", "next_sentence", "pooler"]


@dataclass(frozen=True, kw_only=True)
class Head:
    """Hidden to logits: [dense, activation, norm,] linear.

    At each token: `lm` over a vocabulary, `token` over labels, `span` for an answer's begin and end. Once a sequence,
    from what `pool` gives: `sequence` over labels, `choice` one score, `next_sentence` two; `pooler` is the dense
    layer's output itself.
    """

    kind: HeadKind
    d_model: int
    num_outputs: int
    num_concat_layers: int = 1  # layers of the body whose vectors, each of this width, lie side by side in what comes in
    bias: bool = False
    tie_embeddings: bool = False  # the weight is the embedding's: the target's where there is one (Press & Wolf 2017)
    pool: Attention | Literal["last"] | None = None  # attention with a learned query, the last token; None: the first
    dense_activation: Activation | None = None  # one more layer of the same width before the last
    norm: Norm | None = None  # behind that layer
    input_scale: float = 1.0  # of what comes in
    final_logits_bias: bool = False  # a fixed vector is added to the logits; no parameter
    dropout: float = 0.0
    dropout_before_dense: bool = False  # before the dense layer as well (RoBERTa's, BART's and T5's classifiers)
    labels: tuple[str, ...] = ()  # the outputs' names
    # how its logits are read, which changes none of them
    multi_label: bool = False  # each output for itself: any number of labels at once, by sigmoids
    subword_pooling: Literal["first", "mean"] = "first"  # where words are judged that have several tokens

    @property
    def is_token_level(self) -> bool:
        return self.kind in ("lm", "token", "span")


def classification_head(kind: HeadKind, d_model: int, labels: tuple[str, ...], **overrides: Any) -> Head:
    """A head that is no language model's, with as many outputs as its kind has."""
    num_outputs = {"span": 2, "choice": 1, "next_sentence": 2, "pooler": d_model}.get(kind, len(labels))
    label_names = labels if kind in ("sequence", "token") else ()
    return Head(kind=kind, d_model=d_model, num_outputs=num_outputs, labels=label_names, **({"bias": True} | overrides))


def select_head(heads: dict[str, Head], name: str) -> Head | None:
    """A family's head by its name; `backbone` is none."""
    if name == "backbone":
        return None
    if name not in heads:
        raise InputError(f"head: this family has no '{name}'; {did_you_mean(name, ['backbone', *heads])}")
    return heads[name]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank matrices beside some that stay as they are: W x + scale / rank * B A x (Hu et al. 2022)."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0  # of what A reads
    target_modules: tuple[str, ...] = ("q", "v")  # in every block: q, k, v, o of its attentions; up, gate, down


@dataclass(frozen=True, kw_only=True)
class Model:
    """A whole model: an encoder, a decoder, or both, with a head."""

    family: str
    encoder: TransformerStack | RecurrentEncoder | None = None
    decoder: TransformerStack | RecurrentDecoder | None = None
    source_embedding: Embedding | PatchEmbedding | None = None
    target_embedding: Embedding | None = None
    head: Head | None = None
    aux_head: Head | None = None  # a second head over the same hidden states, such as BERT's next-sentence head
    share_embeddings: bool = False  # source and target have one embedding table
    bos_id: int = 2  # the token that a target begins with, and the one that ends it; -1: a decoder alone may have none
    eos_id: int = 3
    pad_id: int | None = None  # what Hugging Face fills a batch up with; kept for it, nothing here does
    suppress_tokens: tuple[int, ...] = ()  # tokens that are not written
    init_std: float | None = None  # standard deviation that fresh matrices start with; None: Glorot's
    # what the head reads of the body's layers: the last, the last four side by side (Devlin et al. 2019, 5.3), or a
    # learned weighted mean of all (Peters et al. 2018)
    feature_layers: FeatureLayers = "last"
    lora: LoraConfig | None = None


_SPEC_CLASSES: tuple[type, ...] = (LoraConfig, Attention, Block, Embedding, FeedForward, Head, Model, Norm, PatchEmbedding)
_SPEC_CLASSES += (RecurrentEncoder, RecurrentDecoder, RelativePositionBias, TransformerStack)
_CLASS_BY_NAME: dict[str, type] = {cls.__name__: cls for cls in _SPEC_CLASSES}


def input_embedding(model: Model) -> Embedding | PatchEmbedding:
    """What makes vectors of a model's input: of a model without an encoder, of what it has written."""
    embedding = model.source_embedding if model.source_embedding is not None else model.target_embedding
    assert embedding is not None  # every shell has one
    return embedding


def with_dropout(spec: Any, dropout: float | None, attention_dropout: float | None) -> Any:
    """The same with other dropout, of what layers give and of attention's weights; None leaves it as it is.

    Where only some models drop, in a head, in a feed-forward layer, behind a whole stack, those that do follow.
    """
    field_values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    changes = {name: with_dropout(value, dropout, attention_dropout) for name, value in field_values.items() if is_dataclass(value)}
    new_dropout = attention_dropout if isinstance(spec, Attention) else dropout
    only_if_nonzero = isinstance(spec, Head | FeedForward | TransformerStack)
    if "dropout" in field_values and new_dropout is not None and not isinstance(spec, LoraConfig) and (spec.dropout or not only_if_nonzero):
        changes["dropout"] = new_dropout
    return replace(spec, **changes)


def _to_dict(value: Any) -> Any:
    if not is_dataclass(value):
        return value
    return {"type": type(value).__name__} | {f.name: _to_dict(getattr(value, f.name)) for f in fields(value)}


def to_json(model: Model) -> str:
    """The spec as JSON; each part names its type, so that unions read back without guessing."""
    return json.dumps(_to_dict(model), indent=2) + "\n"


def from_json(text: str, location: str = "spec") -> Model:
    """The inverse of `to_json`; anything that is not a model is refused with the place named."""
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{location}: not JSON (line {error.lineno}): {error.msg}; is this a model folder?") from None
    model = _from_dict(raw, location)
    if not isinstance(model, Model):
        raise InputError(f"{location}: holds a {type(model).__name__}, not a Model")
    return model


def _from_dict(raw: Any, location: str) -> Any:
    if isinstance(raw, list):
        return tuple(_from_dict(item, location) for item in raw)
    if not isinstance(raw, dict):
        return raw
    name = raw.get("type")
    if name not in _CLASS_BY_NAME:
        raise InputError(f"{location}: unknown type '{name}'; {did_you_mean(str(name), _CLASS_BY_NAME)}")
    cls, hints = _CLASS_BY_NAME[name], typing.get_type_hints(_CLASS_BY_NAME[name])
    values = {}
    for key, value in raw.items():
        if key == "type":
            continue
        if key not in hints:
            raise InputError(f"{location}: {name} has no field '{key}'; {did_you_mean(key, hints)}")
        values[key] = _from_dict(value, f"{location}: {key}")
        if not _matches_type(values[key], hints[key]):
            raise InputError(f"{location}: {name}.{key} cannot be {value!r}")
    try:
        return cls(**values)
    except TypeError as error:
        raise InputError(f"{location}: {name}: {error}") from None


def _matches_type(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_matches_type(value, option) for option in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_matches_type(item, typing.get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
