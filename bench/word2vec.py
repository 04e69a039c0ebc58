"""word2vec: words per second and quality of qkv beside gensim, on the same text, with as many threads, in one run.

    python bench/word2vec.py                       # the novels of ../shared/data, skip-gram and CBOW, two threads
    python bench/word2vec.py --only cbow --rounds 5 --epochs 3 --json word2vec.json
    python bench/word2vec.py --device cuda         # qkv on a GPU, gensim on the CPU

Both train on the same words in the same chunks of at most 1,000, without words that occur less than 5 times: width 100,
window 5, 5 noise words, subsampling at 1e-3, learning rate 0.025 with linear decay, CBOW's gradient as in word2vec.c.
Rounds alternate, and each has another seed. Time is that of training alone, without reading, vocabulary and validation;
qkv's is that of `qkv train`, with its log and checkpoints. On a machine that does other work too, the CPU seconds of a
word are the fairer measure: `words/CPU s`.

Quality, both within the 30,000 most frequent words: `analogy` is the accuracy of a : b = c : ? on hand-written pairs
(plural, gender, past tense, comparative), and `pairs` the mean reciprocal rank of a word among the neighbors of a
related one, in both directions. qkv's update is not that of gensim: 16 words share 16 noise words, and 2,048 words are
updated together (docs/vectors.md); gensim's threads race. So figures differ from round to round, by `±`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to run from a checkout

import qkv
from qkv.checkpoints.word_vectors import load_word_vectors
from qkv.tokenization.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
NOVELS = ROOT.parent / "shared/data/english_novels/novels.tar.xz"
WIDTH, WINDOW, NEGATIVES, SUBSAMPLE, RATE, MIN_COUNT, CHUNK = 100, 5, 5, 1e-3, 0.025, 5, 1000
MAX_WORDS = 30_000  # that an answer is looked for in
PLURALS = """
man men, woman women, child children, day days, year years, hand hands, eye eyes, word words, friend friends, book
books, house houses, street streets, door doors, girl girls, boy boys, lady ladies, letter letters, horse horses,
foot feet, brother brothers, sister sisters, tree trees, window windows, ship ships, soldier soldiers, servant
servants
"""
GENDERS = """
man woman, he she, him her, king queen, brother sister, father mother, son daughter, husband wife, uncle aunt, boy
girl, gentleman lady, nephew niece, himself herself, prince princess, sons daughters, brothers sisters, men women,
boys girls, mr mrs, sir madam
"""
PAST_TENSES = """
go went, come came, see saw, say said, take took, give gave, know knew, think thought, find found, make made, hear
heard, stand stood, sit sat, run ran, begin began, speak spoke, tell told, feel felt, leave left, keep kept, hold
held, write wrote, bring brought, turn turned, look looked, ask asked, walk walked, cry cried
"""
COMPARATIVES = """
good better, great greater, old older, young younger, large larger, small smaller, long longer, strong stronger,
high higher, low lower, deep deeper, near nearer, happy happier, bad worse, wise wiser, rich richer
"""
RELATED = """
king queen, father mother, ship boat, sea ocean, horse carriage, doctor physician, money pounds, captain lieutenant,
breakfast dinner, coffee tea, morning evening, summer winter, red blue, black white, gold silver, monday tuesday,
january march, london paris, england france, english french, table chair, bread butter, hat coat, piano music,
lawyer solicitor, hundred thousand, two three, north south, rain snow, soldier army, knife sword, gun rifle, anger
rage, joy delight, fear terror, sorrow grief, river stream, mountain hill, forest woods, arm shoulder, eyes lips,
boots shoes, garden lawn, wine brandy, law legal, marriage wedding, death dying, nose chin, cat dog, cow sheep, rose
lily, oak elm, gentle kind, quick swift, big huge, quiet silent, clever intelligent, angry furious, sad melancholy,
beautiful lovely
"""


@dataclass(frozen=True)
class Result:
    """One training run."""

    words_per_second: float
    words_per_cpu_second: float
    analogy: float
    pairs: float


def word_pairs(text: str) -> list[tuple[str, str]]:
    return [tuple(pair.split()) for pair in text.split(",")]  # type: ignore[misc]


def score(words: Sequence[str], vectors: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return the accuracy of analogies and the mean reciprocal rank of related words."""
    words, vectors = words[:MAX_WORDS], vectors[:MAX_WORDS]
    rows = {word: row for row, word in enumerate(words)}
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    num_right = num_asked = 0
    for category in (PLURALS, GENDERS, PAST_TENSES, COMPARATIVES):
        known = [(rows[a], rows[b]) for a, b in word_pairs(category) if a in rows and b in rows]
        asked = np.array([(*p, *q) for p in known for q in known if len({*p, *q}) == 4])
        cosines = (unit[asked[:, 1]] - unit[asked[:, 0]] + unit[asked[:, 2]]) @ unit.T
        np.put_along_axis(cosines, asked[:, :3], -np.inf, 1)
        num_right += int((cosines.argmax(1) == asked[:, 3]).sum())
        num_asked += len(asked)
    related = [(rows[a], rows[b]) for a, b in word_pairs(RELATED) if a in rows and b in rows]
    both = np.array([*related, *((b, a) for a, b in related)])
    cosines = unit[both[:, 0]] @ unit.T
    np.put_along_axis(cosines, both[:, :1], -np.inf, 1)
    ranks = (cosines > np.take_along_axis(cosines, both[:, 1:], 1)).sum(1) + 1
    return num_right / num_asked, float(np.mean(1 / ranks))


