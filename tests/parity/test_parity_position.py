"""Sinusoids against a formula written independently, number by number, with Python's own mathematics."""

from __future__ import annotations

import math

import pytest
import torch

from qkv.nn.position import sinusoids


@pytest.mark.parametrize("width", [2, 7, 35, 128])
@pytest.mark.parametrize("base", [10000.0, 50.0])
def test_sinusoids_equal_the_formula_number_by_number(width: int, base: float) -> None:
    naive = torch.empty(60, width)
    for t in range(60):
        for i in range((width + 1) // 2):
            angle = t * math.exp(-math.log(base) * 2 * i / width)
            naive[t, 2 * i] = math.sin(angle)
            if 2 * i + 1 < width:
                naive[t, 2 * i + 1] = math.cos(angle)
    torch.testing.assert_close(sinusoids(60, width, base), naive, atol=1e-6, rtol=0)


def test_sinusoids_stay_exact_far_from_the_beginning() -> None:
    row = sinusoids(20001, 4)[20000]
    naive = [math.sin(20000), math.cos(20000), math.sin(200), math.cos(200)]
    torch.testing.assert_close(row, torch.tensor(naive), atol=1e-6, rtol=0)
