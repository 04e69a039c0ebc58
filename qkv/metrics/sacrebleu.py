"""BLEU, chrF, chrF++ and TER, computed by sacrebleu, for a corpus and for single sentences, with sacrebleu's signature.

A text may have any number of references, and different texts different numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np

from qkv.errors import InputError, did_you_mean
from qkv.metrics.metric import Metric, Scores, Stats, check_texts, require_package
from qkv.metrics.registry import MetricEntry

Texts = Sequence[str]
TOKENIZERS = ("13a", "intl", "char", "zh", "none")  # those that need no further package


class _Sacrebleu(Metric[str, Texts]):
    """A metric of sacrebleu, by the two steps of its own bootstrap: texts to statistics, statistics to a score."""

    decimals = 2

    @abstractmethod
    def _make_metric(self) -> Any:
        """Return sacrebleu's own metric."""

    @cached_property
    def _metric(self) -> Any:
        return self._make_metric()

    def statistics(self, hypotheses: Texts, references: Sequence[Texts]) -> Stats:
        check_texts(hypotheses, references)
        streams = list(zip_longest(*references))  # all first references, all second ones …; None where a text has fewer
        return np.array(self._metric._extract_corpus_statistics(hypotheses, streams), dtype=np.float64)

    def score(self, stats: Stats) -> Scores:
        return {self.name: float(self._metric._compute_score_from_stats(stats.tolist()).score)}

    def signature(self, references: Sequence[Texts]) -> str:
        counts = {len(accepted) for accepted in references}
        metric = self._make_metric()
        metric.num_refs = counts.pop() if len(counts) == 1 else -1
        return str(metric.get_signature().format())


@dataclass(frozen=True)
class Bleu(_Sacrebleu):
    """BLEU (Papineni et al. 2002) as in WMT (Post 2018): up to 4-grams, tokenized like mteval-v13a."""

    name: ClassVar[str] = "bleu"
    lowercase: bool = False
    """Lowercase both sides."""
    tokenize: str = "13a"
    """One of `TOKENIZERS`; none for tokenized text."""
    effective_order: bool = False
    """Count only the n-gram orders that occur in the text, as sentence BLEU needs."""

    def _make_metric(self) -> Any:
        metrics = require_package("sacrebleu.metrics", "BLEU")
        if self.tokenize not in TOKENIZERS:
            raise InputError(
                f"BLEU's tokenizer '{self.tokenize}' is unknown here; {did_you_mean(self.tokenize, TOKENIZERS)}"
            )
        # force: no warning about texts that look tokenized; tokenize="none" is for those
        return metrics.BLEU(
            lowercase=self.lowercase, tokenize=self.tokenize, effective_order=self.effective_order, force=True
        )

    def score(self, stats: Stats) -> Scores:
        result = self._metric._compute_score_from_stats([int(count) for count in stats])
        precisions = {f"precision_{n}": float(precision) for n, precision in enumerate(result.precisions, 1)}
        return {"bleu": float(result.score), **precisions, "brevity_penalty": 100 * float(result.bp)}

    def per_example(self, stats: Stats) -> list[Scores]:
        """Return sentence BLEU. It needs `effective_order`, because few sentences have a matching 4-gram."""
        if not self.effective_order:
            return replace(self, effective_order=True).per_example(stats)
        return [{"bleu": self.score(row)["bleu"]} for row in stats]


@dataclass(frozen=True)
class Chrf(_Sacrebleu):
    """chrF: F2 of character n-grams up to 6 (Popović 2015)."""

    name: ClassVar[str] = "chrf"
    lowercase: bool = False
    word_order: ClassVar[int] = 0

    def _make_metric(self) -> Any:
        return require_package("sacrebleu.metrics", "chrF").CHRF(lowercase=self.lowercase, word_order=self.word_order)


@dataclass(frozen=True)
class ChrfPlusPlus(Chrf):
    """chrF++: chrF with word unigrams and bigrams (Popović 2017)."""

    name: ClassVar[str] = "chrf++"
    word_order: ClassVar[int] = 2


@dataclass(frozen=True)
class Ter(_Sacrebleu):
    """Translation edit rate: edits and phrase shifts per reference word (Snover et al. 2006); lower is better."""

    name: ClassVar[str] = "ter"
    higher_is_better: ClassVar[bool] = False
    case_sensitive: bool = False
    """Distinguish upper and lower case, which tercom does not."""

    def _make_metric(self) -> Any:
        return require_package("sacrebleu.metrics", "TER").TER(case_sensitive=self.case_sensitive)


BLEU = MetricEntry(
    "texts",
    lambda options, _: Bleu(options.lowercase, options.tokenize),
    ("lowercase", "tokenize"),
    package="sacrebleu",
)
CHRF = MetricEntry("texts", lambda options, _: Chrf(options.lowercase), ("lowercase",), package="sacrebleu")
CHRF_PLUS_PLUS = MetricEntry(
    "texts", lambda options, _: ChrfPlusPlus(options.lowercase), ("lowercase",), package="sacrebleu"
)
TER = MetricEntry("texts", lambda *_: Ter(), higher_is_better=False, package="sacrebleu")
