"""What a model is, as data: frozen dataclasses, JSON in and out. Imports no torch.

`qkv.nn.build(spec)` makes the module. A variant is a field here, never a class of its own, so that
score x mask x position x norm placement stays a product that nobody has to enumerate.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from qkv.errors import InputError, nearest

__all__ = ["Attention", "Block", "Embed", "FeedForward", "Head", "Model", "Norm", "Recurrent", "RecurrentDecoder"]
__all__ += ["Stack", "from_json", "replace", "to_json"]

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Cell = Literal["lstm", "gru"]
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
    bias: bool = True
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
class Stack:
    """`depth` blocks of one shape."""

    block: Block
    depth: int
    causal: bool = False
    final_norm: bool = False

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
    position: Literal["sinusoid", "learned", "none"] = "sinusoid"
    scale: bool = False  # multiply by sqrt(width) before positions are added, as Vaswani et al. do
    norm: Norm | None = None
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Head:
    """Hidden to logits. `lm`: over a vocabulary, at each token. `sequence`: over labels, once a sequence."""

    kind: Literal["lm", "sequence"]
    width: int
    outputs: int
    bias: bool = False
    tied: bool = False  # the weight is the target embedding's (Press & Wolf 2017)
    pool: Attention | None = None  # `sequence`: attention with a learned query; None: the first token


@dataclass(frozen=True, kw_only=True)
class Model:
    """A whole model: an encoder, a decoder, or both, with a head."""

    family: str
    encoder: Stack | Recurrent | None = None
    decoder: Stack | RecurrentDecoder | None = None
    source: Embed | None = None
    target: Embed | None = None
    head: Head | None = None
    shared: bool = False  # source and target have one embedding table
    start: int = 2  # the token that a target begins with, and the one that ends it
    end: int = 3


_TYPES: dict[str, type] = {
    c.__name__: c for c in (Attention, Block, Embed, FeedForward, Head, Model, Norm, Recurrent, RecurrentDecoder, Stack)
}


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
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
