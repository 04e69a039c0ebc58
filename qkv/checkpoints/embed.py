"""Embeddings of texts: the feature-based use of a pretrained model (Devlin et al. 2019, 5.3; Peters et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from qkv.checkpoints.arguments import as_bundle, as_texts
from qkv.checkpoints.inputs import (
    EncodedBatch,
    OnTooLong,
    TextOrPair,
    check_locations,
    encode_inputs,
    iter_batches,
    require_tokenizer,
)
from qkv.errors import InputError, check_choice, check_flag, check_number
from qkv.nn.bilm import BiLM
from qkv.nn.layer_mix import concat_last_layers, last_layers
from qkv.nn.ragged import Ragged
from qkv.nn.stack import Stack
from qkv.nn.subword_pooling import pool_subwords

if TYPE_CHECKING:
    from qkv.checkpoints.bundle import ModelBundle

Pooling = Literal["mean", "cls", "tokens", "words"]
LayerSelection = Literal["last", "sum", "concat"]
SubwordPooling = Literal["first", "mean"]


@torch.inference_mode()
def embed(
    model: ModelBundle | str | Path,
    texts: Sequence[TextOrPair],
    *,
    pool: Pooling = "mean",
    layers: LayerSelection | int = "last",
    normalize: bool = False,
    subword_pooling: SubwordPooling = "first",
    on_too_long: OnTooLong = "refuse",
    parse_special_tokens: bool = False,
    batch_tokens: int = 8192,
    locations: Sequence[str] | None = None,
) -> list[Tensor]:
    """Return one vector [d_model] per text, or with `pool` "tokens" or "words" one per token or word [n, d_model].

        vectors = qkv.embed("models/bert-small", frame["text"], normalize=True)
        similarity = vectors[0] @ vectors[1]

    Args:
        model: a model that `qkv.load` returns, a predictor, or the path of a run or checkpoint.
        texts: texts or pairs of texts, in a list, a pandas Series, an array or any other sequence; or one text.
        pool: "mean" of all tokens, special tokens included, as sentence encoders do; "cls", the first token; "tokens"
            and "words" do not pool.
        layers: the last layer; the last four summed, or concatenated to a vector four times as wide; or the number of a
            layer, 0 being the embedding.
        normalize: scale each vector to length 1.
        subword_pooling: with `pool` "words", the vector of a word of several tokens: its first token or their mean.
        on_too_long: refuse or truncate a text over the model's maximum length.
        parse_special_tokens: read special tokens that are spelled out in a text, such as T5's <extra_id_0>, as tokens.
        batch_tokens: tokens per batch.
        locations: names of the texts in error messages; by default their first characters.
    """
    bundle, items = as_bundle(model), as_texts(texts)
    check_choice(pool, get_args(Pooling), "pool")
    if isinstance(layers, str) or not isinstance(layers, int):
        check_choice(layers, get_args(LayerSelection), "layers")
    check_choice(subword_pooling, get_args(SubwordPooling), "subword_pooling")
    check_choice(on_too_long, get_args(OnTooLong), "on_too_long")
    check_flag(normalize, "normalize")
    check_flag(parse_special_tokens, "parse_special_tokens")
    check_number(batch_tokens, "batch_tokens", 1)
    if not items:
        return []
    names = check_locations(locations, items)
    encodings = encode_inputs(bundle, items, names, on_too_long=on_too_long, parse_special_tokens=parse_special_tokens)
    embeddings: list[Tensor] = [torch.empty(0)] * len(encodings)
    cls_index = -1 if encodings[0].ids[-1] == require_tokenizer(bundle).cls_id else 0  # XLNet's is the last token
    for batch in iter_batches(bundle, encodings, batch_tokens):
        hidden = _layer_features(bundle, batch, layers)
        hidden = hidden.with_values(hidden.values.float())
        if pool in ("tokens", "words"):
            hidden = hidden.to_tokens()
        if pool == "words":
            hidden = pool_subwords(hidden, [encodings[i].word_ids for i in batch.input_indices], subword_pooling)
        for row, vectors in zip(batch.input_indices, _pool(hidden, pool, cls_index), strict=True):
            embeddings[row] = (torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors).cpu()
    return embeddings


def _layer_features(bundle: ModelBundle, batch: EncodedBatch, layers: LayerSelection | int) -> Ragged:
    stack, embedded = bundle.model.input_stack, bundle.model.embed_inputs(batch.source, batch.token_type_ids)
    if layers == "last":
        hidden: Ragged = stack(embedded).hidden
        return hidden
    if not isinstance(stack, Stack | BiLM):
        raise InputError("layers: a recurrent encoder has only its last layer")
    layer_states = stack.all_hidden_states(embedded)
    if isinstance(layers, int):
        if not 0 <= layers < len(layer_states):
            raise InputError(f"layers: there is no layer {layers}; this model has 0 to {len(layer_states) - 1}")
        return embedded.with_values(layer_states[layers])
    is_sum = layers == "sum"
    return embedded.with_values(
        torch.stack(last_layers(layer_states)).sum(0) if is_sum else concat_last_layers(layer_states)
    )


def _pool(hidden: Ragged, pool: Pooling, cls_index: int) -> list[Tensor]:
    if pool in ("tokens", "words"):
        return hidden.sequences()
    if pool == "cls":
        return [sequence[cls_index] for sequence in hidden.sequences()]
    return [sequence.mean(0) for sequence in hidden.sequences()]
