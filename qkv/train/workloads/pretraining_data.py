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
from qkv.checkpoints.model_folder import SOURCE_TOKENIZER_FILE
from qkv.checkpoints.tokenizers import find_tokenizers
from qkv.data.corpora.chunks import ChunkedDocuments, ChunkSource, PackedDocuments
from qkv.data.corpora.corpus import Corpus, Document, name_implies_format
from qkv.data.corpora.nsp import NextSentencePairs
from qkv.data.corpora.shards import META, Shards
from qkv.data.corpora.streaming import StreamingBatches
from qkv.data.corpora.tokenized_corpus import TokenizedCorpus, encode, tokenizer_fingerprint
from qkv.data.noise.span_corruption import max_chunk_tokens
from qkv.data.pair import unit_hash
from qkv.data.template_batch import TemplateIds, build_template_ids
from qkv.errors import InputError
from qkv.objectives import compat
from qkv.recipe.parse import model_config
from qkv.recipe.schema import CorpusData, FinetuneRecipe, PretrainingRecipe
from qkv.tokenization.template import Template, special_tokens_around_vocab
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer
from qkv.train.checkpoint import has_checkpoint

_NOISE_ROOM = 16  # a noisy source of so many tokens may be one longer than its text, for a mask may stand for no token


class SplitDocuments:
    """A recipe's documents without those that are held out of them, or these alone; read anew each time.

    Which part a document belongs to its text alone decides, so that streaming and other documents change nothing.
    """

    def __init__(self, data: CorpusData, *, held_out: bool = False) -> None:
        self.corpus = Corpus(_as_names(data.train, "data.train"), format=data.format, text_field=data.text_field)
        self.hold_out_fraction, self.held_out = (0.0 if data.valid is not None else data.hold_out), held_out

    def __iter__(self) -> Iterator[Document]:
        return (d for d in self.corpus if (unit_hash(d.text) < self.hold_out_fraction) == self.held_out)

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        """The same for files of the same names and sizes: what is streamed is not read for it."""
        description = json.dumps([self.corpus.manifest(), self.hold_out_fraction, tokenizer_fingerprint(tokenizer)])
        return hashlib.blake2b(description.encode(), digest_size=16).hexdigest()


def _as_names(value: str | list[str], key: str = "data.train or data.valid") -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not names or not all(names):
        raise InputError(f"{key}: names no file; give a file, a folder, datasets:NAME or python:topics")
    return names


def _join_names(value: str | list[str]) -> str:
    return ", ".join(_as_names(value))


def open_shards(value: str | list[str], tokenizer: Tokenizer) -> Shards | None:
    """What `qkv data build` made, if that is what is named."""
    built = [name for name in _as_names(value) if (Path(name) / META).is_file()]
    if built and len(_as_names(value)) > 1:
        raise InputError(f"{built[0]}: is a built corpus, which is given alone; build one of all the text")
    return Shards(built[0], tokenizer) if built else None


def find_tokenizer(recipe: PretrainingRecipe, folder: Path) -> Tokenizer:
    """That of the run, the one that the recipe names, or a fresh one as the family has it."""

    def documents() -> Iterator[str]:
        if any((Path(name) / META).is_file() for name in _as_names(recipe.data.train)):
            raise InputError("tokenizer.path: name the tokeniser that data.train was built with")
        yield from (document.text for document in SplitDocuments(recipe.data))

    try:
        template = getattr(families.get_family(recipe.model["family"]), "TOKENIZER_TEMPLATE", None)
        return resolve_tokenizer(recipe, folder, documents(), template)
    except InputError as error:
        if "no text to train" not in str(error):
            raise
        hint = ", or hold out less (data.hold_out)" if SplitDocuments(recipe.data).hold_out_fraction else ""
        raise InputError(f"data.train: {_join_names(recipe.data.train)}: no text to train on; give some{hint}") from None


def resolve_tokenizer(
    recipe: PretrainingRecipe | FinetuneRecipe, folder: Path, texts: Iterable[str], template: Template | None
) -> Tokenizer:
    """The same for any texts, which are read only where one of this template has to be trained."""
    if has_checkpoint(folder) and (folder / SOURCE_TOKENIZER_FILE).is_file():
        return Tokenizer.load(folder / SOURCE_TOKENIZER_FILE)
    config = recipe.tokenizer
    if config.path is not None:
        if config.vocab_size is not None or config.lowercase is not None:
            raise InputError("tokenizer.path: a tokeniser that is there has its size and case; leave out those keys")
        return find_tokenizers(config.path)[0]
    if template is None or config.vocab_size is None:
        reason = "its own kind needs tokenizer.vocab_size" if template else f"{recipe.model['family']} has no kind of its own"
        raise InputError(f"tokenizer: no tokeniser; {reason}; or name one under tokenizer.path (see qkv tokenizer train)")
    return train_tokenizer(template.kind, texts, vocab_size=config.vocab_size, lowercase=config.lowercase, template=template)


