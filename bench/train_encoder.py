"""One step of BERT's masked-LM training on documents of variable length: qkv and transformers with the same weights.

    python bench/train_encoder.py                       # BERT-base on a GPU, else BERT-mini on the CPU
    python bench/train_encoder.py --rounds 9 --seed 4 --json train_encoder.json
    python bench/train_encoder.py --size base --documents 8 --batches 1 --device cpu
    python bench/train_encoder.py --dropout 0           # as in shared/peers/gpu
    python bench/train_encoder.py --attention-dropout 0.1

A step is forward, backward and AdamW (fused); 15 % of the tokens are masked and predicted. A call makes one step on
each of several batches. Lengths are lognormal, those of shared/peers/gpu for BERT-base. On a GPU all rows run in
bfloat16 autocast, and peers take at most --chunk documents at once, because their logits at every padded position fill
the memory; the loss is divided by the number of targets of the whole batch, so that all rows have the same gradient.

  transformers             padded to the longest document of the batch, rounded up to 8; logits at every position
  transformers, at targets the same with its head applied to the targets only, which flops code of the user
  transformers, compiled   mode default, dynamic=False, all batches padded to one shape; on a GPU, or with --compile
  qkv                      packed, logits at the targets only; layout and bucket plan are built in every step

Dropout is the same for all rows, set in transformers' config: 0.1 after the embeddings and around each layer, and 0 on
attention weights. BERT's paper has 0.1 there as well. Variable-length flash attention has no dropout of weights, and
many models today are trained without; with --attention-dropout qkv uses the padded kernel on a GPU, which is slower. A
padded model has its fused kernels in both cases, so the peers have no disadvantage.

Before timing, with dropout off, the loss on the first batch and the norm of its gradient must equal those of
transformers; a row that differs ends the script. The loss of the first step, with dropout, must then be close to it.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to run from a checkout

from bench.encoder import FIRST_TOKEN, VOCAB_SIZE, quiet_transformers
from bench.paired_benchmark import matmul_rate, print_table, speedup, summarize, time_interleaved

MASK, IGNORED, MASK_PROB = 103, -100, 0.15
TRANSFORMERS, AT_TARGETS, COMPILED = "transformers", "transformers, at targets", "transformers, compiled"
OURS, OURS_COMPILED = "qkv", "qkv, compiled"
GOAL = 4.0  # qkv over compiled transformers, on a GPU
_TOLERANCE = {"cpu": (1e-4, 1e-3), "cuda": (5e-3, 5e-2)}  # relative, of the loss and of the gradient norm

_FIRST_STEP_TOLERANCE = 0.05  # relative change of the first loss by dropout


@dataclass(frozen=True)
class Size:
    """The size of a model and of its batches."""

    d_model: int
    heads: int
    layers: int
    d_ff: int
    log_mean: float  # mean of the logarithm of a length
    log_std: float  # standard deviation of that logarithm
    min_length: int
    max_length: int
    documents: int
    batches: int
    chunk: int  # documents per micro-batch of a padded peer


SIZES = {
    "mini": Size(256, 4, 4, 1024, 3.2, 0.7, 8, 128, 16, 2, 64),
    "base": Size(768, 12, 12, 3072, 4.2, 0.7, 8, 512, 256, 3, 128),
}


@dataclass(eq=False)
class Batch:
    """Concatenated documents with masked tokens."""

    lengths: list[int]
    token_ids: Tensor  # [T]
    positions: Tensor  # [K] of the masked tokens
    target_ids: Tensor  # [K] the original ids of the masked tokens
    padded_length: int  # positions of a padded row

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def labels(self) -> Tensor:
        return torch.full_like(self.token_ids, IGNORED).index_copy(0, self.positions, self.target_ids)  # [T]

    def collate(self, start: int, end: int, padded_length: int) -> dict[str, Tensor]:
        """Return documents `start` to `end` as padded tensors."""
        lengths = torch.tensor(self.lengths[start:end])
        offset = sum(self.lengths[:start])
        mask = (torch.arange(padded_length) < lengths[:, None]).to(self.token_ids.device)  # [B, N]
        tokens = slice(offset, offset + int(lengths.sum()))
        ids = torch.zeros(mask.shape, dtype=torch.long, device=mask.device)
        labels = torch.full_like(ids, IGNORED)
        ids[mask], labels[mask] = self.token_ids[tokens], self.labels[tokens]
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def draw(size: Size, options: argparse.Namespace) -> list[Batch]:
    generator = torch.Generator().manual_seed(options.seed)
    batches = []
    for _ in range(options.batches):
        noise = torch.randn(options.documents, generator=generator)
        lengths = (
            torch.exp(noise * size.log_std + size.log_mean).long().clamp(size.min_length, size.max_length).tolist()
        )
        original = torch.randint(FIRST_TOKEN, VOCAB_SIZE, (sum(lengths),), generator=generator)
        positions = torch.where(torch.rand(len(original), generator=generator) < MASK_PROB)[0]
        masked = original.index_fill(0, positions, MASK)
        tensors = (t.to(options.device) for t in (masked, positions, original[positions]))
        batches.append(Batch(lengths, *tensors, math.ceil(max(lengths) / 8) * 8))
    return batches


def step_flops(size: Size, batch: Batch) -> float:
    """Return the FLOPs of a step on the real tokens: two per weight and token, backward twice as many."""
    square, forward = size.d_model**2, size.d_model * size.d_ff
    backbone = batch.num_tokens * (4 * square + 2 * forward) + 2 * size.d_model * sum(n * n for n in batch.lengths)
    return 3.0 * 2 * (size.layers * backbone + len(batch.positions) * (square + size.d_model * VOCAB_SIZE))


# ---- rows -----------------------------------------------------------------------------------------------------------

Run = Callable[..., Any]  # the model or its compiled form
MicroBatchLoss = Callable[[], Tensor]  # the share of a micro-batch in the mean loss of the batch


@dataclass
class Row:
    """A model, its call, and the losses of its micro-batches, whose sum is the mean over all targets."""

    model: nn.Module
    run: Run
    micro_batch_losses: Callable[[Batch, Run], list[MicroBatchLoss]]


def make_folder(folder: Path, size: Size, options: argparse.Namespace) -> None:
    transformers = quiet_transformers()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=size.d_model,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.d_ff,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.attention_dropout,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)


def transformers_row(
    folder: Path, options: argparse.Namespace, batches: list[Batch], compiled: bool = False, at_targets: bool = False
) -> Row:
    model = quiet_transformers().BertForMaskedLM.from_pretrained(folder, attn_implementation="sdpa").to(options.device)
    cache: dict[int, list[tuple[dict[str, Tensor], float]]] = {}

    def collate_cached(batch: Batch) -> list[tuple[dict[str, Tensor], float]]:
        """Collate each batch once: in training, data loader workers do it in parallel."""
        if id(batch) not in cache:
            padded_length = max(b.padded_length for b in batches) if compiled else batch.padded_length
            starts = range(0, len(batch.lengths), options.chunk)
            inputs = [batch.collate(i, min(i + options.chunk, len(batch.lengths)), padded_length) for i in starts]
            cache[id(batch)] = [(x, float((x["labels"] != IGNORED).sum()) / len(batch.positions)) for x in inputs]
        return cache[id(batch)]

    def loss(run: Run, inputs: dict[str, Tensor], weight: float) -> Tensor:
        """Return the mean loss of a micro-batch, times its fraction of the targets."""
        if not at_targets:
            mean: Tensor = run(**inputs).loss
            return mean * weight
        hidden = model.bert(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state  # [B, N, d_model]
        is_target = inputs["labels"] != IGNORED
        return F.cross_entropy(model.cls(hidden[is_target]), inputs["labels"][is_target]) * weight

    def micro_batch_losses(batch: Batch, run: Run) -> list[MicroBatchLoss]:
        return [partial(loss, run, inputs, weight) for inputs, weight in collate_cached(batch)]

    return Row(model, torch.compile(model, dynamic=False) if compiled else model, micro_batch_losses)


def our_row(folder: Path, options: argparse.Namespace, _batches: list[Batch], compiled: bool = False) -> Row:
    from qkv import checkpoints
    from qkv.nn import Ragged
    from qkv.nn.block import Block

    model = checkpoints.load(folder, options.device).model
    for block in model.modules() if compiled else ():
        if isinstance(block, Block):
            block.compile_sublayers()  # as with train.compile

    def loss(batch: Batch, run: Run) -> Tensor:
        logits = run(Ragged.from_lengths(batch.token_ids, batch.lengths), positions=batch.positions)  # [K, vocabulary]
        return F.cross_entropy(logits, batch.target_ids)

    return Row(model, model, lambda batch, run: [partial(loss, batch, run)])


def rows(options: argparse.Namespace) -> dict[str, Callable[..., Row]]:
    makers: dict[str, Callable[..., Row]] = {
        TRANSFORMERS: transformers_row,
        AT_TARGETS: lambda *args: transformers_row(*args, at_targets=True),
    }
    if options.compile:
        makers[COMPILED] = lambda *args: transformers_row(*args, compiled=True)
    makers[OURS] = our_row
    if options.device.type == "cuda":
        makers[OURS_COMPILED] = lambda *args: our_row(*args, compiled=True)
    patterns = [pattern for pattern in options.only.split(",") if pattern]
    return {n: make for n, make in makers.items() if n == TRANSFORMERS or not patterns or any(p in n for p in patterns)}


class ResultDiffers(Exception):
    """A row does not compute the same result as transformers."""


class Contestant:
    """A row with its optimizer."""

    def __init__(self, name: str, row: Row, device: torch.device):
        self.name, self.row, self.device = name, row, device
        self.row.model.train()
        self.optimizer = torch.optim.AdamW(row.model.parameters(), lr=1e-5, fused=True)

    def gradient(self, batch: Batch, run: Run) -> Tensor:
        """Add the gradient of a batch to the parameters' and return the loss."""
        total = torch.zeros((), device=self.device)
        for micro_batch_loss in self.row.micro_batch_losses(batch, run):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = micro_batch_loss()
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def step(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.gradient(batch, self.row.run)
        self.optimizer.step()
        return loss

    def loss_and_gradient_norm(self, batch: Batch) -> tuple[float, float]:
        """Return loss and gradient norm without dropout; uncompiled, because eval mode would compile a second time."""
        self.row.model.eval()
        loss = float(self.gradient(batch, self.row.model))
        squares = [p.grad.float().square().sum() for p in self.row.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        self.row.model.train()
        return loss, float(torch.stack(squares).sum().sqrt())


def check(contestant: Contestant, batch: Batch, reference: tuple[float, float] | None) -> tuple[float, float]:
    """Check that a row skips no work: loss and gradient norm must equal the reference up to the precision."""
    results = contestant.loss_and_gradient_norm(batch)
    for name, value, expected, tolerance in zip(
        ("loss", "gradient norm"), results, reference or results, _TOLERANCE[contestant.device.type], strict=True
    ):
        if not (math.isfinite(value) and abs(value - expected) <= tolerance * expected):
            raise ResultDiffers(f"{contestant.name}: the {name} is {value:.5f}, transformers' {expected:.5f}")
    return results


def enter(
    name: str,
    make: Callable[[], Row],
    batches: list[Batch],
    reference: tuple[float, float] | None,
    device: torch.device,
    contestant_class: type[Contestant] = Contestant,
) -> tuple[Contestant, tuple[float, float]] | None:
    """Build a row, check it and warm it up; a row that fails is reported and skipped."""
    start = time.perf_counter()
    try:
        contestant = contestant_class(name, make(), device)
        results = check(contestant, batches[0], reference)
        first_loss = float(contestant.step(batches[0]))
        if not abs(first_loss - results[0]) <= _FIRST_STEP_TOLERANCE * results[0]:
            raise ResultDiffers(f"{name}: the first step's loss is {first_loss:.4f}, without dropout {results[0]:.4f}")
        for batch in batches:
            contestant.step(batch)
    except ResultDiffers:
        raise
    except ModuleNotFoundError as error:
        print(f"  {name}: not installed: {error.name}", flush=True)
    except Exception as error:  # the failure of one row must not lose the results of the others
        print(f"  {name}: failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    else:
        values = f"loss {results[0]:.5f}, gradient norm {results[1]:.4f} without dropout"
        print(f"  {name}: {values}, ready in {time.perf_counter() - start:.1f} s", flush=True)
        return contestant, results
    return None


def steps(contestant: Contestant, batches: list[Batch]) -> Callable[[], object]:
    """Return the timed call: one step on each batch."""
    return lambda: [contestant.step(batch) for batch in batches]


# ---- the run --------------------------------------------------------------------------------------------------------


def run(folder: Path, size: Size, options: argparse.Namespace) -> dict[str, Any]:
    batches, device = draw(size, options), options.device
    num_tokens = sum(b.num_tokens for b in batches)
    num_positions = sum(b.padded_length * len(b.lengths) for b in batches)
    num_static_positions = max(b.padded_length for b in batches) * options.documents * len(batches)
    print(f"{len(batches)} batches of {options.documents} documents, {num_tokens} real tokens", end=", ")
    print(
        f"{num_positions} padded positions ({num_static_positions} in one shape)",
        f"{sum(len(b.positions) for b in batches)} targets",
        sep=", ",
        flush=True,
    )
    contestants: dict[str, Callable[[], object]] = {}
    reference = None
    for name, make in rows(options).items():
        entry = enter(name, lambda make=make: make(folder, options, batches), batches, reference, device)
        if entry is not None:
            contestants[name] = steps(entry[0], batches)
            reference = reference or entry[1]
    before = matmul_rate(device)
    timings = time_interleaved(contestants, options.rounds, device)
    rate = max(before, matmul_rate(device))
    for row_timings in timings.values():
        row_timings.seconds = [s / len(batches) for s in row_timings.seconds]  # per step
    flops, tokens = sum(step_flops(size, b) for b in batches) / len(batches), round(num_tokens / len(batches))
    print(f"\nmatrix products: {rate / 1e9:,.0f} GFLOP/s; a step needs {flops / 1e9:,.1f} GFLOP; times are per step")
    baseline = COMPILED if COMPILED in timings else TRANSFORMERS
    table = summarize(timings, tokens, flops / rate, baseline)
    print_table(table, tokens, flops / rate, baseline)
    ours = [n for n in (OURS, OURS_COMPILED) if n in timings]
    for peer in [n for n in timings if n not in ours]:
        for our_name in ours:
            goal = f" (goal {GOAL})" if peer == COMPILED and device.type == "cuda" and options.size == "base" else ""
            print(f"{our_name} / {peer} = {speedup(timings[our_name], timings[peer]):.2f}{goal}")
    return {"matrix_rate": rate, "operations": flops, "tokens": tokens, "lengths": [b.lengths for b in batches]} | {
        "rows": table
    }


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="", help="base on a GPU, mini on a CPU")
    parser.add_argument("--documents", type=int, default=0, help="documents per batch; 0: the default of the size")
    parser.add_argument("--batches", type=int, default=0, help="batches per call; 0: the default of the size")
    parser.add_argument("--chunk", type=int, default=0, help="documents per micro-batch of a padded peer")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout after the embeddings and around each layer")
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=3, help="seed of the lengths, the tokens and the masks")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compile", action="store_true", help="add a compiled row on a CPU")
    parser.add_argument("--only", default="", help="comma-separated list: only rows whose name contains one of these")
    parser.add_argument("--json", default="", help="write all results to this file")
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
        torch._dynamo.config.recompile_limit = 64  # one limit for evaluation, training and all rows
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {options.threads} threads"
    print(
        f"torch {torch.__version__}, {device_name}, BERT-{options.size}, seed {options.seed}, {options.rounds} rounds"
    )
    print(f"dropout {options.dropout}, on attention weights {options.attention_dropout}, for all rows")
    with tempfile.TemporaryDirectory() as temporary:
        make_folder(Path(temporary), SIZES[options.size], options)
        try:
            result = run(Path(temporary), SIZES[options.size], options)
        except ResultDiffers as error:
            sys.exit(f"not timed: {error}")
    if options.json:
        Path(options.json).write_text(
            json.dumps({"torch": torch.__version__, "device": device_name} | result, indent=1)
        )


if __name__ == "__main__":
    main()
