"""A corpus cut into ids once and for all: files that are mapped into memory, built so that a kill costs one shard.

A folder holds shards, each a safetensors file with the ids of some documents, where each document ends and where each
sentence ends, and `meta.json`, which says what they were made of. A shard is whole or not there, and what it holds
depends on the documents, the tokeniser and `shard_tokens` alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as safetensors_bytes

from qkv.data.corpus import Corpus, Document
from qkv.data.encoded import Encoded, Part, encode_parts, join, tokeniser_digest
from qkv.errors import InputError
from qkv.files import write_bytes, write_text
from qkv.text.tokeniser import Tokeniser

META = "meta.json"
SHARD_TOKENS = 2**26  # 128 MiB of two-byte ids
_VERSION = 1
_NOTE = "qkv"
_ARRAYS = ("ids", "documents", "sentences")
_KINDS: dict[str, np.dtype[Any]] = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4"), "I64": np.dtype("<i8")}
_AGAIN = "give the same qkv data build command again"

# Documents and tokens that are in whole shards or on their way there.
Tell = Callable[[int, int], None]


class Shards(Encoded):
    """A folder that `build` has finished, by mapped memory: opening it reads next to nothing.

    With `tokeniser`, a folder that was built with another one is refused. Sizes and counts are checked here; `check`
    also reads every byte.
    """

    def __init__(self, folder: str | Path, tokeniser: Tokeniser | None = None, *, check: bool = False) -> None:
        self.folder = Path(folder)
        meta = _read_meta(self.folder)
        if meta is None:
            raise InputError(f"{self.folder}: has no {META}, so it is no built corpus; see qkv data build")
        if "shards" not in meta:
            raise InputError(f"{self.folder}: is not finished; {_AGAIN}")
        self.meta = meta
        if tokeniser is not None and tokeniser_digest(tokeniser) != self.meta["tokeniser"]:
            raise InputError(f"{self.folder}: was built with another tokeniser; build it again, or load that tokeniser")
        parts = []
        for number, expected in enumerate(self.meta["shards"]):
            path = _shard(self.folder, number)
            part, about = _open(path)
            if about != expected or (check and part.digest() != about["digest"]):
                raise InputError(f"{path}: damaged, or of another build; remove {self.folder} and build it again")
            parts.append(part)
        super().__init__(parts)

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Shards, (self.folder,)  # a copy in another process maps the files again

    def digest(self) -> str:
        """The same for the same ids in the same shards; read off the index."""
        found = " ".join(shard["digest"] for shard in self.meta["shards"])
        return hashlib.blake2b(f"{self.meta['tokeniser']} {found}".encode(), digest_size=16).hexdigest()


def build(
    folder: str | Path,
    documents: Iterable[Document],
    tokeniser: Tokeniser,
    *,
    workers: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    tell: Tell = lambda documents, tokens: None,  # noqa: ARG005
) -> Shards:
    """Encodes the documents into `folder`; goes on after its last whole shard if it was begun before.

    A shard ends with the document that brings it to `shard_tokens`. Given again, the documents must be the same: of a
    `Corpus`, names and sizes of the files are compared. `tell` is called with what an earlier call has left, then
    again and again.
    """
    folder = Path(folder)
    if shard_tokens < 1:
        raise InputError(f"a shard of {shard_tokens} tokens cannot be; use 1 or more")
    plan = _plan(documents, tokeniser, shard_tokens)
    if _claim(folder, plan):
        return Shards(folder, tokeniser)
    told = list(_whole(folder))
    count, tokens = (sum(shard[name] for shard in told) for name in ("documents", "tokens"))
    rest = _after(documents, count, folder)
    parts = _counted(encode_parts(rest, tokeniser, workers=workers), count, tokens, tell)
    for part in _shard_parts(parts, shard_tokens):
        about = _about(part)
        tensors = {name: np.ascontiguousarray(getattr(part, name)) for name in _ARRAYS}
        # One note only: the library writes several in any order, and the bytes have to be the same each time.
        write_bytes(_shard(folder, len(told)), safetensors_bytes(tensors, {_NOTE: json.dumps(about)}))
        told.append(about)
    if not any(shard["tokens"] for shard in told):
        raise InputError(f"{folder}: the corpus has no text, so that there is nothing to build; give some")
    totals = {name: sum(shard[name] for shard in told) for name in ("documents", "sentences", "tokens")}
    write_text(folder / META, json.dumps({**plan, **totals, "shards": told}, ensure_ascii=False, indent=2) + "\n")
    return Shards(folder, tokeniser)


def _plan(documents: Iterable[Document], tokeniser: Tokeniser, shard_tokens: int) -> dict[str, Any]:
    """What a build is begun with; all that decides its bytes."""
    described = documents.described() if isinstance(documents, Corpus) else {}
    made = {"version": _VERSION, "tokeniser": tokeniser_digest(tokeniser), "vocabulary": tokeniser.size}
    return {**made, "shard_tokens": shard_tokens, **described}


def _claim(folder: Path, plan: dict[str, Any]) -> bool:
    """Whether the folder is built already; another corpus in it is refused, and one with nothing in it is taken."""
    earlier = _read_meta(folder)
    if earlier is None and folder.exists() and not (folder.is_dir() and _bare(folder)):
        raise InputError(f"{folder}: is there already and is no corpus; choose another folder, or remove it first")
    if earlier is None or not ("shards" in earlier or _shard(folder, 0).is_file()):
        write_text(folder / META, json.dumps(plan, ensure_ascii=False, indent=2) + "\n")
        return False
    for key in sorted({*plan, *earlier} - {"shards", "documents", "sentences", "tokens"}):
        if earlier.get(key) != plan.get(key):
            said = f"holds a corpus of another '{key}'"
            raise InputError(f"{folder}: {said}; choose another folder, or remove it first")
    return "shards" in earlier


def _bare(folder: Path) -> bool:
    """Whether nothing but what a kill may have left beside a file is in it."""
    return all(path.name.startswith(".") for path in folder.iterdir())


def _read_meta(folder: Path) -> dict[str, Any] | None:
    path = folder / META
    if not path.is_file():
        return None
    try:
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = meta["version"]
    except OSError as problem:
        raise InputError(f"{path}: cannot be read ({problem.strerror})") from None
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{path}: damaged; remove {folder} and build it again") from None
    if version != _VERSION:
        raise InputError(f"{path}: of version {version}, where this qkv reads {_VERSION}; build the corpus again")
    return meta


def _shard(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.safetensors"


def _whole(folder: Path) -> Iterator[dict[str, Any]]:
    """What the shards of an unfinished build say of themselves."""
    for number in itertools.count():
        path = _shard(folder, number)
        if not path.is_file():
            return
        yield _open(path)[1]


def _after(documents: Iterable[Document], count: int, folder: Path) -> Iterator[Document]:
    """The documents after the first `count`, which are read over."""
    left = iter(documents)
    read = sum(1 for _ in itertools.islice(left, count))
    if read < count:
        raise InputError(
            f"{folder}: was begun with {count} documents or more, and now there are {read}; remove it first"
        )
    return left


def _counted(parts: Iterable[Part], documents: int, tokens: int, tell: Tell) -> Iterator[Part]:
    tell(documents, tokens)
    for part in parts:
        documents += len(part.documents)
        tokens += len(part.ids)
        tell(documents, tokens)
        yield part


def _shard_parts(parts: Iterable[Part], shard_tokens: int) -> Iterator[Part]:
    """The same documents in parts that end with the document that reaches `shard_tokens`, and what is left."""
    waiting: list[Part] = []
    held = 0
    for part in parts:
        left = part
        while held + len(left.ids) >= shard_tokens:
            last = int(np.searchsorted(left.documents, shard_tokens - held)) + 1
            yield join([*waiting, left.between(0, last)])
            left = left.between(last, len(left.documents))
            waiting, held = [], 0
        if len(left.documents):
            waiting.append(left)
            held += len(left.ids)
    if waiting:
        yield join(waiting)


def _about(part: Part) -> dict[str, Any]:
    counts = {"documents": len(part.documents), "sentences": len(part.sentences), "tokens": len(part.ids)}
    return {**counts, "digest": part.digest()}


def _open(path: Path) -> tuple[Part, dict[str, Any]]:
    """A shard's arrays, as views of the mapped file, and what it says of itself."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size:
                raise ValueError
            header = json.loads(file.read(length))
        arrays = _views(path, header, 8 + length, size)
        about = json.loads(header["__metadata__"][_NOTE])
        part = Part(*arrays)
        ends = [array[-1] if len(array) else 0 for array in arrays[1:]]
        counts = [about["tokens"], about["documents"], about["sentences"]]
        if [*map(len, arrays)] != counts or any(end != len(part.ids) for end in ends):
            raise ValueError
    except FileNotFoundError:
        raise InputError(f"{path}: is missing; restore it, or remove {path.parent} and build it again") from None
    except OSError as problem:
        raise InputError(f"{path}: cannot be read ({problem.strerror})") from None
    except (ValueError, TypeError, KeyError, UnicodeDecodeError):
        raise InputError(f"{path}: damaged; remove {path.parent} and build it again") from None
    return part, about


def _views(path: Path, header: dict[str, Any], start: int, size: int) -> list[Any]:
    whole = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    ends = [header[name]["data_offsets"][1] for name in _ARRAYS]
    if start + max(ends) != size:
        raise ValueError
    found = []
    for name in _ARRAYS:
        begin, end = header[name]["data_offsets"]
        found.append(whole[start + begin : start + end].view(_KINDS[header[name]["dtype"]]))
    return found