def spec_for_tokenizer(recipe: PretrainingRecipe, tokenizer: Tokenizer) -> spec.Model:
    """The model for a tokeniser's vocabulary, under the head that the objectives need."""
    return spec_for_vocab_size(recipe, tokenizer.vocab_size, special_token_ids(recipe, tokenizer))


def special_token_ids(recipe: PretrainingRecipe | FinetuneRecipe, tokenizer: Tokenizer) -> dict[str, object]:
    """The special tokens that a family's spec wants to know of a vocabulary."""
    module = families.get_family(recipe.model["family"])
    spec_parameters = inspect.signature(module.make_spec).parameters
    token_ids: dict[str, object] = {}
    if "pad_id" in spec_parameters and tokenizer.pad_id is not None:
        token_ids["pad_id"] = tokenizer.pad_id
    for role in ("bos_id", "eos_id"):
        if role in spec_parameters:
            token_ids[role] = _special_token_id(role, spec_parameters[role].default, getattr(module, "TOKENIZER_TEMPLATE", None), tokenizer)
            if token_ids[role] == -1 and "source_vocab_size" in spec_parameters:
                reason = f"this tokeniser has no {role.removesuffix('_id')} token, which the decoder of a {recipe.model['family']} needs"
                raise InputError(f"tokenizer.path: {reason}; take one of bart's kind (qkv tokenizer train --family bart)")
    return token_ids


def uses_nsp(recipe: PretrainingRecipe) -> bool:
    """Whether pairs of sentences are asked for."""
    return recipe.objective.mlm is not None and recipe.objective.mlm.next_sentence


def spec_for_vocab_size(recipe: PretrainingRecipe, vocab_size: int, spec_args: dict[str, object] | None = None) -> spec.Model:
    """The model for a vocabulary of that size, with what else is known of it."""
    module = families.get_family(recipe.model["family"])
    spec_parameters = inspect.signature(module.make_spec).parameters
    spec_args = {name: vocab_size for name in ("source_vocab_size", "target_vocab_size") if name in spec_parameters} | (spec_args or {})
    if uses_nsp(recipe):
        if "next_sentence" not in getattr(module, "make_heads", lambda *_: {})(model_config(recipe), 1, ()):
            raise InputError(f"objective.mlm.next_sentence: {recipe.model['family']} has no head for it; use bert")
        spec_args["head"] = "pretraining"
    model: spec.Model = module.make_spec(model_config(recipe), **spec_args)
    for name in recipe.objective.active:
        compat.check_objective(name, model)
    return model


def _special_token_id(role: str, default: object, template: Template | None, tokenizer: Tokenizer) -> int:
    """The token that a decoder begins or ends with: a family's usual one by its name, or the one with that role.

    A vocabulary without it has padding to begin with, as T5 does, and a separator to end with; -1 where it has neither.
    """
    names = special_tokens_around_vocab(template)[0] if template else []
    if isinstance(default, int) and 0 <= default < len(names):
        token_id = tokenizer.token_to_id(names[default])
        if token_id is not None:
            return token_id
    if default == -1:  # a family without such tokens
        return _first_known(getattr(tokenizer, role))
    fallback = tokenizer.pad_id if role == "bos_id" else tokenizer.sep_id
    if default is None:  # Marian begins with padding
        return _first_known(fallback, getattr(tokenizer, role))
    return _first_known(getattr(tokenizer, role), fallback)


def _first_known(*candidates: int | None) -> int:
    return next((candidate for candidate in candidates if candidate is not None), -1)


