"""Data of pretraining: documents of a recipe, their tokenizer, the model's spec for its vocabulary, and chunks."""

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
from qkv.data.corpora.position_split import split_documents
from qkv.data.corpora.shards import META, Shards
from qkv.data.corpora.streaming import StreamingBatches
from qkv.data.corpora.text_streams import StreamOptions, TextStreams
from qkv.data.corpora.tokenized_corpus import TokenizedCorpus, encode, tokenizer_fingerprint
from qkv.data.splitting import unit_hash
from qkv.errors import InputError, NoTextError
from qkv.families import word2vec
from qkv.objectives.base import TextContext
from qkv.objectives.mixture import ObjectiveMixture
from qkv.recipe.model_section import model_config
from qkv.recipe.schema import CorpusData, FinetuneRecipe, PretrainingRecipe
from qkv.tokenization.spelled_words import vocabulary_words
from qkv.tokenization.template import Template, special_tokens_around_vocab
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer
from qkv.train.run_folder import holds_run

_MAX_LONGER = 20  # tokens by which a segment of random length may exceed the mean: four standard deviations


class SplitDocuments:
    """The training documents of a recipe, or those held out of them; each iteration reads the files again.

    The split of a document depends on its text alone, so that streaming and added documents do not change it; with
    `split_by: position` the last part of the text is held out.
    """

    def __init__(self, data: CorpusData, *, held_out: bool = False) -> None:
        self.corpus = Corpus(_as_names(data.train, "data.train"), format=data.format, text_field=data.text_field)
        self.hold_out_fraction, self.held_out = (0.0 if data.valid is not None else data.hold_out), held_out
        self.by_position = data.split_by == "position" and self.hold_out_fraction > 0

    def __iter__(self) -> Iterator[Document]:
        if self.by_position:
            return split_documents(self.corpus, self.hold_out_fraction, held_out=self.held_out)
        return (d for d in self.corpus if (unit_hash(d.text) < self.hold_out_fraction) == self.held_out)

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        """Return a digest of the file names and sizes, the split and the tokenizer, without reading the files."""
        settings = [self.corpus.manifest(), self.hold_out_fraction, tokenizer_fingerprint(tokenizer)]
        description = json.dumps([*settings, *(["position"] if self.by_position else [])])
        return hashlib.blake2b(description.encode(), digest_size=16).hexdigest()


def _as_names(value: str | list[str], key: str) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not names or not all(names):
        raise InputError(f"{key}: is empty; give a file, a folder, datasets:NAME or python:topics")
    return names


def _is_built(name: str) -> bool:
    """Return whether a name is the folder of a corpus that `qkv data build` made."""
    return (Path(name) / META).is_file()


def _open_shards(names: list[str], tokenizer: Tokenizer) -> Shards | None:
    """Open a built corpus; None if the names are those of text files."""
    built = [name for name in names if _is_built(name)]
    if built and len(names) > 1:
        raise InputError(f"{built[0]}: a built corpus cannot be combined with other files; build one from all the text")
    return Shards(built[0], tokenizer) if built else None


def find_tokenizer(recipe: PretrainingRecipe, folder: Path) -> Tokenizer:
    """Return the tokenizer of the run, the one that the recipe names, or a newly trained one of the family's kind."""

    names = _as_names(recipe.data.train, "data.train")

    def documents() -> Iterator[str]:
        if any(map(_is_built, names)):
            raise InputError("tokenizer.path: name the tokenizer that data.train was built with")
        yield from (document.text for document in SplitDocuments(recipe.data))

    try:
        template = getattr(families.get_family(recipe.model["family"]), "TOKENIZER_TEMPLATE", None)
        return resolve_tokenizer(recipe, folder, documents(), template)
    except NoTextError:
        split_hint = ", or hold out less (data.hold_out), or the end of the text (data.split_by: position)"
        hint = split_hint if SplitDocuments(recipe.data).hold_out_fraction else ""
        raise InputError(f"data.train: {', '.join(names)}: no text to train on; add documents{hint}") from None


