"""A tokenized corpus on disk, in memory-mapped files; an interrupted build loses at most one shard.

A folder has shards, which are safetensors files with the token ids of some documents and the ends of documents and
sentences, and `meta.json` with the settings of the build. A shard is written atomically, and its bytes depend on the
documents, the tokenizer and `shard_tokens` only.
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

from qkv.data.corpora.corpus import Corpus, Document
from qkv.data.corpora.tokenized_corpus import TokenBlock, TokenizedCorpus, concat, encode_blocks, tokenizer_fingerprint
from qkv.errors import InputError, quote
from qkv.files import atomic_write_bytes, atomic_write_text, parse_json, read_text_file
from qkv.limits import limit
from qkv.tokenization.tokenizer import Tokenizer

META = "meta.json"
SHARD_TOKENS = 2**26  # 128 MiB of two-byte ids
_VERSION = 2
_METADATA_KEY = "qkv"
_TENSOR_NAMES = ("ids", "document_ends", "sentence_ends")
_DTYPES: dict[str, np.dtype[Any]] = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4"), "I64": np.dtype("<i8")}
_RERUN_HINT = "give the same qkv data build command again"

ProgressCallback = Callable[[int, int], None]  # called with the number of documents and tokens encoded so far


class Shards(TokenizedCorpus):
    """A corpus built by `build_shards`, memory-mapped: opening it reads very little.

    With `tokenizer`, a folder built with another tokenizer is refused. Sizes and counts are always checked; `check`
    also verifies every byte.
    """

    def __init__(self, folder: str | Path, tokenizer: Tokenizer | None = None, *, check: bool = False) -> None:
        self.folder = Path(folder)
        meta = _read_meta(self.folder)
        if meta is None:
            raise InputError(f"{self.folder}: has no {META}, so it is not a built corpus; see qkv data build")
        if "shards" not in meta:
            raise InputError(f"{self.folder}: is not finished; {_RERUN_HINT}")
        self.meta = meta
        if tokenizer is not None and tokenizer_fingerprint(tokenizer) != self.meta["tokenizer_fingerprint"]:
            raise InputError(f"{self.folder}: was built with another tokenizer; build it again, or use that tokenizer")
        blocks = []
        for number, expected in enumerate(self.meta["shards"]):
            path = _shard_path(self.folder, number)
            block, metadata = _open_shard(path)
            if metadata != expected or (check and block.fingerprint() != metadata["fingerprint"]):
                raise InputError(f"{path}: damaged, or of another build; remove {self.folder} and build it again")
            blocks.append(block)
        super().__init__(blocks)

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Shards, (self.folder,)  # unpickling in another process maps the files again

    def fingerprint(self) -> str:
        """Return a hash of tokenizer and shards, from the fingerprints in `meta.json`."""
        fingerprints = " ".join(shard["fingerprint"] for shard in self.meta["shards"])
        content = f"{self.meta['tokenizer_fingerprint']} {fingerprints}"
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def build_shards(
    folder: str | Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    num_workers: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    on_progress: ProgressCallback = lambda documents, tokens: None,  # noqa: ARG005
) -> Shards:
    """Encode documents into `folder`, or continue an interrupted build after its last complete shard.

    Args:
        folder: a new or empty folder, or one with an interrupted build.
        documents: the documents; to continue a build they must be the same. The file names and sizes of a `Corpus` are
            compared.
        tokenizer: the tokenizer.
        num_workers: threads that encode.
        shard_tokens: a shard ends with the document that reaches this number of tokens.
        on_progress: called at the start, with the counts of an earlier build, and after each block.
    """
    folder = Path(folder)
    if shard_tokens < 1:
        raise InputError(f"shard_tokens is {shard_tokens}; use 1 or more")
    settings = _build_settings(documents, tokenizer, shard_tokens)
    if _start_or_resume(folder, settings):
        return Shards(folder, tokenizer)
    shard_infos = list(_existing_shards(folder))
    num_documents, tokens = (sum(shard[name] for shard in shard_infos) for name in ("documents", "tokens"))
    remaining = _skip_documents(documents, num_documents, folder)
    encoded = encode_blocks(remaining, tokenizer, num_workers=num_workers)
    blocks = _report_progress(encoded, num_documents, tokens, on_progress)
    for block in _split_into_shards(blocks, shard_tokens):
        metadata = _shard_metadata(block)
        tensors = {name: np.ascontiguousarray(getattr(block, name)) for name in _TENSOR_NAMES}
        # a single metadata key: the library writes several in arbitrary order, but the bytes must be reproducible
        content = safetensors_bytes(tensors, {_METADATA_KEY: json.dumps(metadata)})
        atomic_write_bytes(_shard_path(folder, len(shard_infos)), content)
        shard_infos.append(metadata)
    if not any(shard["tokens"] for shard in shard_infos):
        raise InputError(f"{folder}: the corpus has no text; give at least one document")
    totals = {name: sum(shard[name] for shard in shard_infos) for name in ("documents", "sentences", "tokens")}
    meta = {**settings, **totals, "shards": shard_infos}
    atomic_write_text(folder / META, json.dumps(meta, ensure_ascii=False, indent=2) + "\n")
    return Shards(folder, tokenizer)


def _build_settings(documents: Iterable[Document], tokenizer: Tokenizer, shard_tokens: int) -> dict[str, Any]:
    """Return all settings that determine the bytes of a build."""
    manifest = documents.manifest() if isinstance(documents, Corpus) else {}
    settings = {
        "version": _VERSION,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "vocab_size": tokenizer.vocab_size,
    }
    return {**settings, "shard_tokens": shard_tokens, **manifest}


def _start_or_resume(folder: Path, settings: dict[str, Any]) -> bool:
    """Return whether the folder has a finished build; a folder with another corpus or other files is refused."""
    existing = _read_meta(folder)
    if existing is None and folder.exists() and not (folder.is_dir() and _is_empty(folder)):
        raise InputError(f"{folder}: exists and is not a corpus; choose another folder, or remove it first")
    if existing is None or not ("shards" in existing or _shard_path(folder, 0).is_file()):
        atomic_write_text(folder / META, json.dumps(settings, ensure_ascii=False, indent=2) + "\n")
        return False
    for key in sorted({*settings, *existing} - {"shards", "documents", "sentences", "tokens"}):
        if existing.get(key) != settings.get(key):
            reason = f"has a corpus with another '{key}'"
            raise InputError(f"{folder}: {reason}; choose another folder, or remove it first")
    return "shards" in existing


def _is_empty(folder: Path) -> bool:
    """Return whether a folder has no files except the temporary ones of an interrupted write."""
    return all(path.name.startswith(".") for path in folder.iterdir())


def _read_meta(folder: Path) -> dict[str, Any] | None:
    path = folder / META
    if not path.is_file():
        return None
    text = read_text_file(path, "data_json_bytes")
    try:
        meta: dict[str, Any] = parse_json(text, str(path))
        version, shards = meta["version"], meta.get("shards", [])
        is_valid = isinstance(shards, list) and all(isinstance(shard["fingerprint"], str) for shard in shards)
        is_valid = is_valid and isinstance(meta["tokenizer_fingerprint"], str)
    except (ValueError, TypeError, KeyError, AttributeError):
        is_valid, version = False, _VERSION
    if version != _VERSION:
        raise InputError(f"{path}: has version {quote(version)}, but this qkv reads {_VERSION}; build the corpus again")
    if not is_valid:
        raise InputError(f"{path}: damaged; remove {folder} and build it again")
    return meta


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.safetensors"


def _existing_shards(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the metadata of the shards of an unfinished build."""
    for number in itertools.count():
        path = _shard_path(folder, number)
        if not path.is_file():
            return
        yield _open_shard(path)[1]


