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

from qkv.errors import InputError, nearest

__all__ = ["Adapters", "Attention", "Block", "Embed", "FeedForward", "Head", "Model", "Norm", "Patches", "Recurrent"]
__all__ += ["Read", "RecurrentDecoder", "Relative", "Stack", "chosen", "from_json", "label_head", "replace", "to_json"]

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]
Cell = Literal["lstm", "gru"]
Read = Literal["last", "last_four", "mix"]
ScoreName = Literal["scaled_dot", "dot", "bilinear", "additive", "mlp"]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Who asks, what is looked at, and how the two are compared (Vaswani et al. 2017; Bahdanau et al. 2015)."""

    width: int  # of what asks
    memory: int | None = None  # width of what is looked at; None: the same
    heads: int = 1
    key: int | None = None  # size of one head's query and key; None: width / heads
    value: int | None = None  # size of one head's value; None: as the key
    score: ScoreName = "scaled_dot"
    score_width: int | None = None  # hidden width of the additive and MLP scores; None: as the key
    project: bool = True  # False: states serve as query, key and value as they are, the RNN's way
    scale: float = 1.0  # times what the score itself scales by
    bias: bool = True
    output_bias: bool | None = None  # of the output's projection; None: as `bias`
    dropout: float = 0.0

    @property
    def memory_width(self) -> int:
        return self.width if self.memory is None else self.memory

    @property
    def query_size(self) -> int:
        """One head's query: the key's size where there is a projection to make it so."""
        return (self.key or self.width // self.heads) if self.project else self.width // self.heads

    @property
    def key_size(self) -> int:
        return self.query_size if self.project else self.memory_width // self.heads

    @property
    def value_size(self) -> int:
        return (self.value or self.key_size) if self.project else self.memory_width // self.heads

    @property
    def output(self) -> int:
        """Width of the answer: back to the asker's width by W_o, or the joined contexts as they are."""
        return self.width if self.project else self.heads * self.value_size


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """Position-wise: activation(x W1 + b1) W2 + b2, or the gated form (Shazeer 2020)."""

    width: int
    hidden: int
    activation: Activation = "relu"
    gated: bool = False
    bias: bool = True
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Norm:
    kind: Literal["layer", "rms"] = "layer"
    epsilon: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class Block:
    """Self-attention, cross-attention where `cross` is given, feed-forward; each with residual and norm."""

    attention: Attention
    feedforward: FeedForward
    cross: Attention | None = None
    norm: Norm = Norm()
    norm_first: bool = False  # pre-norm (Xiong et al. 2020); False is the paper's post-norm
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A learned number a head for each distance, added to the scores; far distances share buckets (Raffel et al. 2020).

    One table serves all layers of a stack. In a causal stack all buckets look back.
    """

    buckets: int = 32
    distance: int = 128  # from which on all share the last bucket


@dataclass(frozen=True, kw_only=True)
class Stack:
    """`depth` blocks of one shape."""

    block: Block
    depth: int
    causal: bool = False
    final_norm: bool = False
    dropout: float = 0.0  # behind the final norm
    relative: Relative | None = None
    scale_by_depth: bool = False  # the n-th layer's scores are divided by n (an option of GPT-2's)
    # fresh matrices that write into the residual stream are smaller by the root of how many there are (Radford et al.
    # 2019). It says how training begins, not what is computed: models that differ in it alone are the same model
    scaled_start: bool = field(default=False, compare=False)

    @property
    def width(self) -> int:
        return self.block.attention.width


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """A recurrent encoder (Hochreiter & Schmidhuber 1997; Cho et al. 2014)."""

    width: int
    hidden: int
    cell: Cell = "lstm"
    layers: int = 1
    bidirectional: bool = True
    dropout: float = 0.0

    @property
    def output(self) -> int:
        return self.hidden * (2 if self.bidirectional else 1)


@dataclass(frozen=True, kw_only=True)
class RecurrentDecoder:
    """A recurrent decoder that attends at each step, or, with no attention, starts from the encoder's last state."""

    width: int  # of the target embedding
    memory: int  # width of the encoder's output
    hidden: int
    cell: Cell = "lstm"
    layers: int = 1
    attention: Attention | None = None
    readout: bool = True  # predict from tanh(W [s; c; y]); False: from the state s alone, as on the slides
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Embed:
    """Tokens to vectors, with positions."""

    vocabulary: int
    width: int
    length: int = 512  # the longest sequence that is taken
    position: Literal["sinusoid", "halves", "learned", "none"] = "sinusoid"  # halves: all sines, then all cosines
    offset: int = 0  # rows of the learned table that stand before the first position's
    padding: int | None = None  # a token whose vector is not trained by being looked up, as Hugging Face has it
    segments: int = 0  # kinds of segment, each with a vector that is added (Devlin et al. 2019); 0: none
    scale: bool = False  # multiply by sqrt(width) before positions are added, as Vaswani et al. do
    norm: Norm | None = None
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Patches:
    """A square image to vectors: one a patch, behind one that stands for the whole image (Dosovitskiy et al. 2021)."""

    image: int  # pixels a side
    patch: int
    channels: int
    width: int
    dropout: float = 0.0

    @property
    def length(self) -> int:
        return (self.image // self.patch) ** 2 + 1


HeadKind = Literal["lm", "sequence", "token", "span", "choice", "next_sentence", "pooler"]


@dataclass(frozen=True, kw_only=True)
class Head:
    """Hidden to logits: [dense, activation, norm,] linear.

    At each token: `lm` over a vocabulary, `token` over labels, `span` for an answer's begin and end. Once a sequence,
    from what `pool` gives: `sequence` over labels, `choice` one score, `next_sentence` two; `pooler` is the dense
    layer's output itself.
    """

    kind: HeadKind
    width: int
    outputs: int
    joined: int = 1  # layers of the body whose vectors, each of this width, lie side by side in what comes in
    bias: bool = False
    tied: bool = False  # the weight is the embedding's: the target's where there is one (Press & Wolf 2017)
    pool: Attention | Literal["last"] | None = None  # attention with a learned query, the last token; None: the first
    dense: Activation | None = None  # one more layer of the same width before the last
    norm: Norm | None = None  # behind that layer
    scale: float = 1.0  # of what comes in
    offset: bool = False  # a fixed vector is added to the logits; no parameter
    dropout: float = 0.0
    dropout_first: bool = False  # before the dense layer as well (RoBERTa's, BART's and T5's classifiers)
    labels: tuple[str, ...] = ()  # the outputs' names
    # how its logits are read, which changes none of them
    several: bool = False  # each output for itself: any number of labels at once, by sigmoids
    word: Literal["first", "mean"] = "first"  # where words are judged that have several tokens

    @property
    def at_each_token(self) -> bool:
        return self.kind in ("lm", "token", "span")


def label_head(kind: HeadKind, width: int, labels: tuple[str, ...], **fields: Any) -> Head:
    """A head that is no language model's, with as many outputs as its kind has."""
    outputs = {"span": 2, "choice": 1, "next_sentence": 2, "pooler": width}.get(kind, len(labels))
    named = labels if kind in ("sequence", "token") else ()
    return Head(kind=kind, width=width, outputs=outputs, labels=named, **({"bias": True} | fields))


def chosen(heads: dict[str, Head], name: str) -> Head | None:
    """A family's head by its name; `body` is none."""
    if name == "body":
        return None
    if name not in heads:
        raise InputError(f"head: this family has no '{name}'; {nearest(name, ['body', *heads])}")
    return heads[name]


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank matrices beside some that stay as they are: W x + scale / rank * B A x (Hu et al. 2022)."""

    rank: int = 8
    scale: float = 16.0
    dropout: float = 0.0  # of what A reads
    matrices: tuple[str, ...] = ("q", "v")  # in every block: q, k, v, o of its attentions; up, gate, down


@dataclass(frozen=True, kw_only=True)
class Model:
    """A whole model: an encoder, a decoder, or both, with a head."""

    family: str
    encoder: Stack | Recurrent | None = None
    decoder: Stack | RecurrentDecoder | None = None
    source: Embed | Patches | None = None
    target: Embed | None = None
    head: Head | None = None
    beside: Head | None = None  # a second head over the same hidden states, such as BERT's next-sentence head
    shared: bool = False  # source and target have one embedding table
    start: int = 2  # the token that a target begins with, and the one that ends it; -1: a decoder alone may have none
    end: int = 3
    pad: int | None = None  # what Hugging Face fills a batch up with; kept for it, nothing here does
    never: tuple[int, ...] = ()  # tokens that are not written
    spread: float | None = None  # standard deviation that fresh matrices start with; None: Glorot's
    # what the head reads of the body's layers: the last, the last four side by side (Devlin et al. 2019, 5.3), or a
    # learned weighted mean of all (Peters et al. 2018)
    read: Read = "last"
    adapters: Adapters | None = None


_PARTS: tuple[type, ...] = (Adapters, Attention, Block, Embed, FeedForward, Head, Model, Norm, Patches)
_PARTS += (Recurrent, RecurrentDecoder, Relative, Stack)
_TYPES: dict[str, type] = {part.__name__: part for part in _PARTS}


def entrance(model: Model) -> Embed | Patches:
    """What makes vectors of a model's input: of a model without an encoder, of what it has written."""
    found = model.source if model.source is not None else model.target
    assert found is not None  # every shell has one
    return found


def dropping(part: Any, share: float | None, of_attention: float | None) -> Any:
    """The same with other dropout, of what layers give and of attention's weights; None leaves it as it is.

    Where only some models drop, in a head, in a feed-forward layer, behind a whole stack, those that do follow.
    """
    inside = {f.name: getattr(part, f.name) for f in fields(part)}
    changed = {name: dropping(own, share, of_attention) for name, own in inside.items() if is_dataclass(own)}
    given = of_attention if isinstance(part, Attention) else share
    some = isinstance(part, Head | FeedForward | Stack)
    if "dropout" in inside and given is not None and not isinstance(part, Adapters) and (part.dropout or not some):
        changed["dropout"] = given
    return replace(part, **changed)


def _plain(value: Any) -> Any:
    if not is_dataclass(value):
        return value
    return {"type": type(value).__name__} | {f.name: _plain(getattr(value, f.name)) for f in fields(value)}


def to_json(model: Model) -> str:
    """The spec as JSON; each part names its type, so that unions read back without guessing."""
    return json.dumps(_plain(model), indent=2) + "\n"


def from_json(text: str, where: str = "spec") -> Model:
    """The inverse of `to_json`; anything that is not a model is refused with the place named."""
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON (line {error.lineno}): {error.msg}; is this a model folder?") from None
    model = _part(raw, where)
    if not isinstance(model, Model):
        raise InputError(f"{where}: holds a {type(model).__name__}, not a Model")
    return model


def _part(raw: Any, where: str) -> Any:
    if isinstance(raw, list):
        return tuple(_part(item, where) for item in raw)
    if not isinstance(raw, dict):
        return raw
    name = raw.get("type")
    if name not in _TYPES:
        raise InputError(f"{where}: unknown type '{name}'; {nearest(str(name), _TYPES)}")
    kind, hints = _TYPES[name], typing.get_type_hints(_TYPES[name])
    values = {}
    for key, value in raw.items():
        if key == "type":
            continue
        if key not in hints:
            raise InputError(f"{where}: {name} has no field '{key}'; {nearest(key, hints)}")
        values[key] = _part(value, f"{where}: {key}")
        if not _fits(values[key], hints[key]):
            raise InputError(f"{where}: {name}.{key} cannot be {value!r}")
    try:
        return kind(**values)
    except TypeError as error:
        raise InputError(f"{where}: {name}: {error}") from None


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
