"""A fine-tuned run is scored, reported and used from the command line."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "train"))
sys.path.append(str(Path(__file__).parent))
from reviews import recipe_text, reviews, write_model, write_reviews
from test_cli import must_refuse, qkv

from qkv.cli import input_stream
from qkv.recipe import read_recipe
from qkv.train.fit import fit

NASTY = "<script>alert('x')</script> good & 😀"
KINDS = {
    "multi_label": ({"label_separator": "|"}, "5|long", "1"),
    "regression": ({"regression": True}, "5.0", "1.5"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model fine-tuned on reviews, and a test file that begins with texts that are hard to print."""
    folder = tmp_path_factory.mktemp("home")
    write_reviews(folder / "train.csv")
    write_reviews(folder / "test.csv", 40, [(NASTY, "5"), ("bad tea\nin two lines", "1")])
    start = write_model("bert", folder / "start")
    (folder / "stars.yaml").write_text(recipe_text(start, folder / "train.csv"))
    list(fit(read_recipe(folder / "stars.yaml", [f"data.test={folder}/test.csv"]), folder / "stars", device="cpu"))
    return folder


def of_kind(home: Path, folder: Path, kind: str) -> Path:
    """A run of another task on the same texts."""
    settings, good, bad = KINDS[kind]
    rows = [(text, good if stars == "5" else bad) for text, stars in reviews()]
    with open(folder / "data.csv", "w", newline="") as file:
        csv.writer(file).writerows([("review", "stars"), *rows])
    recipe = folder / f"{kind}.yaml"
    recipe.write_text(recipe_text(home / "start", folder / "data.csv", task=kind))
    columns = [f"data.columns.{name}={json.dumps(value)}" for name, value in settings.items()]
    read = read_recipe(recipe, [f"data.test={folder}/data.csv", *columns])
    list(fit(read, folder / kind, device="cpu"))
    return folder / kind


# ---- eval -----------------------------------------------------------------------------------------------------------


def test_eval_of_a_task_prints_figures_classes_and_confusions(home: Path) -> None:
    done = qkv("eval", home / "stars", "--num-resamples", 50)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["metric", "value", "95", "%", "interval"]
    assert lines[1].startswith("accuracy ")
    assert any(line.split()[:3] == ["class", "precision", "recall"] for line in lines)
    assert "42 examples; 95 % intervals from 50 resamples" in lines


def test_eval_of_a_task_scores_the_recipes_test_part_and_any_other_file(home: Path) -> None:
    by_recipe, by_file = (
        json.loads(qkv("eval", home / "stars", "--num-resamples", 20, "--json", *words).stdout)
        for words in ((), ("--data", home / "test.csv"))
    )
    assert by_recipe == by_file
    assert by_recipe["num_examples"] == 42
    low, value, high = (by_recipe["metrics"]["accuracy"][name] for name in ("ci_low", "value", "ci_high"))
    assert low <= value <= high
    assert set(by_recipe["classes"]) == {"1", "5"}


def test_columns_are_named_for_a_file_of_another_format(home: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"said": text, "how": stars}) for text, stars in reviews(10)]
    (tmp_path / "other.jsonl").write_text("\n".join(rows))
    words = (
        "--data",
        tmp_path / "other.jsonl",
        "--format",
        "jsonl",
        "--reader-option",
        "text=said",
        "--reader-option",
        "label=how",
    )
    done = qkv("eval", home / "stars", *words, "--json", "--num-resamples", 0)
    assert json.loads(done.stdout)["num_examples"] == 10
    must_refuse(qkv("eval", home / "stars", *words[:4]), "other.jsonl:1", "'review'")  # the run's column


def test_a_report_is_two_files_and_the_page_holds_the_worst_examples_as_text(home: Path, tmp_path: Path) -> None:
    done = qkv("eval", home / "stars", "--report", tmp_path / "r", "--num-resamples", 20)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "r" / "report.json").read_text())
    text = (tmp_path / "r" / "report.html").read_text()
    assert told["num_wrong"] == len(told["worst_examples"])
    assert all(one["confidence"] >= 0.5 for one in told["worst_examples"])  # of two classes the likelier one
    assert told["learning_curves"]["loss"]
    assert [step for step, _ in told["learning_curves"]["accuracy"]] == [3, 6]
    assert "<h2>Learning curves</h2>" in text
    assert "<script>alert" not in text
    assert "learning_rate: 0.003" in text


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_label_has_its_report(home: Path, tmp_path: Path, kind: str) -> None:
    run = of_kind(home, tmp_path, kind)
    done = qkv("eval", run, "--report", tmp_path / "r", "--num-resamples", 20)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r" / "report.html").is_file()


