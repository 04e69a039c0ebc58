"""What a model says of an example, for people and programs: the prediction with probabilities and places in the text.

A task's `postprocess` gives what its metrics take. Here stands what else its logits say; they are those that `postprocess` has seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv.checkpoints import ModelBundle
from qkv.data.examples import ImageExample, MultipleChoiceExample, QAExample, TaggedExample, TextExample
from qkv.data.tagging_schemes import detect_scheme, spans_to_tags, split_words
from qkv.errors import InputError
from qkv.metrics.entities import get_entities
from qkv.tasks.base import Features, Task, predict_logits

if TYPE_CHECKING:
    from qkv.tasks.question_answering import QAPrediction

FeatureOutputs = Sequence[tuple[Features, Tensor]]


@dataclass(frozen=True)
class TaskPrediction:
    """A prediction as the metrics take it, and all else."""

    prediction: Any
    alternatives: tuple[tuple[str, float], ...]  # what else it might be: texts and probabilities, likeliest first
    fields: dict[str, Any] = field(default_factory=dict)  # as JSON
    confidence: float | None = None  # the probability of the prediction; a number has none
    word_probs: tuple[float, ...] = ()  # the probability of each word's tag
    span: tuple[int, int] | None = None  # where an answer stands in its context
    truncated: bool = False  # the model saw less than there is

    @property
    def text(self) -> str:
        """The prediction as one line of text."""
        if isinstance(self.prediction, frozenset):
            return ", ".join(self.fields["labels"])
        if "answer" in self.fields:
            return str(self.fields["answer"])
        return str(self.fields["text"]) if "choice" in self.fields else self.alternatives[0][0]

    def error_confidence(self, gold: Any) -> float | None:
        """The confidence in what is wrong: of tags in the surest wrong one."""
        if not self.word_probs:
            return self.confidence
        word_tags = zip(self.word_probs, self.prediction, gold, strict=True)
        return max((prob for prob, predicted_tag, gold_tag in word_tags if predicted_tag != gold_tag), default=self.confidence)


def predict_detailed(task: Task[Any], bundle: ModelBundle, examples: Sequence[Any], *, n_best: int = 1, max_tokens: int = 16384) -> list[TaskPrediction]:
    """What a model says of each example, in their order; `n_best` is how much of what else it might be is told."""
    outputs_per_example = predict_logits(task, bundle, examples, max_tokens)
    head = bundle.model.spec.head
    assert head is not None  # or there would be no logits
    predictions = []
    for outputs, example in zip(outputs_per_example, examples, strict=True):
        prediction = task.postprocess(outputs, example, head.labels)
        formatter = _FORMATTERS.get(task.name, _format_default)
        predictions.append(formatter(task, outputs, example, head.labels, prediction, n_best))
    return predictions


def apply_null_threshold(task: Task[Any], predictions: Sequence[TaskPrediction], golds: Sequence[Any]) -> list[TaskPrediction]:
    """As the task's metrics take it: where some questions have no answer, a model may say that there is none."""
    if task.name != "question_answering" or all(golds) or getattr(task, "null_score_diff_threshold", None) is not None:
        return list(predictions)
    return [replace(_format_qa_prediction(replace(prediction.prediction, null_score_diff_threshold=0.0), 1), truncated=prediction.truncated) for prediction in predictions]


def parse_example(task: Task[Any], line: str, location: str) -> Any:
    """A line of text as the task takes it: texts that belong together have a tab between them, a picture is a file."""
    text_pairs = getattr(task, "text_pairs", None)
    texts = [line] if task.name in ("token_classification", "image_classification") or text_pairs is False else line.split("\t")
    if not all(text.strip() for text in texts):
        raise InputError(f"{location}: is empty; give some text")
    if task.name == "image_classification":
        return ImageExample(Path(line), location)
    if task.name in ("text_classification", "regression", "multi_label"):
        if text_pairs and len(texts) == 1:
            raise InputError(f"{location}: this model takes two texts, with a tab between them")
        if len(texts) > 2:
            raise InputError(f"{location}: this model takes one text or two, not {len(texts)}")
        return TextExample(texts[0], location, texts[1] if len(texts) == 2 else None)
    if task.name == "token_classification":
        return TaggedExample(line, *split_words(line), None, location)
    expected = {"question_answering": "a question and a text", "multiple_choice": "a text and its choices"}[task.name]
    if len(texts) < 2 or (task.name == "question_answering" and len(texts) > 2):
        raise InputError(f"{location}: this model takes {expected}, with a tab between them")
    if task.name == "question_answering":
        return QAExample("", texts[0], texts[1], (), location, answerable=None)
    return MultipleChoiceExample(texts[0], tuple(texts[1:]), None, location)


