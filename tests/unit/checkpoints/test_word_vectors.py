"""Neighbors and analogies of word vectors, and embeddings that start from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import qkv
from qkv.checkpoints import ModelBundle, save
from qkv.checkpoints.vector_files import read_vectors, write_vectors
from qkv.checkpoints.word_vectors import load_word_vectors, parse_query
from qkv.cli.commands import app
from qkv.errors import InputError
from qkv.families import get_family
from qkv.nn import build
from qkv.tokenization.tokenizer import train_tokenizer

WORDS = ["man", "woman", "king", "queen", "apple"]
VECTORS = np.array([[2, 0, 0], [0, 2, 0], [1, 0, 1], [0, 1, 1], [-3, 1, 0]], np.float32)


@pytest.fixture
def file(tmp_path: Path) -> str:
    write_vectors(tmp_path / "v.bin", WORDS, VECTORS)
    return str(tmp_path / "v.bin")


def test_neighbors_are_in_the_order_of_their_cosine(file: str) -> None:
    neighbors = load_word_vectors(file).similar("king", 4)
    unit = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    cosines = unit @ unit[2]
    expected = [row for row in np.argsort(-cosines) if row != 2]
    assert [neighbor.word for neighbor in neighbors] == [WORDS[row] for row in expected]
    assert [neighbor.cosine for neighbor in neighbors] == pytest.approx([cosines[row] for row in expected])


def test_an_analogy_leaves_out_its_own_words(file: str) -> None:
    assert load_word_vectors(file).similar("king - man + woman", 1)[0].word == "queen"


def test_a_query_is_words_with_plus_and_minus_between_them() -> None:
    assert parse_query("a - b + c") == [(1, "a"), (-1, "b"), (1, "c")]
    for query in ("", "a b", "a -", "- a"):
        with pytest.raises(InputError, match="expected a word, or words with"):
            parse_query(query)


def test_a_query_whose_vectors_cancel_out_is_refused(file: str) -> None:
    vectors = load_word_vectors(file)
    word = vectors.words[0]
    with pytest.raises(InputError, match="add up to zero"):
        vectors.similar(f"{word} - {word}")


def make_run(folder: Path) -> str:
    bert = get_family("bert")
    tokenizer = train_tokenizer("wordpiece", WORDS * 3, vocab_size=60, template=bert.TOKENIZER_TEMPLATE)
    config = bert.Config(d_model=8, heads=2, layers=1, d_ff=8, max_length=8)
    model = build(bert.make_spec(config, source_vocab_size=tokenizer.vocab_size))
    save(ModelBundle(model, tokenizer, tokenizer), folder)
    return str(folder)


def test_token_embeddings_of_any_model_have_neighbors_but_special_tokens(tmp_path: Path) -> None:
    vectors = load_word_vectors(make_run(tmp_path / "run"))
    neighbors = vectors.similar("king", 1000)
    assert not {"[CLS]", "[MASK]", "[PAD]", "king"} & {neighbor.word for neighbor in neighbors}
    with pytest.raises(InputError, match=r"has no vector of 'xylophone'"):
        vectors.similar("xylophone")


def test_the_command_prints_neighbors_json_and_a_plot(file: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["similar", file, "king - man + woman", "-n", "1"])
    assert result.output == "queen  0.959\n"
    result = CliRunner().invoke(app, ["similar", file, "king", "apple", "-n", "2", "--json"])
    lines = [json.loads(line) for line in result.output.splitlines()]
    assert [line["query"] for line in lines] == ["king", "apple"]
    assert lines[0]["neighbors"][0] == {"word": "man", "cosine": pytest.approx(0.7071, abs=1e-4)}
    picture = tmp_path / "plot.png"
    result = CliRunner().invoke(app, ["similar", file, *WORDS, "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_needs_three_words(file: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["similar", file, "king", "man", "--plot", str(tmp_path / "plot.png")])
    assert isinstance(result.exception, InputError)
    assert "give 3 or more" in str(result.exception)


def test_the_embeddings_of_a_model_are_exported_as_word_vectors(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    result = CliRunner().invoke(app, ["export", run, "--output", str(tmp_path / "v.txt")])
    assert result.exit_code == 0, result.output
    words, vectors = read_vectors(tmp_path / "v.txt")
    bundle = qkv.load(run)
    assert bundle.source_tokenizer is not None
    weight, king = bundle.model.front_end.token_weight, bundle.source_tokenizer.token_to_id("king")
    assert weight is not None
    assert king is not None
    assert torch.equal(torch.from_numpy(vectors[words.index("king")]), weight[king])
    assert "[CLS]" not in words


# ---- initial embeddings ---------------------------------------------------------------------------------------------


def make_recipe(folder: Path, embeddings: str, **model: Any) -> dict[str, Any]:
    rows = [f"{word} fruit,{'yes' if word == 'apple' else 'no'}" for word in WORDS * 4]
    (folder / "data.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    return {
        "name": "fruit",
        "task": "text_classification",
        "data": {"format": "csv", "train": str(folder / "data.csv"), "valid": str(folder / "data.csv")},
        "model": {"family": "bow", "d_model": 3, "embeddings": embeddings} | model,
        "tokenizer": {"kind": "word", "vocab_size": 50},
        "train": {"max_steps": 1, "batch_size": 8, "learning_rate": 0.0},
    }


def test_embeddings_of_a_recipe_start_from_a_file(file: str, tmp_path: Path) -> None:
    run = qkv.fit(make_recipe(tmp_path, file), tmp_path / "run").run(progress=False)
    notes = [note for record in run.records for note in record.samples]
    assert f"embeddings: 5 of 10 tokens have a vector in {file}" in notes
    bundle = qkv.load(tmp_path / "run")
    assert bundle.source_tokenizer is not None
    weight = bundle.model.front_end.token_weight
    assert weight is not None
    for word, vector in zip(WORDS, VECTORS, strict=True):
        row = bundle.source_tokenizer.token_to_id(word)
        assert row is not None
        np.testing.assert_array_equal(weight[row].detach().numpy(), vector)
    fruit = bundle.source_tokenizer.token_to_id("fruit")
    assert fruit is not None
    assert weight[fruit].abs().sum() > 0


def test_vectors_of_another_width_or_of_other_words_are_refused(file: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"its vectors have 3 numbers, and the model's embeddings 4; set model\.d_mod"):
        qkv.fit(make_recipe(tmp_path, file, d_model=4), tmp_path / "run").run(progress=False)
    write_vectors(tmp_path / "other.vec", ["maison"], VECTORS[:1])
    with pytest.raises(InputError, match="has no word of the vocabulary"):
        qkv.fit(make_recipe(tmp_path, str(tmp_path / "other.vec")), tmp_path / "run").run(progress=False)
    with pytest.raises(InputError, match=r"model\.embeddings' is a file of word vectors, not 3"):
        qkv.fit(make_recipe(tmp_path, 3), tmp_path / "run")  # type: ignore[arg-type]