def test_examples_without_labels_are_predicted_only(home: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.csv").write_text("review\na good cat\nbad tea\n")
    words = ("--data", tmp_path / "plain.csv", "--reader-option", "label=none", "-o", tmp_path / "out.tsv")
    done = qkv("eval", home / "stars", *words)
    assert done.returncode == 0, done.stderr
    assert "2 examples have no label and are not scored" in done.stdout
    assert "accuracy" not in done.stdout
    rows = [line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines()]
    assert [len(row) for row in rows] == [4, 4, 4]
    assert rows[1][0].endswith("plain.csv:2")
    assert rows[1][1] in ("1", "5")


def test_score_reads_the_predictions_that_eval_writes(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.tsv"
    done = qkv("eval", home / "stars", "--num-resamples", 0, "--json", "-o", output)
    assert done.returncode == 0, done.stderr
    assert output.read_text().splitlines()[0].split("\t") == ["location", "prediction", "probability", "label"]
    words = ("--hyp", output, "--ref", output, "--ref-column", "label", "--num-resamples", 0, "--json")
    scored = qkv("score", "-m", "f1", *words)
    assert scored.returncode == 0, scored.stderr
    evaluated = json.loads(done.stdout)["metrics"]["f1_macro"]["value"]
    assert json.loads(scored.stdout)["metrics"]["f1"]["scores"]["f1_macro"]["value"] == pytest.approx(evaluated)


def test_a_metric_of_texts_is_refused_for_a_task_which_prints_all_of_its_own(home: Path) -> None:
    must_refuse(qkv("eval", home / "stars", "--metric", "f1_macro"), "--metric", "a task prints all its metrics")


def test_columns_of_another_name_are_told_as_train_takes_them(home: Path, tmp_path: Path) -> None:
    renamed = (home / "test.csv").read_text().replace("review,stars", "said,how", 1)
    (tmp_path / "other.csv").write_text(renamed)
    words = ("--data", tmp_path / "other.csv", "--text", "said", "--label", "how")
    told = [qkv("eval", home / "stars", "--json", "--num-resamples", 0, *more) for more in ((), words)]
    assert [json.loads(one.stdout)["metrics"] for one in told] == [json.loads(told[0].stdout)["metrics"]] * 2


def test_a_label_never_seen_in_training_is_named_or_skipped(home: Path, tmp_path: Path) -> None:
    write_reviews(tmp_path / "odd.csv", 4, [("good tea", "3")])
    must_refuse(qkv("eval", home / "stars", "--data", tmp_path / "odd.csv"), "odd.csv:6", "'3' was never seen")
    done = qkv("eval", home / "stars", "--data", tmp_path / "odd.csv", "--skip-bad")
    assert "1 bad example was skipped" in done.stdout
    assert "4 examples" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--num-beams", 2), "--num-beams has no effect"),
        (("--free-running",), "--free-running has no effect"),
        (("--format", "csv"), "--format is for the file of --data"),
        (("--num-resamples", -1), "--num-resamples"),
        (("--data", "gone.csv"), "gone.csv"),
        (("--data", "{home}/test.csv", "--reader-option", "stars"), "KEY=VALUE"),
        (("--data", "{home}/test.csv", "--reader-option", "text=views"), "no column 'views'"),
        (("--data", "{home}/test.csv", "--text", "views"), "no column 'views'"),
        (("--label", "stars"), "--label is for the file of --data"),
    ],
)
def test_a_slip_in_eval_is_one_line(home: Path, words: tuple[object, ...], said: str) -> None:
    must_refuse(qkv("eval", home / "stars", *(str(word).format(home=home) for word in words)), said)


# ---- predict --------------------------------------------------------------------------------------------------------


def test_a_file_of_several_windows_comes_out_in_order(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_stream, "_FIRST_WINDOW_SIZES", (3,))
    monkeypatch.setattr(input_stream, "_WINDOW_SIZE", 7)
    lines = [f"{text} {'tea ' * (i % 9)}".strip() for i, (text, _) in enumerate(reviews(50))]
    (tmp_path / "in.txt").write_text("\n".join(lines))
    done = qkv("predict", home / "stars", "--file", tmp_path / "in.txt", "--json")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["input"] for one in told] == lines
    alone = [json.loads(qkv("predict", home / "stars", line, "--json").stdout) for line in lines[::17]]
    assert [one["label"] for one in alone] == [one["label"] for one in told[::17]]
    assert [one["probability"] for one in alone] == pytest.approx([one["probability"] for one in told[::17]], abs=1e-5)


def test_no_more_than_a_window_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    from qkv.data.formats.io import ErrorPolicy

    monkeypatch.setattr(input_stream, "_FIRST_WINDOW_SIZES", ())
    monkeypatch.setattr(input_stream, "_WINDOW_SIZE", 10)
    read: list[int] = []

    def endless():
        for number in range(10**9):
            read.append(number)
            yield input_stream.Input(str(number), "")

    take = input_stream.from_iterator(endless())
    stream = input_stream.StreamingPredictor(lambda inputs, _: [one.text for one in inputs], ErrorPolicy())
    windows = stream.iter_windows(take)
    assert [next(windows)[1][0][1] for _ in range(3)] == ["0", "10", "20"]
    assert len(read) == 30


