"""What a model attends to between a text and its output: predict, then read the maps of one teacher-forced pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.analysis.capture import capture_attention, named_attentions
from qkv.checkpoints import ModelBundle
from qkv.errors import InputError, did_you_mean
from qkv.generation import GenerationConfig, predict
from qkv.generation.generate import encode_for_generation, eval_mode
from qkv.nn import EncoderDecoder, Ragged


@dataclass(frozen=True)
class Alignment:
    """Weights [H, N, M] of each output token (down) over the input tokens (across)."""

    weights: Tensor
    source_tokens: list[str]
    target_tokens: list[str]
    layer: str


def alignments(
    bundle: ModelBundle,
    texts: Sequence[str],
    targets: Sequence[str] | None = None,
    layer: str | None = None,
    config: GenerationConfig | None = None,
) -> list[Alignment]:
    """One a text, for the model's own output or for given targets; `layer` None: the last that looks at the source."""
    model, source_tokenizer, target_tokenizer = bundle.model, bundle.source_tokenizer, bundle.target_tokenizer
    config = config or GenerationConfig()
    if source_tokenizer is None or target_tokenizer is None:
        raise InputError(f"this {model.spec.family} came without a tokeniser, so it cannot read text")
    if not isinstance(model, EncoderDecoder):
        raise InputError(f"a {model.spec.family} of this shape has no output to align; this needs an encoder-decoder")
    layer_name = _select_layer(model, layer)
    if targets is None:
        targets = [rows[0].text for rows in predict(bundle, texts, config)]
    source_ids = encode_for_generation(bundle, texts, [f"'{text}'" for text in texts], config)
    target_ids = target_tokenizer.encode_batch(list(targets))
    source_batch = Ragged.pack([torch.tensor(row) for row in source_ids]).to(model.device)
    target_batch = Ragged.pack([torch.tensor([model.spec.bos_id, *row]) for row in target_ids]).to(model.device)
    with eval_mode(model), torch.no_grad(), capture_attention(model, layers=[layer_name]) as maps:
        model(source_batch, target_batch)
    target_tokens = [target_tokenizer.ids_to_display([*row, model.spec.eos_id]) for row in target_ids]
    return [Alignment(*columns, layer_name) for columns in zip(maps[layer_name], map(source_tokenizer.ids_to_display, source_ids), target_tokens, strict=True)]


def _select_layer(model: EncoderDecoder, layer: str | None) -> str:
    layer_names = [n for n in named_attentions(model) if n.startswith("decoder.") and n.endswith(("cross_attention", "decoder.attention"))]
    if not layer_names:
        raise InputError("this model has no attention over its input (model.attention: none); there is nothing to see")
    if layer is None:
        return layer_names[-1]
    if layer not in layer_names:
        raise InputError(f"no attention '{layer}' over the input; {did_you_mean(layer, layer_names)}")
    return layer
