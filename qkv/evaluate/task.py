"""Scoring a model on examples: decode for real, compare with every reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qkv.data.batches import EncodedPairs, evaluation_batches
from qkv.data.pair import Example, Pair, group
from qkv.decode import Decoding, Prediction, predict, score
from qkv.decode.predict import evaluating
from qkv.decode.score import unclosed
from qkv.errors import InputError
from qkv.evaluate.confidence import Interval, bootstrap
from qkv.evaluate.error_rate import error_rates
from qkv.evaluate.metric import Metric
from qkv.nn import EncoderDecoder
from qkv.objectives.seq2seq import inputs
from qkv.objectives.term import to_device
from qkv.text.tokeniser import Tokeniser
from qkv.weights import Loaded

ERROR_RATES = ("per", "wer")  # of tokens and of whole sequences
_ENTRIES = 2**26  # log-probabilities at a time
# the figures of a metric that are told: the others say why a figure is what it is
_TOLD = {"rouge": ("rouge1", "rouge2", "rougeL", "rougeLsum")}


@dataclass(frozen=True)
class Figure:
    """One figure over all examples, with what a reader must know to get it again."""

    name: str
    value: float
    interval: Interval | None = None
    signature: str = ""
    digits: int = 4


@dataclass(frozen=True)
class Scores:
    """The figures that were asked for, and what was predicted for each example."""

    figures: tuple[Figure, ...]
    predictions: list[str]

    @property
    def examples(self) -> int:
        return len(self.predictions)

    @property
    def values(self) -> dict[str, float]:
        return {figure.name: figure.value for figure in self.figures}

    @property
    def per(self) -> float:
        """The token error rate, a fraction."""
        return self.values["per"]

    @property
    def wer(self) -> float:
        """The share of examples whose output equals none of their references."""
        return self.values["wer"]


def evaluate(
    loaded: Loaded,
    data: Sequence[Example] | Sequence[Pair],
    how: Decoding | None = None,
    metrics: Sequence[str] = ERROR_RATES,
    *,
    resamples: int = 0,
) -> Scores:
    """Figures of the best outputs; any listed reference counts as right. Pairs are grouped by their source.

    `metrics` are the error rates of tokens and sequences (per, wer), or those of texts by their names in
    `qkv.evaluate.known`, which read an output as a person would: bleu (cased and lower-cased), chrf, ter, rouge and so
    on. `resamples`: how many their intervals rest on; 0: none are made.
    """
    examples = [e for e in data if isinstance(e, Example)] or group([p for p in data if isinstance(p, Pair)])
    found = predict(loaded, [e.source for e in examples], how, [e.where for e in examples])
    best = [rows[0] if rows else Prediction("", 0.0, False) for rows in found]
    texts, references = [p.text for p in best], [e.references for e in examples]
    figures: list[Figure] = []
    rates: dict[str, float | int] | None = None
    for name in dict.fromkeys(metrics):
        if name in ERROR_RATES:
            rates = rates or _error_rates(_target(loaded), texts, references)
            figures.append(Figure(name, float(rates[name])))
        else:
            figures += text_figures(name, texts, references, resamples)
    return Scores(tuple(figures), texts)


def text_figures(
    name: str, texts: Sequence[str], references: Sequence[Sequence[str]], resamples: int = 0
) -> list[Figure]:
    """A metric's figures of texts that somebody wrote."""
    figures = []
    for called, metric in _metrics(name):
        rows = metric.statistics(texts, references)
        values, intervals = metric.of(rows), bootstrap(metric, rows, resamples=resamples) if resamples else {}
        signature = metric.signature(references)
        for told, as_said in [(figure, figure) for figure in _TOLD[name]] if name in _TOLD else [(metric.name, called)]:
            figures.append(Figure(as_said, values[told], intervals.get(told), signature, metric.digits))
    return figures


def _metrics(name: str) -> Iterator[tuple[str, Metric[Any, Any]]]:
    """What is measured under a name. Papers on small sets report BLEU of lower-cased text: it stands beside."""
    from qkv.evaluate.known import METRICS, Choices, known  # itself of many parts, not all of them always there

    if name not in METRICS or METRICS[name].kind != "texts":
        raise InputError(f"'{name}' is no metric of texts; known: {', '.join(_of_texts())}")
    yield name, known(name).make(Choices(), ())
    if name == "bleu":
        yield "bleu_lowercase", known(name).make(Choices(lowercase=True), ())


def _of_texts() -> list[str]:
    from qkv.evaluate.known import METRICS

    return [name for name, one in METRICS.items() if one.kind == "texts" and name not in ERROR_RATES]


def _error_rates(
    target: Tokeniser, texts: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float | int]:
    def tokens(text: str) -> str:
        """As the model's own tokeniser cuts it, so that what it folds or splits is judged alike on both sides."""
        return " ".join(target.tokens(target.encode(text)))

    return error_rates([tokens(text) for text in texts], [tuple(map(tokens, accepted)) for accepted in references])


def _target(loaded: Loaded) -> Tokeniser:
    if loaded.target is None:
        raise InputError(f"this {loaded.model.spec.family} came without a tokeniser; give a model that has one")
    return loaded.target


@torch.no_grad()
def reference_loss(loaded: Loaded, examples: Sequence[Example], *, free: bool = False, budget: int = 8192) -> float:
    """Mean negative log-probability a token of the first references, with or without a teacher."""
    model, target = loaded.model, _target(loaded)
    if not isinstance(model, EncoderDecoder) or loaded.source is None:
        raise InputError(f"a {model.spec.family} of this shape scores no outputs; this needs an encoder-decoder")
    s = model.spec
    assert s.source is not None
    assert s.target is not None
    sources = unclosed(loaded.source, [e.source for e in examples], s.end)
    targets = unclosed(target, [e.references[0] for e in examples], s.end)
    longest = s.source.length - 1, s.target.length - 1
    pairs = EncodedPairs([ids[: longest[0]] for ids in sources], [ids[: longest[1]] for ids in targets])
    total, count, budget = 0.0, 0, max(1, min(budget, _ENTRIES // s.target.vocabulary))
    with evaluating(model):
        for rows in evaluation_batches(pairs.source_lengths + pairs.target_lengths, budget):
            batch = to_device(inputs(pairs.take(rows), start=s.start, end=s.end), model.device)
            found = score(model, batch.source, batch.target, batch.labels, free=free)
            total -= float(found.values.double().sum())
            count += len(found.values)
    return total / count
