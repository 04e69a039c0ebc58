"""The house's own rules, read from the source: which way imports go, and what never comes in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import qkv

ROOT = Path(qkv.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# spec ← nn ← {families, weights} ← {objectives, decode, look} ← evaluate ← tasks ← train ← {serve, cli}
FLOORS = [
    {"errors", "files", "spec"},
    {"nn"},
    {"families", "weights"},
    {"objectives", "decode", "look"},
    {"evaluate"},
    {"tasks"},
    {"train"},
    {"serve", "cli", "__main__"},
]
BESIDE = {"text", "data"}  # know nothing of models: any floor above nn may use them
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def part_of(path: Path) -> str:
    """The folder or file directly under qkv/."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, at any depth of nesting, as (line, dotted name)."""
    package = ["qkv", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, whole
            if whole == "qkv":  # from qkv import spec
                yield from ((node.lineno, f"qkv.{alias.name}") for alias in node.names)


def used_parts(path: Path) -> Iterator[tuple[int, str]]:
    """The parts of qkv that a file uses."""
    for line, name in imports(path):
        words = name.split(".")
        if words[0] == "qkv" and len(words) > 1:
            yield line, words[1]


def parts() -> list[str]:
    return sorted({part_of(path) for path in FILES} - {"__init__"})


def files_of(part: str) -> list[Path]:
    return [path for path in FILES if part_of(path) == part]


@pytest.mark.parametrize("part", parts())
def test_every_part_has_its_floor(part: str) -> None:
    assert part in FLOOR or part in BESIDE, f"qkv/{part}: say in tests/test_house.py on which floor it stands"


@pytest.mark.parametrize("part", [part for part in parts() if part in FLOOR])
def test_a_part_imports_nothing_from_a_floor_above_its_own(part: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports qkv.{used}"
        for path in files_of(part)
        for line, used in used_parts(path)
        if FLOOR.get(used, -1) > FLOOR[part]
    ]
    assert not wrong


@pytest.mark.parametrize("part", ["errors", "files", "spec", "nn"])
def test_the_mathematics_know_nothing_of_text_and_data(part: str) -> None:
    used = {name for path in files_of(part) for _, name in used_parts(path)}
    assert not used & BESIDE


@pytest.mark.parametrize("part", sorted(BESIDE))
def test_text_and_data_know_nothing_of_models(part: str) -> None:
    used = {name for path in files_of(part) for _, name in used_parts(path)}
    assert used <= {"errors", "files", "spec", *BESIDE}


def test_the_product_never_imports_transformers() -> None:
    peers = {"transformers", "fairseq", "joeynmt", "eole"}
    wrong = [f"{path}:{line}" for path in FILES for line, name in imports(path) if name.split(".")[0] in peers]
    assert not wrong


@pytest.mark.parametrize("name", ["spec.py", "errors.py", "files.py"])
def test_a_spec_is_data_and_imports_no_torch(name: str) -> None:
    assert "torch" not in {used.split(".")[0] for _, used in imports(ROOT / name)}


def test_spec_and_nn_do_without_pydantic() -> None:
    used = {name.split(".")[0] for part in ("spec", "nn") for path in files_of(part) for _, name in imports(path)}
    assert "pydantic" not in used


def test_there_are_at_most_twenty_public_names() -> None:
    assert 0 < len(qkv.__all__) <= 20


def test_every_public_name_is_there() -> None:
    assert [name for name in qkv.__all__ if not hasattr(qkv, name)] == []
