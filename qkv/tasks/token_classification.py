"""Token classification: a tag for each word, where a model reads pieces of words (Devlin et al. 2019, 5.3).

A sentence that is longer than the model takes is read in windows that overlap; a word is judged, and learned, in that
window alone in which it stands furthest from an edge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from qkv.data.examples import Span, TaggedExample, TextExample
from qkv.data.labels import check_labels, collect_labels
from qkv.data.tagging_schemes import OUTSIDE, detect_scheme, spans_to_tags
from qkv.errors import InputError
from qkv.checkpoints.inputs import select_tokens
from qkv.metrics.classification import F1, TokenAccuracy, collect_label_set
from qkv.metrics.entities import SCHEMES, EntityF1, Scheme, collect_entity_types, get_entities
from qkv.metrics.metric import Metric
from qkv.objectives import classification
from qkv.objectives.classification import Inputs
from qkv.objectives.loss import LossSum
from qkv.tasks.base import Features, check_example_type, check_labeled, location_range, pack_features
from qkv.tokenization.backend import Encoding
from qkv.tokenization.tokenizer import Tokenizer

Tags = tuple[str, ...]


class Window(NamedTuple):
    """The words [begin, end) of a sentence that a model reads at once, and those of them that it judges there."""

    start: int
    end: int
    scored: tuple[int, ...]


class TagMetadata(NamedTuple):
    """Which word each row of logits is of and, where the mean of its pieces is judged, of which each token is one."""

    logit_word_ids: tuple[int, ...]  # [M]
    token_word_ids: tuple[int | None, ...]  # [T]; None: a token that is read and not judged


@dataclass(frozen=True, kw_only=True)
class TokenClassification:
    """See `qkv.tasks.base.Task`. A prediction is a tag for each of the example's words."""

    subword_pooling: Literal["first", "all", "mean"] = "first"  # of a word's pieces: which learn its tag, and what then says it
    window_stride: int | None = None  # words from one window to the next; None: half a window
    on_too_long: Literal["windows", "truncate", "refuse"] = "windows"
    scheme: Scheme = "lenient"  # how broken chunks are read, where tags are chunks
    metric: str | None = None  # None: f1_micro of entities where tags are chunks (BIO, BIOES), else accuracy

    name = "token_classification"
    head_kind = "token"
    example_type = TaggedExample

    def __post_init__(self) -> None:
        for key, allowed in (("subword_pooling", ("first", "all", "mean")), ("on_too_long", ("windows", "truncate", "refuse"))):
            if getattr(self, key) not in allowed:
                raise InputError(f"task.{key}: one of {', '.join(allowed)}, not '{getattr(self, key)}'")
        if self.scheme not in SCHEMES:
            raise InputError(f"task.scheme: one of {', '.join(SCHEMES)}, not '{self.scheme}'")
        if self.window_stride is not None and self.window_stride < 1:
            raise InputError(f"task.window_stride: at least one word, not {self.window_stride}")

    @property
    def head_overrides(self) -> dict[str, str]:
        return {"subword_pooling": "mean" if self.subword_pooling == "mean" else "first"}

    def primary_metric(self, labels: Sequence[str]) -> str:
        return self.metric or ("f1_micro" if _has_entities(labels) else "accuracy")

    def labels(self, examples: Sequence[TaggedExample | TextExample]) -> tuple[str, ...]:
        check_labeled(self, examples, TaggedExample, TextExample)
        labels = tuple(collect_labels([_as_tagged(example) for example in examples]))
        if labels in ((), (OUTSIDE,)):
            raise InputError(f"{location_range(examples)}: no word of any example has a tag; is it the right column or format?")
        return labels

    def featurize(
        self, examples: Sequence[TaggedExample | TextExample], tokenizer: Tokenizer, labels: Sequence[str], max_length: int
    ) -> list[Features]:
        check_example_type(self.name, examples, TaggedExample, TextExample)
        sentences = [_as_tagged(sentence) for sentence in examples]
        for sentence in sentences:
            _check_example(sentence)
        check_labels(labels, sentences)
        features: list[Features] = []
        for example_index, sentence in enumerate(sentences):
            encoding = tokenizer.encode_pretokenized(sentence.words)
            features += self._featurize_windows(example_index, sentence, encoding, labels, max_length)
        return features

    def _featurize_windows(
        self, example_index: int, example: TaggedExample, encoding: Encoding, labels: Sequence[str], max_length: int
    ) -> Iterator[Features]:
        """Its windows; none where no word of it has a token."""
        token_positions: dict[int, list[int]] = {}  # of a word's tokens
        for position, word in enumerate(encoding.word_ids):
            if word is not None:
                token_positions.setdefault(word, []).append(position)
        if not token_positions:
            return
        special_positions = [position for position, word in enumerate(encoding.word_ids) if word is None]
        room = max_length - len(special_positions)
        truncated = len(encoding.ids) > max_length
        if truncated and self.on_too_long == "refuse":
            message = f"{len(encoding.ids)} tokens, and the model takes at most {max_length}"
            raise InputError(f"{example.location}: {message}; shorten it, or set task.on_too_long: windows")
        words = sorted(token_positions)
        windows = make_windows([min(len(token_positions[word]), room) for word in words], room, self.window_stride)
        for window in windows[:1] if self.on_too_long == "truncate" else windows:
            positions_of_word = {words[i]: token_positions[words[i]][:room] for i in range(window.start, window.end)}
            window_positions = sorted([*special_positions, *(position for positions in positions_of_word.values() for position in positions)])
            scored_words = [words[i] for i in window.scored] if len(windows) > 1 and self.on_too_long == "windows" else [*positions_of_word]
            yield self._make_feature(example_index, example, encoding, window_positions, scored_words, labels, truncated and self.on_too_long == "truncate")

    def _make_feature(
        self,
        example_index: int,
        example: TaggedExample,
        encoding: Encoding,
        window_positions: Sequence[int],
        scored_words: Sequence[int],
        labels: Sequence[str],
        truncated: bool,
    ) -> Features:
        window_encoding = select_tokens(encoding, window_positions)
        scored_word_set = set(scored_words)
        token_word_ids = tuple(word if word in scored_word_set else None for word in window_encoding.word_ids)
        scored_positions = [position for position, word in enumerate(token_word_ids) if word is not None]
        first_positions = [position for position in scored_positions if position == 0 or token_word_ids[position - 1] != token_word_ids[position]]
        label_positions = scored_positions if self.subword_pooling == "all" else first_positions
        logit_word_ids = tuple(word for position in label_positions if (word := token_word_ids[position]) is not None)
        label_ids: tuple[float, ...] = ()
        if example.tags is not None:
            index_of = {tag: float(i) for i, tag in enumerate(labels)}
            word_starts = set(first_positions)
            tags = [example.tags[word] for word in logit_word_ids]
            label_ids = tuple(
                index_of[tag] if position in word_starts else index_of.get(_continuation_tag(tag), index_of[tag])
                for tag, position in zip(tags, label_positions, strict=True)
            )
        metadata = TagMetadata(logit_word_ids, token_word_ids if self.subword_pooling == "mean" else ())
        return Features.from_encodings(example_index, [window_encoding], label_ids, label_positions=tuple(label_positions), metadata=metadata, truncated=truncated)

    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs:
        source, token_type_ids, positions = pack_features(features, use_token_types)
        label_ids = torch.tensor([int(x) for feature in features for x in feature.labels])
        if self.subword_pooling != "mean":
            return Inputs(source, token_type_ids, positions, label_ids)
        return Inputs(source, token_type_ids, None, label_ids, word_ids=tuple(feature.metadata.token_word_ids for feature in features))

    def loss(self, logits: Tensor, batch: Inputs) -> LossSum:
        return classification.cross_entropy(logits, batch)

    def postprocess(
        self, outputs: Sequence[tuple[Features, Tensor]], example: TaggedExample | TextExample, labels: Sequence[str]
    ) -> tuple[str, ...]:
        tag_of_word: dict[int, str] = {}
        for feature, logits in outputs:
            for word, label_index in zip(feature.metadata.logit_word_ids, logits.argmax(-1).tolist(), strict=True):
                tag_of_word.setdefault(word, labels[label_index])  # a word's first piece comes first
        most_common = Counter(tag_of_word.values()).most_common(1)
        # a word without any token, or behind the cut: outside of all chunks, or what most words of its sentence are
        fallback_tag = OUTSIDE if OUTSIDE in labels else most_common[0][0] if most_common else labels[0]
        return tuple(tag_of_word.get(word_index, fallback_tag) for word_index in range(len(_as_tagged(example).words)))

    def gold(self, example: TaggedExample | TextExample) -> Tags:
        tags = _as_tagged(example).tags
        if tags is None:
            raise InputError(f"{example.location}: has no tags; give them")
        return tags

    def metrics(
        self, labels: Sequence[str], predictions: Sequence[Tags], golds: Sequence[Tags]
    ) -> list[Metric[Any, Any]]:
        if _has_entities(labels):
            types = collect_entity_types(predictions, golds, scheme=self.scheme)
            return [EntityF1(types, self.scheme), TokenAccuracy()]
        return [TokenAccuracy(), F1(collect_label_set(labels, predictions, golds), "macro")]


