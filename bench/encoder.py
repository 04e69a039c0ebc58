"""BERT-base reads sentences, no head, no gradients: ours and the peers', the same weights, in one run.

    python bench/encoder.py                             # a GPU where there is one, else the CPU
    python bench/encoder.py --device cpu --compile      # transformers under torch.compile too (a minute or two more)
    python bench/encoder.py --rounds 9 --seed 2 --json encoder.json
    python bench/encoder.py --only qkv,CTranslate2      # only rows whose name holds one of these, and transformers

Two batches: `varied`, 32 sentences with lognormal lengths of about 20 tokens, and `full`, 8 of 128 tokens each. On a
GPU both have 32 times as many sentences, for 32 alone measure nothing but the launching of kernels; everybody computes
under bfloat16 autocast there, in float32 on a CPU. Seed 1 gives the lengths that shared/peers used.

Weights are random and of the real size: transformers makes them once, and every row reads them from that folder. What
a row computes is compared with transformers' own output before it is timed, at every real token; a row that differs is
left out. Peers get ready-made padded tensors and a mask. CTranslate2 takes lists of ids, packs them itself and adds the
pooler, a product a sentence. Ours gets the packed ids; its layout and plan are built anew in every call. On a CPU each
row has a process of its own, for engines in one process disturb each other's threads (`race.Apart`).

The limit is what the real tokens' matrix products take at the rate of one large product, measured in the same run.
Peers come from `pip install qkv[bench] onnx onnxscript onnxruntime ctranslate2`; what is not installed is said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from a checkout too

from bench.race import Apart, figures, matrix_rate, race, serve, show, speed_up

VOCABULARY, FIRST_WORD = 30522, 1000  # what stands before is special or unused
TRANSFORMERS, COMPILED, CTRANSLATE, OURS = "transformers", "transformers, compiled", "CTranslate2", "qkv"
MEAN, DEVIATION = 25.0, 0.6  # of lengths before they are rounded and cut; seed 1 then has 19.4 a sentence
GOALS = {"varied": {TRANSFORMERS: 2.8, CTRANSLATE: 1.0}, "full": {TRANSFORMERS: 1.0}}
_NEAR = {"cpu": 1e-4, "cuda": 3e-2}  # ‖theirs − transformers‖ / ‖transformers‖; bfloat16 rounds at 4e-3


@dataclass
class Batch:
    """Sentences of ids, as lists and padded."""

    name: str
    lengths: list[int]
    seed: int
    device: torch.device

    @cached_property
    def words(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(FIRST_WORD, VOCABULARY, (self.real,), generator=generator).to(self.device)  # [T]

    @property
    def real(self) -> int:
        return sum(self.lengths)

    @cached_property
    def mask(self) -> Tensor:
        """1 where a token is real.  # [B, N]"""
        return (torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]).long().to(self.device)

    @cached_property
    def padded(self) -> Tensor:
        ids = torch.zeros(self.mask.shape, dtype=torch.long, device=self.device)
        ids[self.mask.bool()] = self.words
        return ids  # [B, N]

    def work(self, size: dict[str, Any]) -> float:
        """Floating point operations of the real tokens' matrix products: two a weight and token, and the attention."""
        width, hidden = size["hidden_size"], size["intermediate_size"]
        dense = self.real * (4 * width**2 + 2 * width * hidden)
        return 2.0 * size["num_hidden_layers"] * (dense + 2 * width * sum(n * n for n in self.lengths))


def draw(options: argparse.Namespace) -> list[Batch]:
    times = 32 if options.device.type == "cuda" else 1
    generator = torch.Generator().manual_seed(options.seed)
    noise = torch.randn(32 * times, generator=generator)
    middle = math.log(MEAN) - DEVIATION**2 / 2
    varied = torch.exp(noise * DEVIATION + middle).round().clamp(4, 128).int().tolist()
    lengths = {"varied": varied, "full": [128] * 8 * times}
    return [Batch(name, lengths[name], options.seed, options.device) for name in options.batch.split(",")]


# ---- one model for all ----------------------------------------------------------------------------------------------


def quiet_transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def make_folder(folder: Path, layers: int = 12) -> None:
    """A BERT-base of random weights as transformers writes it, and a vocabulary, which CTranslate2 wants."""
    transformers = quiet_transformers()
    torch.manual_seed(0)
    config = transformers.BertConfig(num_hidden_layers=layers)
    config.position_embedding_type = "absolute"  # the converter reads what transformers 5 does not write of itself
    transformers.BertModel(config).save_pretrained(folder)
    special = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"w{i}" for i in range(VOCABULARY - len(special)))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)


@dataclass
class Shop:
    """What rows are made from."""

    folder: Path
    options: argparse.Namespace

    @cached_property
    def theirs(self) -> Any:
        # without the pooler, which is no part of what is compared
        model = quiet_transformers().BertModel.from_pretrained(
            self.folder, attn_implementation="sdpa", add_pooling_layer=False
        )
        return model.to(self.options.device).eval()

    @cached_property
    def ours(self) -> nn.Module:
        from qkv import checkpoints

        bundle = checkpoints.load(self.folder, self.options.device, head="backbone")
        assert not bundle.missing_keys
        return bundle.model

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        kind = self.options.device.type
        with torch.inference_mode(), torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            yield


