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
from qkv.nn.model import build_on_meta

__all__ = ["AttentionCost", "Cost", "cost"]

_FLOAT_BYTES = 4  # bytes of a float32
_TRAINING_FACTOR = 3  # a training step is three forwards: backward takes the gradient of the input and that of the weight
_MAX_COEFFICIENT = 64  # a coefficient in a formula above this says less than the plain number
_NUM_GATES, _NUM_STATES = {"lstm": 4, "gru": 3}, {"lstm": 2, "gru": 1}

LengthTerm = Literal["1", "M", "N", "M²", "N²", "M·N"]  # how often: once a pair, a source token, a target token, …


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """One of the notes' three attentions. k is the width of what asks, M and N are the lengths."""

    name: str
    query_dim: int  # k
    formula: str  # FLOPs of scores and mix in one layer, such as 4·M²·k
    flops_per_layer: int  # the same as a number
    num_layers: int
    total_flops: int  # and in all layers
    projection_formula: str  # FLOPs of the projections in one layer, such as 8·M·k²; empty where there are none


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a pair of M source and N target tokens costs, a token, and a run."""

    family: str
    source_length: int  # M; 0 for a model without an encoder
    target_length: int  # N; 0 for a model without a decoder
    parameters: dict[str, int]  # part -> count, and "total"; what is tied is counted once, where it comes first
    linear_flops: dict[str, int]  # part -> forward FLOPs of a pair: projections, feed-forward, recurrent cells, head
    attention_flops: dict[str, int]  # the same of scores and mixes
    flops_per_source_token: dict[str, int]  # what grows with the source: the encoder, and the decoder's keys and values of it
    flops_per_target_token: dict[str, int]  # all the rest, over the target's tokens
    second_target_flops: int  # forward FLOPs to translate the same source into another language: all but the encoder
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
    def forward_flops(self) -> int:
        return sum(self.linear_flops.values()) + sum(self.attention_flops.values())

    @property
    def training_flops(self) -> int:
        return _TRAINING_FACTOR * self.forward_flops

    @property
    def train_flops_per_token(self) -> float:
        """A token as a batch's budget counts it: a sequence's start or end, which M and N hold, is not one."""
        return self.training_flops / _budget_tokens(self.source_length, self.target_length)

    @property
    def total_training_flops(self) -> float | None:
        """A whole training run, if its steps and the tokens of a step are known."""
        if self.steps is None or self.batch_tokens is None:
            return None
        return self.steps * self.batch_tokens * self.train_flops_per_token


def _budget_tokens(m: int, n: int) -> int:
    return max(1, max(0, m - 1) + max(0, n - 1))


@dataclass(frozen=True)
class _MatMul:
    """One kind of matrix product: in which part, how often, how large."""

    module: str
    kind: Literal["linear", "attention"]
    repeats: LengthTerm
    macs: int  # multiply-adds each time, in one layer
    layers: int = 1
    saved_activations: int = 0  # floats that the backward pass wants each time, in one layer

    def flops(self, lengths: dict[LengthTerm, int]) -> int:
        return 2 * self.macs * self.layers * lengths[self.repeats]


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
    m = _check_length(source_length, "source", model.source_embedding) if model.encoder is not None else 0
    n = _check_length(target_length, "target", model.target_embedding) if model.decoder is not None else 0
    lengths: dict[LengthTerm, int] = {"1": 1, "M": m, "N": n, "M²": m * m, "N²": n * n, "M·N": m * n}
    matmuls = list(_matmuls(model))
    parameters = _count_parameters(model)
    weights = parameters["total"] * _FLOAT_BYTES
    memory = {"weights": weights, "gradients": weights, "Adam moments": 2 * weights}
    if batch_tokens is not None:
        pair_activations = sum(p.saved_activations * p.layers * lengths[p.repeats] for p in matmuls)
        memory["activations (estimate)"] = round(pair_activations * batch_tokens / _budget_tokens(m, n)) * _FLOAT_BYTES
    source_terms: tuple[LengthTerm, ...] = ("M", "M²") if model.decoder is not None else ("M", "M²", "1")
    return Cost(
        family=model.family,
        source_length=m,
        target_length=n,
        parameters=parameters,
        linear_flops=_flops_by_module((p for p in matmuls if p.kind == "linear"), lengths),
        attention_flops=_flops_by_module((p for p in matmuls if p.kind == "attention"), lengths),
        flops_per_source_token=_flops_by_module((p for p in matmuls if p.repeats in source_terms), lengths, m),
        flops_per_target_token=_flops_by_module((p for p in matmuls if p.repeats not in source_terms), lengths, n),
        second_target_flops=sum(p.flops(lengths) for p in matmuls if not p.module.startswith("encoder")),
        attentions=tuple(_attention_cost(site, lengths) for site in _attention_sites(model)),
        memory=memory,
        cache=_decoding_cache(model),
        batch_tokens=batch_tokens,
        steps=steps,
    )


def _check_length(length: int, side: str, embed: spec.Embedding | spec.PatchEmbedding | None) -> int:
    if embed is None or not 1 <= length <= embed.max_length:
        raise InputError(f"{side}_length: {length} tokens; this model takes 1 to {embed.max_length if embed else 0}")
    return length


# ---- parameters -----------------------------------------------------------------------------------------------------

_MODULE_LABELS = {"self_attention": "self-attention", "cross_attention": "cross-attention", "feedforward": "feed-forward"}
_MODULE_LABELS |= {"layers": "recurrence", "cells": "recurrence", "norm": "norms"}


def _count_parameters(model: spec.Model) -> dict[str, int]:
    meta_model = build_on_meta(model)
    counts: dict[str, int] = {}
    counted: set[int] = set()
    for name, module in meta_model.named_modules():
        module_parameters = list(module.parameters(recurse=False))
        if module_parameters or isinstance(module, Attention):  # a dot product of states has no parameters and is a part all the same
            module_label = _module_label(name, model)
            counts[module_label] = counts.get(module_label, 0) + sum(p.numel() for p in module_parameters if id(p) not in counted)
            counted |= {id(p) for p in module_parameters}
    return counts | {"total": sum(counts.values())}


def _module_label(name: str, model: spec.Model) -> str:
    """`decoder.blocks.0.cross_attention.q` -> decoder cross-attention"""
    side, inner = [*(word for word in name.split(".") if word != "blocks" and not word.isdigit()), ""][:2]
    if side not in ("encoder", "decoder"):
        return "head" if side in ("head", "aux_head") else side.replace("_", " ")
    if side == "decoder" and inner == "attention" and isinstance(model.decoder, spec.RecurrentDecoder):
        inner = "cross_attention"  # a recurrent decoder looks at the encoder only
    return f"{side} norms" if inner.endswith("_residual") else f"{side} {_MODULE_LABELS.get(inner, inner)}"


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


class _AttentionSite(NamedTuple):
    """Where an attention sits: who asks, who is looked at, in how many layers."""

    module: str
    spec: spec.Attention
    query_len: LengthTerm
    key_len: LengthTerm
    layers: int = 1


def _attention_sites(model: spec.Model) -> list[_AttentionSite]:
    """The notes' three attentions, those that the model has."""
    encoder, decoder, sites = model.encoder, model.decoder, []
    if isinstance(encoder, spec.TransformerStack):
        sites.append(_AttentionSite("encoder self-attention", encoder.block.self_attention, "M", "M", encoder.num_layers))
    if isinstance(decoder, spec.TransformerStack):
        sites.append(_AttentionSite("decoder self-attention", decoder.block.self_attention, "N", "N", decoder.num_layers))
        if decoder.block.cross_attention is not None:
            sites.append(_AttentionSite("decoder cross-attention", decoder.block.cross_attention, "N", "M", decoder.num_layers))
    elif decoder is not None and decoder.attention is not None:
        sites.append(_AttentionSite("decoder cross-attention", decoder.attention, "N", "M"))
    return sites