# ---- qkv ------------------------------------------------------------------------------------------------------------


def make_recipe(objective: str, folder: Path, epochs: int, seed: int, tokenizer: Path | None) -> dict[str, Any]:
    settings = {"window": WINDOW, "negatives": NEGATIVES, "subsample": SUBSAMPLE}
    settings |= {"gradient": "original"} if objective == "cbow" else {}
    trained = {"vocab_size": 1_000_000, "min_count": MIN_COUNT}
    return {
        "name": objective,
        "objective": {objective: settings},
        "data": {"train": str(folder / "train"), "valid": str(folder / "valid"), "format": "file_per_document"}
        | {"max_length": CHUNK, "chunking": "greedy"},
        "model": {"family": "word2vec", "d_model": WIDTH, "max_length": CHUNK},
        "tokenizer": trained if tokenizer is None else {"path": str(tokenizer)},
        "train": {"epochs": epochs, "batch_tokens": 65536, "optimizer": "sgd", "learning_rate": RATE}
        | {"schedule": "linear", "warmup_steps": 0, "num_workers": 1, "log_every": 1000},
        "validation": {"keep": "last", "num_samples": 0, "every_steps": 10**9},
        "seed": seed,
    }


def train_qkv(recipe: dict[str, Any], output: Path, device: str, num_words: int) -> Result:
    """Train as `qkv train` does, and return speed and scores; CPU seconds include reading and validation."""
    cpu_start = time.process_time()
    run = qkv.fit(recipe, output, device=device).run(progress=False)
    cpu_seconds = time.process_time() - cpu_start
    seconds = next(record.values["seconds"] for record in run.records if record.kind == "final")
    vectors = load_word_vectors(str(output))
    first = len(vectors.hidden_rows)
    scores = score(vectors.words[first:], vectors.vectors[first:].numpy())
    num_trained = num_words * recipe["train"]["epochs"]
    return Result(num_trained / seconds, num_trained / cpu_seconds, *scores)


# ---- gensim ---------------------------------------------------------------------------------------------------------


def read_chunks(folder: Path, tokenizer: Tokenizer) -> list[list[str]]:
    """Return the words of the training text in chunks, as qkv cuts them, without unknown words."""
    names = tokenizer.ids_to_display(range(tokenizer.vocab_size))
    chunks = []
    for path in sorted((folder / "train").iterdir()):
        ids = tokenizer.encode(path.read_text(encoding="utf-8-sig"))
        chunks += [ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK)]
    return [[names[token] for token in chunk if token != tokenizer.unk_id] for chunk in chunks]


