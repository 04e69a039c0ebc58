"""Vocabulary files of checkpoints made into tokenisers; each builder cuts text as one family's own code does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from qkv.errors import InputError
from qkv.text import spm
from qkv.text.engine import parse
from qkv.text.settings import CONFIG, Settings, numbers, read_file

JSON, WORDS, VOCABULARY, MERGES, PIECES = "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model"

_SENTINEL = re.compile(r"<extra_id_\d+>")
_SENTINELS = 100
_ADVICE = "with transformers, save the tokeniser as tokenizer.json"


def whole(settings: Settings) -> Tokenizer:
    """tokenizer.json is the tokeniser; what tokenizer_config.json says outright of its class still counts."""
    path = settings.folder / JSON
    try:
        parts = json.loads(read_file(path))
        _override(parts, settings)
        tokenizer = parse(json.dumps(parts))
    except InputError:
        raise
    except ValueError as problem:
        raise InputError(f"{path}: damaged or not a tokenizer.json ({problem}); copy it again") from None
    add_tokens(tokenizer, settings, settings.tokens(kind_of(tokenizer, settings)), JSON)
    return tokenizer


def wordpiece(settings: Settings) -> Tokenizer:
    """BERT (Devlin et al., 2019): words and punctuation, then the longest known piece from the left."""
    path = settings.folder / WORDS
    _must_be(settings, {"bert"}, WORDS)
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(_lines(path), 1):
        if line in vocabulary:
            said = f"line {number} repeats '{line}' of line {vocabulary[line] + 1}"
            raise InputError(f"{path}: {said}, so that ids would be ambiguous; copy it again")
        vocabulary[line] = number - 1
    tokens = settings.tokens("bert")
    names = _needed(tokens, ("unk", "cls", "sep"), vocabulary, path)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=names["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(settings.flag("tokenize_chinese_chars", True)),
        strip_accents=settings.flag("strip_accents", None),
        lowercase=bool(settings.flag("do_lower_case", True)),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    cls, sep = names["cls"], names["sep"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
    )
    add_tokens(tokenizer, settings, tokens, WORDS)
    return tokenizer


def bpe(settings: Settings) -> Tokenizer:
    """GPT (Radford et al., 2018) merges letters of words; GPT-2, RoBERTa and BART merge bytes."""
    _must_be(settings, {"gpt", "gpt2", "roberta"}, VOCABULARY)
    path = settings.folder / VOCABULARY
    vocabulary = numbers(read_file(path), str(path))
    kind = settings.kind or _kind_of_names(vocabulary)
    if kind not in ("gpt", "gpt2", "roberta"):
        raise InputError(f"{path}: neither GPT's, GPT-2's nor RoBERTa's special tokens are in it; {_ADVICE}")
    merges = _merges(settings.folder / MERGES, vocabulary)
    tokens = settings.tokens(kind)
    if kind == "gpt":
        tokenizer = _letters(vocabulary, merges, _needed(tokens, ("unk",), vocabulary, path)["unk"])
    else:
        space = bool(settings.flag("add_prefix_space", False))
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix=""))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
        tokenizer.decoder = decoders.ByteLevel()
        if kind == "roberta":
            names = _needed(tokens, ("sep", "cls"), vocabulary, path)
            sep, cls = ((names[role], vocabulary[names[role]]) for role in ("sep", "cls"))
            trim = bool(settings.flag("trim_offsets", True))
            tokenizer.post_processor = processors.RobertaProcessing(sep, cls, trim, space)
        elif settings.flag("add_bos_token", False):
            start = _needed(tokens, ("start",), vocabulary, path)["start"]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{start}:0 $A:0",
                pair=f"{start}:0 $A:0 {start}:1 $B:1",
                special_tokens=[(start, vocabulary[start])],
            )
    add_tokens(tokenizer, settings, tokens, VOCABULARY)
    return tokenizer


def _letters(vocabulary: dict[str, int], merges: list[tuple[str, str]], unknown: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


def unigram(settings: Settings) -> Tokenizer:
    """T5 (Raffel et al., 2020): a unigram language model's best cut (Kudo, 2018), and sentinels after its pieces."""
    path = settings.folder / PIECES
    _must_be(settings, {"t5"}, PIECES)
    model = spm.read_model(read_file(path), str(path))
    if model.kind != spm.UNIGRAM:
        raise InputError(f"{path}: a SentencePiece model, but not a unigram one; {_ADVICE}")
    if any(piece.kind == spm.BYTE for piece in model.pieces):
        raise InputError(f"{path}: has pieces for single bytes, which are not read here; {_ADVICE}")
    unknown = next((number for number, piece in enumerate(model.pieces) if piece.kind == spm.UNKNOWN), None)
    if unknown is None:
        raise InputError(f"{path}: has no unknown token; it is not a whole SentencePiece model")
    scores = [(piece.text, piece.score) for piece in model.pieces]
    sentinels = [f"<extra_id_{number}>" for number in reversed(range(_sentinels(settings)))]
    scores += [(name, 0.0) for name in sentinels]
    vocabulary = {name: number for number, (name, _) in enumerate(scores)}
    tokens = settings.tokens("t5")
    end = _needed(tokens, ("end",), vocabulary, path)["end"]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=unknown, byte_fallback=False))
    if model.charsmap:
        tokenizer.normalizer = _normaliser(model.charsmap, path)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, vocabulary[end])]
    )
    own = [piece for piece in model.pieces if piece.kind in (spm.CONTROL, spm.USER)]
    marked = [(piece.text, piece.kind == spm.CONTROL) for piece in own] + [(name, True) for name in sentinels]
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=special) for name, special in marked])
    add_tokens(tokenizer, settings, tokens, PIECES)
    return tokenizer