def _skip_documents(documents: Iterable[Document], count: int, folder: Path) -> Iterator[Document]:
    """Return an iterator that starts after the first `count` documents."""
    remaining = iter(documents)
    num_skipped = sum(1 for _ in itertools.islice(remaining, count))
    if num_skipped < count:
        problem = f"the interrupted build has {count} documents, but the corpus now has {num_skipped}"
        raise InputError(f"{folder}: {problem}; remove the folder first")
    return remaining


def _report_progress(
    blocks: Iterable[TokenBlock], documents: int, tokens: int, on_progress: ProgressCallback
) -> Iterator[TokenBlock]:
    on_progress(documents, tokens)
    for block in blocks:
        documents += len(block.document_ends)
        tokens += len(block.ids)
        on_progress(documents, tokens)
        yield block


def _split_into_shards(blocks: Iterable[TokenBlock], shard_tokens: int) -> Iterator[TokenBlock]:
    """Regroup the documents into shards, each of which ends with the document that reaches `shard_tokens`."""
    pending: list[TokenBlock] = []
    pending_tokens = 0
    for block in blocks:
        remaining = block
        while pending_tokens + len(remaining.ids) >= shard_tokens:
            last = int(np.searchsorted(remaining.document_ends, shard_tokens - pending_tokens)) + 1
            yield concat([*pending, remaining.slice_documents(0, last)])
            remaining = remaining.slice_documents(last, len(remaining.document_ends))
            pending, pending_tokens = [], 0
        if len(remaining.document_ends):
            pending.append(remaining)
            pending_tokens += len(remaining.ids)
    if pending:
        yield concat(pending)


def _shard_metadata(block: TokenBlock) -> dict[str, Any]:
    counts = {"documents": len(block.document_ends), "sentences": len(block.sentence_ends), "tokens": len(block.ids)}
    return {**counts, "fingerprint": block.fingerprint()}


def _open_shard(path: Path) -> tuple[TokenBlock, dict[str, Any]]:
    """Return the arrays of a shard, as views of the mapped file, and its metadata."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, limit("config_bytes")):
                raise ValueError
            header = parse_json(file.read(length), str(path))
        arrays = _map_tensors(path, header, 8 + length, size)
        metadata = parse_json(header["__metadata__"][_METADATA_KEY], str(path))
        block = TokenBlock(*arrays)
        ends = [array[-1] if len(array) else 0 for array in arrays[1:]]
        counts = [metadata["tokens"], metadata["documents"], metadata["sentences"]]
        if [*map(len, arrays)] != counts or any(end != len(block.ids) for end in ends):
            raise ValueError
    except FileNotFoundError:
        raise InputError(f"{path}: is missing; restore it, or remove {path.parent} and build it again") from None
    except OSError as problem:
        raise InputError(f"{path}: cannot be read ({problem.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError):
        raise InputError(f"{path}: damaged; remove {path.parent} and build it again") from None
    return block, metadata


def _map_tensors(path: Path, header: dict[str, Any], data_offset: int, size: int) -> list[Any]:
    mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    ends = [header[name]["data_offsets"][1] for name in _TENSOR_NAMES]
    if data_offset + max(ends) != size:
        raise ValueError
    tensors = []
    for name in _TENSOR_NAMES:
        begin, end = header[name]["data_offsets"]
        if not 0 <= begin <= end:
            raise ValueError
        tensors.append(mapped[data_offset + begin : data_offset + end].view(_DTYPES[header[name]["dtype"]]))
    return tensors
