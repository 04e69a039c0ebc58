"""A batch in a frame has the loss and the gradient that it has without; all batches in one frame have one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from words import write_task

from qkv.checkpoints.safetensors_io import load_tensors
from qkv.families import bert, gpt2, rnn, t5, transformer
from qkv.nn import BatchLayout, Ragged, build
from qkv.objectives import classification, seq2seq
from qkv.objectives.classification import Inputs, head_logits
from qkv.objectives.loss import to_device
from qkv.recipe import read_recipe
from qkv.train.fit import fit
from qkv.train.perf.cuda_graphs import CudaGraphRunner, capture_key
from qkv.train.perf.static_batch import LayoutShape, StaticShapes
from qkv.train.step import TrainStep

LABELS = ("bad", "good", "neither")
LENGTHS = [[5, 3, 9], [2, 2, 2, 7], [9, 8], [4, 4, 4, 4, 1]]
FRAME = LayoutShape(7, 24, 9)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are recorded on a GPU, and there is none")

LOSSES: dict[str, Callable[..., Any]] = {
    "class": classification.cross_entropy,
    "tags": classification.cross_entropy,
    "numbers": classification.mse,
    "several": classification.multi_label_bce,
    "span": classification.span_cross_entropy,
    "choice": classification.multiple_choice_ce,
}
CHOICES = {3: [2, 1], 4: [1, 3], 2: [2], 5: [2, 2, 1]}  # of that many texts
PAIRS: dict[str, Callable[..., Tensor]] = {
    "pairs": partial(seq2seq.loss, label_smoothing=0.1),
    "r-drop": partial(seq2seq.loss, rdrop_alpha=2.0),
}


def batch(lengths: Sequence[int], seed: int = 0, kind: str = "class") -> Any:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    source = Ragged.from_lengths(draw(1, 40, sum(lengths)), list(lengths))
    if kind in PAIRS:
        sizes = [9 - n // 2 for n in lengths]
        target = Ragged.from_lengths(draw(1, 40, sum(sizes)), sizes)
        return seq2seq.Inputs(source, target, draw(1, 40, sum(sizes)))
    if kind == "choice":
        choices = BatchLayout(CHOICES[len(lengths)])
        return Inputs(source, None, None, torch.zeros(len(choices), dtype=torch.long), choices)
    at = torch.arange(0, sum(lengths), 2) if kind == "tags" else None
    labels = draw(0, len(LABELS), len(lengths if at is None else at))
    if kind == "numbers":
        labels = labels / 7
    if kind == "several":
        labels = draw(0, 2, len(lengths), len(LABELS)).float()
    if kind == "span":
        labels = torch.tensor([[0, n - 1] for n in lengths])
    return Inputs(source, None, at, labels)


def frame(kind: str) -> StaticShapes:
    if kind in PAIRS:
        return StaticShapes((((FRAME,), (LayoutShape(7, 48, 9),)),))
    if kind == "choice":
        return StaticShapes((((LayoutShape(5, 7, 4), FRAME),),))
    return StaticShapes((((FRAME,),),))


def tiny(family: str, kind: str = "class") -> Any:
    torch.manual_seed(3)
    if kind in PAIRS:
        module, shape = {
            "t5": (t5, {"d_ff": 32, "layers": 2}),
            "transformer": (transformer, {"d_ff": 32, "layers": 2}),
        }[family]
        config = module.Config(d_model=16, heads=2, **shape)
        return build(module.make_spec(config, source_vocab_size=40, target_vocab_size=40)).eval()
    module, fields = {"bert": (bert, {"source_vocab_size": 40}), "gpt2": (gpt2, {"target_vocab_size": 40})}[family]
    config = module.Config(d_model=16, heads=2, layers=2, d_ff=32)
    head = {"tags": "token", "span": "span", "choice": "choice"}.get(kind, "sequence")
    return build(module.make_spec(config, head=head, labels=LABELS, **fields)).eval()  # nothing is dropped


def loss_of(model: nn.Module, given: Any, kind: str) -> Tensor:
    if kind in PAIRS:
        return PAIRS[kind](model, given)
    total: Tensor = LOSSES[kind](head_logits(model, given), given).total
    return total


def learned(family: str, given: Any, kind: str) -> tuple[Tensor, list[Tensor]]:
    model = tiny(family, kind).double()
    total = loss_of(model, given, kind)
    total.backward()
    return total.detach(), [torch.zeros(1) if p.grad is None else p.grad for p in model.parameters()]


CASES = [("bert", kind) for kind in LOSSES] + [("gpt2", kind) for kind in LOSSES if kind != "span"]
CASES += [(family, kind) for family in ("transformer", "t5") for kind in PAIRS]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_frame_changes_neither_the_loss_nor_the_gradient(family: str, kind: str) -> None:
    for lengths in LENGTHS:
        alone, gradient = learned(family, batch(lengths, kind=kind), kind)
        inside = frame(kind).pad(batch(lengths, kind=kind))
        assert len(inside.source.values) == FRAME.num_tokens
        assert len(inside.source) == FRAME.num_sequences
        total, found = learned(family, inside, kind)
        torch.testing.assert_close(total, alone, atol=1e-5, rtol=1e-6)  # the divergence of R-Drop is in float32
        for ours, wanted in zip(found, gradient, strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", [*LOSSES, *PAIRS])
def test_all_batches_in_a_frame_have_one_shape(kind: str) -> None:
    assert len({capture_key(frame(kind).pad(batch(lengths, kind=kind))) for lengths in LENGTHS}) == 1
    assert len({capture_key(batch(lengths, kind=kind)) for lengths in LENGTHS}) == len(LENGTHS)


@pytest.mark.parametrize(
    "lengths",
    [[1] * 6, [1] * 8, [9, 9, 7], [33]],
    ids=["few tokens", "more sequences", "more tokens", "longer than kernels pad"],
)
def test_what_does_not_fit_stays_as_it_is(lengths: list[int]) -> None:
    given = batch(lengths)
    assert frame("class").pad(given) is given


@pytest.mark.parametrize("kind", [*LOSSES, *PAIRS])
def test_frames_are_chosen_that_fit_the_batches_they_are_chosen_by(kind: str) -> None:
    parts = [batch(LENGTHS[number % len(LENGTHS)], number, kind) for number in range(20)]
    for num_shapes in (1, 2, 4):
        shapes = StaticShapes.choose(parts, num_shapes)
        keys = {capture_key(shapes.pad(part)) for part in parts}
        assert 1 <= len(keys) <= num_shapes
        assert all(layout.is_static for part in parts for (*_, layout) in shapes.pad(part).layout_chains)


def test_batches_of_long_and_of_short_texts_get_frames_with_few_added_tokens() -> None:
    parts = [batch([n] * (960 // n)) for n in (4, 5, 6, 8, 10, 12, 15, 16, 20, 24, 30, 32)]
    sizes = [
        sum(len(shapes.pad(part).source.values) for part in parts) for shapes in map(partial(choose, parts), (1, 4))
    ]
    assert sizes[1] < 0.9 * sizes[0]


def choose(parts: list[Any], num_shapes: int) -> StaticShapes:
    shapes = StaticShapes.choose(parts, num_shapes)
    assert shapes is not None
    assert len(shapes.shapes) <= num_shapes + 1
    return shapes


def test_a_batch_that_is_somewhat_larger_than_all_that_were_seen_gets_a_frame() -> None:
    shapes = choose([batch([9, 9, 9, 9] * 20)] * 9, 4)
    assert shapes.pad(batch([9, 9, 9, 9] * 21)).source.layout.is_static
    assert not shapes.pad(batch([9, 9, 9, 9] * 30)).source.layout.is_static


def test_the_small_last_batch_of_an_epoch_does_not_count() -> None:
    assert choose([batch([9, 9, 9])] * 9 + [batch([3])], 1) == choose([batch([9, 9, 9])] * 9, 1)


def test_a_frame_is_the_same_for_texts_that_kernels_pad_to_the_same_length() -> None:
    shapes = StaticShapes((((LayoutShape(7, 300, 60),),),))
    parts = [shapes.pad(batch(lengths)) for lengths in ([9, 8], [60, 20], [64])]
    assert all(len(part.source.values) == 300 for part in parts)
    assert len({capture_key(part) for part in parts}) == 1
    assert all(max(part.source.layout.lengths_list[2:]) <= 60 for part in parts)  # of what was added
    assert not shapes.pad(batch([65])).source.layout.is_static


def test_sequences_that_are_equally_long_in_a_frame_by_chance_are_not_taken_for_a_padded_batch() -> None:
    shapes = StaticShapes((((LayoutShape(4, 24, 9),),),))
    inside = shapes.pad(batch([6, 6]))
    assert inside.source.layout.lengths_list == (6, 6, 6, 6)
    moved = to_device(inside, "cpu").source.layout
    assert moved.is_static
    assert not moved.is_uniform
    assert capture_key(inside) == capture_key(shapes.pad(batch([9, 8])))


def test_what_is_asked_of_means_of_words_is_not_framed() -> None:
    words = batch(LENGTHS[0])
    others = [
        words._replace(labels=torch.zeros(17, dtype=torch.long)),  # a tag for each token, which none is named of
        words._replace(word_ids=((0, 0, 1, 1, 1), (0, 0, 0), (0,) * 9)),
        words._replace(head_inputs=torch.zeros(3, 16)),
        words._replace(source=Ragged(torch.zeros(17, 3), words.source.layout)),
    ]
    assert frame("class").pad(words) is not words
    assert all(frame("class").pad(other) is other for other in others)
    assert StaticShapes.choose([words, *others]) is None


@pytest.mark.parametrize("kind", ["class", "r-drop"])
def test_a_refilled_layout_reads_as_the_other_one(kind: str) -> None:
    """What a graph does in a replay: the tensors of a layout hold the numbers of another one, and plans are new."""
    model = tiny("transformer" if kind == "r-drop" else "bert", kind)
    mine, other = (frame(kind).pad(batch(lengths, kind=kind)) for lengths in LENGTHS[:2])
    wanted = loss_of(model, other, kind)
    loss_of(model, mine, kind)
    for (layout,), (other_layout,) in zip(mine.layout_chains, other.layout_chains, strict=True):
        assert layout.can_copy_from
        layout.copy_from(other_layout)
        layout.plan_cache.clear()
    refilled = type(mine)(*(mine_or(a, b) for a, b in zip(mine, other, strict=True)))
    torch.testing.assert_close(loss_of(model, refilled, kind), wanted)


def mine_or(mine: Any, other: Any) -> Any:
    return mine.with_values(other.values) if isinstance(mine, Ragged) else other


def test_a_layout_whose_lengths_were_used_on_the_host_is_not_refilled() -> None:
    given = frame("pairs").pad(batch(LENGTHS[0], kind="pairs"))
    config = rnn.Config(d_model=8, hidden_size=8)
    model = build(rnn.make_spec(config, source_vocab_size=40, target_vocab_size=40))
    seq2seq.loss(model, given, rdrop_alpha=1.0)  # through the layout of the batch that is repeated
    assert not given.source.layout.can_copy_from
    assert not given.target.layout.can_copy_from


STILL = ["model.dropout=0", "train.max_steps=6", "train.log_every=1", "validation.every_steps=6"]


def trained(folder: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, *changes: str) -> tuple[list[Any], list[bool]]:
    """The records of a run whose batches are framed as on a GPU, and whether each was."""
    framed = []

    def pad_all(step: TrainStep) -> None:
        step.backward.enabled = True
        choose_shapes(step)

    def watch(runner: CudaGraphRunner, given: Any) -> Any:
        framed.append(given.source.layout.is_static)
        return runner.backward(given)

    choose_shapes = TrainStep.choose_static_shapes
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "choose_static_shapes", pad_all)
        patch.setattr(CudaGraphRunner, "__call__", watch)
        records = list(fit(read_recipe(recipe, [*STILL, *changes]), folder, device="cpu"))
    return [record.values for record in records if record.kind == "train"], framed


@pytest.mark.parametrize("changes", [[], ["train.gradient_accumulation_steps=2", "train.rdrop_alpha=2"]], ids=str)
def test_a_run_with_framed_batches_has_the_losses_of_one_without(
    changes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_task(tmp_path)
    ours, framed = trained(tmp_path / "framed", recipe, monkeypatch, *changes)
    records = list(fit(read_recipe(recipe, [*STILL, *changes]), tmp_path / "plain", device="cpu"))
    plain = [record.values for record in records if record.kind == "train"]
    assert framed == [True] * len(framed)
    assert [values["loss"] for values in ours] == pytest.approx([values["loss"] for values in plain], rel=1e-4)


def test_frames_do_not_depend_on_the_step_at_which_a_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, changes = write_task(tmp_path), ["model.dropout=0.1", "train.save_every=1"]
    trained(tmp_path / "whole", recipe, monkeypatch, *changes)
    trained(tmp_path / "cut", recipe, monkeypatch, *changes, "train.max_steps=3", "train.keep_checkpoint=true")
    trained(tmp_path / "cut", recipe, monkeypatch, *changes)
    whole, cut = (load_tensors(tmp_path / name / "model.safetensors")[0] for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@needs_gpu
@pytest.mark.parametrize("half", [True, False], ids=["half precision", "float32"])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_one_recording_serves_all_batches_of_a_frame(family: str, kind: str, half: bool) -> None:
    model = tiny(family, kind).cuda()

    def backward(given: Any) -> tuple[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            total = loss_of(model, given, kind)
        total.backward()
        return (total.detach(),)

    def passes(run: Any) -> list[list[Tensor]]:
        found = []
        for number in range(8):
            model.zero_grad(set_to_none=True)
            given = to_device(frame(kind).pad(batch(LENGTHS[number % 4], number, kind)), "cuda")
            found.append([run(given)[0], *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        return found

    recorded = CudaGraphRunner(backward, model.parameters(), capture_all=False)
    recorded.static_shapes = frame(kind)
    tolerance = {"atol": 1e-2, "rtol": 2e-2} if half else {"atol": 1e-5, "rtol": 1e-4}
    for ours, wanted in zip(passes(recorded), passes(backward), strict=True):
        torch.testing.assert_close(ours, wanted, **tolerance)
    assert recorded.enabled
    assert len(recorded.graphs) == 1


@needs_gpu
def test_a_model_that_needs_the_lengths_on_the_host_is_no_longer_framed() -> None:
    config = rnn.Config(d_model=16, hidden_size=16, dropout=0.0)
    model = build(rnn.make_spec(config, source_vocab_size=40, target_vocab_size=40)).cuda()  # nothing is dropped

    def backward(given: Any) -> tuple[Tensor]:
        total = seq2seq.loss(model, given)
        total.backward()
        return (total.detach(),)

    recorded = CudaGraphRunner(backward, model.parameters(), capture_all=False)
    recorded.static_shapes = frame("pairs")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for number in range(6):
            given = recorded.pad(words := batch(LENGTHS[number % 4], number, "pairs"))
            model.zero_grad(set_to_none=True)
            wanted = backward(to_device(words, "cuda"))[0]
            model.zero_grad(set_to_none=True)
            torch.testing.assert_close(recorded(to_device(given, "cuda"))[0], wanted)
    assert not recorded.graphs
    assert recorded.pad(words) is words
