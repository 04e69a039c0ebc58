"""Fine-tuning on sentences of varied length: ours, and transformers' Trainer with the same start, data and batches.

    python bench/finetune.py                            # two CPU cores, some eight minutes; needs the extra 'bench'
    python bench/finetune.py --quick
    python bench/finetune.py --set ewt --model bert-small --batch 64
    python bench/finetune.py --data mine.csv --test held_out.csv --text review --label stars
    python bench/finetune.py --model base --batch 256   # on a GPU: BERT-base of random weights

A round is a whole fine-tuning of each row, all with the round's seed: it draws the classifier's first weights, which
all rows start from, the order of the examples and the dropout. The first 50 steps warm up and are not timed; the
grouping Trainer sorts 50 batches at a time, so that any 50 hold long and short ones in their true share. What is
compared is the median over rounds of the ratio of two rows' rates in the same round. Accuracy on the test set is that
of the weights after the last step.

  Trainer, plain            DataCollatorWithPadding: a batch is padded to its own longest sentence
  Trainer, grouped          train_sampling_strategy="group_by_length" besides: sentences of similar length share a batch
  Trainer, grouped, compiled  torch_compile besides; on a GPU, or with --compile
  qkv                       `qkv train`: packed batches of a token budget; on a GPU a step is one CUDA graph
  qkv, without graphs       train.cuda_graphs off; on a GPU
  qkv, compiled             train.compile; on a GPU, or with --compile

All make the same number of steps: the Trainer takes --batch sentences each, ours the token budget that makes as many
batches of an epoch (or that of the longest sentence, if --batch is tiny). AdamW, linear schedule with a tenth of
warm-up, weight decay 0.01, gradients clipped at 1 and dropout 0.1 are the same; nothing is dropped of attention's
weights (--attention-dropout), which variable-length kernels cannot. Float32 on a CPU, each row in a process of its own;
bfloat16 autocast on a GPU, where the Trainer pads to multiples of 8. The Trainer's logging, saving, evaluation,
progress bar and check for infinite losses are off, and its texts are tokenised beforehand. Before the race all must
give the same logits on the first test sentences.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from a checkout too

from bench.encoder import quiet_transformers
from bench.labelled import ROOT, SETS, WARM, Shop, examples
from bench.race import Apart, Others, serve
from bench.trainer import their_logits, trainer_row

PLAIN, GROUPED, GROUPED_COMPILED = "Trainer, plain", "Trainer, grouped", "Trainer, grouped, compiled"
OURS, OURS_EAGER, OURS_COMPILED = "qkv", "qkv, without graphs", "qkv, compiled"
GOALS = {"cpu": {GROUPED: 1.2, PLAIN: 2.0}, "cuda": {GROUPED: 3.0}}
_QUIET = 0.15  # cores that others may use before a run is called disturbed
_SHOWN = 64  # test sentences whose logits are compared before the race
_NEAR = 2e-4


# ---- ours -----------------------------------------------------------------------------------------------------------


def recipe(shop: Shop, seed: int, compiled: bool, graph: bool) -> Any:
    from qkv.recipe.parse import parse_recipe

    options = shop.options
    files = {part: shop.folder / f"{part}.jsonl" for part in ("train", "test")}
    for part, path in files.items():
        rows = [json.dumps({"text": text, "label": label}) + "\n" for text, label in getattr(shop, part)]
        path.write_text("".join(rows), encoding="utf-8")
    train = {"max_steps": options.steps, "batch_tokens": budget(shop), "learning_rate": options.rate}
    train |= {"schedule": "linear", "warmup_ratio": 0.1, "betas": [0.9, 0.999], "adam_epsilon": 1e-8, "weight_decay": 0.01}
    train |= {"max_grad_norm": 1.0, "compile": compiled, "cuda_graphs": graph, "log_every": WARM, "num_workers": options.our_workers}
    train |= {"precision": "auto", "save_every": 10**9}
    plain = {
        "name": "finetune",
        "task": "text_classification",
        "model": {"init_from": str(shop.start(seed))},
        "data": {"format": "jsonl", "train": str(files["train"]), "valid": str(files["test"])},
        "train": train,
        "validation": {"every_steps": 10**9},  # the last step alone is scored
        "seed": seed,
    }
    return parse_recipe(plain, "bench")


def budget(shop: Shop) -> int:
    """The fewest tokens a batch that make no more batches of an epoch than the Trainer has."""
    from qkv.data.batching import plan_epoch

    sizes = np.array(shop.lengths)
    found = max(-(-int(sizes.sum()) // shop.steps), int(sizes.max()))
    while len(plan_epoch(sizes, np.zeros_like(sizes), max_tokens=found, seed=1, epoch=0, bucket_pool=1)) > shop.steps:
        found += max(1, found // 200)
    return found


def our_row(shop: Shop, seed: int, compiled: bool = False, graph: bool = True) -> tuple[float, float]:
    from qkv.train.trainer import fit

    rates, accuracy = [], 0.0
    with tempfile.TemporaryDirectory(dir=shop.folder) as folder:
        for record in fit(recipe(shop, seed, compiled, graph), folder, device=shop.options.device.type):
            if record.kind == "train":
                rates.append(record.values["tokens_per_second"])
            elif record.kind == "valid":
                accuracy = record.values["accuracy"]
    return statistics.harmonic_mean(rates[1:]), accuracy


def check(shop: Shop) -> None:
    """All start from the same weights and read the same ids, or the race says nothing."""
    from qkv import checkpoints
    from qkv.nn import Ragged

    ours = checkpoints.load(shop.start(1), head="sequence", labels=shop.labels)
    theirs = quiet_transformers().BertForSequenceClassification.from_pretrained(shop.start(1))
    some = shop.encoded(shop.test[:_SHOWN])
    assert ours.source_tokenizer is not None
    ids = [list(frame.ids) for frame in ours.source_tokenizer.encode_plus_batch([text for text, _ in shop.test[:_SHOWN]])]
    if ours.missing_keys or ids != [one["input_ids"] for one in some]:
        sys.exit("not timed: ours begins with other weights or reads other ids than transformers")
    with torch.inference_mode():
        logits = ours.model(Ragged.pack([torch.tensor(row) for row in ids]))
    apart = float((logits - their_logits(shop, theirs, some)).abs().max())
    if not apart < _NEAR:
        sys.exit(f"not timed: logits differ by {apart:.1e} before the first step")


# ---- the run --------------------------------------------------------------------------------------------------------

Row = Callable[[Shop, int], tuple[float, float]]  # real tokens a second, and accuracy


@dataclass(frozen=True)
class Outcome:
    """One row's fine-tuning."""

    tokens: float  # real ones a second
    accuracy: float
    foreign: float  # cores that others kept busy


