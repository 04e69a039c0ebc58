"""From a recipe's text to ids: its documents, its tokeniser, the model's spec for it, and how documents are cut."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from qkv import families, spec
from qkv.data.corpus import Corpus, Document, tells
from qkv.data.encoded import Encoded, encode, tokeniser_digest
from qkv.data.framing import Frame, frame_of
from qkv.data.pair import unit_hash
from qkv.data.pieces import CutDocuments, PackedDocuments, Source
from qkv.data.sentence_pairs import SentencePairs
from qkv.data.shards import META, Shards
from qkv.data.spans import longest_piece
from qkv.data.stream import Stream
from qkv.errors import InputError
from qkv.objectives import mix
from qkv.text.template import Template, around
from qkv.text.tokeniser import Tokeniser, train_tokeniser
from qkv.train.checkpoint import has_last
from qkv.train.recipe import shape
from qkv.train.sections import CorpusData, TaskRecipe, TextRecipe
from qkv.weights.folder import SOURCE
from qkv.weights.tokenisers import find_tokenisers

_ROOM = 16  # a noisy source of so many tokens may be one longer than its text, for a mask may stand for no token


class Documents:
    """A recipe's documents without those that are held out of them, or these alone; read anew each time.

    Which part a document belongs to its text alone decides, so that streaming and other documents change nothing.
    """

    def __init__(self, data: CorpusData, *, held: bool = False) -> None:
        self.corpus = Corpus(_names(data.train, "data.train"), format=data.format, field=data.field)
        self.share, self.held = (0.0 if data.valid is not None else data.hold_out), held

    def __iter__(self) -> Iterator[Document]:
        return (d for d in self.corpus if (unit_hash(d.text) < self.share) == self.held)

    def digest(self, tokeniser: Tokeniser) -> str:
        """The same for files of the same names and sizes: what is streamed is not read for it."""
        about = json.dumps([self.corpus.described(), self.share, tokeniser_digest(tokeniser)])
        return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()


def _names(given: str | list[str], key: str = "data.train or data.valid") -> list[str]:
    names = [given] if isinstance(given, str) else given
    if not names or not all(names):
        raise InputError(f"{key}: names no file; give a file, a folder, datasets:NAME or python:topics")
    return names


def _listed(given: str | list[str]) -> str:
    return ", ".join(_names(given))


def shards(given: str | list[str], tokeniser: Tokeniser) -> Shards | None:
    """What `qkv data build` made, if that is what is named."""
    built = [name for name in _names(given) if (Path(name) / META).is_file()]
    if built and len(_names(given)) > 1:
        raise InputError(f"{built[0]}: is a built corpus, which is given alone; build one of all the text")
    return Shards(built[0], tokeniser) if built else None


def find_tokeniser(recipe: TextRecipe, folder: Path) -> Tokeniser:
    """That of the run, the one that the recipe names, or a fresh one as the family has it."""

    def documents() -> Iterator[str]:
        if any((Path(name) / META).is_file() for name in _names(recipe.data.train)):
            raise InputError("text.tokenizer: name the tokeniser that data.train was built with")
        yield from (document.text for document in Documents(recipe.data))

    try:
        template = getattr(families.family(recipe.model["family"]), "TEMPLATE", None)
        return chosen_tokeniser(recipe, folder, documents(), template)
    except InputError as error:
        if "no text to train" not in str(error):
            raise
        less = ", or hold out less (data.hold_out)" if Documents(recipe.data).share else ""
        raise InputError(f"data.train: {_listed(recipe.data.train)}: no text to train on; give some{less}") from None


def chosen_tokeniser(
    recipe: TextRecipe | TaskRecipe, folder: Path, texts: Iterable[str], template: Template | None
) -> Tokeniser:
    """The same for any texts, which are read only where one of this template has to be trained."""
    if has_last(folder) and (folder / SOURCE).is_file():
        return Tokeniser.load(folder / SOURCE)
    text = recipe.text
    if text.tokenizer is not None:
        if text.size is not None or text.lowercase is not None:
            raise InputError("text.tokenizer: a tokeniser that is there has its size and case; leave out those keys")
        return find_tokenisers(text.tokenizer)[0]
    if template is None or text.size is None:
        said = "its own kind needs text.size" if template else f"{recipe.model['family']} has no kind of its own"
        raise InputError(f"text: no tokeniser; {said}; or name one under text.tokenizer (see qkv tokenizer train)")
    return train_tokeniser(template.kind, texts, size=text.size, lowercase=text.lowercase, template=template)


def text_spec(recipe: TextRecipe, tokeniser: Tokeniser) -> spec.Model:
    """The model for a tokeniser's vocabulary, under the head that the objectives need."""
    return sized_spec(recipe, tokeniser.size, marks_of(recipe, tokeniser))


