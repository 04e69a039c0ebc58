"""Evaluation of a model that generates texts: generate the outputs and compare them with every reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from qkv.checkpoints import ModelBundle
from qkv.data.batching import EncodedPairs, Ints, evaluation_batches
from qkv.data.pair import Pair, SourceWithReferences, group_by_source
from qkv.errors import InputError, did_you_mean
from qkv.generation import GeneratedText, GenerationConfig, generate_texts, token_log_probs
from qkv.generation.log_probs import encode_without_eos
from qkv.metrics.error_rate import error_rates
from qkv.metrics.perplexity import mean_losses
from qkv.metrics.registry import METRICS, AnyMetric, MetricOptions, metrics_of_kind
from qkv.metrics.significance import Interval, bootstrap
from qkv.objectives.loss import to_device
from qkv.objectives.seq2seq import make_inputs
from qkv.tokenization.tokenizer import Tokenizer

ERROR_RATES = ("token_error_rate", "sequence_error_rate")
REFERENCE_LOSS = "loss"  # the score of `reference_loss` in validation
PERPLEXITY = "perplexity"  # per token of the references, with teacher forcing
_MAX_LOG_PROBS = 2**26  # log-probabilities in memory at once


@dataclass(frozen=True)
class MetricResult:
    """One score over all examples."""

    name: str
    value: float
    interval: Interval | None = None
    signature: str = ""
    """Settings that a reader needs to reproduce the score."""
    decimals: int = 4
    """Decimal places in tables."""


@dataclass(frozen=True)
class EvaluationResult:
    """The requested scores, and the predicted text of each example."""

    metrics: tuple[MetricResult, ...]
    predictions: list[str]

    @property
    def num_examples(self) -> int:
        return len(self.predictions)

    @property
    def values(self) -> dict[str, float]:
        """The scores by name."""
        return {metric.name: metric.value for metric in self.metrics}

    @property
    def token_error_rate(self) -> float:
        """The token error rate, as a fraction."""
        return self.values["token_error_rate"]

    @property
    def sequence_error_rate(self) -> float:
        """The fraction of examples whose output equals none of their references."""
        return self.values["sequence_error_rate"]


def evaluate(
    bundle: ModelBundle,
    data: Sequence[SourceWithReferences] | Sequence[Pair],
    generation_config: GenerationConfig | None = None,
    metrics: Sequence[str] = ERROR_RATES,
    *,
    resamples: int = 0,
) -> EvaluationResult:
    """Generate an output for each source and score it against all references of the source.

    Args:
        bundle: a generative model with its tokenizers.
        data: sources with their references; pairs are grouped by source.
        generation_config: how outputs are generated; by default greedily.
        metrics: token_error_rate and sequence_error_rate, which compare tokens of the model's tokenizer; and names of
            metrics of texts in `qkv.metrics.registry`, registered ones included, which compare detokenized text. bleu
            also gives the BLEU of lowercased text. perplexity is that of the references, given their sources.
        resamples: number of bootstrap resamples for the confidence intervals; 0: no intervals.
    """
    grouped = [example for example in data if isinstance(example, SourceWithReferences)]
    examples = grouped or group_by_source([pair for pair in data if isinstance(pair, Pair)])
    config, locations = generation_config or GenerationConfig(), [example.location for example in examples]
    outputs = generate_texts(bundle, [example.source for example in examples], config, locations)
    best = [hypotheses[0] if hypotheses else GeneratedText("", 0.0, False) for hypotheses in outputs]
    texts, references = [output.text for output in best], [example.references for example in examples]
    results: list[MetricResult] = []
    rates: dict[str, float | int] | None = None
    for name in dict.fromkeys(metrics):
        if name in ERROR_RATES:
            rates = rates or _token_error_rates(_target_tokenizer(bundle), texts, references)
            results.append(MetricResult(name, float(rates[name])))
        elif name == PERPLEXITY:
            results.append(MetricResult(name, math.exp(min(reference_loss(bundle, examples), 709.0)), decimals=3))
        else:
            results += compute_text_metrics(name, texts, references, resamples)
    return EvaluationResult(tuple(results), texts)


def compute_text_metrics(
    name: str, texts: Sequence[str], references: Sequence[Sequence[str]], resamples: int = 0
) -> list[MetricResult]:
    """Score generated texts with a metric of texts; see `evaluate`."""
    results = []
    for result_name, metric in _make_metrics(name):
        stats = metric.statistics(texts, references)
        scores, intervals = metric.compute(stats), bootstrap(metric, stats, resamples=resamples) if resamples else {}
        signature = metric.signature(references)
        # score name -> name in the result
        reported = {score: score for score in METRICS.get(name).scores} or {next(iter(scores)): result_name}
        results += [
            MetricResult(reported_name, scores[score], intervals.get(score), signature, metric.decimals)
            for score, reported_name in reported.items()
        ]
    return results


def _make_metrics(name: str) -> Iterator[tuple[str, AnyMetric]]:
    """Yield the metrics that are computed under a name, each with the name of its result."""
    if name not in METRICS or METRICS.get(name).data_kind != "texts":
        raise InputError(f"'{name}' is not a metric of texts; known: {', '.join(metrics_of_kind('texts'))}")
    entry = METRICS.get(name)
    yield name, entry.make(MetricOptions(), ())
    if name == "bleu":  # papers on small datasets report BLEU of lowercased text
        yield "bleu_lowercase", entry.make(MetricOptions(lowercase=True), ())


def find_text_metric(score: str) -> str:
    """Return the name of the metric of texts that reports a score: its own name, or rouge for rougeL."""
    text_metrics = metrics_of_kind("texts")
    if score in text_metrics and not METRICS.get(score).scores:
        return score
    scores = {reported: name for name in text_metrics for reported in METRICS.get(name).scores or (name,)}
    if score not in scores:
        known = [*ERROR_RATES, REFERENCE_LOSS, *scores]
        raise InputError(f"there is no score '{score}' of generated texts; {did_you_mean(score, known)}")
    return scores[score]


def higher_is_better(score: str) -> bool:
    """Whether a larger value of a score of generated texts is a better one."""
    if score in (*ERROR_RATES, REFERENCE_LOSS):
        return False
    return METRICS.get(find_text_metric(score)).higher_is_better


def _token_error_rates(
    tokenizer: Tokenizer, texts: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float | int]:
    def tokenize(text: str) -> str:
        """Tokenize with the model's tokenizer, so that its normalization applies to both sides."""
        return " ".join(tokenizer.ids_to_display(tokenizer.encode(text)))

    return error_rates([tokenize(text) for text in texts], [tuple(map(tokenize, accepted)) for accepted in references])