def format_example(example: Any) -> str:
    """An example as a line of text; the inverse of `parse_example`."""
    if isinstance(example, QAExample):
        return f"{example.question}\t{example.context}"
    if isinstance(example, MultipleChoiceExample):
        return "\t".join([example.context, *([example.text_pair] if example.text_pair else []), *example.choices])
    if isinstance(example, ImageExample):
        return str(example.image) if isinstance(example.image, Path) else example.location
    text_pair = getattr(example, "text_pair", None)
    return str(example.text) if text_pair is None else f"{example.text}\t{text_pair}"


# ---- a task each ----------------------------------------------------------------------------------------------------


def _format_default(
    task: Task[Any],  # noqa: ARG001
    outputs: FeatureOutputs,
    example: Any,  # noqa: ARG001
    labels: Sequence[str],  # noqa: ARG001
    prediction: Any,
    n_best: int,  # noqa: ARG001
) -> TaskPrediction:
    """Of a task that is not known here: what its metrics take."""
    return TaskPrediction(prediction, ((str(prediction), math.nan),), {"prediction": str(prediction)}, truncated=_is_truncated(outputs))


def _format_label(
    task: Task[Any],  # noqa: ARG001
    outputs: FeatureOutputs,
    example: Any,  # noqa: ARG001
    labels: Sequence[str],
    prediction: str,
    n_best: int,
) -> TaskPrediction:
    probs = torch.softmax(outputs[0][1][0], -1).tolist()
    ranked = _rank(labels, probs)
    confidence = probs[labels.index(prediction)]
    fields = {"label": prediction, "probability": confidence} | ({"probabilities": dict(ranked[:n_best])} if n_best > 1 else {})
    return TaskPrediction(prediction, ranked[:n_best], fields, confidence, truncated=_is_truncated(outputs))


def _format_number(
    task: Task[Any],  # noqa: ARG001
    outputs: FeatureOutputs,
    example: Any,  # noqa: ARG001
    labels: Sequence[str],  # noqa: ARG001
    prediction: float,
    n_best: int,  # noqa: ARG001
) -> TaskPrediction:
    return TaskPrediction(prediction, ((f"{prediction:.4f}", prediction),), {"value": prediction}, truncated=_is_truncated(outputs))


def _format_multi_label(
    task: Task[Any],  # noqa: ARG001
    outputs: FeatureOutputs,
    example: Any,  # noqa: ARG001
    labels: Sequence[str],
    prediction: frozenset[str],
    n_best: int,
) -> TaskPrediction:
    probs = torch.sigmoid(outputs[0][1][0]).tolist()
    ranked = _rank(labels, probs)
    predicted_labels = {name: prob for name, prob in ranked if name in prediction}
    fields: dict[str, Any] = {"labels": predicted_labels} | ({"probabilities": dict(ranked[:n_best])} if n_best > 1 else {})
    # that each is as it was said, were they independent
    confidence = math.prod(prob if name in prediction else 1 - prob for name, prob in ranked)
    alternatives = ranked[:n_best] if n_best > 1 else tuple(predicted_labels.items())
    return TaskPrediction(prediction, alternatives, fields, confidence, truncated=_is_truncated(outputs))


