"""The recipes that come with qkv: YAML files in `qkv/recipe/library`, by name."""

from __future__ import annotations

import re
from pathlib import Path

from qkv.errors import InputError, did_you_mean, quote
from qkv.files import atomic_write_text, read_text_file

LIBRARY = Path(__file__).parent / "library"


def recipe_names() -> list[str]:
    """Return the names of all packaged recipes."""
    return sorted(path.stem for path in LIBRARY.glob("*.yaml"))


def packaged_recipe(name: str) -> Path:
    """Return the file of a packaged recipe."""
    if name not in recipe_names():
        raise InputError(f"no recipe {quote(name)}; {did_you_mean(name[:60], recipe_names())}")
    return LIBRARY / f"{name}.yaml"


def find_recipe(path: str | Path) -> Path:
    """Return the file of a recipe, which may be the name of a packaged one; a file of that name takes precedence."""
    name, file = str(path), Path(path)
    if name in recipe_names() and not file.is_file():
        return packaged_recipe(name)
    if not file.suffix and "/" not in name and not file.exists():
        hint = did_you_mean(name[:60], recipe_names())
        raise InputError(f"{quote(name)}: no such recipe; {hint if hint.endswith('?') else 'qkv recipes lists them'}")
    if file.is_dir():
        raise InputError(
            f"{quote(name)}: is a folder, not a recipe; a run is continued by: qkv train --resume -o {name}"
        )
    return file


def describe_recipe(name: str) -> str:
    """Return the first sentence of the comment at the head of a packaged recipe."""
    head = re.match(r"(?:#.*\n)+", read_text_file(packaged_recipe(name)))
    text = " ".join(line.lstrip("# ") for line in head[0].splitlines()) if head else ""
    return re.split(r"(?<! al)\.\s", text, maxsplit=1)[0].rstrip(".")  # not at "et al."


def copy_recipe(name: str, folder: Path) -> Path:
    """Write a packaged recipe to a folder, where no file of its name may be; return the file."""
    source, target = packaged_recipe(name), folder / f"{name}.yaml"
    if target.exists():
        raise InputError(f"{target}: already exists; remove it first, or choose another folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; choose a folder")
    atomic_write_text(target, read_text_file(source))
    return target
