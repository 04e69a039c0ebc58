"""Bad examples of every task and format: one line that names file and line, exit code 2 and nothing left behind;
with --skip-bad the rest is taken, and what was left out is counted and listed."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.append(str(Path(__file__).parents[1] / "train"))
sys.path.append(str(Path(__file__).parent))
from reviews import reviews, write_model
from test_cli import qkv

from qkv.data.examples import TextExample
from qkv.data.splitting import unit_hash
from qkv.recipe import read_recipe

GOOD = 24  # examples that nothing is wrong with
TEXTS = reviews(GOOD)


def table(sign: str, label: Callable[[str], object] = str) -> str:
    return f"text{sign}label\n" + "".join(f"{text}{sign}{label(stars)}\n" for text, stars in TEXTS)


def json_lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def labels(label: Callable[[str], object]) -> str:
    return json_lines(*({"text": text, "label": label(stars)} for text, stars in TEXTS))


def sentences(*words: str) -> str:
    return "".join(f"a{number} O\n" + "".join(f"{word}\n" for word in words) + "\n" for number in range(GOOD))


def universal(*words: str, tag: str = "NOUN") -> str:
    lines = (f"{number}\t{word}\t_\t{tag}\t_\t_\t0\t_\t_\t_\n" for number, word in enumerate(words, 1))
    return "".join(lines) + "\n"


def asked(context: str, text: str, start: object, **others: Any) -> dict[str, Any]:
    return {"question": "who?", "context": context, "answers": [{"text": text, "answer_start": start}], **others}


def option(**others: Any) -> dict[str, Any]:
    return {"question": "the cat", "choices": ["sat", "ran"], "answer": 1, **others}


class Bad(NamedTuple):
    """A bad example, a byte that is no UTF-8 in it as a surrogate; what is said of it, and of which of its lines."""

    text: str
    said: str
    line: int = 1


class Kind(NamedTuple):
    """A task's examples in one format: good ones, and bad ones to be put behind them."""

    task: str
    name: str
    good: str
    bad: list[Bad]
    options: tuple[str, ...] = ()
    inputs: int = 0  # of the bad ones, the first so many have nothing that can be predicted from

    def file(self, folder: Path, *bad: Bad) -> Path:
        text = self.good + "".join(one.text for one in bad)
        (folder / self.name).write_bytes(text.encode("utf-8", "surrogateescape"))
        return folder / self.name

    def places(self, file: Path, *bad: Bad) -> dict[str, Bad]:
        """The place that is named of each bad example, all of them or these."""
        found, line = {}, self.good.count("\n")
        for one in bad or self.bad:
            found[f"{file}:{line + one.line}: "] = one
            line += one.text.count("\n")
        return found


CELLS = [
    Bad("caf\udce9 é|5\n", "byte 4 of the line, 0xE9, is not UTF-8"),
    Bad("te\0a|5\n", "byte 3 of the line, 0x00, is not text"),
    Bad("  |5\n", "the column 'text' is empty here"),
    Bad("\u200d|5\n", "the text is empty"),  # something, until a tokeniser reads it
    Bad("tea|5|6\n", "3 fields where the table has 2 columns"),
    Bad("tea\n", "1 field where the table has 2 columns"),  # in what is only used, no label is asked for
    Bad("tea|\n", "the label 'label' is empty"),
    Bad("tea|   \n", "the label 'label' is empty"),
]


def cells(sign: str) -> list[Bad]:
    return [one._replace(text=one.text.replace("|", sign)) for one in CELLS]


