"""Every option of `qkv predict`, `qkv eval`, `qkv embed` and `qkv score` has an effect or is refused by its name."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.append(str(Path(__file__).parents[1] / "tasks"))
sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))
sys.path.append(str(Path(__file__).parent))
from checkpoints import checkpoint
from task_models import model
from test_cli import must_refuse, qkv

from qkv import ModelBundle, save
from qkv.cli.eval import eval_command
from qkv.cli.predict import predict
from qkv.families import transformer
from qkv.nn import build
from qkv.tasks import get_task
from qkv.tokenization.tokenizer import train_tokenizer

TRAIN = {"max_steps": 1, "batch_tokens": 64, "learning_rate": 0.1}
# options of the task's settings with a value, and of the file or the output where they are given without one
VALUES: dict[str, tuple[str, ...]] = {
    "--num-beams": ("2",),
    "--length-penalty": ("0.5",),
    "--sample": (),
    "--temperature": ("2",),
    "--top-k": ("3",),
    "--top-p": ("0.5",),
    "--seed": ("1",),
    "--max-new-tokens": ("2",),
    "--generation": ("no_repeat_ngram_size=1",),
    "--on-unknown": ("replace",),
    "--parse-special-tokens": (),
    "--threshold": ("0.1",),
    "--on-too-long": ("truncate",),
    "--subword-pooling": ("mean",),
    "--pre-split": (),
    "--n-best": ("2",),
    "--alignments": (),
    "--stream": (),
    "--dtype": ("int8",),
    "--with": ("generation",),  # a model in the home folder
    "--format": ("csv",),
    "--text": ("review",),
    "--text-pair": ("review",),
    "--delimiter": (";",),
    "--encoding": ("latin-1",),
    "--reader-option": ("text=review",),
}
GENERAL = {"--file", "--skip-bad", "--output", "--scores", "--json", "--device", "--verbose"}  # of every kind of model
SEARCH = {"--num-beams", "--sample", "--max-new-tokens", "--generation", "--on-too-long", "--n-best"}
SEARCH |= {"--alignments", "--dtype", "--stream", "--with"}
WITH_EFFECT = {
    "text_classification": {"--on-too-long", "--n-best"},
    "multi_label": {"--threshold", "--on-too-long", "--n-best"},
    "regression": {"--on-too-long"},
    "token_classification": {"--on-too-long", "--subword-pooling", "--pre-split"},
    "question_answering": {"--threshold", "--n-best"},
    "embedding": {"--on-too-long"},
    "generation": SEARCH | {"--on-unknown"},
}
LABELS = {"text_classification": ("1", "5"), "multi_label": ("1", "5"), "regression": ("score",)}
LABELS |= {"token_classification": ("O", "B-PER", "I-PER"), "question_answering": ("start", "end")}


def write_generator(folder: Path) -> None:
    tokenizer = train_tokenizer("character", ["abcdef x:"])
    config = transformer.Config(d_model=16, heads=2, layers=1, d_ff=16, max_length=40, dropout=0.0)
    sizes = {f"{side}_vocab_size": tokenizer.vocab_size for side in ("source", "target")}
    save(ModelBundle(build(transformer.make_spec(config, **sizes)).eval(), tokenizer, tokenizer), folder)
    recipe = {
        "model": {"family": "transformer"},
        "data": {"format": "tsv", "train": "x.tsv", "hold_out": {"test": 0.5}},
    }
    recipe |= {"tokenizer": {"source": {"kind": "character"}}, "train": TRAIN}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    for task, labels in LABELS.items():
        save(model(get_task(task), labels), folder / task)
        recipe: dict[str, Any] = {"model": {"init_from": "none"}, "task": task, "train": TRAIN}
        recipe["data"] = {"format": "csv", "train": "x.csv", "hold_out": {"test": 0.5}}
        (folder / task / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    checkpoint(folder / "embedding", "pooler")
    write_generator(folder / "generation")
    return folder


def input_of(kind: str) -> str:
    return {"generation": "bad", "question_answering": "where ?\ta house in london", "embedding": "a cat"}.get(
        kind, "a house in london"
    )


def options_of(command: Any) -> set[str]:
    """The options of a command's function, by its parameters."""
    renamed = {"as_json": "--json", "with_": "--with"}
    names = [name for name in inspect.signature(command).parameters if name not in ("model", "texts")]
    return {renamed.get(name, f"--{name.replace('_', '-')}") for name in names}


def test_this_law_knows_every_option_of_predict() -> None:
    assert options_of(predict) == {*VALUES, *GENERAL}


@pytest.mark.parametrize("kind", WITH_EFFECT)
def test_an_option_of_predict_has_an_effect_or_is_refused(home: Path, kind: str) -> None:
    for option, value in VALUES.items():
        done = qkv("predict", kind, input_of(kind), option, *value, "--device", "cpu", cwd=home)
        if option in WITH_EFFECT[kind]:
            assert done.returncode == 0, (option, done.stderr)
        else:
            must_refuse(done, option)


