"""XLNet against Hugging Face's, tiny and odd: every head, order of factorization, segments and memory.

Sequences are compared one at a time or in batches of equal length where transformers reads the last token of a padded
row: its heads expect padding on the left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from both import (
    NEAR,
    Both,
    check_gradients,
    check_logits,
    check_maps,
    check_own_round_trip,
    check_round_trip,
    randomised,
)
from torch import Tensor

from qkv import checkpoints
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.nn import Ragged
from qkv.objectives import plm
from qkv.tokenization.vocab_tables import VocabTables

ODD: dict[str, Any] = {
    "vocab_size": 31,
    "d_model": 30,
    "n_layer": 3,
    "n_head": 5,
    "d_inner": 51,
    "num_labels": 4,
    "mem_len": 7,
    "dropout": 0.0,
}
CASES = {
    "LMHeadModel": ("LMHeadModel", {}),
    "ForTokenClassification": ("ForTokenClassification", {}),
    "ForQuestionAnsweringSimple": ("ForQuestionAnsweringSimple", {"num_labels": 2}),
    "Model": ("Model", {}),
    "relu": ("LMHeadModel", {"ff_activation": "relu"}),
    "clamped distances": ("LMHeadModel", {"clamp_len": 3}),
    "untied": ("LMHeadModel", {"tie_word_embeddings": False}),
    "other epsilon and one layer": ("ForTokenClassification", {"layer_norm_eps": 1e-3, "n_layer": 1}),
}
POOLED = {
    "ForSequenceClassification": ("ForSequenceClassification", {}),
    "regression": ("ForSequenceClassification", {"num_labels": 1}),
    "first": ("ForSequenceClassification", {"summary_type": "first"}),
    "mean": ("ForSequenceClassification", {"summary_type": "mean"}),
}
LENGTH, ROWS = 9, 4


def make(tmp_path: Path, name: str, changes: dict[str, Any]) -> Both:
    config = transformers.XLNetConfig(**(ODD | changes))
    return Both(randomised(getattr(transformers, f"XLNet{name}")(config)), tmp_path / "theirs")


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Both:
    return make(tmp_path, *request.param)


def even_batch(seed: int = 1, length: int = LENGTH) -> tuple[Ragged, Tensor]:
    """Return tokens of sequences of equal length, packed and padded."""
    ids = torch.randint(3, ODD["vocab_size"], (ROWS, length), generator=torch.Generator().manual_seed(seed))
    return Ragged.from_lengths(ids.flatten(), [length] * ROWS), ids


def near(ours: Tensor, theirs: Tensor) -> bool:
    assert ours.shape == theirs.shape
    ours, theirs = ours.detach(), theirs.detach()
    assert float(theirs.abs().max()) > 0.1, "the models say next to nothing: nothing would be compared"
    return float((ours - theirs).abs().max()) <= NEAR


def random_order(length: int, num_targets: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the rank of each token, 0 for tokens that are given, and the targets in the order of the text."""
    targets = torch.randperm(length, generator=torch.Generator().manual_seed(seed))[:num_targets]
    ranks = torch.zeros(length, dtype=torch.long)
    ranks[targets] = torch.arange(1, num_targets + 1)
    return ranks, targets.sort().values


def permutation_mask(ranks: Tensor) -> Tensor:
    """Return what transformers calls perm_mask: 1 where token i may not attend to token j.  # [n] -> [n, n]"""
    is_hidden = (ranks[:, None] <= ranks[None]) & (ranks > 0)[None]
    return is_hidden.float()


def test_logits_equal_theirs(both: Both) -> None:
    check_logits(both)


def test_gradients_equal_theirs(both: Both) -> None:
    check_gradients(both)


def test_out_and_in_again_gives_equal_bytes(both: Both, tmp_path: Path) -> None:
    check_own_round_trip(both, tmp_path / "own")
    check_round_trip(both, tmp_path / "again")


@pytest.mark.parametrize("case", POOLED.values(), ids=POOLED.keys())
def test_heads_that_pool_equal_theirs_and_come_back(case: Any, tmp_path: Path) -> None:
    both = make(tmp_path, *case)
    source, padded = even_batch()
    segments = source.layout.positions.ge(5).long()
    theirs = both.theirs(padded, token_type_ids=segments.view(ROWS, -1)).logits
    assert near(both.ours.model(source, segments), theirs)
    checkpoints.save(both.ours, tmp_path / "again", "huggingface")
    again = transformers.XLNetForSequenceClassification.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(padded, token_type_ids=segments.view(ROWS, -1)).logits, theirs)


