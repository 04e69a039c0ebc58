"""Tokenizer templates: the kind of a family's vocabulary, its special tokens, and how they are added to texts.

The file of each text family holds one `Template`; no module of this package knows a family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

TokenizerKind = Literal["wordpiece", "byte_bpe", "word_bpe", "unigram", "word", "spelled_word", "sentencepiece_pair"]

# Roles of special tokens; a family's template defines which of them its tokenizer has, and their names.
ROLES = ("pad", "unk", "bos", "eos", "mask", "cls", "sep")

# The special tokens, with ids 0 to 3, of a tokenizer that is trained without a family's template.
PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<s>", "</s>"
SPECIAL_TOKENS = (PAD, UNK, BOS, EOS)


@dataclass(frozen=True, kw_only=True)
class Template:
    """The tokenizer of a family.

    `single` and `pair` are tokens separated by spaces: `$A` and `$B` are the texts, the others special tokens; the
    suffix `:1` sets token type 1. A special token with several roles is used in its first one there.
    """

    kind: TokenizerKind
    """Kind of vocabulary and algorithm that splits a text into tokens."""
    special_tokens: Mapping[str, str]
    """Special token of each role, in the order of their ids; one token may have several roles."""
    after_vocab: tuple[str, ...] = ()
    """Roles whose tokens come after the learned vocabulary; those of all other roles come before it."""
    additional_special_tokens: tuple[str, ...] = ()
    """Special tokens without a role, which vocabulary files may have."""
    single: str = "$A"
    """Model input for one text."""
    pair: str = "$A $B"
    """Model input for two texts."""
    num_sentinels: int = 0
    """Number of sentinels: `<extra_id_0>` and so on, with the last ids in descending order."""
    lowercase: bool = False
    """Whether texts are lowercased by default."""
    mask_lstrip: bool = False
    """Whether the mask token includes the space before it."""
    strip_accents: bool = False
    """Whether accents are removed, and quotation marks made of two characters become one (unigram vocabularies)."""
    hf_classes: tuple[str, ...] = ()
    """Tokenizer classes of Hugging Face that produce the same tokens."""


def sentinel_tokens(count: int) -> list[str]:
    """Return the names of the sentinels in the order of their ids."""
    return [f"<extra_id_{index}>" for index in reversed(range(count))]


def special_tokens_around_vocab(template: Template) -> tuple[list[str], list[str]]:
    """Return the special tokens before and after the learned vocabulary, each once, in the order of their ids."""
    tokens = list(dict.fromkeys(template.special_tokens.values()))
    after_tokens = {template.special_tokens[role] for role in template.after_vocab}
    suffix = [token for token in tokens if token in after_tokens]
    return [token for token in tokens if token not in after_tokens], [*suffix, *sentinel_tokens(template.num_sentinels)]


def template_roles(template: Template) -> list[str]:
    """Return the roles of the special tokens that a template adds to texts."""
    words = {word.partition(":")[0] for word in f"{template.single} {template.pair}".split()}
    first_roles: dict[str, str] = {}
    for role, token in template.special_tokens.items():
        first_roles.setdefault(token, role)
    return [role for token, role in first_roles.items() if token in words]


def expand_template(template: Template, pattern: str, role_tokens: Mapping[str, str]) -> list[str]:
    """Return `single` or `pair` as a list, with the tokens of `role_tokens` and explicit token types."""
    token_names = {template.special_tokens[role]: role_tokens[role] for role in template_roles(template)}
    words = [word.partition(":") for word in pattern.split()]
    return [f"{token_names.get(word, word)}:{type_id or 0}" for word, _, type_id in words]


def find_special_ids(role_tokens: Mapping[str, str], token_to_id: Callable[[str], int | None]) -> dict[str, int]:
    """Return the id of each role's token, without roles whose token is not in the vocabulary."""
    special_ids = {role: token_to_id(role_tokens[role]) for role in ROLES if role in role_tokens}
    # Byte-level BPE has no unknown tokens; files that must name one name the BOS or EOS token.
    if special_ids.get("unk") in (special_ids.get("bos"), special_ids.get("eos")):
        special_ids.pop("unk", None)
    return {role: token_id for role, token_id in special_ids.items() if token_id is not None}


def match_template(templates: Iterable[Template], kind: str | None, vocabulary: Collection[str]) -> Template | None:
    """Return the template of a kind whose special tokens are all in a vocabulary, with the most special tokens."""
    candidates = [template for template in templates if template.kind == kind]
    matches = [
        template for template in candidates if all(token in vocabulary for token in _identifying_tokens(template))
    ]
    return max(matches, key=lambda template: len(_identifying_tokens(template)), default=None)


def _identifying_tokens(template: Template) -> set[str]:
    # the number of sentinels may differ between checkpoints, so that only the first one is required
    return {*template.special_tokens.values(), *sentinel_tokens(min(1, template.num_sentinels))}
