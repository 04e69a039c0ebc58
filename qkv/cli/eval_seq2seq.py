"""`qkv eval` of a seq2seq run: error rates of tokens, or metrics of texts with confidence intervals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.cli.options import check_choice, load_model
from qkv.cli.tables import print_table
from qkv.errors import InputError
from qkv.reports.numbers import format_interval, format_number

if TYPE_CHECKING:
    from qkv.generation import GenerationConfig
    from qkv.metrics import EvaluationResult
    from qkv.metrics.seq2seq import MetricResult
    from qkv.recipe.schema import PairData, Seq2SeqRecipe

DEFAULT_RESAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class Seq2SeqEvalOptions:
    """Options of the command line; None: the recipe's setting."""

    data: Path | None = None
    target: Path | None = None
    format: str | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    on_too_long: str | None = None
    on_unknown: str | None = None
    free_running: bool = False
    resamples: int | None = None


def evaluate_seq2seq(
    run: Path,
    recipe: Seq2SeqRecipe,
    options: Seq2SeqEvalOptions,
    output: Path | None,
    as_json: bool,
    device: str | None,
) -> None:
    """Print the metrics of each dataset, and write the predictions."""
    from qkv.files import atomic_write_text
    from qkv.metrics import evaluate, reference_loss
    from qkv.train.workloads.seq2seq_data import eval_examples, test_metrics

    if options.resamples is not None and options.resamples < 0:
        raise InputError("--num-resamples must be 0 or more")
    config, data = _generation_config(recipe, options), _test_data(recipe, options)
    bundle = load_model(run, device)
    if bundle.source_tokenizer is None:
        raise InputError(f"{run}: the run has no tokenizer; train it again, or restore its files")
    rows, results = [], {}
    for name, examples in eval_examples(recipe, "test", bundle.source_tokenizer, bundle.model.spec, data).items():
        resamples = DEFAULT_RESAMPLES if options.resamples is None else options.resamples
        scores = evaluate(bundle, examples, config, test_metrics(recipe), resamples=resamples)
        losses = {}
        if options.free_running:
            losses = {"loss": reference_loss(bundle, examples)}
            losses["loss_free_running"] = reference_loss(bundle, examples, free_running=True)
        results[name] = scores, losses
        rows += [[e.source, p, *e.references] for e, p in zip(examples, scores.predictions, strict=True)]
    if output is not None:
        atomic_write_text(output, "".join("\t".join(" ".join(cell.split()) for cell in row) + "\n" for row in rows))
    if as_json:
        summaries = {name: _to_dict(*result) for name, result in results.items()}
        print(json.dumps(summaries if len(summaries) > 1 else next(iter(summaries.values())), ensure_ascii=False))
        return
    for index, (name, result) in enumerate(results.items()):
        if len(results) > 1:
            print(f"{chr(10) if index else ''}{name}")
        _print_scores(*result)


def _test_data(recipe: Seq2SeqRecipe, options: Seq2SeqEvalOptions) -> PairData:
    """Return the recipe's data, or that of --data.

    If the recipe has several datasets, --data is one file whose sources include their prefixes.
    """
    from qkv.recipe.schema import PairData

    data = recipe.data
    if options.data is None:
        if options.target is not None or options.format is not None:
            raise InputError("--target and --format go with --data")
        return data
    format_name = options.format or str(next(iter(data.datasets_by_name.values())).format)
    check_choice("--format", format_name, *_known_formats())
    files = str(options.data) if options.target is None else [str(options.data), str(options.target)]
    if not data.datasets:
        return dataclasses.replace(data, format=format_name, test=files)
    names = ("max_source_length", "max_target_length", "on_too_long", "on_unknown")
    settings = {name: getattr(data, name) for name in names}
    return PairData(format=format_name, train=files, test=files, **settings)


def _known_formats() -> tuple[str, ...]:
    from qkv.data.formats import pair_formats

    return tuple(pair_formats())


def _generation_config(recipe: Seq2SeqRecipe, options: Seq2SeqEvalOptions) -> GenerationConfig:
    """Return the settings of the recipe's generation task with the changes of the command line."""
    from qkv.tasks.generation import Generation

    settings = {
        "num_beams": options.num_beams,
        "length_penalty": options.length_penalty,
        "on_too_long": options.on_too_long and check_choice("--on-too-long", options.on_too_long, "refuse", "truncate"),
        "on_unknown": options.on_unknown and check_choice("--on-unknown", options.on_unknown, "refuse", "replace"),
    }
    changes = {name: value for name, value in settings.items() if value is not None}
    return Generation.from_recipe(recipe).with_settings(changes).config


def _to_dict(scores: EvaluationResult, losses: dict[str, float]) -> dict[str, Any]:
    fields: dict[str, Any] = scores.values | {"examples": scores.num_examples} | losses
    intervals = {f.name: [f.interval.low, f.interval.high] for f in scores.metrics if f.interval is not None}
    signatures = {f.name: f.signature for f in scores.metrics if f.signature}
    return fields | ({"intervals": intervals} if intervals else {}) | ({"signatures": signatures} if signatures else {})


def _print_scores(scores: EvaluationResult, losses: dict[str, float]) -> None:
    from qkv.metrics.seq2seq import ERROR_RATES

    values, text_metrics = scores.values, [f for f in scores.metrics if f.name not in ERROR_RATES]
    print(f"examples            {scores.num_examples:>8,}")
    if "token_error_rate" in values:
        print(
            f"token error rate    {values['token_error_rate']:>8.2%}   (phoneme error rate, where tokens are phonemes)"
        )
    if "sequence_error_rate" in values:
        print(
            f"sequence error rate {values['sequence_error_rate']:>8.2%}   (word error rate, where a sequence is a word)"
        )
    if losses:
        print(f"loss, teacher-forced{losses['loss']:>8.4f}   (mean negative log-probability per token)")
        print(f"loss, free-running  {losses['loss_free_running']:>8.4f}")
    if not text_metrics:
        return
    has_intervals = any(metric.interval for metric in text_metrics)
    rows = [[f.name, format_number(f.value, f.decimals)] for f in text_metrics]
    if has_intervals:
        intervals = [
            format_interval(f.interval.low, f.interval.high, f.decimals) if f.interval else "" for f in text_metrics
        ]
        rows = [[*row, interval] for row, interval in zip(rows, intervals, strict=True)]
    print()
    print_table(["metric", "value", *(["95 % interval"] if has_intervals else [])], rows)
    print()
    for signature, names in _metrics_by_signature(text_metrics).items():
        print(f"{', '.join(names)}: {signature}")


def _metrics_by_signature(metrics: list[MetricResult]) -> dict[str, list[str]]:
    """Return the names of the metrics of each signature."""
    by_signature: dict[str, list[str]] = {}
    for metric in metrics:
        if metric.signature:
            by_signature.setdefault(metric.signature, []).append(metric.name)
    return by_signature
