"""Loading a BERT-base folder (safetensors, float32) and importing: qkv and transformers, each in new processes.

    python bench/load.py
    python bench/load.py --rounds 9 --json load.json

Loading: from a folder with weights only, and from one with a tokenizer, which `qkv.load` reads as well and transformers
in a separate call. Reported are seconds and the peak memory above that after the imports, as a multiple of the
checkpoint's size. A mapped file uses no memory until its pages are touched, so both sides then sum all parameters once;
the time is given without and with that, the memory with it. The page cache is warm, and the sums must be equal.

Importing: wall time of an interpreter that runs one import and exits, compared with one that imports torch.

Each round runs all rows in round_index; times are medians, ratios medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # to run from a checkout

CHILD = """
import json, sys, time
{imports}
import torch
torch.set_num_threads({threads})

def memory(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key + ":")) * 1024

try:
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak memory
except OSError:
    pass
before, start = memory("VmRSS"), time.perf_counter()
{load}
loaded = time.perf_counter() - start
with torch.no_grad():
    total = sum(float(p.sum()) for p in model.parameters())
touched = time.perf_counter() - start
print(json.dumps(dict(loaded=loaded, touched=touched, peak=memory("VmHWM") - before, after=memory("VmRSS") - before,
                      total=total, parameters=sum(p.numel() for p in model.parameters()))))
"""

QUIET = "transformers.logging.set_verbosity_error(); transformers.utils.logging.disable_progress_bar()"
THEIRS = (
    f"import transformers; from transformers import AutoModel, AutoTokenizer, BertModel, BertTokenizerFast; {QUIET}"
)
OURS = "from qkv import checkpoints; import qkv.families.bert, qkv.tokenization.hf"
MODEL = "model = AutoModel.from_pretrained(sys.argv[1])"
# the imports, which are not timed, and the timed code; argument 1 is the folder
LOADS = {
    "transformers": (THEIRS, MODEL),
    "qkv": (OURS, "model = checkpoints.load(sys.argv[1]).model"),
    "transformers, with tokenizer": (THEIRS, f"{MODEL}; tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])"),
    "qkv, with tokenizer": (
        OURS,
        "bundle = checkpoints.load(sys.argv[1]); model = bundle.model; assert bundle.source_tokenizer is not None",
    ),
}
IMPORTS = {
    "nothing": "pass",
    "import torch": "import torch",
    "import qkv": "import qkv",
    "import qkv; qkv.load": "import qkv; qkv.load",
    "from transformers import BertModel": "from transformers import BertModel",
}
MEMORY_GOAL, IMPORT_GOAL = 1.2, 1.1


def child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | quiet,
        cwd=tempfile.gettempdir(),  # outside of the checkout, so that none of its files is imported
    )


def load_once(name: str, folders: dict[bool, Path], threads: int) -> dict[str, float]:
    imports, load = LOADS[name]
    folder = folders["tokenizer" in name]
    done = child(CHILD.format(imports=imports, load=load, threads=threads), str(folder))
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def run_interleaved(names: Iterable[str], rounds: int, once: Callable[[str], Any]) -> dict[str, list[Any]]:
    """Return the results of each name in each round; an additional first round warms the page cache."""
    samples_by_row: dict[str, list[Any]] = {name: [] for name in names}
    for round_index in range(rounds + 1):
        for name in samples_by_row if round_index % 2 == 0 else reversed(samples_by_row):
            result = once(name)
            if round_index:
                samples_by_row[name].append(result)
    return samples_by_row


def loading(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    size = (folder / "model.safetensors").stat().st_size
    with tempfile.TemporaryDirectory() as bare:
        for name in ("config.json", "model.safetensors"):
            (Path(bare) / name).symlink_to((folder / name).resolve())
        folders = {False: Path(bare), True: folder}
        samples_by_row = run_interleaved(LOADS, options.rounds, lambda name: load_once(name, folders, options.threads))
    first = samples_by_row["transformers"][0]
    for result in (samples[0] for samples in samples_by_row.values()):
        assert result["parameters"] == first["parameters"], "they loaded different models"
        assert abs(result["total"] - first["total"]) < 1e-3 * abs(first["total"]), "they loaded different numbers"
    print(f"\nloading {size / 1e6:.0f} MB, {first['parameters'] / 1e6:.1f} M parameters")
    print("| row | s | with every weight touched | x transformers | peak memory, MB | of the checkpoint |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name, samples in samples_by_row.items():
        row = {key: statistics.median(s[key] for s in samples) for key in ("loaded", "touched", "peak", "after")}
        peer = samples_by_row[name.replace("qkv", "transformers")]
        row["ratio"] = ratio([s["touched"] for s in peer], [s["touched"] for s in samples])
        row["peak_ratio"] = row["peak"] / size
        cells = f"{row['loaded']:.3f} | {row['touched']:.3f} | {row['ratio']:.2f} | {row['peak'] / 1e6:.0f}"
        print(f"| {name} | {cells} | {row['peak_ratio']:.2f} |", flush=True)
        rows.append({"row": name} | row)
    print()
    for row in rows:
        if str(row["row"]).startswith("qkv"):
            print(f"{row['row']}: peak memory / checkpoint = {row['peak_ratio']:.2f} (goal at most {MEMORY_GOAL})")
    return {"bytes": size, "rows": rows}


def import_once(name: str) -> float:
    start = time.perf_counter()
    done = child(IMPORTS[name])
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    return time.perf_counter() - start


def importing(options: argparse.Namespace) -> list[dict[str, Any]]:
    samples_by_row = run_interleaved(IMPORTS, options.rounds, import_once)
    print("\nimporting\n| row | s | minimum | x import torch |\n|---|---|---|---|")
    rows = []
    for name, seconds in samples_by_row.items():
        row = {"row": name, "seconds": statistics.median(seconds), "min": min(seconds)}
        row["ratio"] = ratio(seconds, samples_by_row["import torch"])
        print(f"| {name} | {row['seconds']:.2f} | {row['min']:.2f} | {row['ratio']:.3f} |", flush=True)
        rows.append(row)
    ours, ratio_with_load = (
        next(r["ratio"] for r in rows if r["row"] == n) for n in ("import qkv", "import qkv; qkv.load")
    )
    print(
        f"\nimport qkv / import torch = {ours:.2f} (goal at most {IMPORT_GOAL}); with qkv.load, {ratio_with_load:.2f}"
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", default="", help="Hugging Face folder of a BERT; by default one is created")
    parser.add_argument("--json", default="", help="write all results to this file")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        if not (folder / "config.json").exists():
            from bench.encoder import make_folder

            make_folder(folder)
        results["loading"] = loading(folder, options)
    results["importing"] = importing(options)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
