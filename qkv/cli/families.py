"""`qkv families`: a table of the model families."""

from __future__ import annotations

from qkv.cli.options import Json


def list_families(as_json: Json = False) -> None:
    """List the model families with presets, parameter counts, heads and papers.

    Example:
        qkv families
    """
    import json

    from qkv.analysis.family_table import family_rows, render_family_table

    rows = family_rows()
    print(json.dumps(rows, indent=2) if as_json else render_family_table(rows))
