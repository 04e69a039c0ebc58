"""A tokeniser that was trained here gives the same ids, segments, spans and texts in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_parity_tokenizer import MARKED, PAIRS, TEXTS, WORDS, corpus, put, read, reference

from qkv import families
from qkv.tokenization.hf import load_tokenizers, save_tokenizers
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer


@pytest.mark.parametrize("kind", ["character", "whitespace", "bpe", "byte_bpe", "wordpiece", "word_bpe", "unigram"])
def test_a_tokeniser_of_ours_gives_its_ids_in_transformers(kind: str, tmp_path: Path) -> None:
    ours = train_tokenizer(
        kind, [*TEXTS, *corpus(WORDS)], vocab_size=None if kind in ("character", "whitespace") else 400
    )
    save_tokenizers(tmp_path, ours, ours)
    theirs = reference(tmp_path)
    spelled = [] if kind == "unigram" else ["<s> the </s> <pad> <unk>"]  # there transformers reads them as special
    for text in (*TEXTS, *spelled):
        assert theirs(text).input_ids == ours.encode(text)
        assert theirs.decode(ours.encode(text), skip_special_tokens=True) == ours.decode(ours.encode(text))
    assert (theirs.pad_token_id, theirs.unk_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2, 3)
    again = load_tokenizers(tmp_path)
    assert again is not None
    assert again[0].special_ids == ours.special_ids
    assert again[0].encode_batch(TEXTS) == ours.encode_batch(TEXTS)


SIZES = {"bert": 300, "roberta": 400, "gpt2": 400, "gpt": 300, "t5": 250}


@pytest.fixture(scope="module", params=SIZES)
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer, Path]:
    """A family's name, a tokeniser that was trained here for it, and a folder that it was written to."""
    template = families.get_family(request.param).TOKENIZER_TEMPLATE
    ours = train_tokenizer(template.kind, [*TEXTS, *corpus(WORDS)], vocab_size=SIZES[request.param], template=template)
    folder = tmp_path_factory.mktemp(request.param)
    save_tokenizers(folder, ours, ours)
    return request.param, ours, folder


def test_a_tokeniser_trained_for_a_family_gives_its_ids_in_transformers(taught: tuple[str, Tokenizer, Path]) -> None:
    name, ours, folder = taught
    alone = reference(folder)
    put(folder, config={"model_type": families.get_family(name).HF_FORMAT.model_type})
    for theirs in (alone, reference(folder)):
        for text in (*TEXTS, MARKED[name]):
            assert ours.encode_plus(text, parse_special_tokens=True).ids == theirs(text).input_ids
            ids = ours.encode(text)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        for text in TEXTS:
            assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
        assert ours.vocab_size == len(theirs)


def test_a_tokeniser_trained_for_a_family_frames_as_it_does_in_transformers(
    taught: tuple[str, Tokenizer, Path],
) -> None:
    _, ours, folder = taught
    theirs = reference(folder)
    inputs = [*((text, "the dog") for text in TEXTS), *PAIRS]
    columns = map(list, zip(*inputs, strict=True))
    found = theirs(*columns, return_offsets_mapping=True, return_token_type_ids=True)
    for number, framed in enumerate(ours.encode_plus_batch(inputs)):
        assert framed.ids == found.input_ids[number]
        assert framed.token_type_ids == found.token_type_ids[number]
        assert framed.offsets == found.offset_mapping[number]


def test_a_tokeniser_trained_for_a_family_has_its_roles_in_transformers(taught: tuple[str, Tokenizer, Path]) -> None:
    _, ours, folder = taught
    theirs = reference(folder)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert (ours.pad_id, ours.mask_id) == (theirs.pad_token_id, theirs.mask_token_id)
    assert (ours.cls_id, ours.sep_id, ours.unk_id) == (theirs.cls_token_id, theirs.sep_token_id, theirs.unk_token_id)
    assert set(theirs.all_special_ids) == {ours.token_to_id(name) for name in ours.backend.special_tokens}


def test_a_tokeniser_trained_for_a_family_comes_back_from_both_forms(
    taught: tuple[str, Tokenizer, Path], tmp_path: Path
) -> None:
    name, ours, folder = taught
    ours.save(tmp_path / "one.json")
    for copy in (Tokenizer.load(tmp_path / "one.json"), read(name, folder)[0]):
        assert (copy.special_ids, copy.vocab_size) == (ours.special_ids, ours.vocab_size)
        for text in (*TEXTS, MARKED[name]):
            assert copy.encode_plus(text, "the") == ours.encode_plus(text, "the")
            assert copy.encode_plus(text, parse_special_tokens=True) == ours.encode_plus(
                text, parse_special_tokens=True
            )
