"""A run that learned pictures is scored, reported and used from the command line."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "data" / "formats"))
sys.path.append(str(Path(__file__).parent))
from small_pictures import NAMES, pictures, recipe_of, write_folder, write_idx
from test_cli import must_refuse, qkv


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command itself, and files of its test pictures."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "lines.yaml").write_text(yaml.safe_dump(recipe_of(write_idx(folder / "idx"), train={"max_steps": 2})))
    done = qkv("train", folder / "lines.yaml", "-o", folder / "run", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    write_folder(folder / "files", 30, seed=2)  # t10k's
    return folder


def test_eval_scores_the_test_files_and_shows_the_worst_as_pictures(home: Path, tmp_path: Path) -> None:
    done = qkv("eval", home / "run", "--report", tmp_path, "--num-resamples", 20)
    assert done.returncode == 0, done.stderr
    assert "30 examples" in done.stdout
    told = json.loads((tmp_path / "report.json").read_text())
    assert set(told["classes"]) == set(NAMES)
    assert all("image" not in one and "image " in one["location"] for one in told["worst_examples"])
    page = (tmp_path / "report.html").read_text()
    shown = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="[^"]+: image (\d+)">', page)
    assert len(shown) == told["num_wrong"] > 0
    (tmp_path / "worst.png").write_bytes(base64.b64decode(shown[0][0]))
    with Image.open(tmp_path / "worst.png") as worst:
        assert worst.tobytes() == pictures(30, 2)[0][int(shown[0][1]) - 1].tobytes()


def test_files_are_scored_and_predicted_as_the_pixels_of_the_test_part_are(home: Path, tmp_path: Path) -> None:
    done = qkv("eval", home / "run", "-o", tmp_path / "said.tsv", "--num-resamples", 0)
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t")[1:3] for line in (tmp_path / "said.tsv").read_text().splitlines()[1:]]
    files = [home / "files" / NAMES[i % 3] / f"{i:03}.png" for i in range(30)]
    one_by_one = [line.split("\t") for line in qkv("predict", home / "run", *files, "--scores").stdout.splitlines()]
    assert [[label, chance] for _, chance, label in one_by_one] == rows
    by_format = qkv("predict", home / "run", "--file", home / "files", "--format", "images", "--json").stdout
    told = [json.loads(line) for line in by_format.splitlines()]
    assert {one["input"]: one["label"] for one in told} == {str(f): row[0] for f, row in zip(files, rows, strict=True)}
    idx = home / "idx" / "t10k-images-idx3-ubyte"
    assert qkv("predict", home / "run", "--file", idx, "--format", "idx").stdout.split() == [row[0] for row in rows]
    scored = [
        json.loads(qkv("eval", home / "run", "--json", "--num-resamples", 0, *words).stdout)["metrics"]["accuracy"]
        for words in ((), ("--data", home / "files", "--format", "images"))
    ]
    assert scored[0] == scored[1]


def test_a_picture_is_not_taken_for_a_file_of_names(home: Path) -> None:
    must_refuse(qkv("predict", home / "run", "--file", home / "files" / "dark" / "000.png"), "000.png: is an image")


def test_of_a_folder_of_several_parts_one_is_to_be_named(home: Path, tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_folder(tmp_path / part, 3, seed=4)
    words = ("predict", home / "run", "--format", "images", "--file")
    must_refuse(qkv(*words, tmp_path), "several splits", str(tmp_path / "test"))
    assert len(qkv(*words, tmp_path / "test").stdout.splitlines()) == 3


def test_what_is_exported_says_the_same(home: Path, tmp_path: Path) -> None:
    done = qkv("export", home / "run", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    picture = home / "files" / "dark" / "000.png"
    ours, theirs = (qkv("predict", model, picture, "--scores").stdout for model in (home / "run", tmp_path / "out"))
    assert ours == theirs
    words = ("--format", "idx", "--file", home / "idx" / "t10k-images-idx3-ubyte", "--json")
    ours, theirs = (qkv("predict", model, *words).stdout for model in (home / "run", tmp_path / "out"))
    assert ours == theirs != ""


def test_a_bad_picture_is_one_line_or_skipped(home: Path, tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.png", home / "files" / "dark" / "000.png"
    bad.write_bytes(good.read_bytes()[:-30])
    must_refuse(qkv("predict", home / "run", good, bad), "bad.png", "a broken image")
    must_refuse(qkv("predict", home / "run", tmp_path / "none.png"), "none.png", "no such file")
    folder = qkv("predict", home / "run", "--file", home / "files")
    assert folder.returncode == 0, folder.stderr
    assert (folder.returncode, len(folder.stdout.splitlines())) == (0, len(list((home / "files").rglob("*.png"))))
    done = qkv("predict", home / "run", good, bad, "--skip-bad")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    assert "bad.png: a broken image" in done.stderr
    must_refuse(qkv("eval", home / "run", "--data", tmp_path, "--format", "images"), "bad.png")


def test_without_a_model_it_says_what_a_fresh_one_needs(home: Path) -> None:
    must_refuse(
        qkv("train", "--task", "image_classification", "--data", home / "files"), "model.family=vit model.image_size=…"
    )


def test_ones_own_folder_is_learned_without_a_recipe(home: Path, tmp_path: Path) -> None:
    words = (
        "--task",
        "image_classification",
        "--data",
        home / "files",
        "--init-from",
        home / "run",
        "train.epochs=1",
        "-o",
    )
    done = qkv("train", *words, tmp_path / "run", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert qkv("predict", tmp_path / "run", home / "files" / "dark" / "000.png").stdout.strip() in NAMES
