from __future__ import annotations

import pytest
import torch

from qkv.nn.dropout import dropout

RATES = [0.001, 0.1, 0.5, 0.9]


@pytest.mark.parametrize("p", RATES)
def test_as_many_entries_are_dropped_as_asked(p: float) -> None:
    dropped = (dropout(torch.ones(400, 501), p) == 0).double().mean()
    assert float(dropped) == pytest.approx(p, abs=5 * (p * (1 - p) / 200_400) ** 0.5)


@pytest.mark.parametrize("p", RATES)
def test_what_is_kept_is_scaled_so_that_the_expectation_stays(p: float) -> None:
    out = dropout(torch.ones(400, 501), p)
    torch.testing.assert_close(out[out != 0].unique(), torch.tensor([1 / (1 - p)]), rtol=1e-4, atol=0)


def test_entries_are_dropped_independently() -> None:
    kept = (dropout(torch.ones(100_000, 4), 0.5) != 0).double()
    correlation = torch.corrcoef(kept.T) - torch.eye(4)
    assert float(correlation.abs().max()) < 0.02


def test_rate_zero_changes_nothing() -> None:
    x = torch.randn(5, 7)
    assert torch.equal(dropout(x, 0.0), x)


def test_rate_one_drops_everything() -> None:
    assert not dropout(torch.ones(5, 7), 1.0).any()


def test_a_gradient_goes_where_its_entry_was_kept() -> None:
    x = torch.randn(6, 7, requires_grad=True)
    out = dropout(x, 0.5)
    out.sum().backward()
    torch.testing.assert_close(x.grad * x.detach(), out.detach())


def test_a_saved_random_state_brings_the_same_mask_back() -> None:
    x, state = torch.ones(9, 11), torch.get_rng_state()
    first = dropout(x, 0.3)
    torch.set_rng_state(state)
    assert torch.equal(dropout(x, 0.3), first)


@pytest.mark.parametrize("shape", [(0, 4), (1,), (3,), (2, 3, 5)])
def test_any_number_of_entries_is_taken(shape: tuple[int, ...]) -> None:
    assert dropout(torch.ones(shape), 0.3).shape == shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_type_of_numbers_is_kept(dtype: torch.dtype) -> None:
    assert dropout(torch.ones(8, 8, dtype=dtype), 0.5).dtype == dtype


def test_an_input_that_lies_across_is_dropped_entry_by_entry() -> None:
    x = torch.randn(50, 60).T
    out = dropout(x, 0.5)
    assert bool(((out == 0) | torch.isclose(out, 2 * x)).all())
