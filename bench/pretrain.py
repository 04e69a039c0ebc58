"""A step of pretraining, GPT-2's and BERT's: ours and transformers', the same weights, in one run.

    python bench/pretrain.py                            # GPT-2 124M and BERT-base on a GPU, else tiny ones on the CPU
    python bench/pretrain.py --only gpt2 --rounds 9 --json pretrain.json
    python bench/pretrain.py --only bert --documents 256,768,1536
    python bench/pretrain.py --size mini --device cpu --compile

A step is forward, backward and AdamW (fused), under bfloat16 autocast on a GPU; nothing is dropped, as in
shared/peers/gpu. GPT-2 reads 16 sequences of 1,024 tokens, all of one shape, and is asked for the next token behind
each. BERT reads documents of lognormal length, 256 in a batch (some 21,000 tokens) and 768 (some 65,000, half of the
paper's batch), and is asked for 15 % of the tokens; see bench/train_encoder.py, whose rows these are.

  transformers             as it comes; of BERT on a GPU only the compiled one is run
  transformers, compiled   mode default, dynamic=False, BERT's batches padded to one shape; a GPU, or --compile
  qkv                      packed; the loss by `objectives.chunked_cross_entropy`, which keeps no logits
  qkv, compiled            each block compiled once for batches of any shape, as train.compile does
  qkv, compiled, recorded  and the forward and backward pass of a shape that repeats is one CUDA graph: GPT-2's alone

Two shares of what the card's matrix products reach, measured in the same run (8192 x 8192 x 8192, bfloat16). `as peers
count` is the convention of shared/peers/gpu: 6 operations a parameter and token, for GPT-2 12 x layers x width x length
more, whether or not they are needed; padding is never counted. `needed` counts what cannot be left out: matrices, the
head at the targets alone, and attention to what may be seen.

Before the race the loss of every row on the first batch and the length of its gradient, by the very call that is raced,
must be those of the first row; else the run ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from a checkout too

from bench import train_encoder as encoder
from bench.encoder import quiet_transformers
from bench.race import Laps, matrix_rate, race, speed_up
from bench.train_encoder import Contestant, Differs, Row, Run, enter, steps

TRANSFORMERS, COMPILED = encoder.TRANSFORMERS, encoder.COMPILED
OURS, OURS_COMPILED, RECORDED = encoder.OURS, encoder.OURS_COMPILED, "qkv, compiled, recorded"
VOCABULARY = 50257
GOAL = 0.50  # as peers count, on a GPU
_UNTIL_RECORDED = 4  # calls after which a shape that repeats is replayed


@dataclass(frozen=True)
class Size:
    """A GPT-2, and what it reads."""

    width: int
    heads: int
    layers: int
    length: int
    sequences: int


SIZES = {"mini": Size(128, 4, 2, 64, 4), "base": Size(768, 12, 12, 1024, 16)}
DOCUMENTS = {"mini": "16", "base": "256,768"}


@dataclass(eq=False)
class Text:
    """Sequences of one length, and the token behind each of theirs."""

    words: Tensor  # [B, N]
    asked: Tensor  # [B, N]

    @property
    def real(self) -> int:
        return self.words.numel()


def draw_text(size: Size, options: argparse.Namespace) -> list[Text]:
    generator = torch.Generator().manual_seed(options.seed)
    shape = 2, size.sequences, size.length + 1
    return [
        Text(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        for ids in torch.randint(0, VOCABULARY, shape, generator=generator).to(options.device)
    ]


def needed(size: Size, text: Text) -> float:
    """Two operations a weight and token and pair of tokens that see each other, backward twice that."""
    pairs = len(text.words) * size.length * (size.length + 1) // 2
    body = text.real * 12 * size.width**2 + 2 * size.width * pairs
    return 3.0 * 2 * (size.layers * body + text.asked.numel() * size.width * VOCABULARY)


# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass
class OurRow(Row):
    """One that may be recorded: what goes in, and the sum of its loss with the number of its targets."""

    inputs: Callable[[Any], Any] | None = None
    loss: Callable[[Run, Any], Any] | None = None
    record: bool = False


class Pretrainer(Contestant):
    """A row with its optimiser, and its recordings where it is recorded."""

    def __init__(self, name: str, row: Row, device: torch.device):
        super().__init__(name, row, device)
        self.recorded = None
        if isinstance(row, OurRow) and row.record:
            from qkv.train.perf.cuda_graphs import CudaGraphRunner

            self.recorded = CudaGraphRunner(partial(self._backward, row), row.model.parameters())

    def _backward(self, row: OurRow, part: Any) -> tuple[Tensor]:
        assert row.loss is not None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            total, targets = row.loss(row.run, part)
        loss = total / targets
        loss.backward()
        return (loss.detach(),)

    def gradient(self, batch: Any, run: Run) -> Tensor:
        if self.recorded is None:
            return super().gradient(batch, run)
        assert isinstance(self.row, OurRow)
        assert self.row.inputs is not None
        return self.recorded(self.row.inputs(batch))[0]

    def without_dropout(self, batch: Any) -> tuple[float, float]:
        """Nothing is dropped here: the call that is raced is the one that is checked."""
        for _ in range(1 if self.recorded is None else _UNTIL_RECORDED):
            self.optimiser.zero_grad(set_to_none=True)
            loss = float(self.gradient(batch, self.row.run))
        squares = [p.grad.float().square().sum() for p in self.row.model.parameters() if p.grad is not None]
        self.optimiser.zero_grad(set_to_none=True)
        return loss, float(torch.stack(squares).sum().sqrt())


def their_gpt2(folder: Path, options: argparse.Namespace, compiled: bool = False) -> Row:
    model = quiet_transformers().GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa").to(options.device)

    def loss(text: Text, run: Run) -> Tensor:
        whole: Tensor = run(text.words, labels=text.asked, shift_labels=text.asked, use_cache=False).loss
        return whole

    run = torch.compile(model, dynamic=False) if compiled else model
    return Row(model, run, lambda text, run: [partial(loss, text, run)])


def our_row(
    folder: Path,
    options: argparse.Namespace,
    inputs: Callable[[Any], Any],
    loss: Callable[[Run, Any], Any],
    compiled: bool = False,
    record: bool = False,
) -> OurRow:
    from qkv import checkpoints
    from qkv.nn.block import Block

    model = checkpoints.load(folder, options.device).model
    for block in model.modules() if compiled else ():
        if isinstance(block, Block):
            block.compile_forward()

    def mean(batch: Any, run: Run) -> Tensor:
        total, targets = loss(run, inputs(batch))
        return total / targets

    return OurRow(model, model, lambda batch, run: [partial(mean, batch, run)], inputs, loss, record)


def gpt2_rows(folder: Path, options: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    from qkv.nn import Ragged
    from qkv.objectives import clm

    def inputs(text: Text) -> clm.Inputs:
        tokens = Ragged.from_lengths(text.words.flatten(), [text.words.shape[1]] * len(text.words))
        return clm.Inputs(tokens, None, text.asked.flatten())

    ours = partial(our_row, folder, options, inputs, clm.loss)
    found: dict[str, Callable[[], Row]] = {TRANSFORMERS: partial(their_gpt2, folder, options)}
    if options.compile:
        found[COMPILED] = partial(their_gpt2, folder, options, compiled=True)
    if options.device.type == "cpu":
        return found | {OURS: ours}
    return found | {OURS_COMPILED: partial(ours, compiled=True), RECORDED: partial(ours, compiled=True, record=True)}


def bert_rows(folder: Path, options: argparse.Namespace, batches: list[encoder.Batch]) -> dict[str, Callable[[], Row]]:
    from qkv.nn import Ragged
    from qkv.objectives import mlm

    def inputs(batch: encoder.Batch) -> mlm.Inputs:
        return mlm.Inputs(Ragged.from_lengths(batch.words, batch.lengths), None, batch.at, batch.asked, None)

    ours = partial(our_row, folder, options, inputs, mlm.loss)
    theirs = partial(encoder.transformers_row, folder, options, batches)
    found: dict[str, Callable[[], Row]] = {}
    if options.device.type == "cpu":
        found[TRANSFORMERS] = theirs
    if options.compile:
        found[COMPILED] = partial(theirs, compiled=True)
    return found | ({OURS: ours} if options.device.type == "cpu" else {OURS_COMPILED: partial(ours, compiled=True)})


# ---- the run --------------------------------------------------------------------------------------------------------


def entered(
    rows: dict[str, Callable[[], Row]], batches: list[Any], options: argparse.Namespace
) -> dict[str, Contestant]:
    found: dict[str, Contestant] = {}
    wanted = None
    for name, make in rows.items():
        entry = enter(name, make, batches, wanted, options.device, Pretrainer)
        if entry is not None:
            found[name], wanted = entry[0], wanted or entry[1]
    return found


def timed(
    contestants: dict[str, Contestant], batches: list[Any], work: tuple[float, float], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Races over the batches; `work` is a step's operations as peers count, and those needed."""
    before = matrix_rate(options.device)
    laps = race({name: steps(c, batches) for name, c in contestants.items()}, options.rounds, options.device)
    rate = max(before, matrix_rate(options.device))
    for lap in laps.values():
        lap.seconds = [s / len(batches) for s in lap.seconds]  # a step each
    tokens = sum(b.real for b in batches) / len(batches)
    against = COMPILED if COMPILED in laps else TRANSFORMERS
    print(f"matrix products: {rate / 1e12:,.2f} TFLOP/s; a step has {tokens:,.0f} real tokens and", end=" ")
    print(f"{work[0] / 1e12:,.3f} TFLOP as peers count, {work[1] / 1e12:,.3f} needed\n")
    print(f"| row | real tokens/s | ms a step | spread | x {against} | as peers count | needed |")
    print("|---|---|---|---|---|---|---|")
    return [shown(name, lap, laps.get(against), tokens, work, rate) for name, lap in laps.items()]


