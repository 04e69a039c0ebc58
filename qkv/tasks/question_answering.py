"""Extractive question answering: the span of a context that answers a question, or no answer.

Question and context are encoded as a pair, and each token is scored as the start and the end of the answer. The [CLS]
token, or the first one without it, represents "no answer" (Devlin et al. 2019, 4.2 and 4.3). A context over the model's
maximum length is read in overlapping windows. If an example lists candidates, as ReCoRD lists entities (Zhang et al.
2018), only their spans are scored. An answer consists of characters of the original context.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from qkv.checkpoints.inputs import select_tokens
from qkv.data.examples import Answer, QAExample, check_span
from qkv.errors import InputError
from qkv.metrics.metric import Metric, Stats
from qkv.metrics.squad import Squad, best_threshold
from qkv.objectives import classification
from qkv.objectives.classification import Inputs
from qkv.objectives.loss import LossSum
from qkv.tasks.base import Task, check_example_type, check_labeled, check_not_empty
from qkv.tasks.features import FeatureOutputs, Features, pack_features
from qkv.tasks.predictions import Alternative, TaskPrediction
from qkv.tokenization.backend import Encoding
from qkv.tokenization.tokenizer import Tokenizer

_CHUNK_SIZE = 256  # questions encoded at a time


class AnswerSpan(NamedTuple):
    """A span of the context with its score, the sum of its start and end logits."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class QAPrediction:
    """The best spans of a context, best first."""

    n_best: tuple[AnswerSpan, ...]
    null_score_diff: float  # score of "no answer" minus score of the best span
    null_score_diff_threshold: float | None = None  # predict "no answer" above it; None: never

    @property
    def text(self) -> str:
        """The answer, empty for "no answer"."""
        return self.text_at(self.null_score_diff_threshold)

    def text_at(self, threshold: float | None) -> str:
        """Return the answer under another threshold."""
        is_null = threshold is not None and self.null_score_diff > threshold
        return "" if is_null or not self.n_best else self.n_best[0].text


