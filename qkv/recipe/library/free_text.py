"""Collect the free English text of ../shared/data for recipes/pretrain-bert-small.yaml and pretrain-bart-small.yaml.

    python recipes/free_text.py ../shared/data runs/free_text

A document is a section of a novel or play, an abstract, or a few dozen unrelated sentences or comments. All text may be
redistributed: novels and plays are in the public domain, Tatoeba's sentences are CC BY 2.0 (France), GoEmotions'
comments and SciTLDR's abstracts Apache-2.0. Of the labeled datasets only the training split is read, without its
labels. Held-out and test text are whole novels.
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

LINES_PER_DOCUMENT = 400  # of a novel or play
TEXTS_PER_DOCUMENT = 32  # sentences or comments


def batched(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    remaining = iter(texts)
    while batch := list(islice(remaining, size)):
        yield batch


def novels(path: Path, split: str) -> Iterator[str]:
    with lzma.open(path) as packed, tarfile.open(fileobj=io.BytesIO(packed.read())) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if not member.isfile() or Path(member.name).parts[-2] != split:
                continue
            file = archive.extractfile(member)
            assert file is not None
            lines = file.read().decode("utf-8-sig").splitlines()
            for section in batched(lines, LINES_PER_DOCUMENT):
                yield " ".join(" ".join(section).split())


def read_lines(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()


def plays(path: Path) -> Iterator[str]:
    lines = read_lines(path)
    for section in batched(lines, LINES_PER_DOCUMENT):
        yield "\n".join(line for line in section if line.strip())


def sentences(path: Path) -> Iterator[str]:
    with zipfile.ZipFile(path) as archive:
        lines = archive.read("deu.txt").decode("utf-8").splitlines()
    yield from dict.fromkeys(line.split("\t")[0] for line in lines)


def comments(path: Path) -> Iterator[str]:
    yield from (line.split("\t")[0] for line in read_lines(path))


def abstracts(path: Path) -> Iterator[str]:
    yield from (" ".join(json.loads(line)["source"]) for line in read_lines(path))


def training_documents(data: Path) -> Iterator[str]:
    yield from novels(data / "english_novels/novels.tar.xz", "train")
    yield from plays(data / "tiny_shakespeare/input.txt.gz")
    yield from abstracts(data / "scitldr_a/train.jsonl.gz")
    for texts in (sentences(data / "tatoeba_de_en/deu-eng.zip"), comments(data / "goemotions/train.tsv.gz")):
        yield from ("\n".join(batch) for batch in batched(texts, TEXTS_PER_DOCUMENT))


def write(path: Path, documents: Iterable[str]) -> None:
    num_documents = num_characters = 0
    with open(path, "w", encoding="utf-8") as file:
        for text in documents:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            num_documents, num_characters = num_documents + 1, num_characters + len(text)
    print(f"{path}: {num_documents:,} documents, {num_characters:,} characters")


def main() -> None:
    data, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.jsonl", training_documents(data))
    for split in ("valid", "test"):
        write(folder / f"{split}.jsonl", novels(data / "english_novels/novels.tar.xz", split))


if __name__ == "__main__":
    main()
