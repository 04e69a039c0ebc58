"""Recognize the model folders of sentence-transformers, whose vectors of texts were trained with one pooling."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from qkv.checkpoints.hub import resolve
from qkv.files import read_json

_POOLING_FILE = Path("1_Pooling") / "config.json"
_POOLING_KEYS: dict[str, Literal["mean", "first", "last"]] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_lasttoken": "last",
}


def sentence_pooling(name: str | Path) -> Literal["mean", "first", "last"] | None:
    """Return the pooling of a sentence encoder; None for another model, and for poolings that heads do not have."""
    path = resolve(name) / _POOLING_FILE
    if not path.is_file():
        return None
    config = read_json(path)
    modes = [
        key
        for key, value in (config.items() if isinstance(config, dict) else ())
        if key.startswith("pooling_mode_") and value is True
    ]
    return _POOLING_KEYS.get(modes[0]) if len(modes) == 1 else None
