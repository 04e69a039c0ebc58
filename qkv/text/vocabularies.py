"""Vocabulary files of checkpoints made into tokenisers: what the files say, checked, and put together."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

from qkv.errors import InputError
from qkv.text import assemble, spm
from qkv.text.engine import parse
from qkv.text.settings import CONFIG, Settings, numbers, read_file
from qkv.text.template import Template, fitting, framing_roles, role_ids, sentinels

JSON, WORDS, VOCABULARY, MERGES, PIECES = "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model"

# A tokeniser, and which of its ids has which role.
Built = tuple[Tokenizer, dict[str, int]]

_SENTINEL = re.compile(r"<extra_id_\d+>")
_ADVICE = "with transformers, save the tokeniser as tokenizer.json"


def whole(settings: Settings, name: str = JSON) -> Built:
    """tokenizer.json is the tokeniser; what tokenizer_config.json says outright of its class still counts."""
    path = settings.folder / name
    try:
        parts = json.loads(read_file(path))
        _override(parts, settings)
        tokenizer = parse(json.dumps(parts))
    except InputError:
        raise
    except ValueError as problem:
        raise InputError(f"{path}: damaged or not a tokenizer.json ({problem}); copy it again") from None
    return _finished(tokenizer, settings, settings.tokens(_template_of(tokenizer, settings)), name)


def wordpiece(settings: Settings) -> Built:
    """vocab.txt, a piece a line."""
    path = settings.folder / WORDS
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(_lines(path), 1):
        if line in vocabulary:
            said = f"line {number} repeats '{line}' of line {vocabulary[line] + 1}"
            raise InputError(f"{path}: {said}, so that ids would be ambiguous; copy it again")
        vocabulary[line] = number - 1
    template = _template(settings, WORDS, vocabulary, "wordpiece")
    tokens = settings.tokens(template)
    names = _needed(tokens, ("unk", *framing_roles(template)), vocabulary, path)
    tokenizer = assemble.wordpiece(
        vocabulary,
        names["unk"],
        lowercase=bool(settings.flag("do_lower_case", template.lowercase)),
        accents=settings.flag("strip_accents", None),
        chinese=bool(settings.flag("tokenize_chinese_chars", True)),
    )
    assemble.frame(tokenizer, template, names)
    return _finished(tokenizer, settings, tokens, WORDS)


def bpe(settings: Settings) -> Built:
    """vocab.json and merges.txt, of letters or of bytes."""
    path = settings.folder / VOCABULARY
    vocabulary = numbers(read_file(path), str(path))
    letters = any(name.endswith(assemble.WORD_END) for name in vocabulary)
    template = _template(settings, VOCABULARY, vocabulary, *sorted(("byte_bpe", "word_bpe"), reverse=letters))
    merges = _merges(settings.folder / MERGES, vocabulary)
    tokens = settings.tokens(template)
    if template.kind == "word_bpe":
        names = _needed(tokens, ("unk", *framing_roles(template)), vocabulary, path)
        tokenizer = assemble.word_bpe(vocabulary, merges, names["unk"], lowercase=template.lowercase)
        assemble.frame(tokenizer, template, names)
    else:
        names = _needed(tokens, framing_roles(template), vocabulary, path)
        space = bool(settings.flag("add_prefix_space", False))
        tokenizer = assemble.byte_bpe(vocabulary, merges, space=space)
        trim = bool(settings.flag("trim_offsets", True))
        assemble.frame(tokenizer, template, names, space=space, trim=trim)
        if not names and settings.flag("add_bos_token", False):
            start = _needed(tokens, ("start",), vocabulary, path)["start"]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{start}:0 $A:0",
                pair=f"{start}:0 $A:0 {start}:1 $B:1",
                special_tokens=[(start, vocabulary[start])],
            )
    return _finished(tokenizer, settings, tokens, VOCABULARY)


def unigram(settings: Settings) -> Built:
    """spiece.model, and sentinels after its pieces."""
    path = settings.folder / PIECES
    model = spm.read_model(read_file(path), str(path))
    template = _template(settings, PIECES, {piece.text: 0 for piece in model.pieces}, "unigram")
    if model.kind != spm.UNIGRAM:
        raise InputError(f"{path}: a SentencePiece model, but not a unigram one; {_ADVICE}")
    if any(piece.kind == spm.BYTE for piece in model.pieces):
        raise InputError(f"{path}: has pieces for single bytes, which are not read here; {_ADVICE}")
    unknown = next((number for number, piece in enumerate(model.pieces) if piece.kind == spm.UNKNOWN), None)
    if unknown is None:
        raise InputError(f"{path}: has no unknown token; it is not a whole SentencePiece model")
    scores = [(piece.text, piece.score) for piece in model.pieces]
    extra = sentinels(_sentinels(settings, template))
    scores += [(name, 0.0) for name in extra]
    vocabulary = {name: number for number, (name, _) in enumerate(scores)}
    tokens = settings.tokens(template)
    names = _needed(tokens, framing_roles(template), vocabulary, path)
    tokenizer = assemble.unigram(scores, unknown, _normaliser(model.charsmap, path))
    assemble.frame(tokenizer, template, names)
    own = [piece for piece in model.pieces if piece.kind in (spm.CONTROL, spm.USER)]
    marked = [(piece.text, piece.kind == spm.CONTROL) for piece in own] + [(name, True) for name in extra]
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=special) for name, special in marked])
    return _finished(tokenizer, settings, tokens, PIECES)


def _finished(tokenizer: Tokenizer, settings: Settings, tokens: Mapping[str, AddedToken], file: str) -> Built:
    """Marks the special tokens as such, and appends tokens that the folder adds to its vocabulary."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for number, token in settings.added:
        if token.content in known:
            continue
        tokenizer.add_tokens([token])
        known.add(token.content)
        if tokenizer.token_to_id(token.content) != number:
            place = tokenizer.token_to_id(token.content)
            said = f"the folder adds '{token.content}' as {number}, but here it comes as {place}"
            raise InputError(f"{settings.folder / file}: {said}; the files do not belong together")
    named = [tokens[role] for role in tokens if settings.named_by_files(role)]
    usual = [token for token in tokens.values() if tokenizer.token_to_id(token.content) is not None]
    for token in (*named, *usual, *settings.extra):
        if token.content not in known:
            tokenizer.add_tokens([token])
            known.add(token.content)
    return tokenizer, role_ids({role: token.content for role, token in tokens.items()}, tokenizer.token_to_id)


