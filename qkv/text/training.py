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

from qkv.errors import InputError, nearest
from qkv.text import assemble, spm
from qkv.text.engine import refuse_broken_unicode
from qkv.text.template import ROLES, SPECIALS, UNK, Template, around, role_ids

_BYTES = 256
_NO_LIMIT = 2**31
# A text in many scripts has thousands of letters; the rarest of them are not worth a place each.
_ALPHABET = 1000
# In a unigram vocabulary the letters that make up all but one in ten thousand of a text.
_COVERAGE = 0.9999
# A longer word is unknown to WordPiece as a whole, so that there is nothing to learn from it.
_LONGEST_WORD = 100
_CHUNK = 1000
# Put after the "<" of a user's "<s>" where a whole word could otherwise be looked up as the special token; invisible,
# not white space, and taken out again when decoding.
_ESCAPE = "\u2060"


def learn(
    kind: str, lines: Iterable[str], size: int | None, lowercase: bool | None, template: Template | None
) -> tuple[Tokenizer, dict[str, int] | None]:
    """A tokeniser of a kind, and the ids of its roles if it has a template; else they are the usual four."""
    least = _check(kind, size, template)
    lower = (template is not None and template.lowercase) if lowercase is None else lowercase
    seen = _Checked(lines, kind)
    if kind in _SIMPLE:
        tokenizer, trainer = _SIMPLE[kind](size or _NO_LIMIT, lower)
        tokenizer.train_from_iterator(seen, trainer)
        seen.must_hold_text()
        return tokenizer, None
    used = template or Template(kind=kind, tokens=dict(zip(ROLES, SPECIALS, strict=False)))  # type: ignore[arg-type]
    tokenizer = _PIECES[kind](seen, _Wanted(kind, used, size or least, lower))
    tokenizer.add_tokens(_special_tokens(used))
    return tokenizer, None if template is None else role_ids(used.tokens, tokenizer.token_to_id)


def _check(kind: str, size: int | None, template: Template | None) -> int:
    if template is not None and template.kind == "marian":
        said = "two SentencePiece models and a table, which are not trained here"
        raise InputError(f"this family's vocabulary is {said}; train a unigram or byte_bpe one of no family")
    known = {**_SIMPLE, **_PIECES}
    if kind not in known:
        raise InputError(f"tokeniser kind '{kind}' is unknown; {nearest(kind, known)}")
    if template is not None and template.kind != kind:
        raise InputError(f"a {kind} tokeniser was asked for, but the family's is of kind '{template.kind}'")
    special = len(SPECIALS) if template is None else sum(map(len, around(template)))
    least = special + (_BYTES if kind in ("bpe", "byte_bpe") else 1)
    if size is None and kind not in ("character", "symbol"):
        raise InputError(f"a {kind} tokeniser needs a vocabulary size; set it to {least} or more")
    if size is not None and size < least:
        raise InputError(f"a {kind} tokeniser of size {size} is too small; set size to {least} or more")
    return least


class _Checked:
    """Hands lines on one at a time, so that a large corpus streams, and remembers whether any held text."""

    def __init__(self, lines: Iterable[str], kind: str) -> None:
        self._lines, self._kind = lines, kind
        self._any_text = False

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self._lines, 1):
            refuse_broken_unicode(line, f"line {number} of the training text")
            self._any_text = self._any_text or bool(line.strip())
            yield line

    def must_hold_text(self, found: object = True) -> None:
        if not self._any_text or not found:
            said = f"no text to train the {self._kind} tokeniser on"
            raise InputError(f"{said}; give at least one line that is not blank")


# ---- whole words: characters, symbols; and bytes under the usual four ------------------------------------------------


def _character(size: int, lowercase: bool) -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.WordLevel(vocab={}, unk_token=UNK))
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    # Not ".", which would leave out the newline.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer, _word_trainer(size)


def _symbol(size: int, lowercase: bool) -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.WordLevel(vocab={}, unk_token=UNK))
    names = "|".join(name.strip("<>") for name in SPECIALS)
    escape = normalizers.Replace(Regex(f"<(?=(?:{names})>)"), f"<{_ESCAPE}")
    # Lowercase first: "<S>" would otherwise become a special token after the check for one.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), escape] if lowercase else [escape])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # WordPiece's decoder is the one that joins with spaces; no symbol contains a space, so its prefix never matches.
    join = decoders.WordPiece(prefix=" ", cleanup=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(f"<{_ESCAPE}", "<"), join])
    return tokenizer, _word_trainer(size)