class WindowOffsets(NamedTuple):
    """Positions of a window's context tokens."""

    first_token: int  # position of the first context token in the window
    token_starts: Sequence[int]  # first character of each context token
    token_ends: Sequence[int]
    char_start: int  # characters that the window covers, including white space at the ends of the context
    char_end: int
    null_token: int = 0  # position of the token that represents "no answer"


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(Task[QAExample]):
    """The span of a context that answers a question. A prediction is a `QAPrediction`."""

    doc_stride: int = 128
    """Tokens from the start of one window to the start of the next; at most half a window."""

    max_answer_length: int = 30
    """Maximum number of tokens of an answer."""

    n_best_size: int = 20
    """Number of spans that a prediction holds."""

    null_score_diff_threshold: float | None = None
    """Margin by which "no answer" must outscore the best span. None: 0 if training or scored examples include
    unanswerable questions, else "no answer" is never predicted."""

    metric: str = "f1"
    """Metric that selects checkpoints: f1 or exact_match, both in percent."""

    name = "question_answering"
    head_kind = "span"
    example_type = QAExample
    option_aliases: ClassVar[Mapping[str, str]] = {"threshold": "null_score_diff_threshold"}

    def __post_init__(self) -> None:
        for key in ("doc_stride", "max_answer_length", "n_best_size"):
            if getattr(self, key) < 1:
                raise InputError(f"task.{key} must be at least 1, not {getattr(self, key)}")

    def parse_texts(self, texts: Sequence[str], location: str) -> QAExample:
        check_not_empty(texts, location)
        if len(texts) != 2:
            raise InputError(f"{location}: this model takes a question and a text, separated by a tab")
        return QAExample("", texts[0], texts[1], (), location, answerable=None)

    def primary_metric(self, labels: Sequence[str]) -> str:  # noqa: ARG002
        return self.metric

    def labels(self, examples: Sequence[QAExample]) -> tuple[str, ...]:
        check_labeled(self, examples, QAExample)
        return ()

    def infer_settings(self, examples: Sequence[QAExample]) -> dict[str, Any]:
        """Allow the prediction of "no answer" if some questions have none."""
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
                features += self._featurize_windows(example_index, example, encoding, max_length, tokenizer.cls_id)
        return features

    def _featurize_windows(
        self, example_index: int, example: QAExample, encoding: Encoding, max_length: int, cls_id: int | None
    ) -> Iterator[Features]:
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
                window.ids.index(cls_id) if cls_id in window.ids else 0,
            )
            label_ids = () if not _is_labeled(example) else _label_span(window_offsets, example.answers)
            yield Features.from_encodings(
                example_index, [window], label_ids, metadata=window_offsets, truncated=len(encoding.ids) < full_length
            )

    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs:
        source, token_type_ids, _ = pack_features(features, use_token_types)
        label_ids = [feature.labels for feature in features if feature.labels]
        return Inputs(source, token_type_ids, None, torch.tensor(label_ids, dtype=torch.long))  # [B, 2]

    def loss(self, logits: Tensor, batch: Inputs) -> LossSum:
        return classification.span_cross_entropy(logits, batch)

    def postprocess(self, outputs: FeatureOutputs, example: QAExample, labels: Sequence[str]) -> QAPrediction:  # noqa: ARG002
        scores: dict[tuple[int, int], float] = {}
        for feature, logits in outputs:
            for span, score in self._score_spans(feature, logits, example):
                scores[span] = max(score, scores.get(span, score))
        n_best = heapq.nlargest(self.n_best_size, scores.items(), key=lambda item: item[1])
        spans = tuple(AnswerSpan(example.context[start:end], start, end, score) for (start, end), score in n_best)
        # every window must agree on "no answer"
        null_score = min(_null_score(feature, logits) for feature, logits in outputs)
        best_score = 0.0 if _is_conditional(outputs[0][1]) else spans[0].score if spans else 0.0
        null_score_diff = null_score - best_score if spans else float("inf")
        return QAPrediction(spans, null_score_diff, self.null_score_diff_threshold)

    def _score_spans(
        self, feature: Features, logits: Tensor, example: QAExample
    ) -> Iterator[tuple[tuple[int, int], float]]:
        """Yield spans of the context with their scores: the candidates, or the best spans."""
        window_offsets: WindowOffsets = feature.metadata
        num_tokens = len(window_offsets.token_starts)
        context = slice(window_offsets.first_token, window_offsets.first_token + num_tokens)
        if _is_conditional(logits):
            span_scores = _conditional_scores(feature, logits)[context, context]  # [n, n]
        else:
            span_scores = logits[context, None, 0] + logits[None, context, 1]
        if example.candidates:
            for candidate in example.candidates:
                span = _token_span(window_offsets, candidate.start, candidate.start + len(candidate.text))
                if span is not None:
                    yield (candidate.start, candidate.start + len(candidate.text)), float(span_scores[span])
            return
        allowed = torch.ones_like(span_scores, dtype=torch.bool).triu().tril(self.max_answer_length - 1)
        scores, flat_indices = (
            span_scores.masked_fill(~allowed, float("-inf"))
            .flatten()
            .topk(min(4 * self.n_best_size, num_tokens * num_tokens))
        )
        for score, flat_index in zip(scores.tolist(), flat_indices.tolist(), strict=True):
            span = _strip_whitespace(
                example.context,
                window_offsets.token_starts[flat_index // num_tokens],
                window_offsets.token_ends[flat_index % num_tokens],
            )
            if score > float("-inf") and span[0] < span[1]:
                yield span, score

    def describe(
        self,
        prediction: QAPrediction,
        outputs: FeatureOutputs,  # noqa: ARG002
        example: QAExample,  # noqa: ARG002
        labels: Sequence[str],  # noqa: ARG002
        n_best: int,
    ) -> TaskPrediction:
        return _describe(prediction, n_best)

    def predictions_for_scoring(
        self, predictions: Sequence[TaskPrediction], golds: Sequence[Any]
    ) -> list[TaskPrediction]:
        """Allow "no answer" if some of the scored questions have none and no threshold is set."""
        if all(golds) or self.null_score_diff_threshold is not None:
            return list(predictions)
        rescored = [
            _describe(replace(prediction.prediction, null_score_diff_threshold=0.0), 1) for prediction in predictions
        ]
        return [replace(new, truncated=old.truncated) for new, old in zip(rescored, predictions, strict=True)]

    def gold(self, example: QAExample) -> tuple[str, ...]:
        if not _is_labeled(example):
            raise InputError(
                f"{example.location}: the example has no answers; add them, or mark the question as unanswerable"
            )
        return tuple(answer.text for answer in example.answers)

    def metrics(
        self,
        labels: Sequence[str],  # noqa: ARG002
        predictions: Sequence[QAPrediction],  # noqa: ARG002
        golds: Sequence[Sequence[str]],
    ) -> list[Metric[Any, Any]]:
        if all(golds) and self.null_score_diff_threshold is None:
            return [_SquadAtThreshold("1.1")]
        return [
            _SquadAtThreshold("2.0", 0.0 if self.null_score_diff_threshold is None else self.null_score_diff_threshold)
        ]


def best_null_threshold(predictions: Sequence[QAPrediction], examples: Sequence[QAExample]) -> tuple[float, float]:
    """Return the best F1 over all thresholds, in percent, and its threshold, as SQuAD 2.0 reports them."""
    metric = Squad("2.0")
    golds = [tuple(answer.text for answer in example.answers) for example in examples]
    rows = metric.statistics([prediction.text_at(None) for prediction in predictions], golds)
    scores = {str(i): example_scores["f1"] / 100 for i, example_scores in enumerate(metric.per_example(rows))}
    answerable = {str(i): bool(gold) for i, gold in enumerate(golds)}
    return best_threshold(
        scores, answerable, {str(i): prediction.null_score_diff for i, prediction in enumerate(predictions)}
    )


@dataclass(frozen=True)
class _SquadAtThreshold(Squad):
    """SQuAD metrics of the answers under a threshold."""

    threshold: float | None = None

    def statistics(self, hypotheses: Sequence[Any], references: Sequence[Sequence[str]]) -> Stats:
        return super().statistics([prediction.text_at(self.threshold) for prediction in hypotheses], references)


def _describe(prediction: QAPrediction, n_best: int) -> TaskPrediction:
    """Format an answer; probabilities are a softmax over the n best spans and, if it is allowed, "no answer"."""
    span_scores = [answer_span.score for answer_span in prediction.n_best]
    allow_no_answer = prediction.null_score_diff_threshold is not None or not span_scores
    null_score = prediction.null_score_diff + span_scores[0] if span_scores else 0.0
    probs = torch.softmax(torch.tensor([*span_scores, *([null_score] if allow_no_answer else [])]), 0).tolist()
    answers: list[dict[str, Any]] = [
        {"answer": answer.text, "start": answer.start, "end": answer.end, "probability": prob}
        for answer, prob in zip(prediction.n_best, probs, strict=False)
    ]
    has_answer = bool(prediction.text)
    fields = dict(answers[0]) if has_answer else {"answer": "", "start": None, "end": None, "probability": probs[-1]}
    fields["null_score_diff"] = prediction.null_score_diff if span_scores else None
    if n_best > 1:
        fields["answers"] = answers[:n_best]
    ranked = [Alternative(str(answer["answer"]), float(answer["probability"])) for answer in answers]
    ranked = ranked if has_answer else [Alternative("", fields["probability"]), *ranked]
    span = (prediction.n_best[0].start, prediction.n_best[0].end) if has_answer else None
    probability = fields["probability"]
    return TaskPrediction(
        prediction, str(fields["answer"]), probability, tuple(ranked[:n_best]), fields, probability, span=span
    )


def _is_conditional(logits: Tensor) -> bool:
    """Return whether the logits are those of a `ConditionalSpanHead`: start, "no answer", end per start."""
    return logits.shape[1] > 2


def _null_score(feature: Features, logits: Tensor) -> float:
    """Return the score of "no answer": a log-odds ratio of its own, or the sum of the logits of one token."""
    return float(logits[0, 1] if _is_conditional(logits) else logits[feature.metadata.null_token].sum())


def _conditional_scores(feature: Features, logits: Tensor) -> Tensor:
    """Return the log-probability of each start and end; starts that are not among the best have none.  # [N, N]"""
    is_candidate = torch.tensor(list(feature.token_type_ids[0])) != 0
    is_candidate |= ~is_candidate.any()
    start_scores = torch.log_softmax(logits[:, 0].masked_fill(~is_candidate, float("-inf")), 0)
    end_scores = torch.log_softmax(logits[:, 2:].masked_fill(~is_candidate[:, None], float("-inf")), 0)  # [N, starts]
    num_starts = min(end_scores.shape[1], int(is_candidate.sum()))
    starts = torch.sort(start_scores, descending=True, stable=True).indices[:num_starts]
    scores = torch.full((len(logits), len(logits)), float("-inf"))
    scores[starts] = start_scores[starts, None] + end_scores.T[:num_starts]
    return scores


def _check_example(example: QAExample, encoding: Encoding) -> None:
    for answer in (*example.answers, *example.candidates):
        check_span(answer.start, answer.start + len(answer.text), example.context, example.location, "answer")
    for sequence_id, name in enumerate(("question", "context")):
        if sequence_id not in encoding.sequence_ids:
            raise InputError(f"{example.location}: the {name} is empty; fill it in, or remove it")


def _is_labeled(example: QAExample) -> bool:
    return bool(example.answers) or example.answerable is False


def _truncate_question(encoding: Encoding, max_length: int) -> Encoding:
    """Cut the end of a question that would leave less than half of the model's maximum length for the context."""
    question_length = encoding.sequence_ids.count(0)
    excess = question_length - max(1, max_length // 2 - encoding.sequence_ids.count(None))
    if excess <= 0 or len(encoding.ids) <= max_length:
        return encoding
    end = encoding.sequence_ids.index(0) + question_length
    return select_tokens(encoding, [i for i in range(len(encoding.ids)) if not end - excess <= i < end])


def _label_span(window_offsets: WindowOffsets, answers: Sequence[Answer]) -> tuple[float, float]:
    """Return the first and last token of an answer that is entirely in the window, or those of "no answer"."""
    for answer in answers:
        token_span = _token_span(window_offsets, answer.start, answer.start + len(answer.text))
        if token_span is not None:
            return float(window_offsets.first_token + token_span[0]), float(window_offsets.first_token + token_span[1])
    return float(window_offsets.null_token), float(window_offsets.null_token)


def _token_span(window_offsets: WindowOffsets, start: int, end: int) -> tuple[int, int] | None:
    """Return the first and last context token of a character range, None unless the window covers it."""
    if start < window_offsets.char_start or end > window_offsets.char_end:
        return None
    edges = enumerate(zip(window_offsets.token_starts, window_offsets.token_ends, strict=True))
    tokens = [i for i, (first, last) in edges if first < end and start < last]
    return (tokens[0], tokens[-1]) if tokens else None


def _strip_whitespace(text: str, start: int, end: int) -> tuple[int, int]:
    """Strip white space from a character range: byte-level tokens include the space before their word."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end
