"""Add the special tokens of a tokenizer's template to packed chunks: [CLS] a [SEP] b [SEP], <s> a </s>, a </s>."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.rng import Ints, PackedChunks
from qkv.tokenization.tokenizer import Tokenizer


class TemplateIds(NamedTuple):
    """The tokens of a template before, between and after one or two texts."""

    ids: tuple[list[int], list[int], list[int]]
    token_type_ids: tuple[list[int], list[int], list[int]]  # of the template's tokens
    text_token_types: tuple[int, int]  # of the two texts

    @property
    def num_added_tokens(self) -> int:
        """Number of tokens that the template adds; the longest chunk is the model's maximum length minus this."""
        return sum(map(len, self.ids))


def build_template_ids(tokenizer: Tokenizer, *, pairs: bool = False) -> TemplateIds:
    """Return the tokenizer's template for one text, or for two."""
    encoding = tokenizer.encode_plus("a", "a" if pairs else None)
    first_start = encoding.sequence_ids.index(0)
    second_start = encoding.sequence_ids.index(1) if pairs else len(encoding.ids) - encoding.sequence_ids[::-1].index(0)
    text_end = len(encoding.ids) - encoding.sequence_ids[::-1].index(1 if pairs else 0)
    first_end = second_start - encoding.sequence_ids[second_start - 1 :: -1].index(0)  # after the first text
    slices = (slice(0, first_start), slice(first_end, second_start), slice(text_end, None))

    def split(values: list[int]) -> tuple[list[int], list[int], list[int]]:
        before, between, after = (values[section] for section in slices)
        return before, between, after

    text_token_types = encoding.token_type_ids[first_start], encoding.token_type_ids[text_end - 1]
    return TemplateIds(split(encoding.ids), split(encoding.token_type_ids), text_token_types)


def apply_template(batch: ChunkBatch, template: TemplateIds) -> tuple[PackedChunks, Ints]:
    """Add the template's tokens to each chunk, or pair of chunks; return them with the token types [T]."""
    ids, lengths, indices = batch.chunks
    starts = np.cumsum(lengths) - lengths
    boundaries = starts + (lengths if batch.first_lengths is None else batch.first_lengths)
    # in row order, so that at the boundary of two chunks the end of the first precedes the start of the second
    insert_at = np.stack([starts, boundaries, starts + lengths], 1)  # [B, 3]
    insert_positions = np.repeat(insert_at, [*map(len, template.ids)], axis=1)  # [B, added]
    is_second_text = np.arange(len(ids)) >= np.repeat(boundaries, lengths)  # [T]
    token_types = np.asarray(template.text_token_types)[is_second_text.astype(np.int64)]  # [T]

    def insert_template(values: Ints, added: tuple[list[int], ...]) -> Ints:
        inserted = np.concatenate(added).astype(np.int64)
        return np.insert(values, insert_positions.ravel(), np.tile(inserted, len(lengths)))

    chunks = PackedChunks(insert_template(ids, template.ids), lengths + template.num_added_tokens, indices)
    return chunks, insert_template(token_types, template.token_type_ids)
