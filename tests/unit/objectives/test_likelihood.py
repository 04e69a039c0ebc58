"""The one cross-entropy: in parts, padded, with its gradient worked out on the way, it is still the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv import spec
from qkv.nn.heads import Head
from qkv.objectives import chunked_cross_entropy
from qkv.objectives.chunked_cross_entropy import chunked_nll, lm_head, nll, nll_and_grad, rdrop_nll

OUTPUTS, WIDTH = 101, 12  # an odd vocabulary, which is padded
HEADS = {
    "plain": {},
    "with a bias": {"bias": True},
    "with an offset": {"final_logits_bias": True},
    "with both": {"bias": True, "final_logits_bias": True},
    "scaled": {"input_scale": 0.3},
    "with a layer before": {"dense_activation": "gelu", "norm": spec.Norm(), "bias": True},
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel is for a GPU, and there is none")


def make(fields: dict[str, Any], device: str = "cpu", kind: torch.dtype = torch.float64) -> Head:
    torch.manual_seed(1)
    head = Head(spec.Head(kind="lm", d_model=WIDTH, num_outputs=OUTPUTS, **fields))
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    if head.final_logits_bias is not None:
        head.final_logits_bias.normal_()
    return head.to(device, kind)


def given(rows: int, device: str = "cpu", kind: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    hidden = torch.randn(rows, WIDTH, device=device, dtype=kind, requires_grad=True)
    return hidden, torch.randint(0, OUTPUTS, (rows,), device=device)


def plainly(head: Head, hidden: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(head(hidden), labels, reduction="sum", label_smoothing=smoothing)


def gradients(head: Head, hidden: Tensor, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss / 7, [hidden, *head.parameters()]))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("fields", HEADS.values(), ids=HEADS)
def test_on_a_cpu_it_is_torchs_own_to_the_bit(fields: dict[str, Any], smoothing: float) -> None:
    head, (hidden, labels) = make(fields, kind=torch.float32), given(9, kind=torch.float32)
    found, wanted = (
        nll(head, head.compute_features(hidden), labels, smoothing),
        plainly(head, hidden, labels, smoothing),
    )
    assert torch.equal(found, wanted)
    pairs = zip(gradients(head, hidden, found), gradients(head, hidden, wanted), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("fields", HEADS.values(), ids=HEADS)
def test_in_parts_it_has_the_same_value_and_the_same_gradients(
    fields: dict[str, Any], smoothing: float, rows: int
) -> None:
    head, (hidden, labels) = make(fields), given(rows)
    found = chunked_nll(head, head.compute_features(hidden), labels, smoothing, torch.float64, max_logits=128 * 128)
    wanted = plainly(head, hidden, labels, smoothing)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(head, hidden, found), gradients(head, hidden, wanted))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("fields", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("rows", [2, 300])
def test_r_drop_in_parts_has_the_value_and_the_gradients_of_the_whole(
    fields: dict[str, Any], smoothing: float, rows: int
) -> None:
    head, (hidden, labels) = make(fields), given(2 * rows)
    labels = labels[:rows].clone()
    labels[1::3] = -100
    features = head.compute_features(hidden)
    found = chunked_nll(head, features, labels, smoothing, torch.float64, max_logits=256 * 128, rdrop_alpha=2.0)
    wanted = rdrop_nll(head, head.compute_features(hidden), labels, smoothing, 2.0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)  # the divergence of the whole is in float32
    torch.testing.assert_close(gradients(head, hidden, found), gradients(head, hidden, wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_without_a_label_cost_nothing_and_teach_nothing(smoothing: float) -> None:
    head, (hidden, labels) = make({"bias": True}), given(9)
    wanted = chunked_nll(head, hidden[:5], labels[:5], smoothing, torch.float64)
    wanted_gradients = gradients(head, hidden, wanted)
    labels[5:] = -100
    for found in (chunked_nll(head, hidden, labels, smoothing, torch.float64), nll(head, hidden, labels, smoothing)):
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(gradients(head, hidden, found), wanted_gradients)


def test_no_part_has_more_logits_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    head, (hidden, labels) = make({}), given(1000)
    seen = []

    def watched(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        seen.append(logits.numel())
        return nll_and_grad(logits, *rest)

    monkeypatch.setattr(chunked_cross_entropy, "nll_and_grad", watched)
    chunked_nll(head, hidden, labels, 0.0, torch.float64, max_logits=300 * 128)
    assert len(seen) == 4
    assert max(seen) <= 300 * 128


def test_no_rows_cost_nothing_and_teach_nothing() -> None:
    head, (hidden, labels) = make({"bias": True}), given(0)
    loss = chunked_nll(head, hidden, labels, 0.0, torch.float64)
    loss.backward()
    assert loss.item() == 0
    assert head.linear is not None
    assert not head.linear.weight.grad.any()


def test_a_frozen_matrix_gets_no_gradient_and_its_rows_do() -> None:
    head, (hidden, labels) = make({}), given(5)
    head.requires_grad_(False)
    chunked_nll(head, hidden, labels, 0.0, torch.float64).backward()
    assert head.linear is not None
    assert head.linear.weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.any()


def test_without_gradients_none_is_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    head, (hidden, labels) = make({}), given(5)
    wanted = plainly(head, hidden, labels, 0.0)

    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(chunked_cross_entropy, "_add_product", never)
    with torch.no_grad():
        torch.testing.assert_close(chunked_nll(head, hidden, labels, 0.0, torch.float64), wanted)


def test_the_head_is_found_inside_what_wraps_a_model() -> None:
    model, around = nn.Module(), nn.Module()
    model.head, around.module = make({}), model
    assert lm_head(model) is lm_head(around) is model.head


@needs_gpu
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("fields", HEADS.values(), ids=HEADS)
def test_on_a_gpu_in_half_precision_it_is_near_the_exact_one(fields: dict[str, Any], smoothing: float) -> None:
    head, (hidden, labels) = make(fields, "cuda", torch.float32), given(300, "cuda", torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        found = nll(head, head.compute_features(hidden), labels, smoothing)
    wanted = plainly(head, hidden, labels, smoothing)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0.0)
    for ours, exact in zip(gradients(head, hidden, found), gradients(head, hidden, wanted), strict=True):
        assert (ours - exact).norm() <= 3e-2 * exact.norm()


@needs_gpu
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("added", [False, True])
def test_the_kernel_says_what_torchs_operations_say(added: bool, smoothing: float) -> None:
    from qkv.objectives.triton_cross_entropy import nll_and_grad_

    logits, labels = torch.randn(70, 5056, device="cuda"), torch.randint(0, 5001, (70,), device="cuda")
    labels[3:9] = -100
    more = torch.randn(5001, device="cuda") if added else None
    wanted = nll_and_grad(logits.clone(), more, labels, 5001, smoothing)
    torch.testing.assert_close(nll_and_grad_(logits.clone(), more, labels, 5001, smoothing), wanted)
    wanted = nll_and_grad(logits.clone(), more, labels[:35], 5001, smoothing, 3.0)
    torch.testing.assert_close(nll_and_grad_(logits, more, labels[:35], 5001, smoothing, 3.0), wanted)