def make_windows(word_lengths: Sequence[int], room: int, stride: int | None) -> list[Window]:
    """Windows over words of these many tokens, each of at most `room`; every word is judged in exactly one."""
    edges: list[tuple[int, int]] = []
    start = 0
    while not edges or edges[-1][1] < len(word_lengths):
        end, num_tokens = start, 0
        while end < len(word_lengths) and (end == start or num_tokens + word_lengths[end] <= room):
            num_tokens += word_lengths[end]
            end += 1
        edges.append((start, end))
        # never further than the window goes, and where it can be half of it, so that a word has company on both sides
        start += max(1, min(stride or end - start, (end - start + 1) // 2))
    scored: list[list[int]] = [[] for _ in edges]
    for word in range(len(word_lengths)):
        containing = [i for i, (first, last) in enumerate(edges) if first <= word < last]
        scored[max(containing, key=lambda i: _edge_distance(word, *edges[i], len(word_lengths)))].append(word)
    return [Window(*edge, tuple(words)) for edge, words in zip(edges, scored, strict=True) if words]


def _edge_distance(word: int, start: int, end: int, count: int) -> float:
    """How far a word stands from an edge of a window; the sentence's own ends are none."""
    left = word - start if start else math.inf
    right = end - 1 - word if end < count else math.inf
    return min(left, right)


def tags_to_spans(example: TaggedExample | TextExample, tags: Sequence[str], scheme: Scheme = "lenient") -> tuple[Span, ...]:
    """The entities that tags mark, as characters of the example's text."""
    sentence = _as_tagged(example)
    ends = [start + len(word) for start, word in zip(sentence.word_starts, sentence.words, strict=True)]
    entity_list = get_entities(tags, scheme)
    return tuple(Span(sentence.word_starts[entity.start], ends[entity.end - 1], entity.type) for entity in entity_list)


def _has_entities(labels: Sequence[str]) -> bool:
    return detect_scheme([labels]) is not None


def _continuation_tag(tag: str) -> str:
    """The tag of a word's further pieces: a chunk begins once."""
    return f"I-{tag[2:]}" if tag.startswith("B-") else tag


def _as_tagged(example: TaggedExample | TextExample) -> TaggedExample:
    """A text with spans is one whose words are tagged."""
    return spans_to_tags(example) if isinstance(example, TextExample) else example


def _check_example(example: TaggedExample) -> None:
    if not example.words:
        raise InputError(f"{example.location}: has no words; fill it in, or remove it")
    if example.tags is not None and len(example.tags) != len(example.words):
        message = f"{len(example.words)} words have {len(example.tags)} tags"
        raise InputError(f"{example.location}: {message}; give each word one")


def make(**settings: Any) -> TokenClassification:
    return TokenClassification(**settings)
