"""The saved progress of a run: what a damaged or hostile file may contain is one line."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from words import write_task

from qkv.checkpoints.safetensors_io import load_tensors, save_tensors
from qkv.errors import InputError
from qkv.recipe import read_recipe
from qkv.train.distributed.processes import DistributedInfo
from qkv.train.distributed.sharded_checkpoint import load_sharded, save_sharded
from qkv.train.fit import fit
from qkv.train.multi_run import final_metrics
from qkv.train.run_log import parse_record
from qkv.train.train_state import TrainState, parse_train_state

ALONE = DistributedInfo(0, 1, 0, torch.device("cpu"))
GOOD = json.loads(TrainState(step=9, epoch=2, best_metric=0.5, best_step=6, averaging_steps=[3, 6]).to_json())
BAD_VALUES = [
    *[("step", value) for value in ("x", 1.5, None, -1, 10**30, True, [1])],
    *[("epoch", value) for value in ("x", None, -2, 10**12)],
    *[("best_metric", value) for value in ("x", [], {}, True)],
    *[("best_step", value) for value in (10, 6.5, None)],
    *[("averaging_steps", value) for value in (3, ["x"], [99], [True], [1] * 100_000)],
    *[("train_seconds", value) for value in (-1.0, math.nan, math.inf, "1")],
    *[("finished", value) for value in (0, None, "no")],
    *[("data_fingerprint", value) for value in (None, 3, "x" * 100_000)],
    ("batch_index", 10),
    ("optimizer_restart", 10),
    ("x", 1),
]


def test_the_progress_of_a_run_is_read_as_it_was_written() -> None:
    for best_metric in (None, 0.25, math.nan, -math.inf, 3):
        train_state = TrainState(step=9, best_metric=best_metric, averaging_steps=[3])
        assert repr(parse_train_state(train_state.to_json(), "here")) == repr(train_state)


def test_a_checkpoint_of_an_earlier_version_lacks_the_newest_fields() -> None:
    old = {name: value for name, value in GOOD.items() if name not in ("validation_settings", "optimizer_restart")}
    assert parse_train_state(json.dumps(old), "here").step == 9


@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=lambda value: str(value)[:20])
def test_an_impossible_value_is_one_short_line(name: str, value: object) -> None:
    with pytest.raises(InputError, match=r"^here: ") as found:
        parse_train_state(json.dumps(GOOD | {name: value}), "here")
    assert name in str(found.value)
    assert len(str(found.value)) < 200
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"step": 1}', "[" * 10_000, '{"step": ' + "9" * 5000])
def test_a_text_that_is_no_progress_is_one_short_line(text: str) -> None:
    with pytest.raises(InputError, match=r"^here") as found:
        parse_train_state(text, "here")
    assert len(str(found.value)) < 200


def test_a_run_with_a_wrong_step_in_its_checkpoint_is_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    recipe = read_recipe(write_task(tmp_path), ["train.save_every=1"])
    started = fit(recipe, tmp_path / "run", device="cpu")
    next(record for record in started if record.kind == "train")
    started.close()
    path = tmp_path / "run" / "last.safetensors"
    tensors, metadata = load_tensors(path)
    for state in ({"step": "x"}, {"epoch": None}, {"best_metric": "x"}):
        save_tensors(path, tensors, {"train_state": json.dumps(json.loads(metadata["train_state"]) | state)})
        with pytest.raises(InputError, match=r"last\.safetensors: .* cannot be"):
            list(fit(recipe, tmp_path / "run", device="cpu"))


@pytest.mark.parametrize("folder", ["/etc", "../other", "last-1/../../x", "last-x", 5, None, ["last-1"]])
def test_the_folder_of_a_sharded_checkpoint_is_one_of_the_run(folder: object, tmp_path: Path) -> None:
    (tmp_path / "last.json").write_text(json.dumps({"folder": folder, "train_state": GOOD}))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"last\.json: does not name a checkpoint"):
        load_sharded(tmp_path, model, torch.optim.AdamW(model.parameters()), ALONE)


class Dangerous:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code ran",)


def test_the_metadata_of_a_sharded_checkpoint_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save_sharded(tmp_path, model, optimizer, TrainState(step=1), ALONE)
    assert load_sharded(tmp_path, model, optimizer, ALONE).step == 1
    metadata = tmp_path / "last-1" / ".metadata"
    good = metadata.read_bytes()
    hostile = [pickle.dumps(Dangerous()), pickle.dumps(3), good[: len(good) // 2], b"", b"\x80\x05.", good[::-1]]
    for content in hostile:
        metadata.write_bytes(content)
        with pytest.raises(InputError, match="last-1: not a complete checkpoint of this model"):
            load_sharded(tmp_path, model, optimizer, ALONE)
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["", "{", "3\n", '{"kind": 1, "step": 1}\n', '{"kind": "valid", "step": "x"}\n', "[" * 5000]
)
def test_a_damaged_line_of_a_log_is_no_record(line: str) -> None:
    assert parse_record(line) is None


def test_a_log_without_its_last_record_is_one_line(tmp_path: Path) -> None:
    for content in ("", '{"kind": "final", "step": 3, "best_step": 2.0}\n', "\x00\n{"):
        (tmp_path / "log.jsonl").write_text(content)
        with pytest.raises(InputError, match=r"log\.jsonl: the metrics of the finished run are missing or damaged"):
            final_metrics(tmp_path)
