"""Extractive question answering: the stretch of a text that answers a question, or that there is none.

The question and the text go in as a pair, and each token is scored as the first and as the last of the answer; that
there is none is said at the sequence's first token, BERT's [CLS] (Devlin et al. 2019, 4.2 and 4.3). A text that is
longer than the model takes is read in windows that overlap. Where the answer is one of some candidates, as ReCoRD's
entities (Zhang et al. 2018), only their stretches compete. What is answered are characters of the text as it was given.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from qkv.data.examples import Answer, QAExample, check_span
from qkv.errors import InputError
from qkv.checkpoints.inputs import select_tokens
from qkv.metrics.metric import Metric, Stats
from qkv.metrics.squad import Squad, best_threshold
from qkv.objectives import classification
from qkv.objectives.classification import Inputs
from qkv.objectives.loss import LossSum
from qkv.tasks.base import Features, check_example_type, check_labeled, pack_features
from qkv.tokenization.backend import Encoding
from qkv.tokenization.tokenizer import Tokenizer

NO_ANSWER = (0.0, 0.0)  # first and last token, where the window holds no answer
_CHUNK_SIZE = 256  # questions framed at a time


class AnswerSpan(NamedTuple):
    """Characters of a text, and how strongly they are said to be the answer: the sum of two logits."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class QAPrediction:
    """The best stretches, best first, and by how much the score of "no answer" exceeds that of the best."""

    n_best: tuple[AnswerSpan, ...]
    null_score_diff: float
    null_score_diff_threshold: float | None = None  # above which there is none; None: there is always an answer

    @property
    def text(self) -> str:
        """The answer; empty where there is none."""
        return self.text_at(self.null_score_diff_threshold)

    def text_at(self, threshold: float | None) -> str:
        """The answer under another threshold."""
        is_null = threshold is not None and self.null_score_diff > threshold
        return "" if is_null or not self.n_best else self.n_best[0].text


