"""Ways to damage a folder of files, drawn from a seeded random generator."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

# values that a file should not have at most places
HUGE_NUMBERS = (10**4, 10**6, 10**9, 10**12, 2**31, 2**40, 2**63, 2**64, 10**29, -(2**63), -(10**12))
HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.5, 1e-300, 1e300, 1e308),
    *HUGE_NUMBERS,
    *("", "x", "NaN", "\0", "\u202e", "😀" * 3, "a" * 5000, "../../etc/passwd", "/dev/zero", "null", "-1", "1e400"),
    *([], {}, [[]], [None], [1, "a"], {"a": {"b": 1}}, {"": 0}, [0] * 1000),
    *("(a+)+$", "<|endoftext|>", "[MASK]", "line\nbreak", "é" * 300),
)
# texts that `json.dumps` does not write
HOSTILE_JSON = ("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 20000, '{"a":' * 3000, '"\\ud800"')
HOSTILE_JSON += ("[" * 150 + "]" * 150,)
HOSTILE_BYTES = (b"\0", b"\xff", b"\xfe\xff", b"\r", b"\n\n\n", b"\t" * 9, b'"', b"\xef\xbb\xbf", b",", b"{", b"]" * 9)
HOSTILE_BYTES += (b"9" * 400, b"\n" * 5000, b"a" * 70000, "\u2028".encode(), b"\x80", b"&a *a", b"!!timestamp x", b"%")
HOSTILE_LINKS = ("/dev/zero", "/dev/null", "/proc/self/mem", "/etc", "missing", "/dev/full")


def mutate(folder: Path, rng: random.Random, editable: Callable[[Path], bool]) -> str:
    """Damage one file of a folder and return a description of the damage."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and editable(path))
    if not files:
        return "nothing"
    path = rng.choice(files)
    whole_file = rng.random() < 0.08
    mutation = rng.choice(WHOLE_FILE if whole_file else _mutations_of(path))
    return f"{path.relative_to(folder)}: {mutation.__name__} {mutation(path, rng)}"


def _mutations_of(path: Path) -> tuple[Callable[[Path, random.Random], str], ...]:
    name = path.name.removesuffix(".gz")
    if name.endswith(".json"):
        return (*(replace_json_value,) * 6, *(remove_json_key,) * 2, insert_raw_json, swap_json_values, *BYTES)
    if name.endswith((".jsonl", ".ndjson")):
        return (*(edit_json_line,) * 6, *BYTES)
    if name.endswith((".yaml", ".yml")):
        return (*(edit_yaml_value,) * 6, *(duplicate_line, remove_line), *BYTES)
    if name.endswith(".safetensors"):
        return (*(edit_tensor_header,) * 6, *(edit_tensor_metadata,) * 4, fill_tensor_data, *BYTES)
    return (*BYTES, *(duplicate_line, remove_line, swap_fields))


# ---- JSON -----------------------------------------------------------------------------------------------------------


