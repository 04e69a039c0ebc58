"""word2vec: skip-gram and continuous bag of words, trained by negative sampling (Mikolov et al. 2013).

The vectors are updated in place by gradients in closed form, without an optimizer: a step of several thousand words
touches a few rows of large matrices, many times. Two threads compute the gradients of a block of words; the order of
all additions is fixed, so that a run does not depend on the number of threads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from qkv import spec
from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.rng import CounterRNG, Floats, Ints, PackedChunks, RandomBits
from qkv.errors import InputError
from qkv.nn import Encoder
from qkv.objectives.base import Objective, TextContext
from qkv.objectives.loss import LossSum
from qkv.objectives.negative_sampling import (
    GROUP_SIZE,
    Gradients,
    WordBlock,
    cbow_gradients,
    cbow_loss,
    skipgram_gradients,
    skipgram_loss,
)
from qkv.recipe.objectives import CBOWObjective, SkipGramObjective

_LANE_GROUPS, _LANES = 64, 2  # groups whose gradients one thread computes; lanes of a block
_MAX_STEP = 2.5  # sum of the learning rates of the gradients of one vector that a block adds up
_SUBSAMPLE_BITS = 24  # of the random bits of a word; 16 more are for the window, and 24 for a noise word
_NOISE_BITS = 24
_ENTRIES_PER_WORD = 16  # of the rarest word in the table of noise words
_NUM_NEIGHBORS = 5  # words in a sample


class Inputs(NamedTuple):
    """Words with their contexts and noise words, as in a `WordBlock`."""

    tokens: Tensor  # [16 G + 2 window]
    spans: Tensor  # [16 G]
    noise: Tensor  # [G, 16]
    in_updates: Tensor  # [16 G + 2 window] gradients of each word's input vector to expect in a block
    out_updates: Tensor  # [16 G + 2 window] of its output vector
    noise_updates: Tensor  # [G, 16] of the noise words' output vectors
    num_examples: int  # pairs of skip-gram, words of CBOW

    @property
    def num_targets(self) -> tuple[int, ...]:
        return (self.num_examples,)

    def blocks(self, learning_rate: float) -> Iterator[WordBlock]:
        """Yield the blocks, with the steps of frequent words reduced for a learning rate."""
        updates = self.in_updates, self.out_updates, self.noise_updates
        steps = [(_MAX_STEP / (learning_rate * expected)).clamp_(max=1.0) for expected in updates]
        return WordBlock(self.tokens, self.spans, self.noise, *steps).split(_LANES * _LANE_GROUPS)


class _WordTables(NamedTuple):
    """What an objective needs to know about each word of a vocabulary."""

    thresholds: Any  # [V] uint32: a word is dropped if its random number is not below
    noise_words: Any  # [2^n] int32: each word as often as it is drawn as noise
    in_updates: Floats  # [V] gradients of the input vector to expect in a block
    out_updates: Floats  # [V] of the output vector


class Word2Vec(Objective[Any]):
    """What skip-gram and CBOW have in common."""

    config: SkipGramObjective
    architectures = frozenset({"encoder"})
    inputs_class = Inputs
    updates_in_place = True
    is_likelihood = False

    def __init__(self, config: SkipGramObjective) -> None:
        super().__init__(config)
        self._tables: tuple[TextContext, _WordTables] | None = None

    def check_model(self, model: spec.Model) -> None:
        super().check_model(model)
        assert model.head is not None
        if not isinstance(model.encoder, spec.BagOfWords) or model.head.bias or model.head.tie_embeddings:
            needs = f"{self.name} needs a model of two tables of vectors (word2vec)"
            raise InputError(f"objective: {needs}, and {model.family} is more than that; try mlm")

    def max_chunk_tokens(self, max_length: int, context: TextContext) -> int:  # noqa: ARG002
        return max_length

    # ---- the two objectives

    @abstractmethod
    def block_loss(self, in_weight: Tensor, out_weight: Tensor, block: WordBlock) -> Tensor:
        """Return the summed loss of a block.  # []"""

    @abstractmethod
    def block_gradients(self, in_weight: Tensor, out_weight: Tensor, block: WordBlock) -> Gradients:
        """Return the gradients of the summed loss of a block."""

    @abstractmethod
    def _count_examples(self, context_sizes: Ints) -> int:
        """Return the number of targets of words with so many context words."""

    @abstractmethod
    def _updates_per_word(self) -> tuple[float, float, float]:
        """Return how many gradients a word of the text and a noise word cause.

        They are those of its input vector, those of its output vector, and those of the noise words' output vectors.
        """

    # ---- preparation, on the host

    def prepare(self, batch: ChunkBatch, context: TextContext, rng: CounterRNG) -> Inputs:
        tables, chunks = self._word_tables(context), batch.chunks
        random_bits = rng.random_bits(chunks.indices, chunks.lengths, self.name)
        draws = random_bits >> np.uint64(64 - _SUBSAMPLE_BITS)
        is_kept = draws < tables.thresholds[chunks.ids]
        return self._make_inputs(chunks, is_kept, random_bits[is_kept], tables)

    def _make_inputs(self, chunks: PackedChunks, is_kept: Any, random_bits: RandomBits, tables: _WordTables) -> Inputs:
        window = self.config.window
        words, counts = chunks.ids[is_kept], np.add.reduceat(is_kept.astype(np.int64), chunks.starts)
        ends = np.cumsum(counts)
        positions = np.arange(len(words))
        draws = (random_bits >> np.uint64(_NOISE_BITS)) & np.uint64(0xFFFF)
        reach = (draws * np.uint64(window) >> np.uint64(16)).astype(np.int64) + 1
        left = np.minimum(reach, positions - np.repeat(ends - counts, counts))
        right = np.minimum(reach, np.repeat(ends, counts) - 1 - positions)
        num_groups = -(-len(words) // GROUP_SIZE)
        tokens = np.zeros(num_groups * GROUP_SIZE + 2 * window, np.int64)
        tokens[window : window + len(words)] = words
        spans = np.zeros((num_groups, GROUP_SIZE), np.int64)
        spans.reshape(-1)[: len(words)] = (left * (window + 1) + right) * GROUP_SIZE
        spans += np.arange(GROUP_SIZE)
        # each word draws a noise word for its group; a short last group repeats the first draws
        draws = np.resize(random_bits, num_groups * GROUP_SIZE) & np.uint64(len(tables.noise_words) - 1)
        noise = tables.noise_words[draws].astype(np.int64)
        arrays = tokens, spans.reshape(-1), noise.reshape(-1, GROUP_SIZE)
        updates = tables.in_updates[tokens], tables.out_updates[tokens], tables.out_updates[arrays[2]]
        tensors = map(torch.from_numpy, (*arrays, *updates))
        return Inputs._make([*tensors, self._count_examples(left + right)])

    def _word_tables(self, context: TextContext) -> _WordTables:
        if self._tables is None or self._tables[0] is not context:
            self._tables = context, self._make_tables(context)
        return self._tables[1]

    def _make_tables(self, context: TextContext) -> _WordTables:
        if context.token_counts is None:
            raise InputError(f"objective: {self.name} needs the frequency of each word; set data.streaming to false")
        counts = context.token_counts.astype(np.float64)
        counts[list(context.tokenizer.special_ids.values())] = 0
        if not counts.any():
            raise InputError(f"objective: {self.name} finds no known word in the training text; check the tokenizer")
        keep = np.ones_like(counts)
        if self.config.subsample:
            scale = self.config.subsample * counts.sum() / np.maximum(counts, 1)
            keep = np.minimum(1.0, np.sqrt(scale) + scale)
        noise = np.where(counts > 0, np.maximum(counts, 1) ** self.config.noise_exponent, 0.0)
        noise /= noise.sum()
        text = counts * keep / (counts * keep).sum()
        thresholds = np.where(counts > 0, np.ceil(keep * 2.0**_SUBSAMPLE_BITS), 0).astype(np.uint32)
        in_count, out_count, noise_count = self._updates_per_word()
        num_words = _LANES * _LANE_GROUPS * GROUP_SIZE
        in_updates, out_updates = num_words * in_count * text, num_words * (out_count * text + noise_count * noise)
        updates = in_updates.astype(np.float32), out_updates.astype(np.float32)
        return _WordTables(thresholds, _noise_table(noise), *updates)

    # ---- losses and updates

    def losses(
        self,
        model: Encoder,
        inputs: Inputs,
        label_smoothing: float = 0.0,  # noqa: ARG002  # not supported
    ) -> tuple[LossSum, ...]:
        weights = _weights(model)
        totals = [self.block_loss(*weights, block) for block in inputs.blocks(0.0)]
        total = torch.stack(totals).sum() if totals else weights[0].new_zeros(())
        return (LossSum(total, inputs.num_examples),)

    @torch.no_grad()
    def update(self, model: Encoder, inputs: Inputs, learning_rate: float) -> LossSum:
        weights = _weights(model)
        blocks = list(inputs.blocks(learning_rate))
        if not blocks:
            return LossSum(weights[0].new_zeros(()), 0)
        total = self.block_loss(*weights, blocks[0])  # of one block: a loss costs a third of its gradient
        contexts = blocks[0].spans.div(GROUP_SIZE, rounding_mode="floor").cpu().numpy()
        window = self.config.window
        num_examples = self._count_examples(contexts // (window + 1) + contexts % (window + 1))
        with _lanes(weights[0].device) as run_all:
            for block in blocks:
                lanes = [block] if weights[0].is_cuda else block.split(_LANE_GROUPS)
                gradients = run_all([partial(self.block_gradients, *weights, lane) for lane in lanes])
                in_rows, out_rows = (list(chain.from_iterable(side)) for side in zip(*gradients, strict=True))
                in_weight, out_weight = weights
                run_all(
                    [
                        partial(_add_rows, *args, -learning_rate)
                        for args in ((in_weight, in_rows), (out_weight, out_rows))
                    ]
                )
        return LossSum(total, num_examples)

    def sample(self, model: Encoder, chunk: ChunkBatch, context: TextContext, rng: CounterRNG) -> str:  # noqa: ARG002
        special_ids = set(context.tokenizer.special_ids.values())
        words = [token for token in chunk.chunks.ids.tolist() if token not in special_ids]
        if not words:
            return "(no known word)"
        vectors = nn.functional.normalize(_weights(model)[0], dim=-1)
        similarity = vectors @ vectors[max(words)]  # the rarest word, where a vocabulary is in the order of frequency
        similarity[[*special_ids, max(words)]] = -1
        neighbors = similarity.topk(min(_NUM_NEIGHBORS, len(similarity))).indices.tolist()
        names = context.tokenizer.ids_to_display([max(words), *neighbors])
        return f"{names[0]}: {', '.join(names[1:])}"


class SkipGram(Word2Vec):
    """Skip-gram: each word predicts the words around it."""

    name = "skipgram"
    config_class = SkipGramObjective

    def block_loss(self, in_weight: Tensor, out_weight: Tensor, block: WordBlock) -> Tensor:
        return skipgram_loss(in_weight, out_weight, block, self.config.negatives)

    def block_gradients(self, in_weight: Tensor, out_weight: Tensor, block: WordBlock) -> Gradients:
        return skipgram_gradients(in_weight, out_weight, block, self.config.negatives)

    def _count_examples(self, context_sizes: Ints) -> int:
        return int(context_sizes.sum())

    def _updates_per_word(self) -> tuple[float, float, float]:
        num_pairs = self.config.window + 1.0  # the mean of twice a number from 1 to window
        return num_pairs * (1 + self.config.negatives), num_pairs, num_pairs * self.config.negatives


class CBOW(Word2Vec):
    """Continuous bag of words: the mean of the words around a word predicts it."""

    name = "cbow"
    config_class = CBOWObjective
    config: CBOWObjective

    def block_loss(self, in_weight: Tensor, out_weight: Tensor, block: WordBlock) -> Tensor:
        return cbow_loss(in_weight, out_weight, block, self.config.negatives)

    def block_gradients(self, in_weight: Tensor, out_weight: Tensor, block: WordBlock) -> Gradients:
        divide = self.config.gradient == "corrected"
        return cbow_gradients(in_weight, out_weight, block, self.config.negatives, divide=divide)

    def _count_examples(self, context_sizes: Ints) -> int:
        return int(np.count_nonzero(context_sizes))

    def _updates_per_word(self) -> tuple[float, float, float]:
        num_contexts = 1.0 if self.config.gradient == "corrected" else self.config.window + 1.0
        return num_contexts * (1 + self.config.negatives), 1.0, float(self.config.negatives)


def _weights(model: Encoder) -> tuple[Tensor, Tensor]:
    """Return the matrices of input and output vectors.  # [V, width] each"""
    in_weight, head = model.front_end.token_weight, model.head
    assert in_weight is not None  # see `check_model`
    assert head is not None
    assert head.linear is not None
    return in_weight, head.linear.weight


def _noise_table(probabilities: Floats) -> Any:
    """Return words such that a random entry is each word with its probability.  # [2^n]"""
    rarest = float(probabilities[probabilities > 0].min())
    size = 1 << int(np.clip(np.ceil(np.log2(_ENTRIES_PER_WORD / rarest)), 10, _NOISE_BITS))
    cumulative = np.cumsum(probabilities)
    table = np.searchsorted(cumulative / cumulative[-1], (np.arange(size) + 0.5) / size)
    return table.astype(np.int32)


def _add_rows(weight: Tensor, gradients: list[Any], factor: float) -> None:
    for gradient in gradients:
        weight.index_add_(0, gradient.rows, gradient.values, alpha=factor)


# ---- threads --------------------------------------------------------------------------------------------------------

RunAll = Callable[[Sequence[Callable[[], Any]]], list[Any]]


@cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_LANES - 1, "word2vec", initializer=torch.set_num_threads, initargs=(1,))


@contextmanager
def _lanes(device: torch.device) -> Iterator[RunAll]:
    """Yield a function that calls functions, at the same time where torch would have used several threads.

    Meanwhile each operation uses one thread.
    """
    num_threads = torch.get_num_threads()
    if device.type != "cpu" or num_threads == 1:
        yield lambda functions: [function() for function in functions]
        return
    torch.set_num_threads(1)
    try:
        yield _run_in_threads
    finally:
        torch.set_num_threads(num_threads)


def _run_in_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    futures = [_executor().submit(torch.no_grad()(function)) for function in functions[1:]]
    first = functions[0]()
    return [first, *(future.result() for future in futures)]
