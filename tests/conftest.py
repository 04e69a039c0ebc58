"""Give every test the same random seed and one thread: tiny tensors are slower on two."""

from __future__ import annotations

import os

# Two test processes use the two cores; further processes for compilation would only add their start-up time.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