NUMBERS = [Bad(f"tea,{value}\n", f"is '{value}', not a number") for value in ("NaN", "inf", "1e999", "", "five")]
KINDS = {
    "csv": Kind("classify", "a.csv", table(","), inputs=6, bad=[
        Bad('"te" a,5\n', "not CSV"),
        *cells(","),
        Bad('"tea\nin\ntwo, three lines",\n', "the label 'label' is empty"),
    ]),
    "tsv": Kind("classify", "a.tsv", table("\t"), [one for one in cells("\t") if "3 fields" not in one.said], inputs=4),
    "jsonl": Kind("classify", "a.jsonl", labels(str), inputs=5, bad=[
        Bad('{"text": "tea",\n', "not JSON"),
        Bad('{"text": "caf\udce9", "label": "5"}\n', "0xE9, is not UTF-8"),
        Bad('{"text": "\\u0000", "label": "5"}\n', "the text is empty"),
        Bad('{"text": 3, "label": "5"}\n', "field 'text' is not a string"),
        Bad('{"txt": "tea", "label": "5"}\n', "no field 'text'; did you mean 'txt'?"),
        Bad('{"text": "tea"}\n', "no field 'label'"),
        Bad('{"text": "tea", "label": " "}\n', "the label 'label' is empty"),
        Bad('{"text": "tea", "label": null}\n', "the label 'label' is empty"),
        Bad('{"text": "tea", "label": NaN}\n', "the label 'label' is empty"),
        Bad('{"text": "tea", "label": ["1", "5"]}\n', "is not a single class; see the task multi_label"),
    ]),
    "numbers": Kind("regression", "a.csv", table(","), NUMBERS),
    "JSON numbers": Kind("regression", "a.jsonl", labels(float), [
        Bad(f'{{"text": "tea", "label": {value}}}\n', ", not a number")
        for value in ("NaN", "null", "true", "[1]", '"x"')
    ]),
    "several": Kind("multi_label", "a.jsonl", labels(lambda stars: ["x", stars]), [
        Bad('{"text": "tea", "label": ["5", ""]}\n', "the label 'label' is empty"),
        Bad('{"text": "tea", "label": ["5", null]}\n', "the label 'label' is empty"),
        Bad('{"text": "tea"}\n', "no field 'label'"),
    ]),
    "conll": Kind("tag", "a.conll", sentences("tea B-x", "cup I-x", "dog B-y"), inputs=2, bad=[
        Bad("cup\n\n", "1 column where the file has 2"),
        Bad("é O\ncaf\udce9 O\n\n", "0xE9, is not UTF-8", 2),
        Bad("tea I-x\n\n", "tag 'I-x' after 'O' is not BIO"),
        Bad("tea B-y\ncup I-x\n\n", "tag 'I-x' after 'B-y' is not BIO", 2),
        Bad("tea B-x\ncup E-x\n\n", "tag 'E-x' is not BIO", 2),
        Bad("tea NOUN\n\n", "tag 'NOUN' is not BIO"),
        Bad("tea B-\n\n", "tag 'B-' is not BIO"),
    ]),
    "BIOES": Kind("tag", "a.bio", sentences("tea B-x", "cup E-x", "dog S-y"), [
        Bad("tea B-x\ncup O\n\n", "tag 'O' after 'B-x' is not BIOES", 2),
        Bad("tea B-x\n\n", "tag 'B-x' at the end of a sentence is not BIOES"),
        Bad("tea O\ncup E-x\n\n", "tag 'E-x' after 'O' is not BIOES", 2),
        Bad("tea B-x\ncup E-y\n\n", "tag 'E-y' after 'B-x' is not BIOES", 2),
        Bad("tea B-x\ncup S-x\n\n", "tag 'S-x' after 'B-x' is not BIOES", 2),
    ]),
    "words": Kind("tag", "a.jsonl", json_lines(*({"words": ["a", str(i), "tea"], "tags": ["O", "B-x", "I-x"]}
                                                 for i in range(GOOD))), inputs=2, bad=[
        Bad('{"words": ["a", ""], "tags": ["O", "O"]}\n', "'words' is empty or contains an empty word"),
        Bad('{"words": [], "tags": []}\n', "'words' is empty or contains an empty word"),
        Bad('{"words": ["a", "tea"], "tags": ["O", "I-x"]}\n', "tag 'I-x' after 'O' is not BIO"),
        Bad('{"words": ["a", "tea"], "tags": ["O"]}\n', "2 words have 1 tags"),
        Bad('{"words": ["a", "tea"], "tags": ["O", ""]}\n', "tag '' is not BIO"),
    ]),
    "conllu": Kind("tag", "a.conllu", "".join(universal(f"a{i}") + universal(f"b{i}", tag="DET") for i in range(GOOD)),
                   inputs=4, bad=[
        Bad(universal("tea").replace("\t", " "), "1 columns where CoNLL-U has 10"),
        Bad(universal("tea").replace("1", "2", 1), "word 2 where 1 is expected"),
        Bad(universal(""), "the word is empty"),
        Bad(universal("tea", tag=""), "the column 'upos' is empty here"),
        Bad(universal("tea", tag="_"), "has no tags"),
    ]),
    "questions": Kind("question_answering", "a.jsonl",
                      json_lines(*(asked(f"ada {i} sat", "ada", 0) for i in range(GOOD))), inputs=3, bad=[
        Bad(json_lines(asked("ada sat", "ada", 0, question=" ")), "the question is empty"),
        Bad(json_lines(asked("", "ada", 0, answers=[])), "the context is empty"),
        Bad('{"question": "who?", "answers": []}\n', "no field 'context'"),
        Bad(json_lines(asked("ada sat", "ada", 50)), "the answer 50–53 is not inside its text"),
        Bad(json_lines(asked("ada sat", "ada", -1)), "the answer -1–2 is not inside its text"),
        Bad(json_lines(asked("ada sat", "ada", 2)), "is not at character 2 of its context; the nearest is at 0"),
        Bad(json_lines(asked("ada sat", " ", 3)), "is white space only"),
        Bad(json_lines(asked("ada sat", "ada", 0.5)), "field 'answer_start' is 0.5, not an integer"),
    ]),
    "choices": Kind("multiple_choice", "a.jsonl", json_lines(*(option(question=f"cat {i}") for i in range(GOOD))),
                    inputs=4, bad=[
        Bad(json_lines(option(choices=["sat"])), "there is one choice"),
        Bad(json_lines(option(choices=[])), "there are no choices"),
        Bad(json_lines(option(choices=["sat", " "])), "a choice is empty"),
        Bad(json_lines(option(question="")), "the column 'question' is empty here"),
        Bad(json_lines(option(answer=2)), "the answer is 2, but the choices are 0 to 1"),
        Bad(json_lines(option(answer=-1)), "the answer is -1, but the choices are 0 to 1"),
        Bad(json_lines(option(answer="b")), "field 'answer' is 'b', not an integer"),
    ]),
    "option columns": Kind("multiple_choice", "a.csv", "question,a,b,answer\n" + "".join(f"cat {i},sat,ran,1\n"
                                                                                  for i in range(GOOD)), inputs=1,
                           options=("--reader-option", "choices=a,b"), bad=[
        Bad("the cat,sat,,1\n", "the column 'b' is empty here"),
        Bad("the cat,sat,ran,2\n", "the answer is 2, but the choices are 0 to 1"),
        Bad("the cat,sat,ran,\n", "field 'answer' is '', not an integer"),
    ]),
}  # fmt: skip
CASES = [pytest.param(name, bad, id=f"{name}: {bad.text!r}") for name, kind in KINDS.items() for bad in kind.bad]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model to start from and good validation examples of each kind."""
    folder = tmp_path_factory.mktemp("bad")
    write_model("bert", folder / "start")
    for name, kind in KINDS.items():
        (folder / name).mkdir()
        kind.file(folder / name)
    return folder


def train(home: Path, data: Path, kind: str, *words: object):
    one = KINDS[kind]
    valid = words if "--valid" in words else ("--valid", home / kind / one.name, *words)
    return qkv("train", "--task", one.task, "--data", data, "--init-from", home / "start", *one.options, *valid,
               "train.max_steps=1", "-o", data.parent / "run")  # fmt: skip


def refused(done: Any, *said: str) -> None:
    """In one line, whatever of the recipe had been shown before."""
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert "bad examples" not in done.stdout
    for one in said:
        assert one in done.stderr


@pytest.mark.parametrize(("name", "bad"), CASES)
def test_a_bad_example_is_one_line_with_file_and_number_and_nothing_is_written(
    home: Path, tmp_path: Path, name: str, bad: Bad
) -> None:
    data = KINDS[name].file(tmp_path, bad)
    refused(train(home, data, name), *KINDS[name].places(data, bad), bad.said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", KINDS)
def test_what_was_skipped_is_counted_and_listed_in_training_scoring_and_use(
    home: Path, tmp_path: Path, name: str
) -> None:
    kind = KINDS[name]
    data = kind.file(tmp_path, *kind.bad)
    done = train(home, data, name, "--skip-bad")
    assert done.returncode == 0, done.stderr
    scored = qkv("eval", tmp_path / "run", "--data", data, "--num-resamples", 0, "--skip-bad")
    format = read_recipe(tmp_path / "run" / "recipe.yaml").data.format
    used = qkv("predict", tmp_path / "run", "--file", data, "--format", format, "--skip-bad", *kind.options)
    good = len(qkv("predict", tmp_path / "run", "--file", home / name / kind.name, "--format", format,
                   *kind.options).stdout.splitlines())  # fmt: skip
    places = kind.places(data)
    assert f"{good} training and {good} validation examples" in done.stdout
    assert reasons(done.stdout, places) == kind.bad
    # what has no truth is no fault where nothing is learned, and in what is only used no truth is asked for
    assert reasons(scored.stdout, places) == [bad for bad in kind.bad if bad.said != "has no tags"]
    assert reasons(used.stderr, places) == kind.bad[: kind.inputs]
    assert len(used.stdout.splitlines()) == good + len(kind.bad) - kind.inputs


def reasons(printed: str, places: dict[str, Bad]) -> list[Bad]:
    """What is listed as skipped, which has to be as much as is counted, in the order of the file."""
    lines = printed.splitlines()
    begin = next((i for i, line in enumerate(lines, 1) if " skipped:" in line), len(lines))
    listed = [line.strip() for line in lines[begin:] if line.startswith("  ")]
    assert not listed or lines[begin - 1].startswith(f"{len(listed)} bad example")
    found = [place for line in listed for place, bad in places.items() if line.startswith(place) and bad.said in line]
    assert len(found) == len(listed), listed
    return [bad for place, bad in places.items() if place in found]


# ---- what is wrong with a file as a whole ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("csv", "text,lable\ntea,5\n", "a.csv:1: no column 'label'; did you mean 'lable'?"),
        ("tsv", "text\tlabel\tlabel\ntea\t5\t1\n", "a.tsv:1: 2 columns have the name 'label'"),
        ("csv", "", "a.csv: empty, no examples in it"),
        ("csv", "text,label\n", "a.csv: empty, no examples in it"),
        ("csv", "text,label\ntea,5\ncup,5\n", "a.csv:2 to "),
        ("several", '{"text": "tea", "label": []}\n', "a.jsonl:1 to "),
        ("conll", "tea O\n\ncup O\n", "a.conll:1 to "),
        ("conllu", "# no words\n", "a.conllu: empty, no examples in it"),
    ],
)
def test_a_file_that_holds_nothing_to_learn_is_refused_whatever_is_skipped(
    home: Path, tmp_path: Path, name: str, content: str, said: str
) -> None:
    data = tmp_path / KINDS[name].name
    data.write_text(content)
    for words in ((), ("--skip-bad",)):
        refused(train(home, data, name, *words), said)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dress", ["packed", "Windows"])
@pytest.mark.parametrize("name", ["csv", "tsv", "jsonl", "conll", "conllu"])
def test_lines_are_counted_alike_in_packed_files_and_those_of_windows(
    home: Path, tmp_path: Path, name: str, dress: str
) -> None:
    kind = KINDS[name]
    bad = kind.bad[-1]
    text = kind.good + bad.text
    data = tmp_path / (f"{kind.name}.gz" if dress == "packed" else kind.name)
    windows = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
    data.write_bytes(gzip.compress(text.encode()) if dress == "packed" else windows)
    refused(train(home, data, name), *kind.places(data, bad), bad.said)


def test_a_packed_file_that_ends_early_is_named_with_its_line(home: Path, tmp_path: Path) -> None:
    data = tmp_path / "a.csv.gz"
    data.write_bytes(gzip.compress(KINDS["csv"].good.encode())[:-12])
    refused(train(home, data, "csv"), f"{data}:", "is broken or ends early here")


# ---- labels that nobody has learned ---------------------------------------------------------------------------------


def test_a_class_that_only_the_validation_examples_have_is_named_or_skipped(home: Path, tmp_path: Path) -> None:
    kind = KINDS["csv"]
    data, valid = kind.file(tmp_path), tmp_path / "valid.csv"
    valid.write_text(kind.good + "tea,7\n")
    said = "label '7' was never seen in training; known: 1, 5"
    refused(train(home, data, "csv", "--valid", valid), f"{valid}:{GOOD + 2}: {said}")
    assert not (tmp_path / "run").exists()
    done = train(home, data, "csv", "--valid", valid, "--skip-bad")
    assert f"1 bad example was skipped:\n  {valid}:{GOOD + 2}: {said}" in done.stdout


def test_a_class_whose_only_example_is_held_out_is_explained(home: Path, tmp_path: Path) -> None:
    data = tmp_path / "a.csv"
    lone = next(text for text in (f"lone {number}" for number in range(99)) if unit_hash(told(text)) < 0.1)
    data.write_text(KINDS["csv"].good + f"{lone},7\n")
    words = ("train", "--task", "classify", "--data", data, "--init-from", home / "start", "-o", tmp_path / "run")
    refused(qkv(*words), f"{data}:{GOOD + 2}: label '7' was never seen", "all examples with it were held out")


def told(text: str) -> str:
    """What decides on the part that an example with the label 7 falls in."""
    return TextExample(text, "", label="7").split_key()


def test_a_class_that_is_left_without_examples_is_named(home: Path, tmp_path: Path) -> None:
    data = KINDS["csv"].file(tmp_path, Bad("\u200d,7\n", ""))
    done = train(home, data, "csv", "--skip-bad")
    refused(done, "no example of the label '7' is left", f"{data}:{GOOD + 2}: the text is empty")


def test_a_label_with_a_line_break_is_quoted_in_one_line(home: Path, tmp_path: Path) -> None:
    kind = KINDS["csv"]
    valid = tmp_path / "valid.csv"
    valid.write_text(kind.good + 'tea,"7\n8"\n')
    refused(train(home, kind.file(tmp_path), "csv", "--valid", valid), r"label '7\n8' was never seen")


def test_an_answer_outside_its_text_is_named_by_its_question(home: Path, tmp_path: Path) -> None:
    """A document of JSON has ids that a person can look for, and often one line alone."""
    paragraphs = [
        {"context": f"ada {number} sat", "qas": [{"id": f"q{number}"} | asked("", "ada", 0 if number else 50)]}
        for number in range(GOOD)
    ]
    data = tmp_path / "a.json"
    data.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    refused(train(home, data, "questions"), f"{data}: question q0: the answer 50–53 is not inside its text")
    done = train(home, data, "questions", "--skip-bad", "--valid", data)
    assert f"1 bad example was skipped:\n  {data}: question q0: " in done.stdout
