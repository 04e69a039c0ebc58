"""Vectors of words from those of their subword tokens, for token classification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch

from qkv.errors import InputError
from qkv.nn.ragged import Ragged


def pool_subwords(
    hidden: Ragged, word_ids: Sequence[Sequence[int | None]], strategy: Literal["first", "mean"] = "first"
) -> Ragged:
    """Return one vector per word: that of its first token (Devlin et al. 2019, 5.3), or the mean over its tokens.

    [T, width] -> [words, width].
    `word_ids` holds the increasing word index of each token per sequence; None for tokens that belong to no word, which
    are left out.
    """
    token_words = [(row, word) for row, ids in enumerate(word_ids) for word in ids]
    if len(token_words) != len(hidden.values):
        raise InputError(f"word_ids: there are {len(token_words)} for {len(hidden.values)} tokens; give one per token")
    # tokens of a word are adjacent, so a word begins where the index changes; a second text starts at 0 again
    is_word_start = [
        word is not None and (i == 0 or token_words[i - 1] != (row, word)) for i, (row, word) in enumerate(token_words)
    ]
    words_per_row = Counter(row for (row, _), is_start in zip(token_words, is_word_start, strict=True) if is_start)
    lengths = [words_per_row[row] for row in range(len(word_ids))]
    device = hidden.values.device
    first_mask = torch.tensor(is_word_start, device=device)  # [T]
    if strategy == "first":
        return Ragged.from_lengths(hidden.values[first_mask], lengths)
    in_word = torch.tensor([word is not None for _, word in token_words], device=device)
    word_index = first_mask.cumsum(0)[in_word] - 1  # [tokens in words]
    summed = hidden.values.new_zeros(sum(lengths), hidden.values.shape[1]).index_add(
        0, word_index, hidden.values[in_word]
    )
    return Ragged.from_lengths(summed / torch.bincount(word_index, minlength=sum(lengths))[:, None], lengths)
