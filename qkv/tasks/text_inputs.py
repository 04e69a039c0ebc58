"""A text or two in a model's template, and what happens where they are longer than it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qkv.data.examples import TextExample, check_span
from qkv.errors import InputError
from qkv.checkpoints.inputs import TextOrPair, truncate
from qkv.tasks.base import Features
from qkv.tokenization.backend import Encoding
from qkv.tokenization.tokenizer import Tokenizer

OnTooLong = Literal["truncate", "refuse"]
_CHUNK_SIZE = 1024  # texts framed at a time: what is known of their tokens takes far more room than what is kept
_SPAN_MARKERS = "*#"  # around the first span of a text and the second, as T5 marks them (Raffel et al. 2020, appendix A)


@dataclass(frozen=True, kw_only=True)
class TextInputSettings:
    """What tasks have in common whose example is a text or two."""

    on_too_long: OnTooLong = "truncate"
    text_pairs: bool | None = None  # a line is two texts; None: where all training examples are, else it may be

    def infer_settings(self, examples: Sequence[TextExample]) -> dict[str, Any]:
        """Settings that nobody gave and that the training examples tell: each is two texts."""
        return {"text_pairs": True} if self.text_pairs is None and all(example.text_pair is not None for example in examples) else {}


def featurize_texts(
    examples: Sequence[TextExample],
    tokenizer: Tokenizer,
    max_length: int,
    on_too_long: OnTooLong,
    label_ids: Sequence[tuple[float, ...]],
    mark_spans: bool = False,
) -> list[Features]:
    """One sequence an example, with what is right."""
    features = []
    for start in range(0, len(examples), _CHUNK_SIZE):
        chunk = examples[start : start + _CHUNK_SIZE]
        encodings = tokenizer.encode_plus_batch([get_texts(example, mark_spans) for example in chunk])
        for example_index, (encoding, example) in enumerate(zip(encodings, chunk, strict=True), start):
            encoding, truncated = fit_length(encoding, max_length, on_too_long, example.location)
            features.append(Features.from_encodings(example_index, [encoding], label_ids[example_index], truncated=truncated))
    return features


def fit_length(encoding: Encoding, max_length: int, on_too_long: OnTooLong, location: str) -> tuple[Encoding, bool]:
    """What the model takes of a text or two, and whether something was cut off."""
    if all(sequence_id is None for sequence_id in encoding.sequence_ids):
        raise InputError(f"{location}: the text is empty; fill it in, or remove it")
    truncated = len(encoding.ids) > max_length
    if truncated and on_too_long == "refuse":
        message = f"{len(encoding.ids)} tokens, and the model takes at most {max_length}"
        raise InputError(f"{location}: {message}; shorten it, or let it be cut (task.on_too_long, --on-too-long: truncate)")
    return truncate(encoding, max_length), truncated


def get_texts(example: TextExample, mark_spans: bool = False) -> TextOrPair:
    """An example's text or two; with a mark on both sides of each span that the label is about."""
    first_text = _insert_markers(example, in_text_pair=False) if mark_spans else example.text
    if example.text_pair is None:
        return first_text
    return first_text, _insert_markers(example, in_text_pair=True) if mark_spans else example.text_pair


def _insert_markers(example: TextExample, in_text_pair: bool) -> str:
    text = (example.text_pair or "") if in_text_pair else example.text
    spans = sorted((s for s in example.spans if s.in_text_pair == in_text_pair), key=lambda s: s.start)
    edges = []
    for number, span in enumerate(spans):
        check_span(span.start, span.end, text, example.location)
        marker = _SPAN_MARKERS[number % len(_SPAN_MARKERS)]
        edges += [(span.start, True, marker), (span.end, False, marker)]
    # from behind, so that places before stay what they are; where one span ends and another begins, the end comes first
    for position, _, marker in sorted(edges, reverse=True):
        text = text[:position] + marker + text[position:]
    return text
