"""All metrics by name: the kind of data that a metric scores, the options that it accepts, and how it is made.

A metric from outside the package is added by `qkv.register.metric`. This module imports no metric: the entry of a
built-in metric is in the metric's own module and is imported when it is first used.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from qkv.errors import InputError
from qkv.metrics.metric import DataKind, Metric, missing_package
from qkv.registry import Registry

if TYPE_CHECKING:
    from qkv.checkpoints import ModelBundle
    from qkv.metrics.entities import EntityScheme

AnyMetric = Metric[Any, Any]
AllSides = tuple[
    Iterable[Any], ...
]  # hypotheses and references of all systems: the set of labels is collected from them


@dataclass(frozen=True)
class MetricOptions:
    """Options of all metrics; `MetricEntry.options` names those that a metric accepts."""

    lowercase: bool = False
    """Lowercase texts before scoring."""

    tokenize: str = "13a"
    """Tokenizer of BLEU."""

    multi_reference: Literal["best", "mean"] = "best"
    """How ROUGE combines several references: the best one, or the mean over them."""

    use_stemmer: bool = False
    """Compare Porter stems instead of words (ROUGE)."""

    sentence_separator: str = "\n"
    """Separator of the sentences of a text (ROUGE-Lsum)."""

    scheme: EntityScheme = "lenient"
    """Rules by which tags form entities; see `qkv.metrics.entities`."""

    positive_label: str | None = None
    """The only label whose F1 is computed; None: all labels."""

    ignore: tuple[str, ...] = ()
    """Labels that do not count for F1."""

    model: ModelBundle | None = None
    """Encoder of BERTScore."""

    model_name: str = ""
    """Name of the encoder in the signature."""

    layer: int | None = None
    """Layer of the encoder; None: the last one."""

    idf: bool = False
    """Weight tokens by inverse document frequency (BERTScore)."""

    on_too_long: Literal["refuse", "truncate"] = "refuse"
    """What happens to a text over the maximum length of the encoder."""


@dataclass(frozen=True)
class MetricEntry:
    """A metric in the registry."""

    data_kind: DataKind
    """Kind of hypotheses and references."""

    make: Callable[[MetricOptions, AllSides], AnyMetric]
    """Function that makes the metric for some options and for the data that it will score."""

    options: tuple[str, ...] = ()
    """Fields of `MetricOptions`, or options of `qkv score`, that the metric accepts."""

    scores: tuple[str, ...] = ()
    """Scores that an evaluation reports under their own names; (): the first score, under the name of the metric."""

    higher_is_better: bool = True
    """Whether a larger score is a better one."""

    package: str | None = None
    """Optional package that computes the metric, as it is imported."""


class _MetricRegistry(Registry[MetricEntry]):
    """Metrics by name; a metric that is made without arguments can be registered by its class."""

    def register(self, name: str, entry: Any = None) -> Any:
        """Add a metric class or an entry: `register("name", cls)`, or as a decorator `@register("name")`."""
        if entry is None:
            return lambda decorated: self.register(name, decorated)
        if isinstance(entry, MetricEntry):
            return super().register(name, entry)
        if not (isinstance(entry, type) and issubclass(entry, Metric)):
            raise InputError(f"metric '{name}': register a subclass of qkv.metrics.metric.Metric, or a MetricEntry")
        if inspect.isabstract(entry):
            missing = ", ".join(sorted(entry.__abstractmethods__))
            raise InputError(f"metric '{name}': the class {entry.__name__} does not define {missing}")
        metric_entry = MetricEntry(entry.data_kind, lambda *_: entry(), higher_is_better=entry.higher_is_better)
        super().register(name, metric_entry)
        entry.name = name
        return entry


METRICS: Registry[MetricEntry] = _MetricRegistry(
    "metric",
    {
        "accuracy": "qkv.metrics.classification:ACCURACY",
        "f1": "qkv.metrics.classification:MACRO_F1",
        "matthews_correlation": "qkv.metrics.classification:MATTHEWS_CORRELATION",
        "multilabel_f1": "qkv.metrics.classification:MULTILABEL_F1",
        "multilabel_accuracy": "qkv.metrics.classification:MULTILABEL_ACCURACY",
        "pearson": "qkv.metrics.correlation:PEARSON",
        "spearman": "qkv.metrics.correlation:SPEARMAN",
        "perplexity": "qkv.metrics.perplexity:PERPLEXITY",
        "entity_f1": "qkv.metrics.entities:ENTITY_F1",
        "token_f1": "qkv.metrics.classification:TOKEN_F1",
        "token_accuracy": "qkv.metrics.classification:TOKEN_ACCURACY",
        "sequence_accuracy": "qkv.metrics.classification:SEQUENCE_ACCURACY",
        "squad": "qkv.metrics.squad:SQUAD",
        "squad2": "qkv.metrics.squad:SQUAD2",
        "wer": "qkv.metrics.error_rate:WER",
        "cer": "qkv.metrics.error_rate:CER",
        "bleu": "qkv.metrics.sacrebleu:BLEU",
        "chrf": "qkv.metrics.sacrebleu:CHRF",
        "chrf++": "qkv.metrics.sacrebleu:CHRF_PLUS_PLUS",
        "ter": "qkv.metrics.sacrebleu:TER",
        "rouge": "qkv.metrics.rouge:ROUGE",
        "meteor": "qkv.metrics.meteor:METEOR",
        "bertscore": "qkv.metrics.bertscore:BERTSCORE",
    },
)

DESCRIPTIONS = {
    "accuracy": "fraction of correct labels",
    "f1": "F1, precision and recall of labels: macro, micro, weighted, or of one label",
    "matthews_correlation": "Matthews' correlation of labels",
    "multilabel_f1": "F1 of sets of labels, micro first",
    "multilabel_accuracy": "fraction of exactly correct sets of labels",
    "pearson": "Pearson's correlation of numbers",
    "spearman": "Spearman's rank correlation of numbers",
    "perplexity": "exponential of the mean negative log-probability per token",
    "entity_f1": "F1, precision and recall of entities",
    "token_f1": "F1 of the tags of tokens",
    "token_accuracy": "fraction of tokens with the correct tag",
    "sequence_accuracy": "fraction of sentences with all tags correct",
    "squad": "F1 and exact match of answers, SQuAD 1.1",
    "squad2": "F1 and exact match of answers, SQuAD 2.0",
    "wer": "word error rate of texts",
    "cer": "character error rate of texts",
    "bleu": "BLEU of texts, with its signature",
    "chrf": "chrF of texts",
    "chrf++": "chrF of texts with word bigrams",
    "ter": "translation edit rate of texts",
    "rouge": "ROUGE-1, -2, -L and -Lsum of texts",
    "meteor": "METEOR of texts",
    "bertscore": "similarity of texts in the embeddings of an encoder",
}


def check_packages(names: Iterable[str]) -> None:
    """Refuse metrics whose package is missing, before anything is computed; names of other scores are ignored."""
    for name in names:
        package = METRICS.get(name).package if name in METRICS else None
        if package is not None and importlib.util.find_spec(package) is None:
            raise missing_package(name, package)


def metrics_of_kind(data_kind: DataKind) -> list[str]:
    """Return the names of the metrics that score a kind of data."""
    return [name for name in METRICS.names() if METRICS.get(name).data_kind == data_kind]
