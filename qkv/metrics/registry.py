"""Every metric by its name: which kind of file it scores, which choices it takes, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from qkv.checkpoints import ModelBundle
from qkv.errors import InputError, did_you_mean
from qkv.metrics.bertscore import BertScore
from qkv.metrics.classification import (
    F1,
    Accuracy,
    Average,
    Label,
    MatthewsCorrelation,
    TokenAccuracy,
    collect_label_set,
)
from qkv.metrics.correlation import Pearson, Spearman
from qkv.metrics.entities import EntityF1, Scheme, collect_entity_types
from qkv.metrics.error_rate import ErrorRate
from qkv.metrics.meteor import Meteor
from qkv.metrics.metric import Metric
from qkv.metrics.perplexity import Perplexity
from qkv.metrics.rouge import Rouge
from qkv.metrics.sacrebleu import Bleu, Chrf, ChrfPlusPlus, Ter
from qkv.metrics.score_files import DataKind
from qkv.metrics.squad import Squad

AnyMetric = Metric[Any, Any]
AllSides = tuple[Iterable[Any], ...]  # all sides of what will be scored: which labels there are is read off them


@dataclass(frozen=True)
class MetricOptions:
    """What a person may choose; each metric takes some of it."""

    lowercase: bool = False
    tokenize: str = "13a"
    multi_reference: Literal["best", "mean"] = "best"
    use_stemmer: bool = False
    sentence_separator: str = "\n"
    scheme: Scheme = "lenient"
    positive_label: str | None = None
    ignore: tuple[str, ...] = ()
    model: ModelBundle | None = None
    model_name: str = ""
    layer: int | None = None
    idf: bool = False
    on_too_long: Literal["refuse", "truncate"] = "refuse"


@dataclass(frozen=True)
class MetricEntry:
    """A metric that can be asked for by name."""

    data_kind: DataKind
    make: Callable[[MetricOptions, AllSides], AnyMetric]
    options: tuple[str, ...] = ()


def _f1_maker(average: Average) -> Callable[[MetricOptions, AllSides], AnyMetric]:
    def make(options: MetricOptions, sides: AllSides) -> AnyMetric:
        labels = _select_labels(options, collect_label_set(*sides))
        # One label alone has no average: all three are its own F1.
        return F1(labels, "micro" if options.positive_label is not None else average)

    return make


def _select_labels(options: MetricOptions, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    named_labels = [*options.ignore, *([options.positive_label] if options.positive_label is not None else [])]
    for label in named_labels:
        if label not in labels:
            raise InputError(f"label '{label}' occurs nowhere; {did_you_mean(str(label), map(str, labels))}")
    if options.positive_label is not None:
        return (options.positive_label,)
    remaining = tuple(label for label in labels if label not in options.ignore)
    if not remaining:
        raise InputError("--ignore: names every label there is, so that none is left to score; leave out one")
    return remaining


def _make_entity_f1(options: MetricOptions, sides: AllSides) -> AnyMetric:
    return EntityF1(collect_entity_types(*sides, scheme=options.scheme), options.scheme)


def _make_bertscore(options: MetricOptions, _: AllSides) -> AnyMetric:
    if options.model is None:
        raise InputError("bertscore needs an encoder; name one with --model")
    return BertScore(options.model, options.layer, options.idf, options.on_too_long, options.model_name)


def _make_rouge(options: MetricOptions, _: AllSides) -> AnyMetric:
    return Rouge(options.multi_reference, options.use_stemmer, options.sentence_separator)


def _error_rate_maker(unit: Literal["word", "character"]) -> Callable[[MetricOptions, AllSides], AnyMetric]:
    return lambda options, _: ErrorRate(unit, options.lowercase)


METRICS: dict[str, MetricEntry] = {
    "accuracy": MetricEntry("labels", lambda *_: Accuracy()),
    "f1": MetricEntry("labels", _f1_maker("macro"), ("positive_label", "ignore")),
    "matthews_correlation": MetricEntry("labels", lambda _, sides: MatthewsCorrelation(collect_label_set(*sides))),
    "multilabel_f1": MetricEntry("label_sets", _f1_maker("micro"), ("positive_label", "ignore", "label_separator")),
    "multilabel_accuracy": MetricEntry("label_sets", lambda *_: Accuracy(), ("label_separator",)),
    "pearson": MetricEntry("numbers", lambda *_: Pearson()),
    "spearman": MetricEntry("numbers", lambda *_: Spearman()),
    "perplexity": MetricEntry("numbers", lambda *_: Perplexity()),
    "entity_f1": MetricEntry("tags", _make_entity_f1, ("scheme",)),
    "token_f1": MetricEntry("tags", _f1_maker("macro"), ("positive_label", "ignore")),
    "token_accuracy": MetricEntry("tags", lambda *_: TokenAccuracy()),
    "sequence_accuracy": MetricEntry("tags", lambda *_: Accuracy()),
    "squad": MetricEntry("answers", lambda *_: Squad()),
    "squad2": MetricEntry("answers", lambda *_: Squad("2.0")),
    "wer": MetricEntry("texts", _error_rate_maker("word"), ("lowercase",)),
    "cer": MetricEntry("texts", _error_rate_maker("character"), ("lowercase",)),
    "bleu": MetricEntry("texts", lambda options, _: Bleu(options.lowercase, options.tokenize), ("lowercase", "tokenize")),
    "chrf": MetricEntry("texts", lambda options, _: Chrf(options.lowercase), ("lowercase",)),
    "chrf++": MetricEntry("texts", lambda options, _: ChrfPlusPlus(options.lowercase), ("lowercase",)),
    "ter": MetricEntry("texts", lambda *_: Ter()),
    "rouge": MetricEntry("texts", _make_rouge, ("multi_reference", "use_stemmer", "sentence_separator")),
    "meteor": MetricEntry("texts", lambda *_: Meteor()),
    "bertscore": MetricEntry("texts", _make_bertscore, ("model", "layer", "idf", "on_too_long", "device")),
}


def get_metric(name: str) -> MetricEntry:
    """What is known of a metric; a name that is not there is answered with the nearest."""
    if name not in METRICS:
        raise InputError(f"metric '{name}' is unknown; {did_you_mean(name, METRICS)}")
    return METRICS[name]