def _matmuls(model: spec.Model) -> Iterator[_MatMul]:
    """Every matrix product of a forward pass over one pair."""
    if isinstance(model.source_embedding, spec.PatchEmbedding):
        pixels = model.source_embedding.num_channels * model.source_embedding.patch_size**2
        yield _MatMul("source embedding", "linear", "M", pixels * model.source_embedding.d_model, saved_activations=model.source_embedding.d_model)
    for site in _attention_sites(model):
        yield from _attention_matmuls(site)
    if isinstance(model.encoder, spec.TransformerStack):
        yield from _feedforward_matmuls("encoder", model.encoder, "M")
    elif model.encoder is not None:
        r = model.encoder
        for inputs in [r.d_model] + [r.output_dim] * (r.layers - 1):
            yield _cell_matmul("encoder recurrence", r.cell, "M", inputs, r.hidden_size, 2 if r.bidirectional else 1)
    if isinstance(model.decoder, spec.TransformerStack):
        yield from _feedforward_matmuls("decoder", model.decoder, "N")
    elif model.decoder is not None:
        yield from _recurrent_decoder_matmuls(model.decoder)
    for head in (model.head, model.aux_head):
        if head is not None:
            yield from _head_matmuls(head, "N" if model.decoder is not None else "M")


def _attention_matmuls(site: _AttentionSite) -> Iterator[_MatMul]:
    """Projections of what asks and of what is looked at; the key's share of the score; scores; the mix of values."""
    module, a, query_len, key_len, layers = site
    query, key, value = (a.heads * size for size in (a.q_head_dim, a.k_head_dim, a.effective_v_head_dim))
    pair_len: LengthTerm = {"MM": "M²", "NN": "N²", "NM": "M·N"}.get(query_len + key_len, key_len)  # type: ignore[assignment]
    if a.use_projections:
        yield _MatMul(module, "linear", query_len, a.query_dim * (query + value), layers, saved_activations=query + value)
        yield _MatMul(module, "linear", key_len, a.effective_kv_dim * (key + value), layers, saved_activations=key + value)
    hidden = a.score_hidden_dim or a.k_head_dim  # of the additive and MLP scores
    if a.score_fn in ("dot", "scaled_dot"):
        yield _MatMul(module, "attention", pair_len, key, layers)
    elif a.score_fn == "bilinear":
        yield _MatMul(module, "attention", key_len, key * a.q_head_dim, layers, saved_activations=query)
        yield _MatMul(module, "attention", pair_len, query, layers)
    else:
        num_hidden_layers = 1 if a.score_fn == "additive" else 2  # hidden layers, each kept for every query and key
        yield _MatMul(module, "attention", key_len, key * hidden, layers, saved_activations=a.heads * hidden)
        yield _MatMul(module, "attention", query_len, query * hidden, layers, saved_activations=a.heads * hidden)
        if a.score_fn == "mlp":
            yield _MatMul(module, "attention", pair_len, a.heads * hidden**2, layers)
        yield _MatMul(module, "attention", pair_len, a.heads * hidden, layers, saved_activations=a.heads * (hidden * num_hidden_layers + 1))
    yield _MatMul(module, "attention", pair_len, value, layers)


