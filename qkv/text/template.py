"""How a family makes its input of text, as data: the kind of its vocabulary, its special tokens, how texts are framed.

Each text family's file holds one `Template`; nothing in this folder knows a family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["wordpiece", "byte_bpe", "word_bpe", "unigram", "marian"]

# What a special token is for; which of them a tokeniser has, and under which name, its family decides.
ROLES = ("pad", "unk", "start", "end", "mask", "cls", "sep")

# The special tokens, at ids 0..3, of a tokeniser that is trained for no family in particular.
PAD, UNK, START, END = "<pad>", "<unk>", "<s>", "</s>"
SPECIALS = (PAD, UNK, START, END)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A family's input.

    `single` and `pair` are words with spaces between: `$A` and `$B` are the texts, the others special tokens, and `:1`
    gives what stands before it segment 1. A special token in them that has several roles stands for its first one.
    """

    kind: Kind
    tokens: Mapping[str, str]  # role -> token, in the order of their ids; one token may have several roles
    last: tuple[str, ...] = ()  # roles whose tokens come behind the learned vocabulary; all others come before it
    single: str = "$A"
    pair: str = "$A $B"
    sentinels: int = 0  # <extra_id_0> and so on, at the very end, the first one last
    lowercase: bool = False  # unless somebody says otherwise
    spaced_mask: bool = False  # the mask stands for a word together with the space before it
    classes: tuple[str, ...] = ()  # what Hugging Face calls tokenisers that cut so


def sentinels(count: int) -> list[str]:
    """Their names in the order of their ids."""
    return [f"<extra_id_{number}>" for number in reversed(range(count))]


def around(template: Template) -> tuple[list[str], list[str]]:
    """The special tokens before a learned vocabulary and those behind it, each once, in the order of their ids."""
    names = list(dict.fromkeys(template.tokens.values()))
    behind = {template.tokens[role] for role in template.last}
    later = [name for name in names if name in behind]
    return [name for name in names if name not in behind], [*later, *sentinels(template.sentinels)]


def framing_roles(template: Template) -> list[str]:
    """The roles of the tokens that it puts around texts."""
    words = {word.partition(":")[0] for word in f"{template.single} {template.pair}".split()}
    first: dict[str, str] = {}
    for role, token in template.tokens.items():
        first.setdefault(token, role)
    return [role for token, role in first.items() if token in words]


def spelled(template: Template, form: str, names: Mapping[str, str]) -> list[str]:
    """A form word by word, with the token that has each role in `names` and everybody's segment said."""
    usual = {template.tokens[role]: names[role] for role in framing_roles(template)}
    words = [word.partition(":") for word in form.split()]
    return [f"{usual.get(word, word)}:{segment or 0}" for word, _, segment in words]


def role_ids(tokens: Mapping[str, str], number: Callable[[str], int | None]) -> dict[str, int]:
    """Which id has which role, given how a name is looked up."""
    found = {role: number(tokens[role]) for role in ROLES if role in tokens}
    # Bytes leave nothing unknown; a file may still have to name something, and name the end.
    if found.get("unk") in (found.get("start"), found.get("end")):
        found.pop("unk", None)
    return {role: place for role, place in found.items() if place is not None}


def fitting(templates: Iterable[Template], kind: str | None, vocabulary: Collection[str]) -> Template | None:
    """The template of a kind whose special tokens are all in a vocabulary; of several the one that has the most."""
    fits = [one for one in templates if one.kind == kind and all(name in vocabulary for name in _signs(one))]
    return max(fits, key=lambda one: len(_signs(one)), default=None)


def _signs(template: Template) -> set[str]:
    # How many sentinels there are a folder may decide; one is enough to tell.
    return {*template.tokens.values(), *sentinels(min(1, template.sentinels))}
