"""Learning from text alone: pieces of documents under one or several objectives, perplexity of held-out text."""

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
from qkv.checkpoints.model_folder import SOURCE_TOKENIZER_FILE, AnyModel, ModelBundle
from qkv.data.batching import DataPosition
from qkv.data.corpora.chunks import ChunkBatch, ChunkBatches
from qkv.data.corpora.streaming import StreamingBatches
from qkv.data.corpora.tokenized_corpus import TokenizedCorpus
from qkv.data.rng import CounterRNG, Ints, PackedChunks
from qkv.data.template_batch import apply_template
from qkv.errors import InputError
from qkv.generation.generate import eval_mode
from qkv.nn import build
from qkv.objectives import clm, compat, denoising, mlm, span_corruption
from qkv.objectives.loss import LossSum, to_device
from qkv.recipe.schema import PretrainingRecipe
from qkv.tokenization.tokenizer import Tokenizer
from qkv.tokenization.vocab_tables import VocabTables, build_vocab_tables
from qkv.train.init_model import load_initial_model
from qkv.train.workloads.pretraining_data import (
    Chunker,
    find_tokenizer,
    load_training_corpus,
    load_validation_corpus,
    spec_for_tokenizer,
    uses_nsp,
)
from qkv.train.workloads.samples import sample_text

_MAX_MEAN_LOSS = 700.0  # a mean loss above which its exponential is no number


