"""BLEU, chrF, chrF++ and TER, by sacrebleu, of a corpus and of single sentences, with the signature that papers quote.

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

Texts = Sequence[str]
TOKENIZERS = ("13a", "intl", "char", "zh", "none")  # those that need no further package


class _Sacrebleu(Metric[str, Texts]):
    """Counts by sacrebleu, whose own resampling goes the same two ways: texts to counts, counts to a score."""

    decimals = 2

    @abstractmethod
    def _make_metric(self) -> Any:
        """sacrebleu's own object."""

    @cached_property
    def _metric(self) -> Any:
        return self._make_metric()

    def statistics(self, hypotheses: Texts, references: Sequence[Texts]) -> Stats:
        check_texts(hypotheses, references)
        streams = list(
            zip_longest(*references)
        )  # a column of first references, one of second …; None where there is none
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
    """BLEU (Papineni et al. 2002) as WMT counts it (Post 2018): 4-grams, tokenised as mteval-v13a does.

    `effective_order` counts only the lengths of n-grams that a text has at all: for single sentences.
    """

    name: ClassVar[str] = "bleu"
    lowercase: bool = False
    tokenize: str = "13a"
    effective_order: bool = False

    def _make_metric(self) -> Any:
        metrics = require_package("sacrebleu.metrics", "BLEU")
        if self.tokenize not in TOKENIZERS:
            raise InputError(
                f"BLEU's tokeniser '{self.tokenize}' is unknown here; {did_you_mean(self.tokenize, TOKENIZERS)}"
            )
        # force: no remark about texts that look tokenised; whoever scores tokenised text chooses tokenize="none"
        return metrics.BLEU(
            lowercase=self.lowercase, tokenize=self.tokenize, effective_order=self.effective_order, force=True
        )

    def score(self, stats: Stats) -> Scores:
        result = self._metric._compute_score_from_stats([int(count) for count in stats])
        precisions = {f"precision_{n}": float(p) for n, p in enumerate(result.precisions, 1)}
        return {"bleu": float(result.score), **precisions, "brevity_penalty": 100 * float(result.bp)}

    def per_example(self, stats: Stats) -> list[Scores]:
        """Sentence BLEU, which needs `effective_order`: few sentences have a matching 4-gram."""
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
    """chrF++: with single words and pairs of words (Popović 2017)."""

    name: ClassVar[str] = "chrf++"
    word_order: ClassVar[int] = 2


@dataclass(frozen=True)
class Ter(_Sacrebleu):
    """Translation edit rate: edits and shifts of phrases a reference word (Snover et al. 2006); lower is better.

    Case is ignored unless asked for, as tercom does.
    """

    name: ClassVar[str] = "ter"
    case_sensitive: bool = False

    def _make_metric(self) -> Any:
        return require_package("sacrebleu.metrics", "TER").TER(case_sensitive=self.case_sensitive)
