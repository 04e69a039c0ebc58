"""Tokenisers of Hugging Face checkpoint folders, in and out: the ids are those that transformers 5 gives.

Where it differs from this, on purpose: it reads "</s>" in a user's text as T5's end, and here only `parse_special_tokens=True` does;
from bare vocab.json and merges.txt it gives RoBERTa's mask no space, and here it takes one as it was trained to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path

from qkv.errors import InputError
from qkv.files import atomic_write_bytes
from qkv.tokenization import marian
from qkv.tokenization.backend import FastBackend
from qkv.tokenization.load_vocab import (
    MERGES_TXT,
    SPIECE_MODEL,
    TOKENIZER_JSON,
    VOCAB_JSON,
    VOCAB_TXT,
    BuiltTokenizer,
    from_spiece,
    from_tokenizer_json,
    from_vocab_merges,
    from_vocab_txt,
)
from qkv.tokenization.marian import MarianBackend
from qkv.tokenization.template import Template
from qkv.tokenization.tokenizer import ForeignTokenizerError, Tokenizer
from qkv.tokenization.tokenizer_config import (
    ADDED_TOKENS_FILE,
    CONFIG_FILE,
    ROLE_TO_HF_KEY,
    SPECIAL_TOKENS_MAP_FILE,
    TokenizerConfig,
    read_file,
    read_tokenizer_config,
)

_SPM_FILES = tuple(marian.SPM_FILES.values())
# What is given back as it came; tokenizer.json itself is written from the tokeniser.
_COMPANION_FILES = (CONFIG_FILE, SPECIAL_TOKENS_MAP_FILE, ADDED_TOKENS_FILE, VOCAB_TXT, VOCAB_JSON, MERGES_TXT, SPIECE_MODEL, *_SPM_FILES, marian.TARGET_VOCAB_JSON)


def load_tokenizers(
    folder: Path, template: Template | None = None, known_templates: Iterable[Template] = ()
) -> tuple[Tokenizer, Tokenizer] | None:
    """The tokenisers of a model's source and target, one and the same but for Marian; None if the folder has none.

    Read from, in this order: source.spm and target.spm (Marian; whatever else is there), tokenizer.json, vocab.txt,
    vocab.json with merges.txt, spiece.model. `template` is that of the model's family; `known_templates` are all there are, for a
    folder that names another family's tokeniser class, or whose family nobody knows.
    """
    folder = Path(folder)
    files = {name: read_file(folder / name) for name in _COMPANION_FILES if (folder / name).is_file()}
    if any(name in files for name in _SPM_FILES):
        return _load_marian(read_tokenizer_config(folder, template, known_templates), files)
    builders: dict[str, Callable[[TokenizerConfig], BuiltTokenizer]] = {
        TOKENIZER_JSON: from_tokenizer_json,
        VOCAB_TXT: from_vocab_txt,
        VOCAB_JSON: from_vocab_merges,
        MERGES_TXT: from_vocab_merges,
        SPIECE_MODEL: from_spiece,
    }
    vocab_file = next((name for name in builders if (folder / name).is_file()), None)
    if vocab_file is None:
        return None
    if vocab_file in (VOCAB_JSON, MERGES_TXT):
        _check_files(folder, files, (VOCAB_JSON, MERGES_TXT))
    config = read_tokenizer_config(folder, template, known_templates)
    tokenizer = Tokenizer(*builders[vocab_file](config), files)
    return tokenizer, tokenizer


def load_tokenizer(path: Path, known_templates: Iterable[Template] = ()) -> Tokenizer:
    """A tokeniser of one file: one of ours, or anybody's tokenizer.json."""
    path = Path(path)
    if path.name == TOKENIZER_JSON and (path.parent / CONFIG_FILE).is_file():
        tokenizers = load_tokenizers(path.parent, None, known_templates)
        if tokenizers is not None:
            return tokenizers[0]
    try:
        return Tokenizer.load(path)
    except ForeignTokenizerError:
        config = TokenizerConfig(path.parent, {}, {}, (), (), None, None, known_templates)
        return Tokenizer(*from_tokenizer_json(config, path.name))


