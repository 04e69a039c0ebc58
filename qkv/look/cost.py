"""What a model costs, from its spec alone: parameters, FLOPs, memory, and the closed formulas of its attentions.

Answers "Problem: Machine Translation" (Transformers and Pretraining), question 3: "For input sequences of length M and
output sequences of length N, what are the complexities of (1) Encoder Self-Attention (2) Decoder-Encoder Attention
(3) Decoder Self-Attention. Further let k be the hidden dimension", and question 4: the same source into a second
language costs the decoder again, since no activation of the encoder depends on it.

Matrix products are counted, at 2 FLOP a multiply-add; what works element by element (softmax, norms, activations,
lookups) is left out, as is the custom. Decoder self-attention is counted whole, as the explicit kernel computes it;
where what the mask hides is skipped, N(N + 1)/2 of its N² scores are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from qkv import spec
from qkv.errors import InputError
from qkv.nn.attention import Attention
from qkv.nn.model import hollow

__all__ = ["AttentionCost", "Cost", "cost"]

_FLOAT = 4  # bytes of a float32
_BACKWARD = 3  # a training step is three forwards: backward takes the gradient of the input and that of the weight
_CLEAR = 64  # a coefficient in a formula above this says less than the plain number
_GATES, _STATES = {"lstm": 4, "gru": 3}, {"lstm": 2, "gru": 1}

Times = Literal["1", "M", "N", "M²", "N²", "M·N"]  # how often: once a pair, a source token, a target token, …


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """One of the notes' three attentions. k is the width of what asks, M and N are the lengths."""

    name: str
    width: int  # k
    formula: str  # FLOPs of scores and mix in one layer, such as 4·M²·k
    layer: int  # the same as a number
    layers: int
    total: int  # and in all layers
    projections: str  # FLOPs of the projections in one layer, such as 8·M·k²; empty where there are none


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a pair of M source and N target tokens costs, a token, and a run."""

    family: str
    source_length: int  # M; 0 for a model without an encoder
    target_length: int  # N; 0 for a model without a decoder
    parameters: dict[str, int]  # part -> count, and "total"; what is tied is counted once, where it comes first
    linear: dict[str, int]  # part -> forward FLOPs of a pair: projections, feed-forward, recurrent cells, head
    attention: dict[str, int]  # the same of scores and mixes
    source_token: dict[str, int]  # what grows with the source: the encoder, and the decoder's keys and values of it
    target_token: dict[str, int]  # all the rest, over the target's tokens
    second_target: int  # forward FLOPs to translate the same source into another language: all but the encoder
    attentions: tuple[AttentionCost, ...]
    memory: dict[
        str, int
    ]  # bytes in float32: weights, gradients, Adam moments; activations (estimate) if batch_tokens is
    cache: dict[
        str, int
    ]  # bytes in float32 that decoding keeps: a source token, a target token, a row (recurrent state)
    batch_tokens: int | None = None
    steps: int | None = None

    @property
    def forward_pair(self) -> int:
        return sum(self.linear.values()) + sum(self.attention.values())

    @property
    def training_pair(self) -> int:
        return _BACKWARD * self.forward_pair

    @property
    def training_token(self) -> float:
        """A token as a batch's budget counts it: a sequence's start or end, which M and N hold, is not one."""
        return self.training_pair / _budgeted(self.source_length, self.target_length)

    @property
    def run(self) -> float | None:
        """A whole training run, if its steps and the tokens of a step are known."""
        if self.steps is None or self.batch_tokens is None:
            return None
        return self.steps * self.batch_tokens * self.training_token


def _budgeted(m: int, n: int) -> int:
    return max(1, max(0, m - 1) + max(0, n - 1))


@dataclass(frozen=True)
class _Piece:
    """One kind of matrix product: in which part, how often, how large."""

    part: str
    kind: Literal["linear", "attention"]
    times: Times
    size: int  # multiply-adds each time, in one layer
    layers: int = 1
    kept: int = 0  # floats that the backward pass wants each time, in one layer

    def flops(self, lengths: dict[Times, int]) -> int:
        return 2 * self.size * self.layers * lengths[self.times]


def cost(
    model: spec.Model,
    *,
    source_length: int,
    target_length: int,
    batch_tokens: int | None = None,
    steps: int | None = None,
) -> Cost:
    """Counts a model that is described, not built. Lengths are in tokens, the start token included.

    `batch_tokens` counts both sides, as `train.batch_tokens` does. Activations are an estimate: the outputs of all
    matrix products, the norms' inputs and outputs, and logits twice, kept once a token in float32; score matrices only
    where no fused kernel does the attention; no dropout masks. Expect the true figure at one to two times it. Buffers
    (sinusoids) are no parameters and are left out.
    """
    m = _checked(source_length, "source", model.source) if model.encoder is not None else 0
    n = _checked(target_length, "target", model.target) if model.decoder is not None else 0
    lengths: dict[Times, int] = {"1": 1, "M": m, "N": n, "M²": m * m, "N²": n * n, "M·N": m * n}
    pieces = list(_pieces(model))
    parameters = _parameters(model)
    weights = parameters["total"] * _FLOAT
    memory = {"weights": weights, "gradients": weights, "Adam moments": 2 * weights}
    if batch_tokens is not None:
        pair = sum(p.kept * p.layers * lengths[p.times] for p in pieces)
        memory["activations (estimate)"] = round(pair * batch_tokens / _budgeted(m, n)) * _FLOAT
    by_source: tuple[Times, ...] = ("M", "M²") if model.decoder is not None else ("M", "M²", "1")
    return Cost(
        family=model.family,
        source_length=m,
        target_length=n,
        parameters=parameters,
        linear=_by_part((p for p in pieces if p.kind == "linear"), lengths),
        attention=_by_part((p for p in pieces if p.kind == "attention"), lengths),
        source_token=_by_part((p for p in pieces if p.times in by_source), lengths, m),
        target_token=_by_part((p for p in pieces if p.times not in by_source), lengths, n),
        second_target=sum(p.flops(lengths) for p in pieces if not p.part.startswith("encoder")),
        attentions=tuple(_closed(place, lengths) for place in _places(model)),
        memory=memory,
        cache=_cache(model),
        batch_tokens=batch_tokens,
        steps=steps,
    )


def _checked(length: int, side: str, embed: spec.Embed | spec.Patches | None) -> int:
    if embed is None or not 1 <= length <= embed.length:
        raise InputError(f"{side}_length: {length} tokens; this model takes 1 to {embed.length if embed else 0}")
    return length


# ---- parameters -----------------------------------------------------------------------------------------------------

_PARTS = {"attention": "self-attention", "cross": "cross-attention", "feedforward": "feed-forward"}
_PARTS |= {"layers": "recurrence", "cells": "recurrence", "norm": "norms"}


def _parameters(model: spec.Model) -> dict[str, int]:
    built = hollow(model)
    counts: dict[str, int] = {}
    seen: set[int] = set()
    for name, module in built.named_modules():
        own = list(module.parameters(recurse=False))
        if own or isinstance(module, Attention):  # a dot product of states has no parameters and is a part all the same
            part = _part(name, model)
            counts[part] = counts.get(part, 0) + sum(p.numel() for p in own if id(p) not in seen)
            seen |= {id(p) for p in own}
    return counts | {"total": sum(counts.values())}


def _part(name: str, model: spec.Model) -> str:
    """`decoder.blocks.0.cross.q` -> decoder cross-attention"""
    side, inner = [*(word for word in name.split(".") if word != "blocks" and not word.isdigit()), ""][:2]
    if side not in ("encoder", "decoder"):
        return "head" if side in ("head", "beside") else f"{side} embedding"
    if side == "decoder" and inner == "attention" and isinstance(model.decoder, spec.RecurrentDecoder):
        inner = "cross"  # a recurrent decoder looks at the encoder only
    return f"{side} norms" if inner.startswith("around_") else f"{side} {_PARTS.get(inner, inner)}"


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where an attention sits: who asks, who is looked at, in how many layers."""

    part: str
    spec: spec.Attention
    asks: Times
    looks: Times
    layers: int = 1


