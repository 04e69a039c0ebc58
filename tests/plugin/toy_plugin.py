"""A user's module: one extension of each kind, registered without a change to qkv. `docs/extending.md` shows it."""
# ruff: noqa: ARG001, ARG002, RUF012

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

import qkv
from qkv import spec
from qkv.data.examples import TextExample
from qkv.families import gpt2
from qkv.metrics.metric import MeanMetric
from qkv.nn.attention_score import AttentionScore
from qkv.objectives.clm import CausalLM
from qkv.tasks.text_classification import TextClassification
from qkv.train.callbacks import Callback


@qkv.register.score_function("cosine")
class Cosine(AttentionScore):
    """Cosine of the angle between query and key, times 10."""

    def forward(self, queries: Tensor, precomputed_keys: Tensor) -> Tensor:
        return 10 * normalize(queries, dim=-1) @ normalize(precomputed_keys, dim=-1).transpose(-1, -2)


@qkv.register.family("cosine_gpt")
class CosineGPT:
    """GPT-2 with cosine attention."""

    PAPER = "docs/extending.md"
    Config = gpt2.Config
    PRESETS = {"tiny": gpt2.Config(d_model=32, heads=2, layers=1, max_length=64)}
    TOKENIZER_TEMPLATE = gpt2.TOKENIZER_TEMPLATE
    HEAD_NAMES = ("lm", "sequence")

    @staticmethod
    def make_spec(
        config: gpt2.Config,
        *,
        target_vocab_size: int = 300,
        bos_id: int = 0,
        eos_id: int = 0,
        head: str = "lm",
        labels: tuple[str, ...] = ("no", "yes"),
    ) -> spec.Model:
        model = gpt2.make_spec(
            config, target_vocab_size=target_vocab_size, bos_id=bos_id, eos_id=eos_id, head=head, labels=labels
        )
        attention = spec.replace(model.decoder.block.self_attention, score_fn="cosine")
        block = spec.replace(model.decoder.block, self_attention=attention)
        return spec.replace(model, family="cosine_gpt", decoder=spec.replace(model.decoder, block=block))


@qkv.register.objective("reversed_clm")
class ReversedLM(CausalLM):
    """Causal language modeling from right to left."""

    def prepare(self, batch, context, rng):
        chunks = batch.chunks
        last_index = np.repeat(2 * chunks.starts + chunks.lengths - 1, chunks.lengths)
        reversed_ids = chunks.ids[last_index - np.arange(len(chunks.ids))]
        return super().prepare(replace(batch, chunks=chunks._replace(ids=reversed_ids)), context, rng)


@qkv.register.task("ordinal")
@dataclass(frozen=True, kw_only=True)
class Ordinal(TextClassification):
    """Classification with ordered classes: predict the median of the class distribution instead of its mode."""

    name = "ordinal"

    def postprocess(self, outputs, example: TextExample, labels: Sequence[str]) -> str:
        ((_, logits),) = outputs
        cumulative = torch.softmax(logits[0], -1).cumsum(0)
        return labels[min(int((cumulative < 0.5).sum()), len(labels) - 1)]


@qkv.register.metric("within_one")
class WithinOne(MeanMetric[str, str]):
    """Fraction of numbers of stars that are off by at most one."""

    data_kind = "labels"

    def values(self, hypotheses: Sequence[str], references: Sequence[str]) -> list[bool]:
        return [abs(int(h) - int(r)) <= 1 for h, r in zip(hypotheses, references, strict=True)]


@qkv.register.metric("length_ratio")
class LengthRatio(MeanMetric[str, Sequence[str]]):
    """Number of characters of a text relative to its first reference."""

    data_kind = "texts"

    def values(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
        return [len(h) / max(1, len(r[0])) for h, r in zip(hypotheses, references, strict=True)]


@qkv.register.format("stars")
def read_stars(path: Path, error_policy):
    """Lines such as "***** a lovely film"."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        stars, _, text = line.partition(" ")
        yield TextExample(text, f"{path}:{number}", label=str(len(stars)))


@qkv.register.schedule("sawtooth")
def sawtooth(step: int, warmup_steps: int, max_steps: int) -> float:
    """Decay linearly to zero in cycles of 10 steps."""
    return 1 - (step - warmup_steps) % 10 / 10


@qkv.register.callback("history")
class History(Callback):
    """Write the events of a run to history.jsonl in its folder."""

    def on_step(self, trainer, record) -> None:
        self._write(trainer, "step", record.values["loss"])

    def on_validation(self, trainer, metrics) -> None:
        self._write(trainer, "validation", dict(metrics))

    def on_checkpoint(self, trainer, path: Path) -> None:
        self._write(trainer, "checkpoint", path.name)

    def _write(self, trainer, event: str, value) -> None:
        with open(trainer.folder / "history.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps([event, value]) + "\n")