def marks_of(recipe: TextRecipe | TaskRecipe, tokeniser: Tokeniser) -> dict[str, object]:
    """The special tokens that a family's spec wants to know of a vocabulary."""
    module = families.family(recipe.model["family"])
    takes = inspect.signature(module.spec).parameters
    given: dict[str, object] = {}
    if "pad" in takes and tokeniser.pad is not None:
        given["pad"] = tokeniser.pad
    for role in ("start", "end"):
        if role in takes:
            given[role] = _mark(role, takes[role].default, getattr(module, "TEMPLATE", None), tokeniser)
            if given[role] == -1 and "source" in takes:
                said = f"this tokeniser has no {role} token, which the decoder of a {recipe.model['family']} needs"
                raise InputError(f"text.tokenizer: {said}; take one of bart's kind (qkv tokenizer train --family bart)")
    return given


def next_sentences(recipe: TextRecipe) -> bool:
    """Whether pairs of sentences are asked for."""
    return recipe.objective.masked is not None and recipe.objective.masked.next_sentence


def sized_spec(recipe: TextRecipe, size: int, given: dict[str, object] | None = None) -> spec.Model:
    """The model for a vocabulary of that size, with what else is known of it."""
    module = families.family(recipe.model["family"])
    takes = inspect.signature(module.spec).parameters
    given = {side: size for side in ("source", "target") if side in takes} | (given or {})
    if next_sentences(recipe):
        if "next_sentence" not in getattr(module, "heads", lambda *_: {})(shape(recipe), 1, ()):
            raise InputError(f"objective.masked.next_sentence: {recipe.model['family']} has no head for it; use bert")
        given["head"] = "pretraining"
    found: spec.Model = module.spec(shape(recipe), **given)
    for name in recipe.objective.chosen:
        mix.check(name, found)
    return found


def _mark(role: str, usual: object, template: Template | None, tokeniser: Tokeniser) -> int:
    """The token that a decoder begins or ends with: a family's usual one by its name, or the one with that role.

    A vocabulary without it has padding to begin with, as T5 does, and a separator to end with; -1 where it has neither.
    """
    names = around(template)[0] if template else []
    if isinstance(usual, int) and 0 <= usual < len(names):
        number = tokeniser.id(names[usual])
        if number is not None:
            return number
    if usual == -1:  # a family without such tokens
        return _first(getattr(tokeniser, role))
    instead = tokeniser.pad if role == "start" else tokeniser.sep
    if usual is None:  # Marian begins with padding
        return _first(instead, getattr(tokeniser, role))
    return _first(getattr(tokeniser, role), instead)


def _first(*numbers: int | None) -> int:
    return next((number for number in numbers if number is not None), -1)


