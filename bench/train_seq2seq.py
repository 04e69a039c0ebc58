"""One training step of an encoder-decoder Transformer on sentences of variable length: qkv and its peers.

    python bench/train_seq2seq.py                    # on a GPU if there is one, else on the CPU
    python bench/train_seq2seq.py --device cpu --rounds 9 --seed 4
    python bench/train_seq2seq.py --size words       # a small model on short words, to measure the overhead per call
    python bench/train_seq2seq.py --only qkv,sorted  # only rows whose name contains one of these

A step is forward, backward and AdamW (fused), with dropout 0.1 after the embeddings and around each layer and nowhere
else, the same for all rows. The model is Transformer-base: 6 + 6 layers, d_model 512, 8 heads, d_ff 2048, 16,000
tokens, one matrix for both embeddings and the output. Lengths are lognormal, as those of sentences. The loss is the sum
over targets divided by their number, so that a batch split into micro-batches has the gradient of the whole batch.

  as collated       the batch padded to its longest sentence, as by the usual collator
  sorted and split  sorted by length and split in 4 by hand, gradients summed, as a careful user would reduce padding
  qkv               packed; its layout and bucket plan are built in every step, while the peers get prepared tensors

On a GPU all rows run in bfloat16 autocast, peers take at most --chunk pairs at once, and compiled rows are added; these
first take a step on other_pairs batch, so that they are compiled for any shape, as training needs. Peers are installed
with `pip install qkv[bench]`; without transformers the Marian rows are skipped with a message.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo.config
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to run from a checkout

from bench.paired_benchmark import Timings, matmul_rate, speedup, time_interleaved
from bench.seq2seq import SIZES, Loss, Pairs, Size, collate, draw, marian_row, our_row, step_flops, torch_row

COLLATED, SORTED, OURS = "as collated", "sorted and split", "qkv"
GOALS = {COLLATED: 2.0, SORTED: 1.0}
PAIRS = {("base", "cpu"): 40, ("base", "cuda"): 1300, ("words", "cpu"): 600, ("words", "cuda"): 600}


@dataclass
class Row:
    name: str
    group: str  # the group of rows that a goal belongs to
    make: Callable[[Size, torch.device, bool], tuple[nn.Module, Loss]]
    compiled: bool = False


def rows(device: torch.device) -> list[Row]:
    all_rows = [
        Row(f"torch.nn.Transformer, {COLLATED}", COLLATED, torch_row),
        Row(f"HF Marian, {COLLATED}", COLLATED, marian_row),
        Row(f"torch.nn.Transformer, {SORTED}", SORTED, torch_row),
        Row(f"HF Marian, {SORTED}", SORTED, marian_row),
        Row(OURS, OURS, our_row),
    ]
    if device.type == "cuda":
        all_rows += [
            Row(f"HF Marian, compiled, {COLLATED}", COLLATED, marian_row, compiled=True),
            Row(f"HF Marian, compiled, {SORTED}", SORTED, marian_row, compiled=True),
            Row("qkv, compiled", OURS, our_row, compiled=True),
        ]
    return all_rows


class Contestant:
    """A row with its model and optimizer."""

    def __init__(self, row: Row, size: Size, device: torch.device, chunk: int):
        torch.manual_seed(0)
        self.row, self.device, self.chunk = row, device, chunk
        self.model, self.loss = row.make(size, device, row.compiled)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step_on(self, pairs: Pairs) -> Callable[[], Tensor]:
        """Return a call that makes one training step on these pairs and returns the loss."""
        micro_batches = [pairs]
        if self.row.group != OURS:
            by_length = self.row.group == SORTED
            micro_batches = pairs.split(self.chunk, 4 if by_length else 1, by_length)
        num_labels = pairs.num_labels

        def step() -> Tensor:
            self.optimizer.zero_grad(set_to_none=True)
            total = torch.zeros((), device=self.device)
            for micro_batch in micro_batches:
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                    loss = self.loss(micro_batch) / num_labels
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            self.optimizer.step()
            return total

        return step

    def check(self, step: Callable[[], Tensor]) -> str:
        """Check that the row skips no work: the loss must be finite, and every parameter must get a gradient."""
        value = step().item()
        if not math.isfinite(value) or value <= 0:
            raise RuntimeError(f"the loss is {value}")
        # Marian's sinusoids are parameters without gradient
        gradients = [(n, p.grad) for n, p in self.model.named_parameters() if p.requires_grad]
        unused = [n for n, gradient in gradients if gradient is None or not gradient.any()]
        if unused:
            raise RuntimeError(f"no gradient for {', '.join(unused[:3])} ({len(unused)} in total)")
        parameters = sum(p.numel() for p in self.model.parameters())
        return f"{parameters / 1e6:.1f} M parameters, loss {value:.2f}"


def enter(
    row: Row, size: Size, pairs: Pairs, other_pairs: Pairs, options: argparse.Namespace
) -> Callable[[], Tensor] | None:
    """Build a row, check it and warm it up; a row that fails is reported and skipped."""
    start = time.perf_counter()
    try:
        contestant = Contestant(row, size, options.device, options.chunk)
        if row.compiled:
            contestant.step_on(other_pairs)()  # a second shape: without it the compiler may specialize on the batch
        step = contestant.step_on(pairs)
        description = contestant.check(step)
        step()
    except ModuleNotFoundError as error:
        print(f"  {row.name}: skipped: {error.name} is not installed (pip install qkv[bench])", flush=True)
    except Exception as error:  # the failure of one row must not lose the results of the others
        reason = " ".join(str(error).split())[:200]
        print(f"  {row.name}: failed: {type(error).__name__}: {reason}", flush=True)
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
    else:
        print(f"  {row.name}: {description}, ready in {time.perf_counter() - start:.1f} s", flush=True)
        return step
    return None


# ---- output ------------------------------------------------------------------------------------------------


def print_table(timings: dict[str, Timings], groups: dict[str, str], num_tokens: int, limit_seconds: float) -> None:
    """Print one line per row; `limit_seconds` is the time of the real tokens' matrix products at the measured rate."""
    peers = [n for n in timings if groups[n] == COLLATED]
    best_peer = min(peers, key=lambda n: timings[n].median) if peers else None
    print(f"\n| row | real tokens/s | ms | spread | x {best_peer or 'no peer'} | of the matrix-product limit |")
    print("|---|---|---|---|---|---|")
    for name, row_timings in timings.items():
        ratio = f"{speedup(row_timings, timings[best_peer]):.2f}" if best_peer else ""
        seconds, spread = row_timings.median, row_timings.relative_spread
        cells = f"{num_tokens / seconds:,.0f} | {seconds * 1e3:.1f} | {spread:.0%} | {ratio}"
        print(f"| {name} | {cells} | {limit_seconds / row_timings.median:.0%} |")
    print(f"| limit | {num_tokens / limit_seconds:,.0f} | {limit_seconds * 1e3:.1f} | | | 100% |\n")