def resolve_tokenizer(
    recipe: PretrainingRecipe | FinetuneRecipe, folder: Path, texts: Iterable[str], template: Template | None
) -> Tokenizer:
    """Return the tokenizer of the run or of the recipe, or train one of a template's kind, which reads the texts."""
    if holds_run(folder) and (folder / SOURCE_TOKENIZER_FILE).is_file():
        return Tokenizer.load(folder / SOURCE_TOKENIZER_FILE)
    config = recipe.tokenizer
    if config.path is not None:
        extra_keys = [name for name, value in vars(config).items() if name != "path" and value is not None]
        if extra_keys:
            names = " and ".join(extra_keys)
            raise InputError(f"tokenizer.path: an existing tokenizer has its own {names}; leave out those keys")
        return find_tokenizers(config.path)[0]
    if config.kind == "character":
        return train_tokenizer("character", texts, vocab_size=config.vocab_size, lowercase=config.lowercase)
    if config.kind == "word":
        template = word2vec.TOKENIZER_TEMPLATE
    if template is None or config.vocab_size is None:
        family = recipe.model["family"]
        reason = "training one needs tokenizer.vocab_size" if template else f"{family} has no default kind to train"
        raise InputError(f"tokenizer: is missing; {reason}; or set tokenizer.path (see qkv tokenizer train)")
    return train_tokenizer(
        template.kind,
        texts,
        vocab_size=config.vocab_size,
        lowercase=config.lowercase,
        template=template,
        min_count=config.min_count,
    )


def spec_for_tokenizer(recipe: PretrainingRecipe, tokenizer: Tokenizer) -> spec.Model:
    """Return the spec of the recipe's model for a tokenizer's vocabulary, with the head that the objectives need."""
    return spec_for_vocab_size(recipe, tokenizer.vocab_size, special_token_ids(recipe, tokenizer))


