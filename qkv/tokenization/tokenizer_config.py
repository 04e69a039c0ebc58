"""The tokenizer settings of a checkpoint folder: class, options and special tokens.

Hugging Face has stored them in three files: tokenizer_config.json (with `added_tokens_decoder` since 2023),
special_tokens_map.json and added_tokens.json. Their precedence is that of transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from qkv.errors import InputError, quote
from qkv.files import parse_json, read_file
from qkv.tokenization.checks import check_ids
from qkv.tokenization.template import Template

CONFIG_FILE, SPECIAL_TOKENS_MAP_FILE, ADDED_TOKENS_FILE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)

ROLE_TO_HF_KEY = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unk": "unk_token",
    "sep": "sep_token",
    "pad": "pad_token",
    "cls": "cls_token",
    "mask": "mask_token",
}

# classes that read any tokenizer.json, so that they imply no template
_GENERIC_CLASSES = {"PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"}


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer settings of a checkpoint folder."""

    folder: Path
    options: Mapping[str, Any]  # content of tokenizer_config.json
    named_tokens: Mapping[str, Any]  # role -> special token; None: the files state that the role has none
    additional_tokens: tuple[AddedToken, ...]  # special tokens without a role
    added_tokens: tuple[tuple[int, AddedToken], ...]  # tokens outside the vocabulary, with their ids
    class_name: str | None  # tokenizer class, without "Fast"
    family_template: Template | None
    known_templates: Iterable[Template]  # iterating over them imports the families

    @property
    def template(self) -> Template | None:
        """The template of the class that the files name, or else of the family; None if neither is known."""
        if self.class_name is None or self.class_name in _GENERIC_CLASSES:
            return self.family_template
        templates = (
            candidate for candidate in chain([self.family_template], self.known_templates) if candidate is not None
        )
        return next((candidate for candidate in templates if self.class_name in candidate.hf_classes), None)

    @property
    def unknown_class(self) -> str | None:
        """The class that the files name, if it is unknown; its code may process texts in any way."""
        is_known = self.class_name is None or self.class_name in _GENERIC_CLASSES or self.template is not None
        return None if is_known else self.class_name

    def flag(self, name: str, default: bool | None) -> bool | None:
        """Return an option that is true, false or null."""
        value = self.options.get(name, default)
        if value is None or isinstance(value, bool):
            return value
        raise InputError(f"{self.folder / CONFIG_FILE}: '{name}' is {quote(value)}; make it true or false")

    def special_tokens(self, template: Template | None) -> dict[str, AddedToken]:
        """Return the token of each role: the one that the files name, or else the template's."""
        all_named = self.class_name in _GENERIC_CLASSES and self.named_tokens
        defaults = {} if all_named or template is None else template.special_tokens
        merged = {**defaults, **self.named_tokens}
        roles = (role for role in ROLE_TO_HF_KEY if merged.get(role) is not None)
        special_tokens = {role: parse_added_token(merged[role], self.folder / CONFIG_FILE) for role in roles}
        if template is not None and template.mask_lstrip and isinstance(merged.get("mask"), str):
            # as in fairseq, the mask includes the space before it
            special_tokens["mask"] = AddedToken(merged["mask"], lstrip=True, special=True)
        return special_tokens

    def is_named(self, role: str) -> bool:
        """Return whether the files name a token for a role."""
        return self.named_tokens.get(role) is not None


def read_tokenizer_config(
    folder: Path, family_template: Template | None, known_templates: Iterable[Template]
) -> TokenizerConfig:
    """Read the tokenizer settings of a checkpoint folder."""
    options, special_tokens_map = (read_json(folder / name) for name in (CONFIG_FILE, SPECIAL_TOKENS_MAP_FILE))
    is_complete = "added_tokens_decoder" in options
    # a complete tokenizer_config.json makes special_tokens_map.json obsolete
    merged = options if is_complete else {**options, **special_tokens_map}
    location = folder / CONFIG_FILE
    named_tokens = {role: merged[key] for role, key in ROLE_TO_HF_KEY.items() if key in merged}
    raw_additional = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    raw_additional = list(raw_additional.values()) if isinstance(raw_additional, dict) else raw_additional
    if not isinstance(raw_additional, list):
        raise InputError(f"{location}: 'additional_special_tokens' is not a list; correct it or copy the file again")
    additional_tokens = tuple(parse_added_token(value, location) for value in raw_additional)
    if is_complete:
        added_tokens = _parse_added_tokens_decoder(options["added_tokens_decoder"], location)
    else:
        special_names = {
            parse_added_token(value, location).content for value in named_tokens.values() if value is not None
        }
        special_names |= {token.content for token in additional_tokens}
        added_tokens = _parse_legacy_added_tokens(
            read_json(folder / ADDED_TOKENS_FILE), special_names, folder / ADDED_TOKENS_FILE
        )
    class_name = options.get("tokenizer_class")
    if isinstance(class_name, str) and class_name not in _GENERIC_CLASSES:
        class_name = class_name.removesuffix("Fast")
    class_name = class_name if isinstance(class_name, str) else None
    return TokenizerConfig(
        folder, options, named_tokens, additional_tokens, added_tokens, class_name, family_template, known_templates
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing file is an empty one."""
    if not path.is_file():
        return {}
    table = parse_json(read_file(path), str(path))
    if not isinstance(table, dict):
        raise InputError(f"{path}: not a JSON object; copy it again")
    return table


def parse_vocab_json(content: bytes, location: str) -> dict[str, int]:
    """Parse a vocab.json, which maps tokens to distinct ids."""
    table = parse_json(content, location)
    if not isinstance(table, dict) or not table or not all(type(token_id) is int for token_id in table.values()):
        raise InputError(f"{location}: not a table of tokens and their ids; is it a vocabulary?")
    if len(set(table.values())) < len(table) or min(table.values()) < 0:
        raise InputError(f"{location}: two tokens share an id, or one is below 0; copy it again")
    check_ids(max(table.values()), location)
    return table


def parse_added_token(value: Any, location: Path, *, special: bool = True) -> AddedToken:
    """Parse a token of the files: a string, or an object with its name and matching options."""
    if isinstance(value, str):
        return AddedToken(value, special=special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise InputError(f"{location}: {quote(value)} is not a token; give its name, or an object with 'content'")
    flags = {name: bool(value[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in value}
    return AddedToken(value["content"], special=special, **flags)


def _parse_added_tokens_decoder(table: Any, location: Path) -> tuple[tuple[int, AddedToken], ...]:
    try:
        items = sorted((int(token_id), token, bool(token.get("special"))) for token_id, token in table.items())
    except (AttributeError, TypeError, ValueError):
        raise InputError(f"{location}: 'added_tokens_decoder' is not a table of tokens; copy the file again") from None
    return tuple((token_id, parse_added_token(token, location, special=special)) for token_id, token, special in items)


def _parse_legacy_added_tokens(
    table: Mapping[str, Any], special_names: set[str], location: Path
) -> tuple[tuple[int, AddedToken], ...]:
    if not all(type(token_id) is int for token_id in table.values()):
        raise InputError(f"{location}: not a table of tokens and their ids; copy it again")
    return tuple(
        (token_id, AddedToken(token, normalized=token not in special_names, special=token in special_names))
        for token, token_id in sorted(table.items(), key=lambda item: item[1])
    )
