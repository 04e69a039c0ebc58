"""One training step of an encoder-decoder Transformer on sentences of varied length: ours and the peers'.

    python bench/train_seq2seq.py                    # a GPU where there is one, else the CPU
    python bench/train_seq2seq.py --device cpu --rounds 9 --seed 4
    python bench/train_seq2seq.py --size words       # a small model on short words: what a call costs beside its work
    python bench/train_seq2seq.py --only qkv,sorted  # only rows whose name holds one of these

A step is forward, backward and AdamW (fused), with dropout 0.1 after the embeddings and around each layer and nowhere
else, the same for all. The model is Transformer-base: 6 + 6 layers, width 512, 8 heads, 2048 hidden, 16,000 words, one
table for both embeddings and the output. Lengths are lognormal, as sentences' are. The loss is the sum over targets
divided by their number, so that a batch cut in pieces has the gradient of the whole one.

  as collated     the batch padded to its longest sentence, as the usual collator gives it
  sorted and cut  sorted by length and cut in 4 by hand, gradients summed: what a careful user does about padding
  qkv             packed; its layout and plan are built anew in every step, while the peers get ready-made tensors

On a GPU everybody runs under bfloat16 autocast, peers take at most --chunk pairs at once, and compiled rows are added;
those first take a step on another batch, so that they are compiled for any shape, as training needs it.
Peers come from `pip install qkv[bench]`; without transformers the Marian rows are left out and that is said.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from a checkout too

from bench.race import Laps, matrix_rate, race, speed_up
from bench.seq2seq import SIZES, Loss, Pairs, Size, collate, draw, marian_row, our_row, torch_row, work

COLLATED, SORTED, OURS = "as collated", "sorted and cut", "qkv"
GOALS = {COLLATED: 2.0, SORTED: 1.0}
PAIRS = {("base", "cpu"): 40, ("base", "cuda"): 1300, ("words", "cpu"): 600, ("words", "cuda"): 600}


@dataclass
class Row:
    name: str
    group: str  # which goal it belongs to
    make: Callable[[Size, torch.device, bool], tuple[nn.Module, Loss]]
    compiled: bool = False


def rows(device: torch.device) -> list[Row]:
    found = [
        Row(f"torch.nn.Transformer, {COLLATED}", COLLATED, torch_row),
        Row(f"HF Marian, {COLLATED}", COLLATED, marian_row),
        Row(f"torch.nn.Transformer, {SORTED}", SORTED, torch_row),
        Row(f"HF Marian, {SORTED}", SORTED, marian_row),
        Row(OURS, OURS, our_row),
    ]
    if device.type == "cuda":
        found += [
            Row(f"HF Marian, compiled, {COLLATED}", COLLATED, marian_row, compiled=True),
            Row(f"HF Marian, compiled, {SORTED}", SORTED, marian_row, compiled=True),
            Row("qkv, compiled", OURS, our_row, compiled=True),
        ]
    return found


class Contestant:
    """A model with its optimiser, and how it takes a batch."""

    def __init__(self, row: Row, size: Size, device: torch.device, chunk: int):
        torch.manual_seed(0)
        self.row, self.device, self.chunk = row, device, chunk
        self.model, self.loss = row.make(size, device, row.compiled)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step_on(self, pairs: Pairs) -> Callable[[], Tensor]:
        """The call that trains on these pairs once and gives the loss."""
        pieces = [pairs]
        if self.row.group != OURS:
            by_length = self.row.group == SORTED
            pieces = pairs.pieces(self.chunk, 4 if by_length else 1, by_length)
        asked = pairs.asked

        def step() -> Tensor:
            self.optimiser.zero_grad(set_to_none=True)
            total = torch.zeros((), device=self.device)
            for piece in pieces:
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                    part = self.loss(piece) / asked
                part.backward()  # type: ignore[no-untyped-call]
                total += part.detach()
            self.optimiser.step()
            return total

        return step

    def check(self, step: Callable[[], Tensor]) -> str:
        """Who skips work would win: the loss must be a number, and every parameter must get a gradient."""
        value = step().item()
        if not math.isfinite(value) or value <= 0:
            raise RuntimeError(f"the loss is {value}")
        # Marian's sinusoids are parameters that do not learn
        learnt = [(n, p.grad) for n, p in self.model.named_parameters() if p.requires_grad]
        idle = [n for n, gradient in learnt if gradient is None or not gradient.any()]
        if idle:
            raise RuntimeError(f"no gradient for {', '.join(idle[:3])} ({len(idle)} in all)")
        parameters = sum(p.numel() for p in self.model.parameters())
        return f"{parameters / 1e6:.1f} M parameters, loss {value:.2f}"


def enter(
    row: Row, size: Size, pairs: Pairs, another: Pairs, options: argparse.Namespace
) -> Callable[[], Tensor] | None:
    """Builds a row, checks it and warms it up; a row that fails is said and left out."""
    began = time.perf_counter()
    try:
        contestant = Contestant(row, size, options.device, options.chunk)
        if row.compiled:
            contestant.step_on(another)()  # a second shape: without it the compiler may bake the batch in
        step = contestant.step_on(pairs)
        said = contestant.check(step)
        step()
    except ModuleNotFoundError as error:
        print(f"  {row.name}: left out: {error.name} is not installed (pip install qkv[bench])", flush=True)
    except Exception as error:  # a peer that breaks must not take the others' figures with it
        reason = " ".join(str(error).split())[:200]
        print(f"  {row.name}: failed: {type(error).__name__}: {reason}", flush=True)
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
    else:
        print(f"  {row.name}: {said}, ready in {time.perf_counter() - began:.1f} s", flush=True)
        return step
    return None


# ---- what is printed ------------------------------------------------------------------------------------------------


def table(laps: dict[str, Laps], groups: dict[str, str], real: int, least: float) -> None:
    """`least`: seconds that the matrix products of the real tokens take at the measured rate."""
    peers = [n for n in laps if groups[n] == COLLATED]
    best = min(peers, key=lambda n: laps[n].median) if peers else None
    print(f"\n| row | real tokens/s | ms | spread | x {best or 'no peer'} | of the matrix-product limit |")
    print("|---|---|---|---|---|---|")
    for name, lap in laps.items():
        ratio = f"{speed_up(lap, laps[best]):.2f}" if best else ""
        shown = f"{real / lap.median:,.0f} | {lap.median * 1e3:.1f} | {lap.spread:.0%} | {ratio}"
        print(f"| {name} | {shown} | {least / lap.median:.0%} |")
    print(f"| limit | {real / least:,.0f} | {least * 1e3:.1f} | | | 100% |\n")


def closing(laps: dict[str, Laps], groups: dict[str, str], with_goals: bool) -> None:
    ours = [lap for name, lap in laps.items() if groups[name] == OURS]
    for group, goal in GOALS.items():
        peers = [lap for name, lap in laps.items() if groups[name] == group]
        if ours and peers:
            ratio = max(min(speed_up(own, peer) for peer in peers) for own in ours)
            print(f"ours / better peer {group} = {ratio:.2f}" + (f" (goal {goal})" if with_goals else ""))
        else:
            print(f"ours / better peer {group}: a row is missing")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--pairs", type=int, default=0, help="pairs in a batch; 0: about 2,000 tokens, 64,000 on a GPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=3, help="of the lengths and the words")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--chunk", type=int, default=512, help="pairs that a padded peer takes at once")
    parser.add_argument("--only", default="", help="comma list: only rows whose name holds one of these")
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
        torch._dynamo.config.recompile_limit = 64  # several rows compile one class, and each counts against its limit
    pairs, another = (draw(size, options.pairs, seed, device) for seed in (options.seed, options.seed + 1))
    slots = sum(t.numel() for t in collate(pairs)[:2])
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {options.threads} threads"
    print(f"torch {torch.__version__}, {where}, size {options.size}, seed {options.seed}, {options.rounds} rounds")
    print(f"{options.pairs} pairs, {pairs.real} real tokens in {slots} padded places", flush=True)
    wanted = [w for w in options.only.split(",") if w]
    entered, groups = {}, {}
    for row in rows(device):
        if wanted and not any(w in row.name for w in wanted):
            continue
        step = enter(row, size, pairs, another, options)
        if step is not None:
            entered[row.name], groups[row.name] = step, row.group
    if not entered:
        sys.exit("no row is left to time")
    laps = race(entered, options.rounds, device)
    rate = matrix_rate(device)
    disturbed = sum(lap.disturbed for lap in laps.values())
    print(f"\nmatrix products: {rate / 1e9:,.0f} GFLOP/s; a step needs {work(size, pairs) / 1e9:,.1f} GFLOP")
    if disturbed:
        print(f"noisy: others used the machine in {disturbed} of {options.rounds * len(laps)} samples")
    table(laps, groups, pairs.real, work(size, pairs) / rate)
    closing(laps, groups, with_goals=options.size == "base")


if __name__ == "__main__":
    main()
