"""Vectors of texts: the fixed-feature use of a pretrained body (Devlin et al. 2019, 5.3; Peters et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from qkv.checkpoints import ModelBundle
from qkv.errors import InputError
from qkv.generation.config import GenerationConfig, validate
from qkv.generation.generate import eval_mode
from qkv.generation.inputs import EncodedBatch, TextOrPair, describe_input, encode_inputs, iter_batches
from qkv.nn import Decoder, Encoder
from qkv.nn.ragged import Ragged
from qkv.nn.stack import Stack
from qkv.nn.subword_pooling import pool_subwords

Pooling = Literal["mean", "first", "tokens", "words"]
LayerSelection = Literal["last", "sum", "join"]
_NUM_LAST_LAYERS = 4  # the layers that are summed or joined, as in the paper's table of features


@torch.inference_mode()
def embed(
    bundle: ModelBundle,
    texts: Sequence[TextOrPair],
    *,
    pool: Pooling = "mean",
    layers: LayerSelection | int = "last",
    normalize: bool = False,
    config: GenerationConfig | None = None,
    input_names: Sequence[str] | None = None,
) -> list[Tensor]:
    """One vector [W] a text, or with `tokens` and `words` one a token or word [n, W].

    `mean` averages all tokens, those that the template adds too, as sentence encoders do; `first` is [CLS].
    `layers`: the last one, or the last four summed, or joined to a vector four times as wide; or one by its
    number, 0 for what goes into the first. `unit`: of length one.
    """
    for name, value, choices in (("pool", pool, Pooling), ("layers", layers, LayerSelection)):
        if value not in choices.__args__ and not (name == "layers" and isinstance(value, int)):  # type: ignore[attr-defined]
            raise InputError(f"{name} is {' or '.join(choices.__args__)}, not '{value}'")  # type: ignore[attr-defined]
    config = config or GenerationConfig()
    validate(config)
    encodings = encode_inputs(bundle, texts, input_names or [describe_input(text) for text in texts], config)
    out: list[Tensor] = [torch.empty(0)] * len(encodings)
    with eval_mode(bundle.model):
        for batch in iter_batches(bundle, encodings, config.batch_tokens):
            hidden = batch.source.with_values(_layer_features(bundle, batch, layers).float())
            if pool == "words":
                hidden = pool_subwords(hidden, [encodings[i].word_ids for i in batch.input_indices], config.subword_pooling or "first")
            for row, vectors in zip(batch.input_indices, _pool(hidden, pool), strict=True):
                out[row] = (torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors).cpu()
    return out


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
        raise InputError("layers: a recurrent encoder gives its last layer only")
    layer_states = backbone.all_hidden_states(x)
    if isinstance(layers, int):
        if not 0 <= layers < len(layer_states):
            raise InputError(f"layers: {layers} is none of this model's, which are 0 to {len(layer_states) - 1}")
        return layer_states[layers]
    last_layers = layer_states[-_NUM_LAST_LAYERS:]
    return torch.stack(last_layers).sum(0) if layers == "sum" else torch.cat(last_layers, -1)


def _pool(hidden: Ragged, pool: Pooling) -> list[Tensor]:
    if pool in ("tokens", "words"):
        return hidden.sequences()
    if pool == "first":
        return [sequence[0] for sequence in hidden.sequences()]
    return [sequence.mean(0) for sequence in hidden.sequences()]
