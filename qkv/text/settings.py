"""What a checkpoint folder says of its tokeniser beside the vocabulary: its class, its options, its special tokens.

Hugging Face has kept this in three places over the years: tokenizer_config.json (with `added_tokens_decoder` since
2023), special_tokens_map.json and added_tokens.json. Which one wins: as in transformers 5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from qkv.errors import InputError
from qkv.text.template import Template

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"

KEYS = {
    "start": "bos_token",
    "end": "eos_token",
    "unk": "unk_token",
    "sep": "sep_token",
    "pad": "pad_token",
    "cls": "cls_token",
    "mask": "mask_token",
}

# These classes say how a tokenizer.json is read, not what is in it.
_ANY_CLASS = {"PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"}


@dataclass(frozen=True)
class Settings:
    """What the files say. `named` holds the special tokens that they name, None where they deny that there is one."""

    folder: Path
    options: Mapping[str, Any]
    named: Mapping[str, Any]
    extra: tuple[AddedToken, ...]
    added: tuple[tuple[int, AddedToken], ...]
    class_name: str | None
    family: Template | None
    known: tuple[Template, ...]

    @property
    def template(self) -> Template | None:
        """That of the class which the files name, whatever the family's; None where neither is known."""
        if self.class_name is None or self.class_name in _ANY_CLASS:
            return self.family
        templates = (one for one in (self.family, *self.known) if one is not None)
        return next((one for one in templates if self.class_name in one.classes), None)

    @property
    def foreign_class(self) -> str | None:
        """A class that the files name and that is not known here: its own code may do anything to a text."""
        known = self.class_name is None or self.class_name in _ANY_CLASS or self.template is not None
        return None if known else self.class_name

    def flag(self, name: str, default: bool | None) -> bool | None:
        value = self.options.get(name, default)
        if value is None or isinstance(value, bool):
            return value
        raise InputError(f"{self.folder / CONFIG}: '{name}' is {value!r}; make it true or false")

    def tokens(self, template: Template | None) -> dict[str, AddedToken]:
        """The token in each role: the one that the files name, else the template's."""
        complete = self.class_name in _ANY_CLASS and self.named
        usual = {} if complete or template is None else template.tokens
        named = {**usual, **self.named}
        found = {role: token_of(named[role], self.folder / CONFIG) for role in KEYS if named.get(role) is not None}
        if template is not None and template.spaced_mask and isinstance(named.get("mask"), str):
            # As in fairseq: the space before a mask belongs to it, and is then not a token of its own.
            found["mask"] = AddedToken(named["mask"], lstrip=True, special=True)
        return found

    def named_by_files(self, role: str) -> bool:
        return self.named.get(role) is not None


def read_settings(folder: Path, family: Template | None, known: tuple[Template, ...]) -> Settings:
    options, mapped = (read_table(folder / name) for name in (CONFIG, MAP))
    whole = "added_tokens_decoder" in options
    # The newer file, where it is complete, makes the older one obsolete.
    said = options if whole else {**options, **mapped}
    where = folder / CONFIG
    named = {role: said[key] for role, key in KEYS.items() if key in said}
    listed = said.get("extra_special_tokens") or said.get("additional_special_tokens") or []
    listed = list(listed.values()) if isinstance(listed, dict) else listed
    if not isinstance(listed, list):
        raise InputError(f"{where}: 'additional_special_tokens' is not a list; correct it or copy the file again")
    extra = tuple(token_of(one, where) for one in listed)
    if whole:
        added = _decoder(options["added_tokens_decoder"], where)
    else:
        special = {token_of(one, where).content for one in named.values() if one is not None}
        special |= {token.content for token in extra}
        added = _legacy(read_table(folder / ADDED), special, folder / ADDED)
    class_name = options.get("tokenizer_class")
    if isinstance(class_name, str) and class_name not in _ANY_CLASS:
        class_name = class_name.removesuffix("Fast")
    class_name = class_name if isinstance(class_name, str) else None
    return Settings(folder, options, named, extra, added, class_name, family, known)


def read_table(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        table = json.loads(read_file(path))
    except ValueError:  # covers bad UTF-8 as well
        raise InputError(f"{path}: damaged or not JSON; copy it again") from None
    if not isinstance(table, dict):
        raise InputError(f"{path}: not a JSON object; copy it again")
    return table


def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise InputError(f"{path}: cannot be read ({problem.strerror}); check the path") from None


def numbers(content: bytes, where: str) -> dict[str, int]:
    """A vocab.json: tokens and their ids, each id once."""
    try:
        table = json.loads(content)
    except ValueError:  # covers bad UTF-8 as well
        raise InputError(f"{where}: damaged or not JSON; copy it again") from None
    if not isinstance(table, dict) or not table or not all(type(number) is int for number in table.values()):
        raise InputError(f"{where}: not a table of tokens and their ids; is it a vocabulary?")
    if len(set(table.values())) < len(table) or min(table.values()) < 0:
        raise InputError(f"{where}: two tokens share an id, or one is below 0; copy it again")
    return table


def token_of(value: Any, where: Path, *, special: bool = True) -> AddedToken:
    """A token as the files write it: a string, or an object with its name and how it is matched in a text."""
    if isinstance(value, str):
        return AddedToken(value, special=special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise InputError(f"{where}: {value!r} is not a token; give its name, or an object with 'content'")
    flags = {name: bool(value[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in value}
    return AddedToken(value["content"], special=special, **flags)


def _decoder(table: Any, where: Path) -> tuple[tuple[int, AddedToken], ...]:
    try:
        items = sorted((int(number), token, bool(token.get("special"))) for number, token in table.items())
    except (AttributeError, TypeError, ValueError):
        raise InputError(f"{where}: 'added_tokens_decoder' is not a table of tokens; copy the file again") from None
    return tuple((number, token_of(token, where, special=special)) for number, token, special in items)


def _legacy(table: Mapping[str, Any], special: set[str], where: Path) -> tuple[tuple[int, AddedToken], ...]:
    if not all(type(number) is int for number in table.values()):
        raise InputError(f"{where}: not a table of tokens and their ids; copy it again")
    return tuple(
        (number, AddedToken(name, normalized=name not in special, special=name in special))
        for name, number in sorted(table.items(), key=lambda one: one[1])
    )