@dataclass(frozen=True)
class Cutting:
    """How documents become the pieces that a recipe's objectives take."""

    recipe: TextRecipe
    tokeniser: Tokeniser
    spec: spec.Model

    @property
    def pairs(self) -> bool:
        return next_sentences(self.recipe)

    @property
    def packed(self) -> bool:
        return self.recipe.data.pieces == "packed"

    @cached_property
    def frame(self) -> Frame:
        """What stands around a piece; what restores a text gets its end token from the objective."""
        whole = frame_of(self.tokeniser, pairs=self.pairs)
        if self.recipe.objective.masked is not None:
            return whole
        if self.recipe.objective.causal is not None:
            return Frame(([], [], []), ([], [], []), (0, 0))
        return Frame((whole.ids[0], whole.ids[1], []), (whole.segments[0], whole.segments[1], []), whole.texts)

    @cached_property
    def most(self) -> int:
        """Tokens that the model takes."""
        embeds = [embed for embed in (self.spec.source, self.spec.target) if isinstance(embed, spec.Embed)]
        return min(embed.length for embed in embeds)

    @cached_property
    def longest(self) -> int:
        """Tokens of text that a piece may have, so that with what is put around and into it the model takes it."""
        most = self.most
        wanted = self.recipe.data.length or most
        if wanted > most:
            raise InputError(f"data.length: {wanted}, and the model takes at most {most}; set a larger model.length")
        chosen = self.recipe.objective
        if chosen.causal is not None:
            return wanted + 1 if self.packed or self.tokeniser.start is None else wanted  # the last one is not read
        found = wanted - self.frame.size - (0 if chosen.masked else 1)
        if chosen.denoise is not None:
            found -= max(2, wanted // _ROOM)
        elif chosen.span is not None:
            found = min(longest_piece(wanted, chosen.span) - self.frame.size, most - 2)
        if found < 2:
            raise InputError(f"data.length: {wanted} leaves no room for text beside the special tokens; set more")
        return found

    def __call__(self, corpus: Encoded) -> Source:
        how, seed = self.recipe.data.pieces, self.recipe.seed
        if self.pairs:
            if how not in (None, "sentences"):
                raise InputError(f"data.pieces: pairs of sentences are cut at sentences, not {how}; leave it out")
            return SentencePairs(corpus, self.longest, seed=seed)
        if self.packed:
            separator = self.tokeniser.end if self.tokeniser.end is not None else self.tokeniser.sep
            if separator is None:
                said = "packed documents need an end token between, which this tokeniser lacks"
                raise InputError(f"data.pieces: {said}; choose even, longest or sentences")
            return PackedDocuments(corpus, self.longest, separator, seed=seed)
        return CutDocuments(corpus, self.longest, at=how or "even")


def training_text(recipe: TextRecipe, cutting: Cutting) -> tuple[Encoded | Stream, str]:
    """The training documents, encoded or as a stream, and their digest."""
    data, tokeniser, how = recipe.data, cutting.tokeniser, recipe.train
    built = shards(data.train, tokeniser)
    if data.stream and built:
        raise InputError("data.stream: a built corpus is not streamed; leave out one of the two")
    if built:
        return built, built.digest()
    documents = Documents(data)
    if not data.stream:
        told = f"data.train: {_listed(data.train)}: no text to train on; give some"
        found = _encoded(documents, tokeniser, told, workers=how.workers)
        return found, found.digest()
    limits = {"budget": how.batch_tokens, "seed": recipe.seed, "workers": how.workers}
    return Stream(documents, tokeniser, cutting.longest, make=cutting, **limits), documents.digest(tokeniser)


def held_out_text(recipe: TextRecipe, tokeniser: Tokeniser) -> Encoded:
    data = recipe.data
    if data.valid is not None:
        found = shards(data.valid, tokeniser)
        names = _names(data.valid, "data.valid")
        # the format is that of the training text: what a name tells by itself counts for more
        format = None if all(map(tells, names)) else data.format
        told = f"data.valid: {_listed(data.valid)}: no text in it; name some"
        return found or _encoded(Corpus(names, format=format, field=data.field), tokeniser, told)
    if not data.hold_out:
        raise InputError("the recipe has no held-out text; give data.valid, or a share as data.hold_out")
    if any((Path(name) / META).is_file() for name in _names(data.train)):
        raise InputError("data.hold_out: a built corpus is taken whole; name held-out text as data.valid")
    told = "no document is held out; raise data.hold_out, or name data.valid"
    return _encoded(Documents(data, held=True), tokeniser, told)


def _encoded(documents: Iterable[Document], tokeniser: Tokeniser, told: str, workers: int = 0) -> Encoded:
    try:
        return encode(documents, tokeniser, workers=workers)
    except InputError as error:
        raise InputError(told) if "no documents" in str(error) else error from None
