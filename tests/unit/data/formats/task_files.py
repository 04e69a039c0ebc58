"""Small files in all formats, and the check of an error message for a bad file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qkv.data.formats import read
from qkv.errors import InputError


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def json_lines(path: Path, *records: Any) -> Path:
    return written(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def tabs(*rows: str) -> str:
    """Replace `|` by tabs, so that rows are readable in the tests."""
    return "".join(row.replace("|", "\t") + "\n" for row in rows)


def refused(place: str, complaint: str, format: str, path: Path, **arguments: Any) -> str:
    """Check that reading fails with one line: the location, then the reason."""
    with pytest.raises(InputError) as problem:
        read(format, path, **arguments)
    said = str(problem.value)
    assert "\n" not in said
    assert re.match(f"{re.escape(place)}: .*{complaint}", said), said
    return said
