"""One pretraining step of GPT-2 and of BERT: qkv and transformers with the same weights, in one run.

    python bench/pretrain.py                            # GPT-2 124M and BERT-base on a GPU, else tiny models on the CPU
    python bench/pretrain.py --only gpt2 --rounds 9 --json pretrain.json
    python bench/pretrain.py --only bert --documents 256,768,1536
    python bench/pretrain.py --size mini --device cpu --compile

A step is forward, backward and AdamW (fused), in bfloat16 autocast on a GPU, without dropout, as in shared/peers/gpu.
GPT-2 reads 16 sequences of 1,024 tokens, all of one shape, and predicts the next token at each position. BERT reads
documents of lognormal length, 256 per batch (some 21,000 tokens) and 768 (some 65,000, half of the paper's batch), and
predicts 15 % of the tokens; these are the rows of bench/train_encoder.py.

  transformers             the default model; for BERT on a GPU only the compiled one is run
  transformers, compiled   mode default, dynamic=False, BERT's batches padded to one shape; on a GPU, or with --compile
  qkv                      packed; the loss of `objectives.chunked_cross_entropy`, which keeps no logits
  qkv, compiled            each block compiled once for batches of any shape, as with train.compile
  qkv, compiled, CUDA graph  also one CUDA graph for the forward and backward pass of a repeated shape: GPT-2 only

There are two values of MFU, relative to the rate of matrix products measured in the same run (8192 x 8192 x 8192,
bfloat16). `6N` is the convention of shared/peers/gpu: 6 FLOPs per parameter and token, for GPT-2 12 x layers x d_model
x length more, whether they are needed_flops or not; padding is never counted. `needed_flops` counts the unavoidable
operations: matrices, the head at the targets only, and attention to visible tokens.

Before timing, the loss of every row on the first batch and the norm of its gradient, computed by the call that is
time_rows, must equal those of the first row; otherwise the script exits.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to run from a checkout

from bench import train_encoder as encoder
from bench.encoder import quiet_transformers
from bench.paired_benchmark import Timings, matmul_rate, speedup, time_interleaved
from bench.train_encoder import Contestant, ResultDiffers, Row, Run, enter, steps

TRANSFORMERS, COMPILED = encoder.TRANSFORMERS, encoder.COMPILED
OURS, OURS_COMPILED, OURS_GRAPH = encoder.OURS, encoder.OURS_COMPILED, "qkv, compiled, CUDA graph"
VOCAB_SIZE = 50257
GOAL = 0.50  # MFU by the 6N convention, on a GPU
_CALLS_UNTIL_CAPTURE = 4  # calls with one shape until it is replayed


@dataclass(frozen=True)
class Size:
    """The size of a GPT-2 and of its batches."""

    d_model: int
    heads: int
    layers: int
    length: int
    sequences: int


SIZES = {"mini": Size(128, 4, 2, 64, 4), "base": Size(768, 12, 12, 1024, 16)}
DOCUMENTS = {"mini": "16", "base": "256,768"}


@dataclass(eq=False)
class Text:
    """Sequences of one length and their next tokens."""

    token_ids: Tensor  # [B, N]
    target_ids: Tensor  # [B, N]

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()


def draw_text(size: Size, options: argparse.Namespace) -> list[Text]:
    generator = torch.Generator().manual_seed(options.seed)
    shape = 2, size.sequences, size.length + 1
    return [
        Text(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        for ids in torch.randint(0, VOCAB_SIZE, shape, generator=generator).to(options.device)
    ]


def needed_flops(size: Size, text: Text) -> float:
    """Return the needed FLOPs: two per weight and token and per visible pair of tokens, backward twice as many."""
    pairs = len(text.token_ids) * size.length * (size.length + 1) // 2
    backbone = text.num_tokens * 12 * size.d_model**2 + 2 * size.d_model * pairs
    return 3.0 * 2 * (size.layers * backbone + text.target_ids.numel() * size.d_model * VOCAB_SIZE)


# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass
class OurRow(Row):
    """A row of qkv: its inputs, the sum of its loss with the number of targets, and whether it uses CUDA graphs."""

    inputs: Callable[[Any], Any] | None = None
    loss: Callable[[Run, Any], Any] | None = None
    use_graph: bool = False


class Pretrainer(Contestant):
    """A row with its optimizer, and its CUDA graphs if it uses them."""

    def __init__(self, name: str, row: Row, device: torch.device):
        super().__init__(name, row, device)
        self.graph_runner = None
        if isinstance(row, OurRow) and row.use_graph:
            from qkv.train.perf.cuda_graphs import CudaGraphRunner

            self.graph_runner = CudaGraphRunner(partial(self._backward, row), row.model.parameters())

    def _backward(self, row: OurRow, inputs: Any) -> tuple[Tensor]:
        assert row.loss is not None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            total, num_targets = row.loss(row.run, inputs)
        loss = total / num_targets
        loss.backward()
        return (loss.detach(),)

    def gradient(self, batch: Any, run: Run) -> Tensor:
        if self.graph_runner is None:
            return super().gradient(batch, run)
        assert isinstance(self.row, OurRow)
        assert self.row.inputs is not None
        return self.graph_runner(self.row.inputs(batch))[0]

    def loss_and_gradient_norm(self, batch: Any) -> tuple[float, float]:
        """Return loss and gradient norm, computed by the call that is timed: there is no dropout here."""
        for _ in range(1 if self.graph_runner is None else _CALLS_UNTIL_CAPTURE):
            self.optimizer.zero_grad(set_to_none=True)
            loss = float(self.gradient(batch, self.row.run))
        squares = [p.grad.float().square().sum() for p in self.row.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return loss, float(torch.stack(squares).sum().sqrt())


def their_gpt2(folder: Path, options: argparse.Namespace, compiled: bool = False) -> Row:
    model = quiet_transformers().GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa").to(options.device)

    def loss(text: Text, run: Run) -> Tensor:
        mean: Tensor = run(text.token_ids, labels=text.target_ids, shift_labels=text.target_ids, use_cache=False).loss
        return mean

    run = torch.compile(model, dynamic=False) if compiled else model
    return Row(model, run, lambda text, run: [partial(loss, text, run)])


def our_row(
    folder: Path,
    options: argparse.Namespace,
    inputs: Callable[[Any], Any],
    loss: Callable[[Run, Any], Any],
    compiled: bool = False,
    use_graph: bool = False,
) -> OurRow:
    from qkv import checkpoints
    from qkv.nn.block import Block

    model = checkpoints.load(folder, options.device).model
    for block in model.modules() if compiled else ():
        if isinstance(block, Block):
            block.compile_forward()

    def mean(batch: Any, run: Run) -> Tensor:
        total, num_targets = loss(run, inputs(batch))
        return total / num_targets

    return OurRow(model, model, lambda batch, run: [partial(mean, batch, run)], inputs, loss, use_graph)


def gpt2_rows(folder: Path, options: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    from qkv.nn import Ragged
    from qkv.objectives import clm

    def inputs(text: Text) -> clm.Inputs:
        tokens = Ragged.from_lengths(text.token_ids.flatten(), [text.token_ids.shape[1]] * len(text.token_ids))
        return clm.Inputs(tokens, None, text.target_ids.flatten())

    ours = partial(our_row, folder, options, inputs, clm.loss)
    makers: dict[str, Callable[[], Row]] = {TRANSFORMERS: partial(their_gpt2, folder, options)}
    if options.compile:
        makers[COMPILED] = partial(their_gpt2, folder, options, compiled=True)
    if options.device.type == "cpu":
        return makers | {OURS: ours}
    return makers | {
        OURS_COMPILED: partial(ours, compiled=True),
        OURS_GRAPH: partial(ours, compiled=True, use_graph=True),
    }


def bert_rows(folder: Path, options: argparse.Namespace, batches: list[encoder.Batch]) -> dict[str, Callable[[], Row]]:
    from qkv.nn import Ragged
    from qkv.objectives import mlm

    def inputs(batch: encoder.Batch) -> mlm.Inputs:
        return mlm.Inputs(
            Ragged.from_lengths(batch.token_ids, batch.lengths), None, batch.positions, batch.target_ids, None
        )

    ours = partial(our_row, folder, options, inputs, mlm.loss)
    theirs = partial(encoder.transformers_row, folder, options, batches)
    makers: dict[str, Callable[[], Row]] = {}
    if options.device.type == "cpu":
        makers[TRANSFORMERS] = theirs
    if options.compile:
        makers[COMPILED] = partial(theirs, compiled=True)
    return makers | ({OURS: ours} if options.device.type == "cpu" else {OURS_COMPILED: partial(ours, compiled=True)})


# ---- the run --------------------------------------------------------------------------------------------------------


def make_contestants(
    rows: dict[str, Callable[[], Row]], batches: list[Any], options: argparse.Namespace
) -> dict[str, Contestant]:
    ready: dict[str, Contestant] = {}
    reference = None
    for name, make in rows.items():
        entry = enter(name, make, batches, reference, options.device, Pretrainer)
        if entry is not None:
            ready[name], reference = entry[0], reference or entry[1]
    return ready


def time_rows(
    contestants: dict[str, Contestant], batches: list[Any], step_flops: tuple[float, float], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Time the batches; `step_flops` are the FLOPs of a step by the 6N convention, and the needed ones."""
    before = matmul_rate(options.device)
    timings = time_interleaved(
        {name: steps(c, batches) for name, c in contestants.items()}, options.rounds, options.device
    )
    rate = max(before, matmul_rate(options.device))
    for row_timings in timings.values():
        row_timings.seconds = [s / len(batches) for s in row_timings.seconds]  # per step
    tokens = sum(b.num_tokens for b in batches) / len(batches)
    baseline = COMPILED if COMPILED in timings else TRANSFORMERS
    print(f"matrix products: {rate / 1e12:,.2f} TFLOP/s; a step has {tokens:,.0f} real tokens and", end=" ")
    print(f"{step_flops[0] / 1e12:,.3f} TFLOP by 6N, {step_flops[1] / 1e12:,.3f} needed\n")
    print(f"| row | real tokens/s | ms per step | spread | x {baseline} | MFU, 6N | MFU, needed |")
    print("|---|---|---|---|---|---|---|")
    return [
        print_row(name, row_timings, timings.get(baseline), tokens, step_flops, rate)
        for name, row_timings in timings.items()
    ]


