"""Limits on what is read, so that a damaged or hostile file is refused instead of filling the memory.

Every limit can be raised by an environment variable, which the error message names: `QKV_LIMIT_LINE_BYTES=100000000`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from qkv.errors import InputError

_PREFIX = "QKV_LIMIT_"
_MiB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """The limits and their defaults."""

    config_bytes: int = 64 * _MiB
    """Bytes of a JSON file of a checkpoint: config, spec, tokenizer, index."""
    data_json_bytes: int = 1024 * _MiB
    """Bytes of a JSON document of a dataset that is read as a whole, such as a SQuAD file."""
    recipe_bytes: int = _MiB
    """Bytes of a recipe."""
    nesting: int = 100
    """Depth of nested lists and objects in JSON and YAML."""
    digits: int = 400
    """Characters of a number in JSON and YAML."""
    yaml_aliases: int = 100
    """Aliases in a YAML file."""
    yaml_values: int = 100_000
    """Values of a YAML file, where an alias counts as many as what it stands for."""
    line_bytes: int = 16 * _MiB
    """Bytes of a line of text."""
    record_lines: int = 100_000
    """Lines of one record of a CSV file."""
    empty_lines: int = 1_000_000
    """Empty lines in succession in a file of texts."""
    text_chars: int = 1_000_000
    """Characters of a text that a model predicts for."""
    text_growth: int = 32
    """How many times longer a text may become when a tokenizer normalizes it."""
    document_bytes: int = 256 * _MiB
    """Bytes of a document of a corpus that spans several lines."""
    image_pixels: int = 1 << 26
    """Pixels of an image file."""
    resized_pixels: int = 1 << 24
    """Pixels of an image after resizing and cropping."""
    layers: int = 1000
    """Layers of a stack."""
    dimension: int = 1 << 20
    """Width of a hidden state, and any other dimension of a layer."""
    vocabulary: int = 1 << 24
    """Entries of a vocabulary, labels of a head, and positions."""
    position_table: int = 1 << 25
    """Numbers in a table of sinusoidal positions, which is computed when a model is loaded."""
    beams: int = 10_000
    """Beams of a search, and alternatives of a prediction."""
    workers: int = 256
    """Threads that prepare data."""
    samples: int = 1000
    """Outputs that a validation prints."""


_DEFAULTS = {field.name: field.default for field in fields(Limits)}


def limit(name: str) -> int:
    """Return a limit by the name of its field in `Limits`: its environment variable, or its default."""
    default = _DEFAULTS[name]
    assert isinstance(default, int)
    raw = os.environ.get(_PREFIX + name.upper())
    if raw is None:
        return default
    if not raw.isascii() or not raw.isdigit() or len(raw) > 18:
        raise InputError(f"{_PREFIX}{name.upper()} must be a whole number, not '{raw[:60]}'")
    return int(raw)


def raise_hint(name: str) -> str:
    """Return the end of an error message: how to raise a limit."""
    return f"the limit is {limit(name):,}; {_PREFIX}{name.upper()} raises it"