def _word_trainer(size: int) -> trainers.Trainer:
    return trainers.WordLevelTrainer(vocab_size=size, special_tokens=list(SPECIALS), show_progress=False)


def _bpe(size: int, lowercase: bool) -> tuple[Tokenizer, trainers.Trainer]:
    """Byte-pair encoding (Sennrich et al., 2016) over bytes as in GPT-2 (Radford et al., 2019): nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    # Its pattern never puts "<", a name and ">" into one word, so that no chain of merges can spell a special token.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, _byte_trainer(size, SPECIALS)


def _byte_trainer(size: int, specials: Sequence[str]) -> trainers.Trainer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )


_SIMPLE: dict[str, Callable[[int, bool], tuple[Tokenizer, trainers.Trainer]]] = {
    "character": _character,
    "symbol": _symbol,
    "bpe": _bpe,
}


# ---- the families' pieces -------------------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    kind: str
    template: Template
    size: int
    lowercase: bool

    @property
    def room(self) -> int:
        """How many pieces are to be learned."""
        return self.size - sum(map(len, around(self.template)))

    def vocabulary(self, pieces: Iterable[str]) -> dict[str, int]:
        """The pieces with the special tokens around them; a text that spells one of those has not made it a piece."""
        before, behind = around(self.template)
        special = {*before, *behind}
        names = [*before, *(piece for piece in pieces if piece not in special), *behind]
        return {name: number for number, name in enumerate(names)}

    def refuse_size(self, needed: int) -> None:
        if self.room < needed:
            said = f"too small for the letters of this text; set size to {self.size - self.room + needed} or more"
            raise InputError(f"a {self.kind} tokeniser of size {self.size} is {said}")


def _special_tokens(template: Template) -> list[AddedToken]:
    before, behind = around(template)
    spaced = template.tokens.get("mask") if template.spaced_mask else None
    names = [*before, *behind]
    return [AddedToken(name, lstrip=name == spaced, normalized=False, special=True) for name in names]


def _byte_pieces(seen: _Checked, wanted: _Wanted) -> Tokenizer:
    learner, _ = _bpe(0, wanted.lowercase)
    learner.train_from_iterator(seen, _byte_trainer(wanted.room, ()))
    seen.must_hold_text()
    pieces, merges = _learned(learner)
    tokenizer = assemble.byte_bpe(wanted.vocabulary(pieces), merges, lowercase=wanted.lowercase)
    assemble.frame(tokenizer, wanted.template, wanted.template.tokens)
    return tokenizer


def _word_pieces(seen: _Checked, wanted: _Wanted) -> Tokenizer:
    """WordPiece and word BPE, which differ in the letter that is marked: all but a word's first, or its last."""
    words = _pretokenised(_words(seen), wanted.lowercase)
    seen.must_hold_text(words)
    letters = _alphabet(words)
    if wanted.kind == "wordpiece":
        marked = [f"{assemble.CONTINUED}{letter}" for letter in _among(letters, (word[1:] for word in words))]
        learner: Any = Tokenizer(models.WordPiece({}, unk_token=UNK))
        make, mark = trainers.WordPieceTrainer, {"continuing_subword_prefix": assemble.CONTINUED}
    else:
        marked = [f"{letter}{assemble.WORD_END}" for letter in _among(letters, (word[-1] for word in words))]
        learner = Tokenizer(models.BPE())
        make, mark = trainers.BpeTrainer, {"end_of_word_suffix": assemble.WORD_END}
    wanted.refuse_size(len(letters) + len(marked))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Special tokens of the learner's only: what is named first is numbered first, in this order.
    sizes = {"vocab_size": wanted.room, "limit_alphabet": len(letters)}
    trainer = make(special_tokens=marked, initial_alphabet=letters, show_progress=False, **sizes, **mark)
    learner.train_from_iterator(_repeated(words), trainer)
    pieces, merges = _learned(learner)
    vocabulary = wanted.vocabulary(dict.fromkeys([*letters, *marked, *pieces]))
    unknown = wanted.template.tokens["unk"]
    if wanted.kind == "wordpiece":
        tokenizer = assemble.wordpiece(vocabulary, unknown, lowercase=wanted.lowercase)
    else:
        tokenizer = assemble.word_bpe(vocabulary, merges, unknown, lowercase=wanted.lowercase)
    assemble.frame(tokenizer, wanted.template, wanted.template.tokens)
    return tokenizer


