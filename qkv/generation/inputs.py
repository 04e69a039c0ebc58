"""Inputs as a model's family writes them, in batches of similar length: from text and pictures to packed tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qkv import spec
from qkv.checkpoints import ModelBundle
from qkv.data.batching import evaluation_batches
from qkv.errors import InputError
from qkv.generation.config import GenerationConfig
from qkv.nn import Decoder, Encoder, Ragged
from qkv.nn.stack import EncoderOutput
from qkv.tokenization.backend import Encoding
from qkv.tokenization.tokenizer import Tokenizer

_MAX_SHOWN_CHARS = 60  # characters of an input that a message repeats
TextOrPair = str | tuple[str, str]  # a text, or two that belong together


@dataclass(frozen=True)
class EncodedBatch:
    """Some of the inputs as one batch."""

    input_indices: list[int]  # which inputs these are
    source: Ragged  # [T] ids
    token_type_ids: Tensor | None  # [T]


def require_tokenizer(bundle: ModelBundle) -> Tokenizer:
    """The tokeniser that reads a model's inputs."""
    if bundle.source_tokenizer is None:
        raise InputError(f"this {bundle.model.spec.family} came without a tokeniser, so it cannot read text")
    return bundle.source_tokenizer


def encode_inputs(
    bundle: ModelBundle, inputs: Sequence[TextOrPair], input_names: Sequence[str], config: GenerationConfig, *, parse_special_tokens: bool = False
) -> list[Encoding]:
    """Inputs in the model's template; an empty or too long one is refused by its place, or cut as the user chose."""
    max_length = max_input_length(bundle.model.spec)
    encodings = require_tokenizer(bundle).encode_plus_batch(list(inputs), parse_special_tokens=parse_special_tokens or config.parse_special_tokens)
    for i, (encoding, location) in enumerate(zip(encodings, input_names, strict=True)):
        if all(sequence_id is None for sequence_id in encoding.sequence_ids):
            raise InputError(f"{location}: is empty; give some text")
        if len(encoding.ids) > max_length and config.on_too_long == "refuse":
            reason = f"{len(encoding.ids)} tokens, and the model takes at most {max_length}"
            raise InputError(f"{location}: {reason}; shorten it, or choose --too-long truncate")
        encodings[i] = truncate(encoding, max_length)
    return encodings


def iter_batches(bundle: ModelBundle, encodings: Sequence[Encoding], max_tokens: int) -> Iterator[EncodedBatch]:
    """All frames, those of similar length together, on the model's device."""
    model = bundle.model
    uses_token_types = (
        isinstance(model, Encoder) and isinstance(model.spec.source_embedding, spec.Embedding) and model.spec.source_embedding.num_segments
    )
    for indices in evaluation_batches([len(encoding.ids) for encoding in encodings], max_tokens):
        selected = [encodings[i] for i in indices]
        source = Ragged.pack([torch.tensor(encoding.ids) for encoding in selected]).to(model.device)
        token_type_ids = None
        if uses_token_types:
            token_type_ids = torch.cat([torch.tensor(encoding.segments) for encoding in selected]).to(model.device)
        yield EncodedBatch([int(i) for i in indices], source, token_type_ids)


def compute_hidden_states(bundle: ModelBundle, batch: EncodedBatch) -> EncoderOutput:
    """The hidden states that a model's head judges."""
    model = bundle.model
    if isinstance(model, Encoder):
        return model.encode(batch.source, batch.token_type_ids)
    if isinstance(model, Decoder):
        return model.encode(batch.source)
    return EncoderOutput(batch.source.with_values(model.decode(model.encode(batch.source), batch.source.shift_right(model.spec.bos_id))))


def max_input_length(model_spec: spec.Model) -> int:
    """How many tokens a model reads at most."""
    return spec.input_embedding(model_spec).max_length


def truncate(encoding: Encoding, max_length: int) -> Encoding:
    """Without the last tokens of its longer text, until it fits; what the template added stays."""
    excess = len(encoding.ids) - max_length
    if excess <= 0:
        return encoding
    lengths = [encoding.sequence_ids.count(0), encoding.sequence_ids.count(1)]
    for _ in range(excess):
        lengths[0 if lengths[0] >= lengths[1] else 1] -= 1
    kept_indices, remaining = [], list(lengths)
    for i, sequence_id in enumerate(encoding.sequence_ids):
        if sequence_id is None or remaining[sequence_id] > 0:
            kept_indices.append(i)
        if sequence_id is not None:
            remaining[sequence_id] -= 1
    return select_tokens(encoding, kept_indices)


def select_tokens(encoding: Encoding, indices: Sequence[int]) -> Encoding:
    """Those tokens of a frame."""
    columns = {field_name: [getattr(encoding, field_name)[i] for i in indices] for field_name in ("ids", "segments", "offsets", "words", "parts")}
    return replace(encoding, **columns)


def describe_input(value: object) -> str:
    """How an input is named in a message: by its beginning."""
    text = str(value)
    return f"'{text}'" if len(text) <= _MAX_SHOWN_CHARS else f"'{text[:_MAX_SHOWN_CHARS]}…'"