def _target_tokenizer(bundle: ModelBundle) -> Tokenizer:
    if bundle.target_tokenizer is None:
        raise InputError(f"this {bundle.model.spec.family} has no tokenizer; give a model that has one")
    return bundle.target_tokenizer


@torch.no_grad()
def reference_loss(
    bundle: ModelBundle,
    examples: Sequence[SourceWithReferences],
    *,
    free_running: bool = False,
    max_tokens: int = 8192,
) -> float:
    """Return the mean negative log-probability per token of the first references.

    Args:
        bundle: an encoder-decoder with its tokenizers.
        examples: sources with their references; both are cut at the model's maximum length.
        free_running: feed the model its own output instead of the reference (no teacher forcing).
        max_tokens: tokens per batch.
    """
    model, target_tokenizer = bundle.model, _target_tokenizer(bundle)
    if not model.is_encoder_decoder or bundle.source_tokenizer is None:
        raise InputError(f"the loss of references needs an encoder-decoder, and this {model.spec.family} is not one")
    spec = model.spec
    assert spec.source_embedding is not None
    assert spec.target_embedding is not None
    sources = encode_without_eos(bundle.source_tokenizer, [example.source for example in examples], spec.eos_id)
    targets = encode_without_eos(target_tokenizer, [example.references[0] for example in examples], spec.eos_id)
    max_source, max_target = spec.source_embedding.max_length - 1, spec.target_embedding.max_length - 1
    pairs = EncodedPairs([ids[:max_source] for ids in sources], [ids[:max_target] for ids in targets])
    max_tokens = max(1, min(max_tokens, _MAX_LOG_PROBS // spec.target_embedding.vocab_size))

    def batch_loss(rows: Ints) -> tuple[float, int]:
        batch = to_device(make_inputs(pairs.gather(rows), bos_id=spec.bos_id, eos_id=spec.eos_id), model.device)
        log_probs = token_log_probs(model, batch.source, batch.target, batch.labels, free_running=free_running)
        return -float(log_probs.values.double().sum()), len(log_probs.values)

    batches = evaluation_batches(pairs.source_lengths + pairs.target_lengths, max_tokens)
    return mean_losses([batch_loss(rows)] for rows in batches)[0]
