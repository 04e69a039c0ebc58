"""Data of seq2seq recipes: tokenizers, encoded pairs, the examples of validation and test, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from qkv import spec
from qkv.checkpoints.state import AnyModel
from qkv.data.pair import Pair, SourceWithReferences
from qkv.errors import InputError, did_you_mean
from qkv.generation.generate import encode_sources
from qkv.generation.log_probs import encode_without_eos
from qkv.metrics.registry import check_packages, metrics_of_kind
from qkv.metrics.seq2seq import ERROR_RATES, REFERENCE_LOSS, find_text_metric
from qkv.recipe.schema import PairData, Seq2SeqRecipe, SideTokenizer, SideTokenizers
from qkv.tasks.generation import Generation
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer
from qkv.train.workloads.pair_data import read_datasets, to_examples

EncodedSides = tuple[list[list[int]], list[list[int]]]  # ids of the sources, ids of the targets


@dataclass(frozen=True)
class InitialModel:
    """The model and the tokenizers before training."""

    spec: spec.Model
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    model: AnyModel | None = None  # a pretrained model; None: newly initialized


def build_tokenizers(config: SideTokenizers | None, pairs: list[Pair]) -> tuple[Tokenizer, Tokenizer]:
    """Train the tokenizers of both sides on the training pairs, or one for both if the vocabulary is joint."""
    if config is None:
        raise InputError("key 'tokenizer' is missing: a new model needs tokenizers for source and target")
    sources, targets = [p.source for p in pairs], [p.target for p in pairs]
    source_config, target_config = config.source, config.target or config.source
    if config.joint_vocab and source_config != target_config:
        message = "one vocabulary needs the same settings for tokenizer.source and tokenizer.target"
        raise InputError(f"tokenizer.joint_vocab: {message}")
    if config.joint_vocab:
        joint_tokenizer = _train_tokenizer(source_config, sources + targets)
        return joint_tokenizer, joint_tokenizer
    return _train_tokenizer(source_config, sources), _train_tokenizer(target_config, targets)


def _train_tokenizer(config: SideTokenizer, texts: list[str]) -> Tokenizer:
    return train_tokenizer(config.kind, texts, vocab_size=config.vocab_size, lowercase=config.lowercase)


def max_lengths(data: PairData, model_spec: spec.Model) -> tuple[int, int]:
    """Return the maximum number of tokens of a source and of a target, without the EOS token of every sequence."""
    source, target = model_spec.source_embedding, model_spec.target_embedding
    assert source is not None  # the model is an encoder-decoder
    assert target is not None
    max_source_length = min(source.max_length, data.max_source_length or source.max_length)
    return max_source_length - 1, min(target.max_length, data.max_target_length or target.max_length) - 1


def encode_pairs(
    data: PairData, pairs: list[Pair], initial_model: InitialModel, dataset_name: str
) -> tuple[EncodedSides, list[str]]:
    """Return the ids of a dataset's training pairs, and notes about pairs that are too long."""
    eos_id = initial_model.spec.eos_id
    max_source_length, max_target_length = max_lengths(data, initial_model.spec)
    sides = (
        encode_without_eos(initial_model.source_tokenizer, [p.source for p in pairs], eos_id),
        encode_without_eos(initial_model.target_tokenizer, [p.target for p in pairs], eos_id),
    )
    fits = [len(a) <= max_source_length and len(b) <= max_target_length for a, b in zip(*sides, strict=True)]
    if all(fits):
        return sides, []
    limit = f"{max_source_length} and {max_target_length}"
    if data.on_too_long == "refuse":
        i = fits.index(False)
        message = f"{len(sides[0][i])} and {len(sides[1][i])} tokens, and the model takes at most {limit}"
        remedy = "set a larger model.max_length, or data.on_too_long: drop or truncate"
        raise InputError(f"{pairs[i].location}: {message}; {remedy}")
    dataset = f" of {dataset_name}" if dataset_name else ""
    note = f"{fits.count(False):,} of the {len(fits):,} training pairs{dataset} are longer than {limit} tokens and are"
    if data.on_too_long == "truncate":
        truncated = [ids[:max_source_length] for ids in sides[0]], [ids[:max_target_length] for ids in sides[1]]
        return truncated, [f"{note} truncated"]
    fitting = [i for i, fit in enumerate(fits) if fit]
    if not fitting:
        raise InputError("every training pair is longer than model.max_length; set a larger one")
    return ([sides[0][i] for i in fitting], [sides[1][i] for i in fitting]), [f"{note} left out"]


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_metrics(recipe: Seq2SeqRecipe) -> list[str]:
    """Return the metrics of `qkv eval`: those of `test.metrics`, else the validation metric's."""
    if recipe.test.metrics:
        return list(recipe.test.metrics)
    return text_metric_names(recipe.validation.metric) or list(ERROR_RATES)


