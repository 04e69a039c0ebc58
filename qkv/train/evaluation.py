"""Evaluation of any model on any data: tasks, generated texts, and the perplexity of text.

qkv.evaluate("runs/sentiment", "test.csv")
qkv.evaluate("runs/sentiment", split="valid")
qkv.evaluate(qkv.load("gpt2"), "book.txt")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from qkv.checkpoints import ModelBundle
from qkv.checkpoints.arguments import as_bundle
from qkv.data import formats
from qkv.data.examples import Examples
from qkv.data.pair import Pair, SourceWithReferences
from qkv.errors import InputError, check_choice, check_flag, check_names, check_number, check_path, check_type
from qkv.generation.config import GenerationConfig
from qkv.recipe.schema import FinetuneRecipe, PretrainingRecipe, Seq2SeqRecipe
from qkv.tasks.base import PredictionTask, Task, get_task
from qkv.tasks.evaluation import TaskEvaluation, evaluate_task
from qkv.tasks.input_files import labeled_format
from qkv.tasks.predictor import Predictor
from qkv.train.evaluation_data import EvaluationData, Split, require_split
from qkv.train.pair_evaluation import PairEvaluation, evaluate_pairs
from qkv.train.text_evaluation import evaluate_text
from qkv.train.workloads.task_data import read_split

Kind = Literal["task", "pairs", "text"]
_MAX_RESAMPLES = 1_000_000


def evaluate(
    model: ModelBundle | Predictor | str | Path,
    data: Any = None,
    *,
    task: str | PredictionTask[Any] | None = None,
    format: str | None = None,
    columns: Mapping[str, Any] | None = None,
    split: Split | None = None,
    target: str | Path | None = None,
    metrics: Sequence[str] | None = None,
    generation_config: GenerationConfig | None = None,
    skip_bad: bool = False,
    resamples: int = 0,
) -> dict[str, Any]:
    """Return the scores of a model by name, and the number of `examples` (of text: of `tokens`).

        qkv.evaluate("runs/sentiment", "test.csv")["accuracy"]
        qkv.evaluate(bundle, frame, columns={"text": "review", "label": "stars"}, resamples=1000)

    A model with a head is scored by the metrics of its task, an encoder-decoder by those of the texts that it
    generates, a language model by the perplexity of text.

    Args:
        model: a loaded model, a predictor, or the path of a run or checkpoint.
        data: a file or folder; a data frame, a list of dicts or other rows; or a list of examples. None: a split of
            the recipe that the model was trained with.
        task: the task, if it is not that of the run or of the model's head.
        format: format of the file; by default that of the run's data, or by the file name.
        columns: the column of each field, such as `{"text": "review", "label": "stars"}`; by default the run's.
        split: "train", "valid" or "test" of the recipe or of a folder; by default test, or the held-out text.
        target: file of the targets, aligned with the sources in `data`.
        metrics: metrics of generated texts; by default the recipe's, or BLEU and chrF.
        generation_config: how texts are generated; by default as the recipe says, or greedily.
        skip_bad: skip examples that cannot be read; `skipped` is then their number.
        resamples: bootstrap resamples; with some, `intervals` has the 95 % confidence interval of each score.
    """
    _check_arguments(data, format, columns, split, target, metrics, generation_config, skip_bad, resamples)
    predictor = model if isinstance(model, Predictor) else Predictor(as_bundle(model), _make_task(task))
    source = EvaluationData(data, target, format, dict(columns or {}), split, skip_bad)
    kind = evaluation_kind(predictor, source)
    if kind != "pairs" and (metrics is not None or target is not None or generation_config is not None):
        raise InputError("metrics, target and generation_config are for pairs of texts; leave them out")
    if kind == "task":
        return _summarize_task(run_task_evaluation(predictor, source), resamples)
    if kind == "text":
        return evaluate_text(predictor.bundle, _pretraining_recipe(predictor), source.path, format, split, columns)
    if generation_config is not None:
        predictor = Predictor(predictor.bundle, predictor.task, generation_config)
    return summarize_pairs(run_pair_evaluation(predictor, source, metrics, resamples=resamples))


def _check_arguments(
    data: object,
    format: object,
    columns: object,
    split: object,
    target: object,
    metrics: object,
    generation_config: object,
    skip_bad: object,
    resamples: Any,
) -> None:
    """Refuse arguments of `evaluate` that have another type; None is left to the defaults."""
    if isinstance(data, str | Path):
        check_path(data, "data", "a file or a table")
    if format is not None:
        check_type(format, str, "format", "the name of a format")
    if columns is not None:
        check_type(columns, Mapping, "columns", "a dict of columns by field")
    if split is not None:
        check_choice(split, get_args(Split), "split")
    if target is not None:
        check_path(target, "target", "a file")
    if metrics is not None:
        check_names(metrics, "metrics", "names of metrics")
    if generation_config is not None:
        check_type(generation_config, GenerationConfig, "generation_config", "a qkv.GenerationConfig")
    check_flag(skip_bad, "skip_bad")
    check_number(resamples, "resamples", 0, _MAX_RESAMPLES)


def evaluation_kind(predictor: Predictor, data: EvaluationData) -> Kind:
    """Return what is measured: the metrics of a task, of generated texts, or the perplexity of text."""
    if data.examples is not None and isinstance(data.examples[0], Pair | SourceWithReferences):
        return "pairs"
    recipe = predictor.recipe
    if isinstance(predictor.task, Task):
        return "task"
    if isinstance(recipe, Seq2SeqRecipe) or data.target is not None:
        return "pairs"
    if isinstance(recipe, PretrainingRecipe) or predictor.task.name in ("generation", "fill_mask"):
        is_text_model = recipe is not None or not predictor.bundle.model.is_encoder_decoder
        return "text" if is_text_model else "pairs"
    remedy = "give a model with a head for labels, a language model, or an encoder-decoder"
    raise InputError(f"the task '{predictor.task.name}' of this model has no metrics; {remedy}")


def run_task_evaluation(predictor: Predictor, data: EvaluationData) -> TaskEvaluation:
    """Read the data and evaluate a task on it."""
    recipe = predictor.recipe if isinstance(predictor.recipe, FinetuneRecipe) else None
    examples = read_task_examples(predictor.task, recipe, data)
    metric = None if recipe is None else recipe.validation.metric
    return evaluate_task(predictor, examples, metric, skip_bad=data.skip_bad)


def run_pair_evaluation(
    predictor: Predictor,
    data: EvaluationData,
    metrics: Sequence[str] | None = None,
    *,
    resamples: int = 0,
    free_running: bool = False,
) -> dict[str, PairEvaluation]:
    """Read the pairs and evaluate generated texts on them, by the name of the dataset."""
    recipe = predictor.recipe if isinstance(predictor.recipe, Seq2SeqRecipe) else None
    return evaluate_pairs(predictor, recipe, data, metrics, resamples=resamples, free_running=free_running)


def read_task_examples(task: PredictionTask[Any], recipe: FinetuneRecipe | None, data: EvaluationData) -> Examples[Any]:
    """Read the labeled examples of a file, of data in memory, or of a split of the recipe."""
    if data.examples is not None:
        return Examples(data.examples)
    if data.source is None:
        return _read_recipe_split(recipe, data)
    path = data.path
    if path is None:
        from qkv.data.formats.in_memory import read_rows

        columns = (dict(recipe.data.columns) if recipe is not None else {}) | dict(data.columns)
        examples: Examples[Any] = read_rows(data.source, data.format, task.example_type, columns)
        return examples
    file_format = labeled_format(path, task.example_type, recipe, data.format, data.columns)
    columns = dict(file_format.columns)
    if task.name == "regression" and "regression" in formats.reader_options(file_format.name):
        columns.setdefault("regression", True)
    has_splits = formats.has_splits(file_format.name, path)
    if data.split is not None and not has_splits:
        raise InputError(f"{path}: is one file, so there is no split to choose; leave out the split")
    split = {"valid": "dev"}.get(data.split or "test", data.split or "test")
    return formats.read(file_format.name, path, split=split, columns=columns, skip_bad=data.skip_bad)


def _read_recipe_split(recipe: FinetuneRecipe | None, data: EvaluationData) -> Examples[Any]:
    if recipe is None:
        raise InputError("this model has no recipe with data; give the labeled examples (--data FILE)")
    split = data.split or "test"
    section = recipe.data
    is_fold = split == "valid" and section.fold is not None
    if not is_fold:
        require_split(section, section.format, split)
    try:
        return read_split(replace(section, skip_bad=data.skip_bad), split)
    except InputError as error:
        if section.skip_bad and not data.skip_bad:
            raise InputError(f"{error} (training skipped such examples; --skip-bad skips them here)") from None
        raise


def _summarize_task(evaluation: TaskEvaluation, resamples: int) -> dict[str, Any]:
    scores, intervals = evaluation.scores(resamples)
    result: dict[str, Any] = {**scores, "examples": len(evaluation.golds)}
    if evaluation.num_unlabeled:
        result["unlabeled"] = evaluation.num_unlabeled
    if evaluation.skipped:
        result["skipped"] = len(evaluation.skipped)
    return result | ({"intervals": intervals} if intervals else {})


def summarize_pairs(evaluations: Mapping[str, PairEvaluation]) -> dict[str, Any]:
    """Return the scores of one dataset, or of several by the name of the dataset."""
    summaries = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
    return summaries if len(summaries) > 1 else next(iter(summaries.values()))


def _make_task(task: str | PredictionTask[Any] | None) -> PredictionTask[Any] | None:
    return get_task(task) if isinstance(task, str) else task


def _pretraining_recipe(predictor: Predictor) -> PretrainingRecipe | None:
    return predictor.recipe if isinstance(predictor.recipe, PretrainingRecipe) else None
