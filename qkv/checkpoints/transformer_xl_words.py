"""The vocabulary of released Transformer-XL checkpoints: a pickle, of which only the list of words is read.

The file holds the attributes of a tokenizer object. Its opcodes are read and none is executed, so that no code in it
can run. Texts are split at white space: the checkpoints expect text in the form of WikiText, with spaces around
punctuation.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from qkv.checkpoints.pickle_io import GET_OPCODES, PUT_OPCODES, STRING_OPCODES
from qkv.errors import InputError
from qkv.files import read_file
from qkv.tokenization.tokenizer import Tokenizer

_FILES = ("vocab.bin", "vocab.pkl")
_KEY = "idx2sym"
_ROLES = {"unk": "<unk>", "eos": "<eos>"}


def find_words_file(folder: Path) -> Path | None:
    """Return the vocabulary file of a folder, if there is one."""
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def load_word_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a vocabulary file."""
    words = _read_words(path)
    vocabulary = {word: index for index, word in enumerate(words)}
    missing = next((name for name in _ROLES.values() if name not in vocabulary), None)
    if missing is not None or len(vocabulary) != len(words):
        reason = "has a word twice" if missing is None else f"has no word {missing}"
        raise InputError(f"{path}: {reason}; restore it from where it came from")
    backend = Backend(models.WordLevel(vocabulary, unk_token=_ROLES["unk"]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix=" ", cleanup=False)  # joins with spaces, which no word contains
    backend.add_tokens([AddedToken(name, normalized=False, special=True) for name in _ROLES.values()])
    return Tokenizer(backend, {role: vocabulary[name] for role, name in _ROLES.items()})


def _read_words(path: Path) -> list[str]:
    """Return the list of words of a pickle, which may be inside an archive of torch."""
    content = read_file(path)
    try:
        if zipfile.is_zipfile(io.BytesIO(content)):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                content = archive.read(name)
        words = _find_list(content)
    except Exception as error:  # a damaged pickle raises many types
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise InputError(f"{path}: damaged, or no vocabulary of Transformer-XL ({reason[:60]}); restore it") from None
    if not words:
        raise InputError(f"{path}: has no list of words ({_KEY}); restore it from where it came from")
    return words


def _opcodes(content: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the opcodes of all pickles in a file with their arguments: early versions of torch wrote several."""
    file = io.BytesIO(content)
    while file.tell() < len(content):
        for opcode, argument, _ in pickletools.genops(file):
            yield opcode.name, argument


def _find_list(content: bytes) -> list[str]:
    """Return the strings of the list that follows the key."""
    memo: dict[int, str | None] = {}
    words: list[str] | None = None  # None: the key has not come yet
    last: str | None = None  # the string on top of the stack
    pending: list[str] = []  # strings since the last mark
    for name, argument in _opcodes(content):
        if name in PUT_OPCODES:
            memo[len(memo) if argument is None else int(argument)] = last
            continue
        is_string = name in STRING_OPCODES or (name in GET_OPCODES and memo.get(int(argument)) is not None)
        last = (str(argument) if name in STRING_OPCODES else memo[int(argument)]) if is_string else None
        if words is None:
            words = [] if last == _KEY else None
        elif is_string and last is not None:
            pending.append(last)
        elif name in ("APPENDS", "APPEND"):
            words += pending
            pending = []
        elif name == "MARK" and not pending:
            continue
        elif words and name != "MARK":
            break  # the value is over; what is pending is the next key
    return words or []
