"""Tokenisers of Hugging Face checkpoint folders, in and out: the ids are those that transformers 5 gives.

Where it differs from this, on purpose: it reads "</s>" in a user's text as T5's end, and here only `special=True` does;
from bare vocab.json and merges.txt it gives RoBERTa's mask no space, and here it takes one as it was trained to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from qkv.errors import InputError
from qkv.files import write_bytes
from qkv.text import marian
from qkv.text.engine import Fast
from qkv.text.marian import Marian
from qkv.text.settings import ADDED, CONFIG, KEYS, MAP, Settings, read_file, read_settings
from qkv.text.template import Template
from qkv.text.tokeniser import NotOurs, Tokeniser
from qkv.text.vocabularies import JSON, MERGES, PIECES, VOCABULARY, WORDS, Built, bpe, unigram, whole, wordpiece

_SPM = tuple(marian.SPM.values())
# What is given back as it came; tokenizer.json itself is written from the tokeniser.
_COMPANIONS = (CONFIG, MAP, ADDED, WORDS, VOCABULARY, MERGES, PIECES, *_SPM, marian.TARGET_VOCABULARY)


def read_tokenisers(
    folder: Path, template: Template | None = None, known: Sequence[Template] = ()
) -> tuple[Tokeniser, Tokeniser] | None:
    """The tokenisers of a model's source and target, one and the same but for Marian; None if the folder has none.

    Read from, in this order: source.spm and target.spm (Marian; whatever else is there), tokenizer.json, vocab.txt,
    vocab.json with merges.txt, spiece.model. `template` is that of the model's family; `known` are all there are, for a
    folder that names another family's tokeniser class, or whose family nobody knows.
    """
    folder, known = Path(folder), tuple(known)
    files = {name: read_file(folder / name) for name in _COMPANIONS if (folder / name).is_file()}
    if any(name in files for name in _SPM):
        return _read_marian(read_settings(folder, template, known), files)
    builders: dict[str, Callable[[Settings], Built]] = {
        JSON: whole,
        WORDS: wordpiece,
        VOCABULARY: bpe,
        MERGES: bpe,
        PIECES: unigram,
    }
    first = next((name for name in builders if (folder / name).is_file()), None)
    if first is None:
        return None
    if first in (VOCABULARY, MERGES):
        _must_have(folder, files, (VOCABULARY, MERGES))
    settings = read_settings(folder, template, known)
    tokeniser = Tokeniser(*builders[first](settings), files)
    return tokeniser, tokeniser


def read_tokeniser(path: Path, known: Sequence[Template] = ()) -> Tokeniser:
    """A tokeniser of one file: one of ours, or anybody's tokenizer.json."""
    path = Path(path)
    if path.name == JSON and (path.parent / CONFIG).is_file():
        found = read_tokenisers(path.parent, None, known)
        if found is not None:
            return found[0]
    try:
        return Tokeniser.load(path)
    except NotOurs:
        settings = Settings(path.parent, {}, {}, (), (), None, None, tuple(known))
        return Tokeniser(*whole(settings, path.name))


def _read_marian(settings: Settings, files: Mapping[str, bytes]) -> tuple[Tokeniser, Tokeniser]:
    apart = bool(settings.flag("separate_vocabs", False))
    wanted = (*_SPM, VOCABULARY, *((marian.TARGET_VOCABULARY,) if apart else ()))
    _must_have(settings.folder, files, wanted)
    template = next((one for one in (settings.family, *settings.known) if one and one.kind == "marian"), None)
    names = {role: token.content for role, token in settings.tokens(template).items()}
    if not names:
        raise InputError(f"{settings.folder}: special tokens unknown; name them in {CONFIG}")
    both = []
    for side, other in ((marian.SOURCE, marian.TARGET), (marian.TARGET, marian.SOURCE)):
        # Each side carries what it needs; the two together are the folder again.
        own = {name: content for name, content in files.items() if name != marian.SPM[other]}
        if not apart or side == marian.SOURCE:
            own.pop(marian.TARGET_VOCABULARY, None)
        engine = Marian(own, side, names, f"{settings.folder}/")
        roles = {role: number for role, name in names.items() if (number := engine.number(name)) is not None}
        both.append(Tokeniser(engine, roles, own))
    return both[0], both[1]


def _must_have(folder: Path, files: Mapping[str, bytes], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in files]
    if missing:
        there = ", ".join(name for name in names if name in files)
        raise InputError(f"{folder}: has {there} but no {', '.join(missing)}; copy the missing file too")


def write_tokenisers(folder: Path, source: Tokeniser, target: Tokeniser, longest: int | None = None) -> None:
    """Writes what transformers' AutoTokenizer reads, with the same ids: the files a tokeniser came with, as they came,
    and its tokenizer.json. Only Marian's form holds two tokenisers. `longest`: how many tokens the model takes."""
    folder = Path(folder)
    if isinstance(source.engine, Marian) and isinstance(target.engine, Marian):
        files = {**target.files, **source.files}
        files.setdefault(CONFIG, _config(source, "MarianTokenizer", longest))
    elif isinstance(source.engine, Fast) and isinstance(target.engine, Fast):
        text = source.engine.to_json()
        if source is not target and text != target.engine.to_json():
            said = "the Hugging Face form holds one tokeniser, and source and target differ"
            raise InputError(f"{folder}: {said}; train with one joint vocabulary to save in this form")
        files = {**source.files, JSON: text.encode()}
        files.setdefault(CONFIG, _config(source, "PreTrainedTokenizerFast", longest))
    else:
        raise InputError(f"{folder}: one of source and target is Marian's and the other is not; read both again")
    for name, content in files.items():
        write_bytes(folder / name, content)


def _config(tokeniser: Tokeniser, class_name: str, longest: int | None) -> bytes:
    """The least that transformers has to be told beside a vocabulary."""
    names = {KEYS[role]: tokeniser.engine.name(number) for role, number in tokeniser.roles.items()}
    others = [name for name in tokeniser.engine.specials if name not in names.values()]
    config: dict[str, object] = {"tokenizer_class": class_name, **names, "clean_up_tokenization_spaces": False}
    if longest is not None:
        config["model_max_length"] = longest  # else transformers truncates at nothing
    if others:
        config["additional_special_tokens"] = others
    if class_name != "MarianTokenizer":
        # GPT-2 would add segments to its input and T5 refuse them: they go only with a template that tells texts apart.
        segments = tokeniser.cls is not None and 1 in tokeniser.frame("a", "a").segments
        config["model_input_names"] = ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"]
    if tokeniser.ours:
        config["split_special_tokens"] = True
    return json.dumps(config, ensure_ascii=False, indent=2).encode()