def _places(model: spec.Model) -> list[_Place]:
    """The notes' three attentions, those that the model has."""
    encoder, decoder, found = model.encoder, model.decoder, []
    if isinstance(encoder, spec.Stack):
        found.append(_Place("encoder self-attention", encoder.block.attention, "M", "M", encoder.depth))
    if isinstance(decoder, spec.Stack):
        found.append(_Place("decoder self-attention", decoder.block.attention, "N", "N", decoder.depth))
        if decoder.block.cross is not None:
            found.append(_Place("decoder cross-attention", decoder.block.cross, "N", "M", decoder.depth))
    elif decoder is not None and decoder.attention is not None:
        found.append(_Place("decoder cross-attention", decoder.attention, "N", "M"))
    return found


def _pieces(model: spec.Model) -> Iterator[_Piece]:
    """Every matrix product of a forward pass over one pair."""
    if isinstance(model.source, spec.Patches):
        pixels = model.source.channels * model.source.patch**2
        yield _Piece("source embedding", "linear", "M", pixels * model.source.width, kept=model.source.width)
    for place in _places(model):
        yield from _attention(place)
    if isinstance(model.encoder, spec.Stack):
        yield from _feedforward("encoder", model.encoder, "M")
    elif model.encoder is not None:
        r = model.encoder
        for inputs in [r.width] + [r.output] * (r.layers - 1):
            yield _cell("encoder recurrence", r.cell, "M", inputs, r.hidden, 2 if r.bidirectional else 1)
    if isinstance(model.decoder, spec.Stack):
        yield from _feedforward("decoder", model.decoder, "N")
    elif model.decoder is not None:
        yield from _recurrent_decoder(model.decoder)
    for head in (model.head, model.beside):
        if head is not None:
            yield from _head(head, "N" if model.decoder is not None else "M")


