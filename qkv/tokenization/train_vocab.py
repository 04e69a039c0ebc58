"""Vocabularies learned from text: characters, space-separated symbols, and the pieces that pretrained families cut.

What is learned does not depend on the order of lines. Of bytes, `tokenizers` sees to that. Of WordPiece and word BPE it
does not (it numbers letters inside words as a hash table hands them out, and ties between merges go by number; its
issue 1794), so they are numbered here before it begins. Unigram pieces come from sentencepiece, from sorted words.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from qkv.errors import InputError, did_you_mean
from qkv.tokenization import build, sentencepiece_proto
from qkv.tokenization.backend import check_unicode
from qkv.tokenization.template import (
    ROLES,
    SPECIAL_TOKENS,
    UNK,
    Template,
    find_special_ids,
    special_tokens_around_vocab,
)

_NUM_BYTES = 256
_NO_LIMIT = 2**31
# A text in many scripts has thousands of letters; the rarest of them are not worth a place each.
_MAX_ALPHABET = 1000
# In a unigram vocabulary the letters that make up all but one in ten thousand of a text.
_COVERAGE = 0.9999
# A longer word is unknown to WordPiece as a whole, so that there is nothing to learn from it.
_MAX_WORD_LENGTH = 100
_WORDS_PER_CHUNK = 1000
# Put after the "<" of a user's "<s>" where a whole word could otherwise be looked up as the special token; invisible,
# not white space, and taken out again when decoding.
_ESCAPE = "\u2060"


def train_vocab(
    kind: str, lines: Iterable[str], vocab_size: int | None, lowercase: bool | None, template: Template | None
) -> tuple[Tokenizer, dict[str, int] | None]:
    """A tokeniser of a kind, and the ids of its roles if it has a template; else they are the usual four."""
    min_size = _check_kind_and_size(kind, vocab_size, template)
    lower = (template is not None and template.lowercase) if lowercase is None else lowercase
    checked_lines = _CheckedLines(lines, kind)
    if kind in _SIMPLE_KINDS:
        tokenizer, trainer = _SIMPLE_KINDS[kind](vocab_size or _NO_LIMIT, lower)
        tokenizer.train_from_iterator(checked_lines, trainer)
        checked_lines.check_not_empty()
        return tokenizer, None
    effective_template = template or Template(kind=kind, special_tokens=dict(zip(ROLES, SPECIAL_TOKENS, strict=False)))  # type: ignore[arg-type]
    tokenizer = _SUBWORD_KINDS[kind](checked_lines, _VocabSpec(kind, effective_template, vocab_size or min_size, lower))
    tokenizer.add_tokens(_make_special_tokens(effective_template))
    return tokenizer, None if template is None else find_special_ids(effective_template.special_tokens, tokenizer.token_to_id)


def _check_kind_and_size(kind: str, vocab_size: int | None, template: Template | None) -> int:
    if template is not None and template.kind == "marian":
        reason = "two SentencePiece models and a table, which are not trained here"
        raise InputError(f"this family's vocabulary is {reason}; train a unigram or byte_bpe one of no family")
    kinds = {**_SIMPLE_KINDS, **_SUBWORD_KINDS}
    if kind not in kinds:
        raise InputError(f"tokeniser kind '{kind}' is unknown; {did_you_mean(kind, kinds)}")
    if template is not None and template.kind != kind:
        raise InputError(f"a {kind} tokeniser was asked for, but the family's is of kind '{template.kind}'")
    num_special = len(SPECIAL_TOKENS) if template is None else sum(map(len, special_tokens_around_vocab(template)))
    min_size = num_special + (_NUM_BYTES if kind in ("bpe", "byte_bpe") else 1)
    if vocab_size is None and kind not in ("character", "whitespace"):
        raise InputError(f"a {kind} tokeniser needs a vocabulary size; set it to {min_size} or more")
    if vocab_size is not None and vocab_size < min_size:
        raise InputError(f"a {kind} tokeniser of size {vocab_size} is too small; set size to {min_size} or more")
    return min_size


class _CheckedLines:
    """Hands lines on one at a time, so that a large corpus streams, and remembers whether any held text."""

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
            reason = f"no text to train the {self._kind} tokeniser on"
            raise InputError(f"{reason}; give at least one line that is not blank")


# ---- whole words: characters, symbols; and bytes under the usual four ------------------------------------------------


def _make_character(vocab_size: int, lowercase: bool) -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.WordLevel(vocab={}, unk_token=UNK))
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    # Not ".", which would leave out the newline.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer, _word_trainer(vocab_size)


def _make_whitespace(vocab_size: int, lowercase: bool) -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.WordLevel(vocab={}, unk_token=UNK))
    names = "|".join(name.strip("<>") for name in SPECIAL_TOKENS)
    escape = normalizers.Replace(Regex(f"<(?=(?:{names})>)"), f"<{_ESCAPE}")
    # Lowercase first: "<S>" would otherwise become a special token after the check for one.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), escape] if lowercase else [escape])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # WordPiece's decoder is the one that joins with spaces; no symbol contains a space, so its prefix never matches.
    join = decoders.WordPiece(prefix=" ", cleanup=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(f"<{_ESCAPE}", "<"), join])
    return tokenizer, _word_trainer(vocab_size)


def _word_trainer(vocab_size: int) -> trainers.Trainer:
    return trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False)


def _make_byte_bpe(vocab_size: int, lowercase: bool) -> tuple[Tokenizer, trainers.Trainer]:
    """Byte-pair encoding (Sennrich et al., 2016) over bytes as in GPT-2 (Radford et al., 2019): nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    # Its pattern never puts "<", a name and ">" into one word, so that no chain of merges can spell a special token.
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