def print_row(
    name: str,
    row_timings: Timings,
    baseline: Timings | None,
    tokens: float,
    step_flops: tuple[float, float],
    rate: float,
) -> dict[str, Any]:
    mfu, needed_mfu = (flops / rate / row_timings.median for flops in step_flops)
    ratio = None if baseline is None else speedup(row_timings, baseline)
    ratio_text = "" if ratio is None else f"{ratio:.2f}"
    milliseconds, spread = row_timings.median * 1e3, row_timings.relative_spread
    print(f"| {name} | {tokens / row_timings.median:,.0f} | {milliseconds:.2f} | {spread:.0%} | {ratio_text}", end=" ")
    print(f"| {mfu:.3f} | {needed_mfu:.3f} |", flush=True)
    return {
        "row": name,
        "tokens_per_second": tokens / row_timings.median,
        "ms": milliseconds,
        "ratio": ratio,
        "mfu_6n": mfu,
        "mfu_needed": needed_mfu,
        "matmul_rate": rate,
        "num_noisy": row_timings.num_noisy,
    }


def parameters(contestants: dict[str, Contestant]) -> int:
    model: nn.Module = next(iter(contestants.values())).row.model
    return sum(p.numel() for p in model.parameters())


def run_gpt2(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    size = SIZES[options.size]
    config = quiet_transformers().GPT2Config(
        n_embd=size.d_model, n_layer=size.layers, n_head=size.heads, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    )
    torch.manual_seed(0)
    quiet_transformers().GPT2LMHeadModel(config).save_pretrained(folder)
    print(f"\nGPT-2, {size.sequences} x {size.length} tokens", flush=True)
    texts = draw_text(size, options)
    contestants = make_contestants(gpt2_rows(folder, options), texts, options)
    convention_flops = (6 * parameters(contestants) + 12 * size.layers * size.d_model * size.length) * texts[
        0
    ].num_tokens
    return {"gpt2": time_rows(contestants, texts, (convention_flops, needed_flops(size, texts[0])), options)}


def run_bert(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    size = encoder.SIZES[options.size]
    encoder.make_folder(folder, size, options)
    batches_by_size = {}
    for number in map(int, options.documents.split(",")):
        # fewer of the larger batches, for which a padded peer takes most of a second
        count = max(1, size.batches * size.documents // number)
        batches_by_size[number] = encoder.draw(
            size, argparse.Namespace(**vars(options) | {"documents": number, "batches": count})
        )
    all_batches = [batch for batches in batches_by_size.values() for batch in batches]
    print("\nBERT, documents of variable length", flush=True)
    contestants = make_contestants(bert_rows(folder, options, all_batches), all_batches, options)
    results = {}
    for number, batches in batches_by_size.items():
        num_positions = sum(b.padded_length * len(b.lengths) for b in batches) // len(batches)
        print(f"\n{len(batches)} batches of {number} documents, {num_positions:,} padded positions each", flush=True)
        tokens = sum(b.num_tokens for b in batches) / len(batches)
        flops = sum(encoder.step_flops(size, b) for b in batches) / len(batches)
        results[f"bert {number}"] = time_rows(
            contestants, batches, (6 * parameters(contestants) * tokens, flops), options
        )
    return results


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="", help="base on a GPU, mini on a CPU")
    parser.add_argument("--only", choices=["gpt2", "bert"], default="")
    parser.add_argument("--documents", default="", help="comma list: of BERT's batches; as the size has them")
    parser.add_argument("--chunk", type=int, default=128, help="documents per micro-batch of a padded peer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=3, help="seed of the lengths, the tokens and the masks")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compile", action="store_true", help="a compiled transformers on a CPU too")
    parser.add_argument("--json", default="", help="write all results to this file")
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
    torch._dynamo.config.recompile_limit = 64  # one limit for all rows
    device_name = f"CPU, {options.threads} threads"
    if options.device.type == "cuda":
        device_name = torch.cuda.get_device_name(options.device)
    print(f"torch {torch.__version__}, {device_name}, {options.size}, seed {options.seed}, {options.rounds} rounds")
    results: dict[str, list[dict[str, Any]]] = {}
    try:
        for name, run in (("gpt2", run_gpt2), ("bert", run_bert)):
            if options.only in ("", name):
                with tempfile.TemporaryDirectory() as folder:
                    results |= run(Path(folder), options)
    except ResultDiffers as error:
        sys.exit(f"not timed: {error}")
    for name, rows in results.items() if options.size == "base" else ():
        mfus = [row["mfu_6n"] for row in rows if row["row"].startswith("qkv")]
        print(f"{name}: {max(mfus, default=0.0):.3f} of the matrix products' rate (goal {GOAL})")
    if options.json:
        Path(options.json).write_text(
            json.dumps({"torch": torch.__version__, "device": device_name} | results, indent=1)
        )


if __name__ == "__main__":
    main()
