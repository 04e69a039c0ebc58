"""The usual task settings of published benchmarks, by the name of their format."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "glue:CoLA": ("text_classification", {"metric": "matthews_correlation"}),
    "glue:MRPC": ("text_classification", {"positive_label": "equivalent", "metric": "f1"}),
    "glue:QQP": ("text_classification", {"positive_label": "duplicate", "metric": "f1"}),
    "glue:STS-B": ("regression", {}),
    "superglue:CB": ("text_classification", {"metric": "f1_macro"}),
    "superglue:AX-b": ("text_classification", {"metric": "matthews_correlation"}),
    "superglue:MultiRC": ("text_classification", {"positive_label": "true", "metric": "f1"}),
    "superglue:WiC": ("text_classification", {"mark_spans": True}),
    "superglue:WSC": ("text_classification", {"mark_spans": True}),
}


def default_settings(format: str, task: str) -> dict[str, Any]:
    """Return the settings of a task on a benchmark's format, {} for any other format."""
    by_name = {name.casefold(): defaults for name, defaults in DEFAULTS.items()}
    name, settings = by_name.get(format.casefold(), ("", {}))
    return dict(settings) if name == task else {}