@dataclass(frozen=True)
class PretrainingWorkload:
    """See `qkv.train.workload.Workload`."""

    recipe: PretrainingRecipe
    chunker: Chunker
    train_corpus: TokenizedCorpus | StreamingBatches
    data_fingerprint: str  # digest of the training text
    valid_corpus: TokenizedCorpus
    initial_model: AnyModel | None = None  # what it starts from; None: a fresh one

    metric = "perplexity"
    higher_is_better = False
    data_notes = ()

    @property
    def spec(self) -> spec.Model:
        return self.chunker.spec

    @property
    def loss_names(self) -> tuple[str, ...]:
        return ("loss", "next_sentence_loss") if self.chunker.uses_nsp else ("loss",)

    def fingerprint(self) -> str:
        return self.data_fingerprint

    def check(self) -> None:
        if isinstance(self._batches, ChunkBatches):
            self._batches.batches_per_epoch(0)
        self.check_validation_data()

    def check_validation_data(self) -> None:
        if not any(self.collate(batch, step).num_targets[0] for step, batch in enumerate(self._valid_batches)):
            remedy = "give more of it, of longer documents, or raise the objective's rate"
            raise InputError(f"no token of the held-out text is asked for; {remedy}")

    def save_assets(self, folder: Path) -> None:
        self.chunker.tokenizer.save(folder / SOURCE_TOKENIZER_FILE)

    def batches_from(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, ChunkBatch]]:
        return self._batches.iterate_from(epoch, batch_index)

    @cached_property
    def _batches(self) -> ChunkBatches | StreamingBatches:
        if isinstance(self.train_corpus, StreamingBatches):
            return self.train_corpus
        train_config = self.recipe.train
        return ChunkBatches(self.chunker(self.train_corpus), train_config.batch_tokens, self.recipe.seed, train_config.num_workers)

    @cached_property
    def _vocab_tables(self) -> VocabTables:
        return build_vocab_tables(self.chunker.tokenizer)

    def objective_at(self, step: int) -> str:
        """The one that a step has."""
        active = self.recipe.objective.active
        if len(active) == 1:
            return next(iter(active))
        return compat.sample_objective({name: config.weight for name, config in active.items()}, seed=self.recipe.seed, step=step)

    def collate(self, batch: ChunkBatch, step: int) -> Any:
        objective, rng = self.objective_at(step), CounterRNG(self.recipe.seed, batch.epoch)
        config: Any = self.recipe.objective.active[objective]
        if objective == "clm":
            return clm.make_inputs(batch.chunks, bos_id=None if self.chunker.is_packed else self.chunker.tokenizer.bos_id)
        chunks, type_ids = apply_template(batch, self.chunker.template)
        if objective == "mlm":
            assert isinstance(self.spec.source_embedding, spec.Embedding)
            token_type_ids = type_ids if self.spec.source_embedding.num_segments and self.chunker.uses_nsp else None
            return mlm.make_inputs(chunks, self._vocab_tables, rng, config, segments=token_type_ids, is_next=batch.is_next)
        if objective == "span_corruption":
            return span_corruption.make_inputs(chunks, self._vocab_tables, rng, config, model=self.spec)
        noised = denoising.make_inputs(chunks, self._vocab_tables, rng, config, model=self.spec)
        if noised.source.layout.max_length > self.chunker.max_input:
            message = f"spans of mean length {config.poisson_lambda} put more masks into a text than they take tokens out of it"
            raise InputError(f"objective.denoising.poisson_lambda: {message}; set it to 1 or more, or a smaller data.max_length")
        return noised

    def losses(self, model: Any, inputs: Any) -> tuple[LossSum, ...]:
        if isinstance(inputs, mlm.Inputs):
            return mlm.mlm_and_nsp_losses(model, inputs)
        if isinstance(inputs, clm.Inputs):
            return (clm.loss(model, inputs),)
        label_smoothing = self.recipe.train.label_smoothing if model.training else 0.0  # a perplexity is of the text as it is
        return (denoising.loss(model, inputs, label_smoothing=label_smoothing),)

    @cached_property
    def _valid_batches(self) -> list[ChunkBatch]:
        """The same pieces, spoilt in the same way, whenever they are scored."""
        try:
            chunks = self.chunker(self.valid_corpus)
        except InputError as error:
            raise InputError(f"held-out text (data.valid, data.hold_out): {error}") from None
        max_tokens = self.recipe.train.batch_tokens
        lengths = chunks.lengths(0)
        token_offsets = np.cumsum(lengths) - lengths
        indices = np.flatnonzero(token_offsets < self.recipe.validation.max_tokens)
        batches = np.split(indices, np.flatnonzero(np.diff(token_offsets[indices] // max_tokens)) + 1)
        return [chunks.gather(0, batch) for batch in batches if len(batch)]

    def model(self) -> AnyModel:
        if self.initial_model is not None:
            return self.initial_model
        try:
            return build(self.spec)
        except InputError as error:
            raise InputError(f"model: {error}; see model.d_model, model.heads and their like") from None
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            raise InputError("model: does not fit into memory; make it smaller (qkv cost says what it needs)") from None

    @torch.no_grad()
    def evaluate(self, model: AnyModel) -> dict[str, float]:
        """Perplexity of the tokens that are asked for; of masked ones that is no probability of the text."""
        sums = torch.zeros(len(self.loss_names), 2, dtype=torch.float64)
        with eval_mode(model):
            for step, batch in enumerate(self._valid_batches):
                losses = self.losses(model, to_device(self.collate(batch, step), model.device))
                sums += torch.tensor([[float(loss.total), loss.num_targets] for loss in losses], dtype=torch.float64)
        means = [total / max(targets, 1) for total, targets in sums.tolist()]
        return {"perplexity": math.exp(min(means[0], _MAX_MEAN_LOSS))} | dict(zip(self.loss_names, means, strict=True))

    def sample_outputs(self, model: AnyModel) -> list[str]:
        num_samples = self.recipe.validation.num_samples
        batch_indices = [index * len(self._valid_batches) // max(1, num_samples) for index in range(num_samples)]
        with eval_mode(model), torch.no_grad():
            return [self._sample_output(model, self._valid_batches[batch_index], index) for index, batch_index in enumerate(batch_indices)]

    def _sample_output(self, model: AnyModel, batch: ChunkBatch, index: int) -> str:
        """Of a batch, the piece whose place in it is the sample's number."""
        lengths, row = batch.chunks.lengths, index % len(batch)
        start = int(lengths[:row].sum())
        ids = batch.chunks.ids[start : start + int(lengths[row])]

        def prepared(token_ids: Ints) -> Any:
            return self.collate(ChunkBatch(0, PackedChunks.from_arrays(token_ids, [len(token_ids)], [index])), index)

        return sample_text(model, self.chunker.tokenizer, ids, prepared)


def build_pretraining_workload(recipe: PretrainingRecipe, folder: Path) -> PretrainingWorkload:
    """Reads the text and trains the tokeniser, or takes the one that the run's folder has."""
    if recipe.train.label_smoothing and {"clm", "mlm"} & set(recipe.objective.active):
        raise InputError("train.label_smoothing: goes with denoising and span_corruption; set it to 0 for clm and mlm")
    initial_model = None
    if "init_from" in recipe.model:
        initial_model, tokenizer = _load_pretrained(recipe)
        chunker = Chunker(recipe, tokenizer, initial_model.spec)
    else:
        tokenizer = find_tokenizer(recipe, folder)
        chunker = Chunker(recipe, tokenizer, spec_for_tokenizer(recipe, tokenizer))
    valid_corpus = load_validation_corpus(recipe, tokenizer)
    return PretrainingWorkload(recipe, chunker, *load_training_corpus(recipe, chunker), valid_corpus, initial_model)


def _load_pretrained(recipe: PretrainingRecipe) -> tuple[AnyModel, Tokenizer]:
    """A model that is there, under the head that the objectives ask, and its tokeniser (Gururangan et al. 2020)."""
    init_from = recipe.model["init_from"]
    torch.manual_seed(recipe.seed)  # a head that the checkpoint has not is drawn
    bundle, with_nsp = load_initial_model(recipe), uses_nsp(recipe)
    s = bundle.model.spec
    if s.head is None or s.head.kind != "lm" or (s.aux_head is not None) != with_nsp:
        has_masked_lm = "masked_lm" in families.head_names(families.get_family(s.family))
        bundle = load_initial_model(recipe, head="pretraining" if with_nsp else "masked_lm" if has_masked_lm else "lm")
    if bundle.source_tokenizer is None:
        raise InputError(f"model.init_from: {init_from} has no tokeniser; name a model that has one")
    for name in recipe.objective.active:
        compat.check_objective(name, bundle.model.spec)
    return bundle.model, bundle.source_tokenizer


def evaluate_perplexity(
    bundle: ModelBundle, recipe: PretrainingRecipe, paths: list[str] | None, format: str | None = None
) -> dict[str, float]:
    """The score of a finished model on all of some text, by default on all of the recipe's held-out text."""
    if bundle.source_tokenizer is None:
        raise InputError("this model has no tokeniser, so that no text can be scored; give one that was trained here")
    if paths is not None:
        data_config = replace(recipe.data, valid=paths)
        recipe = replace(recipe, data=data_config if format is None else replace(data_config, format=format))
    recipe = replace(recipe, validation=replace(recipe.validation, max_tokens=2**62))
    valid_corpus = load_validation_corpus(recipe, bundle.source_tokenizer)
    workload = PretrainingWorkload(recipe, Chunker(recipe, bundle.source_tokenizer, bundle.model.spec), valid_corpus, "", valid_corpus)
    workload.check_validation_data()
    return workload.evaluate(bundle.model) | {"tokens": float(valid_corpus.tokens)}