def _attention(place: _Place) -> Iterator[_Piece]:
    """Projections of what asks and of what is looked at; the key's share of the score; scores; the mix of values."""
    part, a, asks, looks, layers = place
    query, key, value = (a.heads * size for size in (a.query_size, a.key_size, a.value_size))
    both: Times = {"MM": "M²", "NN": "N²", "NM": "M·N"}.get(asks + looks, looks)  # type: ignore[assignment]
    if a.project:
        yield _Piece(part, "linear", asks, a.width * (query + value), layers, kept=query + value)
        yield _Piece(part, "linear", looks, a.memory_width * (key + value), layers, kept=key + value)
    hidden = a.score_width or a.key_size  # of the additive and MLP scores
    if a.score in ("dot", "scaled_dot"):
        yield _Piece(part, "attention", both, key, layers)
    elif a.score == "bilinear":
        yield _Piece(part, "attention", looks, key * a.query_size, layers, kept=query)
        yield _Piece(part, "attention", both, query, layers)
    else:
        steps = 1 if a.score == "additive" else 2  # hidden layers, each kept for every query and key
        yield _Piece(part, "attention", looks, key * hidden, layers, kept=a.heads * hidden)
        yield _Piece(part, "attention", asks, query * hidden, layers, kept=a.heads * hidden)
        if a.score == "mlp":
            yield _Piece(part, "attention", both, a.heads * hidden**2, layers)
        yield _Piece(part, "attention", both, a.heads * hidden, layers, kept=a.heads * (hidden * steps + 1))
    yield _Piece(part, "attention", both, value, layers)


def _feedforward(side: str, stack: spec.Stack, own: Times) -> Iterator[_Piece]:
    ff = stack.block.feedforward
    inside = 4 if ff.gated else 1 if ff.activation == "relu" else 2  # a ReLU needs its output alone
    size = (3 if ff.gated else 2) * ff.width * ff.hidden
    yield _Piece(f"{side} feed-forward", "linear", own, size, stack.depth, kept=inside * ff.hidden)
    norms = 2 if stack.block.cross is None else 3
    yield _Piece(f"{side} norms", "linear", own, 0, stack.depth, kept=2 * norms * stack.width)


def _cell(part: str, cell: spec.Cell, times: Times, inputs: int, hidden: int, directions: int = 1) -> _Piece:
    """Each gate is W [x; h]: four of an LSTM (Hochreiter & Schmidhuber 1997), three of a GRU (Cho et al. 2014)."""
    size, kept = _GATES[cell] * (inputs + hidden) * hidden, 2 * _GATES[cell] * hidden
    return _Piece(part, "linear", times, size * directions, kept=inputs + kept * directions)


