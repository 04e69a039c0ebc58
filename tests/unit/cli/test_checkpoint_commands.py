"""The commands about checkpoints, as a person types them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import qkv
from qkv import families

sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))
from checkpoints import checkpoint

Run = Callable[..., tuple[int, str, str]]


def test_families_are_listed_with_sizes_heads_and_papers(run: Run) -> None:
    code, out, _ = run("families")
    assert code == 0
    for name in families.names():
        assert f"\n{name} " in out
    rows = {row["family"]: row for row in json.loads(run("families", "--json")[1])}
    assert rows["bert"]["presets"]["base"] == 109514298  # Devlin et al. 2019: 110M; with the head over a tied table
    assert {"masked_lm", "next_sentence", "sequence", "token", "span", "choice"} <= set(rows["bert"]["heads"])


def test_import_and_export_give_the_same_weights_back(run: Run, tmp_path: Path) -> None:
    theirs = checkpoint(tmp_path / "theirs")
    assert run("import", theirs, "-o", tmp_path / "own")[0] == 0
    assert (tmp_path / "own" / "spec.json").is_file()
    code, out, _ = run("export", tmp_path / "own", "-o", tmp_path / "back")
    assert (code, "bert" in out) == (0, True)
    before, after = qkv.load(theirs), qkv.load(tmp_path / "back")
    assert all(map(torch.equal, before.model.state_dict().values(), after.model.state_dict().values()))
    assert after.source_tokenizer.encode("the cat") == before.source_tokenizer.encode("the cat")


def test_import_under_a_new_head_says_what_is_fresh(run: Run, tmp_path: Path) -> None:
    theirs = checkpoint(tmp_path / "theirs")
    _, out, _ = run("import", theirs, "-o", tmp_path / "own", "--head", "token", "--labels", "B, I,O")
    assert "newly initialized: head.linear.bias, head.linear.weight" in out
    assert "ignored unexpected keys: cls.predictions" in out
    assert qkv.load(tmp_path / "own").model.spec.head.labels == ("B", "I", "O")


def test_a_folder_that_is_there_is_not_written_over(run: Run, tmp_path: Path) -> None:
    theirs = checkpoint(tmp_path / "theirs")
    code, out, err = run("import", theirs, "-o", theirs)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "already exists" in err


def test_a_model_without_a_hugging_face_form_is_not_exported(run: Run, tmp_path: Path) -> None:
    transformer = families.get_family("transformer")
    config = transformer.Config(d_model=8, heads=2, layers=1, d_ff=8)
    shape = qkv.build(transformer.make_spec(config, source_vocab_size=9, target_vocab_size=9))
    qkv.save(qkv.ModelBundle(shape), tmp_path / "own")
    code, _, err = run("export", tmp_path / "own", "-o", tmp_path / "out")
    assert code == 2
    assert "'transformer' has no Hugging Face form" in err
    assert not (tmp_path / "out").exists()


def test_predict_reads_texts_that_belong_together_with_a_tab_between(run: Run, tmp_path: Path) -> None:
    choices = checkpoint(tmp_path / "choice", "choice")
    code, out, _ = run("predict", choices, "the cat\tsat\ton\tthe mat", "--n-best", "3")
    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0
    assert sorted(row[-1] for row in rows) == ["on", "sat", "the mat"]
    assert sum(float(row[-2]) for row in rows) == pytest.approx(1.0, abs=1e-3)


def test_predict_prints_json_with_offsets(run: Run, tmp_path: Path) -> None:
    tags = checkpoint(tmp_path / "token", "token")
    found = json.loads(run("predict", tags, "the cat sat", "--json")[1])
    assert [(word["start"], word["end"]) for word in found["words"]] == [(0, 3), (4, 7), (8, 11)]


def test_embed_writes_an_array_or_lines(run: Run, tmp_path: Path) -> None:
    body = checkpoint(tmp_path / "body", "pooler")
    assert run("embed", body, "the cat", "a dog sat", "-o", tmp_path / "v.npy")[0] == 0
    array = np.load(tmp_path / "v.npy")
    assert array.shape == (2, 12)
    lines = [json.loads(line) for line in run("embed", body, "the cat", "a dog sat")[1].splitlines()]
    np.testing.assert_allclose([line["vector"] for line in lines], array, atol=1e-6)
    joined = json.loads(run("embed", body, "the cat", "--layers", "concat", "--pool", "words")[1])
    assert np.array(joined["vector"]).shape == (2, 24)  # two words; the model has two blocks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pool", "max"], "--pool must be mean, cls, tokens or words, not 'max'"),
        (["--layers", "all"], "--layers must be last, sum or concat, not 'all'"),
        (["-o", "v.txt"], ".npy, .jsonl"),
        (["-o", "v.npy", "--pool", "tokens"], ".jsonl"),
    ],
)
def test_embed_refuses_in_one_line(run: Run, tmp_path: Path, words: list[str], said: str) -> None:
    code, out, err = run("embed", checkpoint(tmp_path / "body", "pooler"), "a cat", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_pickle_with_code_in_it_ends_the_command_with_one_line(run: Run, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "theirs")
    (folder / "model.safetensors").unlink()
    torch.save({"run": print}, folder / "pytorch_model.bin")
    code, out, err = run("predict", folder, "a [MASK]")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pytorch_model.bin" in err
