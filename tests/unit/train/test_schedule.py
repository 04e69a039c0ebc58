"""Learning rates as functions of the step."""

from __future__ import annotations

import pytest

from qkv.train.schedule import learning_rate_at, noam_peak


@pytest.mark.parametrize("step", [1, 100, 3999, 4000, 4001, 100_000])
def test_inverse_square_root_is_the_papers_formula(step):
    """Vaswani et al. 2017, 5.3: width^-0.5 * min(step^-0.5, step * warmup^-1.5)."""
    ours = learning_rate_at("inverse_sqrt", step, peak_lr=noam_peak(512, 4000), warmup_steps=4000, max_steps=100_000)
    assert ours == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5))


@pytest.mark.parametrize("kind", ["inverse_sqrt", "linear", "cosine", "constant"])
def test_every_schedule_climbs_to_its_peak_and_never_above(kind):
    rates = [learning_rate_at(kind, s, peak_lr=0.5, warmup_steps=10, max_steps=100) for s in range(1, 101)]
    assert rates[4] == pytest.approx(0.25)
    assert max(rates) == pytest.approx(0.5)
    assert rates[9] == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_linear_and_cosine_end_at_nothing(kind):
    assert learning_rate_at(kind, 100, peak_lr=1.0, warmup_steps=10, max_steps=100) == pytest.approx(0.0)
    assert learning_rate_at(kind, 55, peak_lr=1.0, warmup_steps=10, max_steps=100) == pytest.approx(0.5)


def test_a_schedule_without_warm_up_begins_at_its_peak():
    assert learning_rate_at("cosine", 1, peak_lr=1.0, warmup_steps=0, max_steps=1000) == pytest.approx(1.0, abs=1e-4)
