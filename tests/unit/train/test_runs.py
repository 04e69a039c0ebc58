"""Runs as a user meets them: interrupted, resumed, extended, cleaned up, and used before they have finished."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from reviews import recipe_text, write_model, write_reviews
from test_pretraining import recipe_of as text_recipe
from words import write_task

from qkv.checkpoints import load
from qkv.errors import InputError
from qkv.recipe import read_recipe
from qkv.train.callbacks import Callback
from qkv.train.fit import fit
from qkv.train.interruption import StopRequest, TrainingInterrupted
from qkv.train.perf import lazy_adamw
from qkv.train.resume import restart_factor
from qkv.train.train_state import TrainState

WORKLOADS = ("pairs", "task", "lora", "text", "stream")
CONSTANT = ["train.schedule=constant", "train.warmup_steps=2", "train.max_steps=6", "validation.every_steps=3"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_reviews(folder / "mine.csv")
    write_model("bert", folder / "bert")
    train = {"weight_decay": 0.1}
    text = recipe_text(folder / "bert", folder / "mine.csv", train=train).replace("  warmup_ratio: 0.2\n", "")
    (folder / "task.yaml").write_text(text)
    write_task(folder)
    return folder


def recipe_of(workload: str, home: Path, *changes: str):
    changes = (*CONSTANT, *changes)
    if workload == "pairs":
        return read_recipe(home / "transformer.yaml", ["train.ema_decay=0.9", *changes])
    if workload in ("task", "lora"):
        lora = ["finetune.lora={rank: 2, target_modules: [q, v]}"] if workload == "lora" else []
        return read_recipe(home / "task.yaml", [*lora, *changes])
    streaming = ["data.streaming=true"] if workload == "stream" else []
    return text_recipe("gpt2", home, *streaming, *changes)


def run_all(recipe, folder: Path, *callbacks: Callback) -> list:
    return list(fit(recipe, folder, device="cpu", callbacks=callbacks))


def weights(folder: Path) -> bytes:
    whole = folder / "model.safetensors"
    return (whole if whole.is_file() else folder / "lora.safetensors").read_bytes()


class Signals(Callback):
    """Sends signals to this process after a step."""

    def __init__(self, step: int, *signals: int) -> None:
        self.step, self.signals = step, signals

    def on_step(self, trainer, record):  # noqa: ARG002
        if record.step == self.step:
            for number in self.signals:
                signal.raise_signal(number)


@pytest.fixture(autouse=True)
def heeded_signals() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and a run leaves an ignored signal alone."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


# ---- interrupted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS)
def test_an_interrupted_run_saves_a_checkpoint_at_the_next_step_and_resumes_to_the_bit(
    workload: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_adamw, "_MIN_ROWS", 16)  # embeddings that are updated lazily, with weight decay
    recipe = recipe_of(workload, home, "train.log_every=1")
    run_all(recipe, tmp_path / "whole")
    with pytest.raises(TrainingInterrupted, match="interrupted at step 4; checkpoint saved; run the same command"):
        run_all(recipe, tmp_path / "cut", Signals(4, signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    records = run_all(recipe, tmp_path / "cut")
    assert records[0].kind == "resume"
    assert " at step 4 of 6 " in records[0].samples[0]
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_sigterm_has_its_own_exit_code_and_a_second_signal_ends_at_once(home: Path, tmp_path: Path) -> None:
    recipe = recipe_of("pairs", home, "train.log_every=1")
    with pytest.raises(TrainingInterrupted) as found:
        run_all(recipe, tmp_path / "run", Signals(2, signal.SIGTERM))
    assert found.value.exit_code == 143
    with pytest.raises(KeyboardInterrupt) as found:
        run_all(recipe, tmp_path / "run", Signals(4, signal.SIGINT, signal.SIGINT))
    assert not isinstance(found.value, TrainingInterrupted)


def test_a_signal_in_the_last_step_does_not_keep_a_run_from_finishing(home: Path, tmp_path: Path) -> None:
    records = run_all(recipe_of("pairs", home, "train.log_every=1"), tmp_path / "run", Signals(6, signal.SIGTERM))
    assert records[-1].kind == "final"


def test_handlers_of_the_program_ignored_signals_and_other_threads_are_left_alone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with StopRequest():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)

    def enter() -> None:
        with StopRequest():
            pass

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()


def test_a_run_without_any_checkpoint_notes_its_data_once_however_often_it_starts(home: Path, tmp_path: Path) -> None:
    recipe = recipe_of("task", home)
    for _ in range(3):
        started = fit(recipe, tmp_path / "run", device="cpu")
        next(started)
        started.close()
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in log] == ["note"]


# ---- used before it has finished ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", ["pairs", "lora"])
def test_an_unfinished_run_is_loaded_with_its_best_weights_and_a_warning(
    workload: str, home: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(workload, home, "train.log_every=1")
    with pytest.raises(TrainingInterrupted):
        run_all(recipe, tmp_path / "run", Signals(2, signal.SIGINT))
    with pytest.warns(UserWarning, match="nor was it validated; using the weights of its last checkpoint"):
        load(tmp_path / "run")
    with pytest.raises(TrainingInterrupted):
        run_all(recipe, tmp_path / "run", Signals(5, signal.SIGINT))
    with pytest.warns(UserWarning, match="has not finished; using its best weights so far, of step 3"):
        load(tmp_path / "run")


# ---- extended -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_run_that_keeps_its_checkpoint_is_extended_as_if_it_had_never_ended(
    workload: str, home: Path, tmp_path: Path
) -> None:
    keep = "train.keep_checkpoint=true"
    run_all(recipe_of(workload, home, "train.max_steps=12"), tmp_path / "whole")
    run_all(recipe_of(workload, home, keep), tmp_path / "run")
    records = run_all(recipe_of(workload, home, "train.max_steps=12"), tmp_path / "run")
    assert records[0].samples[0].startswith(f"extending {tmp_path / 'run'} from step 6 to 12 (")
    assert len(records[0].samples) == 1
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_run_without_a_checkpoint_is_extended_from_its_weights_with_a_new_optimizer(
    workload: str, home: Path, tmp_path: Path
) -> None:
    run_all(recipe_of(workload, home), tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "cut")
    longer = recipe_of(workload, home, "train.max_steps=10", "train.log_every=1")
    records = run_all(longer, tmp_path / "run")
    assert "saved weights with a new optimizer and 1 warm-up steps" in records[0].samples[1]
    with pytest.raises(TrainingInterrupted):
        run_all(longer, tmp_path / "cut", Signals(8, signal.SIGTERM))
    run_all(longer, tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "run")


def test_a_new_optimizer_warms_up_for_a_tenth_of_the_added_steps_at_most_a_hundred() -> None:
    train_state = TrainState(step=600, optimizer_restart=600)
    factors = [restart_factor(train_state, step, 900) for step in (600, 601, 615, 630, 900)]
    assert factors == pytest.approx([1, 1 / 30, 0.5, 1, 1])
    assert restart_factor(train_state, 650, 100_000) == pytest.approx(0.5)
    assert restart_factor(TrainState(step=600), 601, 900) == 1


def test_an_extension_killed_before_or_after_any_of_its_writes_ends_with_the_same_bits(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all(recipe_of("pairs", home), tmp_path / "finished")
    longer = recipe_of("pairs", home, "train.max_steps=9")
    shutil.copytree(tmp_path / "finished", tmp_path / "whole")
    replace, unlink, copies = os.replace, Path.unlink, []

    def snapshot() -> None:
        if (tmp_path / "whole").is_dir():
            copies.append(shutil.copytree(tmp_path / "whole", tmp_path / f"killed-{len(copies)}"))

    def watched_replace(source, target):
        snapshot()
        replace(source, target)

    def watched_unlink(path, missing_ok=False):
        snapshot()
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "replace", watched_replace)
    monkeypatch.setattr(Path, "unlink", watched_unlink)
    run_all(longer, tmp_path / "whole")
    monkeypatch.undo()
    assert len(copies) > 8
    for copy in copies:
        run_all(longer, copy)
        assert weights(copy) == weights(tmp_path / "whole"), sorted(path.name for path in copy.iterdir())
        assert {path.name for path in copy.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}


def test_another_schedule_length_is_said_with_its_learning_rates(home: Path, tmp_path: Path) -> None:
    run_all(recipe_of("pairs", home, "train.schedule=linear"), tmp_path / "run")
    records = run_all(recipe_of("pairs", home, "train.schedule=linear", "train.max_steps=10"), tmp_path / "run")
    said = "the schedule (linear) is now that of 10 steps instead of 6: the learning rate was 0 at step 6, 0.00375 at"
    assert records[0].samples[1].startswith(said)


def test_a_run_stopped_early_goes_on_with_another_patience_and_says_why_it_ends(home: Path, tmp_path: Path) -> None:
    from qkv.train.display import format_record

    still = ["train.learning_rate=0", "train.max_steps=30", "validation.every_steps=2"]
    records = run_all(recipe_of("task", home, *still, "validation.patience=2"), tmp_path / "run")
    assert records[-1].step == 6
    said = format_record(records[-1])
    assert said.startswith("stopped early at step 6: no improvement for 2 validations; saved step 2, accuracy ")
    records = run_all(recipe_of("task", home, *still, "validation.patience=4"), tmp_path / "run")
    assert records[-1].step == 10
    assert (
        run_all(recipe_of("task", home, *still, "validation.patience=4", "train.log_every=1"), tmp_path / "run") == []
    )


def test_another_metric_is_not_compared_with_the_values_of_the_old_one(home: Path, tmp_path: Path) -> None:
    run_all(recipe_of("pairs", home, "train.keep_checkpoint=true"), tmp_path / "run")
    records = run_all(recipe_of("pairs", home, "train.max_steps=9", "validation.metric=loss"), tmp_path / "run")
    assert "best" not in records[0].samples[0]
    assert "earlier validations are not compared" in records[0].samples[1]
    assert records[-1].values["best_step"] == 9


def test_a_shorter_run_and_other_keys_are_refused_and_leave_the_run_alone(home: Path, tmp_path: Path) -> None:
    run_all(recipe_of("pairs", home), tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    for changes, said in (
        (["train.max_steps=5"], "the run is at step 6, and the recipe ends at step 5; raise train.max_steps"),
        (["train.max_steps=9", "seed=4"], r"holds a run of another recipe \(seed was 3, is 4\); choose another"),
    ):
        with pytest.raises(InputError, match=said):
            run_all(recipe_of("pairs", home, *changes), tmp_path / "run")
        assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_finished_run_keeps_what_a_model_needs_and_nothing_else(home: Path, tmp_path: Path) -> None:
    run_all(recipe_of("task", home, "train.average_checkpoints=2"), tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        *("recipe.yaml", "spec.json", "model.safetensors", "source.tokenizer.json", "log.jsonl", "train_state.json")
    }


# ---- length, warm-up, checks at the start ---------------------------------------------------------------------------


def test_pairs_and_text_take_epochs_and_a_stream_refuses_them(home: Path, tmp_path: Path) -> None:
    epochs = ["train.max_steps=null", "train.epochs=2", "validation.every_steps=null"]
    for workload in ("pairs", "text"):
        records = run_all(recipe_of(workload, home, *epochs), tmp_path / workload)
        validations = [record.step for record in records if record.kind == "valid"]
        assert validations == [records[-1].step // 2, records[-1].step]
    with pytest.raises(InputError, match=r"number of batches of a stream is not known; set train\.max_steps"):
        run_all(recipe_of("stream", home, *epochs), tmp_path / "stream")


def test_the_default_warmup_is_a_tenth_of_a_short_run_and_one_that_is_too_long_is_said(
    home: Path, tmp_path: Path
) -> None:
    train = read_recipe(home / "transformer.yaml", ["train.warmup_steps=null"]).train
    assert [train.warmup_steps_of(steps) for steps in (1, 8, 100, 4000, 100_000)] == [1, 1, 10, 400, 400]
    records = run_all(recipe_of("pairs", home, "train.warmup_steps=60"), tmp_path / "run")
    assert (
        records[0].samples[0].startswith("train.warmup_steps: 60, and the run has 6 steps: the learning rate reaches")
    )


def test_an_unknown_metric_and_a_missing_package_are_reported_before_the_first_step(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"validation\.metric: text_classification has no 'acuracy'"):
        run_all(recipe_of("task", home, "validation.metric=acuracy"), tmp_path / "run")

    def missing(*_args: object) -> None:
        raise InputError("accuracy needs the package nothing; pip install nothing")

    monkeypatch.setattr("qkv.metrics.classification.Accuracy.score", missing, raising=True)
    with pytest.raises(InputError, match="needs the package nothing"):
        run_all(recipe_of("task", home), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_trained_in_memory_is_refused_before_training(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkv.train.perf.memory.total_memory", lambda: 100_000)
    with pytest.raises(InputError, match=r"training takes 0\.\d GB .* choose a smaller model"):
        run_all(recipe_of("task", home), tmp_path / "run")
