"""ELMo against the released test fixture of allennlp: a tiny model with its vectors of thirty sentences."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import pytest
import torch

import qkv
from qkv.nn import Ragged

FIXTURE = Path(__file__).parents[3] / "shared" / "data" / "pretrained" / "elmo_fixture"
NUM_STREAMS, WIDTH = 3, 16
pytestmark = pytest.mark.skipif(not FIXTURE.is_dir(), reason=f"the released fixture is not at {FIXTURE}")


@torch.no_grad()
def test_the_last_layer_equals_the_released_vectors() -> None:
    """The reference carries its state from sentence to sentence of each of three streams, in both directions."""
    bundle = qkv.load(FIXTURE)
    streams = json.loads((FIXTURE / "sentences.json").read_text())
    files = [h5py.File(FIXTURE / f"lm_embeddings_{stream}.hdf5") for stream in range(NUM_STREAMS)]
    memory = bundle.model.initial_memory(NUM_STREAMS)
    for step in range(len(streams[0])):
        encodings = [bundle.source_tokenizer.encode_plus(stream[step]) for stream in streams]
        source = Ragged.pack([torch.tensor(encoding.ids) for encoding in encodings])
        words = bundle.model.embed_inputs(source)
        values, memory = bundle.model.encoder.hidden_layers(words, memory)
        for hidden, file in zip(words.with_values(values[-1]).sequences(), files, strict=True):
            expected = torch.from_numpy(file[str(step)][()])  # [2, words, width]
            directions = hidden[1:-1].view(-1, 2, WIDTH).transpose(0, 1)  # without <S> and </S>
            torch.testing.assert_close(directions, expected, atol=1e-5, rtol=0)


def test_vectors_of_words_equal_the_released_ones() -> None:
    bundle = qkv.load(FIXTURE)
    words = (FIXTURE / "vocab_test.txt").read_text().splitlines()
    with h5py.File(FIXTURE / "elmo_token_embeddings.hdf5") as file:
        expected = torch.from_numpy(file["embedding"][()])
    begin, *_, end = qkv.embed(bundle, ["a"], pool="tokens", layers=0)[0]
    vectors = torch.cat(qkv.embed(bundle, words, pool="words", layers=0))
    vectors[words.index("<S>")], vectors[words.index("</S>")] = begin, end  # which no text spells
    torch.testing.assert_close(vectors[:, :WIDTH], expected[-len(words) :], atol=1e-5, rtol=0)
