"""Datasets of the study of defaults (`bench/defaults.py`) as JSON Lines files that `qkv train --data` reads."""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MAX_TRAIN, MAX_TEST = 9000, 2000


class Source(NamedTuple):
    """A dataset of ../shared/data: its task, format and files."""

    task: str
    format: str
    train: str
    test: str | None  # None: a part of `train`, by title


SETS = {
    "banking77": Source("text_classification", "banking77", "banking77/train.csv.gz", "banking77/test.csv.gz"),
    "clinc150": Source("text_classification", "clinc", "clinc150", "clinc150"),
    "goemotions": Source("multi_label", "goemotions", "goemotions/train.tsv.gz", "goemotions/test.tsv.gz"),
    "wnut17": Source(
        "token_classification", "conll", "wnut17/wnut17train.conll.gz", "wnut17/emerging.test.annotated.gz"
    ),
    "ud_english_ewt": Source(
        "token_classification",
        "conllu",
        "ud_english_ewt/en_ewt-ud-train.conllu.gz",
        "ud_english_ewt/en_ewt-ud-test.conllu.gz",
    ),
    "restaurant8k": Source(
        "token_classification", "restaurant8k", "restaurant8k/train_0.json.gz", "restaurant8k/test.json.gz"
    ),
    "squadshifts": Source("question_answering", "squad", "squadshifts/new_wiki_v1.0.json.gz", None),
    "commonsense_qa": Source(
        "multiple_choice", "choices", "commonsense_qa/csqa-train.jsonl.gz", "commonsense_qa/csqa-val.jsonl.gz"
    ),
}


def prepare(options: argparse.Namespace) -> None:
    """Write each set as two JSON Lines files that `qkv train --data` reads, small enough to be copied."""
    for name, source in SETS.items():
        train, test = _read_source(source, options.root)
        rng = random.Random(0)
        for split, examples, count in (("train", train, MAX_TRAIN), ("test", test, MAX_TEST)):
            rng.shuffle(examples)
            path = options.folder / f"{name}.{split}.jsonl.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            with gzip.open(path, "wt", encoding="utf-8") as file:
                file.writelines(json.dumps(_to_record(example)) + "\n" for example in examples[:count])
            print(f"{path}: {min(len(examples), count):,} of {len(examples):,}")


def _read_source(source: Source, root: Path) -> tuple[list[Any], list[Any]]:
    from qkv.data.formats import read
    from qkv.tasks.base import get_task

    convert: Callable[[Any], Any] = get_task(source.task).from_example
    train = [convert(example) for example in read(source.format, root / source.train, split="train")]
    if source.test is None:
        titles = sorted({example.title for example in train})
        held_out = set(titles[::4])
        parts = [example for example in train if example.title not in held_out]
        return parts, [example for example in train if example.title in held_out]
    return train, [convert(example) for example in read(source.format, root / source.test, split="test")]


def _to_record(example: Any) -> dict[str, Any]:
    """Return an example as a line of one of the formats jsonl, words, questions and choices."""
    if hasattr(example, "words"):
        return {"words": list(example.words), "tags": list(example.tags)}
    if hasattr(example, "question"):
        answers = [{"text": answer.text, "answer_start": answer.start} for answer in example.answers]
        return {"id": example.id, "question": example.question, "context": example.context, "answers": answers}
    if hasattr(example, "choices"):
        return {"question": example.context, "choices": list(example.choices), "answer": example.label}
    label = " ".join(example.label) if isinstance(example.label, tuple) else example.label
    return {"text": example.text, "label": label}


def read_lines(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.readlines()
