"""A run as people watch it: what a line says."""

from __future__ import annotations

import math

from qkv.train.display import format_record
from qkv.train.run_log import Record

FIGURES = ("accuracy", "f1_macro", "precision_macro", "recall_macro", "f1_micro", "precision_micro", "recall_micro")
FIGURES += ("f1_weighted", "precision_weighted", "recall_weighted", "matthews")


def test_of_a_dozen_figures_a_validation_line_shows_the_deciding_one_and_a_few_others() -> None:
    record = Record("valid", 20, {**dict.fromkeys(FIGURES, 0.25), "seconds": 3.0})
    assert format_record(record) == "step 20: held-out accuracy 25.00 %, f1_macro 0.25, matthews 0.25"


def test_the_figure_that_comes_first_is_always_shown() -> None:
    values = {"recall_weighted": 0.5} | {name: 0.25 for name in FIGURES if name != "recall_weighted"}
    assert format_record(Record("valid", 20, values)).startswith(
        "step 20: held-out recall_weighted 0.5, accuracy 25.00 %"
    )


def test_pairs_keep_their_two_rates() -> None:
    said = format_record(Record("valid", 20, {"token_error_rate": 0.5, "sequence_error_rate": 0.75, "seconds": 3.0}))
    assert said == "step 20: held-out token error rate 50.00 %, sequence error rate 75.00 %"


def test_a_figure_without_a_value_is_undefined() -> None:
    values = {"pearson": math.nan, "seconds": 3.0, "best_step": 20, "max_steps": 20, "num_averaged_checkpoints": 0}
    assert format_record(Record("final", 20, values)).endswith("saved step 20, pearson undefined")
