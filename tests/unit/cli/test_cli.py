"""The command line as people use it: what it prints, and for every slip one line and exit code 2."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "train"))
from words import write_task

from qkv.checkpoints.safetensors_io import load_tensors, save_tensors
from qkv.cli import main
from qkv.recipe import read_recipe
from qkv.tokenization.tokenizer import train_tokenizer
from qkv.train.fit import fit


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with data, a recipe and a trained run of each family."""
    folder = tmp_path_factory.mktemp("home")
    for family in ("transformer", "rnn"):
        recipe = write_task(folder, family)
        list(fit(read_recipe(recipe), folder / family, device="cpu"))
    return folder


def qkv(*words: object, cwd: Path | None = None, stdin: str | None = None, **options: object):
    """The command in this process, which has torch at hand; in one of its own where the system is to interfere."""
    if options:
        return in_a_process(*words, cwd=cwd, stdin=stdin, **options)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["qkv", *map(str, words)])
        patch.setattr(sys, "stdin", io.StringIO(stdin or ""))
        patch.setenv("COLUMNS", "200")
        if cwd is not None:
            patch.chdir(cwd)
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def in_a_process(*words: object, cwd: Path | None = None, stdin: str | None = None, **options: object):
    command = [sys.executable, "-m", "qkv.cli", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=cwd, input=stdin or "", capture_output=True, text=True, env=environment, check=False, **options
    )


