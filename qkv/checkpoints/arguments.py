"""Arguments of the public functions: a model as a bundle, a path or a predictor; texts as any sequence."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from qkv.checkpoints.inputs import TextOrPair
from qkv.errors import InputError, check_path, describe_value
from qkv.nn.device import find_device

if TYPE_CHECKING:
    from qkv.checkpoints.bundle import ModelBundle


def as_bundle(model: Any, name: str = "model", device: str | torch.device | None = None) -> ModelBundle:
    """Return a model: a bundle as it is, the bundle of a predictor, or the model that is loaded from a path.

    Args:
        model: a `ModelBundle`, a `Predictor`, the folder of a run or checkpoint, or a name in the Hugging Face cache.
        name: the parameter in error messages.
        device: where a model is loaded that is named by a path; None: the GPU if there is one.
    """
    from qkv.checkpoints.bundle import ModelBundle
    from qkv.checkpoints.model_folder import load

    bundle = model if isinstance(model, ModelBundle) else getattr(model, "bundle", None)
    if isinstance(bundle, ModelBundle):
        return bundle
    expected = "a model that qkv.load returns, or the path of a run or checkpoint"
    if isinstance(model, torch.nn.Module):
        raise InputError(f"{name}: expected {expected}, not a bare {type(model).__name__}; give the bundle of it")
    return load(check_path(model, name, expected), find_device(device))


def as_list(values: Any, name: str) -> list[Any]:
    """Return the items of a list, tuple, array, pandas Series, `datasets` column or generator; a text is one item.

    A table and a mapping are refused: iterating over them gives the names of columns.
    """
    if isinstance(values, str | os.PathLike):
        return [values]
    if isinstance(values, Mapping) or hasattr(values, "column_names") or hasattr(values, "columns"):
        raise InputError(f'{name}: expected a list of texts, not {describe_value(values)}; choose a column, ["text"]')
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise InputError(f"{name}: expected a list of texts, not {describe_value(values)}")
    items: Any = values
    try:
        # the items of a NumPy array of texts are of a type of its own until they are converted
        is_text_array = getattr(getattr(items, "dtype", None), "kind", "") in ("U", "T") and items.ndim
        return items.tolist() if is_text_array else list(items)
    except TypeError:  # an array or tensor without dimensions
        raise InputError(f"{name}: expected a list of texts, not {describe_value(values)}") from None


def as_texts(values: Any, name: str = "texts") -> list[TextOrPair]:
    """Return texts and pairs of texts as a list, or refuse anything else; see `as_list`."""
    items = as_list(values, name)
    for index, item in enumerate(items):
        if not isinstance(item, str):
            items[index] = _as_pair(item, f"{name}, item {index + 1}")
    return items


def _as_pair(item: Any, location: str) -> tuple[str, str]:
    if is_missing(item):
        raise InputError(f"{location}: is missing; give a text")
    texts = list(item) if isinstance(item, list | tuple) else []
    if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{location}: expected a text or a pair of texts, not {describe_value(item)}")
    return texts[0], texts[1]


def is_missing(value: object) -> bool:
    """Return whether a value is None, NaN or one of the marks of pandas for a missing value."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")
