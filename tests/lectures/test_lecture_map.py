"""docs/lectures.md, the map from slide to test, and this folder say the same."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
NAME = re.compile(r"\btest_(?!lecture_)\w+")


def mapped() -> set[str]:
    return set(NAME.findall((HERE.parents[1] / "docs" / "lectures.md").read_text(encoding="utf-8")))


def written() -> set[str]:
    files = [path for path in HERE.glob("test_lecture_*.py") if path != Path(__file__)]
    return {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)}


def test_every_test_that_the_map_names_exists() -> None:
    assert not mapped() - written()


def test_every_lecture_test_is_on_the_map() -> None:
    assert not written() - mapped()


def test_every_file_that_the_map_names_exists() -> None:
    text = (HERE.parents[1] / "docs" / "lectures.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:spec|nn|generation|metrics|analysis|families)/[a-z_/.]*)`", text))
    missing = [path for path in sorted(paths) if not (HERE.parents[1] / "qkv" / path).exists()]
    assert not missing
