"""Scoring a model on examples: decode for real, compare with every reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qkv.checkpoints import ModelBundle
from qkv.data.batching import EncodedPairs, evaluation_batches
from qkv.data.pair import Pair, SourceWithReferences, group_by_source
from qkv.errors import InputError
from qkv.generation import GenerationConfig, Prediction, predict, token_log_probs
from qkv.generation.generate import eval_mode
from qkv.generation.log_probs import encode_without_eos
from qkv.metrics.error_rate import error_rates
from qkv.metrics.metric import Metric
from qkv.metrics.significance import Interval, bootstrap
from qkv.nn import EncoderDecoder
from qkv.objectives.loss import to_device
from qkv.objectives.seq2seq import make_inputs
from qkv.tokenization.tokenizer import Tokenizer

ERROR_RATES = ("token_error_rate", "sequence_error_rate")  # of tokens and of whole sequences
_MAX_LOG_PROBS = 2**26  # log-probabilities at a time
# the figures of a metric that are told: the others say why a figure is what it is
_REPORTED = {"rouge": ("rouge1", "rouge2", "rougeL", "rougeLsum")}


@dataclass(frozen=True)
class MetricResult:
    """One figure over all examples, with what a reader must know to get it again."""

    name: str
    value: float
    interval: Interval | None = None
    signature: str = ""
    decimals: int = 4


@dataclass(frozen=True)
class EvaluationResult:
    """The figures that were asked for, and what was predicted for each example."""

    metrics: tuple[MetricResult, ...]
    predictions: list[str]

    @property
    def num_examples(self) -> int:
        return len(self.predictions)

    @property
    def values(self) -> dict[str, float]:
        return {metric.name: metric.value for metric in self.metrics}

    @property
    def token_error_rate(self) -> float:
        """The token error rate, a fraction."""
        return self.values["token_error_rate"]

    @property
    def sequence_error_rate(self) -> float:
        """The share of examples whose output equals none of their references."""
        return self.values["sequence_error_rate"]


def evaluate(
    bundle: ModelBundle,
    data: Sequence[SourceWithReferences] | Sequence[Pair],
    generation_config: GenerationConfig | None = None,
    metrics: Sequence[str] = ERROR_RATES,
    *,
    resamples: int = 0,
) -> EvaluationResult:
    """Figures of the best outputs; any listed reference counts as right. Pairs are grouped by their source.

    `metrics` are the error rates of tokens and sequences (token_error_rate, sequence_error_rate), or those of texts by their names in
    `qkv.metrics.registry`, which read an output as a person would: bleu (cased and lower-cased), chrf, ter, rouge and so
    on. `resamples`: how many their intervals rest on; 0: none are made.
    """
    examples = [e for e in data if isinstance(e, SourceWithReferences)] or group_by_source([p for p in data if isinstance(p, Pair)])
    predictions = predict(bundle, [e.source for e in examples], generation_config, [e.location for e in examples])
    best = [hypotheses[0] if hypotheses else Prediction("", 0.0, False) for hypotheses in predictions]
    texts, references = [p.text for p in best], [e.references for e in examples]
    results: list[MetricResult] = []
    rates: dict[str, float | int] | None = None
    for name in dict.fromkeys(metrics):
        if name in ERROR_RATES:
            rates = rates or _token_error_rates(_target_tokenizer(bundle), texts, references)
            results.append(MetricResult(name, float(rates[name])))
        else:
            results += compute_text_metrics(name, texts, references, resamples)
    return EvaluationResult(tuple(results), texts)


def compute_text_metrics(
    name: str, texts: Sequence[str], references: Sequence[Sequence[str]], resamples: int = 0
) -> list[MetricResult]:
    """A metric's figures of texts that somebody wrote."""
    results = []
    for display_name, metric in _make_metrics(name):
        stats = metric.statistics(texts, references)
        values, intervals = metric.compute(stats), bootstrap(metric, stats, resamples=resamples) if resamples else {}
        signature = metric.signature(references)
        for score_name, result_name in [(reported_name, reported_name) for reported_name in _REPORTED[name]] if name in _REPORTED else [(metric.name, display_name)]:
            results.append(MetricResult(result_name, values[score_name], intervals.get(score_name), signature, metric.decimals))
    return results


def _make_metrics(name: str) -> Iterator[tuple[str, Metric[Any, Any]]]:
    """What is measured under a name. Papers on small sets report BLEU of lower-cased text: it stands beside."""
    from qkv.metrics.registry import (  # itself of many parts, not all of them always there
        METRICS,
        MetricOptions,
        get_metric,
    )

    if name not in METRICS or METRICS[name].data_kind != "texts":
        raise InputError(f"'{name}' is no metric of texts; known: {', '.join(_text_metric_names())}")
    yield name, get_metric(name).make(MetricOptions(), ())
    if name == "bleu":
        yield "bleu_lowercase", get_metric(name).make(MetricOptions(lowercase=True), ())


def _text_metric_names() -> list[str]:
    from qkv.metrics.registry import METRICS

    return [name for name, entry in METRICS.items() if entry.data_kind == "texts" and name not in ERROR_RATES]


def _token_error_rates(
    tokenizer: Tokenizer, texts: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float | int]:
    def tokenize(text: str) -> str:
        """As the model's own tokeniser cuts it, so that what it folds or splits is judged alike on both sides."""
        return " ".join(tokenizer.ids_to_display(tokenizer.encode(text)))

    return error_rates([tokenize(text) for text in texts], [tuple(map(tokenize, accepted)) for accepted in references])


def _target_tokenizer(bundle: ModelBundle) -> Tokenizer:
    if bundle.target_tokenizer is None:
        raise InputError(f"this {bundle.model.spec.family} came without a tokeniser; give a model that has one")
    return bundle.target_tokenizer


@torch.no_grad()
def reference_loss(bundle: ModelBundle, examples: Sequence[SourceWithReferences], *, free_running: bool = False, max_tokens: int = 8192) -> float:
    """Mean negative log-probability a token of the first references, with or without a teacher."""
    model, target_tokenizer = bundle.model, _target_tokenizer(bundle)
    if not isinstance(model, EncoderDecoder) or bundle.source_tokenizer is None:
        raise InputError(f"a {model.spec.family} of this shape scores no outputs; this needs an encoder-decoder")
    s = model.spec
    assert s.source_embedding is not None
    assert s.target_embedding is not None
    sources = encode_without_eos(bundle.source_tokenizer, [e.source for e in examples], s.eos_id)
    targets = encode_without_eos(target_tokenizer, [e.references[0] for e in examples], s.eos_id)
    max_lengths = s.source_embedding.max_length - 1, s.target_embedding.max_length - 1
    pairs = EncodedPairs([ids[: max_lengths[0]] for ids in sources], [ids[: max_lengths[1]] for ids in targets])
    total, count, max_tokens = 0.0, 0, max(1, min(max_tokens, _MAX_LOG_PROBS // s.target_embedding.vocab_size))
    with eval_mode(model):
        for rows in evaluation_batches(pairs.source_lengths + pairs.target_lengths, max_tokens):
            batch = to_device(make_inputs(pairs.gather(rows), bos_id=s.bos_id, eos_id=s.eos_id), model.device)
            log_probs = token_log_probs(model, batch.source, batch.target, batch.labels, free_running=free_running)
            total -= float(log_probs.values.double().sum())
            count += len(log_probs.values)
    return total / count