def _format_tags(
    task: Task[Any], outputs: FeatureOutputs, example: Any, labels: Sequence[str], prediction: Sequence[str], n_best: int
) -> TaskPrediction:
    sentence = spans_to_tags(example) if isinstance(example, TextExample) else example
    word_probs = _word_probs(outputs, len(sentence.words))
    spans = [(start, start + len(word)) for start, word in zip(sentence.word_starts, sentence.words, strict=True)]
    words = [
        {"text": word, "tag": tag, "start": char_start, "end": char_end, "probability": prob}
        for word, tag, (char_start, char_end), prob in zip(sentence.words, prediction, spans, word_probs, strict=True)
    ]
    fields: dict[str, Any] = {}
    has_entities = detect_scheme([labels]) is not None
    if has_entities:
        fields["entities"] = [
            {
                "text": sentence.text[spans[entity.start][0] : spans[entity.end - 1][1]],
                "type": entity.type,
                "start": spans[entity.start][0],
                "end": spans[entity.end - 1][1],
                "probability": math.prod(word_probs[entity.start : entity.end]),
            }
            for entity in get_entities(prediction, getattr(task, "scheme", "lenient"))
        ]
    if not has_entities or n_best > 1:
        fields["words"] = words
    tagged_text = " ".join(f"{word}/{tag}" for word, tag in zip(sentence.words, prediction, strict=True))
    prob = math.prod(word_probs)
    return TaskPrediction(tuple(prediction), ((tagged_text, prob),), fields, prob, tuple(word_probs), truncated=_is_truncated(outputs))


def _word_probs(outputs: FeatureOutputs, num_words: int) -> list[float]:
    """The probability of each word's tag; a word that no row of logits is of has none of its own."""
    prob_of_word: dict[int, float] = {}
    for feature, logits in outputs:
        probs = torch.softmax(logits, -1).amax(-1).tolist() if len(logits) else []
        for word, prob in zip(feature.metadata.logit_word_ids, probs, strict=True):
            prob_of_word.setdefault(word, prob)
    return [prob_of_word.get(word, 1.0) for word in range(num_words)]


def _format_choice(
    task: Task[Any],  # noqa: ARG001
    outputs: FeatureOutputs,
    example: MultipleChoiceExample,
    labels: Sequence[str],  # noqa: ARG001
    prediction: int,
    n_best: int,
) -> TaskPrediction:
    probs = torch.softmax(outputs[0][1][:, 0], 0).tolist()
    fields: dict[str, Any] = {"choice": prediction, "text": example.choices[prediction]}
    fields["probability"] = probs[prediction]
    if n_best > 1:
        fields["probabilities"] = probs
    return TaskPrediction(prediction, _rank(example.choices, probs)[:n_best], fields, probs[prediction], truncated=_is_truncated(outputs))


def _format_answer(
    task: Task[Any],  # noqa: ARG001
    outputs: FeatureOutputs,
    example: QAExample,  # noqa: ARG001
    labels: Sequence[str],  # noqa: ARG001
    prediction: QAPrediction,
    n_best: int,
) -> TaskPrediction:
    return replace(_format_qa_prediction(prediction, n_best), truncated=_is_truncated(outputs))


def _format_qa_prediction(prediction: QAPrediction, n_best: int) -> TaskPrediction:
    """Probabilities are those among the stretches that were kept, and "no answer" where that may be said."""
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
    ranked = [(str(answer["answer"]), float(answer["probability"])) for answer in answers]
    ranked = ranked if has_answer else [("", fields["probability"]), *ranked]
    span = (prediction.n_best[0].start, prediction.n_best[0].end) if has_answer else None
    return TaskPrediction(prediction, tuple(ranked[:n_best]), fields, fields["probability"], span=span)


def _rank(names: Sequence[str], probs: Sequence[float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(zip(names, probs, strict=True), key=lambda pair: -pair[1]))


def _is_truncated(outputs: FeatureOutputs) -> bool:
    return any(feature.truncated for feature, _ in outputs)


_FORMATTERS: dict[str, Callable[[Task[Any], FeatureOutputs, Any, Sequence[str], Any, int], TaskPrediction]] = {
    "text_classification": _format_label,
    "regression": _format_number,
    "multi_label": _format_multi_label,
    "token_classification": _format_tags,
    "multiple_choice": _format_choice,
    "question_answering": _format_answer,
    "image_classification": _format_label,
}