def must_refuse(done: subprocess.CompletedProcess, *said: str) -> None:
    """One line on stderr that says it all, nothing on stdout, exit code 2."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for words in said:
        assert words in done.stderr, (words, done.stderr)


# ---- what works -----------------------------------------------------------------------------------------------------


def test_predict_gives_one_line_an_input_from_words_file_and_stdin(home, tmp_path):
    (tmp_path / "in.txt").write_text("bad\ncafe\n")
    words = qkv("predict", home / "transformer", "bad", "cafe")
    file = qkv("predict", home / "transformer", "--file", tmp_path / "in.txt")
    stdin = qkv("predict", home / "transformer", "-", stdin="bad\ncafe\n")
    assert words.returncode == 0, words.stderr
    assert len(words.stdout.splitlines()) == 2
    assert words.stdout == file.stdout == stdin.stdout


def test_predict_gives_the_n_best_with_falling_scores(home):
    done = qkv("predict", home / "rnn", "bad", "--n-best", 3, "--length-penalty", 0)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    scores = [float(row[1]) for row in rows]
    assert [row[0] for row in rows] == ["bad"] * 3
    assert len({row[2] for row in rows}) == 3
    assert scores == sorted(scores, reverse=True)


def test_predict_samples_the_same_for_the_same_seed(home):
    one, two = (qkv("predict", home / "rnn", "bad", "--sample", "--seed", 4, "--top-k", 5) for _ in range(2))
    assert one.returncode == 0, one.stderr
    assert one.stdout == two.stdout


def test_predict_samples_the_same_however_many_lines_are_read_at_once(home, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("bad\n" * 7)
    words = ("predict", home / "rnn", "--file", tmp_path / "in.txt", "--sample", "--seed", 4)
    whole = qkv(*words)
    monkeypatch.setattr("qkv.cli.input_stream._FIRST_WINDOW_SIZES", (2, 3))
    assert qkv(*words).stdout == whole.stdout
    assert len(set(whole.stdout.splitlines())) > 1


def test_eval_scores_the_recipes_test_part_and_any_other_file(home):
    by_recipe = qkv("eval", home / "transformer", "--json")
    by_file = qkv("eval", home / "transformer", "--data", home / "test.dict", "--json")
    assert by_recipe.returncode == 0, by_recipe.stderr
    assert json.loads(by_recipe.stdout) == json.loads(by_file.stdout)
    assert set(json.loads(by_file.stdout)) == {"token_error_rate", "sequence_error_rate", "examples"}


def test_eval_gives_the_loss_with_and_without_a_teacher_for_both_families(home):
    for family in ("transformer", "rnn"):
        found = json.loads(qkv("eval", home / family, "--free-running", "--json").stdout)
        assert found["loss"] > 0
        assert found["loss_free_running"] > 0


def test_eval_writes_what_was_predicted(home, tmp_path):
    done = qkv("eval", home / "rnn", "--output", tmp_path / "out.tsv")
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines()]
    assert all(len(row) >= 3 for row in rows)


@pytest.mark.parametrize("family", ["transformer", "rnn"])
def test_look_draws_an_alignment(home, tmp_path, family):
    done = qkv("plot", home / family, "bad", "-o", tmp_path / "map.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_look_draws_several_words_and_single_heads(home, tmp_path):
    assert qkv("plot", home / "transformer", "bad", "cafe", "-o", tmp_path / "a.png").returncode == 0
    assert qkv("plot", home / "transformer", "bad", "--heads", "each", "-o", tmp_path / "b.svg").returncode == 0
    assert (tmp_path / "b.svg").read_text().lstrip().startswith("<?xml")


def test_cost_of_a_recipe_and_of_its_run_count_the_same_parameters(home):
    recipe = qkv("cost", home / "transformer.yaml", "-m", 8, "-n", 8)
    run = qkv("cost", home / "transformer", "-m", 8, "-n", 8)
    assert recipe.returncode == 0, recipe.stderr
    assert recipe.stdout == run.stdout
    assert "4·M·N·k" in run.stdout


def test_cost_of_a_recipe_needs_no_data_where_vocabularies_are_given(home):
    done = qkv("cost", home / "rnn.yaml", "data.train=nowhere.dict", "--vocab-size", "30,40")
    assert done.returncode == 0, done.stderr


def test_a_trained_run_is_said_to_be_trained(home):
    done = qkv("train", home / "rnn.yaml", "-o", home / "rnn")
    assert "already trained" in done.stdout


def test_tensorboard_writes_events(home, tmp_path):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    done = qkv("train", home / "rnn.yaml", "train.max_steps=3", "-o", tmp_path / "run", "--tensorboard")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_missing_data_file_is_named(home, tmp_path):
    must_refuse(qkv("train", home / "rnn.yaml", "data.train=gone.dict", "-o", tmp_path / "r"), "gone.dict")
    assert not (tmp_path / "r").exists()


def test_an_empty_data_file_is_named(home, tmp_path):
    (tmp_path / "empty.dict").write_text("")
    done = qkv("train", home / "rnn.yaml", f"data.train={tmp_path}/empty.dict", "-o", tmp_path / "r")
    must_refuse(done, "empty.dict")


def test_two_files_of_different_length_are_counted(home, tmp_path):
    (tmp_path / "a").write_text("x\ny\n")
    (tmp_path / "b").write_text("x\n")
    changes = ["data.format=aligned", f"data.train=[{tmp_path}/a, {tmp_path}/b]"]
    done = qkv("train", home / "rnn.yaml", *changes, "-o", tmp_path / "r")
    must_refuse(done, f"{tmp_path}/a", "2 lines", "1")


def test_a_line_of_the_wrong_shape_is_named_by_its_number(home, tmp_path):
    (tmp_path / "bad.dict").write_text("BAD  B AA D\nALONE\n")
    must_refuse(qkv("eval", home / "rnn", "--data", tmp_path / "bad.dict"), "bad.dict:2")


def test_an_unknown_recipe_key_gets_the_nearest_one(home, tmp_path):
    must_refuse(qkv("train", home / "rnn.yaml", "train.stepz=1", "-o", tmp_path / "r"), "train.stepz", "steps")


def test_a_token_never_seen_is_named_with_its_place(home, tmp_path):
    must_refuse(qkv("predict", home / "rnn", "b@d"), "'@'", "never seen")
    (tmp_path / "in.txt").write_text("bad\nb@d\n")
    done = qkv("predict", home / "rnn", "--file", tmp_path / "in.txt")
    assert done.returncode == 2
    assert "in.txt:2" in done.stderr
    assert "'@'" in done.stderr
    assert len(done.stdout.splitlines()) == 1  # of the line before
    assert qkv("predict", home / "rnn", "b@d", "--on-unknown", "replace").returncode == 0


def test_validation_data_with_a_token_never_seen_is_refused_before_training(home, tmp_path):
    (tmp_path / "v.dict").write_text("BAD  B AA D\nZOO  B\n")
    done = qkv("train", home / "rnn.yaml", f"data.valid={tmp_path}/v.dict", "-o", tmp_path / "r")
    must_refuse(done, "v.dict:2", "'Z'")


def test_an_input_over_the_maximum_length_is_refused_or_truncated_as_chosen(home):
    long = "bad" * 20
    must_refuse(qkv("predict", home / "transformer", long), "60 tokens", "at most 23")
    assert qkv("predict", home / "transformer", long, "--on-too-long", "truncate").returncode == 0


def test_a_training_pair_over_the_maximum_length_is_named(home, tmp_path):
    (tmp_path / "t.dict").write_text("BAD  B AA D\n" + "BAD" * 20 + "  B\n")
    done = qkv("train", home / "rnn.yaml", f"data.train={tmp_path}/t.dict", "-o", tmp_path / "r")
    must_refuse(done, "t.dict:2", "60 and 1 tokens")


def copy_of(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "copy"))


def test_a_damaged_checkpoint_is_named(home, tmp_path):
    run = copy_of(home / "rnn", tmp_path)
    weights = run / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    must_refuse(qkv("predict", run, "bad"), "model.safetensors", "damaged")


def test_a_damaged_training_state_is_named_and_kept(home, tmp_path):
    run = copy_of(home / "rnn", tmp_path)
    (run / "model.safetensors").unlink()
    (run / "last.safetensors").write_bytes(b"not a checkpoint")
    must_refuse(qkv("train", home / "rnn.yaml", "-o", run), "last.safetensors", "damaged")
    assert (run / "last.safetensors").read_bytes() == b"not a checkpoint"


def test_a_foreign_checkpoint_is_named_by_what_does_not_fit(home, tmp_path):
    run = copy_of(home / "rnn", tmp_path)
    shutil.copy(home / "transformer" / "model.safetensors", run)
    must_refuse(qkv("predict", run, "bad"), "model.safetensors", "lacks 'encoder.blocks.1'")


def test_a_checkpoint_of_another_shape_is_named(home, tmp_path):
    run = copy_of(home / "rnn", tmp_path)
    tensors, _ = load_tensors(run / "model.safetensors")
    name = next(iter(tensors))
    save_tensors(run / "model.safetensors", tensors | {name: torch.zeros(2, 3)})
    must_refuse(qkv("predict", run, "bad"), name, "[2, 3]")


@pytest.mark.parametrize("spec", ["", "{", '{"type": "Nonsense"}', '{"type": "Model", "family": 3}', "[1]"])
def test_a_damaged_spec_is_named(home, tmp_path, spec):
    run = copy_of(home / "rnn", tmp_path)
    (run / "spec.json").write_text(spec)
    must_refuse(qkv("predict", run, "bad"), "spec.json")


def test_a_damaged_tokeniser_is_named(home, tmp_path):
    run = copy_of(home / "rnn", tmp_path)
    (run / "source.tokenizer.json").write_text("{}")
    must_refuse(qkv("predict", run, "bad"), "source.tokenizer.json")


def test_a_tokeniser_of_another_run_is_refused(home, tmp_path):
    run = copy_of(home / "rnn", tmp_path)
    train_tokenizer("character", ["bad"]).save(run / "source.tokenizer.json")
    must_refuse(qkv("predict", run, "bad"), "source.tokenizer.json", "tokens, the model")


def test_a_folder_that_holds_no_model_is_named(tmp_path):
    must_refuse(qkv("predict", tmp_path, "bad"), "not a model folder")
    must_refuse(qkv("predict", tmp_path / "gone", "bad"), "gone", "no such folder")
    must_refuse(qkv("eval", tmp_path / "gone"), "gone", "no such folder")


def test_an_unfinished_run_predicts_with_its_best_weights_and_says_so(home, tmp_path):
    run = copy_of(home / "rnn", tmp_path)
    (run / "model.safetensors").rename(run / "best.safetensors")
    done = qkv("predict", run, "bad")
    assert done.returncode == 0
    assert done.stdout == qkv("predict", home / "rnn", "bad").stdout
    assert done.stderr == f"qkv: warning: {run}: training has not finished; using its best weights so far\n"


def test_a_model_without_attention_has_nothing_to_see(home, tmp_path):
    run = tmp_path / "run"
    list(fit(read_recipe(home / "rnn.yaml", ["model.attention=none", "train.max_steps=2"]), run, device="cpu"))
    must_refuse(qkv("plot", run, "bad", "-o", tmp_path / "m.png"), "has no attention over its input")
    assert not (tmp_path / "m.png").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plot", "{rnn}", "bad", "-o", "m.gif"), "m.gif"),
        (("plot", "{rnn}", "bad", "--layer", "decoder.attentoin", "-o", "m.png"), "did you mean 'decoder.attention'"),
        (("plot", "{rnn}", "bad", "--heads", "x", "-o", "m.png"), "--heads"),
        (("plot", "{rnn}", "bad", "--heads", "7", "-o", "m.png"), "7"),
        (("predict", "{rnn}", "bad", "--num-beams", "0"), "beams"),
        (("predict", "{rnn}", "bad", "--on-too-long", "cut"), "--on-too-long"),
        (("predict", "{rnn}", "bad", "--device", "tpu"), "--device"),
        (("predict", "{rnn}", "bad", "--file", "x"), "not both"),
        (("predict", "{rnn}", ""), "empty"),
        (("cost", "{rnn}", "train.max_steps=3"), "is a trained model"),
        (("cost", "gone.yaml"), "gone.yaml"),
        (("cost", "{rnn}.yaml", "--vocab-size", "many"), "--vocab-size"),
    ],
)
def test_a_slip_on_the_command_line_is_one_line(home, tmp_path, words, said):
    must_refuse(qkv(*(w.format(rnn=home / "rnn") for w in words), cwd=tmp_path), said)
    assert list(tmp_path.iterdir()) == []


# ---- a full disk ----------------------------------------------------------------------------------------------------


def test_a_full_disk_while_saving_leaves_the_earlier_checkpoint_intact(home, tmp_path):
    """The system refuses to write past a limit, as a full disk does, once the run has a checkpoint."""
    run = tmp_path / "run"
    stopped = fit(read_recipe(home / "transformer.yaml"), run, device="cpu")
    next(record for record in stopped if record.step > 4)  # the checkpoint of step 4 is written
    stopped.close()
    before = (run / "last.safetensors").read_bytes()
    room = len(before) // 2

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    done = qkv("train", home / "transformer.yaml", "-o", run, preexec_fn=small_disk)
    assert done.returncode == 2, done
    assert "cannot be saved" in done.stderr
    assert "earlier file is intact" in done.stderr
    assert "Traceback" not in done.stderr
    assert (run / "last.safetensors").read_bytes() == before
    assert not list(run.glob(".*part"))
    assert qkv("train", home / "transformer.yaml", "-o", run).returncode == 0
    assert (run / "model.safetensors").read_bytes() == (home / "transformer" / "model.safetensors").read_bytes()


def test_a_log_that_cannot_be_written_is_one_line(home, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").symlink_to("/dev/full")
    done = qkv("train", home / "rnn.yaml", "-o", run)
    assert done.returncode == 2, done
    assert "log.jsonl: is not a regular file" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_says_how_to_go_on(home, tmp_path):
    command = [sys.executable, "-m", "qkv.cli", "train", str(home / "rnn.yaml"), "train.max_steps=100000"]
    process = subprocess.Popen(
        [*command, "-o", str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip  # a shell that runs the tests in the background has told them to ignore it
    process.stdout.readline()  # training has begun
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"checkpoint saved; run the same command to resume" in stderr
