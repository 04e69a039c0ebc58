"""Rules of the package layout, read from the source: the direction of imports, and what is never imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qkv

ROOT = Path(qkv.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# a package imports from its own layer and those above it in this list, never from one below
LAYERS = [
    {"errors", "files", "json_reader", "limits", "yaml_reader"}
    | {"foreign_names", "registry", "renamed", "score_functions", "spec"},
    {"tokenization", "data"},
    {"nn"},
    {"families"},
    {"recipe"},
    {"checkpoints"},
    {"objectives", "generation", "analysis"},
    {"metrics"},
    {"tasks"},
    {"reports"},
    {"train"},
    {"register"},
    {"serve", "cli"},
]
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
TEXT_AND_DATA = {"tokenization", "data"}


def package_of(path: Path) -> str:
    """Return the folder or file directly under qkv/ that a source file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every module that a file imports, function-level imports included, as (line, dotted name)."""
    package = ["qkv", *path.relative_to(ROOT).parent.parts]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
            if module == "qkv":  # from qkv import spec
                yield from ((node.lineno, f"qkv.{alias.name}") for alias in node.names)


def type_checking_lines(path: Path) -> set[int]:
    """Return the lines inside `if TYPE_CHECKING:`, which import nothing at run time."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    return {line for block in blocks for line in range(block.lineno, (block.end_lineno or block.lineno) + 1)}


def used_packages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the packages of qkv that a file uses at run time."""
    ignored = type_checking_lines(path)
    for line, name in imports(path):
        components = name.split(".")
        if components[0] == "qkv" and len(components) > 1 and line not in ignored:
            yield line, components[1]


def packages() -> list[str]:
    return sorted({package_of(path) for path in FILES} - {"__init__"})


def files_of(package: str) -> list[Path]:
    return [path for path in FILES if package_of(path) == package]


@pytest.mark.parametrize("package", packages())
def test_every_package_has_a_layer(package: str) -> None:
    assert package in LAYER, f"qkv/{package}: add it to LAYERS in tests/test_architecture.py"


@pytest.mark.parametrize("package", packages())
def test_a_package_imports_nothing_from_a_layer_below_its_own(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports qkv.{used}"
        for path in files_of(package)
        for line, used in used_packages(path)
        if LAYER.get(used, -1) > LAYER[package]
    ]
    assert not wrong


def test_no_two_packages_import_each_other_not_even_inside_functions() -> None:
    edges = {(package_of(path), used) for path in FILES for _, used in used_packages(path)}
    edges = {(user, used) for user, used in edges if user != used and used in LAYER and user in LAYER}
    reachable = {package: {used for user, used in edges if user == package} for package in packages()}
    for _ in reachable:  # transitive closure
        for uses in reachable.values():
            uses |= {further for used in set(uses) for further in reachable.get(used, set())}
    assert [package for package, uses in reachable.items() if package in uses] == []


@pytest.mark.parametrize("package", ["errors", "files", "registry", "renamed", "spec", "nn"])
def test_nn_and_spec_import_neither_tokenization_nor_data(package: str) -> None:
    used = {name for path in files_of(package) for _, name in used_packages(path)}
    assert not used & TEXT_AND_DATA


@pytest.mark.parametrize("package", ["tokenization", "data", "recipe"])
def test_text_data_and_recipes_import_nothing_from_nn(package: str) -> None:
    used = {name for path in files_of(package) for _, name in used_packages(path)}
    assert "nn" not in used


def test_the_product_never_imports_transformers() -> None:
    peers = {"transformers", "fairseq", "joeynmt", "eole"}
    wrong = [f"{path}:{line}" for path in FILES for line, name in imports(path) if name.split(".")[0] in peers]
    assert not wrong


def test_reading_a_recipe_imports_no_torch() -> None:
    """Every recipe of the repository, so that each family, objective and task section is validated."""
    code = (
        "import sys; from pathlib import Path; import qkv.recipe, qkv.recipe.schema, qkv.recipe.parse\n"
        "for path in sorted(Path('recipes').glob('*.yaml')): qkv.recipe.read_recipe(path)\n"
        "assert 'torch' not in sys.modules, sorted(m for m in sys.modules if m.startswith('qkv'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_qkv_imports_no_torch() -> None:
    code = "import sys, qkv; dir(qkv); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_spec_and_nn_do_without_pydantic() -> None:
    used = {name.split(".")[0] for package in ("spec", "nn") for path in files_of(package) for _, name in imports(path)}
    assert "pydantic" not in used


def test_there_are_at_most_twenty_public_names() -> None:
    assert 0 < len(qkv.__all__) <= 20


def test_every_public_name_exists_and_is_listed_by_dir() -> None:
    assert [name for name in qkv.__all__ if not hasattr(qkv, name)] == []
    assert set(qkv.__all__) <= set(dir(qkv))