def print_ratios(timings: dict[str, Timings], groups: dict[str, str], with_goals: bool) -> None:
    ours = [row_timings for name, row_timings in timings.items() if groups[name] == OURS]
    for group, goal in GOALS.items():
        peers = [row_timings for name, row_timings in timings.items() if groups[name] == group]
        if ours and peers:
            ratio = max(min(speedup(our_timings, peer) for peer in peers) for our_timings in ours)
            print(f"qkv / better peer {group} = {ratio:.2f}" + (f" (goal {goal})" if with_goals else ""))
        else:
            print(f"qkv / better peer {group}: a row is missing")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--pairs", type=int, default=0, help="pairs per batch; 0: about 2,000 tokens, 64,000 on a GPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=3, help="seed of the lengths and the tokens")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--chunk", type=int, default=512, help="pairs per micro-batch of a padded peer")
    parser.add_argument("--only", default="", help="comma-separated list: only rows whose name contains one of these")
    options = parser.parse_args()
    options.pairs = options.pairs or PAIRS[options.size, options.device]
    options.device = torch.device(options.device)
    return options


def main() -> None:
    options = read_options()
    device, size = options.device, SIZES[options.size]
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message=".*nested.?tensor.*|.*mask.*")  # torch.nn.Transformer's, on every call
    if hasattr(torch._dynamo.config, "recompile_limit"):
        torch._dynamo.config.recompile_limit = 64  # several rows compile the same class, whose limit they share
    pairs, other_pairs = (draw(size, options.pairs, seed, device) for seed in (options.seed, options.seed + 1))
    num_positions = sum(t.numel() for t in collate(pairs)[:2])
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {options.threads} threads"
    print(
        f"torch {torch.__version__}, {device_name}, size {options.size}, seed {options.seed}, {options.rounds} rounds"
    )
    print(f"{options.pairs} pairs, {pairs.num_tokens} real tokens in {num_positions} padded positions", flush=True)
    patterns = [pattern for pattern in options.only.split(",") if pattern]
    row_calls, groups = {}, {}
    for row in rows(device):
        if patterns and not any(pattern in row.name for pattern in patterns):
            continue
        step = enter(row, size, pairs, other_pairs, options)
        if step is not None:
            row_calls[row.name], groups[row.name] = step, row.group
    if not row_calls:
        sys.exit("no row to time")
    timings = time_interleaved(row_calls, options.rounds, device)
    rate = matmul_rate(device)
    num_noisy = sum(row_timings.num_noisy for row_timings in timings.values())
    print(f"\nmatrix products: {rate / 1e9:,.0f} GFLOP/s; a step needs {step_flops(size, pairs) / 1e9:,.1f} GFLOP")
    if num_noisy:
        print(f"noisy: other processes used the machine in {num_noisy} of {options.rounds * len(timings)} samples")
    print_table(timings, groups, pairs.num_tokens, step_flops(size, pairs) / rate)
    print_ratios(timings, groups, with_goals=options.size == "base")


if __name__ == "__main__":
    main()
