"""Every metric by its name: which kind of file it scores, which choices it takes, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from qkv.errors import InputError, nearest
from qkv.evaluate.answers import Squad
from qkv.evaluate.classification import F1, Accuracy, Average, Label, Matthews, TokenAccuracy, label_set
from qkv.evaluate.correlation import Pearson, Spearman
from qkv.evaluate.entities import EntityF1, Scheme, entity_types
from qkv.evaluate.error_rate import ErrorRate
from qkv.evaluate.files import Kind
from qkv.evaluate.meteor import Meteor
from qkv.evaluate.metric import Metric
from qkv.evaluate.perplexity import Perplexity
from qkv.evaluate.rouge import Rouge
from qkv.evaluate.similarity import BertScore
from qkv.evaluate.translation import Bleu, Chrf, ChrfWords, Ter
from qkv.weights import Loaded

AnyMetric = Metric[Any, Any]
Examples = tuple[Iterable[Any], ...]  # all sides of what will be scored: which labels there are is read off them


@dataclass(frozen=True)
class Choices:
    """What a person may choose; each metric takes some of it."""

    lowercase: bool = False
    tokenize: str = "13a"
    references: Literal["best", "mean"] = "best"
    stem: bool = False
    newline: str = "\n"
    scheme: Scheme = "lenient"
    positive: str | None = None
    ignore: tuple[str, ...] = ()
    model: Loaded | None = None
    called: str = ""
    layer: int | None = None
    idf: bool = False
    too_long: Literal["refuse", "truncate"] = "refuse"


@dataclass(frozen=True)
class Known:
    """A metric that can be asked for by name."""

    kind: Kind
    make: Callable[[Choices, Examples], AnyMetric]
    takes: tuple[str, ...] = ()


def _f1(average: Average) -> Callable[[Choices, Examples], AnyMetric]:
    def make(choices: Choices, sides: Examples) -> AnyMetric:
        labels = _counted(choices, label_set(*sides))
        # One label alone has no average: all three are its own F1.
        return F1(labels, "micro" if choices.positive is not None else average)

    return make


def _counted(choices: Choices, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    wanted = [*choices.ignore, *([choices.positive] if choices.positive is not None else [])]
    for label in wanted:
        if label not in labels:
            raise InputError(f"label '{label}' occurs nowhere; {nearest(str(label), map(str, labels))}")
    if choices.positive is not None:
        return (choices.positive,)
    left = tuple(label for label in labels if label not in choices.ignore)
    if not left:
        raise InputError("--ignore: names every label there is, so that none is left to score; leave out one")
    return left


def _entity_f1(choices: Choices, sides: Examples) -> AnyMetric:
    return EntityF1(entity_types(*sides, scheme=choices.scheme), choices.scheme)


def _bertscore(choices: Choices, _: Examples) -> AnyMetric:
    if choices.model is None:
        raise InputError("bertscore needs an encoder; name one with --model")
    return BertScore(choices.model, choices.layer, choices.idf, choices.too_long, choices.called)


def _rouge(choices: Choices, _: Examples) -> AnyMetric:
    return Rouge(choices.references, choices.stem, choices.newline)


def _error_rate(unit: Literal["word", "character"]) -> Callable[[Choices, Examples], AnyMetric]:
    return lambda choices, _: ErrorRate(unit, choices.lowercase)


METRICS: dict[str, Known] = {
    "accuracy": Known("labels", lambda *_: Accuracy()),
    "f1": Known("labels", _f1("macro"), ("positive", "ignore")),
    "matthews": Known("labels", lambda _, sides: Matthews(label_set(*sides))),
    "multilabel_f1": Known("label_sets", _f1("micro"), ("positive", "ignore", "separator")),
    "multilabel_accuracy": Known("label_sets", lambda *_: Accuracy(), ("separator",)),
    "pearson": Known("numbers", lambda *_: Pearson()),
    "spearman": Known("numbers", lambda *_: Spearman()),
    "perplexity": Known("numbers", lambda *_: Perplexity()),
    "entity_f1": Known("tags", _entity_f1, ("scheme",)),
    "token_f1": Known("tags", _f1("macro"), ("positive", "ignore")),
    "token_accuracy": Known("tags", lambda *_: TokenAccuracy()),
    "sequence_accuracy": Known("tags", lambda *_: Accuracy()),
    "squad": Known("answers", lambda *_: Squad()),
    "squad2": Known("answers", lambda *_: Squad("2.0")),
    "wer": Known("texts", _error_rate("word"), ("lowercase",)),
    "cer": Known("texts", _error_rate("character"), ("lowercase",)),
    "bleu": Known("texts", lambda choices, _: Bleu(choices.lowercase, choices.tokenize), ("lowercase", "tokenize")),
    "chrf": Known("texts", lambda choices, _: Chrf(choices.lowercase), ("lowercase",)),
    "chrf++": Known("texts", lambda choices, _: ChrfWords(choices.lowercase), ("lowercase",)),
    "ter": Known("texts", lambda *_: Ter()),
    "rouge": Known("texts", _rouge, ("references", "stem", "newline")),
    "meteor": Known("texts", lambda *_: Meteor()),
    "bertscore": Known("texts", _bertscore, ("model", "layer", "idf", "too_long", "device")),
}


def known(name: str) -> Known:
    """What is known of a metric; a name that is not there is answered with the nearest."""
    if name not in METRICS:
        raise InputError(f"metric '{name}' is unknown; {nearest(name, METRICS)}")
    return METRICS[name]
