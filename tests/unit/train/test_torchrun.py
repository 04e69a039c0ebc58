"""The command line under torchrun: two processes on this machine train as one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_pretraining import OWN, RECIPES, TINY, write_text

from qkv.weights.file import load_tensors

TWO = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def command(family: str, folder: Path, output: str, *changes: str, two: bool = False) -> list[str]:
    text = folder / "text.txt"
    data = [f"data.train={text}", "data.format=blank", "data.hold_out=0.2", "valid.samples=1", "train.log_every=1"]
    recipe = str(RECIPES / f"pretrain-{family}-mini.yaml")
    given = [*TINY, *OWN.get(family, []), *data, *changes, "-o", str(folder / output), "--device", "cpu"]
    return [sys.executable, *(TWO if two else []), "-m", "qkv.cli", "train", recipe, *given]


def run(given: list[str]) -> str:
    done = subprocess.run(given, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] in ("train", "valid")]


def kill_after_a_checkpoint(given: list[str], folder: Path) -> None:
    """kill -9 to all processes once one was written; a checkpoint each step leaves steps to go."""
    process = subprocess.Popen(given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not any((folder / name).exists() for name in ("last.safetensors", "last.json")):
        time.sleep(0.005)
    # torchrun puts its processes into sessions of their own, where a kill of its group does not reach them
    own = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split() if process.poll() is None else []
    for number in [process.pid, *map(int, own)]:
        os.kill(number, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_two_processes_have_the_losses_of_one(spread, tmp_path):
    write_text(tmp_path)
    still = ["model.dropout=0", "model.attention_dropout=0"]
    run(command("bert", tmp_path, "one", *still))
    said = run(command("bert", tmp_path, "two", *still, f"train.spread={spread}", two=True))
    assert said.count("trained: ") == 1
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, two = (load_tensors(tmp_path / name / "model.safetensors")[0] for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all((one[name] - two[name]).abs().max() < 1e-4 for name in one)


def test_a_run_killed_with_two_processes_goes_on_with_one_to_the_same_bits(tmp_path):
    """With dropout; one process takes both parts, so that the same numbers are added up."""
    write_text(tmp_path)
    long = ["train.steps=20", "train.save_every=1", "valid.every=10"]
    run(command("bart", tmp_path, "whole", *long, "train.accumulate=2"))
    kill_after_a_checkpoint(command("bart", tmp_path, "cut", *long, two=True), tmp_path / "cut")
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    run(command("bart", tmp_path, "cut", *long, "train.accumulate=2"))
    whole, cut = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_shards_of_two_processes_are_taken_up_by_one(tmp_path):
    write_text(tmp_path)
    long = ["train.steps=20", "train.save_every=1", "valid.every=10", "train.spread=fsdp", "model.dropout=0"]
    long += ["model.attention_dropout=0", "model.embed_dropout=0"]
    run(command("gpt2", tmp_path, "whole", *long))
    kill_after_a_checkpoint(command("gpt2", tmp_path, "cut", *long, two=True), tmp_path / "cut")
    run(command("gpt2", tmp_path, "cut", *long))
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
