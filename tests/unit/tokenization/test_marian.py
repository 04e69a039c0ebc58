"""Marian's two SentencePiece models over one vocabulary."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from tokenizer_folders import must_refuse, put

from qkv import families
from qkv.tokenization.hf import load_tokenizers


def marian(folder: Path) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    names = ["</s>", "<unk>", ">>fra<<"]
    for side in ("source", "target"):
        model = io.BytesIO()
        train = sentencepiece.SentencePieceTrainer.train
        lines = iter(["the café garden in Zürich", "a garden in the night"] * 20)
        train(sentence_iterator=lines, model_writer=model, vocab_size=60, hard_vocab_limit=False, minloglevel=2)
        (folder / f"{side}.spm").write_bytes(model.getvalue())
        found = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        names += [found.id_to_piece(number) for number in range(3, found.get_piece_size())]
    return put(folder, vocab={name: number for number, name in enumerate([*dict.fromkeys(names), "<pad>"])})


def test_marian_spans_are_the_words_that_a_person_would_mark(tmp_path: Path) -> None:
    found = load_tokenizers(marian(tmp_path), None, families.tokenizer_templates())
    assert found is not None
    text = ">>fra<<  the  café 🙂 garden"
    framed = found[0].encode_plus(text, "Zürich")
    spelled: dict[tuple[int, int], str] = {}
    for (first, last), word, part in zip(framed.offsets, framed.word_ids, framed.sequence_ids, strict=True):
        if part is not None and word is not None:
            spelled[part, word] = spelled.get((part, word), "") + (text, "Zürich")[part][first:last]
    assert list(spelled.values()) == [">>fra<<", "the", "café", "🙂", "garden", "Zürich"]
    assert (framed.ids[0], framed.ids[-1]) == (2, found[0].eos_id)
    assert (framed.sequence_ids[-1], framed.word_ids[-1], framed.offsets[-1]) == (None, None, (0, 0))
    assert found[0].first_unknown(text) == "🙂"
    assert found[0].display_tokens("🙂")[-1] == "🙂"


def test_marian_without_sentencepiece_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marian(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    must_refuse(tmp_path, re.escape("source.spm: reading it needs sentencepiece; pip install 'qkv[sentencepiece]'"))


def test_half_a_marian_folder_is_named(tmp_path: Path) -> None:
    marian(tmp_path)
    content = (tmp_path / "target.spm").read_bytes()
    (tmp_path / "target.spm").write_bytes(content[: len(content) // 2])
    must_refuse(tmp_path, "target.spm: damaged")
    (tmp_path / "target.spm").unlink()
    must_refuse(tmp_path, "but no target.spm")
    (tmp_path / "target.spm").write_bytes(content)
    must_refuse(put(tmp_path, vocab={"<unk>": 0}), "vocab.json: has no '</s>'")
