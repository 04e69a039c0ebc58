"""How a family makes its input of text, as data: the kind of its vocabulary, its special tokens, how texts are framed.

Each text family's file holds one `Template`; nothing in this folder knows a family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

TokenizerKind = Literal["wordpiece", "byte_bpe", "word_bpe", "unigram", "marian"]

# What a special token is for; which of them a tokeniser has, and under which name, its family decides.
ROLES = ("pad", "unk", "bos", "eos", "mask", "cls", "sep")

# The special tokens, at ids 0..3, of a tokeniser that is trained for no family in particular.
PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<s>", "</s>"
SPECIAL_TOKENS = (PAD, UNK, BOS, EOS)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A family's input.

    `single` and `pair` are words with spaces between: `$A` and `$B` are the texts, the others special tokens, and `:1`
    gives what stands before it segment 1. A special token in them that has several roles stands for its first one.
    """

    kind: TokenizerKind
    special_tokens: Mapping[str, str]  # role -> token, in the order of their ids; one token may have several roles
    after_vocab: tuple[str, ...] = ()  # roles whose tokens come behind the learned vocabulary; all others come before it
    single: str = "$A"
    pair: str = "$A $B"
    num_sentinels: int = 0  # <extra_id_0> and so on, at the very end, the first one last
    lowercase: bool = False  # unless somebody says otherwise
    mask_lstrip: bool = False  # the mask stands for a word together with the space before it
    hf_classes: tuple[str, ...] = ()  # what Hugging Face calls tokenisers that cut so


def sentinel_tokens(count: int) -> list[str]:
    """Their names in the order of their ids."""
    return [f"<extra_id_{index}>" for index in reversed(range(count))]


def special_tokens_around_vocab(template: Template) -> tuple[list[str], list[str]]:
    """The special tokens before a learned vocabulary and those behind it, each once, in the order of their ids."""
    tokens = list(dict.fromkeys(template.special_tokens.values()))
    after_tokens = {template.special_tokens[role] for role in template.after_vocab}
    suffix = [token for token in tokens if token in after_tokens]
    return [token for token in tokens if token not in after_tokens], [*suffix, *sentinel_tokens(template.num_sentinels)]


def template_roles(template: Template) -> list[str]:
    """The roles of the tokens that it puts around texts."""
    words = {word.partition(":")[0] for word in f"{template.single} {template.pair}".split()}
    first_roles: dict[str, str] = {}
    for role, token in template.special_tokens.items():
        first_roles.setdefault(token, role)
    return [role for token, role in first_roles.items() if token in words]


def expand_template(template: Template, pattern: str, role_tokens: Mapping[str, str]) -> list[str]:
    """A form word by word, with the token that has each role in `role_tokens` and everybody's segment said."""
    token_names = {template.special_tokens[role]: role_tokens[role] for role in template_roles(template)}
    words = [word.partition(":") for word in pattern.split()]
    return [f"{token_names.get(word, word)}:{type_id or 0}" for word, _, type_id in words]


def find_special_ids(role_tokens: Mapping[str, str], token_to_id: Callable[[str], int | None]) -> dict[str, int]:
    """Which id has which role, given how a name is looked up."""
    special_ids = {role: token_to_id(role_tokens[role]) for role in ROLES if role in role_tokens}
    # Bytes leave nothing unknown; a file may still have to name something, and name the end.
    if special_ids.get("unk") in (special_ids.get("bos"), special_ids.get("eos")):
        special_ids.pop("unk", None)
    return {role: token_id for role, token_id in special_ids.items() if token_id is not None}


def match_template(templates: Iterable[Template], kind: str | None, vocabulary: Collection[str]) -> Template | None:
    """The template of a kind whose special tokens are all in a vocabulary; of several the one that has the most."""
    matches = [candidate for candidate in templates if candidate.kind == kind and all(token in vocabulary for token in _identifying_tokens(candidate))]
    return max(matches, key=lambda candidate: len(_identifying_tokens(candidate)), default=None)


def _identifying_tokens(template: Template) -> set[str]:
    # How many sentinels there are a folder may decide; one is enough to tell.
    return {*template.special_tokens.values(), *sentinel_tokens(min(1, template.num_sentinels))}