def _slots(value: Any, slots: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Collect the container and the key of each value of a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        slots.append((value, key))
        _slots(child, slots)
    return slots


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # an earlier mutation broke it
        return {}


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8", errors="surrogatepass")


def _pick_slot(document: Any, rng: random.Random) -> tuple[Any, Any] | None:
    """Choose a value; half of the time one near the top, because a vocabulary has most of the values."""
    slots = _slots(document, [])
    if slots and isinstance(document, dict) and rng.random() < 0.5:
        return document, rng.choice(sorted(document))
    return rng.choice(slots) if slots else None


def _hostile_value(old: Any, rng: random.Random) -> Any:
    choice = rng.random()
    if isinstance(old, int) and not isinstance(old, bool) and choice < 0.5:
        return rng.choice([old + 1, old - 1, -old, old * 2, old * 1000, float(old), str(old), *HUGE_NUMBERS])
    if isinstance(old, str) and choice < 0.3:
        return rng.choice([old * 2, old[:-1], old.upper(), old + "\0", [old], {old: old}])
    if isinstance(old, list) and old and choice < 0.4:
        return rng.choice([old[:-1], old + old, old[::-1], old[0], dict(enumerate(map(str, old)))])
    return rng.choice(HOSTILE_VALUES)


def replace_json_value(path: Path, rng: random.Random) -> str:
    document = _read(path)
    slot = _pick_slot(document, rng)
    if slot is None or rng.random() < 0.02:
        value = rng.choice(HOSTILE_VALUES)
        _write(path, value)
        return f"the document = {str(value)[:40]!r}"
    container, key = slot
    value = container[key] = _hostile_value(container[key], rng)
    _write(path, document)
    return f"{str(key)[:40]!r} = {str(value)[:40]!r}"


def remove_json_key(path: Path, rng: random.Random) -> str:
    document = _read(path)
    slot = _pick_slot(document, rng)
    if slot is None:
        return "nothing"
    del slot[0][slot[1]]
    _write(path, document)
    return f"{str(slot[1])[:40]!r}"


def swap_json_values(path: Path, rng: random.Random) -> str:
    document = _read(path)
    first, second = _pick_slot(document, rng), _pick_slot(document, rng)
    if first is None or second is None:
        return "nothing"
    (one, key), (other, other_key) = first, second
    try:
        copied = json.loads(json.dumps([one[key], other[other_key]]))
        other[other_key], one[key] = copied
    except (KeyError, IndexError):
        return "nothing"
    _write(path, document)
    return f"{str(key)[:40]!r} and {str(other_key)[:40]!r}"


def insert_raw_json(path: Path, rng: random.Random) -> str:
    document, raw = _read(path), rng.choice(HOSTILE_JSON)
    slot = _pick_slot(document, rng)
    if slot is not None:
        slot[0][slot[1]] = "@raw@"
    text = json.dumps(document).replace('"@raw@"', raw, 1) if slot is not None else raw
    path.write_text(text, encoding="utf-8")
    return f"{str(slot[1])[:40] if slot else ''!r} = {raw[:20]}"


def edit_json_line(path: Path, rng: random.Random) -> str:
    lines = path.read_bytes().split(b"\n")
    index = rng.randrange(len(lines))
    line = path.with_name(".line.json")
    line.write_bytes(lines[index] or b"{}")
    edit = rng.choice((replace_json_value, replace_json_value, remove_json_key, insert_raw_json))
    description = edit(line, rng)
    lines[index] = line.read_bytes()
    line.unlink()
    path.write_bytes(b"\n".join(lines))
    return f"line {index + 1}: {edit.__name__} {description}"


# ---- YAML, tensors, text --------------------------------------------------------------------------------------------

_YAML_VALUES = ("", "~", "[]", "{}", "-1", "1e999", ".nan", "-.inf", "10000000000", "9" * 5000, "1:30:20", "2024-01-01")
_YAML_VALUES += ("yes", "'x'", "x: y", "[" * 300, "!!timestamp x", "!!python/object/apply:os.getcwd []", "&a [*a]")
_YAML_VALUES += ("*b", "|\n  x", "{<<: 3}", "? x", '"\\0"', "0x7fffffffffffffff", "!!set {x}", "a" * 4000, "1_0")


def edit_yaml_value(path: Path, rng: random.Random) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    numbered = [index for index, line in enumerate(lines) if ": " in line]
    if not numbered:
        return "nothing"
    index = rng.choice(numbered)
    key, _, old = lines[index].partition(": ")
    value = rng.choice([*_YAML_VALUES, *(str(number) for number in HUGE_NUMBERS), old + old, old[:-1]])
    lines[index] = f"{key}: {value}"
    path.write_text("\n".join(lines), encoding="utf-8")
    return f"{key.strip()[:40]} = {value[:40]!r}"


def edit_tensor_header(path: Path, rng: random.Random) -> str:
    return _edit_header(path, rng, lambda header: header)


def edit_tensor_metadata(path: Path, rng: random.Random) -> str:
    """Change the JSON documents inside the metadata, such as the progress of a run."""
    return _edit_header(path, rng, lambda header: header.get("__metadata__", header))


def _edit_header(path: Path, rng: random.Random, section: Callable[[dict[str, Any]], Any]) -> str:
    content = path.read_bytes()
    try:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        part = section(header)
        slot = rng.choice(_slots(part, []))
        old = slot[0][slot[1]]
    except (struct.error, ValueError, IndexError, AttributeError, RecursionError):
        return "nothing"
    description = f"{str(slot[1])[:40]!r}"
    if isinstance(old, str) and old.startswith(("{", "[")):
        inner = json.loads(old)
        inner_slot = rng.choice(_slots(inner, []) or [(inner, None)])
        if inner_slot[1] is not None:
            inner_slot[0][inner_slot[1]] = _hostile_value(inner_slot[0][inner_slot[1]], rng)
            description += f" {inner_slot[1]!r} = {str(inner_slot[0][inner_slot[1]])[:40]!r}"
        slot[0][slot[1]] = json.dumps(inner)
    elif rng.random() < 0.3:
        del slot[0][slot[1]]
        description = f"removed {description}"
    else:
        slot[0][slot[1]] = _hostile_value(old, rng)
        description += f" = {str(slot[0][slot[1]])[:40]!r}"
    raw = json.dumps(header).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + length :])
    return description


