"""How `predict` answers inputs: by the task that a run was trained for, or by what a model's head says of a text."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.cli.eval_seq2seq import add_prefix, run_prefix
from qkv.cli.input_stream import Input
from qkv.cli.options import check_choice, load_model
from qkv.cli.run_task import task_of_run
from qkv.data.examples import ImageExample, MultipleChoiceExample, QAExample, TaggedExample, TextExample
from qkv.data.tagging_schemes import split_words
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.checkpoints import ModelBundle
    from qkv.generation import GenerationConfig
    from qkv.tasks.base import Task
    from qkv.tasks.predictions import TaskPrediction

_MAX_BATCH_TOKENS = 8192  # tokens that a model reads at once
_QA_FIELDS = {"threshold": "null_score_diff_threshold"}  # options whose field of that task has another name


@dataclass(frozen=True)
class OutputFormat:
    """How an answer is printed."""

    as_json: bool
    with_scores: bool  # each output with its input and its score


def make_predictor(
    model: str,
    device: str | None,
    generation_options: dict[str, Any],
    task_settings: dict[str, Any],
    output_format: OutputFormat,
) -> TaskPredictor | TextPredictor:
    """What answers for a model. `task_settings` are settings that a task's recipe has decided, None where nobody names others.

    A task answers as it was trained and is scored: long texts in windows, several labels by its threshold.
    """
    from qkv.generation import GenerationConfig

    overrides = {name: value for name, value in task_settings.items() if value is not None}
    task = task_of_run(model)
    if task is not None:
        bundle = load_model(model, device)
        return TaskPredictor(_override_task(task, overrides), bundle, generation_options["n_best"], output_format)
    if "on_too_long" in overrides:
        check_choice("--on-too-long", overrides["on_too_long"], "refuse", "truncate")
    if "subword_pooling" in overrides:
        check_choice("--subword-pooling", overrides["subword_pooling"], "first", "mean")
    config = GenerationConfig(**generation_options, **overrides)
    return TextPredictor(load_model(model, device), config, output_format, run_prefix(model))


def _override_task(task: Task[Any], overrides: dict[str, Any]) -> Task[Any]:
    """A task under other settings; those that it does not have are refused."""
    assert dataclasses.is_dataclass(task)
    known = {field.name for field in dataclasses.fields(task)}
    settings = {}
    for name, value in overrides.items():
        field = _QA_FIELDS.get(name, name) if task.name == "question_answering" else name
        if field not in known:
            raise InputError(f"--{name.replace('_', '-')}: the task '{task.name}' has no such setting; leave it out")
        settings[field] = value
    changed: Task[Any] = dataclasses.replace(task, **settings)
    return changed


class TaskPredictor:
    """A fine-tuned run: what its task's head says, with probabilities and places in the text."""

    def __init__(self, task: Task[Any], bundle: ModelBundle, n_best: int, output_format: OutputFormat) -> None:
        if n_best < 1:
            raise InputError(f"n_best must be at least 1, not {n_best}")
        self._task, self._bundle, self._n_best, self._output_format = task, bundle, n_best, output_format
        self._num_truncated = 0

    def __call__(self, inputs: Sequence[Input], first_index: int) -> list[list[str]]:  # noqa: ARG002  # nothing is drawn
        from qkv.tasks.predictions import predict_detailed

        examples = [self._example(item) for item in inputs]
        predictions = predict_detailed(
            self._task, self._bundle, examples, n_best=self._n_best, max_tokens=_MAX_BATCH_TOKENS
        )
        self._num_truncated += sum(prediction.truncated for prediction in predictions)
        return [self._format_lines(item, prediction) for item, prediction in zip(inputs, predictions, strict=True)]

    def _example(self, item: Input) -> Any:
        from qkv.tasks.predictions import parse_example

        if item.example is None:
            return parse_example(self._task, item.text, item.location)
        if self._task.head_kind == "token" and isinstance(item.example, TextExample):  # its spans are what is asked for
            return TaggedExample(item.example.text, *split_words(item.example.text), None, item.location)
        return item.example

    def _format_lines(self, item: Input, prediction: TaskPrediction) -> list[str]:
        if self._output_format.as_json:
            return [json.dumps(item.fields | prediction.fields, ensure_ascii=False)]
        if not self._output_format.with_scores:
            return [_one_line(prediction.text)]
        alternatives = prediction.alternatives or ((prediction.text, prediction.confidence or 0.0),)
        return [f"{_one_line(item.text)}\t{score:.4f}\t{_one_line(name)}" for name, score in alternatives]

    def warnings(self) -> list[str]:
        """What is to be said at the end."""
        subject = "1 text was" if self._num_truncated == 1 else f"{self._num_truncated:,} texts were"
        return [f"{subject} longer than the model takes, and cut"] if self._num_truncated else []


class TextPredictor:
    """Any other model: what it writes, or what its head says."""

    def __init__(
        self, bundle: ModelBundle, config: GenerationConfig, output_format: OutputFormat, prefix: str = ""
    ) -> None:
        self._bundle, self._config, self._output_format, self._spec = bundle, config, output_format, bundle.model.spec
        self._prefix = prefix  # that every source had in training

    def __call__(self, inputs: Sequence[Input], first_index: int) -> list[list[str]]:
        from qkv.generation import predict

        texts = [add_prefix(self._input_texts(item), self._prefix) for item in inputs]
        all_predictions = predict(self._bundle, texts, self._config, [item.location for item in inputs], first_index)
        pairs = zip(inputs, all_predictions, strict=True)
        return [self._format_lines(item, predictions) for item, predictions in pairs]

    @property
    def _has_probabilities(self) -> bool:
        """It writes nothing of its own: the chance of what it says is worth reading as a probability."""
        return self._spec.decoder is None or (self._spec.head is not None and self._spec.head.kind != "lm")

    @property
    def _is_regression(self) -> bool:
        """What it says is a number, not a chance."""
        head = self._spec.head
        return head is not None and head.kind == "sequence" and head.num_outputs == 1

    def _input_texts(self, item: Input) -> str | tuple[str, ...]:
        """A text, or those that belong together."""
        example = item.example
        if isinstance(example, ImageExample):
            if not isinstance(example.image, Path):
                raise InputError(f"{item.location}: this model takes files of pictures; name its run's folder instead")
            return str(example.image)
        if isinstance(example, QAExample):
            return example.question, example.context
        if isinstance(example, MultipleChoiceExample):
            prefix = f"{example.text_pair} " if example.text_pair else ""
            return example.context, *(prefix + option for option in example.choices)
        if example is not None:
            text_pair = getattr(example, "text_pair", None)
            return example.text if text_pair is None else (example.text, text_pair)
        return tuple(item.text.split("\t")) if self._has_probabilities and "\t" in item.text else item.text

    def _format_lines(self, item: Input, predictions: list[Any]) -> list[str]:
        if self._output_format.as_json:
            return [json.dumps(item.fields | {"predictions": [asdict(p) for p in predictions]}, ensure_ascii=False)]
        if not self._output_format.with_scores:
            return [p.text for p in predictions]
        return [f"{item.text}\t{self._format_score(p.score)}\t{p.text}" for p in predictions]

    def _format_score(self, score: float) -> str:
        return f"{math.exp(score) if self._has_probabilities and not self._is_regression else score:.4f}"

    def warnings(self) -> list[str]:
        """What is to be said at the end."""
        return []


def _one_line(text: str) -> str:
    """In one line, without a tab: a text out of a table may have both."""
    return " ".join(text.split()) if any(char in text for char in "\t\n\r") else text
