"""Packed pieces of bare text as their tokeniser's template writes them: [CLS] a [SEP] b [SEP], <s> a </s>, a </s>."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.rng import Ints, PackedChunks
from qkv.tokenization.tokenizer import Tokenizer


class TemplateIds(NamedTuple):
    """What stands before, between and behind one or two texts: ids and their segments, and the texts' own segments."""

    ids: tuple[list[int], list[int], list[int]]
    token_type_ids: tuple[list[int], list[int], list[int]]
    text_token_types: tuple[int, int]

    @property
    def num_added_tokens(self) -> int:
        """Tokens that it adds to a piece: a model's length less this is the longest piece."""
        return sum(map(len, self.ids))


def build_template_ids(tokenizer: Tokenizer, *, pairs: bool = False) -> TemplateIds:
    """The tokeniser's own template, of one text or of two."""
    encoding = tokenizer.encode_plus("a", "a" if pairs else None)
    first_start = encoding.sequence_ids.index(0)
    second_start = encoding.sequence_ids.index(1) if pairs else len(encoding.ids) - encoding.sequence_ids[::-1].index(0)
    text_end = len(encoding.ids) - encoding.sequence_ids[::-1].index(1 if pairs else 0)
    first_end = second_start - encoding.sequence_ids[second_start - 1 :: -1].index(0)  # behind the first text
    slices = (slice(0, first_start), slice(first_end, second_start), slice(text_end, None))
    ids, token_type_ids = (tuple(values[section] for section in slices) for values in (encoding.ids, encoding.token_type_ids))
    return TemplateIds(ids, token_type_ids, (encoding.token_type_ids[first_start], encoding.token_type_ids[text_end - 1]))  # type: ignore[arg-type]


def apply_template(batch: ChunkBatch, template: TemplateIds) -> tuple[PackedChunks, Ints]:
    """The pieces, or pairs, in a frame, and each token's segment [T]."""
    ids, lengths, indices = batch.chunks
    starts = np.cumsum(lengths) - lengths
    boundaries = starts + (lengths if batch.first_lengths is None else batch.first_lengths)
    # At the border of two pieces the rows keep what belongs to the first ahead of what belongs to the second.
    insert_positions = np.repeat(np.stack([starts, boundaries, starts + lengths], 1), [*map(len, template.ids)], axis=1)  # [B, added]
    token_types = np.asarray(template.text_token_types)[(np.arange(len(ids)) >= np.repeat(boundaries, lengths)).astype(np.int64)]  # [T]

    def insert_template(values: Ints, added: tuple[list[int], ...]) -> Ints:
        inserted = np.concatenate(added).astype(np.int64)
        return np.insert(values, insert_positions.ravel(), np.tile(inserted, len(lengths)))

    return PackedChunks(insert_template(ids, template.ids), lengths + template.num_added_tokens, indices), insert_template(token_types, template.token_type_ids)