def _template_of(tokenizer: Tokenizer, settings: Settings) -> Template | None:
    """The template of a tokenizer.json, for the names that its folder leaves out."""
    if settings.template is not None or settings.named:
        return settings.template
    return fitting(settings.known, _kind_of(tokenizer), tokenizer.get_vocab(with_added_tokens=True))


def _kind_of(tokenizer: Tokenizer) -> str | None:
    model = tokenizer.model
    if isinstance(model, models.BPE):
        return "word_bpe" if model.end_of_word_suffix else "byte_bpe"
    return {models.WordPiece: "wordpiece", models.Unigram: "unigram"}.get(type(model))


def _template(settings: Settings, file: str, vocabulary: Mapping[str, int], *kinds: str) -> Template:
    """The template of bare vocabulary files; the first of `kinds` is what they look like.

    Another class or family may cut the same files in another way; silence would give wrong ids.
    """
    path, given = settings.folder / file, settings.template
    if settings.foreign_class is not None or (given is not None and given.kind not in kinds):
        said = f"a '{settings.class_name}' tokeniser" if settings.class_name else f"a family of kind '{given.kind}'"
        raise InputError(f"{path}: cannot be read for {said}; {_ADVICE}")
    if given is not None:
        return given
    alike = [one for one in settings.known if one.kind == kinds[0]]
    found = alike[0] if alike and all(one == alike[0] for one in alike) else fitting(alike, kinds[0], vocabulary)
    if found is None:
        raise InputError(f"{path}: its special tokens are those of no family here; {_ADVICE}")
    return found


def _needed(
    tokens: Mapping[str, AddedToken], roles: Sequence[str], vocabulary: Mapping[str, int], path: Path
) -> dict[str, str]:
    names = {role: tokens[role].content if role in tokens else f"({role})" for role in roles}
    for name in names.values():
        if name not in vocabulary:
            raise InputError(f"{path}: has no '{name}'; copy it again, or name the special tokens in {CONFIG}")
    return names


def _lines(path: Path) -> list[str]:
    """Lines end with a line feed and nothing else: other separators of Unicode are tokens in some vocabularies."""
    try:
        text = read_file(path).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; copy it again") from None
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _merges(path: Path, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(_lines(path), 1):
        if not line or line.startswith("#version"):
            continue
        parts = line.split(" ")
        if len(parts) != 2:
            raise InputError(f"{path}: line {number} is not two tokens, but '{line}'; copy it again")
        for token in (*parts, "".join(parts)):
            if token not in vocabulary:
                raise InputError(f"{path}: line {number} names '{token}', which {VOCABULARY} lacks; copy both again")
        merges.append((parts[0], parts[1]))
    return merges


def _sentinels(settings: Settings, template: Template) -> int:
    listed = sum(bool(_SENTINEL.fullmatch(token.content)) for token in settings.extra)
    count = settings.options.get("extra_ids", template.sentinels)
    if type(count) is not int or count < 0:
        raise InputError(f"{settings.folder / CONFIG}: 'extra_ids' is {count!r}; make it a count")
    return listed or count


def _normaliser(charsmap: bytes, path: Path) -> Any:
    try:
        return normalizers.Precompiled(charsmap) if charsmap else None
    except Exception:  # tokenizers raises the bare class
        raise InputError(f"{path}: its table of characters is damaged; copy it again") from None


def _override(parts: Any, settings: Settings) -> None:
    """As transformers does, its classes' own options win over the file that they come with."""
    if settings.template is None or not isinstance(parts, dict):
        return
    if settings.template.kind == "wordpiece":
        part = parts.get("normalizer")
        names = {"lowercase": "do_lower_case", "strip_accents": "strip_accents"}
        names["handle_chinese_chars"] = "tokenize_chinese_chars"
        if isinstance(part, dict) and part.get("type") == "BertNormalizer":
            part.update({key: settings.flag(name, None) for key, name in names.items() if name in settings.options})
    space = settings.flag("add_prefix_space", None) if settings.template.kind == "byte_bpe" else None
    if space is not None:
        found = [part for part in (parts.get("pre_tokenizer"), parts.get("post_processor")) if isinstance(part, dict)]
        found += [part for one in found for part in one.get("processors", []) if isinstance(part, dict)]
        for part in found:
            if "add_prefix_space" in part:
                part["add_prefix_space"] = space