@dataclass(frozen=True)
class Chunker:
    """How documents become the pieces that a recipe's objectives take."""

    recipe: PretrainingRecipe
    tokenizer: Tokenizer
    spec: spec.Model

    @property
    def uses_nsp(self) -> bool:
        return uses_nsp(self.recipe)

    @property
    def is_packed(self) -> bool:
        return self.recipe.data.chunking == "packed"

    @cached_property
    def template(self) -> TemplateIds:
        """What stands around a piece; what restores a text gets its end token from the objective."""
        full_template = build_template_ids(self.tokenizer, pairs=self.uses_nsp)
        if self.recipe.objective.mlm is not None:
            return full_template
        if self.recipe.objective.clm is not None:
            return TemplateIds(([], [], []), ([], [], []), (0, 0))
        return TemplateIds((full_template.ids[0], full_template.ids[1], []), (full_template.token_type_ids[0], full_template.token_type_ids[1], []), full_template.text_token_types)

    @cached_property
    def max_input(self) -> int:
        """Tokens that the model takes."""
        embeds = [embed for embed in (self.spec.source_embedding, self.spec.target_embedding) if isinstance(embed, spec.Embedding)]
        return min(embed.max_length for embed in embeds)

    @cached_property
    def max_chunk(self) -> int:
        """Tokens of text that a piece may have, so that with what is put around and into it the model takes it."""
        max_input = self.max_input
        max_length = self.recipe.data.max_length or max_input
        if max_length > max_input:
            raise InputError(f"data.max_length: {max_length}, and the model takes at most {max_input}; set a larger model.max_length")
        objective = self.recipe.objective
        if objective.clm is not None:
            return max_length + 1 if self.is_packed or self.tokenizer.bos_id is None else max_length  # the last one is not read
        max_text = max_length - self.template.num_added_tokens - (0 if objective.mlm else 1)
        if objective.denoising is not None:
            max_text -= max(2, max_length // _NOISE_ROOM)
        elif objective.span_corruption is not None:
            max_text = min(max_chunk_tokens(max_length, objective.span_corruption) - self.template.num_added_tokens, max_input - 2)
        if max_text < 2:
            raise InputError(f"data.max_length: {max_length} leaves no room for text beside the special tokens; set more")
        return max_text

    def __call__(self, corpus: TokenizedCorpus) -> ChunkSource:
        strategy, seed = self.recipe.data.chunking, self.recipe.seed
        if self.uses_nsp:
            if strategy not in (None, "sentences"):
                raise InputError(f"data.chunking: pairs of sentences are cut at sentences, not {strategy}; leave it out")
            return NextSentencePairs(corpus, self.max_chunk, seed=seed)
        if self.is_packed:
            separator = self.tokenizer.eos_id if self.tokenizer.eos_id is not None else self.tokenizer.sep_id
            if separator is None:
                reason = "packed documents need an end token between, which this tokeniser lacks"
                raise InputError(f"data.chunking: {reason}; choose even, greedy or sentences")
            return PackedDocuments(corpus, self.max_chunk, separator, seed=seed)
        return ChunkedDocuments(corpus, self.max_chunk, strategy=strategy or "even")


def load_training_corpus(recipe: PretrainingRecipe, chunker: Chunker) -> tuple[TokenizedCorpus | StreamingBatches, str]:
    """The training documents, encoded or as a stream, and their digest."""
    data, tokenizer, train_config = recipe.data, chunker.tokenizer, recipe.train
    built_shards = open_shards(data.train, tokenizer)
    if data.streaming and built_shards:
        raise InputError("data.streaming: a built corpus is not streamed; leave out one of the two")
    if built_shards:
        return built_shards, built_shards.fingerprint()
    documents = SplitDocuments(data)
    if not data.streaming:
        message = f"data.train: {_join_names(data.train)}: no text to train on; give some"
        corpus = _encode_documents(documents, tokenizer, message, num_workers=train_config.num_workers)
        return corpus, corpus.fingerprint()
    limits = {"max_tokens": train_config.batch_tokens, "seed": recipe.seed, "num_workers": train_config.num_workers}
    return StreamingBatches(documents, tokenizer, chunker.max_chunk, make_source=chunker, **limits), documents.fingerprint(tokenizer)


def load_validation_corpus(recipe: PretrainingRecipe, tokenizer: Tokenizer) -> TokenizedCorpus:
    data = recipe.data
    if data.valid is not None:
        built_shards = open_shards(data.valid, tokenizer)
        names = _as_names(data.valid, "data.valid")
        # the format is that of the training text: what a name tells by itself counts for more
        format = None if all(map(name_implies_format, names)) else data.format
        message = f"data.valid: {_join_names(data.valid)}: no text in it; name some"
        return built_shards or _encode_documents(Corpus(names, format=format, text_field=data.text_field), tokenizer, message)
    if not data.hold_out:
        raise InputError("the recipe has no held-out text; give data.valid, or a share as data.hold_out")
    if any((Path(name) / META).is_file() for name in _as_names(data.train)):
        raise InputError("data.hold_out: a built corpus is taken whole; name held-out text as data.valid")
    message = "no document is held out; raise data.hold_out, or name data.valid"
    return _encode_documents(SplitDocuments(data, held_out=True), tokenizer, message)


def _encode_documents(documents: Iterable[Document], tokenizer: Tokenizer, message: str, num_workers: int = 0) -> TokenizedCorpus:
    try:
        return encode(documents, tokenizer, num_workers=num_workers)
    except InputError as error:
        raise InputError(message) if "no documents" in str(error) else error from None
