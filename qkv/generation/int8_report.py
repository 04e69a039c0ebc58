"""What int8 weights change: the log-probabilities of generated tokens, compared with those of the float32 model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from weakref import WeakSet

import torch

from qkv.generation.decoding_model import num_int8_layers
from qkv.generation.log_probs import next_log_probs
from qkv.generation.request import Request
from qkv.nn import Model, Ragged

_NUM_REQUESTS = 8
_REPORTED: WeakSet[Model] = WeakSet()


def report_int8(model: Model, requests: Iterable[Request]) -> Iterator[Request]:
    """Pass finished requests on; after the first ones of a model, warn with one line how far int8 is from float32."""
    if model in _REPORTED:
        yield from requests
        return
    _REPORTED.add(model)
    requests = iter(requests)
    first = list(islice(requests, _NUM_REQUESTS))
    differences = int8_differences(model, first)
    num_layers = num_int8_layers(model)
    if num_layers == 0:
        reason = "its linear layers are small, or belong to relative attention"
        warnings.warn(f"int8: no layer of this model was quantized, so float32 is used ({reason})", stacklevel=2)
    elif num_layers and len(differences):
        mean, largest = float(differences.mean()), float(differences.max())
        texts = f"{len(first)} output{'s' if len(first) > 1 else ''}"
        warnings.warn(
            f"int8: the log-probability of a token differs from float32 by {mean:.3f} on average and {largest:.3f} at "
            f"most ({len(differences)} tokens of the first {texts})",
            stacklevel=2,
        )
    yield from chain(first, requests)


@torch.inference_mode()
def int8_differences(model: Model, requests: Iterable[Request]) -> torch.Tensor:
    """Return the absolute differences of the tokens' log-probabilities between a search and the model.  # [tokens]"""
    differences = []
    for request in requests:
        if not request.outputs or not isinstance(request.source, torch.Tensor) or request.is_image:
            continue
        output = request.outputs[0]
        tokens = [*output.tokens, *([model.spec.eos_id] if output.finished else [])][: len(output.token_log_probs)]
        if not tokens:
            continue
        labels = torch.tensor(tokens)
        if model.continues_input:
            inputs = [Ragged.pack([torch.cat([request.source, labels[:-1]])])]
            positions = torch.arange(len(request.source) - 1, len(request.source) + len(labels) - 1)
        else:
            target = torch.cat([labels.new_tensor([model.spec.bos_id]), labels[:-1]])
            inputs, positions = [Ragged.pack([request.source]), Ragged.pack([target])], None
        expected = next_log_probs(model, inputs, positions, labels)
        differences.append((expected - torch.tensor(output.token_log_probs[: len(labels)])).abs())
    return torch.cat(differences) if differences else torch.zeros(0)