def _feedforward_matmuls(side: str, stack: spec.TransformerStack, seq_len: LengthTerm) -> Iterator[_MatMul]:
    ff = stack.block.feedforward
    saved_factor = 4 if ff.gated else 1 if ff.activation == "relu" else 2  # a ReLU needs its output alone
    macs = (3 if ff.gated else 2) * ff.d_model * ff.d_ff
    yield _MatMul(f"{side} feed-forward", "linear", seq_len, macs, stack.num_layers, saved_activations=saved_factor * ff.d_ff)
    norms = 2 if stack.block.cross_attention is None else 3
    yield _MatMul(f"{side} norms", "linear", seq_len, 0, stack.num_layers, saved_activations=2 * norms * stack.d_model)


def _cell_matmul(module: str, cell: spec.Cell, repeats: LengthTerm, inputs: int, hidden: int, directions: int = 1) -> _MatMul:
    """Each gate is W [x; h]: four of an LSTM (Hochreiter & Schmidhuber 1997), three of a GRU (Cho et al. 2014)."""
    macs, saved_activations = _NUM_GATES[cell] * (inputs + hidden) * hidden, 2 * _NUM_GATES[cell] * hidden
    return _MatMul(module, "linear", repeats, macs * directions, saved_activations=inputs + saved_activations * directions)


def _recurrent_decoder_matmuls(d: spec.RecurrentDecoder) -> Iterator[_MatMul]:
    context = 0 if d.attention is None else d.attention.output_dim
    for inputs in [d.d_model + context] + [d.hidden_size] * (d.layers - 1):
        yield _cell_matmul("decoder recurrence", d.cell, "N", inputs, d.hidden_size)
    yield _MatMul("decoder bridge", "linear", "1", d.encoder_dim * d.layers * d.hidden_size * _NUM_STATES[d.cell])
    readout_dim = d.hidden_size + context + d.d_model
    if d.readout:
        yield _MatMul("decoder readout", "linear", "N", readout_dim * d.hidden_size, saved_activations=readout_dim + d.hidden_size)


