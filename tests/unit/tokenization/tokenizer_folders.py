"""Small folders with tokenizers as in checkpoints, and helpers that check how they are read and refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from qkv import families
from qkv.errors import InputError
from qkv.tokenization.hf import load_tokenizers
from qkv.tokenization.template import Template
from qkv.tokenization.tokenizer import Tokenizer

BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "mask", "[", "]"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def put(folder: Path, **tables: object) -> Path:
    for name, table in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(table), encoding="utf-8")
    return folder


def bert(folder: Path, words: list[str] = BERT, **options: object) -> Path:
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return put(folder, tokenizer_config=options) if options else folder


def bpe(folder: Path, specials: list[str], merges: str = "#version: 0.2\nt h\nth e\n", *more: str) -> Path:
    names = [*specials, *BYTES, "th", "the", *more]
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    return put(folder, vocab={name: number for number, name in enumerate(names)})


def varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(high) if high else bytes([low])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def spm(*pieces: tuple[str, float, int], kind: int = 1, charsmap: bytes = b"") -> bytes:
    """Return the bytes of a SentencePiece model."""
    start = [("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2)]
    written = b""
    for text, score, sort in (*start, *pieces):
        number = varint(2 << 3 | 5) + struct.pack("<f", score)
        written += field(1, field(1, text.encode()) + number + varint(3 << 3) + varint(sort))
    return written + field(2, varint(3 << 3) + varint(kind)) + field(3, field(2, charsmap))


def pieces(folder: Path, content: bytes | None = None) -> Path:
    letters = [("▁", -3.0, 1), ("▁the", -2.0, 1), *((letter, -5.0, 1) for letter in "thecasx</>")]
    (folder / "spiece.model").write_bytes(spm(*letters) if content is None else content)
    return folder


def read(folder: Path, template: Template | None = None) -> Tokenizer:
    found = load_tokenizers(folder, template, families.tokenizer_templates())
    assert found is not None
    assert found[0] is found[1]
    return found[0]


def must_refuse(folder: Path, complaint: str, template: Template | None = None) -> None:
    with pytest.raises(InputError, match=complaint) as problem:
        load_tokenizers(folder, template, families.tokenizer_templates())
    assert "\n" not in str(problem.value)
    assert str(folder) in str(problem.value)
