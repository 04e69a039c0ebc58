"""Loading a BERT-base folder (safetensors, float32), and importing: ours and transformers', each in fresh processes.

    python bench/load.py
    python bench/load.py --rounds 9 --json load.json

Loading: from a folder that holds the weights alone, and from one with a tokeniser, which `qkv.load` reads too and
transformers in a call of its own. Seconds, and memory at its highest above what stood after the imports, as a multiple
of the checkpoint's size. A mapped file costs no memory until its pages are touched, so both sides then add up every
parameter once; the time is given without and with that, the memory with it. The page cache is warm, and the same sums
must come out.

Importing: wall time of an interpreter that does one import and ends, beside one that imports torch.

Rounds take all contestants in turn; times are medians, ratios medians over rounds.
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
sys.path.insert(0, str(ROOT))  # so that it runs from a checkout too

CHILD = """
import json, sys, time
{imports}
import torch
torch.set_num_threads({threads})

def memory(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key + ":")) * 1024

try:
    open("/proc/self/clear_refs", "w").write("5")  # forgets the highest memory of the imports
except OSError:
    pass
before, began = memory("VmRSS"), time.perf_counter()
{load}
loaded = time.perf_counter() - began
with torch.no_grad():
    total = sum(float(p.sum()) for p in model.parameters())
touched = time.perf_counter() - began
print(json.dumps(dict(loaded=loaded, touched=touched, peak=memory("VmHWM") - before, after=memory("VmRSS") - before,
                      total=total, parameters=sum(p.numel() for p in model.parameters()))))
"""

QUIET = "transformers.logging.set_verbosity_error(); transformers.utils.logging.disable_progress_bar()"
THEIRS = (
    f"import transformers; from transformers import AutoModel, AutoTokenizer, BertModel, BertTokenizerFast; {QUIET}"
)
OURS = "from qkv import checkpoints; import qkv.families.bert, qkv.tokenization.hf"
MODEL = "model = AutoModel.from_pretrained(sys.argv[1])"
# what is imported before the clock starts, and what is then timed; argument 1 is the folder
LOADS = {
    "transformers": (THEIRS, MODEL),
    "qkv": (OURS, "model = checkpoints.load(sys.argv[1]).model"),
    "transformers, with tokeniser": (THEIRS, f"{MODEL}; kept = AutoTokenizer.from_pretrained(sys.argv[1])"),
    "qkv, with tokeniser": (
        OURS,
        "kept = checkpoints.load(sys.argv[1]); model = kept.model; assert kept.source_tokenizer is not None",
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
        cwd=tempfile.gettempdir(),  # away from the checkout: what lies there is not looked through
    )


def load_once(name: str, folders: dict[bool, Path], threads: int) -> dict[str, float]:
    imports, load = LOADS[name]
    folder = folders["tokeniser" in name]
    done = child(CHILD.format(imports=imports, load=load, threads=threads), str(folder))
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def in_turn(names: Iterable[str], rounds: int, once: Callable[[str], Any]) -> dict[str, list[Any]]:
    """What each name gave in each round; a round before them warms the page cache."""
    taken: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in taken if turn % 2 == 0 else reversed(taken):
            found = once(name)
            if turn:
                taken[name].append(found)
    return taken


def loading(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    size = (folder / "model.safetensors").stat().st_size
    with tempfile.TemporaryDirectory() as bare:
        for name in ("config.json", "model.safetensors"):
            (Path(bare) / name).symlink_to((folder / name).resolve())
        folders = {False: Path(bare), True: folder}
        taken = in_turn(LOADS, options.rounds, lambda name: load_once(name, folders, options.threads))
    first = taken["transformers"][0]
    for found in (samples[0] for samples in taken.values()):
        assert found["parameters"] == first["parameters"], "they loaded different models"
        assert abs(found["total"] - first["total"]) < 1e-3 * abs(first["total"]), "they loaded different numbers"
    print(f"\nloading {size / 1e6:.0f} MB, {first['parameters'] / 1e6:.1f} M parameters")
    print("| row | s | with every weight touched | x transformers | highest memory, MB | of the checkpoint |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name, samples in taken.items():
        row = {key: statistics.median(s[key] for s in samples) for key in ("loaded", "touched", "peak", "after")}
        peer = taken[name.replace("qkv", "transformers")]
        row["ratio"] = ratio([s["touched"] for s in peer], [s["touched"] for s in samples])
        row["peak_share"] = row["peak"] / size
        shown = f"{row['loaded']:.3f} | {row['touched']:.3f} | {row['ratio']:.2f} | {row['peak'] / 1e6:.0f}"
        print(f"| {name} | {shown} | {row['peak_share']:.2f} |", flush=True)
        rows.append({"row": name} | row)
    print()
    for row in rows:
        if str(row["row"]).startswith("qkv"):
            print(f"{row['row']}: highest memory / checkpoint = {row['peak_share']:.2f} (goal at most {MEMORY_GOAL})")
    return {"bytes": size, "rows": rows}


def import_once(name: str) -> float:
    began = time.perf_counter()
    done = child(IMPORTS[name])
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    return time.perf_counter() - began


def importing(options: argparse.Namespace) -> list[dict[str, Any]]:
    taken = in_turn(IMPORTS, options.rounds, import_once)
    print("\nimporting\n| row | s | least | x import torch |\n|---|---|---|---|")
    rows = []
    for name, seconds in taken.items():
        row = {"row": name, "seconds": statistics.median(seconds), "least": min(seconds)}
        row["ratio"] = ratio(seconds, taken["import torch"])
        print(f"| {name} | {row['seconds']:.2f} | {row['least']:.2f} | {row['ratio']:.3f} |", flush=True)
        rows.append(row)
    ours, used = (next(r["ratio"] for r in rows if r["row"] == n) for n in ("import qkv", "import qkv; qkv.load"))
    print(f"\nimport qkv / import torch = {ours:.2f} (goal at most {IMPORT_GOAL}); with qkv.load used, {used:.2f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", default="", help="a Hugging Face folder of a BERT; one is made where none is given")
    parser.add_argument("--json", default="", help="a file for all figures")
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