# ---- the families' pieces -------------------------------------------------------------------------------------------


class _VocabSpec(NamedTuple):
    kind: str
    template: Template
    vocab_size: int
    lowercase: bool

    @property
    def num_learned(self) -> int:
        """How many pieces are to be learned."""
        return self.vocab_size - sum(map(len, special_tokens_around_vocab(self.template)))

    def build_vocab(self, subwords: Iterable[str]) -> dict[str, int]:
        """The pieces with the special tokens around them; a text that spells one of those has not made it a piece."""
        prefix, suffix = special_tokens_around_vocab(self.template)
        special_tokens = {*prefix, *suffix}
        tokens = [*prefix, *(subword for subword in subwords if subword not in special_tokens), *suffix]
        return {token: token_id for token_id, token in enumerate(tokens)}

    def check_size(self, num_needed: int) -> None:
        if self.num_learned < num_needed:
            reason = f"too small for the letters of this text; set size to {self.vocab_size - self.num_learned + num_needed} or more"
            raise InputError(f"a {self.kind} tokeniser of size {self.vocab_size} is {reason}")


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
    """WordPiece and word BPE, which differ in the letter that is marked: all but a word's first, or its last."""
    words = _pretokenize(_count_words(lines), vocab_spec.lowercase)
    lines.check_not_empty(words)
    letters = _frequent_letters(words)
    if vocab_spec.kind == "wordpiece":
        affixed_letters = [f"{build.CONTINUATION_PREFIX}{letter}" for letter in _letters_used(letters, (word[1:] for word in words))]
        learner: Any = Tokenizer(models.WordPiece({}, unk_token=UNK))
        trainer_class, affix = trainers.WordPieceTrainer, {"continuing_subword_prefix": build.CONTINUATION_PREFIX}
    else:
        affixed_letters = [f"{letter}{build.END_OF_WORD_SUFFIX}" for letter in _letters_used(letters, (word[-1] for word in words))]
        learner = Tokenizer(models.BPE())
        trainer_class, affix = trainers.BpeTrainer, {"end_of_word_suffix": build.END_OF_WORD_SUFFIX}
    vocab_spec.check_size(len(letters) + len(affixed_letters))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Special tokens of the learner's only: what is named first is numbered first, in this order.
    limits = {"vocab_size": vocab_spec.num_learned, "limit_alphabet": len(letters)}
    trainer = trainer_class(special_tokens=affixed_letters, initial_alphabet=letters, show_progress=False, **limits, **affix)
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


