"""The words of a released Transformer-XL: read from a pickle without running it."""

from __future__ import annotations

import pickle
import shutil
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch

import qkv
from qkv.checkpoints.transformer_xl_words import load_word_tokenizer
from qkv.errors import InputError

FIXTURE = Path(__file__).parents[2] / "parity" / "fixtures" / "transformer_xl" / "clusters"


def attributes(num_words):
    """Return the attributes of the tokenizer that the checkpoints pickle."""
    words = ["<eos>", "<unk>", *(f"w{i}" for i in range(num_words))]
    numbers = OrderedDict((word, index) for index, word in enumerate(words))
    return {"counter": Counter(words), "special": ["<eos>"], "min_freq": 0, "idx2sym": words, "sym2idx": numbers}


@pytest.mark.parametrize("num_words", [1, 2, 998, 999, 2500])
def test_the_words_are_those_of_the_pickle_in_every_form_that_torch_wrote(num_words, tmp_path):
    path, content = tmp_path / "vocab.bin", attributes(num_words)
    for write in (
        lambda: path.write_bytes(pickle.dumps(content)),
        lambda: torch.save(content, path),
        lambda: torch.save(content, path, _use_new_zipfile_serialization=False),
    ):
        write()
        tokenizer = load_word_tokenizer(path)
        assert tokenizer.vocab_size == num_words + 2
        assert tokenizer.encode("w0 w9999 <eos>") == [2, 1, 1]  # special tokens are not read from text


def test_a_checkpoint_with_a_vocabulary_continues_text(tmp_path):
    shutil.copytree(FIXTURE, tmp_path / "model")
    torch.save(attributes(48), tmp_path / "model" / "vocab.bin")
    bundle = qkv.load(tmp_path / "model")
    text = qkv.predict(bundle, ["w3 w40 w7"], qkv.GenerationConfig(min_new_tokens=4, max_new_tokens=4))[0].text
    assert text.startswith("w3 w40 w7 ")


class Attack:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"idx2sym": ["a", "b"]}, "has no word <unk>"),
        ({"idx2sym": ["<unk>", "<eos>", "a", "a"]}, "has a word twice"),
        ({"words": ["<unk>"]}, "has no list of words"),
        ({"bad": Attack()}, "has no list of words"),
    ],
    ids=["no unknown word", "duplicate", "no list", "code"],
)
def test_a_file_without_a_usable_list_is_refused_and_nothing_runs(content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vocab.bin").write_bytes(pickle.dumps(content))
    with pytest.raises(InputError, match=message):
        load_word_tokenizer(tmp_path / "vocab.bin")
    assert not (tmp_path / "executed").exists()
