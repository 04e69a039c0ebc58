"""Fine-tuning on sentences of variable length: qkv and transformers' Trainer with the same weights, data and batches.

    python bench/finetune.py                            # about eight minutes on two CPU cores; needs the extra 'bench'
    python bench/finetune.py --quick
    python bench/finetune.py --set ewt --model bert-small --batch 64
    python bench/finetune.py --data mine.csv --test held_out.csv --text review --label stars
    python bench/finetune.py --model base --batch 256   # on a GPU: BERT-base with random weights

A round is one complete fine-tuning of each row. The seed of the round determines the initial weights of the classifier,
which are the same for all rows, the order of the examples and the dropout. The first 50 steps are a warm-up and not
timed; the grouping Trainer sorts 50 batches at a time, so that any 50 batches have a representative share of long and
short ones. The result is the median over rounds of the ratio of two rows' rates in the same round. Accuracy on the test
set is that of the weights after the last step.

  Trainer, plain            DataCollatorWithPadding: each batch is padded to its longest sentence
  Trainer, grouped          also train_sampling_strategy="group_by_length": batches of sentences of similar length
  Trainer, grouped, compiled  also torch_compile; on a GPU, or with --compile
  qkv                       `qkv train`: packed batches with a token budget; on a GPU a step is one CUDA graph
  qkv, without graphs       train.cuda_graphs off; on a GPU
  qkv, compiled             train.compile; on a GPU, or with --compile

All rows make the same number of steps: the Trainer takes --batch sentences per step, qkv the token budget that gives as
many batches per epoch (at least the longest sentence, if --batch is tiny). AdamW, linear schedule with a tenth of
warm-up, weight decay 0.01, gradients clipped at 1 and dropout 0.1 are the same. There is no dropout of attention
weights (--attention-dropout), because variable-length kernels do not support it. Float32 on a CPU, with each row in its
own process; bfloat16 autocast on a GPU, where the Trainer pads to multiples of 8. The Trainer's logging, saving,
evaluation, progress bar and check for infinite losses are off, and its texts are tokenized beforehand. Before timing,
all rows must compute the same logits for the first test sentences.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo.config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to run from a checkout

from bench.encoder import quiet_transformers
from bench.labeled import ROOT, SETS, WARMUP_STEPS, Setup, examples
from bench.paired_benchmark import OtherLoad, SubprocessCall, serve
from bench.trainer import their_logits, trainer_row

PLAIN, GROUPED, GROUPED_COMPILED = "Trainer, plain", "Trainer, grouped", "Trainer, grouped, compiled"
OURS, OURS_EAGER, OURS_COMPILED = "qkv", "qkv, without graphs", "qkv, compiled"
GOALS = {"cpu": {GROUPED: 1.2, PLAIN: 2.0}, "cuda": {GROUPED: 3.0}}
_MAX_OTHER_CORES = 0.15  # cores that other processes may use before a run counts as noisy
_NUM_CHECKED = 64  # test sentences whose logits are compared before timing
_TOLERANCE = 2e-4


# ---- ours -----------------------------------------------------------------------------------------------------------


def recipe(setup: Setup, seed: int, compiled: bool, use_graph: bool) -> Any:
    from qkv.recipe.parse import parse_recipe

    options = setup.options
    files = {split: setup.folder / f"{split}.jsonl" for split in ("train", "test")}
    for split, path in files.items():
        rows = [json.dumps({"text": text, "label": label}) + "\n" for text, label in getattr(setup, split)]
        path.write_text("".join(rows), encoding="utf-8")
    train = {"max_steps": options.steps, "batch_tokens": token_budget(setup), "learning_rate": options.rate}
    train |= {
        "schedule": "linear",
        "warmup_ratio": 0.1,
        "betas": [0.9, 0.999],
        "adam_epsilon": 1e-8,
        "weight_decay": 0.01,
    }
    train |= {
        "max_grad_norm": 1.0,
        "compile": compiled,
        "cuda_graphs": use_graph,
        "log_every": WARMUP_STEPS,
        "num_workers": options.our_workers,
    }
    train |= {"precision": "auto", "save_every": 10**9}
    values = {
        "name": "finetune",
        "task": "text_classification",
        "model": {"init_from": str(setup.initial_model(seed))},
        "data": {"format": "jsonl", "train": str(files["train"]), "valid": str(files["test"])},
        "train": train,
        "validation": {"every_steps": 10**9},  # only the last step is scored
        "seed": seed,
    }
    return parse_recipe(values, "bench")


def token_budget(setup: Setup) -> int:
    """Return the smallest number of tokens per batch that gives no more batches per epoch than the Trainer has."""
    from qkv.data.batching import plan_epoch

    lengths, steps = np.array(setup.lengths), setup.steps_per_epoch
    max_tokens = max(-(-int(lengths.sum()) // steps), int(lengths.max()))
    while (
        len(plan_epoch(lengths, np.zeros_like(lengths), max_tokens=max_tokens, seed=1, epoch=0, bucket_pool=1)) > steps
    ):
        max_tokens += max(1, max_tokens // 200)
    return max_tokens


def our_row(setup: Setup, seed: int, compiled: bool = False, use_graph: bool = True) -> tuple[float, float]:
    from qkv.train.fit import fit

    rates, accuracy = [], 0.0
    with tempfile.TemporaryDirectory(dir=setup.folder) as folder:
        for record in fit(recipe(setup, seed, compiled, use_graph), folder, device=setup.options.device.type):
            if record.kind == "train":
                rates.append(record.values["tokens_per_second"])
            elif record.kind == "valid":
                accuracy = record.values["accuracy"]
    return statistics.harmonic_mean(rates[1:]), accuracy


def check(setup: Setup) -> None:
    """Check that all rows start from the same weights and read the same ids."""
    from qkv import checkpoints
    from qkv.nn import Ragged

    ours = checkpoints.load(setup.initial_model(1), head="sequence", labels=setup.labels)
    theirs = quiet_transformers().BertForSequenceClassification.from_pretrained(setup.initial_model(1))
    features = setup.encoded(setup.test[:_NUM_CHECKED])
    assert ours.source_tokenizer is not None
    ids = [
        list(encoding.ids)
        for encoding in ours.source_tokenizer.encode_plus_batch([text for text, _ in setup.test[:_NUM_CHECKED]])
    ]
    if ours.missing_keys or ids != [feature["input_ids"] for feature in features]:
        sys.exit("not timed: qkv has other initial weights or reads other ids than transformers")
    with torch.inference_mode():
        logits = ours.model(Ragged.pack([torch.tensor(row) for row in ids]))
    difference = float((logits - their_logits(setup, theirs, features)).abs().max())
    if not difference < _TOLERANCE:
        sys.exit(f"not timed: logits differ by {difference:.1e} before the first step")


# ---- the run --------------------------------------------------------------------------------------------------------

Row = Callable[[Setup, int], tuple[float, float]]  # real tokens per second, and accuracy


@dataclass(frozen=True)
class Outcome:
    """The result of one fine-tuning of one row."""

    tokens: float  # real tokens per second
    accuracy: float
    other_cores: float  # cores that other processes used


Outcomes = dict[str, list[Outcome]]


def rows(options: argparse.Namespace) -> dict[str, Row]:
    calls: dict[str, Row] = {PLAIN: trainer_row, GROUPED: partial(trainer_row, grouped=True)}
    if options.compile:
        calls[GROUPED_COMPILED] = partial(trainer_row, grouped=True, compiled=True)
    calls[OURS] = our_row
    if options.device.type == "cuda":
        calls[OURS_EAGER] = partial(our_row, use_graph=False)
    if options.compile:
        calls[OURS_COMPILED] = partial(our_row, compiled=True)
    selected = [name for name in options.only.split(";") if name]
    return {name: row for name, row in calls.items() if not selected or name in selected}


def in_subprocess(setup: Setup, name: str) -> Row:
    """Return a row that runs in its own process, so that its settings of the C library and OpenMP affect no other."""
    outcome_file = setup.folder / "outcome.json"
    run_once = SubprocessCall([__file__, *sys.argv[1:], "--serve", name, "--folder", str(setup.folder)])

    def call(_setup: Setup, seed: int) -> tuple[float, float]:
        (setup.folder / "seed").write_text(str(seed))
        run_once()
        tokens, accuracy = json.loads(outcome_file.read_text())
        return tokens, accuracy

    return call


def serve_row(setup: Setup, name: str) -> None:
    """Run the process of a row of `in_subprocess`, which waits for seeds."""

    def call() -> None:
        outcome = rows(setup.options)[name](setup, int((setup.folder / "seed").read_text()))
        (setup.folder / "outcome.json").write_text(json.dumps(outcome))

    serve(lambda: call)


def run_row(setup: Setup, outcomes: Outcomes, name: str, row: Row, seed: int) -> bool:
    """Run a row and record its outcome; return False, with a message, if it fails."""
    start_time, other_load = time.perf_counter(), OtherLoad()
    try:
        tokens, accuracy = row(setup, seed)
    except Exception as error:  # the failure of one row must not lose the results of the others
        print(f"  {name}: failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        return False
    other_cores = 0.0 if setup.options.device.type == "cuda" else other_load.cores()
    outcomes.setdefault(name, []).append(Outcome(tokens, accuracy, other_cores))
    seconds = time.perf_counter() - start_time
    print(f"  {seed} {name}: {tokens:,.0f} tokens/s, accuracy {accuracy:.2%}, {seconds:.0f} s in total", flush=True)
    return True


def run(setup: Setup) -> list[dict[str, Any]]:
    for seed in range(1, setup.options.rounds + 1):
        setup.initial_model(seed)
    row_calls = rows(setup.options)
    if setup.options.device.type == "cpu":
        row_calls = {name: in_subprocess(setup, name) for name in row_calls}
    outcomes: Outcomes = {}
    for round_index in range(setup.options.rounds):
        names = list(row_calls) if round_index % 2 == 0 else list(reversed(row_calls))
        for name in names:
            if not run_row(setup, outcomes, name, row_calls[name], round_index + 1):
                del row_calls[name]
    return [summarize(setup, outcomes, name) for name in row_calls]


def summarize(setup: Setup, outcomes: Outcomes, name: str) -> dict[str, Any]:
    row_outcomes = outcomes[name]
    rates, accuracies = [outcome.tokens for outcome in row_outcomes], [outcome.accuracy for outcome in row_outcomes]
    summary: dict[str, Any] = {"row": name, "tokens_per_second": statistics.median(rates)}
    summary["examples_per_second"] = summary["tokens_per_second"] * len(setup.lengths) / sum(setup.lengths)
    summary |= {"accuracy": statistics.mean(accuracies), "std": statistics.stdev(accuracies) if accuracies[1:] else 0.0}
    for peer in (PLAIN, GROUPED):
        peer_rates = [outcome.tokens for outcome in outcomes.get(peer, [])]
        ratios = [rate / peer_rate for rate, peer_rate in zip(rates, peer_rates, strict=False)]
        summary[f"times {peer}"] = statistics.median(ratios) if ratios else 0
    num_noisy = sum(outcome.other_cores > _MAX_OTHER_CORES for outcome in row_outcomes)
    return summary | {"rates": rates, "accuracies": accuracies, "num_noisy": num_noisy}


def print_table(summaries: list[dict[str, Any]], device: str) -> None:
    print(f"\n| row | real tokens/s | sentences/s | x {PLAIN} | x {GROUPED} | accuracy |\n|---|---|---|---|---|---|")
    for row in summaries:
        rates = f"{row['tokens_per_second']:,.0f} | {row['examples_per_second']:,.0f}"
        ratios = f"{row[f'times {PLAIN}']:.2f} | {row[f'times {GROUPED}']:.2f}"
        print(f"| {row['row']} | {rates} | {ratios} | {row['accuracy']:.2%} ± {row['std']:.2%} |")
    num_noisy = sum(row["num_noisy"] for row in summaries)
    if num_noisy:
        print(f"noisy: other processes used the machine in {num_noisy} runs", end="")
        print("; trust ratios only, or run again on an idle machine")
    ours = [row for row in summaries if row["row"].startswith("qkv")]
    for peer, goal in GOALS[device].items() if ours else ():
        if all(row["row"] != peer for row in summaries):
            continue
        print(f"{max(row[f'times {peer}'] for row in ours):.2f} times {peer} (goal {goal})")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=list(SETS), default="banking77")
    parser.add_argument("--root", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the datasets")
    parser.add_argument("--data", default="", help="table of training sentences, instead of --set")
    parser.add_argument("--test", default="", help="table of test sentences, with --data")
    parser.add_argument("--text", default="text", help="column of the sentences")
    parser.add_argument("--label", default="label")
    parser.add_argument("--model", default="", help="minilm, bert-small, base (random), or a folder")
    parser.add_argument("--examples", type=int, default=10**9, help="maximum number of training sentences")
    parser.add_argument("--test-examples", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32, help="sentences per step")
    parser.add_argument(
        "--steps", type=int, default=150, help="number of steps, a multiple of 50; the first 50 are not timed"
    )
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    parser.add_argument("--only", default="", help="names of rows, separated by ;")
    parser.add_argument(
        "--their-workers",
        type=int,
        default=-1,
        help="the Trainer's data loader processes; by default 2 on a GPU, else 0",
    )
    parser.add_argument("--our-workers", type=int, default=0, help="qkv's threads that prepare batches")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compile", action="store_true", help="add compiled rows on a CPU")
    parser.add_argument("--quick", action="store_true", help="one short round, a minute or two")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", default="", help="write all results to this file")
    options = parser.parse_args()
    options.model = options.model or ("bert-small" if options.device == "cuda" else "minilm")
    if options.quick:
        options.rounds, options.steps, options.test_examples = 1, 2 * WARMUP_STEPS, 300
    if options.steps < 2 * WARMUP_STEPS or options.steps % WARMUP_STEPS:
        parser.error(f"--steps: the first {WARMUP_STEPS} are not timed; use a larger multiple of {WARMUP_STEPS}")
    if options.their_workers < 0:
        options.their_workers = 2 if options.device == "cuda" else 0
    options.compile = options.compile or options.device == "cuda"
    options.device = torch.device(options.device)
    return options


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 64  # one limit for all rows
    if options.serve:
        serve_row(Setup(options, options.folder, *examples(options)), options.serve)
        return
    device_name = f"CPU, {options.threads} threads"
    if options.device.type == "cuda":
        device_name = torch.cuda.get_device_name(options.device)
    versions = f"torch {torch.__version__}, transformers {quiet_transformers().__version__}"
    print(f"{versions}, {device_name}, {options.model}", end=", ")
    print(f"{options.steps} steps of {options.batch} sentences, {options.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(options, Path(folder), *examples(options))
        setup.print_lengths()
        check(setup)
        print(
            f"{setup.steps_per_epoch} steps per epoch, qkv with at most {token_budget(setup)} tokens each", flush=True
        )
        summaries = run(setup)
    print_table(summaries, options.device.type)
    if options.json:
        Path(options.json).write_text(
            json.dumps({"device": device_name, "versions": versions, "rows": summaries}, indent=1)
        )


if __name__ == "__main__":
    main()
