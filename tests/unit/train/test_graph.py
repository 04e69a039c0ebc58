"""A recorded step trains as a plain one does, in whatever order shapes come, and dropout follows the seed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.nn import Ragged
from qkv.train.perf.cuda_graphs import CudaGraphRunner, capture_key

WIDTH = 16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are recorded on a GPU, and there is none")


class Part(NamedTuple):
    tokens: Ragged  # [T, width]
    labels: Tensor  # [T]
    none: Tensor | None = None


def part(sizes: Sequence[int], seed: int, device: str = "cpu") -> Part:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(sizes), WIDTH, generator=generator)
    labels = torch.randint(0, WIDTH, (sum(sizes),), generator=generator)
    return Part(Ragged.from_lengths(values.to(device), list(sizes)), labels.to(device))


def trained(
    sizes: Sequence[Sequence[int]], device: str, recorded: bool, *, twice: bool = False, in_place: bool = False
) -> tuple[list[float], list[Tensor], Any]:
    """A step a batch, or two parts of each; the losses and the weights that came of it."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH).to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(given: Part) -> tuple[Tensor]:
        loss = F.cross_entropy(F.dropout(model(given.tokens.values), 0.3), given.labels)
        loss.backward()
        return (loss.detach(),)

    run: Any = backward
    if recorded:
        run = CudaGraphRunner(backward) if in_place else CudaGraphRunner(backward, model.parameters())
    losses = []
    for step, lengths in enumerate(sizes):
        optimiser.zero_grad(set_to_none=not in_place)
        for number in range(2 if twice else 1):
            torch.manual_seed(100 * step + number)
            losses.append(run(part(lengths, 10 * step + number, device))[0])
        optimiser.step()
    return [float(loss) for loss in losses], [p.detach().clone() for p in model.parameters()], run


def test_on_a_cpu_it_calls_through() -> None:
    losses, weights, _ = trained([[3, 2]] * 5, "cpu", True)
    wanted = trained([[3, 2]] * 5, "cpu", False)
    assert losses == wanted[0]
    assert all(torch.equal(ours, plain) for ours, plain in zip(weights, wanted[1], strict=True))


def test_a_shape_is_all_lengths_and_kinds_and_no_numbers() -> None:
    assert capture_key(part([3, 2], 1)) == capture_key(part([3, 2], 2))
    assert capture_key(part([3, 2], 1)) != capture_key(part([2, 3], 1))
    assert capture_key(part([3, 2], 1)) != capture_key(part([3, 2], 1)._replace(none=torch.zeros(1)))
    assert hash(capture_key(part([3, 2], 1))) == hash(capture_key(part([3, 2], 2)))


MANY = [[4, 4]] * 6 + [[3, 1]] * 2 + [[4, 4]] * 2 + [[2, 5]] * 5 + [[4, 4], [2, 5], [9], [4, 4]]


@needs_gpu
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_a_recorded_run_is_the_plain_one(twice: bool, in_place: bool) -> None:
    losses, weights, run = trained(MANY, "cuda", True, twice=twice, in_place=in_place)
    wanted = trained(MANY, "cuda", False, twice=twice, in_place=in_place)
    assert len(run.graphs) >= 2
    torch.testing.assert_close(losses, wanted[0])
    torch.testing.assert_close(weights, wanted[1])


@needs_gpu
def test_dropout_in_a_replay_follows_the_seed() -> None:
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH, device="cuda"))

    def backward(given: Part) -> tuple[Tensor]:
        loss = F.dropout(given.tokens.values @ weight, 0.5).square().sum()
        loss.backward()
        return (loss.detach(),)

    run, found = CudaGraphRunner(backward, [weight]), {}
    for seed in [1, 1, 1, 2, 1, 3, 2]:
        weight.grad = None
        torch.manual_seed(seed)
        found.setdefault(seed, set()).add(float(run(part([4, 4], 1, "cuda"))[0]))
    assert run.graphs
    assert [len(values) for values in found.values()] == [1, 1, 1]
    assert len(set.union(*found.values())) == 3


@needs_gpu
def test_what_asks_the_host_runs_plainly_and_is_said() -> None:
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH, device="cuda"))

    def backward(given: Part) -> tuple[Tensor]:
        loss = (given.tokens.values @ weight).square().sum()
        loss.backward()
        given.labels.sum().item()
        return (loss.detach(),)

    run, losses, grown = CudaGraphRunner(backward, [weight]), [], []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(5):
            weight.grad = None
            losses.append(float(run(part([4, 4], 1, "cuda"))[0]))
            grown.append(float(weight.grad.sum()))
    assert ["CUDA graph" in str(warning.message) for warning in said] == [True]
    assert len(set(losses)) == len(set(grown)) == 1
    torch.manual_seed(5)
    assert torch.rand(3, device="cuda").shape == (3,)  # the random numbers are still there


@needs_gpu
def test_varied_shapes_are_never_recorded_and_few_are_remembered() -> None:
    _, _, run = trained([[n] for n in range(1, 200)], "cuda", True)
    assert not run.graphs
    assert len(run.call_counts) <= 64