def shown(
    name: str, lap: Laps, against: Laps | None, tokens: float, work: tuple[float, float], rate: float
) -> dict[str, Any]:
    shares = [operations / rate / lap.median for operations in work]
    times = None if against is None else speed_up(lap, against)
    ratio = "" if times is None else f"{times:.2f}"
    print(f"| {name} | {tokens / lap.median:,.0f} | {lap.median * 1e3:.2f} | {lap.spread:.0%} | {ratio}", end=" ")
    print(f"| {shares[0]:.3f} | {shares[1]:.3f} |", flush=True)
    return {"row": name, "tokens_per_second": tokens / lap.median, "ms": lap.median * 1e3, "ratio": times} | {
        "as_peers_count": shares[0],
        "needed": shares[1],
        "matrix_rate": rate,
        "disturbed": lap.disturbed,
    }


def parameters(contestants: dict[str, Contestant]) -> int:
    model: nn.Module = next(iter(contestants.values())).row.model
    return sum(p.numel() for p in model.parameters())


def run_gpt2(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    size = SIZES[options.size]
    config = quiet_transformers().GPT2Config(
        n_embd=size.width, n_layer=size.layers, n_head=size.heads, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    )
    torch.manual_seed(0)
    quiet_transformers().GPT2LMHeadModel(config).save_pretrained(folder)
    print(f"\nGPT-2, {size.sequences} x {size.length} tokens", flush=True)
    texts = draw_text(size, options)
    contestants = entered(gpt2_rows(folder, options), texts, options)
    counted = (6 * parameters(contestants) + 12 * size.layers * size.width * size.length) * texts[0].real
    return {"gpt2": timed(contestants, texts, (counted, needed(size, texts[0])), options)}


def run_bert(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    size = encoder.SIZES[options.size]
    encoder.make_folder(folder, size, options)
    sets = {}
    for number in map(int, options.documents.split(",")):
        # a larger batch says as much with fewer of them, and a padded peer takes most of a second for it
        count = max(1, size.batches * size.documents // number)
        sets[number] = encoder.draw(size, argparse.Namespace(**vars(options) | {"documents": number, "batches": count}))
    every = [batch for batches in sets.values() for batch in batches]
    print("\nBERT, documents of varied length", flush=True)
    contestants = entered(bert_rows(folder, options, every), every, options)
    found = {}
    for number, batches in sets.items():
        places = sum(b.width * len(b.lengths) for b in batches) // len(batches)
        print(f"\n{len(batches)} batches of {number} documents, {places:,} padded places each", flush=True)
        tokens = sum(b.real for b in batches) / len(batches)
        least = sum(encoder.work(size, b) for b in batches) / len(batches)
        found[f"bert {number}"] = timed(contestants, batches, (6 * parameters(contestants) * tokens, least), options)
    return found


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="", help="base on a GPU, mini on a CPU")
    parser.add_argument("--only", choices=["gpt2", "bert"], default="")
    parser.add_argument("--documents", default="", help="comma list: of BERT's batches; as the size has them")
    parser.add_argument("--chunk", type=int, default=128, help="documents that a padded peer takes at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=3, help="of the lengths, the words and the masks")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compile", action="store_true", help="a compiled transformers on a CPU too")
    parser.add_argument("--json", default="", help="a file for all figures")
    options = parser.parse_args()
    options.size = options.size or ("base" if options.device == "cuda" else "mini")
    options.documents = options.documents or DOCUMENTS[options.size]
    options.compile = options.compile or options.device == "cuda"
    options.device = torch.device(options.device)
    options.dropout = options.attention_dropout = 0.0
    return options


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # all rows count against one limit
    on = f"CPU, {options.threads} threads"
    if options.device.type == "cuda":
        on = torch.cuda.get_device_name(options.device)
    print(f"torch {torch.__version__}, {on}, {options.size}, seed {options.seed}, {options.rounds} rounds")
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for name, run in (("gpt2", run_gpt2), ("bert", run_bert)):
            if options.only in ("", name):
                with tempfile.TemporaryDirectory() as folder:
                    found |= run(Path(folder), options)
    except Differs as error:
        sys.exit(f"not timed: {error}")
    for name, rows in found.items() if options.size == "base" else ():
        shares = [row["as_peers_count"] for row in rows if row["row"].startswith("qkv")]
        print(f"{name}: {max(shares, default=0.0):.3f} of the matrix products' rate (goal {GOAL})")
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch.__version__, "on": on} | found, indent=1))


if __name__ == "__main__":
    main()
