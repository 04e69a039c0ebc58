"""What tasks on a text or a pair of texts share: parsing a line, encoding, truncation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from qkv.checkpoints.inputs import OnTooLong, TextOrPair, truncate
from qkv.data.examples import TextExample, check_span
from qkv.errors import InputError
from qkv.tasks.base import Task, check_not_empty, check_setting
from qkv.tasks.features import Features
from qkv.tokenization.backend import Encoding
from qkv.tokenization.tokenizer import Tokenizer

_CHUNK_SIZE = 1024  # texts encoded at a time: encodings take far more memory than features
_SPAN_MARKERS = "*#"  # around a text's first and second span, as T5 marks them (Raffel et al. 2020, appendix A)


@dataclass(frozen=True, kw_only=True)
class TextTask(Task[TextExample]):
    """Settings of tasks whose example is a text or a pair of texts."""

    on_too_long: OnTooLong = "truncate"
    """Truncate or refuse a text that exceeds the model's maximum length."""

    text_pairs: bool | None = None
    """Whether an input line is a pair of texts. None: True if all training examples are pairs, else either."""

    example_type = TextExample

    def __post_init__(self) -> None:
        check_setting("on_too_long", self.on_too_long, get_args(OnTooLong))

    def infer_settings(self, examples: Sequence[TextExample]) -> dict[str, Any]:
        all_pairs = all(example.text_pair is not None for example in examples)
        return {"text_pairs": True} if self.text_pairs is None and all_pairs else {}

    def parse_line(self, line: str, location: str) -> TextExample:
        return self.parse_texts([line] if self.text_pairs is False else line.split("\t"), location)

    def parse_texts(self, texts: Sequence[str], location: str) -> TextExample:
        check_not_empty(texts, location)
        if self.text_pairs and len(texts) == 1:
            raise InputError(f"{location}: this model takes two texts, separated by a tab")
        if len(texts) > 2:
            raise InputError(f"{location}: this model takes one text or two, not {len(texts)}")
        return TextExample(texts[0], location, texts[1] if len(texts) == 2 else None)


def featurize_texts(
    examples: Sequence[TextExample],
    tokenizer: Tokenizer,
    max_length: int,
    on_too_long: OnTooLong,
    label_ids: Sequence[tuple[float, ...]],
    mark_spans: bool = False,
) -> list[Features]:
    """Return the features of each text or pair, one sequence per example, with its targets."""
    features = []
    for start in range(0, len(examples), _CHUNK_SIZE):
        chunk = examples[start : start + _CHUNK_SIZE]
        encodings = tokenizer.encode_plus_batch([get_texts(example, mark_spans) for example in chunk])
        for example_index, (encoding, example) in enumerate(zip(encodings, chunk, strict=True), start):
            fitted, truncated = fit_length(encoding, max_length, on_too_long, example.location)
            features.append(
                Features.from_encodings(example_index, [fitted], label_ids[example_index], truncated=truncated)
            )
    return features


def fit_length(encoding: Encoding, max_length: int, on_too_long: OnTooLong, location: str) -> tuple[Encoding, bool]:
    """Return an encoding of at most `max_length` tokens, and whether tokens were removed."""
    if all(sequence_id is None for sequence_id in encoding.sequence_ids):
        raise InputError(f"{location}: the text is empty; fill it in, or remove it")
    truncated = len(encoding.ids) > max_length
    if truncated and on_too_long == "refuse":
        message = f"{len(encoding.ids)} tokens, and the model takes at most {max_length}"
        raise InputError(
            f"{location}: {message}; shorten it, or truncate it (task.on_too_long or --on-too-long: truncate)"
        )
    return truncate(encoding, max_length), truncated


def get_texts(example: TextExample, mark_spans: bool = False) -> TextOrPair:
    """Return an example's text or pair of texts, with markers around each span if `mark_spans`."""
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
    # From the end, so that earlier offsets stay valid; at equal offsets a span's end comes before another's start.
    for position, _, marker in sorted(edges, reverse=True):
        text = text[:position] + marker + text[position:]
    return text