def fill_tensor_data(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    start, pattern = rng.randrange(len(content) // 2, len(content) + 1), rng.choice((b"\xff", b"\0", b"\x7f\x80"))
    content[start:] = (pattern * len(content))[: len(content) - start]
    path.write_bytes(content)
    return f"from byte {start} with {pattern!r}"


def _edit_lines(path: Path, edit: Callable[[list[bytes], int], None], rng: random.Random) -> str:
    lines = path.read_bytes().split(b"\n")
    index = rng.randrange(len(lines))
    edit(lines, index)
    path.write_bytes(b"\n".join(lines))
    return f"line {index + 1}"


def duplicate_line(path: Path, rng: random.Random) -> str:
    return _edit_lines(path, lambda lines, index: lines.insert(index, lines[index]), rng)


def remove_line(path: Path, rng: random.Random) -> str:
    return _edit_lines(path, lambda lines, index: lines.pop(index) and None, rng)


def swap_fields(path: Path, rng: random.Random) -> str:
    separator = rng.choice((b"\t", b",", b" "))

    def reverse(lines: list[bytes], index: int) -> None:
        lines[index] = separator.join(lines[index].split(separator)[:: rng.choice((-1, 2))])

    return _edit_lines(path, reverse, rng)


# ---- bytes ----------------------------------------------------------------------------------------------------------


def flip_bytes(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    positions = [rng.randrange(len(content)) for _ in range(rng.choice((1, 1, 4, 32)))] if content else []
    for position in positions:
        content[position] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"at {positions[:4]}"


def insert_bytes(path: Path, rng: random.Random) -> str:
    content, inserted = path.read_bytes(), rng.choice(HOSTILE_BYTES)
    position = rng.randrange(len(content) + 1)
    path.write_bytes(content[:position] + inserted + content[position:])
    return f"{inserted[:12]!r} at {position}"


def remove_bytes(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    start = rng.randrange(len(content) + 1)
    end = min(len(content), start + rng.choice((1, 2, 8, 100)))
    path.write_bytes(content[:start] + content[end:])
    return f"{start} to {end}"


def truncate(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    size = rng.randrange(len(content) + 1)
    path.write_bytes(content[:size])
    return f"to {size} of {len(content)} bytes"


def repeat_bytes(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    start = rng.randrange(len(content) + 1)
    path.write_bytes(content[: start + 50] + content[start:])
    return f"from {start}"


# ---- whole files ----------------------------------------------------------------------------------------------------


def empty(path: Path, rng: random.Random) -> str:  # noqa: ARG001
    path.write_bytes(b"")
    return ""


def remove(path: Path, rng: random.Random) -> str:  # noqa: ARG001
    path.unlink()
    return ""


def swap_files(path: Path, rng: random.Random) -> str:
    regular_files = (file for file in path.parent.iterdir() if file.is_file() and not file.is_symlink())
    other = rng.choice(sorted(regular_files))
    content, other_content = path.read_bytes(), other.read_bytes()
    path.write_bytes(other_content)
    other.write_bytes(content)
    return f"with {other.name}"


def make_link(path: Path, rng: random.Random) -> str:
    target = rng.choice((*HOSTILE_LINKS, path.name))
    path.unlink()
    path.symlink_to(target)
    return f"to {target}"


def make_folder(path: Path, rng: random.Random) -> str:  # noqa: ARG001
    path.unlink()
    path.mkdir()
    return ""


def make_pipe(path: Path, rng: random.Random) -> str:  # noqa: ARG001
    path.unlink()
    os.mkfifo(path)
    return ""


def make_unreadable(path: Path, rng: random.Random) -> str:  # noqa: ARG001
    os.chmod(path, 0)
    return ""


def fill_with_noise(path: Path, rng: random.Random) -> str:
    path.write_bytes(rng.randbytes(rng.choice((1, 8, 100, 5000))))
    return ""


BYTES = (flip_bytes, insert_bytes, remove_bytes, truncate, repeat_bytes)
WHOLE_FILE = (empty, remove, swap_files, make_link, make_folder, make_pipe, make_unreadable, fill_with_noise)
