"""The registry of metrics: lazy imports, kinds of data, the score that selects a checkpoint, and its direction."""

from __future__ import annotations

import subprocess
import sys

import pytest

from qkv.errors import InputError
from qkv.metrics.classification import Accuracy
from qkv.metrics.metric import MeanMetric
from qkv.metrics.perplexity import mean_losses
from qkv.metrics.registry import METRICS, MetricOptions, _MetricRegistry, metrics_of_kind
from qkv.metrics.seq2seq import find_text_metric, higher_is_better


def test_the_registry_imports_no_metric_and_most_metrics_no_torch() -> None:
    code = (
        "import sys; from qkv.metrics.registry import METRICS; METRICS.names()\n"
        "assert not {'qkv.metrics.sacrebleu', 'torch'} & set(sys.modules)\n"
        "for name in METRICS.names():\n"
        "    if name != 'bertscore': METRICS.get(name)\n"
        "assert not {'sacrebleu', 'jiwer', 'nltk', 'rouge_score', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in METRICS.names() if name != "bertscore"])
def test_an_entry_agrees_with_its_metric(name: str) -> None:
    entry = METRICS.get(name)
    examples: dict[str, list[object]] = {
        "labels": ["a"],
        "label_sets": [{"a"}],
        "tags": [["B-a"]],
        "texts": ["a"],
        "numbers": [1.0],
        "answers": ["a"],
    }
    metric = entry.make(MetricOptions(), (examples[entry.data_kind],) * 2)
    assert metric.higher_is_better == entry.higher_is_better


def test_a_class_is_registered_with_its_kind_and_direction() -> None:
    metrics = _MetricRegistry("metric", {})

    @metrics.register("late")
    class Late(MeanMetric[float, float]):
        data_kind = "numbers"
        higher_is_better = False

        def values(self, hypotheses, references):
            return [h > r for h, r in zip(hypotheses, references, strict=True)]

    entry = metrics.get("late")
    assert (entry.data_kind, entry.higher_is_better) == ("numbers", False)
    assert entry.make(MetricOptions(), ())([1.0, 3.0], [2.0, 2.0]) == {"late": 0.5}
    assert isinstance(METRICS.get("accuracy").make(MetricOptions(), ()), Accuracy)


def test_the_score_of_a_validation_belongs_to_a_metric_of_texts() -> None:
    assert [find_text_metric(score) for score in ("bleu", "rougeL", "rouge1", "wer")] == [
        "bleu",
        "rouge",
        "rouge",
        "wer",
    ]
    with pytest.raises(InputError, match="no score 'blue' of generated texts; did you mean 'bleu'"):
        find_text_metric("blue")
    with pytest.raises(InputError, match="no score 'accuracy'"):
        find_text_metric("accuracy")


def test_error_rates_and_losses_are_better_when_lower() -> None:
    lower = ("token_error_rate", "sequence_error_rate", "loss", "ter", "wer", "cer")
    assert not any(map(higher_is_better, lower))
    assert all(map(higher_is_better, ("bleu", "chrf", "rougeL", "meteor")))
    assert "pearson" in metrics_of_kind("numbers")


def test_mean_losses_are_over_targets_and_not_over_batches() -> None:
    assert mean_losses([[(6.0, 3), (1.0, 1)], [(2.0, 1), (0.0, 0)]]) == [2.0, 1.0]
    assert mean_losses([[(0.0, 0)]]) == [0.0]
