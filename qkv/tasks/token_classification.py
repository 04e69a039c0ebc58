"""Token classification: one tag per word of a model that reads subwords (Devlin et al. 2019, 5.3).

A sentence over the model's maximum length is read in overlapping windows. Each word is trained and predicted in one
window only, the one in which it is farthest from an edge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from qkv.checkpoints.inputs import select_tokens
from qkv.data.examples import TaggedExample, TextExample
from qkv.data.labels import check_labels, collect_labels
from qkv.data.tagging_schemes import OUTSIDE, detect_scheme, spans_to_tags
from qkv.data.word_splitting import DEFAULT_RULES, WordRules, learn_word_rules, split_at_spaces, split_by_rules
from qkv.errors import InputError, quote
from qkv.metrics.classification import F1, TokenAccuracy, collect_label_set
from qkv.metrics.entities import ENTITY_SCHEMES, EntityF1, EntityScheme, collect_entity_types, get_entities
from qkv.metrics.metric import Metric
from qkv.objectives import classification
from qkv.objectives.classification import Inputs
from qkv.objectives.loss import LossSum
from qkv.tasks.base import Task, check_example_type, check_labeled, check_not_empty, check_setting, location_range
from qkv.tasks.features import FeatureOutputs, Features, pack_features
from qkv.tasks.predictions import Alternative, TaskPrediction
from qkv.tokenization.backend import Encoding
from qkv.tokenization.tokenizer import Tokenizer

Tags = tuple[str, ...]


class Window(NamedTuple):
    """The words [start, end) of a sentence that form one model input, and the words that are predicted in it."""

    start: int
    end: int
    scored: tuple[int, ...]


class TagMetadata(NamedTuple):
    """The words of logits and tokens."""

    logit_word_ids: tuple[int, ...]  # [M] the word of each row of logits
    token_word_ids: tuple[
        int | None, ...
    ]  # [T] the word of each token, None for a token without a prediction; () unless subwords are averaged


@dataclass(frozen=True, kw_only=True)
class TokenClassification(Task[TaggedExample]):
    """One tag per word. A prediction is a tuple of tags."""

    subword_pooling: Literal["first", "all", "mean"] = "first"
    """Subwords that represent a word: the first; all in training and the first in prediction; or their mean."""

    window_stride: int | None = None
    """Words from the start of one window to the start of the next; None: half a window."""

    on_too_long: Literal["windows", "truncate", "refuse"] = "windows"
    """Treatment of a sentence over the model's maximum length."""

    pre_split: bool = False
    """Whether the words of an input line are separated by white space; False: a line is split by `word_rules`."""

    word_rules: Mapping[str, Any] | None = None
    """Which punctuation of raw text is part of a word; None: as in the training data (`qkv.data.word_splitting`)."""

    scheme: EntityScheme = "lenient"
    """How invalid chunks are read if the tags are chunks (BIO, BIOES)."""

    metric: str | None = None
    """Metric that selects checkpoints; None: f1_micro of entities if the tags are chunks, else accuracy."""

    name = "token_classification"
    has_alternatives = False
    head_kind = "token"
    metric_data_kind = "tags"
    example_type = TaggedExample

    def __post_init__(self) -> None:
        check_setting("subword_pooling", self.subword_pooling, ("first", "all", "mean"))
        check_setting("on_too_long", self.on_too_long, ("windows", "truncate", "refuse"))
        check_setting("scheme", self.scheme, ENTITY_SCHEMES)
        if self.word_rules is not None:
            WordRules.from_json(self.word_rules)
        if self.window_stride is not None and self.window_stride < 1:
            raise InputError(f"task.window_stride must be at least one word, not {self.window_stride}")

    @property
    def head_overrides(self) -> Mapping[str, Any]:
        return {"subword_pooling": "mean" if self.subword_pooling == "mean" else "first"}

    def parse_line(self, line: str, location: str) -> TaggedExample:
        return self.parse_texts([line], location)  # a tab is white space between words

    def parse_texts(self, texts: Sequence[str], location: str) -> TaggedExample:
        if len(texts) != 1:
            raise InputError(f"{location}: this model takes one text, not {len(texts)}")
        check_not_empty(texts, location)
        words = split_at_spaces(texts[0]) if self.pre_split else split_by_rules(texts[0], self._word_rules)
        return TaggedExample(texts[0], *words, None, location)

    @cached_property
    def _word_rules(self) -> WordRules:
        return DEFAULT_RULES if self.word_rules is None else WordRules.from_json(self.word_rules)

    def infer_settings(self, examples: Sequence[TaggedExample | TextExample]) -> dict[str, Any]:
        if self.word_rules is not None:
            return {}
        return {"word_rules": learn_word_rules(map(_as_tagged, examples)).to_json()}

    def from_example(self, example: Any) -> TaggedExample:
        check_example_type(self.name, [example], TaggedExample, TextExample)
        return _as_tagged(example)

    def primary_metric(self, labels: Sequence[str]) -> str:
        return self.metric or ("f1_micro" if _has_entities(labels) else "accuracy")

    def labels(self, examples: Sequence[TaggedExample | TextExample]) -> tuple[str, ...]:
        check_labeled(self, examples, TaggedExample, TextExample)
        labels = tuple(collect_labels([_as_tagged(example) for example in examples]))
        if labels in ((), (OUTSIDE,)):
            raise InputError(
                f"{location_range(examples)}: no word of any example has a tag; check the column and the format"
            )
        if len(labels) == 1:
            message = f"all words have the tag {quote(labels[0])}; check the column (the option tag) and the format"
            raise InputError(f"{location_range(examples)}: {message}")
        return labels

    def featurize(
        self,
        examples: Sequence[TaggedExample | TextExample],
        tokenizer: Tokenizer,
        labels: Sequence[str],
        max_length: int,
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
        """Yield the features of each window of a sentence; none if no word has a token."""
        token_positions: dict[int, list[int]] = {}  # word -> positions of its tokens
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
            window_positions = sorted(
                [*special_positions, *(position for positions in positions_of_word.values() for position in positions)]
            )
            scored_words = (
                [words[i] for i in window.scored]
                if len(windows) > 1 and self.on_too_long == "windows"
                else [*positions_of_word]
            )
            yield self._make_feature(
                example_index,
                example,
                encoding,
                window_positions,
                scored_words,
                labels,
                truncated and self.on_too_long == "truncate",
            )

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
        first_positions = [
            position
            for position in scored_positions
            if position == 0 or token_word_ids[position - 1] != token_word_ids[position]
        ]
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
        return Features.from_encodings(
            example_index,
            [window_encoding],
            label_ids,
            label_positions=tuple(label_positions),
            metadata=metadata,
            truncated=truncated,
        )

    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs:
        source, token_type_ids, positions = pack_features(features, use_token_types)
        label_ids = torch.tensor([int(x) for feature in features for x in feature.labels])
        if self.subword_pooling != "mean":
            return Inputs(source, token_type_ids, positions, label_ids)
        return Inputs(
            source,
            token_type_ids,
            None,
            label_ids,
            word_ids=tuple(feature.metadata.token_word_ids for feature in features),
        )

    def loss(self, logits: Tensor, batch: Inputs) -> LossSum:
        return classification.cross_entropy(logits, batch)

    def postprocess(self, outputs: FeatureOutputs, example: TaggedExample | TextExample, labels: Sequence[str]) -> Tags:
        tag_of_word: dict[int, str] = {}
        for feature, logits in outputs:
            for word, label_index in zip(feature.metadata.logit_word_ids, logits.argmax(-1).tolist(), strict=True):
                tag_of_word.setdefault(word, labels[label_index])  # the first subword comes first
        most_common = Counter(tag_of_word.values()).most_common(1)
        # tag of a word without a token or removed by truncation: outside of all chunks, or the sentence's most common
        fallback_tag = OUTSIDE if OUTSIDE in labels else most_common[0][0] if most_common else labels[0]
        return tuple(tag_of_word.get(word_index, fallback_tag) for word_index in range(len(_as_tagged(example).words)))

    def describe(
        self,
        prediction: Tags,
        outputs: FeatureOutputs,
        example: TaggedExample | TextExample,
        labels: Sequence[str],
        n_best: int,  # noqa: ARG002
    ) -> TaskPrediction:
        sentence = _as_tagged(example)
        word_probs = _word_probs(outputs, len(sentence.words))
        spans = [(start, start + len(word)) for start, word in zip(sentence.word_starts, sentence.words, strict=True)]
        fields: dict[str, Any] = {}
        if _has_entities(labels):
            fields["entities"] = [
                {
                    "text": sentence.text[spans[entity.start][0] : spans[entity.end - 1][1]],
                    "type": entity.type,
                    "start": spans[entity.start][0],
                    "end": spans[entity.end - 1][1],
                    "probability": math.prod(word_probs[entity.start : entity.end]),
                }
                for entity in get_entities(prediction, self.scheme)
            ]
        fields["words"] = [
            {"text": word, "tag": tag, "start": start, "end": end, "probability": prob}
            for word, tag, (start, end), prob in zip(sentence.words, prediction, spans, word_probs, strict=True)
        ]
        text = " ".join(f"{word}/{tag}" for word, tag in zip(sentence.words, prediction, strict=True))
        probability = math.prod(word_probs)
        return TaskPrediction(
            prediction, text, probability, (Alternative(text, probability),), fields, probability, tuple(word_probs)
        )

    def gold(self, example: TaggedExample | TextExample) -> Tags:
        tags = _as_tagged(example).tags
        if tags is None:
            raise InputError(f"{example.location}: has no tags; add them")
        return tags

    def format_gold(self, gold: Tags) -> str:
        return " ".join(gold)

    def metrics(
        self, labels: Sequence[str], predictions: Sequence[Tags], golds: Sequence[Tags]
    ) -> list[Metric[Any, Any]]:
        if _has_entities(labels):
            types = collect_entity_types(predictions, golds, scheme=self.scheme)
            return [EntityF1(types, self.scheme), TokenAccuracy()]
        return [TokenAccuracy(), F1(collect_label_set(predictions, golds), "macro")]


def make_windows(word_lengths: Sequence[int], room: int, stride: int | None) -> list[Window]:
    """Return windows of at most `room` tokens over words of the given lengths; each word is scored in exactly one."""
    edges: list[tuple[int, int]] = []
    start = 0
    while not edges or edges[-1][1] < len(word_lengths):
        end, num_tokens = start, 0
        while end < len(word_lengths) and (end == start or num_tokens + word_lengths[end] <= room):
            num_tokens += word_lengths[end]
            end += 1
        edges.append((start, end))
        # at most half a window, so that each word has context on both sides in some window
        start += max(1, min(stride or end - start, (end - start + 1) // 2))
    scored: list[list[int]] = [[] for _ in edges]
    first_window = end_window = 0  # starts and ends of windows rise, so the windows of a word are neighbors
    for word in range(len(word_lengths)):
        while edges[first_window][1] <= word:
            first_window += 1
        while end_window < len(edges) and edges[end_window][0] <= word:
            end_window += 1
        containing = range(first_window, end_window)
        scored[max(containing, key=lambda i: _edge_distance(word, *edges[i], len(word_lengths)))].append(word)
    return [Window(*edge, tuple(words)) for edge, words in zip(edges, scored, strict=True) if words]


def _edge_distance(word: int, start: int, end: int, count: int) -> float:
    """Return a word's distance from the nearest window edge; the ends of the sentence are not edges."""
    from_start = word - start if start else math.inf
    from_end = end - 1 - word if end < count else math.inf
    return min(from_start, from_end)


def _has_entities(labels: Sequence[str]) -> bool:
    return detect_scheme([labels]) is not None


def _continuation_tag(tag: str) -> str:
    """Return the tag of a word's later subwords: B- becomes I-, since a chunk begins only once."""
    return f"I-{tag[2:]}" if tag.startswith("B-") else tag


def _as_tagged(example: TaggedExample | TextExample) -> TaggedExample:
    """Return a text with spans as a sentence with BIO tags."""
    return spans_to_tags(example) if isinstance(example, TextExample) else example


def _word_probs(outputs: FeatureOutputs, num_words: int) -> list[float]:
    """Return the probability of each word's tag, 1 for a word without logits."""
    prob_of_word: dict[int, float] = {}
    for feature, logits in outputs:
        probs = torch.softmax(logits, -1).amax(-1).tolist() if len(logits) else []
        for word, prob in zip(feature.metadata.logit_word_ids, probs, strict=True):
            prob_of_word.setdefault(word, prob)
    return [prob_of_word.get(word, 1.0) for word in range(num_words)]


def _check_example(example: TaggedExample) -> None:
    if not example.words:
        raise InputError(f"{example.location}: has no words; fill it in, or remove it")
    if example.tags is not None and len(example.tags) != len(example.words):
        message = f"{len(example.words)} words have {len(example.tags)} tags"
        raise InputError(f"{example.location}: {message}; give each word one tag")
