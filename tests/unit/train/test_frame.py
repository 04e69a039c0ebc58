"""A batch in a frame has the loss and the gradient that it has without; all batches in one frame have one shape."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from qkv.families import bert, gpt2
from qkv.nn import Ragged, build
from qkv.objectives.classification import Inputs, cross_entropy, head_logits, mse, multi_label_bce
from qkv.objectives.loss import to_device
from qkv.train.perf.cuda_graphs import CudaGraphRunner, capture_key
from qkv.train.perf.static_batch import StaticShapePadder, pad_to_static

LABELS = ("bad", "good", "neither")
LENGTHS = [[5, 3, 9], [2, 2, 2, 7], [9, 8], [4, 4, 4, 4, 1]]
FRAME = 24, 7, 9
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are recorded on a GPU, and there is none")


LOSSES = {"class": cross_entropy, "tags": cross_entropy, "numbers": mse, "several": multi_label_bce}


def batch(lengths: Sequence[int], seed: int = 0, kind: str = "class") -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 40, (sum(lengths),), generator=generator)
    at = torch.arange(0, sum(lengths), 2) if kind == "tags" else None
    labels = torch.randint(0, len(LABELS), (len(lengths if at is None else at),), generator=generator)
    if kind == "numbers":
        labels = labels / 7
    if kind == "several":
        labels = torch.randint(0, 2, (len(lengths), len(LABELS)), generator=generator).float()
    return Inputs(Ragged.from_lengths(ids, list(lengths)), None, at, labels)


def tiny(family: str, kind: str = "class"):
    torch.manual_seed(3)
    module, fields = {"bert": (bert, {"source_vocab_size": 40}), "gpt2": (gpt2, {"target_vocab_size": 40})}[family]
    shape = module.Config(d_model=16, heads=2, layers=2, d_ff=32)
    head = "token" if kind == "tags" else "sequence"
    return build(module.make_spec(shape, head=head, labels=LABELS, **fields)).eval()  # nothing is dropped


def learned(family: str, given: Inputs, kind: str = "class") -> tuple[Tensor, list[Tensor]]:
    model = tiny(family, kind).double()
    total = LOSSES[kind](head_logits(model, given), given).total
    total.backward()
    return total.detach(), [torch.zeros(1) if p.grad is None else p.grad for p in model.parameters()]


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_frame_changes_neither_the_loss_nor_the_gradient(family: str, lengths: list[int], kind: str) -> None:
    alone, gradient = learned(family, batch(lengths, kind=kind), kind)
    inside = pad_to_static(batch(lengths, kind=kind), *FRAME)
    assert len(inside.source.values) == FRAME[0]
    assert len(inside.source) == FRAME[1]
    assert len(inside.labels) == (FRAME[0] if kind == "tags" else FRAME[1])
    total, found = learned(family, inside, kind)
    torch.testing.assert_close(total, alone)
    for ours, wanted in zip(found, gradient, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-10, rtol=1e-7)


@pytest.mark.parametrize("kind", LOSSES)
def test_all_batches_in_a_frame_have_one_shape(kind: str) -> None:
    assert len({capture_key(pad_to_static(batch(lengths, kind=kind), *FRAME)) for lengths in LENGTHS}) == 1
    assert len({capture_key(batch(lengths)) for lengths in LENGTHS}) == len(LENGTHS)


@pytest.mark.parametrize("lengths", [[1] * 6, [1] * 7, [9, 9, 5]], ids=["few tokens", "more sequences", "more tokens"])
def test_what_does_not_fit_stays_as_it_is(lengths: list[int]) -> None:
    given = batch(lengths)
    assert pad_to_static(given, *FRAME) is given


def test_a_frame_is_learned_that_fits_the_batches_it_was_learned_from() -> None:
    framing = StaticShapePadder()
    parts = [batch(LENGTHS[number % len(LENGTHS)], number) for number in range(20)]
    first = [framing(part) for part in parts[:16]]
    assert all(given is part for given, part in zip(first, parts, strict=False))
    assert len({capture_key(framing(part)) for part in parts}) == 1


def test_a_frame_does_not_depend_on_the_longest_sequence_as_long_as_kernels_do_not() -> None:
    frame = 300, 7, 60
    parts = [pad_to_static(batch(lengths), *frame) for lengths in ([9, 8], [100, 20], [128], [129])]
    assert all(len(part.source.values) == 300 for part in parts)
    assert len({capture_key(part) for part in parts[:3]}) == 1
    assert capture_key(parts[3]) != capture_key(parts[0])
    assert all(max(part.source.layout.lengths_list[2:]) <= 60 for part in parts)  # of what was added


def test_sequences_that_are_equally_long_in_a_frame_by_chance_are_not_taken_for_a_padded_batch() -> None:
    inside = pad_to_static(batch([6, 6]), 24, 4, 9)
    assert inside.source.layout.lengths_list == (6, 6, 6, 6)
    moved = to_device(inside, "cpu").source.layout
    assert moved.is_static
    assert not moved.is_uniform
    assert capture_key(inside) == capture_key(pad_to_static(batch([9, 8]), 24, 4, 9))


def test_a_frame_grows_for_batches_that_are_no_remainders_but_not_for_ever() -> None:
    framing = StaticShapePadder()
    for number in range(16):
        framing(batch([5, 4, 3], number))
    tokens = [framing.static_shape[0]]
    for lengths in ([40] * 5, [90] * 9, [99] * 20, [2]):
        assert framing(batch(lengths)).source.layout.lengths_list == tuple(
            lengths
        )  # it goes as it came, the next one not
        tokens.append(framing.static_shape[0])
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == 3  # twice larger
    again = framing(batch([90] * 9, 1))
    assert len(again.source.values) == tokens[-1]


def test_what_is_asked_of_spans_choices_or_means_of_words_is_not_framed() -> None:
    framing, words = StaticShapePadder(static_shape=FRAME), batch(LENGTHS[0])
    others = [
        words._replace(labels=torch.zeros(3, 2, dtype=torch.long)),  # first and last token of a span
        words._replace(labels=torch.zeros(17, dtype=torch.long)),  # a tag for each token, which none is named of
        words._replace(num_choices=(2, 1)),
        words._replace(word_ids=((0, 0, 1, 1, 1), (0, 0, 0), (0,) * 9)),
    ]
    assert framing(words) is not words
    assert all(framing(other) is other for other in others)


def test_a_refilled_layout_reads_as_the_other_one() -> None:
    mine, other = (pad_to_static(batch(lengths), *FRAME).source.layout for lengths in LENGTHS[:2])
    mine.pooled_tokens("first"), mine.pooled_tokens("last")
    assert mine.can_copy_from
    mine.copy_from(other)
    for name in ("lengths", "cu_seqlens", "positions"):
        assert torch.equal(getattr(mine, name), getattr(other, name))
    for which in ("first", "last"):
        assert torch.equal(mine.pooled_tokens(which).indices, other.pooled_tokens(which).indices)


def test_a_layout_that_a_kernel_planned_for_is_not_refilled() -> None:
    given = pad_to_static(batch(LENGTHS[0]), *FRAME)
    head_logits(tiny("bert"), given)  # on a CPU lengths go into a plan
    assert not given.source.layout.can_copy_from


@needs_gpu
@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("kind", LOSSES)
def test_one_recording_serves_all_batches_of_a_frame(family: str, kind: str) -> None:
    model = tiny(family, kind).cuda()

    def backward(given: Inputs) -> tuple[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            total = LOSSES[kind](head_logits(model, given), given).total
        total.backward()
        return (total.detach(),)

    def passes(run) -> list[list[Tensor]]:
        found = []
        for number in range(8):
            model.zero_grad(set_to_none=True)
            given = to_device(pad_to_static(batch(LENGTHS[number % 4], number, kind), *FRAME), "cuda")
            found.append([run(given)[0], *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        return found

    recorded = CudaGraphRunner(backward, model.parameters(), StaticShapePadder(), capture_all=False)
    for ours, wanted in zip(passes(recorded), passes(backward), strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-2, rtol=2e-2)
    assert recorded.enabled
    assert len(recorded.graphs) == 1


@needs_gpu
def test_a_model_whose_kernels_plan_for_lengths_is_no_longer_framed() -> None:
    model = tiny("bert").cuda()  # in float32 attention goes through padded groups

    def backward(given: Inputs) -> tuple[Tensor]:
        total = cross_entropy(head_logits(model, given), given).total
        total.backward()
        return (total.detach(),)

    recorded = CudaGraphRunner(backward, model.parameters(), StaticShapePadder(static_shape=FRAME), capture_all=False)
    for number in range(6):
        given = recorded.pad(batch(LENGTHS[number % 4], number))
        wanted = backward(to_device(batch(LENGTHS[number % 4], number), "cuda"))[0]
        torch.testing.assert_close(recorded(to_device(given, "cuda"))[0], wanted)
    assert not recorded.graphs
    assert recorded.pad(words := batch(LENGTHS[0])) is words