def add_tokens(tokenizer: Tokenizer, settings: Settings, tokens: Mapping[str, AddedToken], file: str) -> None:
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


def roles_of(tokenizer: Tokenizer, settings: Settings) -> dict[str, int]:
    """Which id has which role in a tokeniser that was built here."""
    tokens = settings.tokens(kind_of(tokenizer, settings))
    found = {role: tokenizer.token_to_id(token.content) for role, token in tokens.items()}
    # Bytes leave nothing unknown; GPT-2's files still have to name something, and name the end.
    if found.get("unk") in (found.get("start"), found.get("end")):
        found.pop("unk", None)
    return {role: number for role, number in found.items() if number is not None}


def kind_of(tokenizer: Tokenizer, settings: Settings) -> str | None:
    if settings.kind is not None or settings.named:
        return settings.kind
    return _kind_of_names(tokenizer.get_vocab(with_added_tokens=True))


def _kind_of_names(vocabulary: Mapping[str, int]) -> str | None:
    if any(name.endswith("</w>") for name in vocabulary):
        return "gpt"
    signs = {
        "bert": ("[CLS]", "[SEP]"),
        "gpt2": ("<|endoftext|>",),
        "t5": ("<extra_id_0>", "</s>"),
        "roberta": ("<s>", "</s>", "<mask>"),
    }
    return next((kind for kind, names in signs.items() if all(name in vocabulary for name in names)), None)


def _must_be(settings: Settings, kinds: set[str], file: str) -> None:
    """Another class or family may cut the same files in another way; silence would give wrong ids."""
    if settings.foreign_class is not None or (settings.kind is not None and settings.kind not in kinds):
        said = f"'{settings.class_name}' tokeniser" if settings.class_name else f"'{settings.model}' model"
        raise InputError(f"{settings.folder / file}: cannot be read for a {said}; {_ADVICE}")


def _needed(
    tokens: Mapping[str, AddedToken], roles: tuple[str, ...], vocabulary: Mapping[str, int], path: Path
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


def _sentinels(settings: Settings) -> int:
    listed = sum(bool(_SENTINEL.fullmatch(token.content)) for token in settings.extra)
    count = settings.options.get("extra_ids", _SENTINELS)
    if type(count) is not int or count < 0:
        raise InputError(f"{settings.folder / CONFIG}: 'extra_ids' is {count!r}; make it a count")
    return listed or count


def _normaliser(charsmap: bytes, path: Path) -> Any:
    try:
        return normalizers.Precompiled(charsmap)
    except Exception:  # tokenizers raises the bare class
        raise InputError(f"{path}: its table of characters is damaged; copy it again") from None


def _override(parts: Any, settings: Settings) -> None:
    """As transformers does, its classes' own options win over the file that they come with."""
    if settings.kind == "bert" and isinstance(parts, dict):
        part = parts.get("normalizer")
        names = {"lowercase": "do_lower_case", "strip_accents": "strip_accents"}
        names["handle_chinese_chars"] = "tokenize_chinese_chars"
        if isinstance(part, dict) and part.get("type") == "BertNormalizer":
            part.update({key: settings.flag(name, None) for key, name in names.items() if name in settings.options})
    if settings.kind in ("gpt2", "roberta") and isinstance(parts, dict):
        space = settings.flag("add_prefix_space", None)
        for part in (parts.get("pre_tokenizer"), parts.get("post_processor")):
            if space is not None and isinstance(part, dict) and "add_prefix_space" in part:
                part["add_prefix_space"] = space