def special_token_ids(recipe: PretrainingRecipe | FinetuneRecipe, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the special token ids, and the text of all tokens, if a family's `make_spec` has parameters for them."""
    module = families.get_family(recipe.model["family"])
    spec_parameters = inspect.signature(module.make_spec).parameters
    token_ids: dict[str, object] = {}
    if "pad_id" in spec_parameters and tokenizer.pad_id is not None:
        token_ids["pad_id"] = tokenizer.pad_id
    if "words" in spec_parameters:
        token_ids["words"] = vocabulary_words(tokenizer)
    for role in ("bos_id", "eos_id"):
        if role in spec_parameters:
            token_ids[role] = _special_token_id(
                role, spec_parameters[role].default, getattr(module, "TOKENIZER_TEMPLATE", None), tokenizer
            )
            if token_ids[role] == -1 and "source_vocab_size" in spec_parameters:
                token, family = role.removesuffix("_id").upper(), recipe.model["family"]
                reason = f"this tokenizer has no {token} token, which the decoder of {family} needs"
                raise InputError(f"tokenizer.path: {reason}; train one with qkv tokenizer train --family bart")
    return token_ids


def spec_for_vocab_size(
    recipe: PretrainingRecipe, vocab_size: int, spec_args: dict[str, object] | None = None
) -> spec.Model:
    """Return the spec of the recipe's model for a vocabulary size and further arguments of the family's `make_spec`."""
    module = families.get_family(recipe.model["family"])
    spec_parameters = inspect.signature(module.make_spec).parameters
    spec_args = {name: vocab_size for name in ("source_vocab_size", "target_vocab_size") if name in spec_parameters} | (
        spec_args or {}
    )
    objectives = ObjectiveMixture(recipe.objective, recipe.seed)
    if objectives.sentence_pairs:
        if "pretraining" not in families.head_names(module):
            names = ", ".join(objectives.objectives)
            raise InputError(
                f"objective.{names}: {recipe.model['family']} has no head for next-sentence prediction; use bert"
            )
        spec_args["head"] = "pretraining"
    model: spec.Model = module.make_spec(model_config(recipe), **spec_args)
    objectives.check_model(model)
    return model


def _special_token_id(role: str, default: object, template: Template | None, tokenizer: Tokenizer) -> int:
    """Return the BOS or EOS id of a decoder: the token with the name of the family's default one, or with that role.

    A vocabulary without it uses padding as BOS, like T5, and the separator as EOS; -1 if it has neither.
    """
    names = special_tokens_around_vocab(template)[0] if template else []
    if isinstance(default, int) and 0 <= default < len(names):
        token_id = tokenizer.token_to_id(names[default])
        if token_id is not None:
            return token_id
    if default == -1:  # a family without special tokens
        return _first_known(getattr(tokenizer, role))
    fallback = tokenizer.pad_id if role == "bos_id" else tokenizer.sep_id
    if default is None:  # Marian: BOS is the padding token
        return _first_known(fallback, getattr(tokenizer, role))
    return _first_known(getattr(tokenizer, role), fallback)


def _first_known(*candidates: int | None) -> int:
    return next((candidate for candidate in candidates if candidate is not None), -1)


@dataclass(frozen=True)
class Chunker:
    """Cuts documents into the chunks that a recipe's objectives train on."""

    recipe: PretrainingRecipe
    tokenizer: Tokenizer
    spec: spec.Model

    @cached_property
    def objectives(self) -> ObjectiveMixture:
        return ObjectiveMixture(self.recipe.objective, self.recipe.seed)

    @cached_property
    def context(self) -> TextContext:
        is_packed = self.recipe.data.chunking == "packed"
        return TextContext(self.spec, self.tokenizer, is_packed=is_packed, carries_memory=self.carries_memory)

    @cached_property
    def carries_memory(self) -> bool:
        """Whether documents are read as streams, whose memory is carried from segment to segment."""
        return carries_memory(self.recipe, self.spec, self.objectives)

    @cached_property
    def max_chunk(self) -> int:
        """Maximum number of text tokens in a chunk, so that the model inputs made from it fit the model."""
        max_input = self.context.max_input_length
        max_length = self.recipe.data.max_length or max_input
        if max_length > max_input:
            raise InputError(
                f"data.max_length: {max_length}, and the model takes at most {max_input}; set a larger model.max_length"
            )
        max_chunk = self.objectives.max_chunk_tokens(max_length, self.context)
        if max_chunk < 2:
            raise InputError(
                f"data.max_length: {max_length} leaves no room for text next to the special tokens; set more"
            )
        return max_chunk

    def __call__(self, corpus: TokenizedCorpus) -> ChunkSource:
        """Cut a corpus."""
        strategy, seed = self.recipe.data.chunking, self.recipe.seed
        if self.objectives.sentence_pairs:
            if strategy not in (None, "sentences"):
                raise InputError(
                    f"data.chunking: next-sentence pairs are cut at sentences, not {strategy}; leave it out"
                )
            return NextSentencePairs(corpus, self.max_chunk, seed=seed)
        if self.context.is_packed:
            return PackedDocuments(corpus, self.max_chunk, self._separator_id, seed=seed)
        return ChunkedDocuments(corpus, self.max_chunk, strategy=strategy or "even")

    @property
    def _separator_id(self) -> int:
        """The token between packed documents."""
        separator = self.tokenizer.eos_id if self.tokenizer.eos_id is not None else self.tokenizer.sep_id
        if separator is None:
            reason = "packed documents need an end token between them, which this tokenizer lacks"
            raise InputError(f"data.chunking: {reason}; choose even, greedy or sentences")
        return separator

    def streams(self, corpus: TokenizedCorpus, *, held_out: bool = False) -> TextStreams:
        """Cut a corpus into streams, for a model that carries memory."""
        data, train_config, validation = self.recipe.data, self.recipe.train, self.recipe.validation
        if data.chunking in ("greedy", "sentences"):
            reason = f"streams are cut into segments of equal length, not {data.chunking}"
            remedy = "choose packed to carry memory across documents, or leave it out"
            raise InputError(f"data.chunking: {reason}; {remedy}")
        overlap = max(objective.segment_overlap for objective in self.objectives.objectives.values())
        length = self.max_chunk - overlap
        num_streams = data.num_streams or train_config.batch_size
        num_streams = num_streams or max(1, train_config.tokens_per_step(length) // length)
        is_random = data.random_bptt and not held_out
        options = StreamOptions(
            num_streams=(validation.num_streams or num_streams) if held_out else num_streams,
            segment_length=min(length + _MAX_LONGER, self.context.max_input_length) if is_random else length,
            overlap=overlap,
            bos_id=self.tokenizer.bos_id,
            separator_id=self._separator_id if self.context.is_packed else None,
            random_length=length if is_random else None,
            max_tokens=validation.max_tokens if held_out else None,
            is_shuffled=not held_out,
        )
        return TextStreams(corpus, options, self.recipe.seed, 0 if held_out else train_config.num_workers)


def carries_memory(recipe: PretrainingRecipe, model_spec: spec.Model, objectives: ObjectiveMixture) -> bool:
    """Return whether documents are read as streams, whose memory is carried from segment to segment."""
    without = [name for name, objective in objectives.objectives.items() if not objective.supports_memory]
    data = recipe.data
    if data.carry_memory is None:
        if (data.num_streams or data.random_bptt) and not model_spec.has_memory:
            key = "num_streams" if data.num_streams else "random_bptt"
            raise InputError(f"data.{key}: {model_spec.family} has no memory; remove it")
        return model_spec.has_memory and not without
    if data.carry_memory and not model_spec.has_memory:
        raise InputError(f"data.carry_memory: {model_spec.family} has no memory; set it to false")
    if data.carry_memory and without:
        raise InputError(f"data.carry_memory: {', '.join(without)} does not carry memory; set it to false")
    return data.carry_memory


def load_training_corpus(recipe: PretrainingRecipe, chunker: Chunker) -> tuple[TokenizedCorpus | StreamingBatches, str]:
    """Return the training documents, encoded or as a stream, and their digest."""
    data, tokenizer, train_config = recipe.data, chunker.tokenizer, recipe.train
    names = _as_names(data.train, "data.train")
    built_shards = _open_shards(names, tokenizer)
    if data.streaming and built_shards:
        raise InputError("data.streaming: a built corpus cannot be streamed; set it to false")
    if data.streaming and chunker.carries_memory:
        reason = "text that is read during training is not cut into streams for the model's memory"
        raise InputError(f"data.streaming: {reason}; set data.streaming or data.carry_memory to false")
    if built_shards:
        return built_shards, built_shards.fingerprint()
    documents = SplitDocuments(data)
    if not data.streaming:
        message = f"data.train: {', '.join(names)}: no text to train on; add documents"
        corpus = _encode_documents(documents, tokenizer, message, num_workers=train_config.num_workers)
        return corpus, corpus.fingerprint()
    stream = StreamingBatches(
        documents,
        tokenizer,
        chunker.max_chunk,
        max_tokens=train_config.batch_tokens,
        max_examples=train_config.batch_size,
        seed=recipe.seed,
        make_source=chunker,
        num_workers=train_config.num_workers,
    )
    return stream, documents.fingerprint(tokenizer)


def load_validation_corpus(recipe: PretrainingRecipe, tokenizer: Tokenizer) -> TokenizedCorpus:
    """Return the held-out documents, encoded."""
    data = recipe.data
    if data.valid is not None:
        names = _as_names(data.valid, "data.valid")
        built_shards = _open_shards(names, tokenizer)
        # the format of the training text, unless the file names imply one
        format = None if all(map(name_implies_format, names)) else data.format
        message = f"data.valid: {', '.join(names)}: has no text; name other files"
        return built_shards or _encode_documents(
            Corpus(names, format=format, text_field=data.text_field), tokenizer, message
        )
    if not data.hold_out:
        raise InputError("the recipe has no held-out text; set data.valid, or a fraction as data.hold_out")
    if any(map(_is_built, _as_names(data.train, "data.train"))):
        raise InputError("data.hold_out: a built corpus is not split; give held-out text as data.valid")
    remedy = "set data.split_by: position to hold out the end of the text, or set data.valid"
    message = f"no document is held out, since documents are held out as a whole; {remedy}"
    if data.split_by == "position":
        message = "no text is held out; raise data.hold_out, or set data.valid"
    return _encode_documents(SplitDocuments(data, held_out=True), tokenizer, message)


def _encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, message: str, num_workers: int = 0
) -> TokenizedCorpus:
    try:
        return encode(documents, tokenizer, num_workers=num_workers)
    except NoTextError:
        raise InputError(message) from None
