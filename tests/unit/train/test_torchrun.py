"""The command line under torchrun: two processes on this machine train as one does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import commands
import forked
import interrupted
import pytest
from reviews import recipe_text, write_model, write_reviews
from test_pretraining import OWN, RECIPES, TINY, write_text

from qkv.checkpoints import load
from qkv.checkpoints.safetensors_io import load_tensors
from qkv.recipe import read_recipe
from qkv.recipe.parse import recipe_to_yaml
from qkv.train.fit import fit

TWO = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
STILL = ["model.dropout=0", "model.attention_dropout=0"]
SPREADS = ("ddp", "fsdp")
WAYS = {
    "adapters": ["finetune.lora={rank: 2, dropout: 0.1, target_modules: [q, v, down]}", "train.strategy=ddp"],
    "mix": ["finetune.feature_layers=scalar_mix", "train.strategy=fsdp"],
}


def changes_of(family: str, folder: Path, *changes: str) -> tuple[str, list[str]]:
    """A mini recipe, and what makes a tiny one of it."""
    text = folder / "text.txt"
    data = [
        f"data.train={text}",
        "data.format=blank_line_separated",
        "data.hold_out=0.2",
        "validation.num_samples=1",
        "train.log_every=1",
    ]
    return str(RECIPES / f"pretrain-{family}-mini.yaml"), [*TINY, *OWN.get(family, []), *data, *changes]


def by_one(recipe: str, changes: list[str], folder: Path) -> None:
    """In this process, which has as many threads as torchrun gives each of its own."""
    list(fit(read_recipe(recipe, changes), folder, device="cpu"))


def words(recipe: str, changes: list[str], folder: Path) -> list[str]:
    return ["train", recipe, *changes, "-o", str(folder), "--device", "cpu"]


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] in ("train", "valid") and "loss" in line]


def kill_after_a_checkpoint(given: list[str], folder: Path) -> None:
    """kill -9 to both processes once one was written; a checkpoint each step leaves steps to go."""
    processes = forked.start_two(*given)
    checkpoints = [folder / name for name in ("last.safetensors", "last.json")]
    while all(process.is_alive() for process in processes) and not any(path.exists() for path in checkpoints):
        time.sleep(0.005)
    for process in processes:
        process.kill()
        process.join()


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run of two processes that nobody kills, and what both it and that of one process need."""
    home = tmp_path_factory.mktemp("two")
    write_text(home)
    write_reviews(home / "mine.csv")
    (home / "tuned.yaml").write_text(recipe_text(write_model("bert", home / "bert"), home / "mine.csv"))
    runs = {spread: changes_of("bert", home, *STILL, f"train.strategy={spread}") for spread in SPREADS}
    runs |= {way: (str(home / "tuned.yaml"), [*changes, "train.log_every=1"]) for way, changes in WAYS.items()}
    given = [words(recipe, changes, home / name) for name, (recipe, changes) in runs.items()]
    (home / "commands.json").write_text(json.dumps(list(zip(free_ports(len(given)), given, strict=True))))
    done = subprocess.run(
        [sys.executable, *TWO, commands.__file__, str(home / "commands.json")],
        capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("trained: ") == len(runs)  # one process speaks
    return home


@pytest.mark.parametrize("spread", SPREADS)
def test_two_processes_have_the_losses_of_one(spread, by_two, tmp_path):
    by_one(*changes_of("bert", by_two, *STILL), tmp_path / "one")
    assert losses(by_two / spread) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, two = (load_tensors(folder / "model.safetensors")[0] for folder in (tmp_path / "one", by_two / spread))
    assert one.keys() == two.keys()
    assert all((one[name] - two[name]).abs().max() < 1e-4 for name in one)


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_tune_as_one_does(way, by_two, tmp_path):
    """One process takes both parts, so that dropout draws the same."""
    by_one(
        str(by_two / "tuned.yaml"),
        [*WAYS[way][:1], "train.log_every=1", "train.gradient_accumulation_steps=2"],
        tmp_path / "one",
    )
    assert losses(by_two / way) == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    one, two = (load(folder).model.state_dict() for folder in (tmp_path / "one", by_two / way))
    assert all((one[name] - two[name]).abs().max() < 1e-3 for name in one)


def test_a_run_killed_with_two_processes_goes_on_with_one_to_the_same_bits(tmp_path):
    """With dropout; one process takes both parts, so that the same numbers are added up."""
    write_text(tmp_path)
    long = ["train.max_steps=20", "train.save_every=1", "validation.every_steps=10"]
    alone = changes_of("bart", tmp_path, *long, "train.gradient_accumulation_steps=2")
    by_one(*alone, tmp_path / "whole")
    kill_after_a_checkpoint(words(*changes_of("bart", tmp_path, *long), tmp_path / "cut"), tmp_path / "cut")
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    by_one(*alone, tmp_path / "cut")
    whole, cut = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_shards_of_two_processes_are_taken_up_by_one(tmp_path):
    write_text(tmp_path)
    long = [
        "train.max_steps=20",
        "train.save_every=1",
        "validation.every_steps=10",
        "train.strategy=fsdp",
        "model.embed_dropout=0",
    ]
    given = changes_of("gpt2", tmp_path, *long, *STILL)
    by_one(*given, tmp_path / "whole")
    kill_after_a_checkpoint(words(*given, tmp_path / "cut"), tmp_path / "cut")
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    by_one(*given, tmp_path / "cut")
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


@pytest.mark.parametrize("spread", SPREADS)
def test_a_signal_to_one_process_stops_all_at_the_same_step_with_a_checkpoint(spread, tmp_path):
    write_text(tmp_path)
    recipe, changes = changes_of("gpt2", tmp_path, "train.max_steps=12", f"train.strategy={spread}")
    (tmp_path / "r.yaml").write_text(recipe_to_yaml(read_recipe(recipe, changes)))
    said = tmp_path / "said.txt"
    processes = forked.start_two(
        str(tmp_path / "r.yaml"), str(tmp_path / "run"), program=interrupted.__file__, output=said
    )
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0], said.read_text()[-2000:]
    messages = {(tmp_path / f"run-{rank}").read_text() for rank in (0, 1)}
    assert messages == {"interrupted at step 5; checkpoint saved; run the same command to resume"}
    records = list(fit(read_recipe(tmp_path / "r.yaml"), tmp_path / "run", device="cpu"))
    assert " at step 5 of 12 " in records[0].samples[0]
