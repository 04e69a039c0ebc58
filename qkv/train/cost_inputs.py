"""A recipe's or a run's spec and the lengths of its data, for whoever counts costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qkv import spec
from qkv.checkpoints.hf_checkpoint import is_checkpoint, read_checkpoint
from qkv.checkpoints.hub import resolve
from qkv.checkpoints.model_folder import SOURCE_TOKENIZER_FILE, SPEC_FILE, TARGET_TOKENIZER_FILE
from qkv.data.pair import Pair
from qkv.errors import InputError
from qkv.recipe.parse import model_spec, read_recipe
from qkv.recipe.schema import BaseRecipe, FinetuneRecipe, PretrainingRecipe, Seq2SeqRecipe
from qkv.tokenization.tokenizer import Tokenizer
from qkv.train.run_folder import RECIPE
from qkv.train.workloads.pretraining_data import find_tokenizer, spec_for_tokenizer, spec_for_vocab_size
from qkv.train.workloads.seq2seq import build_tokenizers, read_pair_split

_DEFAULT_LENGTH = 32  # where no data says how long a sequence is


@dataclass(frozen=True)
class CostInputs:
    spec: spec.Model
    source_length: int
    target_length: int
    recipe: BaseRecipe | None


def infer_cost_inputs(path: Path, overrides: list[str], vocab_sizes: str | None) -> CostInputs:
    """The model of a run's folder or of a recipe; a recipe's vocabularies come from its data, or as `30,40`."""
    if path.is_dir():
        return _from_folder(path, overrides)
    recipe = read_recipe(path, overrides)
    if "init_from" in recipe.model:
        return _from_folder(resolve(recipe.model["init_from"]), [])
    if isinstance(recipe, PretrainingRecipe):
        if vocab_sizes is not None:
            raise InputError("--vocab-size: a model of text has one, of tokenizer.vocab_size tokens; change that instead")
        if recipe.tokenizer.vocab_size is not None:  # close enough, and nothing has to be read
            return _from_corpus(spec_for_vocab_size(recipe, recipe.tokenizer.vocab_size), recipe)
        return _from_corpus(spec_for_tokenizer(recipe, find_tokenizer(recipe, path)), recipe)
    if isinstance(recipe, FinetuneRecipe):
        raise InputError(f"{path}: a task's model has a head for labels that are not read here; name its run's folder")
    if vocab_sizes is not None:
        source_size, target_size = _parse_vocab_sizes(vocab_sizes)
        return _with_default_lengths(model_spec(recipe, source_vocab_size=source_size, target_vocab_size=target_size), recipe)
    try:
        pairs = read_pair_split(recipe.data, "train")
    except InputError as error:
        raise InputError(f"{error} (without the data, give --vocab-size SOURCE,TARGET)") from None
    source, target = build_tokenizers(recipe.tokenizer, pairs)
    return _from_pairs(model_spec(recipe, source_vocab_size=source.vocab_size, target_vocab_size=target.vocab_size), recipe, pairs, source, target)


def _from_pairs(s: spec.Model, recipe: Seq2SeqRecipe, pairs: list[Pair], source: Tokenizer, target: Tokenizer) -> CostInputs:
    subset = pairs[:: max(1, len(pairs) // 2000)]
    encoded_sides = source.encode_batch([p.source for p in subset]), target.encode_batch([p.target for p in subset])
    return CostInputs(s, *(max(1, round(sum(map(len, ids)) / len(ids)) + 1) for ids in encoded_sides), recipe)  # and start or end


def _from_folder(folder: Path, overrides: list[str]) -> CostInputs:
    if overrides:
        raise InputError(f"{folder} is a finished shape; key=value changes go with a recipe")
    path = folder / SPEC_FILE
    if not path.is_file() and is_checkpoint(folder):
        return _with_default_lengths(read_checkpoint(folder).spec, None)
    if not path.is_file():
        raise InputError(f"{folder}: not a model folder (it has neither {SPEC_FILE} nor config.json)")
    s = spec.from_json(path.read_text("utf-8"), str(path))
    recipe = read_recipe(folder / RECIPE) if (folder / RECIPE).is_file() else None
    if recipe is None or isinstance(recipe, FinetuneRecipe):
        return _with_default_lengths(s, recipe)
    if isinstance(recipe, PretrainingRecipe):
        return _from_corpus(s, recipe)
    try:
        pairs = read_pair_split(recipe.data, "train")
    except InputError:  # a run that was brought here without its data
        return _with_default_lengths(s, recipe)
    return _from_pairs(s, recipe, pairs, Tokenizer.load(folder / SOURCE_TOKENIZER_FILE), Tokenizer.load(folder / TARGET_TOKENIZER_FILE))


def _from_corpus(s: spec.Model, recipe: PretrainingRecipe) -> CostInputs:
    """Pieces as long as they may be: most of a corpus is cut to that."""
    lengths = (min(recipe.data.max_length or embed.max_length, embed.max_length) if embed else 0 for embed in (s.source_embedding, s.target_embedding))
    return CostInputs(s, *lengths, recipe)


def _with_default_lengths(s: spec.Model, recipe: BaseRecipe | None) -> CostInputs:
    if isinstance(s.source_embedding, spec.PatchEmbedding):  # an image has always as many
        return CostInputs(s, s.source_embedding.max_length, 0, recipe)
    lengths = (min(_DEFAULT_LENGTH, embed.max_length) if embed else 0 for embed in (s.source_embedding, s.target_embedding))
    return CostInputs(s, *lengths, recipe)


def _parse_vocab_sizes(vocab_sizes: str) -> tuple[int, int]:
    try:
        source, target = (int(size) for size in vocab_sizes.split(","))
    except ValueError:
        raise InputError(f"--vocab-size is two sizes such as 30,40, not '{vocab_sizes}'") from None
    if min(source, target) < 1:
        raise InputError(f"--vocab-size: sizes are 1 or more, not '{vocab_sizes}'")
    return source, target
