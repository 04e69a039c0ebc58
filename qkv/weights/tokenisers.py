"""A tokeniser by the name of what has one: a run, a checkpoint, a folder, a file."""

from __future__ import annotations

from pathlib import Path

from qkv import families
from qkv.errors import InputError
from qkv.text.huggingface import read_tokeniser, read_tokenisers
from qkv.text.template import Template
from qkv.text.tokeniser import Tokeniser
from qkv.weights.folder import SOURCE, TARGET
from qkv.weights.hub import resolve
from qkv.weights.huggingface import CONFIG, read_json


def find_tokenisers(name: str) -> tuple[Tokeniser, Tokeniser]:
    """Source's and target's, of a run, a checkpoint, a tokeniser's folder or its one file, or a name in the cache."""
    if Path(name).is_file():
        one = read_tokeniser(Path(name), families.templates())
        return one, one
    folder = resolve(name)
    if (folder / SOURCE).is_file():
        source = Tokeniser.load(folder / SOURCE)
        return source, Tokeniser.load(folder / TARGET) if (folder / TARGET).is_file() else source
    found = read_tokenisers(folder, _template_of_checkpoint(folder), families.templates())
    if found is None:
        raise InputError(f"{folder}: has no tokeniser (tokenizer.json, vocab.txt and so on); name another folder")
    return found


def _template_of_checkpoint(folder: Path) -> Template | None:
    """That of the family which a config.json names; a tokeniser may be shown though its model is none of ours."""
    path = folder / CONFIG
    try:
        family = families.of_model_type(str(read_json(path).get("model_type")), str(path)) if path.is_file() else None
    except InputError:
        return None
    template: Template | None = getattr(family, "TEMPLATE", None)
    return template
