"""Pretraining from bad input: one line that names file or key and says what to do, and nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_pretraining import recipe_of, run_all, weights, write_text

from qkv.checkpoints import load
from qkv.checkpoints.safetensors_io import load_tensors, save_tensors
from qkv.cli.commands import app
from qkv.errors import InputError
from qkv.recipe import read_recipe
from qkv.tokenization.hf import save_tokenizers
from qkv.tokenization.tokenizer import train_tokenizer
from qkv.train.checkpoint import BEST_WEIGHTS, LAST_CHECKPOINT

ENCODER_DECODER = """
data: {{train: {folder}/text.txt, format: blank_line_separated, hold_out: 0.2, max_length: 32}}
tokenizer: {{path: {folder}/tokeniser}}
objective: {objective}
model: {{family: {family}, {model}}}
train: {{max_steps: 2, batch_tokens: 512, log_every: 1, warmup_steps: 1}}
validation: {{every_steps: 2, max_tokens: 300, num_samples: 1}}
"""
SMALL = {
    "transformer": "size: tiny, d_model: 16, heads: 2, layers: 1, d_ff: 32, max_length: 64",
    "rnn": "size: small, d_model: 12, hidden_size: 16, layers: 1, max_length: 64",
    "marian": "size: opus, d_model: 16, heads: 2, decoder_heads: 2, layers: 1, decoder_layers: 1, d_ff: 32, "
    "decoder_d_ff: 32, max_length: 64",
}


def written(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def said_of(family: str, folder: Path, *changes: str) -> str:
    """The one line of a start that has to fail before it has written anything."""
    with pytest.raises(InputError) as found:
        run_all(recipe_of(family, folder, *changes), folder / "run")
    assert not (folder / "run").exists()
    assert "\n" not in str(found.value)
    return str(found.value)


def a_tokeniser(folder: Path, like: str) -> None:
    from qkv.families import get_family

    template = get_family(like).TOKENIZER_TEMPLATE
    made = train_tokenizer(
        template.kind, write_text(folder).read_text().splitlines(), vocab_size=300, template=template
    )
    save_tokenizers(folder / "tokeniser", made, made)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("empty.txt", "", "data.train: {}: no text to train on; add documents"),
        ("blank.txt", " \n\n  \n", "data.train: {}: no text to train on; add documents"),
        ("latin.txt", "Füße\n".encode("latin-1"), "{}:1: byte 2 of the line, 0xFC, is not UTF-8"),
        ("mixed.txt", "Füße\n".encode() * 3 + "Füße\n".encode("latin-1"), "{}:4: byte 2 of the line, 0xFC, is not"),
        (
            "one.txt",
            "One document.\nIt has two lines.\n",
            "no document is held out, since documents are held out as a whole",
        ),
        ("packed.txt.gz", "not packed", "{}:1: the .gz file is broken"),
    ],
)
@pytest.mark.parametrize("stream", ["false", "true"])
def test_text_that_cannot_be_trained_on_is_named(name, text, said, stream, tmp_path):
    path = written(tmp_path, name, text)
    assert said.format(path) in said_of("roberta", tmp_path, f"data.train={path}", f"data.streaming={stream}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["data.valid={empty}"], "data.valid: {empty}: has no text"),
        (["data.valid={short}"], "held-out text (data.valid, data.hold_out): next-sentence pairs need two documents"),
        (["data.valid={short}", "objective.mlm={mask_prob: 0.01}"], "the held-out text has no token to predict"),
        (["data.hold_out=0.9999"], "hold out less (data.hold_out)"),
        (["data.train=[]"], "data.train: is empty"),
        (["data.train=''"], "data.train: is empty"),
        (["data.train=3"], "key 'data.train' cannot be 3"),
        (["model.heads=5"], "model: attention: a width of 32 does not divide into 5 heads; see model.d_model"),
        (["model.size=[1, 2]"], "model.size: bert has no size '[1, 2]'"),
        (["objective=5"], "key 'objective' cannot be 5: it is a section of keys: clm, mlm, plm, bilm,"),
        (["objective.mlm.mask_prob=-1"], "mask_prob is -1.0"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_by_its_key(changes, said, tmp_path):
    files = {"empty": written(tmp_path, "empty.txt", ""), "short": written(tmp_path, "short.txt", "Hi.\n")}
    given = [change.format(**files) if "{empty}" in change or "{short}" in change else change for change in changes]
    assert said.format(**files) in said_of("bert", tmp_path, *given)


@pytest.mark.parametrize(
    ("family", "like", "objective", "said"),
    [
        ("bert", "gpt2", "mlm", "tokenizer.path: this vocabulary has no mask token"),
        ("bart", "bart", "span_corruption", "tokenizer.path: this vocabulary has no sentinels"),
        (
            "gpt",
            "gpt",
            "clm",
            "data.chunking: packed documents need an end token between them, which this tokenizer lacks",
        ),
        ("transformer", "gpt", "denoising", "tokenizer.path: this tokenizer has no BOS token"),
    ],
)
def test_a_tokeniser_that_does_not_fit_is_refused_with_one_that_does(family, like, objective, said, tmp_path):
    a_tokeniser(tmp_path, like)
    mini = family if family in ("bert", "bart") else "gpt2"
    own = [f"tokenizer={{path: {tmp_path / 'tokeniser'}}}", f"objective={objective}"]
    if family in ("gpt", "transformer"):
        own += [f"model={{family: {family}, size: {'base' if family == 'gpt' else 'tiny'}, max_length: 64}}"]
    assert said in said_of(mini, tmp_path, *own)


@pytest.mark.parametrize("family", ["transformer", "rnn", "marian"])
@pytest.mark.parametrize(("like", "objective"), [("t5", "span_corruption"), ("bart", "denoising")])
def test_a_family_without_a_vocabulary_of_its_own_takes_another_ones(family, like, objective, tmp_path):
    """T5's has no token to begin with: its decoder begins with padding, and so do these."""
    a_tokeniser(tmp_path, like)
    path = tmp_path / "recipe.yaml"
    path.write_text(ENCODER_DECODER.format(folder=tmp_path, objective=objective, family=family, model=SMALL[family]))
    assert run_all(read_recipe(path), tmp_path / "run")[-1].kind == "final"
    loaded = load(tmp_path / "run")
    begins = "pad_id" if like == "t5" or family == "marian" else "bos_id"
    assert loaded.model.spec.bos_id == getattr(loaded.source_tokenizer, begins)