def check_metrics(recipe: Seq2SeqRecipe) -> None:
    """Check the names of the metrics in a recipe, registered ones included, before any data is read."""
    try:
        text_metric_names(recipe.validation.metric)
    except InputError as error:
        raise InputError(f"validation.metric: {error}") from None
    known_names = [*ERROR_RATES, *metrics_of_kind("texts")]
    for name in recipe.test.metrics:
        if name not in known_names:
            hint = did_you_mean(name, known_names)
            raise InputError(f"test.metrics: there is no metric '{name}' of generated texts; {hint}")
    check_packages([*text_metric_names(recipe.validation.metric), *recipe.test.metrics])


def text_metric_names(metric: str) -> list[str]:
    """Return the metric of texts that reports a score; none for error rates and the loss."""
    return [] if metric in (*ERROR_RATES, REFERENCE_LOSS) else [find_text_metric(metric)]


# ---- examples of validation and test --------------------------------------------------------------------------------


def eval_examples(
    recipe: Seq2SeqRecipe,
    split: str,
    tokenizer: Tokenizer,
    model_spec: spec.Model,
    data: PairData | None = None,
    metrics: list[str] | None = None,
) -> dict[str, list[SourceWithReferences]]:
    """Read the examples of a split by dataset; `data` and `metrics` may replace those of the recipe."""
    data = data or recipe.data
    pairs_by_dataset = read_datasets(data, [split])[split]
    if metrics is None:
        metrics = test_metrics(recipe) if split == "test" else [recipe.validation.metric]
    return group_examples(pairs_by_dataset, metrics, data, tokenizer, model_spec)


def group_examples(
    pairs_by_dataset: Mapping[str, list[Pair]],
    metrics: list[str],
    data: PairData,
    tokenizer: Tokenizer,
    model_spec: spec.Model,
) -> dict[str, list[SourceWithReferences]]:
    """Return pairs as the examples that the metrics score.

    Error rates score a source with all its targets, like the words of a dictionary. Metrics of texts score lines: two
    captions with the same text are two examples, as in published results.
    """
    by_source = all(metric in ERROR_RATES for metric in metrics)
    examples_by_dataset = {name: to_examples(pairs, by_source) for name, pairs in pairs_by_dataset.items()}
    if data.on_too_long != "truncate":
        return examples_by_dataset
    max_length = max_lengths(data, model_spec)[0]
    return {
        name: _truncate_sources(examples, tokenizer, model_spec.eos_id, max_length)
        for name, examples in examples_by_dataset.items()
    }


def _truncate_sources(
    examples: list[SourceWithReferences], tokenizer: Tokenizer, eos_id: int, max_length: int
) -> list[SourceWithReferences]:
    """Truncate the texts of long sources, so that metrics and reports contain what the model reads."""
    truncated = []
    for example, ids in zip(examples, encode_without_eos(tokenizer, [e.source for e in examples], eos_id), strict=True):
        if len(ids) > max_length:
            encoding = tokenizer.encode_plus(example.source)
            char_ends = [
                char_end
                for (_, char_end), sequence_id in zip(encoding.offsets, encoding.sequence_ids, strict=True)
                if sequence_id == 0
            ]
            source_text = example.source[: char_ends[len(char_ends) - (len(ids) - max_length) - 1]]
            example = replace(example, source=source_text)
        truncated.append(example)
    return truncated


def select_valid(
    recipe: Seq2SeqRecipe, examples: list[SourceWithReferences], initial_model: InitialModel, train_sources: set[str]
) -> list[SourceWithReferences]:
    """Select the validation examples of a dataset; one that the model cannot read is refused before training."""
    selected = [example for example in examples if example.source not in train_sources]
    if not selected:
        remedy = "see data.valid, data.hold_out and validation.exclude_train_sources"
        raise InputError(f"no validation examples are left; {remedy}")
    max_examples, data = recipe.validation.max_examples, recipe.data
    if max_examples is not None and max_examples < len(selected):
        selected = [selected[i * len(selected) // max_examples] for i in range(max_examples)]
    max_length, tokenizer = max_lengths(data, initial_model.spec)[0], initial_model.source_tokenizer
    encoded = encode_without_eos(tokenizer, [example.source for example in selected], initial_model.spec.eos_id)
    lengths = [len(ids) for ids in encoded]
    if data.on_too_long == "drop":
        selected = [example for example, length in zip(selected, lengths, strict=True) if length <= max_length]
    elif data.on_too_long == "refuse" and max(lengths) > max_length:
        i = lengths.index(max(lengths))
        message = f"{lengths[i]} tokens, and the model takes at most {max_length}"
        raise InputError(f"{selected[i].location}: {message}; shorten it, or set data.on_too_long: drop or truncate")
    if tokenizer.is_native:
        config = Generation.from_recipe(recipe).config
        sources, locations = [e.source for e in selected], [e.location for e in selected]
        encode_sources(tokenizer, sources, locations, max_length, config)
    return selected
