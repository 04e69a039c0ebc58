"""Learning rates as functions of the step."""

from __future__ import annotations

import pytest

from qkv.train.schedule import paper_peak, rate


@pytest.mark.parametrize("step", [1, 100, 3999, 4000, 4001, 100_000])
def test_inverse_square_root_is_the_papers_formula(step):
    """Vaswani et al. 2017, 5.3: width^-0.5 * min(step^-0.5, step * warmup^-1.5)."""
    ours = rate("inverse_sqrt", step, peak=paper_peak(512, 4000), warmup=4000, steps=100_000)
    assert ours == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5))


@pytest.mark.parametrize("kind", ["inverse_sqrt", "linear", "cosine", "constant"])
def test_every_schedule_climbs_to_its_peak_and_never_above(kind):
    rates = [rate(kind, s, peak=0.5, warmup=10, steps=100) for s in range(1, 101)]
    assert rates[4] == pytest.approx(0.25)
    assert max(rates) == pytest.approx(0.5)
    assert rates[9] == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_linear_and_cosine_end_at_nothing(kind):
    assert rate(kind, 100, peak=1.0, warmup=10, steps=100) == pytest.approx(0.0)
    assert rate(kind, 55, peak=1.0, warmup=10, steps=100) == pytest.approx(0.5)


def test_a_schedule_without_warm_up_begins_at_its_peak():
    assert rate("cosine", 1, peak=1.0, warmup=0, steps=1000) == pytest.approx(1.0, abs=1e-4)
