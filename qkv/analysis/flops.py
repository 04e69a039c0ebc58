"""Matrix products of a model's forward pass, counted from its spec for `qkv.analysis.cost`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from qkv import spec
from qkv.score_functions import SCORE_FUNCTIONS

# how often a product is computed: once per pair of sequences, per source token, per target token, …; the P tokens of a
# memory are keys as well
LengthTerm = Literal["1", "M", "N", "M²", "N²", "M·N", "(M+P)", "(N+P)", "M·(M+P)", "N·(N+P)"]

NUM_STATES = {"lstm": 2, "gru": 1}
_NUM_GATES = {"lstm": 4, "gru": 3}


@dataclass(frozen=True)
class MatMul:
    """One kind of matrix product of a module."""

    module: str  # such as "encoder self-attention"
    kind: Literal["linear", "attention"]
    repeats: LengthTerm  # how often it is computed
    macs: int  # multiply-adds each time, in one layer
    layers: int = 1
    saved_activations: int = 0  # floats that the backward pass needs each time, in one layer

    def flops(self, lengths: dict[LengthTerm, int]) -> int:
        return 2 * self.macs * self.layers * lengths[self.repeats]


class AttentionSite(NamedTuple):
    """One attention of a model, with the terms that count its queries and keys."""

    module: str
    spec: spec.Attention
    query_len: LengthTerm
    key_len: LengthTerm
    layers: int = 1


def attention_sites(model: spec.Model, *, with_memory: bool = False) -> list[AttentionSite]:
    """Return those of the notes' three attentions that the model has.

    Args:
        model: the model.
        with_memory: the keys of relative attention are the tokens of a memory too.
    """
    encoder, decoder, sites = model.encoder, model.decoder, []
    if isinstance(encoder, spec.TransformerStack):
        attention, layers = encoder.block.self_attention, encoder.num_layers
        key_len: LengthTerm = "(M+P)" if with_memory and attention.relative_positions is not None else "M"
        sites.append(AttentionSite("encoder self-attention", attention, "M", key_len, layers))
    if isinstance(decoder, spec.TransformerStack):
        attention, layers = decoder.block.self_attention, decoder.num_layers
        key_len = "(N+P)" if with_memory and attention.relative_positions is not None else "N"
        sites.append(AttentionSite("decoder self-attention", attention, "N", key_len, layers))
        if decoder.block.cross_attention is not None:
            sites.append(
                AttentionSite("decoder cross-attention", decoder.block.cross_attention, "N", "M", decoder.num_layers)
            )
    elif isinstance(decoder, spec.RecurrentDecoder) and decoder.attention is not None:
        sites.append(AttentionSite("decoder cross-attention", decoder.attention, "N", "M"))
    return sites


def attended_memory(model: spec.Model) -> int:
    """Return the tokens of preceding segments that self-attention reads; 0 without memory or with a recurrent state."""
    stack = model.encoder if model.decoder is None else model.decoder
    return stack.memory_length if isinstance(stack, spec.TransformerStack) else 0


def model_matmuls(model: spec.Model, *, with_memory: bool = False) -> Iterator[MatMul]:
    """Yield every matrix product of a forward pass of one pair; see `attention_sites`."""
    embedding = model.source_embedding
    if isinstance(embedding, spec.CharacterEmbedding):
        yield _character_matmul(embedding)
    elif embedding is not None and embedding.projection_dim:
        macs = embedding.projection_dim * embedding.d_model
        yield MatMul("source embedding", "linear", "M", macs, saved_activations=embedding.d_model)
    for site in attention_sites(model, with_memory=with_memory):
        yield from attention_matmuls(site)
    if isinstance(model.encoder, spec.TransformerStack):
        yield from _feedforward_matmuls("encoder", model.encoder, "M")
    elif isinstance(model.encoder, spec.RecurrentEncoder):
        r = model.encoder
        for inputs in [r.d_model] + [r.output_dim] * (r.layers - 1):
            yield _cell_matmul("encoder recurrence", r.cell, "M", inputs, r.hidden_size, 2 if r.bidirectional else 1)
    elif isinstance(model.encoder, spec.BiLM):
        yield from _bilm_matmuls(model.encoder)
    if isinstance(model.decoder, spec.TransformerStack):
        yield from _feedforward_matmuls("decoder", model.decoder, "N")
    elif isinstance(model.decoder, spec.RecurrentStack):
        stack = model.decoder
        for inputs, size in zip((stack.d_model, *stack.layer_sizes[:-1]), stack.layer_sizes, strict=True):
            yield _cell_matmul("decoder recurrence", stack.cell, "N", inputs, size)
    elif model.decoder is not None:
        yield from _recurrent_decoder_matmuls(model.decoder)
    for head in (model.head, model.aux_head):
        if head is not None:
            num_reads = 2 if head.kind == "lm" and isinstance(model.encoder, spec.BiLM) else 1  # once per direction
            for _ in range(num_reads):
                yield from _head_matmuls(head, "N" if model.decoder is not None else "M")


def attention_matmuls(site: AttentionSite) -> Iterator[MatMul]:
    """Yield the products of projections, scores and weighted means."""
    module, a, query_len, key_len, layers = site
    query, key, value = (a.heads * size for size in (a.q_head_dim, a.k_head_dim, a.effective_v_head_dim))
    pair_terms: dict[str, LengthTerm] = {"MM": "M²", "NN": "N²", "NM": "M·N"}
    pair_terms |= {"M(M+P)": "M·(M+P)", "N(N+P)": "N·(N+P)"}
    repeats: dict[str, LengthTerm] = {
        "query": query_len,
        "key": key_len,
        "pair": pair_terms.get(query_len + key_len, key_len),
    }
    if a.use_projections:
        yield MatMul(
            module, "linear", query_len, a.query_dim * (query + value), layers, saved_activations=query + value
        )
        yield MatMul(
            module, "linear", key_len, a.effective_kv_dim * (key + value), layers, saved_activations=key + value
        )
    if a.relative_positions is not None:  # about as many distances as there are queries and keys
        for term in (query_len, key_len):
            yield MatMul(module, "linear", term, a.query_dim * query, layers, saved_activations=query)
        yield MatMul(module, "attention", pair_terms[query_len * 2], query, layers)
        yield MatMul(module, "attention", repeats["pair"], query, layers, saved_activations=3 * a.heads)
    for product in SCORE_FUNCTIONS.get(a.score_fn).products(a):
        yield MatMul(module, "attention", repeats[product.per], product.macs, layers, product.saved_activations)
    yield MatMul(module, "attention", repeats["pair"], value, layers)


def _feedforward_matmuls(side: str, stack: spec.TransformerStack, seq_len: LengthTerm) -> Iterator[MatMul]:
    ff = stack.block.feedforward
    saved_factor = (
        4 if ff.gated else 1 if ff.activation == "relu" else 2
    )  # the gradient of a ReLU needs its output only
    macs = (3 if ff.gated else 2) * ff.d_model * ff.d_ff
    yield MatMul(
        f"{side} feed-forward", "linear", seq_len, macs, stack.num_layers, saved_activations=saved_factor * ff.d_ff
    )
    norms = 2 if stack.block.cross_attention is None else 3
    yield MatMul(f"{side} norms", "linear", seq_len, 0, stack.num_layers, saved_activations=2 * norms * stack.d_model)


def _cell_matmul(
    module: str, cell: spec.Cell, repeats: LengthTerm, inputs: int, hidden: int, directions: int = 1
) -> MatMul:
    """Return the product W [x; h] of all gates.

    An LSTM has four gates (Hochreiter & Schmidhuber 1997), a GRU three (Cho et al. 2014).
    """
    macs, saved_activations = _NUM_GATES[cell] * (inputs + hidden) * hidden, 2 * _NUM_GATES[cell] * hidden
    return MatMul(
        module, "linear", repeats, macs * directions, saved_activations=inputs + saved_activations * directions
    )


def _character_matmul(e: spec.CharacterEmbedding) -> MatMul:
    """Return the products of one word of the maximum length: convolutions, highway layers and projection."""
    groups = [(w, count, e.max_characters - w + 1) for w, count in zip(e.filter_widths, e.filter_counts, strict=True)]
    convolutions = sum(width * e.char_dim * count * windows for width, count, windows in groups)
    linear = e.num_filters * (2 * e.num_highway * e.num_filters + e.d_model)
    saved_activations = sum(count * windows for _, count, windows in groups) + (3 * e.num_highway + 1) * e.num_filters
    return MatMul("source embedding", "linear", "M", convolutions + linear, saved_activations=saved_activations)


def _bilm_matmuls(encoder: spec.BiLM) -> Iterator[MatMul]:
    """Yield the products of both directions: gates from input and projected state, and the projection."""
    width, hidden, gates = encoder.d_model, encoder.hidden_size, _NUM_GATES["lstm"]
    macs = 2 * (gates * hidden * 2 * width + hidden * width)
    saved_activations = 2 * (2 * gates * hidden + 2 * width)
    yield MatMul("encoder recurrence", "linear", "M", macs, encoder.layers, saved_activations)


def _recurrent_decoder_matmuls(d: spec.RecurrentDecoder) -> Iterator[MatMul]:
    context = 0 if d.attention is None else d.attention.output_dim
    for inputs in [d.d_model + context] + [d.hidden_size] * (d.layers - 1):
        yield _cell_matmul("decoder recurrence", d.cell, "N", inputs, d.hidden_size)
    yield MatMul("decoder bridge", "linear", "1", d.encoder_dim * d.layers * d.hidden_size * NUM_STATES[d.cell])
    readout_dim = d.hidden_size + context + d.d_model
    if d.readout:
        yield MatMul(
            "decoder readout", "linear", "N", readout_dim * d.hidden_size, saved_activations=readout_dim + d.hidden_size
        )


def _head_matmuls(head: spec.Head, seq_len: LengthTerm) -> Iterator[MatMul]:
    repeats = seq_len
    if not head.is_token_level:
        repeats = "1"
        if isinstance(head.pool, spec.Attention):  # one learned query per sequence
            yield from attention_matmuls(AttentionSite("head", head.pool, "1", seq_len))
    input_dim, width = head.pooled_dim, head.dense_dim
    if head.dense_activation is not None:
        yield MatMul("head dense", "linear", repeats, input_dim * width, saved_activations=2 * width)
        input_dim = width
    if head.kind == "pooler":
        return
    yield MatMul(
        "head", "linear", repeats, input_dim * head.num_outputs, saved_activations=2 * head.num_outputs
    )  # logits and their softmax
