"""`qkv list` and `qkv recipes`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from test_cli import must_refuse, qkv

from qkv.cli.list_names import KINDS
from qkv.metrics.registry import DESCRIPTIONS, METRICS


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_lists_names_each_with_a_line(kind: str) -> None:
    rows = json.loads(qkv("list", kind, "--json").stdout)
    assert rows
    assert all(name and description.strip() for name, description in rows.items())
    lines = qkv("list", kind).stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(rows)


def test_every_metric_of_qkv_has_a_description() -> None:
    assert set(DESCRIPTIONS) == {name for name in METRICS.names() if METRICS.get(name).make.__module__[:4] == "qkv."}


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    must_refuse(qkv("list", "metrcs"), "no kind 'metrcs'; did you mean 'metrics'?")


def test_recipes_are_listed_shown_and_copied(tmp_path: Path) -> None:
    assert qkv("recipes").stdout == qkv("recipes", "list").stdout == qkv("list", "recipes").stdout
    shown = qkv("recipes", "show", "g2p-demo").stdout
    copied = qkv("recipes", "copy", "g2p-demo", tmp_path)
    assert copied.stdout == f"copied to {tmp_path / 'g2p-demo.yaml'}\n"
    assert (tmp_path / "g2p-demo.yaml").read_text(encoding="utf-8") == shown
    must_refuse(qkv("recipes", "copy", "g2p-demo", tmp_path), "already exists")
    must_refuse(qkv("recipes", "show", "g2p"), "no recipe 'g2p'")


def test_the_schema_is_json() -> None:
    assert json.loads(qkv("recipes", "schema").stdout)["title"] == "qkv recipe"
