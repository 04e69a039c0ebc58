"""One step of BERT's masked-LM training on documents of varied length: ours and transformers', the same weights.

    python bench/train_encoder.py                       # BERT-base on a GPU, or else BERT-mini on the CPU
    python bench/train_encoder.py --rounds 9 --seed 4 --json train_encoder.json
    python bench/train_encoder.py --size base --documents 8 --batches 1 --device cpu
    python bench/train_encoder.py --dropout 0           # as shared/peers/gpu has it
    python bench/train_encoder.py --attention-dropout 0.1

A step is forward, backward and AdamW (fused); 15 % of the tokens are masked and asked for. A call makes a step on each
of several batches. Lengths are lognormal, those of shared/peers/gpu for BERT-base. On a GPU everybody runs under
bfloat16 autocast, and peers take at most --chunk documents at once, for their logits at every padded place fill the
memory; the loss is divided by the whole batch's targets, so that all have one gradient.

  transformers             padded to the batch's longest document, rounded up to 8; logits at every place, as it comes
  transformers, at targets the same with its head called on the targets alone, which its user has to write
  transformers, compiled   mode default, dynamic=False, all batches padded to one shape; on a GPU, or with --compile
  qkv                      packed, logits at the targets alone; layout and plan are built anew in every step

Dropout is the same for all, by transformers' own config: 0.1 after the embeddings and around each layer, and 0 on the
attention's weights. BERT's paper has 0.1 there too. Neither flash attention of variable lengths nor much of what is
trained today drops weights, and with --attention-dropout ours takes the padded kernel on a GPU: slower, and what you
get if you ask for it. A padded model has its fused kernels either way, so nothing is taken from the peers.

Before the race, with dropout off, the loss on the first batch and the length of its gradient must be those of
transformers; a row that differs ends the run. The first step's loss, with dropout, must then be near that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from a checkout too

from bench.encoder import FIRST_WORD, VOCABULARY, quiet_transformers
from bench.race import figures, matrix_rate, race, show, speed_up

MASK, IGNORED, ASKED = 103, -100, 0.15
TRANSFORMERS, AT_TARGETS, COMPILED = "transformers", "transformers, at targets", "transformers, compiled"
OURS, OURS_COMPILED = "qkv", "qkv, compiled"
GOAL = 4.0  # ours over compiled transformers, on a GPU
_NEAR = {"cpu": (1e-4, 1e-3), "cuda": (5e-3, 5e-2)}  # of the loss, and of the gradient's length

_FIRST = 0.05  # how far dropout may move the first loss


@dataclass(frozen=True)
class Size:
    """A model, and what it reads."""

    width: int
    heads: int
    layers: int
    hidden: int
    middle: float  # of the logarithm of a length
    deviation: float
    shortest: int
    longest: int
    documents: int
    batches: int
    chunk: int  # documents that a padded peer takes at once


SIZES = {
    "mini": Size(256, 4, 4, 1024, 3.2, 0.7, 8, 128, 16, 2, 64),
    "base": Size(768, 12, 12, 3072, 4.2, 0.7, 8, 512, 256, 3, 128),
}


@dataclass(eq=False)
class Batch:
    """Documents one after the other, some of their tokens masked."""

    lengths: list[int]
    words: Tensor  # [T] what is read
    at: Tensor  # [K] masked tokens
    asked: Tensor  # [K] what stood there
    width: int  # places of a padded row

    @property
    def real(self) -> int:
        return sum(self.lengths)

    @cached_property
    def labels(self) -> Tensor:
        return torch.full_like(self.words, IGNORED).index_copy(0, self.at, self.asked)  # [T]

    def padded(self, begin: int, end: int, width: int) -> dict[str, Tensor]:
        """Documents `begin` to `end` as a collator gives them."""
        sizes = torch.tensor(self.lengths[begin:end])
        first = sum(self.lengths[:begin])
        mask = (torch.arange(width) < sizes[:, None]).to(self.words.device)  # [B, N]
        here = slice(first, first + int(sizes.sum()))
        ids = torch.zeros(mask.shape, dtype=torch.long, device=mask.device)
        labels = torch.full_like(ids, IGNORED)
        ids[mask], labels[mask] = self.words[here], self.labels[here]
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def draw(size: Size, options: argparse.Namespace) -> list[Batch]:
    generator = torch.Generator().manual_seed(options.seed)
    found = []
    for _ in range(options.batches):
        noise = torch.randn(options.documents, generator=generator)
        lengths = torch.exp(noise * size.deviation + size.middle).long().clamp(size.shortest, size.longest).tolist()
        whole = torch.randint(FIRST_WORD, VOCABULARY, (sum(lengths),), generator=generator)
        at = torch.where(torch.rand(len(whole), generator=generator) < ASKED)[0]
        read = whole.index_fill(0, at, MASK)
        read, places, asked = (t.to(options.device) for t in (read, at, whole[at]))
        found.append(Batch(lengths, read, places, asked, math.ceil(max(lengths) / 8) * 8))
    return found


def work(size: Size, batch: Batch) -> float:
    """Floating point operations that a step needs on the real tokens: two a weight and token, backward twice that."""
    square, forward = size.width**2, size.width * size.hidden
    body = batch.real * (4 * square + 2 * forward) + 2 * size.width * sum(n * n for n in batch.lengths)
    return 3.0 * 2 * (size.layers * body + len(batch.at) * (square + size.width * VOCABULARY))


# ---- rows -----------------------------------------------------------------------------------------------------------

Run = Callable[..., Any]  # a model's call, or the compiled one
Piece = Callable[[], Tensor]  # a part of the batch's mean loss, whose backward comes before the next part


@dataclass
class Row:
    """A model, its call, and how it takes a batch: parts' losses that add up to the mean over the targets."""

    model: nn.Module
    run: Run
    pieces: Callable[[Batch, Run], list[Piece]]


