"""Embeddings of texts: the feature-based use of a pretrained model (Devlin et al. 2019, 5.3; Peters et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from qkv.checkpoints.inputs import EncodedBatch, OnTooLong, TextOrPair, describe_input, encode_inputs, iter_batches
from qkv.errors import InputError
from qkv.nn import Decoder, Encoder
from qkv.nn.ragged import Ragged
from qkv.nn.stack import Stack
from qkv.nn.subword_pooling import pool_subwords

if TYPE_CHECKING:
    from qkv.checkpoints.model_folder import ModelBundle

Pooling = Literal["mean", "cls", "tokens", "words"]
LayerSelection = Literal["last", "sum", "concat"]
SubwordPooling = Literal["first", "mean"]
_NUM_LAST_LAYERS = 4  # layers that "sum" and "concat" combine, as in table 7 of Devlin et al.


@torch.inference_mode()
def embed(
    bundle: ModelBundle,
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

    Args:
        bundle: a model in eval mode with its tokenizer.
        texts: texts, or pairs of texts.
        pool: "mean" of all tokens, special tokens included, as sentence encoders do; "cls", the first token; "tokens" and "words" do not pool.
        layers: the last layer; the last four summed, or concatenated to a vector four times as wide; or the number of a layer, 0 being the embedding.
        normalize: scale each vector to length 1.
        subword_pooling: with `pool` "words", the vector of a word of several tokens: its first token or their mean.
        on_too_long: refuse or truncate a text over the model's maximum length.
        parse_special_tokens: read special tokens that are spelled out in a text, such as T5's <extra_id_0>, as tokens.
        batch_tokens: tokens per batch.
        locations: names of the texts in error messages; by default their first characters.
    """
    if pool not in get_args(Pooling):
        raise InputError(f"pool is {' or '.join(get_args(Pooling))}, not '{pool}'")
    if layers not in get_args(LayerSelection) and not isinstance(layers, int):
        raise InputError(f"layers is {' or '.join(get_args(LayerSelection))}, not '{layers}'")
    if subword_pooling not in get_args(SubwordPooling):
        raise InputError(f"subword_pooling is first or mean, not '{subword_pooling}'")
    names = locations or [describe_input(text) for text in texts]
    encodings = encode_inputs(bundle, texts, names, on_too_long=on_too_long, parse_special_tokens=parse_special_tokens)
    embeddings: list[Tensor] = [torch.empty(0)] * len(encodings)
    for batch in iter_batches(bundle, encodings, batch_tokens):
        hidden = batch.source.with_values(_layer_features(bundle, batch, layers).float())
        if pool == "words":
            hidden = pool_subwords(hidden, [encodings[i].word_ids for i in batch.input_indices], subword_pooling)
        for row, vectors in zip(batch.input_indices, _pool(hidden, pool), strict=True):
            embeddings[row] = (torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors).cpu()
    return embeddings


def _layer_features(bundle: ModelBundle, batch: EncodedBatch, layers: LayerSelection | int) -> Tensor:
    model = bundle.model
    if isinstance(model, Decoder):
        backbone, x = model.decoder, model.target_embedding(batch.source)
    elif isinstance(model, Encoder):
        backbone, x = model.encoder, model.embed(batch.source, batch.token_type_ids)
    else:
        backbone, x = model.encoder, model.source_embedding(batch.source)
    if layers == "last":
        hidden: Tensor = backbone(x).hidden.values
        return hidden
    if not isinstance(backbone, Stack):
        raise InputError("layers: a recurrent encoder has only its last layer")
    layer_states = backbone.all_hidden_states(x)
    if isinstance(layers, int):
        if not 0 <= layers < len(layer_states):
            raise InputError(f"layers: there is no layer {layers}; this model has 0 to {len(layer_states) - 1}")
        return layer_states[layers]
    last_layers = layer_states[-_NUM_LAST_LAYERS:]
    return torch.stack(last_layers).sum(0) if layers == "sum" else torch.cat(last_layers, -1)


def _pool(hidden: Ragged, pool: Pooling) -> list[Tensor]:
    if pool in ("tokens", "words"):
        return hidden.sequences()
    if pool == "cls":
        return [sequence[0] for sequence in hidden.sequences()]
    return [sequence.mean(0) for sequence in hidden.sequences()]