def train_gensim(objective: str, chunks: list[list[str]], epochs: int, seed: int, threads: int) -> Result:
    from gensim.models import Word2Vec

    model = Word2Vec(
        vector_size=WIDTH, window=WINDOW, negative=NEGATIVES, sample=SUBSAMPLE, alpha=RATE, min_alpha=RATE * 1e-4,
        min_count=MIN_COUNT, sg=int(objective == "skipgram"), workers=threads, seed=seed,
    )  # fmt: skip
    model.build_vocab(chunks)
    start, cpu_start = time.perf_counter(), time.process_time()
    model.train(chunks, total_examples=len(chunks), epochs=epochs)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    num_trained = epochs * sum(map(len, chunks))
    return Result(num_trained / seconds, num_trained / cpu_seconds, *score(model.wv.index_to_key, model.wv.vectors))


# ---- the comparison -------------------------------------------------------------------------------------------------


def describe(name: str, results: Sequence[Result]) -> str:
    def spread(values: list[float]) -> str:
        return (
            f"{100 * mean(values):5.1f} ± {100 * stdev(values):3.1f}" if len(values) > 1 else f"{100 * values[0]:5.1f}"
        )

    speed, cpu = (median(getattr(r, key) for r in results) for key in ("words_per_second", "words_per_cpu_second"))
    scores = f"analogy {spread([r.analogy for r in results])} %, pairs {spread([r.pairs for r in results])} %"
    return f"  {name:<8} {speed:>11,.0f} words/s {cpu:>11,.0f} words/CPU s   {scores}"


def compare(objective: str, folder: Path, args: argparse.Namespace) -> dict[str, list[Result]]:
    results: dict[str, list[Result]] = {"qkv": [], "gensim": []}
    for number in range(args.rounds):
        output = folder / f"{objective}-{number}"
        recipe = make_recipe(objective, folder, args.epochs, number + 1, args.tokenizer)
        results["qkv"].append(train_qkv(recipe, output, args.device, args.num_words))
        results["gensim"].append(train_gensim(objective, args.chunks, args.epochs, number + 1, args.threads))
        for name, rounds in results.items():
            print(f"round {number + 1}:{describe(name, rounds[-1:])}", flush=True)
    return results


def unpack(folder: Path) -> None:
    if not NOVELS.is_file():
        sys.exit(f"{NOVELS}: not found; name a folder with train/*.txt and valid/*.txt by --text")
    with tarfile.open(NOVELS) as archive:
        archive.extractall(folder, filter="data")


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """Train the tokenizer that all runs use, and read the text with it."""
    first = make_recipe("cbow", folder, 1, 1, None)
    first["train"] |= {"epochs": 0.01}
    qkv.fit(first, folder / "tokenizer-run", device="cpu").run(progress=False)
    args.tokenizer = folder / "tokenizer-run"
    tokenizer = qkv.load(args.tokenizer).source_tokenizer
    assert tokenizer is not None
    args.chunks = read_chunks(folder, tokenizer)
    args.num_words = sum(map(len, args.chunks))
    print(f"{args.num_words:,} words, {tokenizer.vocab_size:,} different ones; {args.threads} threads", flush=True)


def objectives(only: str | None) -> Iterator[str]:
    yield from ("skipgram", "cbow") if only is None else (only,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="folder with train/*.txt and valid/*.txt; default: the novels")
    parser.add_argument("--only", choices=["skipgram", "cbow"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.text is None:
            unpack(folder)
        else:
            for split in ("train", "valid"):
                (folder / split).symlink_to((args.text / split).resolve())
        prepare(folder, args)
        report = {}
        for objective in objectives(args.only):
            results = compare(objective, folder, args)
            ours, theirs = (median(r.words_per_second for r in results[key]) for key in ("qkv", "gensim"))
            print(f"{objective}, {args.epochs} epochs: {ours / theirs:.2f} times gensim")
            print("\n".join(describe(key, rounds) for key, rounds in results.items()), flush=True)
            report[objective] = {key: [vars(r) for r in rounds] for key, rounds in results.items()}
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
