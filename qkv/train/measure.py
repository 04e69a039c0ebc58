"""A recipe's or a run's spec and the lengths of its data, for whoever counts costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qkv import spec
from qkv.data.pair import Pair
from qkv.errors import InputError
from qkv.text.tokeniser import Tokeniser
from qkv.train.claim import RECIPE
from qkv.train.pairs import read_part, tokenisers
from qkv.train.reading import find_tokeniser, sized_spec, text_spec
from qkv.train.recipe import model_spec, read_recipe
from qkv.train.sections import PairRecipe, Recipe, TaskRecipe, TextRecipe
from qkv.weights.folder import SOURCE, SPEC, TARGET
from qkv.weights.hub import resolve
from qkv.weights.huggingface import is_checkpoint, read_checkpoint

_UNKNOWN_LENGTH = 32  # where no data says how long a sequence is


@dataclass(frozen=True)
class Measured:
    spec: spec.Model
    source_length: int
    target_length: int
    recipe: Recipe | None


def measure(what: Path, changes: list[str], vocabulary: str | None) -> Measured:
    """The model of a run's folder or of a recipe; a recipe's vocabularies come from its data, or as `30,40`."""
    if what.is_dir():
        return _run(what, changes)
    recipe = read_recipe(what, changes)
    if "from" in recipe.model:
        return _run(resolve(recipe.model["from"]), [])
    if isinstance(recipe, TextRecipe):
        if vocabulary is not None:
            raise InputError("--vocabulary: a model of text has one, of text.size tokens; change that instead")
        if recipe.text.size is not None:  # close enough, and nothing has to be read
            return _text(sized_spec(recipe, recipe.text.size), recipe)
        return _text(text_spec(recipe, find_tokeniser(recipe, what)), recipe)
    if isinstance(recipe, TaskRecipe):
        raise InputError(f"{what}: a task's model has a head for labels that are not read here; name its run's folder")
    if vocabulary is not None:
        source, target = _sizes(vocabulary)
        return _assumed(model_spec(recipe, source=source, target=target), recipe)
    try:
        pairs = read_part(recipe.data, "train")
    except InputError as error:
        raise InputError(f"{error} (without the data, give --vocabulary SOURCE,TARGET)") from None
    source, target = tokenisers(recipe.text, pairs)
    return _counted(model_spec(recipe, source=source.size, target=target.size), recipe, pairs, source, target)


def _counted(s: spec.Model, recipe: PairRecipe, pairs: list[Pair], source: Tokeniser, target: Tokeniser) -> Measured:
    part = pairs[:: max(1, len(pairs) // 2000)]
    sides = source.encode_batch([p.source for p in part]), target.encode_batch([p.target for p in part])
    return Measured(s, *(max(1, round(sum(map(len, ids)) / len(ids)) + 1) for ids in sides), recipe)  # and start or end


def _run(folder: Path, changes: list[str]) -> Measured:
    if changes:
        raise InputError(f"{folder} is a finished shape; key=value changes go with a recipe")
    path = folder / SPEC
    if not path.is_file() and is_checkpoint(folder):
        return _assumed(read_checkpoint(folder).spec, None)
    if not path.is_file():
        raise InputError(f"{folder}: not a model folder (it has neither {SPEC} nor config.json)")
    s = spec.from_json(path.read_text("utf-8"), str(path))
    recipe = read_recipe(folder / RECIPE) if (folder / RECIPE).is_file() else None
    if recipe is None or isinstance(recipe, TaskRecipe):
        return _assumed(s, recipe)
    if isinstance(recipe, TextRecipe):
        return _text(s, recipe)
    try:
        pairs = read_part(recipe.data, "train")
    except InputError:  # a run that was brought here without its data
        return _assumed(s, recipe)
    return _counted(s, recipe, pairs, Tokeniser.load(folder / SOURCE), Tokeniser.load(folder / TARGET))


def _text(s: spec.Model, recipe: TextRecipe) -> Measured:
    """Pieces as long as they may be: most of a corpus is cut to that."""
    lengths = (min(recipe.data.length or embed.length, embed.length) if embed else 0 for embed in (s.source, s.target))
    return Measured(s, *lengths, recipe)


def _assumed(s: spec.Model, recipe: Recipe | None) -> Measured:
    if isinstance(s.source, spec.Patches):  # an image has always as many
        return Measured(s, s.source.length, 0, recipe)
    lengths = (min(_UNKNOWN_LENGTH, embed.length) if embed else 0 for embed in (s.source, s.target))
    return Measured(s, *lengths, recipe)


def _sizes(vocabulary: str) -> tuple[int, int]:
    try:
        source, target = (int(part) for part in vocabulary.split(","))
    except ValueError:
        raise InputError(f"--vocabulary is two sizes such as 30,40, not '{vocabulary}'") from None
    if min(source, target) < 1:
        raise InputError(f"--vocabulary: sizes are 1 or more, not '{vocabulary}'")
    return source, target
