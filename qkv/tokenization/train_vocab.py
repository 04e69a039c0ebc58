"""Train vocabularies: characters, symbols separated by spaces, and the subword kinds of pretrained families.

The result does not depend on the order of the lines. `tokenizers` guarantees that for byte-level BPE. For WordPiece and
word BPE it numbers letters in the order of a hash table and breaks ties between merges by these numbers (issue 1794 of
tokenizers), so the letters are numbered here before training. Unigram vocabularies come from sentencepiece, which gets
sorted words.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from qkv.errors import InputError, NoTextError, did_you_mean
from qkv.tokenization import build, sentencepiece_proto
from qkv.tokenization.backend import check_unicode
from qkv.tokenization.spelled_words import build_spelled_words
from qkv.tokenization.template import (
    ROLES,
    SPECIAL_TOKENS,
    UNK,
    Template,
    TokenizerKind,
    find_special_ids,
    special_tokens_around_vocab,
)

_NUM_BYTES = 256
_NO_LIMIT = 2**31
_MAX_ALPHABET = 1000  # a text in many scripts has thousands of letters; the rarest are left out
_COVERAGE = 0.9999  # fraction of a text's characters that a unigram vocabulary covers
_MAX_WORD_LENGTH = 100  # WordPiece maps longer words to the unknown token, so that training ignores them
_WORDS_PER_CHUNK = 1000
# Inserted after the "<" of "<s>" in a text, where a word would otherwise be looked up as the special token; invisible,
# not white space, and removed when decoding.
_ESCAPE = "\u2060"


def train_vocab(
    kind: str,
    lines: Iterable[str],
    vocab_size: int | None,
    lowercase: bool | None,
    template: Template | None,
    min_count: int | None = None,
) -> tuple[Tokenizer, dict[str, int] | None]:
    """Train a tokenizer; return it with the id of each role, or None without a template. See `train_tokenizer`."""
    min_size = _check_kind_and_size(kind, vocab_size, template)
    if min_count is not None and kind not in ("word", "spelled_word"):
        raise InputError(f"min_count is for a vocabulary of words; a {kind} vocabulary has parts of rare words")
    lower = (template is not None and template.lowercase) if lowercase is None else lowercase
    checked_lines = _CheckedLines(lines, kind)
    if kind in _SIMPLE_KINDS:
        tokenizer, trainer = _SIMPLE_KINDS[kind](vocab_size or _NO_LIMIT, lower)
        tokenizer.train_from_iterator(checked_lines, trainer)
        checked_lines.check_not_empty()
        return tokenizer, None
    default_tokens = dict(zip(ROLES, SPECIAL_TOKENS, strict=False))
    effective_template = template or Template(kind=cast("TokenizerKind", kind), special_tokens=default_tokens)
    tokenizer = _SUBWORD_KINDS[kind](
        checked_lines, _VocabSpec(kind, effective_template, vocab_size or min_size, lower, min_count or 1)
    )
    tokenizer.add_tokens(_make_special_tokens(effective_template))
    if template is None:
        return tokenizer, None
    return tokenizer, find_special_ids(template.special_tokens, tokenizer.token_to_id)


def _check_kind_and_size(kind: str, vocab_size: int | None, template: Template | None) -> int:
    if template is not None and template.kind == "sentencepiece_pair":
        reason = "this family has two SentencePiece models and a table, which qkv cannot train"
        raise InputError(f"{reason}; train a unigram or byte_bpe tokenizer without a family")
    kinds = {**_SIMPLE_KINDS, **_SUBWORD_KINDS}
    if kind not in kinds:
        raise InputError(f"tokenizer kind '{kind}' is unknown; {did_you_mean(kind, kinds)}")
    if template is not None and template.kind != kind:
        raise InputError(f"a {kind} tokenizer does not fit the family, whose kind is '{template.kind}'")
    num_special = len(SPECIAL_TOKENS) if template is None else sum(map(len, special_tokens_around_vocab(template)))
    min_size = num_special + (_NUM_BYTES if kind in ("bpe", "byte_bpe", "spelled_word") else 1)
    if vocab_size is None and kind not in ("character", "whitespace"):
        raise InputError(f"a {kind} tokenizer needs a vocabulary size; set it to {min_size} or more")
    if vocab_size is not None and vocab_size < min_size:
        raise InputError(f"a {kind} tokenizer of size {vocab_size} is too small; set the size to {min_size} or more")
    return min_size


class _CheckedLines:
    """Iterates over lines, so that a large corpus can be streamed, and records whether one of them has text."""

    def __init__(self, lines: Iterable[str], kind: str) -> None:
        self._lines, self._kind = lines, kind
        self._any_text = False

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self._lines, 1):
            check_unicode(line, f"line {number} of the training text")
            self._any_text = self._any_text or bool(line.strip())
            yield line

    def check_not_empty(self, words: object = True) -> None:
        if not self._any_text or not words:
            raise NoTextError(
                f"no text to train the {self._kind} tokenizer on; give at least one line that is not blank"
            )


# ---- characters, symbols and bytes, with the four special tokens ----------------------------------------------------


def _make_character(vocab_size: int, lowercase: bool) -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.WordLevel(vocab={}, unk_token=UNK))
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    # not ".", which does not match a newline
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer, _word_trainer(vocab_size)


def _make_whitespace(vocab_size: int, lowercase: bool) -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.WordLevel(vocab={}, unk_token=UNK))
    names = "|".join(name.strip("<>") for name in SPECIAL_TOKENS)
    escape = normalizers.Replace(Regex(f"<(?=(?:{names})>)"), f"<{_ESCAPE}")
    # lowercase first: otherwise "<S>" would become a special token after the escaping
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), escape] if lowercase else [escape])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # WordPiece's decoder joins with spaces; no symbol contains a space, so its prefix never matches
    join = decoders.WordPiece(prefix=" ", cleanup=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(f"<{_ESCAPE}", "<"), join])
    return tokenizer, _word_trainer(vocab_size)


def _word_trainer(vocab_size: int) -> trainers.Trainer:
    return trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False)


def _make_byte_bpe(vocab_size: int, lowercase: bool) -> tuple[Tokenizer, trainers.Trainer]:
    """Return byte-level BPE (Sennrich et al., 2016; Radford et al., 2019), which has no unknown tokens."""
    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    # the pattern never puts "<", a name and ">" into one word, so that no merges result in a special token
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, _byte_trainer(vocab_size, SPECIAL_TOKENS)


def _byte_trainer(vocab_size: int, special_tokens: Sequence[str]) -> trainers.Trainer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )


_SIMPLE_KINDS: dict[str, Callable[[int, bool], tuple[Tokenizer, trainers.Trainer]]] = {
    "character": _make_character,
    "whitespace": _make_whitespace,
    "bpe": _make_byte_bpe,
}


# ---- subword kinds of the families ----------------------------------------------------------------------------------


class _VocabSpec(NamedTuple):
    """The vocabulary to train."""

    kind: str
    template: Template
    vocab_size: int
    lowercase: bool
    min_count: int = 1  # of whole words

    @property
    def num_learned(self) -> int:
        """Number of tokens to learn, without special ones."""
        return self.vocab_size - sum(map(len, special_tokens_around_vocab(self.template)))

    def build_vocab(self, subwords: Iterable[str]) -> dict[str, int]:
        """Return the ids of the subwords with the special tokens before and after them."""
        prefix, suffix = special_tokens_around_vocab(self.template)
        special_tokens = {*prefix, *suffix}
        tokens = [*prefix, *(subword for subword in subwords if subword not in special_tokens), *suffix]
        return {token: token_id for token_id, token in enumerate(tokens)}

    def check_size(self, num_needed: int) -> None:
        if self.num_learned < num_needed:
            min_size = self.vocab_size - self.num_learned + num_needed
            reason = f"a {self.kind} tokenizer of size {self.vocab_size} is too small for the letters of this text"
            raise InputError(f"{reason}; set the size to {min_size} or more")


def _make_special_tokens(template: Template) -> list[AddedToken]:
    prefix, suffix = special_tokens_around_vocab(template)
    lstrip_mask = template.special_tokens.get("mask") if template.mask_lstrip else None
    tokens = [*prefix, *suffix]
    return [AddedToken(token, lstrip=token == lstrip_mask, normalized=False, special=True) for token in tokens]


def _train_byte_bpe(lines: _CheckedLines, vocab_spec: _VocabSpec) -> Tokenizer:
    learner, _ = _make_byte_bpe(0, vocab_spec.lowercase)
    learner.train_from_iterator(lines, _byte_trainer(vocab_spec.num_learned, ()))
    lines.check_not_empty()
    subwords, merges = _learned_vocab(learner)
    tokenizer = build.build_byte_bpe(vocab_spec.build_vocab(subwords), merges, lowercase=vocab_spec.lowercase)
    build.set_post_processor(tokenizer, vocab_spec.template, vocab_spec.template.special_tokens)
    return tokenizer


def _train_wordpiece_or_bpe(lines: _CheckedLines, vocab_spec: _VocabSpec) -> Tokenizer:
    """Train WordPiece, which marks all letters of a word but the first, or word BPE, which marks the last."""
    words = _pretokenize(_count_words(lines), vocab_spec.lowercase)
    lines.check_not_empty(words)
    letters = _frequent_letters(words)
    if vocab_spec.kind == "wordpiece":
        used = _letters_used(letters, (word[1:] for word in words))
        affixed_letters = [f"{build.CONTINUATION_PREFIX}{letter}" for letter in used]
    else:
        used = _letters_used(letters, (word[-1] for word in words))
        affixed_letters = [f"{letter}{build.END_OF_WORD_SUFFIX}" for letter in used]
    vocab_spec.check_size(len(letters) + len(affixed_letters))
    # special tokens of the trainer only: they get the first ids, in this order
    options: dict[str, Any] = {"special_tokens": affixed_letters, "initial_alphabet": letters, "show_progress": False}
    options |= {"vocab_size": vocab_spec.num_learned, "limit_alphabet": len(letters)}
    trainer: trainers.Trainer
    if vocab_spec.kind == "wordpiece":
        learner = Tokenizer(models.WordPiece({}, unk_token=UNK))
        trainer = trainers.WordPieceTrainer(continuing_subword_prefix=build.CONTINUATION_PREFIX, **options)
    else:
        learner = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(end_of_word_suffix=build.END_OF_WORD_SUFFIX, **options)
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    learner.train_from_iterator(_repeat_words(words), trainer)
    subwords, merges = _learned_vocab(learner)
    vocabulary = vocab_spec.build_vocab(dict.fromkeys([*letters, *affixed_letters, *subwords]))
    unk_token = vocab_spec.template.special_tokens["unk"]
    if vocab_spec.kind == "wordpiece":
        tokenizer = build.build_wordpiece(vocabulary, unk_token, lowercase=vocab_spec.lowercase)
    else:
        tokenizer = build.build_word_bpe(vocabulary, merges, unk_token, lowercase=vocab_spec.lowercase)
    build.set_post_processor(tokenizer, vocab_spec.template, vocab_spec.template.special_tokens)
    return tokenizer


def _train_words(lines: _CheckedLines, vocab_spec: _VocabSpec) -> Tokenizer:
    """Take the most frequent words."""
    vocabulary = vocab_spec.build_vocab(_frequent_words(lines, vocab_spec, vocab_spec.num_learned))
    tokenizer = build.build_words(vocabulary, vocab_spec.template.special_tokens["unk"], lowercase=vocab_spec.lowercase)
    build.set_post_processor(tokenizer, vocab_spec.template, vocab_spec.template.special_tokens)
    return tokenizer


def _train_spelled_words(lines: _CheckedLines, vocab_spec: _VocabSpec) -> Tokenizer:
    """Take the most frequent words, before the letters of all others."""
    words = _frequent_words(lines, vocab_spec, vocab_spec.num_learned - _NUM_BYTES)
    return build_spelled_words(vocab_spec.template, words, lowercase=vocab_spec.lowercase, split_punctuation=True)


def _frequent_words(lines: _CheckedLines, vocab_spec: _VocabSpec, max_words: int) -> list[str]:
    """Return the most frequent words, in the order of their frequency."""
    words = _pretokenize(_count_words(lines), vocab_spec.lowercase, strip_accents=False)
    lines.check_not_empty(words)
    frequent = [word for word, count in words.items() if count >= vocab_spec.min_count]
    if not frequent:
        raise InputError(f"no word occurs {vocab_spec.min_count} times in this text; set a smaller min_count")
    frequent.sort(key=lambda word: (-words[word], word))
    return frequent[:max_words]


def _train_unigram(lines: _CheckedLines, vocab_spec: _VocabSpec) -> Tokenizer:
    words = _count_words(lines)
    lines.check_not_empty(words)
    preprocessing = build.build_unigram_normalizer(vocab_spec.template, None)
    if preprocessing is not None:
        words = _normalize_words(words, preprocessing)
    model = sentencepiece_proto.parse_model(_run_sentencepiece(words, vocab_spec), "the model of sentencepiece")
    scores = {piece.text: piece.score for piece in model.pieces if piece.piece_type == sentencepiece_proto.NORMAL}
    vocabulary = vocab_spec.build_vocab(scores)
    character_map = normalizers.Precompiled(model.charsmap) if model.charsmap else None
    normalizer = build.build_unigram_normalizer(vocab_spec.template, character_map)
    special_tokens = {token for tokens in special_tokens_around_vocab(vocab_spec.template) for token in tokens}
    vocab_scores = [(token, 0.0 if token in special_tokens else scores[token]) for token in vocabulary]
    tokenizer = build.build_unigram(vocab_scores, vocabulary[vocab_spec.template.special_tokens["unk"]], normalizer)
    build.set_post_processor(tokenizer, vocab_spec.template, vocab_spec.template.special_tokens)
    return tokenizer


def _run_sentencepiece(words: Mapping[str, int], vocab_spec: _VocabSpec) -> bytes:
    try:
        import sentencepiece
    except ImportError:
        reason = "training a unigram vocabulary needs sentencepiece, which is not installed"
        raise InputError(f"{reason}; pip install 'qkv[sentencepiece]'") from None
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(f"{word}\t{count}" for word, count in sorted(words.items())),
            input_format="tsv",
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_spec.num_learned + 1,  # with sentencepiece's own unknown token
            hard_vocab_limit=False,
            character_coverage=_COVERAGE,
            normalization_rule_name="nmt_nfkc_cf" if vocab_spec.lowercase else "nmt_nfkc",
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as problem:
        match = re.search(r"smaller than required_chars\D*\d+ vs (\d+)", str(problem))
        vocab_spec.check_size(int(match[1]) - 1 if match else 0)
        reason = " ".join(str(problem).split())
        raise InputError(f"sentencepiece cannot train a unigram vocabulary on this text ({reason})") from None
    return model.getvalue()


_SUBWORD_KINDS: dict[str, Callable[[_CheckedLines, _VocabSpec], Tokenizer]] = {
    "byte_bpe": _train_byte_bpe,
    "wordpiece": _train_wordpiece_or_bpe,
    "word_bpe": _train_wordpiece_or_bpe,
    "unigram": _train_unigram,
    "word": _train_words,
    "spelled_word": _train_spelled_words,
}


def _count_words(lines: Iterable[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.split())
    return counts


def _normalize_words(counts: Mapping[str, int], normalizer: normalizers.Normalizer) -> Counter[str]:
    word_counts: Counter[str] = Counter()
    for word, count in counts.items():
        for normalized_word in normalizer.normalize_str(word).split():
            word_counts[normalized_word] += count
    return word_counts


def _pretokenize(counts: Mapping[str, int], lowercase: bool, strip_accents: bool | None = None) -> Counter[str]:
    """Normalize words and split them at punctuation, like BERT's tokenizer."""
    normalizer = build.build_bert_normalizer(lowercase=lowercase, strip_accents=strip_accents)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    word_counts: Counter[str] = Counter()
    for word, count in counts.items():
        for pretoken, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(word)):
            if len(pretoken) <= _MAX_WORD_LENGTH:
                word_counts[pretoken] += count
    return word_counts


def _frequent_letters(words: Mapping[str, int]) -> list[str]:
    letters: Counter[str] = Counter()
    for word, count in words.items():
        for letter in word:
            letters[letter] += count
    return sorted(sorted(letters, key=lambda letter: (-letters[letter], letter))[:_MAX_ALPHABET])


def _letters_used(letters: Iterable[str], fragments: Iterable[str]) -> list[str]:
    used = {letter for fragment in fragments for letter in fragment}
    return [letter for letter in letters if letter in used]


def _repeat_words(words: Mapping[str, int]) -> Iterator[str]:
    """Yield each word as often as it was counted, because the library counts words itself."""
    for word, count in sorted(words.items()):
        for start in range(0, count, _WORDS_PER_CHUNK):
            yield f"{word} " * min(_WORDS_PER_CHUNK, count - start)


def _learned_vocab(tokenizer: Tokenizer) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the tokens in the order of their ids, and the merges."""
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    merges = [(left_token, right_token) for left_token, right_token in model.get("merges", [])]
    return sorted(vocabulary, key=vocabulary.__getitem__), merges