def make_folder(folder: Path, size: Size, options: argparse.Namespace) -> None:
    transformers = quiet_transformers()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.hidden,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.attention_dropout,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)


def transformers_row(
    folder: Path, options: argparse.Namespace, batches: list[Batch], compiled: bool = False, at_targets: bool = False
) -> Row:
    model = quiet_transformers().BertForMaskedLM.from_pretrained(folder, attn_implementation="sdpa").to(options.device)
    kept: dict[int, list[tuple[dict[str, Tensor], float]]] = {}

    def ready(batch: Batch) -> list[tuple[dict[str, Tensor], float]]:
        """Collated once: in a real run a loader's workers do it beside the step."""
        if id(batch) not in kept:
            width = max(b.width for b in batches) if compiled else batch.width
            cuts = range(0, len(batch.lengths), options.chunk)
            parts = [batch.padded(i, min(i + options.chunk, len(batch.lengths)), width) for i in cuts]
            kept[id(batch)] = [(p, float((p["labels"] != IGNORED).sum()) / len(batch.at)) for p in parts]
        return kept[id(batch)]

    def loss(run: Run, given: dict[str, Tensor], share: float) -> Tensor:
        """Theirs is the mean over a part's own targets."""
        if not at_targets:
            whole: Tensor = run(**given).loss
            return whole * share
        hidden = model.bert(given["input_ids"], given["attention_mask"]).last_hidden_state  # [B, N, width]
        chosen = given["labels"] != IGNORED
        return F.cross_entropy(model.cls(hidden[chosen]), given["labels"][chosen]) * share

    def pieces(batch: Batch, run: Run) -> list[Piece]:
        return [partial(loss, run, given, share) for given, share in ready(batch)]

    return Row(model, torch.compile(model, dynamic=False) if compiled else model, pieces)


def our_row(folder: Path, options: argparse.Namespace, _batches: list[Batch], compiled: bool = False) -> Row:
    from qkv import checkpoints
    from qkv.nn import Ragged
    from qkv.nn.block import Block

    model = checkpoints.load(folder, options.device).model
    for block in model.modules() if compiled else ():
        if isinstance(block, Block):
            block.compile_sublayers()  # as train.compile does

    def loss(batch: Batch, run: Run) -> Tensor:
        logits = run(Ragged.from_lengths(batch.words, batch.lengths), positions=batch.at)  # [K, vocabulary]
        return F.cross_entropy(logits, batch.asked)

    return Row(model, model, lambda batch, run: [partial(loss, batch, run)])