@dataclass
class Entrant:
    """`call` is timed; `read` takes the real tokens' vectors out of what it gave."""

    call: Callable[[], Any]
    read: Callable[[Any], Tensor]  # [T, width]
    end: Callable[[], None] = lambda: None


# ---- rows -----------------------------------------------------------------------------------------------------------


def transformers_row(shop: Shop, batch: Batch, compiled: bool = False) -> Entrant:
    # the usual way: compiled for any shape, which it learns when it meets the second one
    run = torch.compile(shop.theirs) if compiled else shop.theirs
    ids, mask = batch.padded, batch.mask

    def call() -> Tensor:
        with shop.computing():
            hidden: Tensor = run(input_ids=ids, attention_mask=mask).last_hidden_state
            return hidden

    return Entrant(call, lambda hidden: hidden[mask.bool()])


def our_row(shop: Shop, batch: Batch, compiled: bool = False) -> Entrant:
    from qkv.nn import Ragged

    run = torch.compile(shop.ours) if compiled else shop.ours

    def call() -> Tensor:
        with shop.computing():
            hidden: Tensor = run(Ragged.from_lengths(batch.words, batch.lengths))
            return hidden

    return Entrant(call, lambda hidden: hidden)


def onnx_row(shop: Shop, batch: Batch, fused: bool = False) -> Entrant:
    import onnxruntime

    path = _exported(shop)
    if fused:
        path = _fused(shop, path)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = shop.options.threads
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    feed = dict(zip(names, (batch.padded.numpy(), batch.mask.numpy()), strict=True))
    return Entrant(lambda: session.run(None, feed), lambda out: torch.from_numpy(out[0])[batch.mask.bool()])


def _exported(shop: Shop) -> Path:
    path = shop.folder / "bert.onnx"
    if path.exists():
        return path
    theirs = shop.theirs

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = theirs

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            hidden: Tensor = self.inner(input_ids=ids, attention_mask=mask).last_hidden_state
            return hidden

    small = Batch("small", [16, 9], 0, torch.device("cpu"))
    free = {0: torch.export.Dim("b", min=1, max=512), 1: torch.export.Dim("n", min=2, max=512)}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells of every library that it could have exported
    with contextlib.redirect_stdout(None), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        given, names = (small.padded, small.mask), ["ids", "mask"]
        shapes = (free, free)
        torch.onnx.export(
            Plain(), given, str(path), input_names=names, dynamo=True, dynamic_shapes=shapes, verbose=False
        )
    return path


def _fused(shop: Shop, path: Path) -> Path:
    """Through onnxruntime's own optimiser, which fuses attention, residual with norm, and gelu where it finds them."""
    from onnxruntime.transformers import optimizer

    out = path.with_suffix(".fused.onnx")
    if not out.exists():
        size = {"num_heads": shop.theirs.config.num_attention_heads, "hidden_size": shop.theirs.config.hidden_size}
        made = optimizer.optimize_model(str(path), "bert", opt_level=1, **size)
        print("    fused:", {k: n for k, n in made.get_fused_operator_statistics().items() if n} or "nothing")
        made.save_model_to_file(str(out), use_external_data_format=False)
    return out


def ctranslate_row(shop: Shop, batch: Batch) -> Entrant:
    import ctranslate2
    import numpy

    folder = shop.folder / "ctranslate2"
    if not folder.exists():
        ctranslate2.converters.TransformersConverter(str(shop.folder)).convert(str(folder))
    encoder = ctranslate2.Encoder(
        str(folder), device="cpu", inter_threads=1, intra_threads=shop.options.threads, compute_type="float32"
    )
    sentences = [part.tolist() for part in batch.words.split(batch.lengths)]

    def read(out: Any) -> Tensor:
        return torch.from_numpy(numpy.array(out.last_hidden_state))[batch.mask.bool()]

    return Entrant(lambda: encoder.forward_batch(sentences), read)


def apart(name: str) -> Callable[[Shop, Batch], Entrant]:
    """The same row in a process of its own; its vectors come back in a file."""

    def make(shop: Shop, batch: Batch) -> Entrant:
        given = {"serve": name, "batch": batch.name, "folder": shop.folder, "seed": batch.seed, "device": "cpu"}
        given["threads"] = shop.options.threads
        call = Apart([__file__, *(word for key, value in given.items() for word in (f"--{key}", str(value)))])
        return Entrant(call, lambda _: torch.load(_vectors(shop.folder, name)), call.end)

    return make


def _vectors(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(', ', '-')}.pt"