def test_options_of_sampling_and_search_are_refused_without_them(home: Path) -> None:
    words = ("predict", home / "generation", "bad")
    for option in ("--temperature", "--top-k", "--top-p", "--seed"):
        must_refuse(qkv(*words, option, *VALUES[option]), option, "--sample")
        assert qkv(*words, "--sample", option, *VALUES[option]).returncode == 0
    must_refuse(qkv(*words, "--sample", "--num-beams", 2), "--num-beams", "--sample")
    must_refuse(qkv(*words, "--length-penalty", 0.5), "--length-penalty", "--num-beams")
    assert qkv(*words, "--length-penalty", 0.5, "--num-beams", 2).returncode == 0


def test_a_field_of_the_config_has_an_effect_or_is_refused_like_its_option(home: Path) -> None:
    words = ("predict", home / "generation", "bad")
    assert len(qkv(*words, "--generation", "n_best=2").stdout.splitlines()) == 2
    diverse = ("--generation", "num_beam_groups=2", "--generation", "diversity_penalty=0.5")
    assert len(qkv(*words, "--num-beams", 4, *diverse, "--n-best", 4).stdout.splitlines()) == 4
    must_refuse(qkv(*words, "--generation", "seed=5"), "--seed", "--sample")
    must_refuse(qkv(*words, "--generation", "unfinished_beams=last"), "unfinished_beams", "--num-beams")
    must_refuse(qkv(*words, "--generation", "ensemble=probabilities"), "ensemble", "several models")
    must_refuse(qkv(*words, "--num-beams", 2, "--generation", "num_beams=3"), "--num-beams", "another value")


@pytest.mark.parametrize("option", [("--num-beams", 10**6), ("--n-best", 10**6), ("--n-best", 0), ("--seed", -1)])
def test_numbers_have_bounds(home: Path, option: tuple[str, int]) -> None:
    must_refuse(qkv("predict", home / "generation", "bad", "--sample", *option), option[0])


def test_options_of_the_output_are_refused_where_they_have_no_effect(home: Path, tmp_path: Path) -> None:
    words = ("predict", home / "text_classification", "bad")
    must_refuse(qkv(*words, "--json", "--scores"), "--scores")
    must_refuse(qkv(*words, "--json", "-o", tmp_path / "out.csv"), "--json")
    must_refuse(qkv(*words, "--scores", "-o", tmp_path / "out.csv"), "--scores")
    must_refuse(qkv(*words, "--n-best", 2, "-o", tmp_path / "out.csv"), "--n-best", ".jsonl")
    must_refuse(qkv("embed", home / "embedding", "a cat", "--subword-pooling", "mean"), "--subword-pooling")
    must_refuse(qkv("embed", home / "embedding", "a cat", "--format", "csv"), "--format")


EVAL_VALUES: dict[str, tuple[str, ...]] = {
    "--format": ("csv",),
    "--text": ("review",),
    "--text-pair": ("review",),
    "--label": ("stars",),
    "--delimiter": (";",),
    "--encoding": ("latin-1",),
    "--reader-option": ("text=review",),
    "--target": ("x",),
    "--num-beams": ("2",),
    "--length-penalty": ("0.5",),
    "--on-unknown": ("replace",),
    "--metric": ("bleu",),
    "--free-running": (),
    "--with": ("generation",),
    "--memory-length": ("4",),
    "--tune-null-threshold": (),
    "--report": ("r",),
    "--skip-bad": (),
}
EVAL_GENERAL = {"--data", "--split", "--on-too-long", "--output", "--num-resamples", "--json", "--device", "--verbose"}
EVAL_WITH_EFFECT = {
    "text_classification": {"--report", "--skip-bad"},
    "generation": {"--num-beams", "--on-unknown", "--metric", "--free-running", "--with"},
}


def test_this_law_knows_every_option_of_eval() -> None:
    assert options_of(eval_command) == {*EVAL_VALUES, *EVAL_GENERAL}


@pytest.mark.parametrize("kind", EVAL_WITH_EFFECT)
def test_an_option_of_eval_has_an_effect_or_is_refused(home: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "x.csv").write_text("text,label\n" + "".join(f"a house {i},{'15'[i % 2]}\n" for i in range(20)))
    (tmp_path / "x.tsv").write_text("".join(f"{'abcdef'[i % 6] * (i // 6 + 1)}\tbad\n" for i in range(20)))
    for option, value in EVAL_VALUES.items():
        value = (str(home / "generation"),) if option == "--with" else value
        done = qkv("eval", home / kind, option, *value, "--num-resamples", 0, "--device", "cpu", cwd=tmp_path)
        if option in EVAL_WITH_EFFECT[kind]:
            assert done.returncode == 0, (option, done.stderr)
        else:
            must_refuse(done, option)


def test_an_option_of_score_that_no_metric_uses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\ny\n")
    words = ("score", "-m", "accuracy", "--hyp", tmp_path / "a.txt", "--ref", tmp_path / "a.txt")
    values = {"--lowercase": (), "--tokenize": ("intl",), "--multi-reference": ("mean",), "--use-stemmer": ()}
    values |= {"--sentence-separator": ("<q>",), "--scheme": ("bio",), "--positive-label": ("x",), "--ignore": ("x",)}
    values |= {"--model": ("m",), "--layer": ("1",), "--idf": (), "--label-separator": (";",), "--device": ("cpu",)}
    values |= {"--on-too-long": ("truncate",), "--per-class": ()}
    for option, value in values.items():
        must_refuse(qkv(*words, option, *value), option)