def _recurrent_decoder(d: spec.RecurrentDecoder) -> Iterator[_Piece]:
    context = 0 if d.attention is None else d.attention.output
    for inputs in [d.width + context] + [d.hidden] * (d.layers - 1):
        yield _cell("decoder recurrence", d.cell, "N", inputs, d.hidden)
    yield _Piece("decoder bridge", "linear", "1", d.memory * d.layers * d.hidden * _STATES[d.cell])
    joined = d.hidden + context + d.width
    if d.readout:
        yield _Piece("decoder readout", "linear", "N", joined * d.hidden, kept=joined + d.hidden)


def _head(head: spec.Head, own: Times) -> Iterator[_Piece]:
    width, times = head.width, own
    if not head.at_each_token:
        times = "1"
        if isinstance(head.pool, spec.Attention):  # one learned query a sequence
            width = head.pool.output
            yield from _attention(_Place("head", head.pool, "1", own))
    read = head.joined * width
    if head.dense is not None:
        yield _Piece("head dense", "linear", times, read * width, kept=2 * width)
        read = width
    if head.kind == "pooler":
        return
    yield _Piece("head", "linear", times, read * head.outputs, kept=2 * head.outputs)  # logits and their softmax


def _by_part(pieces: Iterable[_Piece], lengths: dict[Times, int], tokens: int = 1) -> dict[str, int]:
    found: dict[str, int] = {}
    for p in pieces:
        if p.size:
            found[p.part] = found.get(p.part, 0) + p.flops(lengths) // tokens
    return found


def _closed(place: _Place, lengths: dict[Times, int]) -> AttentionCost:
    pieces, k = list(_attention(place)), place.spec.width
    scores = [p for p in pieces if p.kind == "attention"]
    total = sum(p.flops(lengths) for p in scores)
    return AttentionCost(
        name=place.part,
        width=k,
        formula=_formula(scores, k),
        layer=total // place.layers,
        layers=place.layers,
        total=total,
        projections=_formula([p for p in pieces if p.kind == "linear"], k),
    )


def _formula(pieces: list[_Piece], k: int) -> str:
    """FLOPs of one layer, terms of a kind added up: scores 2·M²·k and mix 2·M²·k give 4·M²·k."""
    terms: dict[tuple[str, str], int] = {}
    for p in pieces:
        factor, symbol = _in_widths(p.size, k)
        terms[p.times, symbol] = terms.get((p.times, symbol), 0) + 2 * factor
    return " + ".join("·".join(filter(None, (str(c), times, symbol))) for (times, symbol), c in terms.items())


def _in_widths(size: int, k: int) -> tuple[int, str]:
    """A number as c·k², c·k, k/c or k²/c, whichever is plainest; a number that is none of these stays one."""
    options = [(size // whole, name) for whole, name in ((k * k, "k²"), (k, "k")) if size % whole == 0]
    options += [(whole // size, f"{name}/") for whole, name in ((k, "k"), (k * k, "k²")) if whole % size == 0]
    c, name = min(options, default=(_CLEAR + 1, ""), key=lambda option: option[0])
    if c > _CLEAR:
        return size, ""
    return (1, f"{name}{c}") if name.endswith("/") else (c, name)


def _cache(model: spec.Model) -> dict[str, int]:
    """Bytes that decoding keeps: prepared keys and values of the source and of what was written; a recurrent state."""
    kept = {"source token": 0, "target token": 0, "row": 0}
    if isinstance(d := model.decoder, spec.RecurrentDecoder):
        kept["row"] = d.layers * d.hidden * _STATES[d.cell] * _FLOAT
    for _, a, asks, looks, layers in _places(model):
        hidden = a.score_width or a.key_size
        prepared = {"bilinear": a.query_size, "additive": hidden, "mlp": hidden}.get(a.score, a.key_size)
        if asks == "N":
            side = "source token" if looks == "M" else "target token"
            kept[side] += layers * a.heads * (prepared + a.value_size) * _FLOAT
    return kept