def test_a_model_that_no_memory_holds_is_said_before_anything_is_written(tmp_path, monkeypatch):
    def build(_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried …")

    monkeypatch.setattr("qkv.train.workloads.pretraining.build", build)
    assert "model: does not fit into memory; make it smaller" in said_of("bert", tmp_path)


def test_noise_that_makes_a_text_too_long_for_the_model_names_its_key(tmp_path):
    changes = ["objective={denoising: {infill_ratio: 0.9, poisson_lambda: 0.1}}", "data.max_length=64"]
    assert "objective.denoising.poisson_lambda" in said_of("bart", tmp_path, *changes)


def test_a_file_whose_name_tells_its_format_is_scored_in_that_format(tmp_path, capsys):
    run_all(recipe_of("gpt2", tmp_path), tmp_path / "run")  # trained on documents between blank lines
    documents = (tmp_path / "text.txt").read_text().strip().split("\n\n")
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    found = []
    for name in (written(tmp_path, "held.jsonl", lines), str(tmp_path / "text.txt")):
        capsys.readouterr()
        app(["eval", str(tmp_path / "run"), "--data", name, "--json", "--device", "cpu"], standalone_mode=False)
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    with pytest.raises(InputError, match="--format is for the file of --data"):
        app(["eval", str(tmp_path / "run"), "--format", "line_per_document"], standalone_mode=False)


def test_the_cost_of_a_recipe_is_told_without_its_text(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    text = ENCODER_DECODER.format(
        folder=tmp_path, objective="span_corruption", family="t5", model="size: small, max_length: 64"
    )
    path.write_text(text.replace(f"path: {tmp_path}/tokeniser", "vocab_size: 8000"))
    app(["cost", str(path)], standalone_mode=False)
    assert "parameters" in capsys.readouterr().out


def test_a_range_test_into_a_folder_that_cannot_be_is_one_line(tmp_path, monkeypatch):
    from qkv.train.perf.lr_range_test import RangeTest

    found = RangeTest(steps=20)
    found.learning_rates, found.losses = [10.0 ** (n - 20) for n in range(20)], [1.0] * 20
    monkeypatch.setattr("qkv.train.perf.lr_range_test.lr_range_test", lambda *_, **__: found)
    recipe_of("gpt2", tmp_path)
    mini = Path(__file__).parents[3] / "recipes" / "pretrain-gpt2-mini.yaml"
    with pytest.raises(InputError, match="cannot be saved"):
        app(["train", str(mini), "--find-lr", "-o", f"{tmp_path}/text.txt/run"], standalone_mode=False)


@pytest.mark.parametrize("name", [LAST_CHECKPOINT, BEST_WEIGHTS, "recipe.yaml", "source.tokenizer.json"])
def test_a_damaged_file_of_a_run_is_named_and_left_alone(name, tmp_path):
    recipe = recipe_of("gpt2", tmp_path, "train.keep_checkpoint=true")
    run_all(recipe, tmp_path / "run")
    whole = weights(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()  # as a kill before the last moment leaves it
    path = tmp_path / "run" / name
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 3])
    kept = {other: other.read_bytes() for other in (tmp_path / "run").iterdir()}
    with pytest.raises(InputError, match=name) as found:
        run_all(recipe, tmp_path / "run")
    assert "\n" not in str(found.value)
    assert {other: other.read_bytes() for other in (tmp_path / "run").iterdir()} == kept
    path.write_bytes(good)
    run_all(recipe, tmp_path / "run")
    assert weights(tmp_path / "run") == whole


@pytest.mark.parametrize("name", ["spec.json", "log.jsonl"])
def test_what_a_run_can_write_again_may_be_damaged(name, tmp_path):
    recipe = recipe_of("gpt2", tmp_path, "train.keep_checkpoint=true")
    run_all(recipe, tmp_path / "run")
    whole = weights(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    (tmp_path / "run" / name).write_bytes(b"\xff\x00{")
    run_all(recipe, tmp_path / "run")
    assert weights(tmp_path / "run") == whole
    load(tmp_path / "run")


def test_what_a_kill_left_of_a_checkpoint_is_cleared_by_the_next_one(tmp_path):
    import torch

    left = tmp_path / ".last.safetensors.parts"  # where the library writes under a random name
    left.mkdir()
    (left / ".tmpXqk1").write_bytes(b"half a checkpoint")
    save_tensors(tmp_path / LAST_CHECKPOINT, {"a": torch.ones(3)})
    assert [path.name for path in tmp_path.iterdir()] == [LAST_CHECKPOINT]
    assert load_tensors(tmp_path / LAST_CHECKPOINT)[0]["a"].sum() == 3


def test_a_saved_model_has_the_rights_of_any_new_file(tmp_path):
    import torch

    save_tensors(tmp_path / "a.safetensors", {"a": torch.ones(3)})
    (tmp_path / "b").touch()
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "b").stat().st_mode
