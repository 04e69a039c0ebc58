"""A small valid file of every data format."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image

from qkv.data.formats import glue, superglue
from qkv.data.formats.registry import FORMATS


def _jsonl(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


_SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "t",
            "paragraphs": [
                {
                    "context": "the cat sat on the mat",
                    "qas": [
                        {"id": "1", "question": "who sat?", "answers": [{"text": "cat", "answer_start": 4}]},
                        {"id": "2", "question": "why?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ],
}
_CLINC = {"train": [["pay my bill", "pay"], ["hello", "greet"]], "oos_train": [["what is love", "oos"]]}
_SLOTS = {
    "userInput": {"text": "a table for 4"},
    "labels": [{"slot": "people", "valueSpan": {"startIndex": 12, "endIndex": 13}}],
    "context": {"requestedSlots": ["people"]},
}
_SWAG = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
_SWAG += '0,v,1,He sits. He,He sits.,He,gold,"runs, fast.",eats.,sleeps.,leaves.,2\n'
_ARC = {"id": "1", "question": "Why?", "choices": {"text": ["heat", "cold"], "label": ["A", "B"]}, "answerKey": "B"}
_CONLLU = "# text = cats sleep\n1\tcats\tcat\tNOUN\tNNS\t_\t2\tnsubj\t_\t_\n"
_CONLLU += "2\tsleep\tsleep\tVERB\tVBP\t_\t0\troot\t_\t_\n\n"
_QUESTION = {"id": "1", "question": "who?", "context": "the cat sat", "answers": [{"text": "cat", "answer_start": 4}]}
_TABLE = 'text,label\nthe cat sat,good\n"a dog, barking",bad\n'
_IDX_IMAGES = struct.pack(">4I", 0x0803, 3, 4, 4) + bytes(range(48))
_IDX_LABELS = struct.pack(">2I", 0x0801, 3) + bytes([0, 1, 2])

# format -> files of the folder, the path that is read, and columns
SAMPLES: dict[str, tuple[dict[str, str | bytes], str, dict[str, Any]]] = {
    "csv": ({"a.csv": _TABLE}, "a.csv", {"text": "text", "label": "label"}),
    "tsv": ({"a.tsv": "text\tlabel\nthe cat\tgood\na dog\tbad\n"}, "a.tsv", {"text": "text", "label": "label"}),
    "jsonl": ({"a.jsonl": _jsonl({"text": "x y", "label": "a"}, {"text": "z", "label": "b"})}, "a.jsonl", {}),
    "table": ({"a.csv": _TABLE.replace(",", ";")}, "a.csv", {"text": "text", "label": "label"}),
    "banking77": ({"a.csv": "text,category\nmy card,card_lost\n"}, "a.csv", {}),
    "clinc": ({"data_full.json": json.dumps(_CLINC)}, "data_full.json", {}),
    "goemotions": ({"train.tsv": "so happy\t0,1\tid1\n", "emotions.txt": "joy\nlove\n"}, "train.tsv", {}),
    "restaurant8k": ({"a.json": json.dumps([_SLOTS])}, "a.json", {}),
    "conll": ({"a.conll": "EU B-ORG\nrejects O\n\nPeter B-PER\nB I-PER\n"}, "a.conll", {}),
    "words": ({"a.jsonl": _jsonl({"words": ["a", "b"], "tags": ["B-X", "O"]})}, "a.jsonl", {}),
    "conllu": ({"a.conllu": _CONLLU}, "a.conllu", {}),
    "squad": ({"a.json": json.dumps(_SQUAD)}, "a.json", {}),
    "questions": ({"a.jsonl": _jsonl(_QUESTION)}, "a.jsonl", {}),
    "choices": (
        {"a.csv": "q,a,b,right\nWhy?,x,y,1\n"},
        "a.csv",
        {"context": "q", "choices": "a,b", "answer": "right"},
    ),
    "swag": ({"a.csv": _SWAG}, "a.csv", {}),
    "arc": ({"a.jsonl": _jsonl(_ARC)}, "a.jsonl", {}),
    "commonsense_qa": ({"a.jsonl": _jsonl(_ARC)}, "a.jsonl", {}),
    "idx": ({"train-images-idx3-ubyte": _IDX_IMAGES, "train-labels-idx1-ubyte": _IDX_LABELS}, ".", {}),
    "aligned": ({"a.src": "a b\nc\n", "a.tgt": "x\ny z\n"}, "a.src", {"targets": "a.tgt"}),
    "pairs:tsv": ({"a.tsv": "a b\tx\nc\ty z\n"}, "a.tsv", {}),
    "pairs:jsonl": ({"a.jsonl": _jsonl({"source": "a b", "target": "x"})}, "a.jsonl", {}),
    "cmudict": ({"a.dict": "CAT  K AE1 T\nDOG  D AO1 G # comment\nDOG(2)  D AA1 G\n"}, "a.dict", {}),
    "parallel": ({"a.csv": "source,target\na b,x\n"}, "a.csv", {}),
    "summaries": ({"a.csv": "document,summary\na long text,short\n"}, "a.csv", {}),
    "scitldr": ({"a.jsonl": _jsonl({"source": ["One.", "Two."], "target": ["Short."]})}, "a.jsonl", {}),
    "superglue:BoolQ": ({"a.jsonl": _jsonl({"question": "q", "passage": "p", "label": True, "idx": 0})}, "a.jsonl", {}),
    "superglue:COPA": (
        {
            "a.jsonl": _jsonl(
                {"premise": "p", "choice1": "a", "choice2": "b", "question": "cause", "label": 1, "idx": 0}
            )
        },
        "a.jsonl",
        {},
    ),
    "superglue:MultiRC": (
        {
            "a.jsonl": _jsonl(
                {
                    "idx": 0,
                    "passage": {
                        "text": "p",
                        "questions": [
                            {"question": "q", "idx": 0, "answers": [{"text": "a", "idx": 0, "label": 1}]},
                        ],
                    },
                }
            )
        },
        "a.jsonl",
        {},
    ),
    "superglue:ReCoRD": (
        {
            "a.jsonl": _jsonl(
                {
                    "idx": 0,
                    "passage": {"text": "Ann ran", "entities": [{"start": 0, "end": 2}]},
                    "qas": [
                        {
                            "query": "@placeholder ran",
                            "idx": 0,
                            "answers": [{"start": 0, "end": 2, "text": "Ann"}],
                        }
                    ],
                }
            )
        },
        "a.jsonl",
        {},
    ),
    "superglue:WiC": (
        {
            "a.jsonl": _jsonl(
                {
                    "word": "cat",
                    "sentence1": "a cat",
                    "sentence2": "cat sat",
                    "idx": 0,
                    "label": False,
                    "start1": 2,
                    "end1": 5,
                    "start2": 0,
                    "end2": 3,
                }
            )
        },
        "a.jsonl",
        {},
    ),
    "superglue:WSC": (
        {
            "a.jsonl": _jsonl(
                {
                    "idx": 0,
                    "label": True,
                    "text": "Ann ran because she could",
                    "target": {"span1_text": "Ann", "span1_index": 0, "span2_text": "she", "span2_index": 3},
                }
            )
        },
        "a.jsonl",
        {},
    ),
}


def _glue_sample(name: str) -> tuple[dict[str, str | bytes], str, dict[str, Any]]:
    task = glue.TASKS[name]
    if name == "CoLA":
        return {"a.tsv": "gj04\t1\t\tthe cat sat\nc-05\t0\t*\tcat the\n"}, "a.tsv", {}
    label = "2.5" if task.label_names is None else next(iter(task.label_names))
    header = "\t".join(("index", *task.text_columns, task.label_column))
    row = "\t".join(("0", *("the cat sat" for _ in task.text_columns), label))
    return {"a.tsv": f"{header}\n{row}\n{row}\n"}, "a.tsv", {}


def _superglue_sample(name: str) -> tuple[dict[str, str | bytes], str, dict[str, Any]]:
    keys = ("sentence1", "sentence2") if name == "AX-b" else ("premise", "hypothesis")
    record = {keys[0]: "it rains", keys[1]: "it is wet", "label": "entailment", "idx": 0, "pair_id": 3}
    return {"a.jsonl": _jsonl(record)}, "a.jsonl", {}


def _write_images(folder: Path) -> None:
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for kind in ("png", "jpg", "gif", "bmp"):
            Image.new("RGB", (6, 5), (10, 200, 30)).save(folder / label / f"a.{kind}")


def _write_parquet(folder: Path) -> None:
    folder.mkdir(parents=True)
    table = pyarrow.table({"text": ["the cat", "a dog"], "label": ["good", "bad"]})
    pyarrow.parquet.write_table(table, folder / "a.parquet")


def write_samples(root: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Write a folder per format; return the path to read and the columns of each."""
    makers: dict[str, Callable[[str], tuple[dict[str, str | bytes], str, dict[str, Any]]]] = {}
    makers |= {f"glue:{name}": _glue_sample for name in glue.TASKS}
    makers |= {f"superglue:{name}": _superglue_sample for name in superglue.TASKS if f"superglue:{name}" not in SAMPLES}
    result = {}
    for name in FORMATS.names():
        folder = root / name.replace(":", "_")
        if name == "images":
            _write_images(folder)
            result[name] = (".", {})
        elif name == "parquet":
            _write_parquet(folder)
            result[name] = ("a.parquet", {"text": "text", "label": "label"})
        elif name in SAMPLES or name in makers:
            files, target, columns = SAMPLES.get(name) or makers[name](name.partition(":")[2])
            folder.mkdir(parents=True, exist_ok=True)
            for file, content in files.items():
                (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
            result[name] = target, columns
    return result
