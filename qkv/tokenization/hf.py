"""Read and write tokenizers of Hugging Face checkpoint folders; the ids are those of transformers 5.

Two differences are intended: transformers reads "</s>" in a user's text as T5's EOS token, which here needs
`parse_special_tokens=True`; and RoBERTa's mask, read from vocab.json and merges.txt, includes the space before it, as
in its pretraining.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path

from qkv.errors import InputError
from qkv.files import atomic_write_bytes, read_file
from qkv.tokenization import sentencepiece_pair
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
from qkv.tokenization.sentencepiece_pair import SentencePieceBackend
from qkv.tokenization.template import Template
from qkv.tokenization.tokenizer import ForeignTokenizerError, Tokenizer
from qkv.tokenization.tokenizer_config import (
    ADDED_TOKENS_FILE,
    CONFIG_FILE,
    ROLE_TO_HF_KEY,
    SPECIAL_TOKENS_MAP_FILE,
    TokenizerConfig,
    read_tokenizer_config,
)

_SPM_FILES = tuple(sentencepiece_pair.SPM_FILES.values())
# files that are written back unchanged; tokenizer.json itself is written from the tokenizer
_COMPANION_FILES = (
    *(CONFIG_FILE, SPECIAL_TOKENS_MAP_FILE, ADDED_TOKENS_FILE),
    *(VOCAB_TXT, VOCAB_JSON, MERGES_TXT, SPIECE_MODEL),
    *(*_SPM_FILES, sentencepiece_pair.TARGET_VOCAB_JSON),
)


def load_tokenizers(
    folder: Path, template: Template | None = None, known_templates: Iterable[Template] = ()
) -> tuple[Tokenizer, Tokenizer] | None:
    """Return the tokenizers of a model's source and target; None if the folder has none.

    They are the same object unless the folder has a SentencePiece model per side. The first of these files is used:
    source.spm with target.spm, tokenizer.json, vocab.txt, vocab.json with merges.txt, spiece.model.

    Args:
        folder: the checkpoint folder.
        template: the template of the model's family.
        known_templates: the templates of all families, for a folder that names the tokenizer class of another family,
            or whose family is unknown.
    """
    folder = Path(folder)
    files = {name: read_file(folder / name) for name in _COMPANION_FILES if (folder / name).is_file()}
    if any(name in files for name in _SPM_FILES):
        return _load_sentencepiece_pair(read_tokenizer_config(folder, template, known_templates), files)
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
    """Read a tokenizer from one file: one that `Tokenizer.save` wrote, or any tokenizer.json."""
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


def _load_sentencepiece_pair(config: TokenizerConfig, files: Mapping[str, bytes]) -> tuple[Tokenizer, Tokenizer]:
    separate_vocabs = bool(config.flag("separate_vocabs", False))
    required_files = (*_SPM_FILES, VOCAB_JSON, *((sentencepiece_pair.TARGET_VOCAB_JSON,) if separate_vocabs else ()))
    _check_files(config.folder, files, required_files)
    templates = chain([config.family_template], config.known_templates)
    template = next((template for template in templates if template and template.kind == "sentencepiece_pair"), None)
    role_tokens = {role: token.content for role, token in config.special_tokens(template).items()}
    if not role_tokens:
        raise InputError(f"{config.folder}: the special tokens are unknown; name them in {CONFIG_FILE}")
    tokenizers = []
    sides = sentencepiece_pair.SOURCE, sentencepiece_pair.TARGET
    for side, other_side in (sides, sides[::-1]):
        # each side keeps the files that it needs; both together are all files of the folder
        side_files = {
            name: content for name, content in files.items() if name != sentencepiece_pair.SPM_FILES[other_side]
        }
        if not separate_vocabs or side == sentencepiece_pair.SOURCE:
            side_files.pop(sentencepiece_pair.TARGET_VOCAB_JSON, None)
        backend = SentencePieceBackend(side_files, side, role_tokens, f"{config.folder}/")
        ids = {role: backend.token_to_id(name) for role, name in role_tokens.items()}
        special_ids = {role: token_id for role, token_id in ids.items() if token_id is not None}
        tokenizers.append(Tokenizer(backend, special_ids, side_files))
    return tokenizers[0], tokenizers[1]


def _check_files(folder: Path, files: Mapping[str, bytes], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in files]
    if missing:
        present = ", ".join(name for name in names if name in files)
        raise InputError(f"{folder}: has {present} but no {', '.join(missing)}; copy the missing file too")


def save_tokenizers(folder: Path, source: Tokenizer, target: Tokenizer, max_length: int | None = None) -> None:
    """Write the files that transformers' AutoTokenizer reads: the original files of a checkpoint and tokenizer.json.

    Args:
        folder: the checkpoint folder.
        source: the tokenizer of the source.
        target: the tokenizer of the target, which must be equal unless both have a SentencePiece model per side.
        max_length: maximum number of tokens that the model accepts.
    """
    folder = Path(folder)
    if isinstance(source.backend, SentencePieceBackend) and isinstance(target.backend, SentencePieceBackend):
        files = {**target.files, **source.files}
        files.setdefault(CONFIG_FILE, _make_hf_config(source, source.backend.hf_class, max_length))
    elif isinstance(source.backend, FastBackend) and isinstance(target.backend, FastBackend):
        text = source.backend.to_json()
        if source is not target and text != target.backend.to_json():
            reason = "the Hugging Face format has one tokenizer, and those of source and target differ"
            raise InputError(f"{folder}: {reason}; train with tokenizer.joint_vocab: true to save in this format")
        files = {**source.files, TOKENIZER_JSON: text.encode()}
        files.setdefault(CONFIG_FILE, _make_hf_config(source, source.backend.hf_class, max_length))
    else:
        raise InputError(
            f"{folder}: the tokenizers of source and target are of different kinds; load both from one folder"
        )
    for name, content in files.items():
        atomic_write_bytes(folder / name, content)


def _make_hf_config(tokenizer: Tokenizer, class_name: str, max_length: int | None) -> bytes:
    """Return a tokenizer_config.json with the keys that transformers needs."""
    hf_tokens = {
        ROLE_TO_HF_KEY[role]: tokenizer.backend.id_to_token(token_id)
        for role, token_id in tokenizer.special_ids.items()
    }
    additional_tokens = [name for name in tokenizer.backend.special_tokens if name not in hf_tokens.values()]
    config: dict[str, object] = {"tokenizer_class": class_name, **hf_tokens, "clean_up_tokenization_spaces": False}
    if max_length is not None:
        config["model_max_length"] = max_length  # transformers does not truncate without it
    if additional_tokens:
        config["additional_special_tokens"] = additional_tokens
    if isinstance(tokenizer.backend, FastBackend):
        # token types only where the template distinguishes two texts: T5 and GPT-2 in transformers take none
        uses_token_types = tokenizer.cls_id is not None and 1 in tokenizer.encode_plus("a", "a").token_type_ids
        config["model_input_names"] = ["input_ids", *(["token_type_ids"] if uses_token_types else []), "attention_mask"]
    if tokenizer.is_native:
        config["split_special_tokens"] = True
    return json.dumps(config, ensure_ascii=False, indent=2).encode()
