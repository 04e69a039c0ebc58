"""Every test starts from the same random numbers, on one thread: tiny tensors are slower on two."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
