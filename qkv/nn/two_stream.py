"""XLNet's encoder: two streams of attention with relative positions, and memory (Yang et al. 2019, 2.3 to 2.5).

The content stream is an ordinary encoder. Given an order of factorization, a token attends to itself and to tokens
before it in that order. The query stream predicts a token: it starts from a learned vector, knows the position of the
token, and attends to the content of the tokens before it in the order, never to its own.

Both streams are packed without padding, and the query stream has the tokens to predict only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qkv import spec
from qkv.errors import InputError
from qkv.nn.block import Block
from qkv.nn.dropout import dropout
from qkv.nn.embedding import TokenEmbedding
from qkv.nn.frontend import RawInput
from qkv.nn.memory import Memory
from qkv.nn.model import Encoder
from qkv.nn.ragged import BatchLayout, Ragged
from qkv.nn.relative_attention import RelativeAttention, SegmentedRagged, TokenPairs
from qkv.nn.segment_recurrence import SegmentKeys, empty_memory, memory_ranks, update_memory
from qkv.nn.span_head import ConditionalSpanHead
from qkv.nn.stack import Stack

_MEMORY_SEGMENT = 0  # as in the reference implementation


def has_two_streams(s: spec.Model) -> bool:
    """Return whether a model has a query stream."""
    return s.decoder is None and isinstance(s.source_embedding, spec.Embedding) and s.source_embedding.query_vector


@dataclass(eq=False)
class _Streams:
    """One layer of both streams; implements `qkv.nn.block.Streams`."""

    keys: SegmentKeys
    content: TokenPairs
    query: TokenPairs | None  # None: there is no query stream
    query_layout: BatchLayout | None
    memory: Tensor | None = None  # [B * memory, width] of this layer

    def run_block(self, block: Block, x: Ragged) -> Ragged:
        """Return the output of a block; `x` has the tokens of the segment, then those of the query stream."""
        attention, num_tokens = block.self_attention, x.layout.num_tokens
        assert isinstance(attention, RelativeAttention)
        inputs = block.self_attention_residual.pre(x.values)  # [T + targets, width]
        key_inputs = inputs[:num_tokens]
        if self.memory is not None:
            key_inputs = self.keys.join(block.self_attention_residual.pre(self.memory.to(inputs.dtype)), key_inputs)
        q, (k, v) = attention.project_q(inputs), attention.project_kv(key_inputs)
        distance_keys = attention.project_positions(self.content)
        bias = attention.pair_bias(self.content, distance_keys)
        heads = attention.attend_heads(q[:num_tokens], k, v, x.layout, self.keys.layout, bias=bias)
        if self.query is not None and self.query_layout is not None:
            bias = attention.pair_bias(self.query, distance_keys)
            query_heads = attention.attend_heads(q[num_tokens:], k, v, self.query_layout, self.keys.layout, bias=bias)
            heads = torch.cat([heads, query_heads])
        return x.with_values(block.attn_out_and_ffn(x.values, heads))


class TwoStreamEncoder(Encoder):
    """Encoder with relative attention, whose tokens can be predicted in any order of factorization."""

    def __init__(self, s: spec.Model):
        super().__init__(s)
        assert isinstance(self.source_embedding, TokenEmbedding)
        assert self.source_embedding.query_vector is not None
        self.source_embedding.query_vector.requires_grad_(self.is_language_model)  # unused with other heads

    @property
    def is_language_model(self) -> bool:
        """Whether the model has a query stream, which predicts tokens."""
        return self.spec.head is not None and self.spec.head.kind == "lm"

    def embed_inputs(self, source: RawInput, token_type_ids: Tensor | None = None) -> Ragged:
        x = self.front_end(source)
        if token_type_ids is None:
            return x
        if not self.spec.has_token_types:
            raise InputError("this model has no segments; leave out token_type_ids")
        return SegmentedRagged(x.values, x.layout, token_type_ids)

    def logits(self, source: RawInput, positions: Tensor | None = None, token_type_ids: Tensor | None = None) -> Tensor:
        """Return the head's logits; a language model predicts the tokens at `positions` from all other tokens."""
        order = None
        if positions is not None and self.is_language_model:
            assert isinstance(source, Ragged)
            order = torch.zeros_like(source.values).index_fill(0, positions, 1)
        output: Tensor = self(source, token_type_ids, positions, order=order)
        return output

    def forward(
        self,
        source: RawInput,
        token_type_ids: Tensor | None = None,
        positions: Tensor | Ragged | None = None,
        *,
        order: Tensor | None = None,
        memory: Memory | None = None,
        starts: Tensor | None = None,
        return_logits: bool = True,
    ) -> Tensor:
        """Return the head's logits, or hidden states [T, width] if the model has no head.

        Args:
            source: token ids [T].
            token_type_ids: the segment of each token [T].
            positions: indices of the tokens whose logits are returned, in ascending order; None: all. With `order`,
                at least one per sequence.
            order: the rank of each token in the order of factorization [T], from 0; tokens of the same rank are known
                together. The tokens at `positions` are then predicted by the query stream from tokens of lower ranks.
            memory: hidden states of the tokens before each sequence.
            starts: for a `ConditionalSpanHead`, the start of the answer in each sequence [B].
            return_logits: False returns the input of the head's last linear layer instead, for fused losses.
        """
        if isinstance(self.head, ConditionalSpanHead):
            x = self.embed_inputs(source, token_type_ids)
            hidden = x.with_values(self._run_backbone(self.encoder, x).hidden.values)
            if token_type_ids is not None:
                hidden = SegmentedRagged(hidden.values, hidden.layout, token_type_ids)
            span_logits: Tensor = self.head(hidden, starts)
            return span_logits
        if order is None and memory is None:
            targets = positions.values if isinstance(positions, Ragged) else positions
            return super().forward(source, token_type_ids, targets, return_logits=return_logits)
        assert isinstance(source, Ragged)
        return self._forward_streams(source, memory, positions, token_type_ids, order, return_logits)[0]

    def initial_memory(self, num_streams: int) -> Memory:
        s = self.spec.encoder
        if not isinstance(s, spec.TransformerStack) or not s.memory_length:
            raise self._no_memory()
        return empty_memory(s, num_streams, next(self.parameters()))

    def forward_with_memory(
        self,
        source: Ragged,
        memory: Memory,
        positions: Tensor | Ragged | None = None,
        *,
        token_type_ids: Tensor | None = None,
        order: Tensor | None = None,
        return_logits: bool = True,
    ) -> tuple[Tensor, Memory]:
        """Read one segment per text; see `forward`. The tokens of the memory belong to the first segment."""
        memory.check_streams(len(source))
        output, new_memory = self._forward_streams(source, memory, positions, token_type_ids, order, return_logits)
        assert new_memory is not None
        return output, new_memory

    def _forward_streams(
        self,
        source: Ragged,
        memory: Memory | None,
        positions: Tensor | Ragged | None,
        token_type_ids: Tensor | None,
        order: Tensor | None,
        return_logits: bool,
    ) -> tuple[Tensor, Memory | None]:
        x = self.embed_inputs(source, token_type_ids)
        targets = None
        if order is not None:
            targets = _as_targets(positions, x.layout)
            if not self.is_language_model:
                raise InputError(f"{self.spec.family}: an order of factorization needs a head of kind 'lm'")
        hidden, new_memory = self._run_streams(x, targets, order, memory)
        if self.head is None:
            return hidden, new_memory
        if targets is not None:
            return self._apply_head(targets.with_values(hidden), None, return_logits), new_memory
        selected = positions.values if isinstance(positions, Ragged) else positions
        return self._apply_head(x.with_values(hidden), selected, return_logits), new_memory

    def _run_streams(
        self, x: Ragged, targets: Ragged | None, order: Tensor | None, memory: Memory | None
    ) -> tuple[Tensor, Memory | None]:
        """Return the hidden states of the query stream, or without targets of the content stream, and the memory."""
        stack, memory_length = self.encoder, 0 if memory is None else memory["hidden"].shape[2]
        assert isinstance(stack, Stack)
        keys = SegmentKeys.of(x.layout, memory_length)
        streams = self._make_streams(x, keys, targets, order, memory)
        values, num_tokens, layer_inputs = x.values, x.layout.num_tokens, []
        if targets is not None:
            values = torch.cat([values, self._query_inputs(targets, values)])
        for layer, block in enumerate(stack.blocks):
            if memory is not None:
                layer_memory = memory["hidden"][:, layer].flatten(0, 1)  # [B * memory, width]
                layer_inputs.append(keys.join(layer_memory, values[:num_tokens].to(layer_memory.dtype)))
                streams = replace(streams, memory=layer_memory)
            values = self._run_block(block, x.with_values(values), streams)
        hidden = stack.final_norm(values if targets is None else values[num_tokens:])
        return hidden, None if memory is None else update_memory(stack.spec, memory, layer_inputs, keys, x.layout)

    def _run_block(self, block: torch.nn.Module, x: Ragged, streams: _Streams) -> Tensor:
        stack = self.encoder
        assert isinstance(stack, Stack)

        def forward(values: Tensor) -> Tensor:
            output: Ragged = block(x.with_values(values), stack.mask, streams=streams)
            return output.values

        if not stack.recomputes(block):
            return forward(x.values)
        values = checkpoint(forward, x.values, use_reentrant=False, preserve_rng_state=True)
        assert isinstance(values, Tensor)
        return values

    def _query_inputs(self, targets: Ragged, like: Tensor) -> Tensor:
        embedding = self.source_embedding
        assert isinstance(embedding, TokenEmbedding)
        assert embedding.query_vector is not None
        queries = embedding.query_vector.to(like.dtype).expand(targets.layout.num_tokens, -1)
        return dropout(queries, embedding.spec.dropout) if self.training and embedding.spec.dropout else queries

    def _make_streams(
        self, x: Ragged, keys: SegmentKeys, targets: Ragged | None, order: Tensor | None, memory: Memory | None
    ) -> _Streams:
        """Return what all layers share: sinusoids, and segments, ranks and positions of both streams."""
        stack, device = self.encoder, x.values.device
        assert isinstance(stack, Stack)
        num_memory = keys.layout.num_tokens - x.layout.num_tokens
        # even ranks for tokens and odd ones for their predictions: a prediction does not attend to its own token
        ranks = torch.zeros(x.layout.num_tokens, dtype=torch.int32, device=device) if order is None else 2 * order.int()
        no_ranks = torch.empty(0, dtype=torch.int32, device=device)
        key_ranks = keys.join(no_ranks if memory is None else memory_ranks(memory), ranks)
        segments = x.segments if isinstance(x, SegmentedRagged) else None
        memory_segments = torch.full((num_memory,), _MEMORY_SEGMENT, device=device)
        key_segments = None if segments is None else keys.join(memory_segments, segments)
        content = TokenPairs(
            stack.relative_sinusoids(keys.layout.padded_length),
            segments=None if segments is None or key_segments is None else (segments, key_segments),
            ranks=(ranks, key_ranks),
        )
        if targets is None:
            return _Streams(keys, content, None, None)
        index, memory_length = targets.values, num_memory // len(x)
        query = TokenPairs(
            content.sinusoids,
            positions=(x.layout.positions[index] + memory_length, keys.layout.positions),
            segments=None if segments is None or key_segments is None else (segments[index], key_segments),
            ranks=(ranks[index] - 1, key_ranks),
        )
        return _Streams(keys, content, query, targets.layout)


def _as_targets(positions: Tensor | Ragged | None, layout: BatchLayout) -> Ragged:
    """Return the indices of the tokens to predict, by sequence."""
    if isinstance(positions, Ragged):
        return positions
    if positions is None:
        return Ragged(torch.arange(layout.num_tokens, device=layout.device), layout)
    counts = torch.bincount(layout.sequence_ids()[positions], minlength=len(layout)).tolist()
    if min(counts) < 1:
        raise InputError("positions: with an order of factorization, each sequence needs at least one token to predict")
    return Ragged(positions, BatchLayout(counts, layout.device))
