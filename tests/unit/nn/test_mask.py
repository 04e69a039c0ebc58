from __future__ import annotations

import pytest

from qkv.nn.mask import Bidirectional, Causal


def test_full_lets_every_query_look_at_every_key() -> None:
    assert bool(Bidirectional().as_tensor(3, 5).all())


@pytest.mark.parametrize("n", [1, 2, 6])
def test_causal_lets_a_query_look_at_itself_and_before(n: int) -> None:
    assert Causal().as_tensor(n, n).tolist() == [[j <= i for j in range(n)] for i in range(n)]


def test_masks_are_values_that_compare_equal() -> None:
    assert Causal() == Causal()
    assert Bidirectional() != Causal()
