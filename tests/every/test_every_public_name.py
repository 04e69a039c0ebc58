"""Every public function gives one line (`qkv.InputError`) or a result for every wrong value of every argument."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import qkv
from qkv.analysis import capture_attention, plot_alignment
from qkv.families import bert, transformer
from qkv.metrics.classification import Accuracy
from qkv.nn.attention_score import DotScore
from qkv.objectives.clm import CausalLM
from qkv.registry import Registry
from qkv.tasks.text_classification import TextClassification
from qkv.tokenization.tokenizer import train_tokenizer
from qkv.train.callbacks import Callback
from qkv.train.run import Run

sys.path.append(str(Path(__file__).parents[1] / "unit" / "checkpoints"))
from checkpoints import checkpoint

RECIPE = {
    "name": "tiny",
    "data": {"format": "tsv", "train": "pairs.tsv", "hold_out": {"valid": 0.3}},
    "tokenizer": {"source": {"kind": "character"}, "target": {"kind": "whitespace"}},
    "model": {"family": "transformer", "size": "tiny", "d_model": 8, "d_ff": 8, "heads": 2, "layers": 1},
    "train": {"max_steps": 1, "batch_tokens": 100},
}
ROWS = [{"text": f"a {word} {i}", "label": word} for word in ("cat", "dog") for i in range(10)]


class ToyMetric(Accuracy):
    """A metric that is renamed when it is registered."""


def wrong_values(folder: Path) -> dict[str, Any]:
    """Return values that few parameters are made for."""
    return {
        "None": None,
        "zero": 0,
        "negative": -1,
        "fraction": 3.5,
        "nan": float("nan"),
        "bool": True,
        "bytes": b"x",
        "empty": "",
        "missing_path": folder / "no" / "such.thing",
        "folder": folder,
        "other_file": folder / "pairs.tsv",
        "empty_list": [],
        "list_of_none": [None],
        "nested": [[["a"], []], {}],
        "dict": {"a": object()},
        "object": object(),
        "lambda": lambda: None,
        "floats": torch.zeros(2, 3),
        "scalar": torch.tensor(3),
        "numbers": pd.Series([1, 2]),
        "missing_values": pd.Series([None, float("nan"), pd.NA], dtype=object),
        "frame": pd.DataFrame({"a": [1.5], "b": [None]}),
        "array": np.arange(6).reshape(2, 3),
        "module": torch.nn.Linear(2, 2),
        "class": dict,
        "huge": 10**30,
        "long": "x" * 5000,
        "lines": "two\nlines\0",
    }


@dataclass(frozen=True)
class Call:
    """A function and arguments that it takes."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    consume: Callable[[Any], Any] = lambda result: result

    def __call__(self, **changes: Any) -> Any:
        return self.consume(self.function(**self.arguments | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("public")
    (path / "pairs.tsv").write_text("".join(f"{a}{b}\t{a} {b}\n" for a in "abc" for b in "abc"))
    (path / "tiny.yaml").write_text(str(RECIPE))
    checkpoint(path / "bert", "sequence")
    return path


def _first_record(run: Any) -> None:
    """Start a run and stop it."""
    next(run, None)
    run.close()


def _enter(context: Any) -> None:
    with context:
        pass


def _calls(folder: Path) -> Iterator[tuple[str, Call]]:
    letters, classifier = train_tokenizer("character", ["abc"]), qkv.load(folder / "bert")
    torch.manual_seed(0)
    pairs_spec = transformer.make_spec(
        transformer.Config(d_model=8, heads=2, layers=1, d_ff=8, max_length=8),
        source_vocab_size=letters.vocab_size,
        target_vocab_size=letters.vocab_size,
    )
    writer = qkv.ModelBundle(qkv.build(pairs_spec).eval(), letters, letters)
    config, ids = qkv.GenerationConfig(max_new_tokens=3), torch.tensor([1, 2])
    generate = {"config": config}
    yield "load", Call(qkv.load, {"folder": folder / "bert", "device": "cpu", "head": "sequence", "labels": ["a", "b"]})
    yield "save", Call(qkv.save, {"bundle": classifier, "folder": folder / "saved", "format": "qkv"})
    yield "predict", Call(qkv.predict, {"model": classifier, "inputs": ["a cat"], "config": None})
    yield "predict_text", Call(qkv.predict, {"model": writer, "inputs": ["abc"]} | generate)
    yield "stream", Call(qkv.stream, {"model": writer, "text": "abc"} | generate, list)
    yield "Predictor.encode", Call(qkv.Predictor(writer).encode, {"texts": ["abc"]})
    encoded = qkv.Predictor(writer).encode(["abc"])
    yield "Predictor.decode", Call(qkv.Predictor(writer).decode, {"encoded": encoded} | generate)
    yield "Predictor", Call(qkv.Predictor, {"bundle": writer, "task": None, "prefix": "a"} | generate)
    yield "Predictor.load", Call(qkv.Predictor.load, {"path": folder / "bert", "device": "cpu", "config": None})
    yield (
        "Predictor.__call__",
        Call(qkv.Predictor(classifier), {"inputs": ["a"], "n_best": 1, "locations": ["a"], "first_index": 0}),
    )
    yield (
        "ModelBundle.__call__",
        Call(writer, {"inputs": ["ab"], "targets": ["ab"], "logits": True, "attentions": False, "hidden_states": True}),
    )
    yield "ModelBundle.tokenize", Call(classifier.tokenize, {"texts": ["a cat"]})
    yield "ModelBundle.embed", Call(classifier.embed, {"texts": ["a"], "pool": "cls", "layers": 0, "normalize": True})
    embed_options = {"subword_pooling": "mean", "on_too_long": "truncate", "parse_special_tokens": True}
    embed_options |= {"batch_tokens": 99, "locations": ["first"], "pool": "words", "layers": "sum", "normalize": False}
    yield "embed", Call(qkv.embed, {"model": classifier, "texts": ["a cat"]} | embed_options)
    yield "attention", Call(qkv.attention, {"model": classifier, "texts": ["a cat"], "layers": "encoder.0"})
    yield "attention_pairs", Call(qkv.attention, {"model": writer, "texts": ["ab"], "targets": ["ab"]} | generate)
    aligned = qkv.alignments(writer, ["ab"], ["ba"])
    yield (
        "alignments",
        Call(qkv.alignments, {"bundle": writer, "texts": ["ab"], "targets": ["a"], "layer": None} | generate),
    )
    plot = {"path": None, "title": "title"}
    yield "plot_alignments", Call(qkv.plot_alignments, {"items": aligned, "columns": 2} | plot)
    weights = {"weights": aligned[0].weights, "source": list("abc"), "target": list("ba.")}
    yield "plot_alignment", Call(plot_alignment, weights | plot | {"heads": "mean"})
    yield "capture_attention", Call(capture_attention, {"model": classifier, "layers": None, "heads": [0]}, _enter)
    lengths = {"source_length": 4, "target_length": 4, "batch_tokens": 100, "steps": 10}
    yield "cost", Call(qkv.cost, {"model": pairs_spec} | lengths)
    yield "build", Call(qkv.build, {"s": pairs_spec})
    yield "Ragged.pack", Call(qkv.Ragged.pack, {"sequences": [ids]})
    yield "Ragged.from_lengths", Call(qkv.Ragged.from_lengths, {"values": ids, "lengths": [2]})
    yield "Ragged.from_padded", Call(qkv.Ragged.from_padded, {"padded": ids[None], "lengths": [2]})
    yield "model", Call(classifier.model, {"source": qkv.Ragged.pack([ids])})
    yield "families.get_family", Call(qkv.families.get_family, {"name": "bert"})
    yield (
        "read_recipe",
        Call(qkv.read_recipe, {"path": folder / "tiny.yaml", "overrides": ["seed=2"], "import_modules": True}),
    )
    fit = {"recipe": RECIPE, "output": folder / "run", "device": "cpu", "callbacks": [], "progress": False}
    yield "fit", Call(qkv.fit, fit | {"overrides": {"seed": 2}, "data": None}, Run.close)
    started = partial(qkv.fit, **{name: value for name, value in fit.items() if name != "output"})
    yield "fit_started", Call(started, {"output": folder / "started"}, _first_record)
    automatic = {"task": "classify", "init_from": str(folder / "bert"), "data": ROWS, "columns": {"text": "text"}}
    yield "fit_task", Call(qkv.fit, automatic | {"output": folder / "task"}, Run.close)
    evaluate = {"model": classifier, "data": [{"text": "a", "label": "bad"}], "task": None, "format": None}
    evaluate |= {"columns": {"text": "text"}, "split": None, "target": None, "skip_bad": False, "resamples": 2}
    yield "evaluate", Call(qkv.evaluate, evaluate)
    pairs = {"model": writer, "data": [{"source": "ab", "target": "ba"}], "metrics": ["bleu"], "resamples": 0}
    yield "evaluate_pairs", Call(qkv.evaluate, pairs | {"generation_config": config})
    entries = {"callback": Callback, "family": bert, "metric": ToyMetric, "objective": CausalLM, "schedule": max}
    entries |= {"score_function": DotScore, "task": TextClassification}
    for name in qkv.register.__all__:
        if name == "load_plugins":
            yield f"register.{name}", Call(qkv.register.load_plugins, {"modules": []})
        elif name != "format":
            yield f"register.{name}", Call(getattr(qkv.register, name), {"name": "toy", "entry": entries[name]})


NAMES = [
    *("load", "save", "predict", "predict_text", "stream", "Predictor.encode", "Predictor.decode"),
    *("Predictor", "Predictor.load", "Predictor.__call__"),
    *("ModelBundle.__call__", "ModelBundle.tokenize", "ModelBundle.embed", "embed", "attention", "attention_pairs"),
    *("alignments", "plot_alignments", "plot_alignment", "capture_attention", "cost", "build", "Ragged.pack"),
    *("Ragged.from_lengths", "Ragged.from_padded", "model", "families.get_family", "read_recipe"),
    *("fit", "fit_started", "fit_task", "evaluate", "evaluate_pairs"),
    *(f"register.{name}" for name in qkv.register.__all__ if name != "format"),
]


@pytest.fixture(scope="module")
def calls(folder: Path) -> dict[str, Call]:
    return dict(_calls(folder))


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Run in a folder of its own, and forget what is registered."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(Registry, "register", _register_and_forget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _register_and_forget(registry: Any, name: Any, entry: Any = None, register: Any = Registry.register) -> Any:
    result = register(registry, name, entry)
    registry._entries.pop(name, None)
    return result


def _fault(call: Call, name: str, value: Any) -> str | None:
    """Return what is wrong with the answer to a wrong value; None if it is a result or one line."""
    try:
        call(**{name: value})
    except qkv.InputError as error:
        text = str(error)
        return None if len(text.splitlines()) == 1 and len(text) < 700 else f"message {text[:200]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"
    return None


@pytest.mark.parametrize("function", NAMES)
def test_wrong_arguments_give_a_result_or_one_line(function: str, calls: dict[str, Call], folder: Path) -> None:
    call = calls[function]
    faults = {
        f"{name}={kind}": fault
        for name in call.arguments
        for kind, value in wrong_values(folder).items()
        if (fault := _fault(call, name, value)) is not None
    }
    assert faults == {}


def test_the_calls_of_this_law_work(calls: dict[str, Call]) -> None:
    assert list(calls) == NAMES
    for call in calls.values():
        call()


def test_the_law_covers_every_public_name() -> None:
    values = {"GenerationConfig", "InputError", "ModelBundle", "Predictor", "Ragged", "families", "register"}
    functions = [name for name in qkv.__all__ if name not in values]
    assert [name for name in functions if name not in NAMES] == []
    assert all(inspect.isfunction(getattr(qkv, name)) for name in functions)


@pytest.mark.parametrize("name", [field.name for field in fields(qkv.GenerationConfig)])
def test_wrong_settings_of_generation_give_a_result_or_one_line(
    name: str, calls: dict[str, Call], folder: Path
) -> None:
    call = calls["predict_text"]
    config = call.arguments["config"]
    faults = {}
    for kind, value in wrong_values(folder).items():
        changed = replace(call, function=lambda config, value=value: call(config=replace(config, **{name: value})))
        fault = _fault(replace(changed, arguments={}), "config", config)
        if fault is not None:
            faults[kind] = fault
    assert faults == {}