class WindowOffsets(NamedTuple):
    """Where the tokens of a window that may answer stand: the first of them in the window, and their characters."""

    first_token: int
    token_starts: Sequence[int]
    token_ends: Sequence[int]
    char_start: int  # the characters that the window covers, those without a token at the text's own ends included
    char_end: int


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering:
    """See `qkv.tasks.base.Task`. A prediction is a `QAPrediction`."""

    doc_stride: int = 128  # tokens from one window to the next; at most half a window
    max_answer_length: int = 30  # tokens of an answer
    n_best_size: int = 20  # how many stretches a prediction has
    # how much higher "no answer" has to score than the best stretch; None: 0 where questions without answer are learned
    # from or scored, else there always is one
    null_score_diff_threshold: float | None = None
    metric: str = "f1"  # or exact_match; both out of 100

    name = "question_answering"
    head_kind = "span"
    head_overrides: ClassVar[dict[str, Any]] = {}
    example_type = QAExample

    def __post_init__(self) -> None:
        for key in ("doc_stride", "max_answer_length", "n_best_size"):
            if getattr(self, key) < 1:
                raise InputError(f"task.{key}: at least 1, not {getattr(self, key)}")

    def primary_metric(self, labels: Sequence[str]) -> str:  # noqa: ARG002
        return self.metric

    def labels(self, examples: Sequence[QAExample]) -> tuple[str, ...]:
        check_labeled(self, examples, QAExample)
        return ()

    def infer_settings(self, examples: Sequence[QAExample]) -> dict[str, Any]:
        """Settings that nobody gave and that the training examples tell: some have no answer, so that may be said."""
        has_unanswerable = any(_is_labeled(example) and not example.answers for example in examples)
        return {"null_score_diff_threshold": 0.0} if has_unanswerable and self.null_score_diff_threshold is None else {}

    def featurize(
        self,
        examples: Sequence[QAExample],
        tokenizer: Tokenizer,
        labels: Sequence[str],  # noqa: ARG002
        max_length: int,
    ) -> list[Features]:
        check_example_type(self.name, examples, QAExample)
        features: list[Features] = []
        for start in range(0, len(examples), _CHUNK_SIZE):
            chunk = examples[start : start + _CHUNK_SIZE]
            encodings = tokenizer.encode_plus_batch([(example.question, example.context) for example in chunk])
            for example_index, (encoding, example) in enumerate(zip(encodings, chunk, strict=True), start):
                features += self._featurize_windows(example_index, example, encoding, max_length)
        return features

    def _featurize_windows(self, example_index: int, example: QAExample, encoding: Encoding, max_length: int) -> Iterator[Features]:
        _check_example(example, encoding)
        full_length = len(encoding.ids)
        encoding = _truncate_question(encoding, max_length)
        context_start, context_length = encoding.sequence_ids.index(1), encoding.sequence_ids.count(1)
        window_length = max_length - (len(encoding.ids) - context_length)
        starts = [0]
        while starts[-1] + window_length < context_length:
            starts.append(starts[-1] + min(self.doc_stride, max(1, window_length // 2)))
        prefix, suffix = range(context_start), range(context_start + context_length, len(encoding.ids))
        for start in starts:
            end = min(start + window_length, context_length)
            window = select_tokens(encoding, [*prefix, *range(context_start + start, context_start + end), *suffix])
            offsets = window.offsets[context_start : context_start + end - start]
            window_offsets = WindowOffsets(
                context_start,
                array("i", [token_start for token_start, _ in offsets]),
                array("i", [token_end for _, token_end in offsets]),
                offsets[0][0] if start else 0,
                offsets[-1][1] if end < context_length else len(example.context),
            )
            label_ids = () if not _is_labeled(example) else _label_span(window_offsets, example.answers)
            yield Features.from_encodings(example_index, [window], label_ids, metadata=window_offsets, truncated=len(encoding.ids) < full_length)

    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs:
        source, token_type_ids, _ = pack_features(features, use_token_types)
        label_ids = [feature.labels for feature in features if feature.labels]
        return Inputs(source, token_type_ids, None, torch.tensor(label_ids, dtype=torch.long))  # [B, 2]

    def loss(self, logits: Tensor, batch: Inputs) -> LossSum:
        return classification.span_cross_entropy(logits, batch)

    def postprocess(self, outputs: Sequence[tuple[Features, Tensor]], example: QAExample, labels: Sequence[str]) -> QAPrediction:  # noqa: ARG002
        scores: dict[tuple[int, int], float] = {}
        for feature, logits in outputs:
            for span, score in self._score_spans(feature.metadata, logits, example):
                scores[span] = max(score, scores.get(span, score))
        n_best = heapq.nlargest(self.n_best_size, scores.items(), key=lambda item: item[1])
        null_score = min(float(logits[0].sum()) for _, logits in outputs)  # each window has to say that it has none
        spans = tuple(AnswerSpan(example.context[start:end], start, end, score) for (start, end), score in n_best)
        null_score_diff = null_score - spans[0].score if spans else float("inf")
        return QAPrediction(spans, null_score_diff, self.null_score_diff_threshold)

    def _score_spans(self, window_offsets: WindowOffsets, logits: Tensor, example: QAExample) -> Iterator[tuple[tuple[int, int], float]]:
        """Some characters of the context with their score: the candidates', or the best of all."""
        num_tokens = len(window_offsets.token_starts)
        context_logits = logits[window_offsets.first_token : window_offsets.first_token + num_tokens]  # [n, 2]
        if example.candidates:
            for candidate in example.candidates:
                span = _token_span(window_offsets, candidate.start, candidate.start + len(candidate.text))
                if span is not None:
                    score = float(context_logits[span[0], 0] + context_logits[span[1], 1])
                    yield (candidate.start, candidate.start + len(candidate.text)), score
            return
        span_scores = context_logits[:, None, 0] + context_logits[None, :, 1]  # [n, n]
        allowed = torch.ones_like(span_scores, dtype=torch.bool).triu().tril(self.max_answer_length - 1)
        scores, flat_indices = span_scores.masked_fill(~allowed, float("-inf")).flatten().topk(min(4 * self.n_best_size, num_tokens * num_tokens))
        for score, flat_index in zip(scores.tolist(), flat_indices.tolist(), strict=True):
            span = _strip_whitespace(example.context, window_offsets.token_starts[flat_index // num_tokens], window_offsets.token_ends[flat_index % num_tokens])
            if score > float("-inf") and span[0] < span[1]:
                yield span, score

    def gold(self, example: QAExample) -> tuple[str, ...]:
        if not _is_labeled(example):
            raise InputError(f"{example.location}: nobody has said what the answer is; give it, or none")
        return tuple(answer.text for answer in example.answers)

    def metrics(
        self,
        labels: Sequence[str],  # noqa: ARG002
        predictions: Sequence[QAPrediction],  # noqa: ARG002
        golds: Sequence[Sequence[str]],
    ) -> list[Metric[Any, Any]]:
        if all(golds) and self.null_score_diff_threshold is None:
            return [_SquadAtThreshold("1.1")]
        return [_SquadAtThreshold("2.0", 0.0 if self.null_score_diff_threshold is None else self.null_score_diff_threshold)]


def best_null_threshold(predictions: Sequence[QAPrediction], examples: Sequence[QAExample]) -> tuple[float, float]:
    """The best F1 that any threshold gives on these questions, out of 100, and that threshold, as SQuAD 2.0 has it."""
    metric = Squad("2.0")
    golds = [tuple(answer.text for answer in example.answers) for example in examples]
    rows = metric.statistics([prediction.text_at(None) for prediction in predictions], golds)
    scores = {str(i): example_scores["f1"] / 100 for i, example_scores in enumerate(metric.per_example(rows))}
    answerable = {str(i): bool(gold) for i, gold in enumerate(golds)}
    return best_threshold(scores, answerable, {str(i): prediction.null_score_diff for i, prediction in enumerate(predictions)})


@dataclass(frozen=True)
class _SquadAtThreshold(Squad):
    """SQuAD's figures of what is answered under a threshold."""

    threshold: float | None = None

    def statistics(self, hypotheses: Sequence[Any], references: Sequence[Sequence[str]]) -> Stats:
        return super().statistics([prediction.text_at(self.threshold) for prediction in hypotheses], references)


def _check_example(example: QAExample, encoding: Encoding) -> None:
    for answer in (*example.answers, *example.candidates):
        check_span(answer.start, answer.start + len(answer.text), example.context, example.location, "answer")
    for sequence_id, name in enumerate(("question", "context")):
        if sequence_id not in encoding.sequence_ids:
            raise InputError(f"{example.location}: the {name} is empty; fill it in, or remove it")


def _is_labeled(example: QAExample) -> bool:
    return bool(example.answers) or example.answerable is False


def _truncate_question(encoding: Encoding, max_length: int) -> Encoding:
    """Without the end of a question that would leave the context less than half of the model."""
    question_length = encoding.sequence_ids.count(0)
    excess = question_length - max(1, max_length // 2 - encoding.sequence_ids.count(None))
    if excess <= 0 or len(encoding.ids) <= max_length:
        return encoding
    end = encoding.sequence_ids.index(0) + question_length
    return select_tokens(encoding, [i for i in range(len(encoding.ids)) if not end - excess <= i < end])


def _label_span(window_offsets: WindowOffsets, answers: Sequence[Answer]) -> tuple[float, float]:
    """The first and last token, in the window, of an answer that it holds whole."""
    for answer in answers:
        token_span = _token_span(window_offsets, answer.start, answer.start + len(answer.text))
        if token_span is not None:
            return float(window_offsets.first_token + token_span[0]), float(window_offsets.first_token + token_span[1])
    return NO_ANSWER


def _token_span(window_offsets: WindowOffsets, start: int, end: int) -> tuple[int, int] | None:
    """The first and last of the tokens that hold these characters, if the window holds them all."""
    if start < window_offsets.char_start or end > window_offsets.char_end:
        return None
    edges = enumerate(zip(window_offsets.token_starts, window_offsets.token_ends, strict=True))
    tokens = [i for i, (first, last) in edges if first < end and start < last]
    return (tokens[0], tokens[-1]) if tokens else None


def _strip_whitespace(text: str, start: int, end: int) -> tuple[int, int]:
    """Without the white space at both ends: byte-level tokens hold the space before their word."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end


def make(**settings: Any) -> QuestionAnswering:
    return QuestionAnswering(**settings)
