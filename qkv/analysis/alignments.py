"""Alignments of a text and its output: generate the output, then record the weights of one teacher-forced pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qkv.analysis.capture import capture_attention, named_attentions
from qkv.checkpoints import ModelBundle
from qkv.checkpoints.arguments import as_bundle, as_list
from qkv.checkpoints.inputs import describe_input
from qkv.errors import InputError, check_names, check_type, did_you_mean, quote
from qkv.generation import GenerationConfig, generate_texts
from qkv.generation.generate import encode_for_generation
from qkv.nn import Model, Ragged

POOLING_LAYER = "head.pool.attention"


@dataclass(frozen=True)
class Alignment:
    """Attention of each output token over the input tokens."""

    weights: Tensor
    """Weights [H, N, M] of N output tokens over M input tokens."""
    source_tokens: list[str]
    """The M input tokens."""
    target_tokens: list[str]
    """The N output tokens, EOS included."""
    layer: str
    """Name of the attention layer."""


def alignments(
    bundle: ModelBundle | str | Path,
    texts: Sequence[str],
    targets: Sequence[str] | None = None,
    layer: str | None = None,
    config: GenerationConfig | None = None,
) -> list[Alignment]:
    """Return one alignment per text: the attention of a decoder, or of a head with attention pooling, to its input.

        aligned = qkv.alignments("runs/g2p", ["attention", "network"])
        qkv.plot_alignments(aligned)

    Args:
        bundle: an encoder-decoder that `qkv.load` returns, or the path of a run or checkpoint; or a classifier with
            attention pooling, whose output is its label.
        texts: the inputs, in a list, a pandas Series or any other sequence.
        targets: the outputs to align; None: the model's own.
        layer: name of the attention layer; None: the last that attends to the input.
        config: how outputs are generated.
    """
    bundle = as_bundle(bundle, "bundle")
    if config is not None:
        check_type(config, GenerationConfig, "config", "a qkv.GenerationConfig")
    texts = check_names(as_list(texts, "texts"), "texts")
    model, source_tokenizer, target_tokenizer = bundle.model, bundle.source_tokenizer, bundle.target_tokenizer
    config = config or GenerationConfig()
    if source_tokenizer is None or target_tokenizer is None:
        raise InputError(f"this {model.spec.family} has no tokenizer, so it cannot read text")
    if not model.is_encoder_decoder:
        return _pooling_weights(bundle, texts)
    layer_name, locations = _select_layer(model, layer), [describe_input(text) for text in texts]
    if not texts:
        return []
    if targets is None:
        targets = [outputs[0].text for outputs in generate_texts(bundle, texts, config, locations)]
    targets = check_names(targets, "targets")
    if len(targets) != len(texts):
        raise InputError(f"targets: there are {len(targets)} for {len(texts)} texts; give one per text")
    source_ids = encode_for_generation(bundle, texts, locations, config)
    target_ids = target_tokenizer.encode_batch(list(targets))
    source_batch = Ragged.pack([torch.tensor(row) for row in source_ids]).to(model.device)
    target_batch = Ragged.pack([torch.tensor([model.spec.bos_id, *row]) for row in target_ids]).to(model.device)
    with torch.no_grad(), capture_attention(model, layers=[layer_name]) as maps:
        model(source_batch, target_batch)
    target_tokens = [target_tokenizer.ids_to_display([*row, model.spec.eos_id]) for row in target_ids]
    source_tokens = map(source_tokenizer.ids_to_display, source_ids)
    rows = zip(maps[layer_name], source_tokens, target_tokens, strict=True)
    return [Alignment(weights, source, target, layer_name) for weights, source, target in rows]


def _pooling_weights(bundle: ModelBundle, texts: Sequence[str]) -> list[Alignment]:
    """Return the weights by which a head pools the tokens of each text, as an alignment with the label."""
    model = bundle.model
    if POOLING_LAYER not in named_attentions(model):
        reason = "alignments need an encoder-decoder, or a head with attention pooling"
        raise InputError(f"{reason}; qkv.attention has the self-attention of this {model.spec.family}")
    output = bundle(list(texts), attentions=[POOLING_LAYER])
    assert output.logits is not None  # a model with a pooling layer has a head
    assert output.attentions is not None
    names = model.spec.head.labels if model.spec.head is not None else ()
    labels = [str(int(logits.argmax())) if not names else names[int(logits.argmax())] for logits in output.logits]
    rows = zip(output.attentions, output.tokens, labels, strict=True)
    return [Alignment(maps[POOLING_LAYER], tokens, [label], POOLING_LAYER) for maps, tokens, label in rows]


def _select_layer(model: Model, layer: str | None) -> str:
    suffixes = ("cross_attention", "decoder.attention")
    layer_names = [name for name in named_attentions(model) if name.startswith("decoder.") and name.endswith(suffixes)]
    if not layer_names:
        raise InputError("this model has no attention over its input (model.attention: none)")
    if layer is None:
        return layer_names[-1]
    check_type(layer, str, "layer", "the name of an attention layer")
    if layer not in layer_names:
        hint = did_you_mean(layer[:60], layer_names)
        raise InputError(f"layer: no attention over the input is named {quote(layer)}; {hint}")
    return layer
