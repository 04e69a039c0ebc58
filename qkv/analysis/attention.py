"""Attention weights of texts: which tokens each token attends to, per layer and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from qkv.checkpoints import ModelBundle
from qkv.checkpoints.arguments import as_bundle, as_list, as_texts
from qkv.checkpoints.inputs import describe_input
from qkv.errors import InputError, check_names, check_type, describe_value, did_you_mean
from qkv.generation import GenerationConfig, generate_texts
from qkv.nn.capture import named_attentions

_KINDS = {"encoder": "encoder", "decoder": "decoder"}  # of self-attention, by the module that contains it
_CROSS_ATTENTIONS = ("cross_attention", "decoder.attention")


class TextAttention(dict[str, Tensor]):
    """The attention weights [heads, queries, keys] of one input by layer, with the tokens that they belong to.

    A layer is named by its kind and number: `encoder.2` and `decoder.2` are self-attention, `cross.2` is the attention
    of the decoder to the input. Weights are float32 on the CPU; each row sums to one.
    """

    def __init__(self, weights: Mapping[str, Tensor], tokens: Sequence[str], target_tokens: Sequence[str] = ()) -> None:
        super().__init__(weights)
        self.tokens = list(tokens)
        """The tokens of the input, special tokens included; for an image, names of its patches."""
        self.target_tokens = list(target_tokens)
        """The tokens that the decoder of a sequence-to-sequence model reads: BOS and the output; else empty."""

    def __repr__(self) -> str:
        shapes = ", ".join(f"{layer}: {list(weights.shape)}" for layer, weights in self.items())
        return f"TextAttention({' '.join(self.tokens)[:60]!r}, {shapes})"


def attention(
    model: ModelBundle | str | Path,
    texts: Sequence[Any],
    layers: str | int | Sequence[str | int] | None = None,
    *,
    targets: Sequence[str] | None = None,
    config: GenerationConfig | None = None,
) -> list[TextAttention]:
    """Return the attention weights of each text, in input order.

        first, second = qkv.attention("models/bert-small", ["The cat sat on the mat.", "A dog."])
        first.tokens  # ['[CLS]', 'the', 'cat', …]
        first["encoder.2"]  # layer 3: [heads, tokens, tokens]

    Args:
        model: a model that `qkv.load` returns, a predictor, or the path of a run or checkpoint.
        texts: texts or pairs of texts, in a list, a pandas Series or any other sequence; images for a model of images.
        layers: names such as "encoder.2", patterns such as "cross.*", or numbers of layers from 0, where -1 is the
            last; None: all. Fewer layers need less memory: a text of n tokens has heads · n² weights per layer.
        targets: the outputs that a sequence-to-sequence model reads; None: those that it generates.
        config: how outputs are generated.
    """
    bundle = as_bundle(model)
    if config is not None:
        check_type(config, GenerationConfig, "config", "a qkv.GenerationConfig")
    names = _select(_layer_names(bundle), layers)
    items = as_list(texts, "texts") if bundle.image_processor is not None else as_texts(texts)
    reads_targets = bundle.model.is_encoder_decoder and bundle.model.is_generative
    needs_targets = reads_targets and any(not name.startswith("encoder") for name in names.values())
    if targets is None and needs_targets:
        targets = _generate_targets(bundle, items, config or GenerationConfig())
    output = bundle(items, targets=targets, logits=False, attentions=list(names))
    assert output.attentions is not None
    target_tokens = [[]] * len(items) if targets is None else _target_tokens(bundle, check_names(targets, "targets"))
    return [
        TextAttention({names[name]: weights for name, weights in maps.items()}, tokens, decoder_tokens)
        for maps, tokens, decoder_tokens in zip(output.attentions, output.tokens, target_tokens, strict=True)
    ]


def _layer_names(bundle: ModelBundle) -> dict[str, str]:
    """Return the short name of each attention layer: `decoder.2.cross_attention` -> `cross.2`."""
    names = {}
    for name in named_attentions(bundle.model):
        side, *rest = name.split(".")
        number = next((component for component in rest if component.isdigit()), "0")
        kind = "cross" if name.endswith(_CROSS_ATTENTIONS) else _KINDS.get(side)
        if kind is not None:  # the attention of a head runs only with the head
            names[name] = f"{kind}.{number}"
    if not names:
        raise InputError(f"this {bundle.model.spec.family} has no attention layers")
    return names


def _select(names: dict[str, str], layers: Any) -> dict[str, str]:
    if layers is None:
        return names
    selectors = list(layers) if isinstance(layers, list | tuple | range | set) else [layers]
    if not selectors:
        raise InputError("layers: none is named; leave it out for all layers")
    selected: set[str] = set()
    for selector in selectors:
        if isinstance(selector, bool) or not isinstance(selector, str | int):
            raise InputError(f"layers: expected names or numbers of layers, not {describe_value(selector)}")
        matches = {name for name, short in names.items() if _matches(selector, short, names)}
        if not matches:
            hint = did_you_mean(str(selector), names.values()) if isinstance(selector, str) else _known(names)
            raise InputError(f"layers: there is no layer {describe_value(selector)}; {hint}")
        selected |= matches
    return {name: short for name, short in names.items() if name in selected}


def _matches(selector: str | int, short_name: str, names: dict[str, str]) -> bool:
    kind, _, number = short_name.partition(".")
    if isinstance(selector, str):
        return fnmatchcase(short_name, selector) or selector == kind
    count = sum(short.startswith(f"{kind}.") for short in names.values())
    return int(number) == (selector if selector >= 0 else count + selector)


def _known(names: dict[str, str]) -> str:
    return f"known: {', '.join(names.values())}"


def _generate_targets(bundle: ModelBundle, texts: Sequence[Any], config: GenerationConfig) -> list[str]:
    pair = next((text for text in texts if not isinstance(text, str)), None)
    if pair is not None:
        raise InputError(f"texts: {describe_input(pair)} is no text; a sequence-to-sequence model reads one per input")
    outputs = generate_texts(bundle, texts, config, [describe_input(text) for text in texts]) if texts else []
    return [hypotheses[0].text if hypotheses else "" for hypotheses in outputs]


def _target_tokens(bundle: ModelBundle, targets: Sequence[str]) -> list[list[str]]:
    tokenizer, bos_id = bundle.target_tokenizer, bundle.model.spec.bos_id
    assert tokenizer is not None  # `targets` were encoded
    return [tokenizer.ids_to_display([bos_id, *ids]) for ids in tokenizer.encode_batch(list(targets))]
