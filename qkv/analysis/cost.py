"""Cost of a model, computed from its spec alone: parameters, FLOPs, memory, and closed formulas of its attentions.

Answers "Problem: Machine Translation" (Transformers and Pretraining), question 3: "For input sequences of length M and
output sequences of length N, what are the complexities of (1) Encoder Self-Attention (2) Decoder-Encoder Attention
(3) Decoder Self-Attention. Further let k be the hidden dimension", and question 4: translating the same source into a
second language costs only the decoder again, because no activation of the encoder depends on the target.

Matrix products are counted with 2 FLOPs per multiply-add; element-wise operations (softmax, norms, activations,
lookups) are left out, as is common. Decoder self-attention is counted in full, as the eager kernel computes it; a
kernel that skips masked scores needs N(N + 1)/2 of the N² scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qkv import spec
from qkv.analysis.flops import (
    NUM_STATES,
    AttentionSite,
    LengthTerm,
    MatMul,
    attention_matmuls,
    attention_sites,
    model_matmuls,
)
from qkv.errors import InputError, check_number, check_type, describe_value
from qkv.nn.attention import Attention
from qkv.nn.construction import build_on_meta
from qkv.score_functions import SCORE_FUNCTIONS

__all__ = ["AttentionCost", "Cost", "cost"]

_FLOAT_BYTES = 4  # bytes of a float32
_TRAINING_FACTOR = 3  # training costs three forward passes: backward computes gradients of inputs and of weights
_MAX_COEFFICIENT = 64  # formulas with a larger coefficient are less readable than the plain number


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """Cost of one of the notes' three attentions; k is the width of the queries, M and N are the lengths."""

    name: str
    """Which attention, such as "decoder cross-attention"."""
    query_dim: int
    """Width k of the queries."""
    formula: str
    """FLOPs of scores and weighted means in one layer, such as 4·M²·k."""
    flops_per_layer: int
    """Value of the formula."""
    num_layers: int
    """Number of layers with this attention."""
    total_flops: int
    """FLOPs of scores and weighted means in all layers."""
    projection_formula: str
    """FLOPs of the projections in one layer, such as 8·M·k²; empty without projections."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a pair of M source and N target tokens, per token, and of a training run.

    Dictionaries map the name of a module, such as "encoder self-attention", to its share.
    """

    family: str
    """Name of the model family."""
    source_length: int
    """Source tokens M; 0 for a model without an encoder."""
    target_length: int
    """Target tokens N; 0 for a model without a decoder."""
    memory_length: int = 0
    """Tokens P of a memory, which self-attention reads as well."""
    parameters: dict[str, int]
    """Number of parameters per module, and "total"; tied parameters count once, in the first module that has them."""
    linear_flops: dict[str, int]
    """Forward FLOPs of a pair in projections, feed-forward layers, recurrent cells and head."""
    attention_flops: dict[str, int]
    """Forward FLOPs of a pair in attention scores and weighted means."""
    flops_per_source_token: dict[str, int]
    """Forward FLOPs that grow with the source (encoder, and the decoder's keys and values of it), per source token."""
    flops_per_target_token: dict[str, int]
    """All other forward FLOPs, per target token."""
    second_target_flops: int
    """Forward FLOPs of translating the same source into another language: all but the encoder."""
    attentions: tuple[AttentionCost, ...]
    """Cost of each kind of attention of the model."""
    memory: dict[str, int]
    """Bytes in float32: weights, gradients, Adam moments, and with `batch_tokens` an estimate of the activations."""
    cache: dict[str, int]
    """Bytes in float32 that decoding keeps per source token, per target token, and per row (recurrent state)."""
    batch_tokens: int | None = None
    """Tokens per training step, source and target together; None: unknown."""
    steps: int | None = None
    """Training steps; None: unknown."""

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward pass of a pair."""
        return sum(self.linear_flops.values()) + sum(self.attention_flops.values())

    @property
    def training_flops(self) -> int:
        """FLOPs of the forward and backward pass of a pair."""
        return _TRAINING_FACTOR * self.forward_flops

    @property
    def train_flops_per_token(self) -> float:
        """Training FLOPs per token of `batch_tokens`, which does not count BOS or EOS, although M and N do."""
        return self.training_flops / _budget_tokens(self.source_length, self.target_length)

    @property
    def total_training_flops(self) -> float | None:
        """FLOPs of a whole training run; None without `steps` and `batch_tokens`."""
        if self.steps is None or self.batch_tokens is None:
            return None
        return self.steps * self.batch_tokens * self.train_flops_per_token


def _budget_tokens(m: int, n: int) -> int:
    return max(1, max(0, m - 1) + max(0, n - 1))


def cost(
    model: spec.Model,
    *,
    source_length: int,
    target_length: int,
    memory_length: int = 0,
    batch_tokens: int | None = None,
    steps: int | None = None,
) -> Cost:
    """Return the cost of a model, which need not be built.

        bert = qkv.families.get_family("bert")
        spec = bert.make_spec(bert.PRESETS["base"], source_vocab_size=30522, head="masked_lm")
        qkv.cost(spec, source_length=512, target_length=0).parameters["total"]

    Args:
        model: the model's spec.
        source_length: source tokens of a pair.
        target_length: target tokens of a pair, BOS included.
        memory_length: tokens of preceding segments that self-attention reads as well (Transformer-XL, XLNet).
        batch_tokens: tokens per training step, source and target together, as `train.batch_tokens` counts them.
        steps: training steps.

    Activations are an estimate: per token, in float32, the outputs of all matrix products, inputs and outputs of norms,
    and logits twice; score matrices only if no fused kernel computes the attention; no dropout masks. The true number
    is one to two times as large. Buffers (sinusoids) are not parameters and are not counted.
    """
    check_type(model, spec.Model, "model", "a qkv.spec.Model, such as bundle.model.spec")
    for name, count in (("batch_tokens", batch_tokens), ("steps", steps)):
        if count is not None:
            check_number(count, name, 1)
    check_number(memory_length, "memory_length", 0)
    m = _check_length(source_length, "source", model.source_embedding) if model.encoder is not None else 0
    n = _check_length(target_length, "target", model.target_embedding) if model.decoder is not None else 0
    lengths, with_memory = _length_terms(m, n, memory_length), memory_length > 0
    matmuls = list(model_matmuls(model, with_memory=with_memory))
    parameters = _count_parameters(model)
    weights = parameters["total"] * _FLOAT_BYTES
    memory = {"weights": weights, "gradients": weights, "Adam moments": 2 * weights}
    if batch_tokens is not None:
        pair_activations = sum(p.saved_activations * p.layers * lengths[p.repeats] for p in matmuls)
        memory["activations (estimate)"] = round(pair_activations * batch_tokens / _budget_tokens(m, n)) * _FLOAT_BYTES
    source_terms = {"M", "M²", "(M+P)", "M·(M+P)"} | ({"1"} if model.decoder is None else set())
    return Cost(
        family=model.family,
        source_length=m,
        target_length=n,
        memory_length=memory_length,
        parameters=parameters,
        linear_flops=_flops_by_module((p for p in matmuls if p.kind == "linear"), lengths),
        attention_flops=_flops_by_module((p for p in matmuls if p.kind == "attention"), lengths),
        flops_per_source_token=_flops_by_module((p for p in matmuls if p.repeats in source_terms), lengths, m),
        flops_per_target_token=_flops_by_module((p for p in matmuls if p.repeats not in source_terms), lengths, n),
        second_target_flops=sum(p.flops(lengths) for p in matmuls if not p.module.startswith("encoder")),
        attentions=tuple(_attention_cost(site, lengths) for site in attention_sites(model, with_memory=with_memory)),
        memory=memory,
        cache=_decoding_cache(model),
        batch_tokens=batch_tokens,
        steps=steps,
    )


def _length_terms(m: int, n: int, p: int) -> dict[LengthTerm, int]:
    """Return the value of each term for M source and N target tokens after a memory of P tokens."""
    terms: dict[LengthTerm, int] = {"1": 1, "M": m, "N": n, "M²": m * m, "N²": n * n, "M·N": m * n}
    return terms | {"(M+P)": m + p, "(N+P)": n + p, "M·(M+P)": m * (m + p), "N·(N+P)": n * (n + p)}


def _check_length(length: int, side: str, embedding: spec.Embedding | spec.PatchEmbedding | None) -> int:
    check_type(length, int, f"{side}_length", "a number of tokens")
    max_length = 0 if embedding is None else embedding.max_length
    if not 1 <= length <= max_length:
        raise InputError(f"{side}_length: {describe_value(length)} tokens; this model takes 1 to {max_length}")
    return length


# ---- parameters -----------------------------------------------------------------------------------------------------

_MODULE_LABELS = {
    "self_attention": "self-attention",
    "cross_attention": "cross-attention",
    "feedforward": "feed-forward",
}
_MODULE_LABELS |= {"layers": "recurrence", "cells": "recurrence", "norm": "norms"}


def _count_parameters(model: spec.Model) -> dict[str, int]:
    meta_model = build_on_meta(model)
    counts: dict[str, int] = {}
    counted: set[int] = set()
    for name, module in meta_model.named_modules():
        module_parameters = list(module.parameters(recurse=False))
        if module_parameters or isinstance(
            module, Attention
        ):  # an unprojected dot product is listed with zero parameters
            module_label = _module_label(name, model)
            counts[module_label] = counts.get(module_label, 0) + sum(
                p.numel() for p in module_parameters if id(p) not in counted
            )
            counted |= {id(p) for p in module_parameters}
    return counts | {"total": sum(counts.values())}


def _module_label(name: str, model: spec.Model) -> str:
    """Return the label of a module: "decoder.blocks.0.cross_attention.q" -> "decoder cross-attention"."""
    side, inner = [*(word for word in name.split(".") if word != "blocks" and not word.isdigit()), ""][:2]
    if side not in ("encoder", "decoder"):
        return "head" if side in ("head", "aux_head") else side.replace("_", " ")
    if side == "decoder" and inner == "attention" and isinstance(model.decoder, spec.RecurrentDecoder):
        inner = "cross_attention"  # a recurrent decoder attends to the encoder only
    return f"{side} norms" if inner.endswith("_residual") else f"{side} {_MODULE_LABELS.get(inner, inner)}"


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


def _flops_by_module(matmuls: Iterable[MatMul], lengths: dict[LengthTerm, int], num_tokens: int = 1) -> dict[str, int]:
    flops_by_module: dict[str, int] = {}
    for p in matmuls:
        if p.macs:
            flops_by_module[p.module] = flops_by_module.get(p.module, 0) + p.flops(lengths) // num_tokens
    return flops_by_module


def _attention_cost(site: AttentionSite, lengths: dict[LengthTerm, int]) -> AttentionCost:
    matmuls, k = list(attention_matmuls(site)), site.spec.query_dim
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


def _formula(matmuls: list[MatMul], k: int) -> str:
    """Return the FLOPs of one layer as a sum of terms: scores 2·M²·k and weighted means 2·M²·k give 4·M²·k."""
    terms: dict[tuple[str, str], int] = {}
    for p in matmuls:
        factor, symbol = _in_query_dims(p.macs, k)
        terms[p.repeats, symbol] = terms.get((p.repeats, symbol), 0) + 2 * factor
    return " + ".join("·".join(filter(None, (str(c), repeats, symbol))) for (repeats, symbol), c in terms.items())


def _in_query_dims(macs: int, k: int) -> tuple[int, str]:
    """Write a number as c·k², c·k, k/c or k²/c with the smallest c, or else as it is."""
    options = [(macs // unit, name) for unit, name in ((k * k, "k²"), (k, "k")) if macs % unit == 0]
    options += [(unit // macs, f"{name}/") for unit, name in ((k, "k"), (k * k, "k²")) if unit % macs == 0]
    c, name = min(options, default=(_MAX_COEFFICIENT + 1, ""), key=lambda option: option[0])
    if c > _MAX_COEFFICIENT:
        return macs, ""
    return (1, f"{name}{c}") if name.endswith("/") else (c, name)


def _decoding_cache(model: spec.Model) -> dict[str, int]:
    """Return the bytes of precomputed keys and values of source and target tokens, and of a recurrent state."""
    cache_bytes = {"source token": 0, "target token": 0, "row": 0}
    if isinstance(d := model.decoder, spec.RecurrentDecoder):
        cache_bytes["row"] = d.layers * d.hidden_size * NUM_STATES[d.cell] * _FLOAT_BYTES
    elif isinstance(d, spec.RecurrentStack):
        cache_bytes["row"] = sum(d.layer_sizes) * NUM_STATES[d.cell] * _FLOAT_BYTES
    for _, a, query_len, key_len, layers in attention_sites(model):
        key_dim = SCORE_FUNCTIONS.get(a.score_fn).precomputed_key_dim(a)
        if query_len == "N":
            side = "source token" if key_len == "M" else "target token"
            cache_bytes[side] += layers * a.heads * (key_dim + a.effective_v_head_dim) * _FLOAT_BYTES
    return cache_bytes
