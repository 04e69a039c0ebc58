"""Every test starts from the same random numbers, on one thread: tiny tensors are slower on two."""

from __future__ import annotations

import os

# Two cores are busy with two processes of tests: compiling in further ones only means to start them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
