"""Translation of files by the engine: peak memory by the number of lines, and throughput by the spread of lengths.

    python bench/stream.py                        # both
    python bench/stream.py memory --lines 1000 10000
    python bench/stream.py throughput --size base

Models have random weights. Memory: each file is translated by `qkv predict --file` in a process of its own, and must
take no more for many lines than for few. Throughput: sources of lengths between 4 and 60 against sources that all have
their mean length, each with an output as long as its source, so that rows end at different times.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import qkv
from qkv.families import transformer
from qkv.generation import Engine, GenerationConfig, Request
from qkv.nn import build
from qkv.tokenization.tokenizer import train_tokenizer

WORDS = ["alpha", "beta", "gamma", "delta", "one", "two", "three", "red", "green", "blue"]
SHORTEST, LONGEST, MEAN = 4, 60, 32
SIZES = {"tiny": (64, 2, 1, 128, 1000), "small": (256, 4, 3, 1024, 8000), "base": (512, 8, 6, 2048, 32000)}


def make_model(size: str, vocab_size: int | None = None) -> qkv.ModelBundle:
    """Return an encoder-decoder of a size with random weights and a tokenizer of words."""
    d_model, heads, layers, d_ff, default_vocab_size = SIZES[size]
    torch.manual_seed(0)
    shape = transformer.Config(d_model=d_model, heads=heads, layers=layers, d_ff=d_ff, max_length=256, dropout=0.0)
    tokenizer = train_tokenizer("whitespace", [" ".join(WORDS)])
    sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), vocab_size or default_vocab_size)
    return qkv.ModelBundle(build(transformer.make_spec(shape, **sizes)).eval(), tokenizer, tokenizer)


def write_lines(path: Path, num_lines: int) -> None:
    """Write lines of 1 to 12 words."""
    chance = random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(" ".join(chance.choices(WORDS, k=chance.randint(1, 12))) + "\n" for _ in range(num_lines))


def measure_memory(counts: list[int]) -> None:
    """Print the time and the peak memory of `qkv predict` for files of several sizes."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = train_tokenizer("whitespace", [" ".join(WORDS)])
        qkv.save(make_model("tiny", tokenizer.vocab_size), folder / "model")
        for count in counts:
            write_lines(folder / "lines.txt", count)
            call = [sys.argv[0], "translate", "--folder", name]
            start = time.perf_counter()
            output = subprocess.run([sys.executable, *call], check=True, capture_output=True, text=True).stdout
            seconds = time.perf_counter() - start
            with open(folder / "out.txt", encoding="utf-8") as file:
                num_written = sum(1 for _ in file)
            assert num_written == count, (num_written, count)
            print(f"{count:>8,} lines: peak memory {float(output.split()[-1]):,.0f} MB, {seconds:.1f} s", flush=True)


def translate(folder: Path) -> None:
    """Translate the lines of a folder, and print the peak memory of this process in megabytes."""
    from qkv.cli.commands import app

    options = ["--file", folder / "lines.txt", "--output", folder / "out.txt", "--generation", "max_new_tokens=8"]
    app(["predict", str(folder / "model"), *map(str, options)], standalone_mode=False)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def measure_throughput(size: str, num_sources: int, num_beams: int) -> None:
    """Print the speed for sources of mixed and of equal lengths."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, chance = make_model(size).model.to(device), random.Random(2)
    mixed = [chance.randint(SHORTEST, LONGEST) for _ in range(num_sources)]
    equal = [round(sum(mixed) / num_sources)] * num_sources
    config = GenerationConfig(num_beams=num_beams, suppress_tokens=(model.spec.eos_id,), batch_tokens=8192)
    configs = {n: replace(config, max_new_tokens=n) for n in (*mixed, *equal)}
    ids = torch.randint(10, 1000, (LONGEST,), generator=torch.Generator().manual_seed(3))
    speeds: dict[str, list[float]] = {"equal": [], "mixed": []}
    for _ in range(4):  # the first round warms up
        for name, lengths in (("equal", equal), ("mixed", mixed)):
            requests = [Request(ids[:n], configs[n], i) for i, n in enumerate(lengths)]
            start = time.perf_counter()
            for _ in Engine(model, max_tokens=config.batch_tokens).run(requests):
                pass
            speeds[name].append(sum(lengths) / (time.perf_counter() - start))
    best = {name: max(values[1:]) for name, values in speeds.items()}
    line = ", ".join(f"{name} {speed:,.0f} tokens/s" for name, speed in best.items())
    print(f"{device}, {size}, {num_sources} sources, {num_beams} beams: {line}, {best['mixed'] / best['equal']:.2f}")


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=["memory", "throughput", "translate"])
    parser.add_argument("--lines", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--sources", type=int, default=512)
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kind == "translate":
        translate(arguments.folder)
        return
    if arguments.kind in (None, "memory"):
        measure_memory(arguments.lines)
    if arguments.kind in (None, "throughput"):
        for num_beams in arguments.beams:
            measure_throughput(arguments.size, arguments.sources, num_beams)


if __name__ == "__main__":
    main()