def rows(options: argparse.Namespace) -> dict[str, Callable[..., Row]]:
    found: dict[str, Callable[..., Row]] = {
        TRANSFORMERS: transformers_row,
        AT_TARGETS: lambda *given: transformers_row(*given, at_targets=True),
    }
    if options.compile:
        found[COMPILED] = lambda *given: transformers_row(*given, compiled=True)
    found[OURS] = our_row
    if options.device.type == "cuda":
        found[OURS_COMPILED] = lambda *given: our_row(*given, compiled=True)
    wanted = [word for word in options.only.split(",") if word]
    return {n: make for n, make in found.items() if n == TRANSFORMERS or not wanted or any(w in n for w in wanted)}


class Differs(Exception):
    """A row computes something else than transformers does."""


class Contestant:
    """A row with its optimiser."""

    def __init__(self, name: str, row: Row, device: torch.device):
        self.name, self.row, self.device = name, row, device
        self.row.model.train()
        self.optimiser = torch.optim.AdamW(row.model.parameters(), lr=1e-5, fused=True)

    def gradient(self, batch: Batch, run: Run) -> Tensor:
        """Adds the batch's gradient up; the loss."""
        total = torch.zeros((), device=self.device)
        for piece in self.row.pieces(batch, run):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                part = piece()
            part.backward()  # type: ignore[no-untyped-call]
            total += part.detach()
        return total

    def step(self, batch: Batch) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.gradient(batch, self.row.run)
        self.optimiser.step()
        return loss

    def without_dropout(self, batch: Batch) -> tuple[float, float]:
        """The loss and the length of its gradient, before any step; not compiled, for that would compile twice."""
        self.row.model.eval()
        loss = float(self.gradient(batch, self.row.model))
        squares = [p.grad.float().square().sum() for p in self.row.model.parameters() if p.grad is not None]
        self.optimiser.zero_grad(set_to_none=True)
        self.row.model.train()
        return loss, float(torch.stack(squares).sum().sqrt())


def check(contestant: Contestant, batch: Batch, wanted: tuple[float, float] | None) -> tuple[float, float]:
    """Who skips work would win: the same loss and the same gradient, to what the precision allows."""
    found = contestant.without_dropout(batch)
    for what, ours, theirs, near in zip(
        ("loss", "gradient"), found, wanted or found, _NEAR[contestant.device.type], strict=True
    ):
        if not (math.isfinite(ours) and abs(ours - theirs) <= near * theirs):
            raise Differs(f"{contestant.name}: the {what} is {ours:.5f}, transformers' {theirs:.5f}")
    return found


