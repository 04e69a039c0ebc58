"""A module outside qkv that registers one extension of each kind works through the command line and through Python.

The commands of a test run in one process of their own: what the module registers must not reach other tests.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DOCS = (HERE.parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
STARS = {1: "awful", 2: "bad", 4: "good", 5: "lovely"}
WORDS = ("the", "a", "this", "cat", "dog", "house", "tea", "is", "was")

RUN_COMMANDS = """
import contextlib, io, json, sys
from qkv.cli import main

results = []
for command in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["qkv", *command]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as exit:
            code = exit.code
    results.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
print(json.dumps(results))
"""

USE_PYTHON = """
import json
import qkv
from qkv.data.pair import Pair

pretraining = qkv.read_recipe("pretrain.yaml")  # imports toy_plugin
from toy_plugin import History

class Counter(History):
    events = []
    def _write(self, trainer, event, value):
        self.events.append(event)

counter = Counter()
records = list(qkv.fit(pretraining, "runs/pretrain", device="cpu", callbacks=[counter]))
language_model = qkv.load("runs/pretrain")
config = qkv.GenerationConfig(max_new_tokens=4)
pairs = [Pair("the cat", " is", "a:1")]
score = qkv.evaluate(language_model, pairs, generation_config=config, metrics=["length_ratio"])
records = list(qkv.fit(qkv.read_recipe("finetune.yaml"), "runs/finetune", device="cpu"))
predictor = qkv.Predictor.load("runs/finetune", device="cpu")
prediction = predictor(["a lovely cat"])[0]
print(json.dumps({
    "family": language_model.model.spec.family,
    "losses": [record.values["loss"] for record in records if record.kind == "train"],
    "events": counter.events,
    "score": score,
    "validated": [sorted(record.values) for record in records if record.kind == "valid"],
    "task": predictor.task.name,
    "text": prediction.text,
}))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder: the module, the recipes of docs/extending.md, and data."""
    folder = tmp_path / "home"
    folder.mkdir()
    shutil.copy(HERE / "toy_plugin.py", folder)
    for name, recipe in re.findall(r"```yaml\n# (\S+)\n(.*?)```", DOCS, re.DOTALL):
        (folder / name).write_text(recipe, encoding="utf-8")
    draw = random.Random(1)
    lines = [" ".join(draw.choices(WORDS, k=12)) for _ in range(60)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    reviews = [f"{'*' * stars} {draw.choice(WORDS)} {word}" for stars, word in STARS.items() for _ in range(20)]
    (folder / "reviews.txt").write_text("\n".join(reviews) + "\n", encoding="utf-8")
    return folder


def run_script(code: str, home: Path, *arguments: str) -> Any:
    """Run code in a process whose working directory is not on the module search path at the start."""
    script = home.parent / "scripts" / "script.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(code, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_command_line_uses_a_family_objective_task_metric_and_callback_from_outside(home: Path) -> None:
    for name, labels in (("hyp", "5\n4\n1\n"), ("ref", "4\n1\n1\n")):
        (home / name).write_text(labels, encoding="utf-8")
    commands = [
        ["families"],
        ["--import", "toy_plugin", "families"],
        ["train", "pretrain.yaml"],
        ["train", "finetune.yaml"],
        ["--import", "toy_plugin", "predict", "runs/finetune", "a lovely cat", "--json"],
        ["--import", "toy_plugin", "eval", "runs/finetune", "--data", "reviews.txt", "--json", "--num-resamples", "0"],
        ["--import", "toy_plugin", "score", "-m", "within_one", "--hyp", "hyp", "--ref", "ref", "--json"],
        ["--import", "no_such_module", "families"],
        ["train", "finetune.yaml", "imports=[no_such_module]"],
    ]
    results = run_script(RUN_COMMANDS, home, json.dumps(commands))
    before, after, pretrained, finetuned, predicted, evaluated, scored, *refused = results
    assert "cosine_gpt" not in before["out"]
    assert "cosine_gpt" in after["out"]
    assert (pretrained["code"], finetuned["code"]) == (0, 0), (pretrained["err"], finetuned["err"])
    for run in ("pretrain", "finetune"):
        lines = (home / "runs" / run / "history.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)[0] for line in lines] == ["step", "validation", "checkpoint"] * 2
    assert json.loads(predicted["out"])["label"] in map(str, STARS)
    assert next(iter(json.loads(evaluated["out"])["metrics"])) == "within_one"
    assert json.loads(scored["out"])["metrics"]["within_one"]["scores"]["within_one"]["value"] == pytest.approx(2 / 3)
    for result in refused:
        assert result["code"] == 2
        assert "module 'no_such_module' cannot be imported" in result["err"]
        assert len(result["err"].strip().splitlines()) == 1


def test_python_uses_a_family_objective_task_metric_and_callback_from_outside(home: Path) -> None:
    result = run_script(USE_PYTHON, home)
    assert result["family"] == "cosine_gpt"
    assert result["events"] == ["step", "validation", "checkpoint"] * 2
    assert result["score"]["length_ratio"] > 0
    assert all("within_one" in names for names in result["validated"])
    assert (result["task"], result["text"] in map(str, STARS)) == ("ordinal", True)


def test_the_documented_examples_are_those_of_the_module() -> None:
    module = (HERE / "toy_plugin.py").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert len(blocks) == 1 + module.count("@qkv.register.")  # the first one has the imports
    assert [block for block in blocks if block not in module] == []
