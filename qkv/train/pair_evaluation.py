"""Evaluation of generated texts on pairs of source and target."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qkv.checkpoints.inputs import require_tokenizer
from qkv.data import formats
from qkv.data.formats.io import file_suffix
from qkv.data.pair import Pair, SourceWithReferences
from qkv.errors import InputError
from qkv.generation.config import GenerationConfig
from qkv.metrics.registry import check_packages
from qkv.metrics.seq2seq import ERROR_RATES, EvaluationResult, evaluate, reference_loss
from qkv.recipe.schema import PairData, Seq2SeqRecipe
from qkv.tasks.generation import Generation
from qkv.tasks.predictor import Predictor
from qkv.train.evaluation_data import EvaluationData, require_split
from qkv.train.workloads.pair_data import to_examples
from qkv.train.workloads.seq2seq_data import eval_examples, test_metrics

_TEXT_METRICS = ("bleu", "chrf")  # of a checkpoint without a recipe, if their package is installed


@dataclass(frozen=True)
class PairEvaluation:
    """The scores of generated texts on one dataset, the examples, and the losses of their references."""

    scores: EvaluationResult
    examples: list[SourceWithReferences]
    losses: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the scores by name, with intervals and signatures where there are some."""
        metrics = self.scores.metrics
        values: dict[str, Any] = self.scores.values | {"examples": self.scores.num_examples} | self.losses
        intervals = {m.name: [m.interval.low, m.interval.high] for m in metrics if m.interval is not None}
        signatures = {m.name: m.signature for m in metrics if m.signature}
        return values | {k: v for k, v in (("intervals", intervals), ("signatures", signatures)) if v}


def evaluate_pairs(
    predictor: Predictor,
    recipe: Seq2SeqRecipe | None,
    data: EvaluationData,
    metrics: Sequence[str] | None = None,
    *,
    resamples: int = 0,
    free_running: bool = False,
) -> dict[str, PairEvaluation]:
    """Generate a text for each source of each dataset and score it.

    Args:
        predictor: a model that generates text, with its settings.
        recipe: the recipe of its run; None: a plain checkpoint.
        data: the pairs; None as source: a split of the recipe.
        metrics: names of metrics; by default those of the recipe, or BLEU and chrF.
        resamples: bootstrap resamples of the confidence intervals.
        free_running: compute the loss of the references with and without teacher forcing.
    """
    task, bundle = predictor.task, predictor.bundle
    config = task.config if isinstance(task, Generation) else GenerationConfig()
    names = list(metrics) if metrics is not None else _default_metrics(recipe)
    check_packages(names)
    evaluations = {}
    for name, examples in _read_examples(predictor, recipe, data, names).items():
        scores = evaluate(bundle, examples, config, names, resamples=resamples)
        losses = {}
        if free_running:
            losses = {"loss": reference_loss(bundle, examples)}
            losses["loss_free_running"] = reference_loss(bundle, examples, free_running=True)
        evaluations[name] = PairEvaluation(scores, examples, losses)
    return evaluations


def _default_metrics(recipe: Seq2SeqRecipe | None) -> list[str]:
    if recipe is not None:
        return test_metrics(recipe)
    return list(_TEXT_METRICS if importlib.util.find_spec("sacrebleu") else ERROR_RATES)


def _read_examples(
    predictor: Predictor, recipe: Seq2SeqRecipe | None, data: EvaluationData, metrics: list[str]
) -> dict[str, list[SourceWithReferences]]:
    """Return the sources with their references by the name of the dataset."""
    by_source = all(metric in ERROR_RATES for metric in metrics)
    if data.path is None and data.source is not None:
        return {"": to_examples(_pairs_in_memory(data), by_source)}
    if recipe is None:
        return {"": _add_prefix(to_examples(_read_file(data), by_source), predictor)}
    bundle, split = predictor.bundle, data.split or "test"
    section = recipe.data if data.source is None else _replace_data(recipe.data, data, split)
    for dataset in section.datasets_by_name.values():
        require_split(dataset, formats.pair_format_name(str(dataset.format)), split)
    return eval_examples(recipe, split, require_tokenizer(bundle), bundle.model.spec, section, metrics)


def _pairs_in_memory(data: EvaluationData) -> list[Pair]:
    examples = data.examples
    if examples is None:
        from qkv.data.formats.in_memory import read_rows

        examples = read_rows(data.source, data.format, Pair, dict(data.columns))
    wrong = next((example for example in examples if not isinstance(example, Pair | SourceWithReferences)), None)
    if wrong is not None:
        raise InputError(f"data: expected pairs of source and target, not {type(wrong).__name__}")
    return [
        pair for example in examples if isinstance(example, Pair | SourceWithReferences) for pair in example.pairs()
    ]


def _add_prefix(examples: list[SourceWithReferences], predictor: Predictor) -> list[SourceWithReferences]:
    prefix = getattr(predictor.task, "prefix", "")
    return [e if e.source.startswith(prefix) else replace(e, source=prefix + e.source) for e in examples]


def _read_file(data: EvaluationData) -> list[Pair]:
    """Read the pairs of a file without a recipe."""
    if data.path is None:
        raise InputError("this model has no recipe with data; give the pairs (--data FILE)")
    _check_format(data.format)
    files = [str(data.path)] if data.target is None else [str(data.path), str(data.target)]
    name = formats.pair_format_name(data.format or _infer_format(data.path, data.target))
    split = {"valid": "dev"}.get(data.split or "test", data.split or "test")
    examples = formats.read_files(name, files, split=split, columns=data.columns, skip_bad=data.skip_bad)
    return [pair for example in examples for pair in example.pairs()]


def _check_format(format: str | None) -> None:
    known = formats.pair_formats()
    if format is not None and format not in known:
        raise InputError(f"format '{format[:60]}' has no pairs of texts; known: {', '.join(known)}")


def _infer_format(path: Path, target: str | Path | None) -> str:
    return "aligned" if target is not None else formats.infer_format(Pair, path)


def _replace_data(section: PairData, data: EvaluationData, split: str) -> PairData:
    """Return the recipe's data with another file.

    If the recipe has several datasets, the file is one set whose sources include their prefixes.
    """
    path = data.path
    assert path is not None
    _check_format(data.format)
    first = next(iter(section.datasets_by_name.values()))
    format = data.format or _format_of_run(str(first.format), path, data.target)
    files: str | list[str] = str(path) if data.target is None else [str(path), str(data.target)]
    columns = (dict(first.columns) if format == first.format else {}) | dict(data.columns)
    changes: dict[str, Any] = {"format": format, "train": files, split: files, "columns": columns, "hold_out": {}}
    if not section.datasets:
        return replace(section, **changes)
    names = ("max_source_length", "max_target_length", "on_too_long", "on_unknown")
    return PairData(**changes, **{name: getattr(section, name) for name in names})


def _format_of_run(format: str, path: Path, target: str | Path | None) -> str:
    """Return the run's format, unless the file name tells another one."""
    if target is not None:
        return "aligned"
    known_suffixes = formats.get_format(formats.pair_format_name(format)).split_files.suffixes
    if path.is_dir() or file_suffix(path) in known_suffixes:
        return format
    try:
        return formats.infer_format(Pair, path).removeprefix("pairs:")
    except InputError:
        return format
