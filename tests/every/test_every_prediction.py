"""One law, every task: the Python API, `qkv predict`, `qkv eval`, any batch and any thread predict the same."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "unit" / "tasks"))
sys.path.append(str(Path(__file__).parents[1] / "unit" / "checkpoints"))
from checkpoints import checkpoint
from task_models import CASES, looking, model

import qkv
from qkv.cli import main
from qkv.data.examples import ImageExample
from qkv.data.formats.registry import register_format
from qkv.families import transformer
from qkv.nn import build
from qkv.recipe.task_names import TASKS
from qkv.tasks.predictor import Predictor
from qkv.tokenization.tokenizer import train_tokenizer

SEQ2SEQ_TEXTS = ["bad cafe", "fade", "a bed", "dead beef"]


@dataclass(frozen=True)
class Case:
    """A model on disk with inputs for it, and how `qkv eval` is called for them, if it can be."""

    folder: Path
    lines: list[str]
    eval_options: list[str] | None = None


def write_run(folder: Path, bundle: qkv.ModelBundle, recipe: dict[str, Any]) -> None:
    qkv.save(bundle, folder)
    text = yaml.safe_dump(recipe | {"train": {"max_steps": 1, "batch_tokens": 64, "learning_rate": 0.1}})
    (folder / "recipe.yaml").write_text(text)


def task_case(name: str, folder: Path) -> Case:
    """A run of a trainable task on the labeled examples of `task_models`."""
    case = CASES[name]
    examples = [replace(e, text_pair=None) if name == "multiple_choice" else e for e in case.examples]
    if name == "image_classification":
        examples = [on_disk(example, folder) for example in examples]
    task = case.make()
    labels = task.labels(examples)
    bundle = looking(task, labels) if name == "image_classification" else model(task, labels)
    format_name = f"law {folder}"

    def read(path: Path, error_policy: Any) -> Iterator[Any]:  # noqa: ARG001
        yield from examples

    register_format(format_name, read, example_type=type(examples[0]))
    data = {"format": format_name, "train": "memory", "hold_out": {"valid": 0.5}}
    settings = {"name": name, **case.settings}
    write_run(folder / "run", bundle, {"model": {"init_from": "none"}, "task": settings, "data": data})
    return Case(folder / "run", [example.to_line() for example in examples], ["--data", "memory"])


def on_disk(example: ImageExample, folder: Path) -> ImageExample:
    path = folder / f"{example.location.replace(':', '_')}.png"
    Image.fromarray(example.image).save(path)
    return replace(example, image=path)


def head_case(head: str, lines: list[str]) -> Callable[[Path], Case]:
    """A plain checkpoint, which has no recipe."""
    return lambda folder: Case(checkpoint(folder / head, head), lines)


def generation_case(folder: Path) -> Case:
    """A seq2seq run with a prefix, as T5's tasks have them."""
    torch.manual_seed(3)
    tokenizer = train_tokenizer("character", ["abcdef x:"])
    config = transformer.Config(d_model=16, heads=2, layers=1, d_ff=16, max_length=40, dropout=0.0)
    sizes = {f"{side}_vocab_size": tokenizer.vocab_size for side in ("source", "target")}
    bundle = qkv.ModelBundle(build(transformer.make_spec(config, **sizes)).eval(), tokenizer, tokenizer)
    data = {"format": "tsv", "train": "none.tsv", "prefix": "x: ", "max_target_length": 12}
    recipe = {"model": {"family": "transformer"}, "data": data, "test": {"num_beams": 2}}
    write_run(folder / "run", bundle, recipe | {"tokenizer": {"source": {"kind": "character"}}})
    (folder / "pairs.tsv").write_text("".join(f"{text}\tabc\n" for text in SEQ2SEQ_TEXTS))
    return Case(folder / "run", SEQ2SEQ_TEXTS, ["--data", str(folder / "pairs.tsv")])


PREDICTION_ONLY: dict[str, Callable[[Path], Case]] = {
    "fill_mask": head_case("masked_lm", ["the [MASK] sat", "a [MASK] on the [MASK]", "the cat [MASK] on the mat"]),
    "next_sentence": head_case("next_sentence", ["a cat\tsat", "the cat sat\ton the mat", "a dog\tthe mat"]),
    "embedding": head_case("pooler", ["the cat", "a dog sat on the mat", "the mat"]),
    "generation": generation_case,
}


@pytest.fixture(params=TASKS.names())
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    name: str = request.param
    return PREDICTION_ONLY[name](tmp_path) if name in PREDICTION_ONLY else task_case(name, tmp_path)


