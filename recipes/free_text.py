"""Gathers the free English text of ../shared/data for recipes/pretrain-bert-small.yaml and pretrain-bart-small.yaml.

    python recipes/free_text.py ../shared/data runs/free_text

A document is a novel's chapter-long stretch, a play, an abstract, or some dozens of sentences or comments that have
nothing in common but their source. All of it may be redistributed: novels and plays are in the public domain, Tatoeba's
sentences are CC BY 2.0 (France), GoEmotions' comments and SciTLDR's abstracts Apache-2.0. Of the labelled sets only the
training part is read, and none of its labels. Held-out and test text are whole novels.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

STRETCH = 400  # lines of a novel that make up a document
TOGETHER = 32  # short texts that make up one


def batched(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    left = iter(texts)
    while some := list(islice(left, size)):
        yield some


def novels(path: Path, part: str) -> Iterator[str]:
    with lzma.open(path) as packed, tarfile.open(fileobj=io.BytesIO(packed.read())) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if not member.isfile() or Path(member.name).parts[-2] != part:
                continue
            opened = archive.extractfile(member)
            assert opened is not None
            lines = opened.read().decode("utf-8-sig").splitlines()
            for stretch in batched(lines, STRETCH):
                yield " ".join(" ".join(stretch).split())


def lines_of(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()


def plays(path: Path) -> Iterator[str]:
    lines = lines_of(path)
    for stretch in batched(lines, STRETCH):
        yield "\n".join(line for line in stretch if line.strip())


def sentences(path: Path) -> Iterator[str]:
    with zipfile.ZipFile(path) as archive:
        lines = archive.read("deu.txt").decode("utf-8").splitlines()
    yield from dict.fromkeys(line.split("\t")[0] for line in lines)


def comments(path: Path) -> Iterator[str]:
    yield from (line.split("\t")[0] for line in lines_of(path))


def abstracts(path: Path) -> Iterator[str]:
    yield from (" ".join(json.loads(line)["source"]) for line in lines_of(path))


def gathered(data: Path) -> Iterator[str]:
    yield from novels(data / "english_novels/novels.tar.xz", "train")
    yield from plays(data / "tiny_shakespeare/input.txt.gz")
    yield from abstracts(data / "scitldr_a/train.jsonl.gz")
    for texts in (sentences(data / "tatoeba_de_en/deu-eng.zip"), comments(data / "goemotions/train.tsv.gz")):
        yield from ("\n".join(some) for some in batched(texts, TOGETHER))


def write(path: Path, documents: Iterable[str]) -> None:
    count = letters = 0
    with open(path, "w", encoding="utf-8") as file:
        for text in documents:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            count, letters = count + 1, letters + len(text)
    print(f"{path}: {count:,} documents, {letters:,} characters")


def main() -> None:
    data, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.jsonl", gathered(data))
    for part in ("valid", "test"):
        write(folder / f"{part}.jsonl", novels(data / "english_novels/novels.tar.xz", part))


if __name__ == "__main__":
    main()
