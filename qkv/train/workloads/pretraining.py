"""Pretraining on text: chunks of documents, one or several objectives, perplexity of held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkv import families, spec
from qkv.analysis.flops import attended_memory
from qkv.checkpoints.model_folder import SOURCE_TOKENIZER_FILE
from qkv.checkpoints.state import AnyModel
from qkv.checkpoints.word_vectors import InitialVectors
from qkv.data.batching import DataPosition
from qkv.data.corpora.chunks import ChunkBatch, ChunkBatches
from qkv.data.corpora.streaming import StreamingBatches
from qkv.data.corpora.text_streams import TextStreams
from qkv.data.corpora.tokenized_corpus import TokenizedCorpus
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.errors import InputError
from qkv.metrics.perplexity import mean_losses
from qkv.nn import build
from qkv.nn.memory import Memory
from qkv.nn.ragged import to_device_async
from qkv.nn.segment_recurrence import resize_memory
from qkv.objectives.base import TextContext
from qkv.objectives.loss import LossSum, to_device
from qkv.objectives.mixture import ObjectiveMixture
from qkv.objectives.samples import SAMPLE_LENGTH
from qkv.recipe.schema import PretrainingRecipe
from qkv.recipe.training import DEFAULT_BATCH_TOKENS
from qkv.tokenization.tokenizer import Tokenizer
from qkv.train.cost_inputs import CostInputs, with_lengths_up_to
from qkv.train.init_model import load_initial_model, load_initial_vectors
from qkv.train.workload import refuse_folds
from qkv.train.workloads.pretraining_data import (
    Chunker,
    carries_memory,
    find_tokenizer,
    load_training_corpus,
    load_validation_corpus,
    spec_for_tokenizer,
    spec_for_vocab_size,
)

_MAX_MEAN_LOSS = 700.0  # the exponential of a larger mean loss overflows


@dataclass(frozen=True)
class PretrainingWorkload:
    """Pretraining on text; implements `qkv.train.workload.Workload`."""

    recipe: PretrainingRecipe
    chunker: Chunker
    train_corpus: TokenizedCorpus | StreamingBatches
    data_fingerprint: str  # digest of the training text
    valid_corpus: TokenizedCorpus
    initial_model: AnyModel | None = None  # pretrained model to continue from; None: a newly initialized one
    initial_vectors: InitialVectors | None = None  # of tokens of a newly initialized model; None: no such file

    recipe_class = PretrainingRecipe
    higher_is_better = False

    @classmethod
    def build(cls, recipe: PretrainingRecipe, folder: Path, data: None = None) -> PretrainingWorkload:  # noqa: ARG003
        """Read the text, train or load the tokenizer, and load the pretrained model if the recipe names one."""
        objectives = ObjectiveMixture(recipe.objective, recipe.seed).objectives
        unsmoothed = [name for name, objective in objectives.items() if not objective.supports_label_smoothing]
        if recipe.train.label_smoothing and unsmoothed:
            raise InputError(f"train.label_smoothing: is not supported by {', '.join(unsmoothed)}; set it to 0")
        initial_model = None
        if "init_from" in recipe.model:
            initial_model, tokenizer = _load_pretrained(recipe)
            chunker = Chunker(recipe, tokenizer, initial_model.spec)
        else:
            tokenizer = find_tokenizer(recipe, folder)
            chunker = Chunker(recipe, tokenizer, spec_for_tokenizer(recipe, tokenizer))
        valid_corpus = load_validation_corpus(recipe, tokenizer)
        vectors = load_initial_vectors(recipe, folder, tokenizer, chunker.spec)
        return cls(recipe, chunker, *load_training_corpus(recipe, chunker), valid_corpus, initial_model, vectors)

    @classmethod
    def cost_inputs(
        cls,
        recipe: PretrainingRecipe,
        folder: Path,
        model_spec: spec.Model | None,
        vocab_sizes: tuple[int, int] | None,
    ) -> CostInputs:
        """Return the model with chunks of the maximum length, which most chunks of a corpus have."""
        if vocab_sizes is not None:
            raise InputError("--vocab-size: this model has one vocabulary; set tokenizer.vocab_size instead")
        if model_spec is None and recipe.tokenizer.vocab_size is not None:  # nearly exact, without reading the text
            model_spec = spec_for_vocab_size(recipe, recipe.tokenizer.vocab_size)
        elif model_spec is None:
            model_spec = spec_for_tokenizer(recipe, find_tokenizer(recipe, folder))
        inputs = with_lengths_up_to(model_spec, recipe.data.max_length, recipe)
        if not carries_memory(recipe, model_spec, ObjectiveMixture(recipe.objective, recipe.seed)):
            return inputs
        return replace(inputs, memory_length=attended_memory(model_spec), num_streams=recipe.data.num_streams)

    @classmethod
    def fold_recipes(cls, recipe: PretrainingRecipe, count: int) -> list[PretrainingRecipe]:  # noqa: ARG003
        """Refuse cross-validation."""
        raise refuse_folds()

    @property
    def spec(self) -> spec.Model:
        return self.chunker.spec

    @property
    def loss_names(self) -> tuple[str, ...]:
        return self.objectives.loss_names

    @property
    def objectives(self) -> ObjectiveMixture:
        """The recipe's objectives."""
        return self.chunker.objectives

    @property
    def metric(self) -> str:
        return "perplexity" if self._is_likelihood else self.loss_names[0]

    @property
    def _is_likelihood(self) -> bool:
        return all(objective.is_likelihood for objective in self.objectives.objectives.values())

    @property
    def updates_in_place(self) -> bool:
        """Whether `update` changes the weights by itself, without gradients of `losses` and an optimizer."""
        return any(objective.updates_in_place for objective in self.objectives.objectives.values())

    def update(self, model: Any, inputs: Any, learning_rate: float) -> LossSum:
        """Change the weights by one step, and return the loss of some of the inputs before it."""
        return self.objectives.of_inputs(inputs).update(model, inputs, learning_rate)

    def fingerprint(self) -> str:
        return self.data_fingerprint

    def check(self) -> None:
        if not isinstance(self._batches, StreamingBatches):
            self._batches.batches_per_epoch(0)
        self.check_validation_data()

    def check_validation_data(self) -> None:
        """Refuse held-out text without a single target."""
        if not any(self.collate(batch, step).num_targets[0] for step, batch in enumerate(self._valid_batches)):
            remedy = "give more text, longer documents, or an objective that predicts more tokens"
            raise InputError(f"the held-out text has no token to predict; {remedy}")

    def save_assets(self, folder: Path) -> None:
        self.chunker.tokenizer.save(folder / SOURCE_TOKENIZER_FILE)

    def steps_per_epoch(self) -> int:
        if isinstance(self._batches, StreamingBatches):
            raise InputError("data.streaming: the number of batches of a stream is not known; set train.max_steps")
        return self._batches.batches_per_epoch(0)

    def batches_from(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, ChunkBatch]]:
        return self._batches.iterate_from(epoch, batch_index)

    @property
    def data_notes(self) -> tuple[str, ...]:
        valid = f"{self.valid_corpus.tokens:,} held-out tokens"
        notes = () if self.initial_vectors is None else (self.initial_vectors.note,)
        if isinstance(self.train_corpus, StreamingBatches):
            return (f"training text is streamed; {valid}", *notes)
        text = f"{len(self.train_corpus):,} training documents, {self.train_corpus.tokens:,} tokens"
        return (f"{text}; {valid}", *notes)

    @property
    def carries_memory(self) -> bool:
        """Whether the model carries memory from batch to batch, each of which has one segment of every stream."""
        return self.chunker.carries_memory

    @cached_property
    def _batches(self) -> ChunkBatches | StreamingBatches | TextStreams:
        if isinstance(self.train_corpus, StreamingBatches):
            return self.train_corpus
        if self.carries_memory:
            return self.chunker.streams(self.train_corpus)
        config, seed = self.recipe.train, self.recipe.seed
        chunks = self.chunker(self.train_corpus)
        return ChunkBatches(chunks, config.batch_tokens, seed, config.num_workers, max_examples=config.batch_size)

    def collate(self, batch: ChunkBatch, step: int) -> Any:
        rng = CounterRNG(self.recipe.seed, batch.epoch)
        return self.objectives.at_step(step).prepare(batch, self._context, rng)

    @cached_property
    def _context(self) -> TextContext:
        """The model and the tokenizer, with the frequency of each token if an objective needs it."""
        if not self.updates_in_place or not isinstance(self.train_corpus, TokenizedCorpus):
            return self.chunker.context
        return replace(self.chunker.context, token_counts=self.train_corpus.count_tokens(self._vocab_size))

    @property
    def _vocab_size(self) -> int:
        return self.chunker.tokenizer.vocab_size

    def losses(self, model: Any, inputs: Any) -> tuple[LossSum, ...]:
        label_smoothing = self.recipe.train.label_smoothing if model.training else 0.0  # perplexity is never smoothed
        return self.objectives.of_inputs(inputs).losses(model, inputs, label_smoothing)

    def losses_with_memory(self, model: Any, inputs: Any, memory: Memory) -> tuple[tuple[LossSum, ...], Memory]:
        """Return the losses of segments, and the memory of their streams after them, detached."""
        segments, device = inputs.segments, memory.device
        streams, starts, last_pieces = (
            to_device_async(torch.from_numpy(array), device)
            for array in (segments.streams, segments.starts, segments.last_pieces)
        )
        label_smoothing = self.recipe.train.label_smoothing if model.training else 0.0
        objective = self.objectives.of_inputs(inputs)
        piece_memory = memory.select(streams).reset(starts)
        losses, piece_memory = objective.losses_with_memory(model, inputs, piece_memory, label_smoothing)
        return losses, piece_memory.select(last_pieces).detach()

    @cached_property
    def _valid_batches(self) -> list[ChunkBatch]:
        """The held-out chunks; their masks and noise are the same at every validation."""
        try:
            if self.carries_memory:
                streams = self.chunker.streams(self.valid_corpus, held_out=True)
                return [streams.batch(0, index) for index in range(streams.batches_per_epoch(0))]
            chunks = self.chunker(self.valid_corpus)
        except InputError as error:
            raise InputError(f"held-out text (data.valid, data.hold_out): {error}") from None
        max_tokens = self.recipe.train.batch_tokens or DEFAULT_BATCH_TOKENS
        lengths = chunks.lengths(0)
        token_offsets = np.cumsum(lengths) - lengths
        indices = np.flatnonzero(token_offsets < self.recipe.validation.max_tokens)
        batches = np.split(indices, np.flatnonzero(np.diff(token_offsets[indices] // max_tokens)) + 1)
        return [chunks.gather(0, batch) for batch in batches if len(batch)]

    def model(self) -> AnyModel:
        if self.initial_model is not None:
            return self.initial_model
        try:
            model = build(self.spec)
        except InputError as error:
            raise InputError(f"model: {error}; see model.d_model, model.heads and the other sizes") from None
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            raise InputError(
                "model: does not fit into memory; make it smaller (qkv cost computes its memory)"
            ) from None
        if self.initial_vectors is not None:
            self.initial_vectors.apply(model)
        return model

    @torch.no_grad()
    def evaluate(self, model: AnyModel) -> dict[str, float]:
        """Return the perplexity of the predicted tokens, and each mean loss.

        The perplexity of masked tokens is no probability of the text.
        """
        batches = (to_device(self.collate(batch, step), model.device) for step, batch in enumerate(self._valid_batches))
        if self.carries_memory:
            losses = self._stream_losses(model, batches)
        else:
            losses = (self.losses(model, inputs) for inputs in batches)
        means = mean_losses([(float(loss.total), loss.num_targets) for loss in batch_losses] for batch_losses in losses)
        perplexity = {"perplexity": math.exp(min(means[0], _MAX_MEAN_LOSS))} if self._is_likelihood else {}
        return perplexity | dict(zip(self.loss_names, means, strict=True))

    def _stream_losses(self, model: AnyModel, batches: Iterator[Any]) -> Iterator[tuple[LossSum, ...]]:
        """Yield the losses of the segments of held-out streams, whose memory is carried from one to the next."""
        memory: Memory | None = None
        for inputs in batches:
            if memory is None:
                memory = model.initial_memory(inputs.segments.num_streams)
                memory = resize_memory(memory, self.recipe.validation.memory_length)
            losses, memory = self.losses_with_memory(model, inputs, memory)
            yield losses

    def sample_outputs(self, model: AnyModel) -> list[str]:
        num_samples = self.recipe.validation.num_samples
        batch_indices = [index * len(self._valid_batches) // max(1, num_samples) for index in range(num_samples)]
        with torch.no_grad():
            return [
                self._sample_output(model, self._valid_batches[batch_index], index)
                for index, batch_index in enumerate(batch_indices)
            ]

    def _sample_output(self, model: AnyModel, batch: ChunkBatch, index: int) -> str:
        """Sample from the beginning of the chunk of `batch` whose row is the number of the sample."""
        lengths, row = batch.chunks.lengths, index % len(batch)
        start = int(lengths[:row].sum())
        ids = batch.chunks.ids[start : start + int(lengths[row])][:SAMPLE_LENGTH]
        chunk = ChunkBatch(0, PackedChunks.from_arrays(ids, [len(ids)], [index]))
        return self.objectives.at_step(index).sample(model, chunk, self._context, CounterRNG(self.recipe.seed, 0))


def _load_pretrained(recipe: PretrainingRecipe) -> tuple[AnyModel, Tokenizer]:
    """Load a pretrained model with the head that the objectives need, and its tokenizer (Gururangan et al. 2020)."""
    init_from = recipe.model["init_from"]
    torch.manual_seed(recipe.seed)  # for a head that the checkpoint lacks
    bundle, objectives = load_initial_model(recipe), ObjectiveMixture(recipe.objective, recipe.seed)
    model_spec = bundle.model.spec
    has_head = model_spec.head is not None and model_spec.head.kind == "lm"
    if not has_head or (model_spec.aux_head is not None) != objectives.sentence_pairs:
        bundle = load_initial_model(recipe, head=_pretraining_head(model_spec.family, objectives))
    if bundle.source_tokenizer is None:
        raise InputError(f"model.init_from: {init_from} has no tokenizer; name a model that has one")
    objectives.check_model(bundle.model.spec)
    return bundle.model, bundle.source_tokenizer


def _pretraining_head(family: str, objectives: ObjectiveMixture) -> str:
    """Return the name of the family's head for the objectives."""
    if objectives.sentence_pairs:
        return "pretraining"
    names = families.head_names(families.get_family(family))
    return next((name for name in ("masked_lm", "lm", "seq2seq_lm") if name in names), "lm")