Outcomes = dict[str, list[Outcome]]


def rows(options: argparse.Namespace) -> dict[str, Row]:
    found: dict[str, Row] = {PLAIN: trainer_row, GROUPED: partial(trainer_row, grouped=True)}
    if options.compile:
        found[GROUPED_COMPILED] = partial(trainer_row, grouped=True, compiled=True)
    found[OURS] = our_row
    if options.device.type == "cuda":
        found[OURS_EAGER] = partial(our_row, graph=False)
    if options.compile:
        found[OURS_COMPILED] = partial(our_row, compiled=True)
    wanted = [word for word in options.only.split(";") if word]
    return {name: row for name, row in found.items() if not wanted or name in wanted}


def apart(shop: Shop, name: str) -> Row:
    """A row in a process of its own: what one tells the C library or OpenMP is nothing to the others."""
    answer = shop.folder / "outcome.json"
    begun = Apart([__file__, *sys.argv[1:], "--apart", name, "--folder", str(shop.folder)])

    def call(_shop: Shop, seed: int) -> tuple[float, float]:
        (shop.folder / "seed").write_text(str(seed))
        begun()
        tokens, accuracy = json.loads(answer.read_text())
        return tokens, accuracy

    return call


def be_apart(shop: Shop, name: str) -> None:
    """The other side: waits for seeds."""

    def call() -> None:
        found = rows(shop.options)[name](shop, int((shop.folder / "seed").read_text()))
        (shop.folder / "outcome.json").write_text(json.dumps(found))

    serve(lambda: call)