def enter(
    name: str,
    make: Callable[[], Row],
    batches: list[Batch],
    wanted: tuple[float, float] | None,
    device: torch.device,
    kind: type[Contestant] = Contestant,
) -> tuple[Contestant, tuple[float, float]] | None:
    """Builds a row, checks it and warms it up; a peer that breaks is said and left out."""
    began = time.perf_counter()
    try:
        contestant = kind(name, make(), device)
        found = check(contestant, batches[0], wanted)
        first = float(contestant.step(batches[0]))
        if not abs(first - found[0]) <= _FIRST * found[0]:
            raise Differs(f"{name}: the first step's loss is {first:.4f}, without dropout {found[0]:.4f}")
        for batch in batches:
            contestant.step(batch)
    except Differs:
        raise
    except ModuleNotFoundError as error:
        print(f"  {name}: not installed: {error.name}", flush=True)
    except Exception as error:  # a peer that breaks must not take the others' figures with it
        print(f"  {name}: failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    else:
        said = f"loss {found[0]:.5f}, gradient {found[1]:.4f} without dropout"
        print(f"  {name}: {said}, ready in {time.perf_counter() - began:.1f} s", flush=True)
        return contestant, found
    return None


def steps(contestant: Contestant, batches: list[Batch]) -> Callable[[], object]:
    """What is raced: a step on each batch."""
    return lambda: [contestant.step(batch) for batch in batches]


# ---- the run --------------------------------------------------------------------------------------------------------


def run(folder: Path, size: Size, options: argparse.Namespace) -> dict[str, Any]:
    batches, device = draw(size, options), options.device
    real, places = sum(b.real for b in batches), sum(b.width * len(b.lengths) for b in batches)
    one = max(b.width for b in batches) * options.documents * len(batches)
    print(
        f"{len(batches)} batches of {options.documents} documents, {real} real tokens, {places} padded places", end=""
    )
    print(f" ({one} in one shape), {sum(len(b.at) for b in batches)} targets", flush=True)
    entered: dict[str, Callable[[], object]] = {}
    wanted = None
    for name, make in rows(options).items():
        entry = enter(name, lambda make=make: make(folder, options, batches), batches, wanted, device)
        if entry is not None:
            entered[name] = steps(entry[0], batches)
            wanted = wanted or entry[1]
    before = matrix_rate(device)
    laps = race(entered, options.rounds, device)
    rate = max(before, matrix_rate(device))
    for lap in laps.values():
        lap.seconds = [s / len(batches) for s in lap.seconds]  # a step each
    needs, tokens = sum(work(size, b) for b in batches) / len(batches), round(real / len(batches))
    print(f"\nmatrix products: {rate / 1e9:,.0f} GFLOP/s; a step needs {needs / 1e9:,.1f} GFLOP; times are a step's")
    against = COMPILED if COMPILED in laps else TRANSFORMERS
    table = figures(laps, tokens, needs / rate, against)
    show(table, tokens, needs / rate, against)
    ours = [n for n in (OURS, OURS_COMPILED) if n in laps]
    for peer in [n for n in laps if n not in ours]:
        for own in ours:
            goal = f" (goal {GOAL})" if peer == COMPILED and device.type == "cuda" and options.size == "base" else ""
            print(f"{own} / {peer} = {speed_up(laps[own], laps[peer]):.2f}{goal}")
    return {"matrix_rate": rate, "operations": needs, "tokens": tokens, "lengths": [b.lengths for b in batches]} | {
        "rows": table
    }


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="", help="base on a GPU, mini on a CPU")
    parser.add_argument("--documents", type=int, default=0, help="in a batch; 0: as the size has it")
    parser.add_argument("--batches", type=int, default=0, help="that a call steps over; 0: as the size has it")
    parser.add_argument("--chunk", type=int, default=0, help="documents that a padded peer takes at once")
    parser.add_argument("--dropout", type=float, default=0.1, help="after the embeddings and around each layer")
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=3, help="of the lengths, the words and the masks")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compile", action="store_true", help="a compiled row on a CPU too")
    parser.add_argument("--only", default="", help="comma list: only rows whose name holds one of these")
    parser.add_argument("--json", default="", help="a file for all figures")
    options = parser.parse_args()
    options.size = options.size or ("base" if options.device == "cuda" else "mini")
    for name in ("documents", "batches", "chunk"):
        setattr(options, name, getattr(options, name) or getattr(SIZES[options.size], name))
    options.compile = options.compile or options.device == "cuda"
    options.device = torch.device(options.device)
    return options


def main() -> None:
    options = read_options()
    device = options.device
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")
    if hasattr(torch._dynamo.config, "recompile_limit"):
        torch._dynamo.config.recompile_limit = 64  # evaluation, training and each row count against one limit
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {options.threads} threads"
    print(f"torch {torch.__version__}, {where}, BERT-{options.size}, seed {options.seed}, {options.rounds} rounds")
    print(f"dropout {options.dropout}, on attention's weights {options.attention_dropout}, for everybody")
    with tempfile.TemporaryDirectory() as temporary:
        make_folder(Path(temporary), SIZES[options.size], options)
        try:
            result = run(Path(temporary), SIZES[options.size], options)
        except Differs as error:
            sys.exit(f"not timed: {error}")
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch.__version__, "on": where} | result, indent=1))


if __name__ == "__main__":
    main()
