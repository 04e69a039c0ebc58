"""Scoring a model on examples: decode for real, compare with every reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qkv.data.batches import EncodedPairs, evaluation_batches
from qkv.data.pair import Example, Pair, group
from qkv.decode import Decoding, Prediction, predict, score
from qkv.errors import InputError
from qkv.evaluate.error_rate import error_rates
from qkv.nn import EncoderDecoder
from qkv.objectives.seq2seq import inputs
from qkv.weights import Loaded


@dataclass(frozen=True)
class Scores:
    """The rates as fractions, and what was predicted for each example."""

    per: float
    wer: float
    examples: int
    predictions: list[str]


def evaluate(loaded: Loaded, data: Sequence[Example] | Sequence[Pair], how: Decoding | None = None) -> Scores:
    """Error rates of the best outputs; any listed reference counts as right. Pairs are grouped by their source."""
    examples = [e for e in data if isinstance(e, Example)] or group([p for p in data if isinstance(p, Pair)])
    found = predict(loaded, [e.source for e in examples], how, [e.where for e in examples])
    best = [rows[0] if rows else Prediction("", 0.0, False) for rows in found]

    def tokens(text: str) -> str:
        """As the model's own tokeniser cuts it, so that what it folds or splits is judged alike on both sides."""
        return " ".join(loaded.target.tokens(loaded.target.encode(text)))

    references = [tuple(tokens(r) for r in e.references) for e in examples]
    rates = error_rates([tokens(p.text) for p in best], references)
    return Scores(rates["per"], rates["wer"], len(examples), [p.text for p in best])


@torch.no_grad()
def reference_loss(loaded: Loaded, examples: Sequence[Example], *, free: bool = False, budget: int = 8192) -> float:
    """Mean negative log-probability a token of the first references, with or without a teacher."""
    model, source, target = loaded.model, loaded.source, loaded.target
    if not isinstance(model, EncoderDecoder):
        raise InputError(f"a {model.spec.family} of this shape scores no outputs; this needs an encoder-decoder")
    pairs = EncodedPairs(
        source.encode_batch([e.source for e in examples]), target.encode_batch([e.references[0] for e in examples])
    )
    total, count = 0.0, 0
    for rows in evaluation_batches(pairs.source_lengths + pairs.target_lengths, budget):
        batch = inputs(pairs.take(rows), start=model.spec.start, end=model.spec.end, device=model.device)
        found = score(model, batch.source, batch.target, batch.labels, free=free)
        total -= float(found.values.double().sum())
        count += len(found.values)
    return total / count