def _load_marian(config: TokenizerConfig, files: Mapping[str, bytes]) -> tuple[Tokenizer, Tokenizer]:
    separate_vocabs = bool(config.flag("separate_vocabs", False))
    required_files = (*_SPM_FILES, VOCAB_JSON, *((marian.TARGET_VOCAB_JSON,) if separate_vocabs else ()))
    _check_files(config.folder, files, required_files)
    template = next((candidate for candidate in chain([config.family_template], config.known_templates) if candidate and candidate.kind == "marian"), None)
    role_tokens = {role: token.content for role, token in config.special_tokens(template).items()}
    if not role_tokens:
        raise InputError(f"{config.folder}: special tokens unknown; name them in {CONFIG_FILE}")
    tokenizers = []
    for side, other_side in ((marian.SOURCE, marian.TARGET), (marian.TARGET, marian.SOURCE)):
        # Each side carries what it needs; the two together are the folder again.
        side_files = {name: content for name, content in files.items() if name != marian.SPM_FILES[other_side]}
        if not separate_vocabs or side == marian.SOURCE:
            side_files.pop(marian.TARGET_VOCAB_JSON, None)
        backend = MarianBackend(side_files, side, role_tokens, f"{config.folder}/")
        special_ids = {role: token_id for role, name in role_tokens.items() if (token_id := backend.token_to_id(name)) is not None}
        tokenizers.append(Tokenizer(backend, special_ids, side_files))
    return tokenizers[0], tokenizers[1]


def _check_files(folder: Path, files: Mapping[str, bytes], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in files]
    if missing:
        present = ", ".join(name for name in names if name in files)
        raise InputError(f"{folder}: has {present} but no {', '.join(missing)}; copy the missing file too")


def save_tokenizers(folder: Path, source: Tokenizer, target: Tokenizer, max_length: int | None = None) -> None:
    """Writes what transformers' AutoTokenizer reads, with the same ids: the files a tokeniser came with, as they came,
    and its tokenizer.json. Only Marian's form holds two tokenisers. `max_length`: how many tokens the model takes."""
    folder = Path(folder)
    if isinstance(source.backend, MarianBackend) and isinstance(target.backend, MarianBackend):
        files = {**target.files, **source.files}
        files.setdefault(CONFIG_FILE, _make_hf_config(source, "MarianTokenizer", max_length))
    elif isinstance(source.backend, FastBackend) and isinstance(target.backend, FastBackend):
        text = source.backend.to_json()
        if source is not target and text != target.backend.to_json():
            reason = "the Hugging Face form holds one tokeniser, and source and target differ"
            raise InputError(f"{folder}: {reason}; train with one joint vocabulary to save in this form")
        files = {**source.files, TOKENIZER_JSON: text.encode()}
        files.setdefault(CONFIG_FILE, _make_hf_config(source, "PreTrainedTokenizerFast", max_length))
    else:
        raise InputError(f"{folder}: one of source and target is Marian's and the other is not; read both again")
    for name, content in files.items():
        atomic_write_bytes(folder / name, content)


def _make_hf_config(tokenizer: Tokenizer, class_name: str, max_length: int | None) -> bytes:
    """The least that transformers has to be told beside a vocabulary."""
    hf_tokens = {ROLE_TO_HF_KEY[role]: tokenizer.backend.id_to_token(token_id) for role, token_id in tokenizer.special_ids.items()}
    additional_tokens = [name for name in tokenizer.backend.special_tokens if name not in hf_tokens.values()]
    config: dict[str, object] = {"tokenizer_class": class_name, **hf_tokens, "clean_up_tokenization_spaces": False}
    if max_length is not None:
        config["model_max_length"] = max_length  # else transformers truncates at nothing
    if additional_tokens:
        config["additional_special_tokens"] = additional_tokens
    if class_name != "MarianTokenizer":
        # GPT-2 would add segments to its input and T5 refuse them: they go only with a template that tells texts apart.
        uses_token_types = tokenizer.cls_id is not None and 1 in tokenizer.encode_plus("a", "a").token_type_ids
        config["model_input_names"] = ["input_ids", *(["token_type_ids"] if uses_token_types else []), "attention_mask"]
    if tokenizer.is_native:
        config["split_special_tokens"] = True
    return json.dumps(config, ensure_ascii=False, indent=2).encode()