def _head_matmuls(head: spec.Head, seq_len: LengthTerm) -> Iterator[_MatMul]:
    width, repeats = head.d_model, seq_len
    if not head.is_token_level:
        repeats = "1"
        if isinstance(head.pool, spec.Attention):  # one learned query a sequence
            width = head.pool.output_dim
            yield from _attention_matmuls(_AttentionSite("head", head.pool, "1", seq_len))
    input_dim = head.num_concat_layers * width
    if head.dense_activation is not None:
        yield _MatMul("head dense", "linear", repeats, input_dim * width, saved_activations=2 * width)
        input_dim = width
    if head.kind == "pooler":
        return
    yield _MatMul("head", "linear", repeats, input_dim * head.num_outputs, saved_activations=2 * head.num_outputs)  # logits and their softmax


def _flops_by_module(matmuls: Iterable[_MatMul], lengths: dict[LengthTerm, int], num_tokens: int = 1) -> dict[str, int]:
    flops_by_module: dict[str, int] = {}
    for p in matmuls:
        if p.macs:
            flops_by_module[p.module] = flops_by_module.get(p.module, 0) + p.flops(lengths) // num_tokens
    return flops_by_module


def _attention_cost(site: _AttentionSite, lengths: dict[LengthTerm, int]) -> AttentionCost:
    matmuls, k = list(_attention_matmuls(site)), site.spec.query_dim
    score_matmuls = [p for p in matmuls if p.kind == "attention"]
    total = sum(p.flops(lengths) for p in score_matmuls)
    return AttentionCost(
        name=site.module,
        query_dim=k,
        formula=_formula(score_matmuls, k),
        flops_per_layer=total // site.layers,
        num_layers=site.layers,
        total_flops=total,
        projection_formula=_formula([p for p in matmuls if p.kind == "linear"], k),
    )


def _formula(matmuls: list[_MatMul], k: int) -> str:
    """FLOPs of one layer, terms of a kind added up: scores 2·M²·k and mix 2·M²·k give 4·M²·k."""
    terms: dict[tuple[str, str], int] = {}
    for p in matmuls:
        factor, symbol = _in_query_dims(p.macs, k)
        terms[p.repeats, symbol] = terms.get((p.repeats, symbol), 0) + 2 * factor
    return " + ".join("·".join(filter(None, (str(c), repeats, symbol))) for (repeats, symbol), c in terms.items())


def _in_query_dims(macs: int, k: int) -> tuple[int, str]:
    """A number as c·k², c·k, k/c or k²/c, whichever is plainest; a number that is none of these stays one."""
    options = [(macs // unit, name) for unit, name in ((k * k, "k²"), (k, "k")) if macs % unit == 0]
    options += [(unit // macs, f"{name}/") for unit, name in ((k, "k"), (k * k, "k²")) if unit % macs == 0]
    c, name = min(options, default=(_MAX_COEFFICIENT + 1, ""), key=lambda option: option[0])
    if c > _MAX_COEFFICIENT:
        return macs, ""
    return (1, f"{name}{c}") if name.endswith("/") else (c, name)


def _decoding_cache(model: spec.Model) -> dict[str, int]:
    """Bytes that decoding keeps: prepared keys and values of the source and of what was written; a recurrent state."""
    cache_bytes = {"source token": 0, "target token": 0, "row": 0}
    if isinstance(d := model.decoder, spec.RecurrentDecoder):
        cache_bytes["row"] = d.layers * d.hidden_size * _NUM_STATES[d.cell] * _FLOAT_BYTES
    for _, a, query_len, key_len, layers in _attention_sites(model):
        hidden = a.score_hidden_dim or a.k_head_dim
        key_dim = {"bilinear": a.q_head_dim, "additive": hidden, "mlp": hidden}.get(a.score_fn, a.k_head_dim)
        if query_len == "N":
            side = "source token" if key_len == "M" else "target token"
            cache_bytes[side] += layers * a.heads * (key_dim + a.effective_v_head_dim) * _FLOAT_BYTES
    return cache_bytes