def test_probabilities_of_labels_sum_to_one(home: Path) -> None:
    told = json.loads(qkv("predict", home / "stars", "a good cat", "--json", "--n-best", 2).stdout)
    assert sum(told["probabilities"].values()) == pytest.approx(1)
    assert told["probability"] == max(told["probabilities"].values())
    assert told["label"] == max(told["probabilities"], key=told["probabilities"].get)


def test_predict_reads_a_table_by_its_columns(home: Path) -> None:
    words = ("--file", home / "test.csv", "--format", "csv")
    done = qkv("predict", home / "stars", *words, "--text", "review", "--scores")
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert len(rows) == 42
    assert rows[-2][0] == NASTY
    assert rows[-1][0] == "bad tea in two lines"  # a line a record, whatever it holds
    must_refuse(qkv("predict", home / "stars", *words, "--text", "views"), "test.csv:1", "'views'")
    assert len(qkv("predict", home / "stars", "--file", home / "test.csv").stdout.splitlines()) == 42


def test_bad_lines_are_named_or_counted_and_listed(home: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"a good cat\n\nbad \xff tea\nbad\ttea\tdog\nbad tea\n")
    must_refuse(qkv("predict", home / "stars", "--file", tmp_path / "in.txt"), "in.txt:2", "empty")
    done = qkv("predict", home / "stars", "--file", tmp_path / "in.txt", "--skip-bad")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert "3 bad examples were skipped" in done.stderr
    for place in ("in.txt:2", "in.txt:3", "in.txt:4"):
        assert place in done.stderr


def test_json_says_where_each_input_stands_so_that_skipped_ones_are_known(home: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a good cat\n\nbad tea\n")
    done = qkv("predict", home / "stars", "--file", tmp_path / "in.txt", "--skip-bad", "--json")
    places = [json.loads(line)["location"] for line in done.stdout.splitlines()]
    assert places == [f"{tmp_path}/in.txt:1", f"{tmp_path}/in.txt:3"]
    assert "location" not in json.loads(qkv("predict", home / "stars", "bad tea", "--json").stdout)


def test_a_run_that_learned_questions_without_answer_says_so_as_it_is_scored(home: Path, tmp_path: Path) -> None:
    asked = [{"id": str(i), "question": "good", "answers": [{"text": "cat", "answer_start": 2}]} for i in range(12)]
    asked += [{"id": f"n{i}", "question": "bad", "answers": [], "is_impossible": True} for i in range(12)]
    data = {"data": [{"title": "", "paragraphs": [{"context": "a cat sat", "qas": asked}]}]}
    (tmp_path / "qa.json").write_text(json.dumps(data))
    made = {"data": {"format": "squad", "train": f"{tmp_path}/qa.json", "valid": f"{tmp_path}/qa.json"}}
    made |= {"name": "qa", "task": {"name": "question_answering"}, "model": {"init_from": str(home / "start")}}
    made |= {"train": {"max_steps": 60, "batch_tokens": 256, "learning_rate": 0.003, "warmup_steps": 2}}
    (tmp_path / "qa.yaml").write_text(json.dumps(made))
    for _ in range(2):  # the second time, it is there: what was found out is no other recipe
        list(fit(read_recipe(tmp_path / "qa.yaml"), tmp_path / "run", device="cpu"))
    assert read_recipe(tmp_path / "run" / "recipe.yaml").task["null_score_diff_threshold"] == 0.0
    done = qkv("predict", tmp_path / "run", "bad\ta cat sat", "good\ta cat sat", "--json")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert told[0]["null_score_diff"] > 0
    assert [one["answer"] == "" for one in told] == [one["null_score_diff"] > 0 for one in told]


def test_a_file_with_nothing_but_bad_lines_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\tb\tc\nd\te\tf\n")
    done = qkv("predict", home / "stars", "--file", tmp_path / "in.txt", "--skip-bad")
    must_refuse(done, "all examples are bad", "in.txt:1")


def test_what_was_cut_is_said_and_refused_on_request(home: Path) -> None:
    long = "good " * 60
    done = qkv("predict", home / "stars", long)
    assert done.stdout.strip() in ("1", "5")
    assert "1 text was truncated" in done.stderr
    must_refuse(qkv("predict", home / "stars", long, "--on-too-long", "refuse"), "at most 32")
    must_refuse(
        qkv("predict", home / "stars", "good", "--subword-pooling", "mean"), "--subword-pooling", "no such setting"
    )


def test_several_labels_are_those_above_the_threshold(home: Path, tmp_path: Path) -> None:
    run = of_kind(home, tmp_path, "multi_label")
    all_of_them = json.loads(qkv("predict", run, "a good cat", "--json", "--threshold", 0.0001).stdout)["labels"]
    assert set(all_of_them) == {"1", "5", "long"}
    middle = sorted(all_of_them.values())[1]
    some = json.loads(qkv("predict", run, "a good cat", "--json", "--threshold", middle - 1e-6).stdout)["labels"]
    assert some == {name: chance for name, chance in all_of_them.items() if chance >= middle - 1e-6}
    assert qkv("predict", run, "a good cat", "--threshold", 0.9999).stdout == "\n"