def serve_row(shop: Shop, name: str) -> None:
    """The process of `apart`."""
    if TRANSFORMERS not in name and OURS not in name:
        torch.set_num_threads(1)  # else its threads, idle as they are, would count against the engine's own

    def make() -> Callable[[], Any]:
        entrant = rows(shop.options)[name](shop, draw(shop.options)[0])
        torch.save(entrant.read(entrant.call()).clone(), _vectors(shop.folder, name))
        return entrant.call

    serve(make)


def rows(options: argparse.Namespace) -> dict[str, Callable[[Shop, Batch], Entrant]]:
    found: dict[str, Callable[[Shop, Batch], Entrant]] = {TRANSFORMERS: transformers_row}
    if options.compile:
        found[COMPILED] = lambda shop, batch: transformers_row(shop, batch, compiled=True)
    if options.device.type == "cpu":
        found["onnxruntime"] = onnx_row
        found["onnxruntime, fused"] = lambda shop, batch: onnx_row(shop, batch, fused=True)
        found[CTRANSLATE] = ctranslate_row
    found[OURS] = our_row
    if options.device.type == "cuda":
        found["qkv, compiled"] = lambda shop, batch: our_row(shop, batch, compiled=True)
    wanted = [word for word in options.only.split(",") if word]
    return {n: make for n, make in found.items() if n == TRANSFORMERS or not wanted or any(w in n for w in wanted)}


def enter(name: str, make: Callable[[], Entrant], wanted: Tensor | None, near: float) -> Entrant | None:
    """Builds a row, compares it with `wanted` and warms it up; a row that fails is said and left out."""
    began = time.perf_counter()
    try:
        entrant = make()
        found = entrant.read(entrant.call()).float()
        apart = 0.0 if wanted is None else float((found - wanted).norm() / wanted.norm())
        if not apart <= near:
            raise RuntimeError(f"its output differs from transformers' by {apart:.1e} of it (at most {near:.0e})")
        entrant.call()
    except ModuleNotFoundError as error:
        print(f"  {name}: not installed: {error.name}", flush=True)
    except Exception as error:  # a peer that breaks must not take the others' figures with it
        print(f"  {name}: failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
    else:
        print(f"  {name}: apart {apart:.1e}, ready in {time.perf_counter() - began:.1f} s", flush=True)
        return entrant
    return None


# ---- the run --------------------------------------------------------------------------------------------------------


def run(batch: Batch, shop: Shop) -> dict[str, Any]:
    """Times one batch: the figures, printed and as data."""
    options = shop.options
    places = batch.padded.numel()
    print(f"\n{batch.name}: {len(batch.lengths)} sentences, {batch.real} real tokens in {places} padded places")
    entered, wanted = {}, None
    for name, make in rows(options).items():
        make = apart(name) if options.device.type == "cpu" else make
        entrant = enter(name, partial(make, shop, batch), wanted, _NEAR[options.device.type])
        if entrant is not None:
            entered[name] = entrant
            wanted = entrant.read(entrant.call()).float() if wanted is None else wanted
    before = matrix_rate(options.device)
    laps = race({name: entrant.call for name, entrant in entered.items()}, options.rounds, options.device)
    rate = max(before, matrix_rate(options.device))
    for entrant in entered.values():
        entrant.end()
    needs = batch.work(json.loads((shop.folder / "config.json").read_text()))
    print(f"\nmatrix products: {rate / 1e9:,.0f} GFLOP/s; a call needs {needs / 1e9:,.1f} GFLOP")
    table = figures(laps, batch.real, needs / rate, TRANSFORMERS)
    show(table, batch.real, needs / rate, TRANSFORMERS)
    goals = GOALS[batch.name] if options.device.type == "cpu" else {}
    for peer in [n for n in laps if not n.startswith(OURS)] if OURS in laps else []:
        goal = f" (goal {goals[peer]})" if peer in goals else ""
        print(f"{batch.name}: ours / {peer} = {speed_up(laps[OURS], laps[peer]):.2f}{goal}")
    return {"batch": batch.name, "lengths": batch.lengths, "matrix_rate": rate, "operations": needs, "rows": table}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="varied,full")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1, help="of the lengths and the words")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compile", action="store_true", help="a compiled row on a CPU too")
    parser.add_argument("--layers", type=int, default=12, help="fewer: for trying this script out")
    parser.add_argument("--only", default="", help="comma list: only rows whose name holds one of these")
    parser.add_argument("--folder", default="", help="keeps the models there, and uses those that are there")
    parser.add_argument("--json", default="", help="a file for all figures")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)  # a row that this process is to run
    options = parser.parse_args()
    options.device = torch.device(options.device)
    options.compile = options.compile or options.device.type == "cuda" or options.serve == COMPILED
    return options


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    if options.serve:
        serve_row(Shop(Path(options.folder), options), options.serve)
        return
    device = options.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {options.threads} threads"
    print(f"torch {torch.__version__}, {where}, seed {options.seed}, {options.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            make_folder(folder, options.layers)
        shop = Shop(folder, options)
        results = [run(batch, shop) for batch in draw(options)]
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch.__version__, "on": where, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
