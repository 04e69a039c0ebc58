"""Training on pairs of source and target, validated by generating for held-out sources.

The model and its tokenizers are new, or those of a pretrained encoder-decoder (`model.init_from`): T5, BART, Marian or
a run of this package. A pretrained model reads text in its family's template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from qkv import spec
from qkv.checkpoints import ModelBundle
from qkv.checkpoints.model_folder import SOURCE_TOKENIZER_FILE, TARGET_TOKENIZER_FILE
from qkv.checkpoints.state import AnyModel
from qkv.checkpoints.word_vectors import InitialVectors
from qkv.data.batching import DataPosition, EncodedPairs, PairBatch, PairBatches
from qkv.data.mixing import MixedBatches, mixing_rates
from qkv.data.pair import Pair, SourceWithReferences
from qkv.errors import InputError
from qkv.generation import generate_texts
from qkv.generation.config import GenerationConfig
from qkv.metrics import evaluate, reference_loss
from qkv.metrics.seq2seq import ERROR_RATES, compute_text_metrics, higher_is_better
from qkv.nn import EncoderDecoder, build
from qkv.objectives import seq2seq
from qkv.objectives.loss import LossSum
from qkv.recipe.model_section import model_spec as spec_of_recipe
from qkv.recipe.schema import PairData, Seq2SeqRecipe
from qkv.tasks.generation import Generation
from qkv.tokenization.tokenizer import Tokenizer
from qkv.train.cost_inputs import CostInputs, with_default_lengths
from qkv.train.init_model import load_initial_model, load_initial_vectors
from qkv.train.run_folder import holds_run
from qkv.train.workload import refuse_folds
from qkv.train.workloads.pair_data import read_datasets, read_pair_split, reader_notes, with_detected_format
from qkv.train.workloads.seq2seq_data import (
    InitialModel,
    build_tokenizers,
    check_metrics,
    encode_pairs,
    group_examples,
    select_valid,
    text_metric_names,
)

_MAX_SOURCE_CHARS, _MAX_OUTPUT_CHARS = 100, 300  # characters of a source and of an output in a sample
_MAX_MEASURED_PAIRS = 2000  # pairs whose lengths `qkv cost` averages


@dataclass(frozen=True, eq=False)
class Seq2SeqWorkload:
    """Training on pairs; implements `qkv.train.workload.Workload`."""

    recipe: Seq2SeqRecipe
    initial_model: InitialModel
    pairs: EncodedPairs  # of all datasets, one after the other
    dataset_sizes: tuple[int, ...]  # pairs per dataset
    valid_sets: Mapping[str, list[SourceWithReferences]]  # validation examples by dataset
    data_notes: tuple[str, ...]
    initial_vectors: InitialVectors | None = None  # of tokens of the source of a newly initialized model

    recipe_class = Seq2SeqRecipe
    loss_names = ("loss",)

    @classmethod
    def build(
        cls, recipe: Seq2SeqRecipe, folder: Path, data: dict[str, dict[str, list[Pair]]] | None = None
    ) -> Seq2SeqWorkload:
        """Read the pairs, and train the tokenizers or load those of the run or of the pretrained model.

        `data` are the splits "train" and "valid" if they were already read, each as pairs by dataset.
        """
        check_metrics(recipe)
        splits = read_datasets(recipe.data, ("train", "valid")) if data is None else data
        recipe = replace(recipe, data=with_detected_format(recipe.data, splits))
        train_sets = splits["train"]
        train_pairs = [pair for dataset_pairs in train_sets.values() for pair in dataset_pairs]
        initial_model = _make_initial_model(recipe, folder, train_pairs)
        if recipe.train.scheduled_sampling and not isinstance(initial_model.spec.decoder, spec.RecurrentDecoder):
            reason = "only a recurrent decoder can read its own outputs in training"
            raise InputError(f"train.scheduled_sampling: {reason}; set it to 0")
        encoded, notes = [], reader_notes(splits)
        for name, dataset_pairs in train_sets.items():
            ids, messages = encode_pairs(recipe.data, dataset_pairs, initial_model, name)
            encoded.append(ids)
            notes += messages
        dataset_sizes = tuple(len(sources) for sources, _ in encoded)
        if len(dataset_sizes) > 1:
            rows = zip(train_sets, dataset_sizes, _dataset_rates(recipe.data, dataset_sizes), strict=True)
            notes = [f"{name}: {size:,} pairs, {rate:.1%} of an epoch" for name, size, rate in rows] + notes
        all_pairs = EncodedPairs(
            [ids for sources, _ in encoded for ids in sources], [ids for _, targets in encoded for ids in targets]
        )
        train_sources = {p.source for p in train_pairs} if recipe.validation.exclude_train_sources else set()
        examples_by_dataset = group_examples(
            splits["valid"],
            [recipe.validation.metric],
            recipe.data,
            initial_model.source_tokenizer,
            initial_model.spec,
        )
        valid_sets = {
            name: select_valid(recipe, examples, initial_model, train_sources)
            for name, examples in examples_by_dataset.items()
        }
        num_valid = sum(map(len, valid_sets.values()))
        notes.append(f"{len(all_pairs):,} training pairs and {num_valid:,} validation examples")
        vectors = load_initial_vectors(recipe, folder, initial_model.source_tokenizer, initial_model.spec)
        notes += [] if vectors is None else [vectors.note]
        return cls(recipe, initial_model, all_pairs, dataset_sizes, valid_sets, tuple(notes), vectors)

    @classmethod
    def cost_inputs(
        cls,
        recipe: Seq2SeqRecipe,
        folder: Path,
        model_spec: spec.Model | None,
        vocab_sizes: tuple[int, int] | None,
    ) -> CostInputs:
        """Return the model with the mean lengths of the training pairs; see `Workload.cost_inputs`."""
        if vocab_sizes is not None:
            source_size, target_size = vocab_sizes
            model_spec = spec_of_recipe(recipe, source_vocab_size=source_size, target_vocab_size=target_size)
            return with_default_lengths(model_spec, recipe)
        try:
            pairs = read_pair_split(recipe.data, "train")
        except InputError as error:
            if model_spec is not None:  # a run that was copied without its data
                return with_default_lengths(model_spec, recipe)
            raise InputError(f"{error} (without the data, give --vocab-size SOURCE,TARGET)") from None
        if model_spec is None:
            source, target = build_tokenizers(recipe.tokenizer, pairs)
            vocab_args = {"source_vocab_size": source.vocab_size, "target_vocab_size": target.vocab_size}
            model_spec = spec_of_recipe(recipe, **vocab_args)
        else:
            source, target = (Tokenizer.load(folder / name) for name in (SOURCE_TOKENIZER_FILE, TARGET_TOKENIZER_FILE))
        measured = pairs[:: max(1, len(pairs) // _MAX_MEASURED_PAIRS)]
        source_length = _mean_length(source.encode_batch([p.source for p in measured]))
        return CostInputs(
            model_spec, source_length, _mean_length(target.encode_batch([p.target for p in measured])), recipe
        )

    @classmethod
    def fold_recipes(cls, recipe: Seq2SeqRecipe, count: int) -> list[Seq2SeqRecipe]:  # noqa: ARG003
        """Refuse cross-validation."""
        raise refuse_folds()

    @property
    def spec(self) -> spec.Model:
        return self.initial_model.spec

    @property
    def source_tokenizer(self) -> Tokenizer:
        return self.initial_model.source_tokenizer

    @property
    def target_tokenizer(self) -> Tokenizer:
        return self.initial_model.target_tokenizer

    @property
    def valid_examples(self) -> list[SourceWithReferences]:
        """The validation examples of all datasets."""
        return [example for examples in self.valid_sets.values() for example in examples]

    @property
    def metric(self) -> str:
        return self.recipe.validation.metric

    @property
    def higher_is_better(self) -> bool:
        return higher_is_better(self.metric)

    def fingerprint(self) -> str:
        return self.pairs.fingerprint()

    def save_assets(self, folder: Path) -> None:
        self.source_tokenizer.save(folder / SOURCE_TOKENIZER_FILE)
        self.target_tokenizer.save(folder / TARGET_TOKENIZER_FILE)

    def check(self) -> None:
        self._batches.batches_per_epoch(0)
        for name in text_metric_names(self.metric):  # a missing package is reported now, not at the first validation
            compute_text_metrics(name, ["a"], [["a"]])

    def steps_per_epoch(self) -> int:
        return self._batches.batches_per_epoch(0)

    def batches_from(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, PairBatch]]:
        return self._batches.iterate_from(epoch, batch_index)

    @cached_property
    def _batches(self) -> PairBatches | MixedBatches:
        config = self.recipe.train
        limits = config.batch_tokens, self.recipe.seed, config.num_workers, config.batch_size
        if len(self.dataset_sizes) == 1:
            return PairBatches(self.pairs, *limits)
        rates = _dataset_rates(self.recipe.data, self.dataset_sizes)
        return MixedBatches(self.pairs, self.dataset_sizes, rates, *limits)

    def collate(self, batch: PairBatch, step: int) -> seq2seq.Inputs:  # noqa: ARG002  # the same at every step
        return seq2seq.make_inputs(batch, bos_id=self.spec.bos_id, eos_id=self.spec.eos_id)

    def losses(self, model: AnyModel, inputs: seq2seq.Inputs) -> tuple[LossSum, ...]:
        train_config = self.recipe.train
        assert isinstance(model, EncoderDecoder)  # `build` refuses all others
        total = seq2seq.loss(
            model,
            inputs,
            label_smoothing=train_config.label_smoothing,
            scheduled_sampling=train_config.scheduled_sampling,
            rdrop_alpha=train_config.rdrop_alpha,
        )
        return (LossSum(total, len(inputs.labels)),)

    def model(self) -> AnyModel:
        if self.initial_model.model is not None:
            return self.initial_model.model
        model = build(self.spec)
        if self.initial_vectors is not None:
            self.initial_vectors.apply(model)
        return model

    def _bundle(self, model: AnyModel) -> ModelBundle:
        return ModelBundle(model, self.source_tokenizer, self.target_tokenizer)

    def _generation_config(self) -> GenerationConfig:
        task_config = Generation.from_recipe(self.recipe).config
        return replace(task_config, num_beams=self.recipe.validation.num_beams, length_penalty=1.0)

    def evaluate(self, model: AnyModel) -> dict[str, float]:
        """Generate for the validation sources and score; for several datasets, the mean and each one's own scores."""
        bundle = self._bundle(model)
        scores_by_set = {name: self._evaluate_examples(bundle, examples) for name, examples in self.valid_sets.items()}
        all_scores = list(scores_by_set.values())
        if len(all_scores) == 1:
            return all_scores[0]
        merged: dict[str, float] = {}
        for metric_name in sorted(all_scores[0], key=lambda name: name != self.metric):  # the validation metric first
            merged[metric_name] = sum(scores[metric_name] for scores in all_scores) / len(all_scores)
            merged |= {f"{metric_name} {name}": scores[metric_name] for name, scores in scores_by_set.items()}
        return merged

    def _evaluate_examples(self, bundle: ModelBundle, examples: list[SourceWithReferences]) -> dict[str, float]:
        if self.metric == "loss":
            return {"loss": reference_loss(bundle, examples)}
        if self.metric in ERROR_RATES:
            return evaluate(bundle, examples, self._generation_config()).values
        values = evaluate(bundle, examples, self._generation_config(), text_metric_names(self.metric)).values
        return values | {"loss": reference_loss(bundle, examples)}

    def sample_outputs(self, model: AnyModel) -> list[str]:
        """Return some validation sources with the model's outputs."""
        examples = self.valid_examples
        num_samples = min(self.recipe.validation.num_samples, len(examples))
        selected = [examples[index * len(examples) // num_samples] for index in range(num_samples)]
        sources, locations = [e.source for e in selected], [e.location for e in selected]
        outputs = generate_texts(self._bundle(model), sources, self._generation_config(), locations)
        texts = [hypotheses[0].text if hypotheses else "" for hypotheses in outputs]
        return [
            f"{_shorten(source, _MAX_SOURCE_CHARS)} → {_shorten(text, _MAX_OUTPUT_CHARS)}"
            for source, text in zip(sources, texts, strict=True)
        ]


def _shorten(text: str, max_chars: int) -> str:
    """Return a text on one line, truncated to `max_chars`."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else f"{line[:max_chars]}…"


def _mean_length(sequences: Sequence[Sequence[int]]) -> int:
    """Return the mean number of ids, with the BOS or EOS token of each sequence."""
    return max(1, round(sum(map(len, sequences)) / len(sequences)) + 1)


def _dataset_rates(data: PairData, dataset_sizes: Sequence[int]) -> list[float]:
    weights = [dataset.weight for dataset in data.datasets_by_name.values()]
    return mixing_rates(dataset_sizes, weights, data.mixing_temperature)


def _make_initial_model(recipe: Seq2SeqRecipe, folder: Path, pairs: list[Pair]) -> InitialModel:
    if "init_from" in recipe.model:
        return _load_pretrained(recipe)
    has_tokenizers = all((folder / name).is_file() for name in (SOURCE_TOKENIZER_FILE, TARGET_TOKENIZER_FILE))
    if has_tokenizers and holds_run(folder):
        source, target = Tokenizer.load(folder / SOURCE_TOKENIZER_FILE), Tokenizer.load(folder / TARGET_TOKENIZER_FILE)
    else:
        source, target = build_tokenizers(recipe.tokenizer, pairs)
    vocab_args = {"source_vocab_size": source.vocab_size, "target_vocab_size": target.vocab_size}
    return InitialModel(
        spec_of_recipe(recipe, **vocab_args, bos_id=target.bos_id, eos_id=target.eos_id), source, target
    )


def _load_pretrained(recipe: Seq2SeqRecipe) -> InitialModel:
    """Load a pretrained encoder-decoder with its tokenizers."""
    init_from = str(recipe.model["init_from"])
    bundle = load_initial_model(recipe)
    model, head = bundle.model, bundle.model.spec.head
    if not isinstance(model, EncoderDecoder) or head is None or head.kind != "lm":
        reason = f"{init_from} is no encoder-decoder with a language model head, such as T5, which pairs need"
        raise InputError(f"model.init_from: {reason}")
    if bundle.source_tokenizer is None or bundle.target_tokenizer is None:
        raise InputError(f"model.init_from: {init_from} has no tokenizer; name a model that has one")
    return InitialModel(model.spec, bundle.source_tokenizer, bundle.target_tokenizer, model)
