"""Learning from pairs: tokenisers, encoded pairs, held-out examples that are really decoded.

The model is fresh and so are its tokenisers, or both are those of a model that is there (`model.init_from`): a T5, a BART, a
Marian, a run of ours. Then a text is framed as that model's family has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from qkv import spec
from qkv.checkpoints.model_folder import SOURCE_TOKENIZER_FILE, TARGET_TOKENIZER_FILE, AnyModel, ModelBundle
from qkv.data.batching import DataPosition, EncodedPairs, PairBatch, PairBatches
from qkv.data.mixing import MixedBatches, mixing_rates
from qkv.data.pair import Pair, SourceWithReferences
from qkv.errors import InputError
from qkv.generation import predict
from qkv.generation.config import GenerationConfig
from qkv.generation.generate import encode_sources
from qkv.generation.log_probs import encode_without_eos
from qkv.metrics import evaluate, reference_loss
from qkv.metrics.seq2seq import ERROR_RATES, compute_text_metrics
from qkv.nn import EncoderDecoder, build
from qkv.objectives import seq2seq
from qkv.objectives.loss import LossSum
from qkv.recipe.parse import model_spec
from qkv.recipe.schema import PairData, Seq2SeqRecipe, SideTokenizers
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer
from qkv.train.checkpoint import LAST_CHECKPOINT
from qkv.train.init_model import load_initial_model
from qkv.train.workloads.pair_data import read_datasets, read_pair_split, to_examples

__all__ = ["Seq2SeqWorkload", "eval_examples", "test_metrics", "build_seq2seq_workload", "read_pair_split", "build_tokenizers"]

_LOWER_IS_BETTER = (*ERROR_RATES, "ter", "loss")
_MAX_SOURCE_CHARS, _MAX_OUTPUT_CHARS = 100, 300  # characters of a source, and of what is written for it, that a sample shows


@dataclass(frozen=True)
class InitialModel:
    """What a run begins with."""

    spec: spec.Model
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    model: AnyModel | None = None  # None: a fresh one


@dataclass(frozen=True, eq=False)
class Seq2SeqWorkload:
    """See `qkv.train.workload.Workload`."""

    recipe: Seq2SeqRecipe
    initial_model: InitialModel
    pairs: EncodedPairs  # of all sets, one behind the other
    dataset_sizes: tuple[int, ...]  # pairs of each
    valid_sets: Mapping[str, list[SourceWithReferences]]  # held-out examples of each
    data_notes: tuple[str, ...]

    loss_names = ("loss",)

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
        return [example for examples in self.valid_sets.values() for example in examples]

    @property
    def metric(self) -> str:
        return self.recipe.validation.metric

    @property
    def higher_is_better(self) -> bool:
        return self.metric not in _LOWER_IS_BETTER

    def fingerprint(self) -> str:
        return self.pairs.fingerprint()

    def save_assets(self, folder: Path) -> None:
        self.source_tokenizer.save(folder / SOURCE_TOKENIZER_FILE)
        self.target_tokenizer.save(folder / TARGET_TOKENIZER_FILE)

    def check(self) -> None:
        self._batches.batches_per_epoch(0)
        for name in _text_metric_names(self.metric):  # a package that is not there is said now, not at the first validation
            compute_text_metrics(name, ["a"], [["a"]])

    def batches_from(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, PairBatch]]:
        return self._batches.iterate_from(epoch, batch_index)

    @cached_property
    def _batches(self) -> PairBatches | MixedBatches:
        train_config, seed = self.recipe.train, self.recipe.seed
        if len(self.dataset_sizes) == 1:
            return PairBatches(self.pairs, train_config.batch_tokens, seed, train_config.num_workers)
        rates = _dataset_rates(self.recipe.data, self.dataset_sizes)
        return MixedBatches(self.pairs, self.dataset_sizes, rates, train_config.batch_tokens, seed, train_config.num_workers)

    def collate(self, batch: PairBatch, step: int) -> seq2seq.Inputs:  # noqa: ARG002  # the same in every step
        return seq2seq.make_inputs(batch, bos_id=self.spec.bos_id, eos_id=self.spec.eos_id)

    def losses(self, model: AnyModel, inputs: seq2seq.Inputs) -> tuple[LossSum, ...]:
        train_config = self.recipe.train
        assert isinstance(model, EncoderDecoder)  # every start is one
        total = seq2seq.loss(model, inputs, label_smoothing=train_config.label_smoothing, scheduled_sampling=train_config.scheduled_sampling, rdrop_alpha=train_config.rdrop_alpha)
        return (LossSum(total, len(inputs.labels)),)

    def model(self) -> AnyModel:
        return build(self.spec) if self.initial_model.model is None else self.initial_model.model

    def _generation_config(self) -> GenerationConfig:
        data = self.recipe.data
        return GenerationConfig(
            num_beams=self.recipe.validation.num_beams,
            on_unknown=data.on_unknown,
            on_too_long="truncate" if data.on_too_long == "truncate" else "refuse",
            max_new_tokens=data.max_target_length,
        )

    def evaluate(self, model: AnyModel) -> dict[str, float]:
        """Real decoding and the real metric; of several sets the mean, and each one's own."""
        bundle = ModelBundle(model, self.source_tokenizer, self.target_tokenizer)
        scores_by_set = {name: self._evaluate_examples(bundle, examples) for name, examples in self.valid_sets.items()}
        if len(scores_by_set) == 1:
            return next(iter(scores_by_set.values()))
        merged: dict[str, float] = {}
        for metric_name in sorted(next(iter(scores_by_set.values())), key=lambda name: name != self.metric):  # what decides is first
            merged[metric_name] = sum(scores[metric_name] for scores in scores_by_set.values()) / len(scores_by_set)
            merged |= {f"{metric_name} {name}": scores[metric_name] for name, scores in scores_by_set.items()}
        return merged

    def _evaluate_examples(self, bundle: ModelBundle, examples: list[SourceWithReferences]) -> dict[str, float]:
        if self.metric == "loss":
            return {"loss": reference_loss(bundle, examples)}
        if self.metric in ERROR_RATES:
            return evaluate(bundle, examples, self._generation_config()).values
        values = evaluate(bundle, examples, self._generation_config(), _text_metric_names(self.metric)).values
        return values | {"loss": reference_loss(bundle, examples)}

    def sample_outputs(self, model: AnyModel) -> list[str]:
        """Some held-out sources and what the model now writes for them."""
        valid_examples, num_samples = self.valid_examples, min(self.recipe.validation.num_samples, len(self.valid_examples))
        selected = [valid_examples[index * len(valid_examples) // num_samples] for index in range(num_samples)]
        locations = [example.location for example in selected]
        predictions = predict(ModelBundle(model, self.source_tokenizer, self.target_tokenizer), [e.source for e in selected], self._generation_config(), locations)
        rows = zip(selected, predictions, strict=True)
        return [f"{_shorten(e.source, _MAX_SOURCE_CHARS)} → {_shorten(hypotheses[0].text, _MAX_OUTPUT_CHARS) if hypotheses else ''}" for e, hypotheses in rows]


def _shorten(text: str, max_chars: int) -> str:
    """A text in one line, as far as it is shown."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else f"{line[:max_chars]}…"


def _dataset_rates(data: PairData, dataset_sizes: Sequence[int]) -> list[float]:
    return mixing_rates(dataset_sizes, [dataset.weight for dataset in data.datasets_by_name.values()], data.mixing_temperature)


def build_tokenizers(config: SideTokenizers | None, pairs: list[Pair]) -> tuple[Tokenizer, Tokenizer]:
    """Each side's tokeniser, trained on the training pairs; one for both where the vocabulary is joint."""
    if config is None:
        raise InputError("key 'tokenizer' is missing: it says how the source and the target of a fresh model are cut")
    sources, targets = [p.source for p in pairs], [p.target for p in pairs]
    source_config, target_config = config.source, config.target or config.source
    if config.joint_vocab and source_config != target_config:
        raise InputError("tokenizer.joint_vocab: one vocabulary needs the same settings for tokenizer.source and tokenizer.target")
    if config.joint_vocab:
        joint_tokenizer = train_tokenizer(source_config.kind, sources + targets, vocab_size=source_config.vocab_size, lowercase=source_config.lowercase)
        return joint_tokenizer, joint_tokenizer
    return (
        train_tokenizer(source_config.kind, sources, vocab_size=source_config.vocab_size, lowercase=source_config.lowercase),
        train_tokenizer(target_config.kind, targets, vocab_size=target_config.vocab_size, lowercase=target_config.lowercase),
    )


def build_seq2seq_workload(recipe: Seq2SeqRecipe, folder: Path) -> Seq2SeqWorkload:
    """Reads the data, and trains the tokenisers or takes those that the run's folder or its model already has."""
    train_sets = read_datasets(recipe.data, "train")
    pairs = [pair for dataset_pairs in train_sets.values() for pair in dataset_pairs]
    initial_model = _make_initial_model(recipe, folder, pairs)
    if recipe.train.scheduled_sampling and not isinstance(initial_model.spec.decoder, spec.RecurrentDecoder):
        raise InputError("train.scheduled_sampling: only a recurrent decoder can read its own outputs in training; set it to 0")
    encoded, notes = [], []
    for name, dataset_pairs in train_sets.items():
        ids, messages = _encode_pairs(recipe.data, dataset_pairs, initial_model, name)
        encoded.append(ids)
        notes += messages
    dataset_sizes = tuple(len(sources) for sources, _ in encoded)
    if len(dataset_sizes) > 1:
        rows = zip(train_sets, dataset_sizes, _dataset_rates(recipe.data, dataset_sizes), strict=True)
        notes = [f"{name}: {size:,} pairs, {rate:.1%} of an epoch" for name, size, rate in rows] + notes
    all_pairs = EncodedPairs([ids for sources, _ in encoded for ids in sources], [ids for _, t in encoded for ids in t])
    train_sources = {p.source for p in pairs} if recipe.validation.exclude_train_sources else set()
    valid_sets = {
        name: _select_valid(recipe, examples, initial_model, train_sources)
        for name, examples in eval_examples(recipe, "valid", initial_model.source_tokenizer, initial_model.spec).items()
    }
    return Seq2SeqWorkload(recipe, initial_model, all_pairs, dataset_sizes, valid_sets, tuple(notes))


def _make_initial_model(recipe: Seq2SeqRecipe, folder: Path, pairs: list[Pair]) -> InitialModel:
    if "init_from" in recipe.model:
        return _load_pretrained(recipe)
    if all((folder / name).is_file() for name in (LAST_CHECKPOINT, SOURCE_TOKENIZER_FILE, TARGET_TOKENIZER_FILE)):
        source, target = Tokenizer.load(folder / SOURCE_TOKENIZER_FILE), Tokenizer.load(folder / TARGET_TOKENIZER_FILE)
    else:
        source, target = build_tokenizers(recipe.tokenizer, pairs)
    s = model_spec(recipe, source_vocab_size=source.vocab_size, target_vocab_size=target.vocab_size, bos_id=target.bos_id, eos_id=target.eos_id)
    return InitialModel(s, source, target)


def _load_pretrained(recipe: Seq2SeqRecipe) -> InitialModel:
    """A model that writes, with its own tokenisers."""
    init_from = str(recipe.model["init_from"])
    if recipe.tokenizer is not None:
        raise InputError("tokenizer: a model that is there has its tokenisers; leave the section out beside model.init_from")
    bundle = load_initial_model(recipe)
    model, head = bundle.model, bundle.model.spec.head
    if not isinstance(model, EncoderDecoder) or head is None or head.kind != "lm":
        raise InputError(
            f"model.init_from: {init_from} is no encoder-decoder that writes, such as a T5, and these pairs need one"
        )
    if bundle.source_tokenizer is None or bundle.target_tokenizer is None:
        raise InputError(f"model.init_from: {init_from} has no tokeniser; name a model that has one")
    return InitialModel(model.spec, bundle.source_tokenizer, bundle.target_tokenizer, model)


def _max_lengths(data: PairData, s: spec.Model) -> tuple[int, int]:
    """Tokens of a source and of a target at most, without the end token that every sequence gets."""
    assert s.source_embedding is not None
    assert s.target_embedding is not None
    max_source_length = min(s.source_embedding.max_length, data.max_source_length or s.source_embedding.max_length)
    return max_source_length - 1, min(s.target_embedding.max_length, data.max_target_length or s.target_embedding.max_length) - 1


EncodedSides = tuple[list[list[int]], list[list[int]]]


def _encode_pairs(data: PairData, pairs: list[Pair], initial_model: InitialModel, dataset_name: str) -> tuple[EncodedSides, list[str]]:
    """Ids of both sides of a set's pairs that fit, and what happened to those that do not."""
    eos_id, max_lengths = initial_model.spec.eos_id, _max_lengths(data, initial_model.spec)
    sides = (
        encode_without_eos(initial_model.source_tokenizer, [p.source for p in pairs], eos_id),
        encode_without_eos(initial_model.target_tokenizer, [p.target for p in pairs], eos_id),
    )
    fits = [len(a) <= max_lengths[0] and len(b) <= max_lengths[1] for a, b in zip(*sides, strict=True)]
    if all(fits):
        return sides, []
    if data.on_too_long == "refuse":
        i = fits.index(False)
        message = (
            f"{len(sides[0][i])} and {len(sides[1][i])} tokens, and the model takes at most {max_lengths[0]} and {max_lengths[1]}"
        )
        raise InputError(f"{pairs[i].location}: {message}; set a larger model.max_length, or data.on_too_long: drop or truncate")
    note = f"{fits.count(False):,} of the {len(fits):,} training pairs{f' of {dataset_name}' if dataset_name else ''} are longer than"
    note = f"{note} {max_lengths[0]} and {max_lengths[1]} tokens and are"
    if data.on_too_long == "truncate":
        truncated = [ids[: max_lengths[0]] for ids in sides[0]], [ids[: max_lengths[1]] for ids in sides[1]]
        return truncated, [f"{note} cut"]
    retained = [i for i, fit in enumerate(fits) if fit]
    if not retained:
        raise InputError("every training pair is longer than model.max_length; set a larger one")
    return ([sides[0][i] for i in retained], [sides[1][i] for i in retained]), [f"{note} left out"]


def test_metrics(recipe: Seq2SeqRecipe) -> list[str]:
    """What the finished model is scored by: as asked for, else as in validation."""
    if recipe.test.metrics:
        return list(recipe.test.metrics)
    return _text_metric_names(recipe.validation.metric) or list(ERROR_RATES)


def _text_metric_names(metric: str) -> list[str]:
    """The metric of texts that has a figure of this name, if it is one of texts."""
    if metric in (*ERROR_RATES, "loss"):
        return []
    return ["rouge" if metric.startswith("rouge") else metric]


def eval_examples(
    recipe: Seq2SeqRecipe, split: str, tokenizer: Tokenizer, s: spec.Model, data: PairData | None = None
) -> dict[str, list[SourceWithReferences]]:
    """The examples of `valid` or `test` by set, as they are scored; `data` may name another file.

    Error rates are of sources with all their targets, as a dictionary is scored. Figures of texts are of lines: two
    captions that happen to have one translation are two examples, as everybody counts them.
    """
    data = data or recipe.data
    metrics = test_metrics(recipe) if split == "test" else [recipe.validation.metric]
    by_source = all(metric in ERROR_RATES for metric in metrics)
    examples_by_set = {name: to_examples(pairs, by_source) for name, pairs in read_datasets(data, split).items()}
    if data.on_too_long != "truncate":
        return examples_by_set
    max_length = _max_lengths(data, s)[0]
    return {name: _truncate_sources(examples, tokenizer, s.eos_id, max_length) for name, examples in examples_by_set.items()}


def _truncate_sources(examples: list[SourceWithReferences], tokenizer: Tokenizer, eos_id: int, max_length: int) -> list[SourceWithReferences]:
    """The texts of sources as far as they are read: whoever scores or shows them sees what the model saw."""
    truncated = []
    for example, ids in zip(examples, encode_without_eos(tokenizer, [e.source for e in examples], eos_id), strict=True):
        if len(ids) > max_length:
            encoding = tokenizer.encode_plus(example.source)
            char_ends = [char_end for (_, char_end), sequence_id in zip(encoding.offsets, encoding.sequence_ids, strict=True) if sequence_id == 0]
            source_text = example.source[: char_ends[len(char_ends) - (len(ids) - max_length) - 1]]
            example = replace(example, source=source_text)
        truncated.append(example)
    return truncated


def _select_valid(recipe: Seq2SeqRecipe, examples: list[SourceWithReferences], initial_model: InitialModel, train_sources: set[str]) -> list[SourceWithReferences]:
    """Those of a set that are scored while it is learned; one that cannot be read is said before training."""
    selected = [e for e in examples if e.source not in train_sources]
    if not selected:
        raise InputError("no validation examples are left; see data.valid, data.hold_out and validation.exclude_train_sources")
    max_examples, data = recipe.validation.max_examples, recipe.data
    if max_examples is not None and max_examples < len(selected):
        selected = [selected[i * len(selected) // max_examples] for i in range(max_examples)]
    max_length = _max_lengths(data, initial_model.spec)[0]
    lengths = [len(ids) for ids in encode_without_eos(initial_model.source_tokenizer, [e.source for e in selected], initial_model.spec.eos_id)]
    if data.on_too_long == "drop":
        selected = [e for e, length in zip(selected, lengths, strict=True) if length <= max_length]
    elif data.on_too_long == "refuse" and max(lengths) > max_length:
        i = lengths.index(max(lengths))
        message = f"{lengths[i]} tokens, and the model takes at most {max_length}"
        raise InputError(f"{selected[i].location}: {message}; shorten it, or set data.on_too_long: drop or truncate")
    if initial_model.source_tokenizer.is_native:
        generation_config = GenerationConfig(on_unknown=data.on_unknown, on_too_long="truncate" if data.on_too_long == "truncate" else "refuse")
        encode_sources(initial_model.source_tokenizer, [e.source for e in selected], [e.location for e in selected], max_length, generation_config)
    return selected
