from __future__ import annotations

import torch

from qkv.nn.kv_cache import KeyValues, KVCache


def filled(rows: int, steps: int) -> tuple[KVCache, torch.Tensor, torch.Tensor]:
    cache = KVCache(rows, 2, max_length=6, key_dim=3, value_dim=4, like=torch.zeros(1))
    keys, values = torch.randn(steps, rows, 2, 3), torch.randn(steps, rows, 2, 4)
    for k, v in zip(keys, values, strict=True):
        cache.append(k, v)
    return cache, keys, values


def test_append_gives_all_keys_so_far_in_order() -> None:
    cache, keys, _ = filled(rows=2, steps=2)
    new = torch.randn(2, 2, 3)
    seen = cache.append(new, torch.randn(2, 2, 4)).keys
    assert torch.equal(seen, torch.stack([*keys, new], dim=2))


def test_append_gives_all_values_so_far_in_order() -> None:
    cache, _, values = filled(rows=2, steps=2)
    new = torch.randn(2, 2, 4)
    seen = cache.append(torch.randn(2, 2, 3), new).values
    assert torch.equal(seen, torch.stack([*values, new], dim=2))


def test_append_copies_nothing() -> None:
    cache, _, _ = filled(rows=2, steps=1)
    seen = cache.append(torch.randn(2, 2, 3), torch.randn(2, 2, 4))
    assert seen.keys.data_ptr() == cache.keys.data_ptr()


def test_after_reorder_a_row_goes_on_from_the_row_it_was_given() -> None:
    cache, keys, _ = filled(rows=3, steps=2)
    cache.reorder(torch.tensor([2, 2, 0]))
    assert torch.equal(cache.keys[:, :, :2], keys.permute(1, 2, 0, 3)[[2, 2, 0]])


def test_reorder_moves_values_with_their_keys() -> None:
    cache, _, values = filled(rows=3, steps=2)
    cache.reorder(torch.tensor([1, 0, 1]))
    assert torch.equal(cache.values[:, :, :2], values.permute(1, 2, 0, 3)[[1, 0, 1]])


def padded_keys() -> KeyValues:
    allowed = torch.tensor([[True, True], [True, False], [True, True]])[:, None, None]
    return KeyValues(torch.randn(3, 1, 2, 3), torch.randn(3, 1, 2, 4), allowed, [2, 1, 2])


def test_select_takes_keys_values_and_mask_of_the_same_rows() -> None:
    keys, rows = padded_keys(), torch.tensor([1, 0])
    chosen = keys.select(rows, [1, 2])
    assert keys.mask is not None
    assert torch.equal(chosen.keys, keys.keys[[1, 0]])
    assert torch.equal(chosen.values, keys.values[[1, 0]])
    assert torch.equal(chosen.mask, keys.mask[[1, 0]])


def test_first_is_the_selection_of_the_first_rows() -> None:
    keys = padded_keys()
    first, chosen = keys.first_rows(2), keys.select(torch.arange(2), [2, 1])
    assert torch.equal(first.keys, chosen.keys)
    assert torch.equal(first.values, chosen.values)
    assert torch.equal(first.mask, chosen.mask)
    assert first.lengths == chosen.lengths
