"""Find the tokenizers of a run, a checkpoint, a folder or a file."""

from __future__ import annotations

from pathlib import Path

from qkv import families
from qkv.checkpoints.hf_checkpoint import CONFIG_FILE, read_json
from qkv.checkpoints.hub import resolve
from qkv.checkpoints.model_folder import SOURCE_TOKENIZER_FILE, TARGET_TOKENIZER_FILE
from qkv.errors import InputError
from qkv.tokenization.hf import load_tokenizer, load_tokenizers
from qkv.tokenization.template import Template
from qkv.tokenization.tokenizer import Tokenizer


def find_tokenizers(name: str) -> tuple[Tokenizer, Tokenizer]:
    """Return the source and target tokenizers of a run, a checkpoint, a folder, a file, or a name in the cache."""
    if Path(name).is_file():
        tokenizer = load_tokenizer(Path(name), families.tokenizer_templates())
        return tokenizer, tokenizer
    folder = resolve(name)
    if (folder / SOURCE_TOKENIZER_FILE).is_file():
        source_tokenizer = Tokenizer.load(folder / SOURCE_TOKENIZER_FILE)
        if not (folder / TARGET_TOKENIZER_FILE).is_file():
            return source_tokenizer, source_tokenizer
        return source_tokenizer, Tokenizer.load(folder / TARGET_TOKENIZER_FILE)
    tokenizers = load_tokenizers(folder, _checkpoint_template(folder), families.tokenizer_templates())
    if tokenizers is None:
        raise InputError(f"{folder}: has no tokenizer (tokenizer.json, vocab.txt and so on); name another folder")
    return tokenizers


def _checkpoint_template(folder: Path) -> Template | None:
    """Return the template of the family in config.json; None for a family that qkv does not have."""
    path = folder / CONFIG_FILE
    try:
        family = families.by_model_type(read_json(path).get("model_type"), str(path)) if path.is_file() else None
    except InputError:
        return None
    template: Template | None = getattr(family, "TOKENIZER_TEMPLATE", None)
    return template
