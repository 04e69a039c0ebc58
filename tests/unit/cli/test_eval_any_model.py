"""`qkv eval` and `qkv.evaluate` of any model: splits of the recipe, checkpoints, language models, skipped rows."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.append(str(Path(__file__).parents[1] / "train"))
sys.path.append(str(Path(__file__).parents[1] / "tasks"))
sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))
sys.path.append(str(Path(__file__).parent))
from checkpoints import checkpoint
from reviews import recipe_text, reviews, write_model, write_reviews
from task_models import model, question
from test_cli import must_refuse, qkv

import qkv as package
from qkv import ModelBundle, families, save
from qkv.data.examples import TextExample
from qkv.data.pair import Pair
from qkv.errors import InputError
from qkv.nn import build
from qkv.tasks import get_task

RESAMPLES = ("--num-resamples", 0)


def write_run(folder: Path, data: dict[str, Any], task: str = "text_classification", labels: Any = ("1", "5")) -> Path:
    save(model(get_task(task), labels), folder)
    train = {"max_steps": 1, "batch_tokens": 64, "learning_rate": 0.1}
    recipe = {"model": {"init_from": "none"}, "task": task, "data": data, "train": train}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that held out a part of its data and skipped bad rows in training."""
    folder = tmp_path_factory.mktemp("home")
    write_reviews(folder / "train.csv", 60)
    write_reviews(folder / "bad.csv", 6, [("", "1"), ("good tea", "")])
    columns = {"text": "review", "label": "stars"}
    data = {"format": "csv", "train": str(folder / "train.csv"), "columns": columns, "hold_out": {"valid": 0.3}}
    write_run(folder / "run", data | {"skip_bad": True})
    return folder


def scores(*words: object) -> dict[str, Any]:
    done = qkv("eval", *words, "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads(done.stdout)
    return values


def test_a_run_without_test_data_names_the_options_that_help(home: Path) -> None:
    must_refuse(qkv("eval", home / "run"), "no test data", "--data FILE", "--split valid")


def test_the_splits_of_the_recipe_can_be_evaluated(home: Path) -> None:
    counts = {split: scores(home / "run", "--split", split, *RESAMPLES)["num_examples"] for split in ("valid", "train")}
    assert counts["valid"] + counts["train"] == 60
    assert 10 <= counts["valid"] <= 26
    must_refuse(qkv("eval", home / "run", "--split", "dev"), "--split must be train, valid or test")
    must_refuse(qkv("eval", home / "run", "--data", home / "train.csv", "--split", "valid"), "no split to choose")


def test_bad_rows_are_skipped_by_the_own_option_only_and_always_counted(home: Path) -> None:
    must_refuse(qkv("eval", home / "run", "--data", home / "bad.csv"), "bad.csv:8")
    done = qkv("eval", home / "run", "--data", home / "bad.csv", "--skip-bad", *RESAMPLES)
    assert "2 bad examples were skipped:" in done.stdout
    assert "6 examples" in done.stdout


def test_a_split_that_training_read_with_skip_bad_names_the_option(home: Path, tmp_path: Path) -> None:
    data = {"format": "csv", "train": str(home / "train.csv"), "test": str(home / "bad.csv"), "skip_bad": True}
    run = write_run(tmp_path / "run", data | {"columns": {"text": "review", "label": "stars"}})
    must_refuse(qkv("eval", run), "bad.csv:8", "--skip-bad")


def test_a_checkpoint_with_a_head_is_evaluated_without_a_recipe(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "hf", "sequence")
    (tmp_path / "test.csv").write_text("text,label\na cat,bad\nthe dog sat,good\non the mat,so so\n")
    result = scores(folder, "--data", tmp_path / "test.csv", *RESAMPLES)
    assert result["num_examples"] == 3
    assert set(result["classes"]) == {"bad", "good", "so so"}
    direct = package.evaluate(str(folder), str(tmp_path / "test.csv"))
    assert direct["accuracy"] == result["metrics"]["accuracy"]["value"]
    must_refuse(qkv("eval", folder), "no recipe with data", "--data FILE")
    (tmp_path / "odd.csv").write_text("text,label\na cat,awful\n")
    must_refuse(qkv("eval", folder, "--data", tmp_path / "odd.csv"), "odd.csv:2", "'awful'")


def test_a_masked_language_model_is_evaluated_by_perplexity(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "hf", "masked_lm")
    (tmp_path / "book.txt").write_text("the cat sat on the mat\na dog sat on the mat\n" * 20)
    result = scores(folder, "--data", tmp_path / "book.txt", "--format", "line_per_document")
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["tokens"] == 2 * 6 * 20
    must_refuse(qkv("eval", folder), "--data FILE")
    must_refuse(qkv("eval", folder, "--data", tmp_path / "book.txt", "--num-beams", 2), "--num-beams has no effect")


def write_generator(family: str, folder: Path) -> Path:
    """A checkpoint of a family that generates text, with its head, in Hugging Face's format."""
    write_model(family, folder / "start")
    save(package.load(folder / "start"), folder / "hf", "huggingface")
    return folder / "hf"


def test_a_decoder_and_an_encoder_decoder_are_evaluated_without_a_recipe(tmp_path: Path) -> None:
    texts = [text for text, _ in reviews(8)]
    (tmp_path / "book.txt").write_text("\n".join(texts))
    decoder = write_generator("gpt2", tmp_path / "gpt2")
    assert scores(decoder, "--data", tmp_path / "book.txt", "--format", "line_per_document")["perplexity"] > 1
    (tmp_path / "pairs.tsv").write_text("".join(f"{text}\t{text}\n" for text in texts))
    encoder_decoder = write_generator("t5", tmp_path / "t5")
    result = scores(encoder_decoder, "--data", tmp_path / "pairs.tsv", *RESAMPLES)
    assert {"bleu", "chrf", "examples"} <= set(result)
    other = scores(encoder_decoder, "--data", tmp_path / "pairs.tsv", "-m", "token_error_rate", *RESAMPLES)
    assert set(other) == {"token_error_rate", "examples"}
    pairs = [Pair(text, text) for text in texts]
    assert package.evaluate(package.load(encoder_decoder), pairs)["bleu"] == result["bleu"]


def test_a_model_without_metrics_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "hf", "pooler")
    (tmp_path / "test.csv").write_text("text,label\na cat,bad\n")
    must_refuse(qkv("eval", folder, "--data", tmp_path / "test.csv"), "'embedding'", "no metrics")