def call(words: Sequence[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["qkv", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert not ended.value.code, output.err
    return output.out


def same(predictions: Sequence[Any], others: Sequence[Any]) -> None:
    if "vector" in predictions[0].fields:
        torch.testing.assert_close([p.prediction for p in predictions], [p.prediction for p in others])
        return
    assert [p.text for p in predictions] == [p.text for p in others]
    assert [p.score for p in predictions] == pytest.approx([p.score for p in others], abs=1e-5)


def test_every_way_to_predict_gives_the_same(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    predictor = Predictor.load(case.folder, "cpu")
    predictions = predictor(case.lines)
    assert [p.fields for p in qkv.predict(qkv.load(case.folder), case.lines)] == [p.fields for p in predictions]
    same(predictions, qkv.predict(case.folder, case.lines))
    (tmp_path / "lines.txt").write_text("".join(f"{line}\n" for line in case.lines))
    words = ("predict", case.folder, "--file", tmp_path / "lines.txt", "--device", "cpu")
    rows = [json.loads(line) for line in call([*words, "--json"], monkeypatch, capsys).splitlines()]
    assert [row["input"] for row in rows] == case.lines
    for row, prediction in zip(rows, predictions, strict=True):
        assert {name: row[name] for name in prediction.fields} == prediction.fields
    printed = call(words, monkeypatch, capsys).splitlines()
    assert printed == [" ".join(p.text.split()) for p in predictions]


def test_predictions_do_not_depend_on_batches_or_their_order(case: Case) -> None:
    predictor = Predictor.load(case.folder, "cpu")
    predictions = predictor(case.lines)
    same(predictions, predictor(case.lines[::-1])[::-1])
    same(predictions, [predictor([line])[0] for line in case.lines])
    small = Predictor(predictor.bundle, predictor.task, qkv.GenerationConfig(batch_tokens=16))
    if predictor.task.name != "generation":  # there the config also holds the search
        same(predictions, small(case.lines))


def test_eval_scores_the_predictions_that_predict_gives(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if case.eval_options is None:
        pytest.skip("a plain checkpoint has no recipe to evaluate with")
    predictions = Predictor.load(case.folder, "cpu")(case.lines)
    words = ("eval", case.folder, *case.eval_options, "--num-resamples", 0, "-o", tmp_path / "out.tsv")
    call([*words, "--device", "cpu"], monkeypatch, capsys)
    with open(tmp_path / "out.tsv", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    texts = [" ".join(p.text.split()) for p in predictions]
    if rows[0][0] != "location":  # pairs: source, output, references
        assert [row[1] for row in rows] == texts
        return
    assert [row[1] for row in rows[1:]] == texts
    probabilities = ["" if p.probability is None else f"{p.probability:.4f}" for p in predictions]
    assert [row[2] for row in rows[1:]] == probabilities


def shape_of(value: Any) -> Any:
    """The names and types in a JSON value; lists by their first item."""
    if isinstance(value, dict):
        return {name: shape_of(item) for name, item in value.items()}
    return [shape_of(item) for item in value[:1]] if isinstance(value, list) else type(value).__name__


def test_a_run_and_its_export_predict_the_same_in_one_json_shape(case: Case, tmp_path: Path) -> None:
    predictor = Predictor.load(case.folder, "cpu")
    try:
        qkv.save(predictor.bundle, tmp_path / "export", "huggingface")
    except qkv.InputError:
        pytest.skip("this family has no format of Hugging Face")
    exported = Predictor.load(tmp_path / "export", "cpu")
    assert exported.task.name == predictor.task.name
    predictions, others = predictor(case.lines), exported(case.lines)
    assert [sorted(p.fields) for p in others] == [sorted(p.fields) for p in predictions]
    if [p.text for p in others] == [p.text for p in predictions]:  # a threshold of the recipe may change an answer
        assert [shape_of(p.fields) for p in others] == [shape_of(p.fields) for p in predictions]


def test_a_predictor_serves_several_threads(case: Case) -> None:
    predictor = Predictor.load(case.folder, "cpu")
    inputs = [[line] for line in case.lines * 4]
    serial = [predictor(batch) for batch in inputs]
    with ThreadPoolExecutor(4) as pool:
        parallel = list(pool.map(predictor, inputs))
    for one_by_one, at_once in zip(serial, parallel, strict=True):
        same(one_by_one, at_once)
    assert not predictor.bundle.model.training
