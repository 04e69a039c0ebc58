"""Orders of factorization: how many tokens are predicted, in which spans, and that chance depends on the chunk only."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.data.noise.config import PLMConfig
from qkv.data.noise.permutation import sample_factorization
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.errors import InputError
from qkv.tokenization.vocab_tables import VocabTables

VOCABULARY, SPECIAL = 50, 3
RNG = CounterRNG(4, 1)


def tables() -> VocabTables:
    return VocabTables(np.arange(VOCABULARY) < SPECIAL)


def chunks(lengths: list[int], first_index: int = 0) -> PackedChunks:
    """Return texts that end with two special tokens."""
    texts = [[*np.random.default_rng(n).integers(SPECIAL, VOCABULARY, n), 1, 2] for n in lengths]
    indices = np.arange(first_index, first_index + len(lengths))
    return PackedChunks.from_arrays(np.concatenate(texts), [n + 2 for n in lengths], indices)


def spans(is_target: np.ndarray) -> list[int]:
    """Return the lengths of runs of targets."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_target.astype(int), [0]])))
    return (edges[1::2] - edges[::2]).tolist()


def test_one_in_k_text_tokens_is_predicted_on_average() -> None:
    batch = chunks([401] * 60)
    for k in (2, 6, 10):
        targets = sample_factorization(batch, tables(), RNG, PLMConfig(partial_prediction=k)).targets
        assert len(targets) / (60 * 401) == pytest.approx(1 / k, rel=0.04)


def test_targets_are_spans_of_at_most_the_given_length() -> None:
    batch = chunks([997])
    for longest in (1, 5):
        found = sample_factorization(batch, tables(), RNG, PLMConfig(partial_prediction=8, max_span_length=longest))
        lengths = spans(np.isin(np.arange(999), found.targets))
        # two spans of neighboring windows may touch
        assert max(lengths) <= 2 * longest
        assert np.mean(np.array(lengths) <= longest) > 0.9
        assert len(set(lengths)) >= min(2, longest)


def test_ranks_of_targets_are_a_permutation_and_all_other_tokens_come_first() -> None:
    batch = chunks([31, 7, 1, 64, 2])
    order, targets, counts = sample_factorization(batch, tables(), RNG)
    assert np.array_equal(np.flatnonzero(order), targets)
    for start, length, count in zip(batch.starts, batch.lengths, counts, strict=True):
        ranks = order[start : start + length]
        assert sorted(ranks[ranks > 0]) == list(range(1, count + 1))


def test_every_chunk_has_a_target_and_special_tokens_are_none() -> None:
    batch = chunks([1, 2, 3, 4, 5] * 20)
    found = sample_factorization(batch, tables(), RNG)
    assert found.target_counts.min() >= 1
    assert (batch.ids[found.targets] >= SPECIAL).all()


def test_the_order_is_random() -> None:
    ranks = sample_factorization(chunks([600]), tables(), RNG).order
    targets = ranks[ranks > 0]
    assert abs(np.corrcoef(targets, np.arange(len(targets)))[0, 1]) < 0.25


def test_a_chunk_does_not_depend_on_its_batch() -> None:
    whole = sample_factorization(chunks([31, 7, 1, 64]), tables(), RNG).order
    alone = [sample_factorization(chunks([n], index), tables(), RNG).order for index, n in enumerate([31, 7, 1, 64])]
    assert np.array_equal(whole, np.concatenate(alone))


@pytest.mark.parametrize("name", ["partial_prediction", "max_span_length"])
def test_settings_below_one_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=name):
        PLMConfig(**{name: 0})
