"""Which settings a published benchmark is usually run with, by the name of its format."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "glue:CoLA": ("classify", {"metric": "matthews"}),
    "glue:MRPC": ("classify", {"positive": "equivalent", "metric": "f1"}),
    "glue:QQP": ("classify", {"positive": "duplicate", "metric": "f1"}),
    "glue:STS-B": ("rate", {}),
    "superglue:CB": ("classify", {"metric": "f1_macro"}),
    "superglue:AX-b": ("classify", {"metric": "matthews"}),
    "superglue:MultiRC": ("classify", {"positive": "true", "metric": "f1"}),
    "superglue:WiC": ("classify", {"mark": True}),
    "superglue:WSC": ("classify", {"mark": True}),
}


def default_settings(format: str, task: str) -> dict[str, Any]:
    """The settings of a task on a benchmark where a recipe gives no others; none for any other data."""
    by_name = {name.casefold(): defaults for name, defaults in DEFAULTS.items()}
    name, settings = by_name.get(format.casefold(), ("", {}))
    return dict(settings) if name == task else {}