def entered(shop: Shop, outcomes: Outcomes, name: str, row: Row, seed: int) -> bool:
    """Runs a row; one that breaks is said and left out of the rest."""
    began, others = time.perf_counter(), Others()
    try:
        tokens, accuracy = row(shop, seed)
    except Exception as error:  # a row that breaks must not take the others' figures with it
        print(f"  {name}: failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        return False
    foreign = 0.0 if shop.options.device.type == "cuda" else others.cores()
    outcomes.setdefault(name, []).append(Outcome(tokens, accuracy, foreign))
    took = time.perf_counter() - began
    print(f"  {seed} {name}: {tokens:,.0f} tokens/s, accuracy {accuracy:.2%}, {took:.0f} s in all", flush=True)
    return True


def run(shop: Shop) -> list[dict[str, Any]]:
    for seed in range(1, shop.options.rounds + 1):
        shop.start(seed)
    contestants = rows(shop.options)
    if shop.options.device.type == "cpu":
        contestants = {name: apart(shop, name) for name in contestants}
    outcomes: Outcomes = {}
    for turn in range(shop.options.rounds):
        names = list(contestants) if turn % 2 == 0 else list(reversed(contestants))
        for name in names:
            if not entered(shop, outcomes, name, contestants[name], turn + 1):
                del contestants[name]
    return [figures(shop, outcomes, name) for name in contestants]


def figures(shop: Shop, outcomes: Outcomes, name: str) -> dict[str, Any]:
    own = outcomes[name]
    rates, scores = [one.tokens for one in own], [one.accuracy for one in own]
    found: dict[str, Any] = {"row": name, "tokens_per_second": statistics.median(rates)}
    found["examples_per_second"] = found["tokens_per_second"] * len(shop.lengths) / sum(shop.lengths)
    found |= {"accuracy": statistics.mean(scores), "deviation": statistics.stdev(scores) if scores[1:] else 0.0}
    for peer in (PLAIN, GROUPED):
        theirs = [one.tokens for one in outcomes.get(peer, [])]
        found[f"times {peer}"] = statistics.median(a / b for a, b in zip(rates, theirs, strict=False)) if theirs else 0
    return found | {"rates": rates, "scores": scores, "disturbed": sum(one.foreign > _QUIET for one in own)}


def show(found: list[dict[str, Any]], device: str) -> None:
    print(f"\n| row | real tokens/s | sentences/s | x {PLAIN} | x {GROUPED} | accuracy |\n|---|---|---|---|---|---|")
    for one in found:
        rates = f"{one['tokens_per_second']:,.0f} | {one['examples_per_second']:,.0f}"
        ratios = f"{one[f'times {PLAIN}']:.2f} | {one[f'times {GROUPED}']:.2f}"
        print(f"| {one['row']} | {rates} | {ratios} | {one['accuracy']:.2%} ± {one['deviation']:.2%} |")
    disturbed = sum(one["disturbed"] for one in found)
    if disturbed:
        print(f"noisy: others used the machine in {disturbed} runs; trust ratios only, or run again in quiet")
    ours = [one for one in found if one["row"].startswith("qkv")]
    for peer, goal in GOALS[device].items() if ours else ():
        if all(one["row"] != peer for one in found):
            continue
        print(f"{max(one[f'times {peer}'] for one in ours):.2f} times {peer} (goal {goal})")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=list(SETS), default="banking77")
    parser.add_argument("--root", type=Path, default=ROOT.parent / "shared" / "data", help="the folder of the sets")
    parser.add_argument("--data", default="", help="instead of a set: a table of training sentences")
    parser.add_argument("--test", default="", help="and one of test sentences")
    parser.add_argument("--text", default="text", help="the column of the sentence")
    parser.add_argument("--label", default="label")
    parser.add_argument("--model", default="", help="minilm, bert-small, base (random), or a folder")
    parser.add_argument("--examples", type=int, default=10**9, help="training sentences at most")
    parser.add_argument("--test-examples", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32, help="sentences a step")
    parser.add_argument("--steps", type=int, default=150, help="of which the first 50 are not timed; a multiple of 50")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    parser.add_argument("--only", default="", help="names of rows, with ; between them")
    parser.add_argument("--their-workers", type=int, default=-1, help="processes that collate; 2 on a GPU, else 0")
    parser.add_argument("--our-workers", type=int, default=0, help="threads that prepare our batches")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compile", action="store_true", help="compiled rows on a CPU too")
    parser.add_argument("--quick", action="store_true", help="a minute or two: few sentences, one round")
    parser.add_argument("--apart", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", default="", help="a file for all figures")
    options = parser.parse_args()
    options.model = options.model or ("bert-small" if options.device == "cuda" else "minilm")
    if options.quick:
        options.rounds, options.steps, options.test_examples = 1, 2 * WARM, 300
    if options.steps < 2 * WARM or options.steps % WARM:
        parser.error(f"--steps: the first {WARM} are not timed; take a larger multiple of {WARM}")
    if options.their_workers < 0:
        options.their_workers = 2 if options.device == "cuda" else 0
    options.compile = options.compile or options.device == "cuda"
    options.device = torch.device(options.device)
    return options


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 64  # all rows count against one limit
    if options.apart:
        be_apart(Shop(options, options.folder, *examples(options)), options.apart)
        return
    on = f"CPU, {options.threads} threads"
    if options.device.type == "cuda":
        on = torch.cuda.get_device_name(options.device)
    versions = f"torch {torch.__version__}, transformers {quiet_transformers().__version__}"
    print(f"{versions}, {on}, {options.model}", end=", ")
    print(f"{options.steps} steps of {options.batch} sentences, {options.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        shop = Shop(options, Path(folder), *examples(options))
        shop.say()
        check(shop)
        print(f"{shop.steps} steps an epoch, ours of at most {budget(shop)} tokens", flush=True)
        found = run(shop)
    show(found, options.device.type)
    if options.json:
        Path(options.json).write_text(json.dumps({"on": on, "versions": versions, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