def test_multiple_choice_scores_each_choice(tmp_path: Path) -> None:
    both = make(tmp_path, "ForMultipleChoice", {})
    source, padded = even_batch()
    theirs = both.theirs(padded.view(2, 2, -1)).logits
    assert near(both.ours.model(source).view(2, 2), theirs)


def test_captured_maps_equal_their_attention(tmp_path: Path) -> None:
    check_maps(make(tmp_path, "LMHeadModel", {}), attentions="encoder.{i}.self_attention")


def test_segments_are_compared_as_theirs_are(tmp_path: Path) -> None:
    both = make(tmp_path, "LMHeadModel", {})
    source = both.source()
    segments = source.with_values(source.layout.positions % 3)
    ours = both.ours.model(source, segments.values)
    theirs = both.their_logits(token_type_ids=segments.to_padded().long())
    assert near(ours, theirs)


def two_streams(both: Both, lengths: list[int], seed: int = 0, with_segments: bool = True) -> tuple[Tensor, Tensor]:
    """Return the logits of both models for random orders, with several targets in each sequence."""
    ranks, targets, theirs, offset = [], [], [], 0
    tokens = [torch.randint(3, 31, (n,), generator=torch.Generator().manual_seed(n + seed)) for n in lengths]
    for length, ids in zip(lengths, tokens, strict=True):
        sequence_ranks, sequence_targets = random_order(length, max(1, length // 3), seed + length)
        mapping = torch.nn.functional.one_hot(sequence_targets, length).float()
        segments = (torch.arange(length) // 3)[None] if with_segments else None
        mask = permutation_mask(sequence_ranks)[None]
        out = both.theirs(ids[None], perm_mask=mask, target_mapping=mapping[None], token_type_ids=segments)
        theirs.append(out.logits[0])
        ranks.append(sequence_ranks)
        targets.append(sequence_targets + offset)
        offset += length
    source = Ragged.pack(tokens)
    segments = source.layout.positions // 3 if with_segments else None
    ours = both.ours.model(source, segments, torch.cat(targets), order=torch.cat(ranks))
    return ours, torch.cat(theirs)


@pytest.mark.parametrize("with_segments", [True, False])
def test_two_streams_equal_theirs_for_given_orders_and_odd_lengths(with_segments: bool, tmp_path: Path) -> None:
    ours, theirs = two_streams(make(tmp_path, "LMHeadModel", {}), [9, 2, 41, 7, 3], with_segments=with_segments)
    assert near(ours, theirs)


def test_gradients_of_two_streams_equal_theirs(tmp_path: Path) -> None:
    both = make(tmp_path, "LMHeadModel", {})
    logits = two_streams(both, [9, 2, 41, 7, 3])
    check_gradients(both, lambda: logits[0], lambda: logits[1])
    assert both.ours.model.source_embedding.query_vector.grad.any()


@pytest.mark.parametrize("changes", [{}, {"reuse_len": 4}, {"mem_len": 20}, {"clamp_len": 5}], ids=str)
@pytest.mark.parametrize("has_segments", [True, False])
def test_memory_over_three_segments_equals_theirs(changes: dict[str, Any], has_segments: bool, tmp_path: Path) -> None:
    both = make(tmp_path, "LMHeadModel", changes)
    model = both.ours.model
    assert model.has_memory
    memory, mems = model.initial_memory(ROWS), None
    for part, length in enumerate((5, 9, 4)):
        source, padded = even_batch(part, length)
        segments = source.layout.positions % 2 if has_segments else None
        theirs = both.theirs(padded, mems=mems, token_type_ids=None if segments is None else segments.view(ROWS, -1))
        mems = theirs.mems
        ours, memory = model.forward_with_memory(source, memory, token_type_ids=segments)
        assert near(ours, theirs.logits.flatten(0, 1))


def test_two_streams_with_memory_equal_theirs(tmp_path: Path) -> None:
    both = make(tmp_path, "LMHeadModel", {})
    model = both.ours.model
    memory, mems = model.initial_memory(ROWS), None
    for part, length in enumerate((5, 9, 4)):
        source, padded = even_batch(part, length)
        orders = [random_order(length, 2, part + row) for row in range(ROWS)]
        mask = torch.stack([permutation_mask(ranks) for ranks, _ in orders])
        mapping = torch.stack([torch.nn.functional.one_hot(targets, length).float() for _, targets in orders])
        theirs = both.theirs(padded, mems=mems, perm_mask=mask, target_mapping=mapping)
        mems = theirs.mems
        ranks, targets = torch.cat([r for r, _ in orders]), [t + row * length for row, (_, t) in enumerate(orders)]
        ours, memory = model.forward_with_memory(source, memory, torch.cat(targets), order=ranks)
        assert near(ours, theirs.logits.flatten(0, 1))


def conditional_span(tmp_path: Path) -> tuple[Both, Ragged, Tensor, Tensor, Tensor]:
    """Return the model, its packed and padded input, the segments, and the mask of tokens that no answer has."""
    both = make(tmp_path, "ForQuestionAnswering", {"start_n_top": 3, "end_n_top": LENGTH})
    source, padded = even_batch()
    segments = (source.layout.positions >= 3).long()
    return both, source, padded, segments, (segments == 0).float().view(ROWS, -1)


def test_ends_given_the_best_starts_equal_theirs(tmp_path: Path) -> None:
    both, source, padded, segments, never = conditional_span(tmp_path)
    theirs = both.theirs(padded, token_type_ids=segments.view(ROWS, -1), p_mask=never)
    ours = both.ours.model(source, segments).view(ROWS, LENGTH, -1)
    starts = torch.softmax(ours[..., 0].masked_fill(never.bool(), float("-inf")), -1).topk(3)
    assert torch.equal(starts.indices, theirs.start_top_index)
    assert near(starts.values, theirs.start_top_log_probs)
    assert near(ours[:, 0, 1], theirs.cls_logits)
    ends = torch.softmax(ours[..., 2:].masked_fill(never.bool()[..., None], float("-inf")), 1)  # [B, n, starts]
    ranked = ends.topk(LENGTH, 1).values.reshape(ROWS, -1)
    assert near(ranked, theirs.end_top_log_probs)
    check_own_round_trip(both, tmp_path / "own")


def test_the_loss_of_given_starts_and_its_gradients_equal_theirs(tmp_path: Path) -> None:
    both, source, padded, segments, never = conditional_span(tmp_path)
    starts, ends, impossible = torch.tensor([3, 8, 5, 4]), torch.tensor([4, 8, 7, 4]), torch.tensor([0.0, 1, 0, 0])
    theirs = both.theirs(
        padded,
        token_type_ids=segments.view(ROWS, -1),
        p_mask=never,
        start_positions=starts,
        end_positions=ends,
        cls_index=torch.full((ROWS,), LENGTH - 1),
        is_impossible=impossible,
    ).loss
    ours = both.ours.model(source, segments, starts=starts).view(ROWS, LENGTH, 3)
    visible = ours.masked_fill(never.bool()[..., None], -1e30)
    cross_entropy = torch.nn.functional.cross_entropy
    loss = (cross_entropy(visible[..., 0], starts) + cross_entropy(visible[..., 2], ends)) / 2
    loss = loss + 0.5 * torch.nn.functional.binary_cross_entropy_with_logits(ours[:, 0, 1], impossible)
    assert loss.item() == pytest.approx(theirs.item(), abs=1e-5)
    check_gradients(both, lambda: loss.view(1), lambda: theirs.view(1))


def test_the_permutation_loss_of_odd_lengths_and_its_gradients_equal_theirs(tmp_path: Path) -> None:
    both = make(tmp_path, "LMHeadModel", {})
    tokens = [torch.randint(3, 31, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 2, 31, 7)]
    chunks = PackedChunks.from_arrays(torch.cat(tokens), [len(ids) for ids in tokens], range(4))
    batch = plm.make_inputs(chunks, VocabTables(np.arange(31) < 3), CounterRNG(1, 0))
    orders, theirs = batch.source.with_values(batch.order).sequences(), []
    for ids, order in zip(tokens, orders, strict=True):
        targets = order.nonzero().flatten()
        mapping = torch.nn.functional.one_hot(targets, len(ids)).float()[None]
        labels, mask = ids[targets][None], permutation_mask(order)[None]
        loss = both.theirs(ids[None], perm_mask=mask, target_mapping=mapping, labels=labels).loss
        theirs.append(loss * len(targets))  # their mean is over the targets of one sequence
    ours = plm.loss(both.ours.model, batch)
    assert ours.num_targets == int((batch.order > 0).sum())
    assert ours.total.item() == pytest.approx(torch.stack(theirs).sum().item(), rel=1e-5)
    check_gradients(both, lambda: ours.total.view(1), lambda: torch.stack(theirs).sum().view(1))