def _unigram_pieces(seen: _Checked, wanted: _Wanted) -> Tokenizer:
    words = _words(seen)
    seen.must_hold_text(words)
    model = spm.read_model(_sentencepiece(words, wanted), "what sentencepiece has learned")
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind == spm.NORMAL}
    vocabulary = wanted.vocabulary(scores)
    normaliser = normalizers.Precompiled(model.charsmap) if model.charsmap else None
    special = {name for names in around(wanted.template) for name in names}
    rows = [(name, 0.0 if name in special else scores[name]) for name in vocabulary]
    tokenizer = assemble.unigram(rows, vocabulary[wanted.template.tokens["unk"]], normaliser)
    assemble.frame(tokenizer, wanted.template, wanted.template.tokens)
    return tokenizer


def _sentencepiece(words: Mapping[str, int], wanted: _Wanted) -> bytes:
    try:
        import sentencepiece
    except ImportError:
        said = "a unigram vocabulary is learned by sentencepiece, which is not installed"
        raise InputError(f"{said}; pip install 'qkv[sentencepiece]'") from None
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(f"{word}\t{count}" for word, count in sorted(words.items())),
            input_format="tsv",
            model_writer=model,
            model_type="unigram",
            vocab_size=wanted.room + 1,  # its own unknown token is not ours
            hard_vocab_limit=False,
            character_coverage=_COVERAGE,
            normalization_rule_name="nmt_nfkc_cf" if wanted.lowercase else "nmt_nfkc",
            unk_id=0,
            **{f"{role}_id": -1 for role in ("bos", "eos", "pad")},
            minloglevel=2,
        )
    except RuntimeError as problem:
        needed = re.search(r"smaller than required_chars\D*\d+ vs (\d+)", str(problem))
        wanted.refuse_size(int(needed[1]) - 1 if needed else 0)
        said = " ".join(str(problem).split())
        raise InputError(f"sentencepiece cannot learn a unigram vocabulary from this text ({said})") from None
    return model.getvalue()


_PIECES: dict[str, Callable[[_Checked, _Wanted], Tokenizer]] = {
    "byte_bpe": _byte_pieces,
    "wordpiece": _word_pieces,
    "word_bpe": _word_pieces,
    "unigram": _unigram_pieces,
}


def _words(lines: Iterable[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.split())
    return counts


def _pretokenised(counts: Mapping[str, int], lowercase: bool) -> Counter[str]:
    """The same words as BERT's code sees them: normalised, and cut at punctuation."""
    normaliser, cut = assemble.bert_normaliser(lowercase=lowercase), pre_tokenizers.BertPreTokenizer()
    found: Counter[str] = Counter()
    for word, count in counts.items():
        for piece, _ in cut.pre_tokenize_str(normaliser.normalize_str(word)):
            if len(piece) <= _LONGEST_WORD:
                found[piece] += count
    return found


def _alphabet(words: Mapping[str, int]) -> list[str]:
    letters: Counter[str] = Counter()
    for word, count in words.items():
        for letter in word:
            letters[letter] += count
    return sorted(sorted(letters, key=lambda letter: (-letters[letter], letter))[:_ALPHABET])


def _among(letters: Iterable[str], parts: Iterable[str]) -> list[str]:
    used = {letter for part in parts for letter in part}
    return [letter for letter in letters if letter in used]


def _repeated(words: Mapping[str, int]) -> Iterator[str]:
    """Each word as often as it was seen, because the library counts for itself."""
    for word, count in sorted(words.items()):
        for done in range(0, count, _CHUNK):
            yield f"{word} " * min(_CHUNK, count - done)


def _learned(tokenizer: Tokenizer) -> tuple[list[str], list[tuple[str, str]]]:
    """The pieces in the order of their ids, and the merges that make them."""
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    merges = [(first, second) for first, second in model.get("merges", [])]
    return sorted(vocabulary, key=vocabulary.__getitem__), merges
