"""A whole word's vector from those of its pieces, which models that cut words into subwords need for tagging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch

from qkv.errors import InputError
from qkv.nn.ragged import Ragged


def by_word(hidden: Ragged, words: Sequence[Sequence[int | None]], how: Literal["first", "mean"] = "first") -> Ragged:
    """One vector a word: its first piece's (Devlin et al. 2019, 5.3) or the mean of its pieces'.

    [T, width] -> [words, width].
    `words` gives each token's word, rising, in its own sequence; a token of none (None) is left out.
    """
    flat = [(row, word) for row, of in enumerate(words) for word in of]
    if len(flat) != len(hidden.values):
        raise InputError(f"{len(hidden.values)} tokens and the words of {len(flat)}")
    # a word's pieces lie side by side, so it begins where the word changes; in a pair the numbers begin again
    begins = [word is not None and (i == 0 or flat[i - 1] != (row, word)) for i, (row, word) in enumerate(flat)]
    rows = Counter(row for (row, _), fresh in zip(flat, begins, strict=True) if fresh)
    sizes = [rows[row] for row in range(len(words))]
    device = hidden.values.device
    first = torch.tensor(begins, device=device)  # [T]
    if how == "first":
        return Ragged.of(hidden.values[first], sizes)
    kept = torch.tensor([word is not None for _, word in flat], device=device)
    belongs = first.cumsum(0)[kept] - 1  # [pieces]
    summed = hidden.values.new_zeros(sum(sizes), hidden.values.shape[1]).index_add(0, belongs, hidden.values[kept])
    return Ragged.of(summed / torch.bincount(belongs, minlength=sum(sizes))[:, None], sizes)
