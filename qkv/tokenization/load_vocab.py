"""Build tokenizers from the vocabulary files of checkpoints, and check these files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

from qkv.errors import InputError, quote
from qkv.files import parse_json, read_file, read_text_file
from qkv.limits import limit
from qkv.tokenization import build, sentencepiece_proto
from qkv.tokenization.backend import FastBackend, parse_tokenizer_json
from qkv.tokenization.checks import check_charsmap, check_ids, check_tokenizer_json, probe
from qkv.tokenization.template import Template, find_special_ids, match_template, sentinel_tokens, template_roles
from qkv.tokenization.tokenizer_config import CONFIG_FILE, TokenizerConfig, parse_vocab_json

TOKENIZER_JSON, VOCAB_TXT, VOCAB_JSON, MERGES_TXT, SPIECE_MODEL = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
)

# a tokenizer, and the id of each role
BuiltTokenizer = tuple[FastBackend, dict[str, int]]

_SENTINEL = re.compile(r"<extra_id_\d+>")
_ADVICE = "save the tokenizer as tokenizer.json with transformers"


def from_tokenizer_json(config: TokenizerConfig, name: str = TOKENIZER_JSON) -> BuiltTokenizer:
    """Build the tokenizer of a tokenizer.json, with the options of tokenizer_config.json."""
    location = str(config.folder / name)
    text = read_text_file(location)
    raw_json = parse_json(text, location)
    num_ids = check_tokenizer_json(raw_json, location)
    components = _component_settings(raw_json)
    _apply_config_overrides(raw_json, config)
    is_changed = _component_settings(raw_json) != components
    tokenizer = parse_tokenizer_json(json.dumps(raw_json) if is_changed else text, location)
    special_tokens = config.special_tokens(_infer_template(tokenizer, config))
    return _add_special_tokens(tokenizer, config, special_tokens, name, num_ids)


def from_vocab_txt(config: TokenizerConfig) -> BuiltTokenizer:
    """Build a WordPiece tokenizer from vocab.txt, which has one piece per line."""
    path = config.folder / VOCAB_TXT
    vocabulary: dict[str, int] = {}
    for line_number, line in enumerate(_read_lines(path), 1):
        if line in vocabulary:
            reason = f"line {line_number} repeats {quote(line)} of line {vocabulary[line] + 1}"
            raise InputError(f"{path}: {reason}, so ids would be ambiguous; copy it again")
        vocabulary[line] = line_number - 1
    template = _require_template(config, VOCAB_TXT, vocabulary, "wordpiece")
    special_tokens = config.special_tokens(template)
    role_tokens = _require_tokens(special_tokens, ("unk", *template_roles(template)), vocabulary, path)
    tokenizer = build.build_wordpiece(
        vocabulary,
        role_tokens["unk"],
        lowercase=bool(config.flag("do_lower_case", template.lowercase)),
        strip_accents=config.flag("strip_accents", None),
        handle_chinese_chars=bool(config.flag("tokenize_chinese_chars", True)),
    )
    build.set_post_processor(tokenizer, template, role_tokens)
    return _add_special_tokens(tokenizer, config, special_tokens, VOCAB_TXT)


def from_vocab_merges(config: TokenizerConfig) -> BuiltTokenizer:
    """Build a BPE tokenizer, of letters or of bytes, from vocab.json and merges.txt."""
    path = config.folder / VOCAB_JSON
    vocabulary = parse_vocab_json(read_file(path), str(path))
    is_word_bpe = any(name.endswith(build.END_OF_WORD_SUFFIX) for name in vocabulary)
    template = _require_template(config, VOCAB_JSON, vocabulary, *sorted(("byte_bpe", "word_bpe"), reverse=is_word_bpe))
    merges = _read_merges(config.folder / MERGES_TXT, vocabulary)
    special_tokens = config.special_tokens(template)
    if template.kind == "word_bpe":
        role_tokens = _require_tokens(special_tokens, ("unk", *template_roles(template)), vocabulary, path)
        tokenizer = build.build_word_bpe(vocabulary, merges, role_tokens["unk"], lowercase=template.lowercase)
        build.set_post_processor(tokenizer, template, role_tokens)
    else:
        role_tokens = _require_tokens(special_tokens, template_roles(template), vocabulary, path)
        add_prefix_space = bool(config.flag("add_prefix_space", False))
        tokenizer = build.build_byte_bpe(vocabulary, merges, add_prefix_space=add_prefix_space)
        trim_offsets = bool(config.flag("trim_offsets", True))
        build.set_post_processor(
            tokenizer, template, role_tokens, add_prefix_space=add_prefix_space, trim_offsets=trim_offsets
        )
        if not role_tokens and config.flag("add_bos_token", False):
            bos_token = _require_tokens(special_tokens, ("bos",), vocabulary, path)["bos"]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos_token}:0 $A:0",
                pair=f"{bos_token}:0 $A:0 {bos_token}:1 $B:1",
                special_tokens=[(bos_token, vocabulary[bos_token])],
            )
    num_ids = check_ids(max(vocabulary.values()), str(path))
    return _add_special_tokens(tokenizer, config, special_tokens, VOCAB_JSON, num_ids)


def from_spiece(config: TokenizerConfig) -> BuiltTokenizer:
    """Build a unigram tokenizer from spiece.model, with sentinels after its pieces."""
    path = config.folder / SPIECE_MODEL
    model = sentencepiece_proto.parse_model(read_file(path), str(path))
    # sentinels come after the pieces
    piece_names = {piece.text: 0 for piece in model.pieces} | dict.fromkeys(sentinel_tokens(1), 0)
    template = _require_template(config, SPIECE_MODEL, piece_names, "unigram")
    if model.model_type != sentencepiece_proto.UNIGRAM:
        raise InputError(f"{path}: a SentencePiece model, but not a unigram one; {_ADVICE}")
    if any(piece.piece_type == sentencepiece_proto.BYTE for piece in model.pieces):
        raise InputError(f"{path}: has pieces for single bytes, which qkv does not support; {_ADVICE}")
    unk_id = next(
        (token_id for token_id, piece in enumerate(model.pieces) if piece.piece_type == sentencepiece_proto.UNKNOWN),
        None,
    )
    if unk_id is None:
        raise InputError(f"{path}: has no unknown token; it is not a complete SentencePiece model")
    vocab_scores = [(piece.text, piece.score) for piece in model.pieces]
    extra_tokens = sentinel_tokens(_num_sentinels(config, template))
    vocab_scores += [(name, 0.0) for name in extra_tokens]
    vocabulary = {name: token_id for token_id, (name, _) in enumerate(vocab_scores)}
    special_tokens = config.special_tokens(template)
    role_tokens = _require_tokens(special_tokens, template_roles(template), vocabulary, path)
    lowercase = bool(config.flag("do_lower_case", template.lowercase))
    normalizer = build.build_unigram_normalizer(template, _make_normalizer(model.charsmap, path), lowercase=lowercase)
    tokenizer = build.build_unigram(vocab_scores, unk_id, normalizer)
    build.set_post_processor(tokenizer, template, role_tokens)
    special_pieces = [
        piece
        for piece in model.pieces
        if piece.piece_type in (sentencepiece_proto.CONTROL, sentencepiece_proto.USER_DEFINED)
    ]
    token_flags = [
        (
            piece.text,
            piece.piece_type == sentencepiece_proto.CONTROL or piece.text in template.additional_special_tokens,
        )
        for piece in special_pieces
    ]
    token_flags += [(name, True) for name in extra_tokens]
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=special) for name, special in token_flags])
    return _add_special_tokens(tokenizer, config, special_tokens, SPIECE_MODEL)


def _add_special_tokens(
    tokenizer: Tokenizer,
    config: TokenizerConfig,
    special_tokens: Mapping[str, AddedToken],
    file: str,
    num_ids: int = 0,
) -> BuiltTokenizer:
    """Mark the special tokens as special, append the tokens that the folder adds, and try the result on a few texts."""
    known_tokens = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for expected_id, token in config.added_tokens:
        if token.content in known_tokens:
            continue
        tokenizer.add_tokens([token])
        known_tokens.add(token.content)
        if tokenizer.token_to_id(token.content) != expected_id:
            actual_id = tokenizer.token_to_id(token.content)
            reason = (
                f"the folder adds {quote(token.content)} with id {expected_id}, but the vocabulary gives it {actual_id}"
            )
            raise InputError(f"{config.folder / file}: {reason}; the files do not belong together")
    named_tokens = [special_tokens[role] for role in special_tokens if config.is_named(role)]
    default_tokens = [token for token in special_tokens.values() if tokenizer.token_to_id(token.content) is not None]
    for token in (*named_tokens, *default_tokens, *config.additional_tokens):
        if token.content not in known_tokens:
            tokenizer.add_tokens([token])
            known_tokens.add(token.content)
    role_tokens = {role: token.content for role, token in special_tokens.items()}
    probe(tokenizer.encode, str(config.folder / file))
    return FastBackend(tokenizer, num_ids), find_special_ids(role_tokens, tokenizer.token_to_id)


def _infer_template(tokenizer: Tokenizer, config: TokenizerConfig) -> Template | None:
    """Return the template of a tokenizer.json, for the special tokens that its folder does not name."""
    if config.template is not None or config.named_tokens:
        return config.template
    return match_template(
        config.known_templates, _tokenizer_kind(tokenizer), tokenizer.get_vocab(with_added_tokens=True)
    )


def _tokenizer_kind(tokenizer: Tokenizer) -> str | None:
    model = tokenizer.model
    if isinstance(model, models.BPE):
        return "word_bpe" if model.end_of_word_suffix else "byte_bpe"
    return {models.WordPiece: "wordpiece", models.Unigram: "unigram"}.get(type(model))


def _require_template(config: TokenizerConfig, file: str, vocabulary: Mapping[str, int], *kinds: str) -> Template:
    """Return the template for vocabulary files; the first of `kinds` is the one that the files suggest.

    A class or a family of another kind is refused, because it would use the same files with other ids.
    """
    path, template = config.folder / file, config.template
    if config.unknown_class is not None or (template is not None and template.kind not in kinds):
        family_kind = template.kind if template is not None else None
        description = (
            f"a {quote(config.class_name)} tokenizer" if config.class_name else f"a family of kind '{family_kind}'"
        )
        raise InputError(f"{path}: cannot be read for {description}; {_ADVICE}")
    if template is not None:
        return template
    candidates = [candidate for candidate in config.known_templates if candidate.kind == kinds[0]]
    if candidates and all(candidate == candidates[0] for candidate in candidates):
        return candidates[0]
    matched = match_template(candidates, kinds[0], vocabulary)
    if matched is None:
        raise InputError(f"{path}: its special tokens are not those of a known family; {_ADVICE}")
    return matched


def _require_tokens(
    special_tokens: Mapping[str, AddedToken], roles: Sequence[str], vocabulary: Mapping[str, int], path: Path
) -> dict[str, str]:
    role_tokens = {role: special_tokens[role].content if role in special_tokens else f"({role})" for role in roles}
    for name in role_tokens.values():
        if name not in vocabulary:
            raise InputError(
                f"{path}: has no {quote(name)}; copy it again, or name the special tokens in {CONFIG_FILE}"
            )
    return role_tokens


def _read_lines(path: Path) -> list[str]:
    """Split a file at line feeds only: other line separators of Unicode are tokens in some vocabularies."""
    text = read_text_file(path)
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _read_merges(path: Path, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line_number, line in enumerate(_read_lines(path), 1):
        if not line or line.startswith("#version"):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise InputError(f"{path}: line {line_number} is not two tokens, but {quote(line)}; copy it again")
        for token in (*pair, "".join(pair)):
            if token not in vocabulary:
                raise InputError(
                    f"{path}: line {line_number} names {quote(token)}, which {VOCAB_JSON} lacks; copy both again"
                )
        merges.append((pair[0], pair[1]))
    return merges


def _num_sentinels(config: TokenizerConfig, template: Template) -> int:
    num_listed = sum(bool(_SENTINEL.fullmatch(token.content)) for token in config.additional_tokens)
    count = config.options.get("extra_ids", template.num_sentinels)
    if type(count) is not int or not 0 <= count < limit("vocabulary"):
        raise InputError(f"{config.folder / CONFIG_FILE}: 'extra_ids' is {quote(count)}; make it a count")
    return num_listed or count


def _make_normalizer(charsmap: bytes, path: Path) -> Any:
    if charsmap:
        check_charsmap(charsmap, str(path))
    try:
        return normalizers.Precompiled(charsmap) if charsmap else None
    except Exception:  # tokenizers raises the bare class
        raise InputError(f"{path}: its character map is damaged; copy it again") from None


def _component_settings(raw_json: Any) -> str:
    """Return the settings of a tokenizer.json that options can change, which are small compared with its vocabulary."""
    return json.dumps([raw_json.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor")])


def _apply_config_overrides(raw_json: Any, config: TokenizerConfig) -> None:
    """Apply options of tokenizer_config.json to a tokenizer.json: as in transformers, they take precedence."""
    if config.template is None or not isinstance(raw_json, dict):
        return
    if config.template.kind == "wordpiece":
        component = raw_json.get("normalizer")
        config_keys = {"lowercase": "do_lower_case", "strip_accents": "strip_accents"}
        config_keys["handle_chinese_chars"] = "tokenize_chinese_chars"
        if isinstance(component, dict) and component.get("type") == "BertNormalizer":
            component.update(
                {key: config.flag(name, None) for key, name in config_keys.items() if name in config.options}
            )
    add_prefix_space = config.flag("add_prefix_space", None) if config.template.kind == "byte_bpe" else None
    if add_prefix_space is not None:
        components = [
            component
            for component in (raw_json.get("pre_tokenizer"), raw_json.get("post_processor"))
            if isinstance(component, dict)
        ]
        components += [
            component
            for parent in components
            for component in parent.get("processors", [])
            if isinstance(component, dict)
        ]
        for component in components:
            if "add_prefix_space" in component:
                component["add_prefix_space"] = add_prefix_space
