"""A new user's first hour: a table in a legacy encoding, five commands, no options besides the column names."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "train"))
sys.path.append(str(Path(__file__).parent))
from reviews import reviews, write_model
from test_cli import qkv

LABELS = {"5": "schön", "1": "öde"}


def write_table(path: Path, rows: list[tuple[str, str]]) -> Path:
    """Write a table with semicolons in Latin-1, as spreadsheets of some countries do."""
    lines = ["Kritik;Urteil;Jahr", *(f"{text} café;{LABELS[stars]};1999" for text, stars in rows)]
    path.write_bytes("\r\n".join([*lines, ""]).encode("latin-1"))
    return path


def run(*words: object) -> str:
    done = qkv(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_five_commands_lead_from_a_table_to_a_pipeline_of_transformers(tmp_path: Path) -> None:
    pipeline = pytest.importorskip("transformers").pipeline
    model = write_model("bert", tmp_path / "model")
    train = write_table(tmp_path / "train.csv", reviews(60, seed=3))
    test = write_table(tmp_path / "test.csv", reviews(12, seed=4))
    folder = tmp_path / "run"
    columns = ("--text", "Kritik", "--label", "Urteil")

    output = run("train", "--task", "classify", "--data", train, *columns, "--init-from", model, "-o", folder)
    assert "delimiter ';' (detected)" in output
    assert "2 labels: " in output
    assert "12 examples" in run("eval", folder, "--data", test)
    run("predict", folder, "--file", test, "-o", tmp_path / "out.csv")
    run("export", folder, "-o", tmp_path / "exported")

    with open(tmp_path / "out.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["Kritik"] for row in rows] == [f"{text} café" for text, _ in reviews(12, seed=4)]
    assert {row["Jahr"] for row in rows} == {"1999"}
    classify = pipeline("text-classification", model=str(tmp_path / "exported"), device="cpu")
    outputs = classify([row["Kritik"] for row in rows])
    assert [output["label"] for output in outputs] == [row["prediction"] for row in rows]
    assert [output["score"] for output in outputs] == pytest.approx(
        [float(row["probability"]) for row in rows], abs=1e-4
    )