def _train_unigram(lines: _CheckedLines, vocab_spec: _VocabSpec) -> Tokenizer:
    words = _count_words(lines)
    lines.check_not_empty(words)
    model = sentencepiece_proto.parse_model(_run_sentencepiece(words, vocab_spec), "what sentencepiece has learned")
    scores = {piece.text: piece.score for piece in model.pieces if piece.piece_type == sentencepiece_proto.NORMAL}
    vocabulary = vocab_spec.build_vocab(scores)
    normalizer = normalizers.Precompiled(model.charsmap) if model.charsmap else None
    special_tokens = {token for tokens in special_tokens_around_vocab(vocab_spec.template) for token in tokens}
    vocab_scores = [(token, 0.0 if token in special_tokens else scores[token]) for token in vocabulary]
    tokenizer = build.build_unigram(vocab_scores, vocabulary[vocab_spec.template.special_tokens["unk"]], normalizer)
    build.set_post_processor(tokenizer, vocab_spec.template, vocab_spec.template.special_tokens)
    return tokenizer


def _run_sentencepiece(words: Mapping[str, int], vocab_spec: _VocabSpec) -> bytes:
    try:
        import sentencepiece
    except ImportError:
        reason = "a unigram vocabulary is learned by sentencepiece, which is not installed"
        raise InputError(f"{reason}; pip install 'qkv[sentencepiece]'") from None
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(f"{word}\t{count}" for word, count in sorted(words.items())),
            input_format="tsv",
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_spec.num_learned + 1,  # its own unknown token is not ours
            hard_vocab_limit=False,
            character_coverage=_COVERAGE,
            normalization_rule_name="nmt_nfkc_cf" if vocab_spec.lowercase else "nmt_nfkc",
            unk_id=0,
            **{f"{role}_id": -1 for role in ("bos", "eos", "pad")},
            minloglevel=2,
        )
    except RuntimeError as problem:
        match = re.search(r"smaller than required_chars\D*\d+ vs (\d+)", str(problem))
        vocab_spec.check_size(int(match[1]) - 1 if match else 0)
        reason = " ".join(str(problem).split())
        raise InputError(f"sentencepiece cannot learn a unigram vocabulary from this text ({reason})") from None
    return model.getvalue()


_SUBWORD_KINDS: dict[str, Callable[[_CheckedLines, _VocabSpec], Tokenizer]] = {
    "byte_bpe": _train_byte_bpe,
    "wordpiece": _train_wordpiece_or_bpe,
    "word_bpe": _train_wordpiece_or_bpe,
    "unigram": _train_unigram,
}


def _count_words(lines: Iterable[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.split())
    return counts


def _pretokenize(counts: Mapping[str, int], lowercase: bool) -> Counter[str]:
    """The same words as BERT's code sees them: normalised, and cut at punctuation."""
    normalizer, pre_tokenizer = build.build_bert_normalizer(lowercase=lowercase), pre_tokenizers.BertPreTokenizer()
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
    """Each word as often as it was seen, because the library counts for itself."""
    for word, count in sorted(words.items()):
        for start in range(0, count, _WORDS_PER_CHUNK):
            yield f"{word} " * min(_WORDS_PER_CHUNK, count - start)


def _learned_vocab(tokenizer: Tokenizer) -> tuple[list[str], list[tuple[str, str]]]:
    """The pieces in the order of their ids, and the merges that make them."""
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    merges = [(left_token, right_token) for left_token, right_token in model.get("merges", [])]
    return sorted(vocabulary, key=vocabulary.__getitem__), merges