def test_evaluate_takes_files_splits_rows_and_examples(home: Path) -> None:
    by_file = package.evaluate(home / "run", home / "train.csv")
    rows = [{"review": text, "stars": stars} for text, stars in reviews(60)]
    assert package.evaluate(home / "run", rows) == by_file
    bundle = package.load(home / "run")
    examples = [TextExample(text, f"e:{i}", label=stars) for i, (text, stars) in enumerate(reviews(60))]
    assert package.evaluate(bundle, examples) == by_file
    assert package.evaluate(bundle, split="valid")["examples"] < 60
    with_intervals = package.evaluate(bundle, examples, resamples=20)
    low, high = with_intervals["intervals"]["accuracy"]
    assert low <= by_file["accuracy"] <= high
    with pytest.raises(InputError, match="are for pairs"):
        package.evaluate(bundle, examples, metrics=["bleu"])


def test_text_runs_have_the_splits_valid_and_train(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n".join(text for text, _ in reviews(60)))
    start = write_model("bert", tmp_path / "start")
    bundle = package.load(start)
    tokenizer = bundle.source_tokenizer
    assert tokenizer is not None
    module = families.get_family("bert")
    spec = module.make_spec(
        module.Config(d_model=16, heads=2, layers=1, d_ff=16, max_length=32),
        source_vocab_size=tokenizer.vocab_size,
        head="masked_lm",
    )
    save(ModelBundle(build(spec).eval(), tokenizer, tokenizer), tmp_path / "run")
    data = {"train": str(tmp_path / "book.txt"), "format": "line_per_document", "hold_out": 0.3}
    train = {"max_steps": 1, "batch_tokens": 256, "learning_rate": 0.1}
    recipe = {"model": {"family": "bert"}, "objective": "mlm", "data": data, "train": train}
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    valid, train_scores = (scores(tmp_path / "run", "--split", split) for split in ("valid", "train"))
    assert valid == scores(tmp_path / "run")
    whole = scores(tmp_path / "run", "--data", tmp_path / "book.txt")
    assert valid["tokens"] + train_scores["tokens"] == whole["tokens"]
    must_refuse(qkv("eval", tmp_path / "run", "--split", "test"), "valid (held out) and train")


def test_the_margin_of_no_answer_can_be_tuned(tmp_path: Path) -> None:
    examples = [question(i, answerable=i % 2 == 0) for i in range(6)]
    lines = []
    for example in examples:
        answers = [{"text": answer.text, "answer_start": answer.start} for answer in example.answers]
        qa = {"id": example.id, "question": example.question, "answers": answers, "is_impossible": not answers}
        lines.append({"title": "", "paragraphs": [{"context": example.context, "qas": [qa]}]})
    (tmp_path / "qa.json").write_text(json.dumps({"data": lines}))
    data = {"format": "squad", "train": str(tmp_path / "qa.json"), "valid": str(tmp_path / "qa.json")}
    run = write_run(tmp_path / "run", data, "question_answering", ("start", "end"))
    result = scores(run, "--split", "valid", "--tune-null-threshold")
    assert 50 <= result["f1"] <= 100
    done = qkv("eval", run, "--split", "valid", "--tune-null-threshold")
    assert f"--threshold {result['null_score_diff_threshold']:.4f}" in done.stdout


def test_the_margin_of_no_answer_is_refused_for_other_tasks(home: Path) -> None:
    must_refuse(qkv("eval", home / "run", "--split", "valid", "--tune-null-threshold"), "is for question_answering")


def test_a_trained_run_is_evaluated_on_its_validation_split(tmp_path: Path) -> None:
    from qkv.recipe import read_recipe
    from qkv.train.fit import fit

    write_reviews(tmp_path / "train.csv", 60)
    write_model("bert", tmp_path / "start")
    (tmp_path / "r.yaml").write_text(recipe_text(tmp_path / "start", tmp_path / "train.csv"))
    recipe = read_recipe(
        tmp_path / "r.yaml", ["train.max_steps=2", "data.hold_out={valid: 0.3}", "validation.every_steps=2"]
    )
    records = list(fit(recipe, tmp_path / "run", device="cpu"))
    valid = next(record for record in records if record.kind == "valid")
    assert package.evaluate(tmp_path / "run", split="valid")["accuracy"] == pytest.approx(valid.values["accuracy"])
