"""Encode texts for a model: its template, its maximum length, and packed batches of similar length on its device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from qkv import spec
from qkv.data.batching import evaluation_batches
from qkv.errors import InputError, check_names, quote
from qkv.nn import Ragged
from qkv.nn.capture import collect_batches
from qkv.tokenization.backend import Encoding
from qkv.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from qkv.checkpoints.bundle import ModelBundle

TextOrPair = str | tuple[str, str]
OnTooLong = Literal["refuse", "truncate"]


@dataclass(frozen=True)
class EncodedBatch:
    """Several inputs, packed."""

    input_indices: list[int]  # positions of these inputs in the caller's list
    source: Ragged  # [T] ids
    token_type_ids: Tensor | None  # [T]; None: the model has no token types


def require_tokenizer(bundle: ModelBundle) -> Tokenizer:
    """Return the tokenizer of a model's inputs, or refuse a model that has none."""
    if bundle.source_tokenizer is None:
        raise InputError(f"this {bundle.model.spec.family} has no tokenizer, so it cannot read text")
    return bundle.source_tokenizer


def encode_inputs(
    bundle: ModelBundle,
    inputs: Sequence[TextOrPair],
    locations: Sequence[str],
    *,
    on_too_long: OnTooLong = "refuse",
    parse_special_tokens: bool = False,
    max_length: int | None = None,
    keep: Literal["beginning", "end"] = "beginning",
) -> list[Encoding]:
    """Encode texts or pairs in the model's template.

    An empty input is refused, and so is one that exceeds the model's maximum length unless `on_too_long` is "truncate".
    `locations` name the inputs in error messages. An input is truncated to `max_length`, by default that of the model,
    and keeps its beginning, or its end if it is a prompt.
    """
    if max_length is None:
        max_length = max_input_length(bundle.model.spec)
    encodings = require_tokenizer(bundle).encode_plus_batch(list(inputs), parse_special_tokens=parse_special_tokens)
    for i, (encoding, location) in enumerate(zip(encodings, locations, strict=True)):
        if all(sequence_id is None for sequence_id in encoding.sequence_ids):
            raise InputError(f"{location}: is empty; give some text")
        if len(encoding.ids) > max_length and on_too_long == "refuse":
            reason = f"{len(encoding.ids)} tokens, and the model takes at most {max_length}"
            raise InputError(f"{location}: {reason}; shorten it, or choose --on-too-long truncate")
        encodings[i] = (truncate if keep == "beginning" else _truncate_prompt)(encoding, max_length)
    return encodings


def iter_batches(bundle: ModelBundle, encodings: Sequence[Encoding], max_tokens: int) -> Iterator[EncodedBatch]:
    """Yield all encodings in batches of similar length, on the model's device."""
    model = bundle.model
    with collect_batches(model) as begin_batch:
        for indices in evaluation_batches(np.array([len(encoding.ids) for encoding in encodings]), max_tokens):
            selected = [encodings[i] for i in indices]
            source = Ragged.pack([torch.tensor(encoding.ids) for encoding in selected]).to(model.device)
            token_type_ids = None
            if model.spec.has_token_types:
                token_types = [torch.tensor(encoding.token_type_ids) for encoding in selected]
                token_type_ids = torch.cat(token_types).to(model.device)
            begin_batch(indices)
            yield EncodedBatch([int(i) for i in indices], source, token_type_ids)


def max_input_length(model_spec: spec.Model) -> int:
    """Return the maximum number of input tokens."""
    return spec.input_embedding(model_spec).max_length


def truncate(encoding: Encoding, max_length: int) -> Encoding:
    """Remove tokens from the end of the longer text until the encoding fits; special tokens of the template stay."""
    excess = len(encoding.ids) - max_length
    if excess <= 0:
        return encoding
    lengths = [encoding.sequence_ids.count(0), encoding.sequence_ids.count(1)]
    for _ in range(excess):
        lengths[0 if lengths[0] >= lengths[1] else 1] -= 1
    indices, remaining = [], list(lengths)
    for i, sequence_id in enumerate(encoding.sequence_ids):
        if sequence_id is None or remaining[sequence_id] > 0:
            indices.append(i)
        if sequence_id is not None:
            remaining[sequence_id] -= 1
    return select_tokens(encoding, indices)


def _truncate_prompt(encoding: Encoding, max_length: int) -> Encoding:
    """Remove the first tokens of a text, so that its continuation follows; special tokens of the template stay."""
    excess = len(encoding.ids) - max_length
    if excess <= 0:
        return encoding
    text_indices = [i for i, sequence_id in enumerate(encoding.sequence_ids) if sequence_id is not None]
    removed = set(text_indices[:excess])
    return select_tokens(encoding, [i for i in range(len(encoding.ids)) if i not in removed])


def select_tokens(encoding: Encoding, indices: Sequence[int]) -> Encoding:
    """Return an encoding of the tokens at `indices` only."""
    names = ("ids", "token_type_ids", "offsets", "word_ids", "sequence_ids")
    columns = {name: [getattr(encoding, name)[i] for i in indices] for name in names}
    return replace(encoding, **columns)


def check_locations(locations: Sequence[str] | None, inputs: Sequence[Any]) -> list[str]:
    """Return the names of inputs in error messages: one per input, by default its first characters."""
    if locations is None:
        return [describe_input(value) for value in inputs]
    names = check_names(locations, "locations", "names of the inputs")
    if len(names) != len(inputs):
        raise InputError(f"locations: there are {len(names)} for {len(inputs)} inputs; give one per input")
    return names


def describe_input(value: object) -> str:
    """Return an input's first characters in quotes, as error messages name it."""
    return quote(str(value))
