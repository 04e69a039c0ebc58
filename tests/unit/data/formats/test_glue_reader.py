"""GLUE's files with their quirks, each part of each task found in the folder as it is downloaded."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from task_files import refused, tabs, written

from qkv.data.examples import TextExample
from qkv.data.formats import read

MNLI = "index|promptID|pairID|genre|sentence1_binary_parse|sentence2_binary_parse|sentence1_parse|sentence2_parse"
MNLI += "|sentence1|sentence2"
MNLI_ROW = "0|31193|31193n|government|( a )|( b )|(ROOT a)|(ROOT b)|One.|Two."
STS = "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2"
STS_ROW = "0|main-captions|MSRvid|2012test|0001|none|none|A plane is taking off.|An air plane is taking off."
# file, rows, (text, second, label, id) of the first example
FILES: dict[str, tuple[str, list[str], tuple[str, str | None, str | float | None, str]]] = {
    "CoLA train": (
        "CoLA/train.tsv",
        ['gj04|1||"Fred" ran.', "bc01|0|*|Ran fred."],
        ('"Fred" ran.', None, "acceptable", ""),
    ),
    "CoLA dev": ("CoLA/dev.tsv", ["bc01|0|*|Ran fred."], ("Ran fred.", None, "unacceptable", "")),
    "CoLA test": ("CoLA/test.tsv", ["index|sentence", "0|Bill ran."], ("Bill ran.", None, None, "0")),
    "SST-2 train": ("SST-2/train.tsv", ["sentence|label", "a gem |1"], ("a gem ", None, "positive", "")),
    "SST-2 test": ("SST-2/test.tsv", ["index|sentence", "0|a mess"], ("a mess", None, None, "0")),
    "MRPC train": (
        "MRPC/train.tsv",
        ["\ufeffQuality|#1 ID|#2 ID|#1 String|#2 String", '1|702876|702977|Amrozi said "no .|He said no .'],
        ('Amrozi said "no .', "He said no .", "equivalent", ""),
    ),
    "MRPC test": (
        "MRPC/test.tsv",
        ["index|#1 ID|#2 ID|#1 String|#2 String", "0|1089874|1089925|A .|B ."],
        ("A .", "B .", None, "0"),
    ),
    "STS-B dev": (
        "STS-B/dev.tsv",
        [f"{STS}|score", f"{STS_ROW}|4.250"],
        ("A plane is taking off.", "An air plane is taking off.", 4.25, "0"),
    ),
    "STS-B test": (
        "STS-B/test.tsv",
        [STS, STS_ROW],
        ("A plane is taking off.", "An air plane is taking off.", None, "0"),
    ),
    "QQP train": (
        "QQP/train.tsv",
        ["id|qid1|qid2|question1|question2|is_duplicate", "133273|213221|213222|How?|Why?|0"],
        ("How?", "Why?", "not_duplicate", "133273"),
    ),
    "QQP test": ("QQP/test.tsv", ["id|question1|question2", "0|How?|Why?"], ("How?", "Why?", None, "0")),
    "MNLI train": (
        "MNLI/train.tsv",
        [f"{MNLI}|label1|gold_label", f"{MNLI_ROW}|neutral|neutral"],
        ("One.", "Two.", "neutral", "0"),
    ),
    "MNLI dev": (
        "MNLI/dev_matched.tsv",
        [f"{MNLI}|label1|label2|label3|label4|label5|gold_label", f"{MNLI_ROW}|neutral|x|x|x|x|entailment"],
        ("One.", "Two.", "entailment", "0"),
    ),
    "MNLI dev_matched": (
        "MNLI/dev_matched.tsv",
        [f"{MNLI}|label1|gold_label", f"{MNLI_ROW}|neutral|contradiction"],
        ("One.", "Two.", "contradiction", "0"),
    ),
    "MNLI dev_mismatched": (
        "MNLI/dev_mismatched.tsv",
        [f"{MNLI}|label1|gold_label", f"{MNLI_ROW}|neutral|contradiction"],
        ("One.", "Two.", "contradiction", "0"),
    ),
    "MNLI-mm test": ("MNLI/test_mismatched.tsv", [MNLI, MNLI_ROW], ("One.", "Two.", None, "0")),
    "QNLI train": (
        "QNLI/train.tsv",
        ["index|question|sentence|label", "0|When?|Then.|not_entailment"],
        ("When?", "Then.", "not_entailment", "0"),
    ),
    "RTE dev": (
        "RTE/dev.tsv",
        ["index|sentence1|sentence2|label", "0|A.|B.|entailment"],
        ("A.", "B.", "entailment", "0"),
    ),
    "WNLI train": ("WNLI/train.tsv", ["index|sentence1|sentence2|label", "0|A.|B.|1"], ("A.", "B.", "entailment", "0")),
    "AX test": ("diagnostic/diagnostic.tsv", ["index|sentence1|sentence2", "0|A.|B."], ("A.", "B.", None, "0")),
}


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_found_by_its_part_and_read(tmp_path: Path, name: str) -> None:
    file, rows, (text, second, label, id) = FILES[name]
    task, part = name.split()
    path = written(tmp_path / file, tabs(*rows))
    where = f"{path}:{1 if file in ('CoLA/train.tsv', 'CoLA/dev.tsv') else 2}"
    expected = TextExample(text, where, second, label, id=id)
    assert read(f"glue:{task}", tmp_path, split=part)[0] == expected  # the folder of all tasks
    assert read(f"glue:{task}", path.parent, split=part)[0] == expected  # the task's own


def test_validation_is_another_word_for_dev(tmp_path: Path) -> None:
    written(tmp_path / "dev.tsv.gz", gzip.compress(tabs("sentence|label", "a|0").encode()))
    assert read("glue:SST-2", tmp_path, split="validation") == read("glue:SST-2", tmp_path, split="dev")


def test_microsofts_own_file_of_mrpc_is_read(tmp_path: Path) -> None:
    header = "\ufeffQuality|#1 ID|#2 ID|#1 String|#2 String"
    written(tmp_path / "msr_paraphrase_test.txt", tabs(header, "0|1|2|A|B").replace("\n", "\r\n"))
    (example,) = read("glue:MRPC", tmp_path, split="test")
    assert (example.text_pair, example.label) == ("B", "not_equivalent")


def test_the_diagnostic_set_with_its_labels_is_read_too(tmp_path: Path) -> None:
    header = "Lexical Semantics|Predicate-Argument Structure|Logic|Knowledge|Domain|Premise|Hypothesis|Label"
    path = written(tmp_path / "diagnostic-full.tsv", tabs(header, "||Negation||News|A.|B.|contradiction"))
    assert read("glue:AX", tmp_path, split="test") == [TextExample("A.", f"{path}:2", "B.", "contradiction")]


def test_the_short_lines_of_qqp_are_dropped_and_said(tmp_path: Path) -> None:
    header = "id|qid1|qid2|question1|question2|is_duplicate"
    rows = ["1|2|3|How?|Why?|1", '4|5|6|"Was he real?', '"|Is there evidence?|0', "7|8|9|Who?|What?|0"]
    path = written(tmp_path / "train.tsv", tabs(header, *rows))
    examples = read("glue:QQP", path)
    assert [one.id for one in examples] == ["1", "7"]
    assert [said.partition(" where")[0] for said in examples.skipped] == [f"{path}:3: 4 fields", f"{path}:4: 3 fields"]


@pytest.mark.parametrize(
    ("task", "rows", "line", "complaint"),
    [
        ("CoLA", ["gj04|1||Fine.", "gj04|2||Fine."], 2, "label '2' is not one of 0, 1"),
        ("CoLA", ["gj04|1||Fine.", "gj04|1|Fine."], 2, "3 fields where the table has 4"),
        ("CoLA", ["sentence|label"], 1, "2 fields where the table has 4"),
        ("SST-2", ["sentence|label", "a"], 2, "1 field where the table has 2"),
        (
            "RTE",
            ["index|sentence1|sentence2|label", "0|A|B|neutral"],
            2,
            "label 'neutral' is not one of not_entailment",
        ),
        ("STS-B", [f"{STS}|score", f"{STS_ROW}|high"], 2, "'high', not a number"),
        (
            "QNLI",
            ["index|sentence1|sentence2|label", "0|A|B|entailment"],
            1,
            "no column 'question'; the columns are: index",
        ),
    ],
)
def test_what_a_tasks_file_cannot_hold_is_refused(
    tmp_path: Path, task: str, rows: list[str], line: int, complaint: str
) -> None:
    path = written(tmp_path / "train.tsv", tabs(*rows))
    refused(f"{path}:{line}", complaint, f"glue:{task}", path)


def test_a_folder_without_the_parts_file_says_what_is_in_it(tmp_path: Path) -> None:
    written(tmp_path / "MNLI" / "train.tsv", "x")
    refused(
        f"{tmp_path / 'MNLI'}",
        r"no dev_matched.tsv for the split 'dev'; the folder contains: train.tsv",
        "glue:MNLI",
        tmp_path,
        split="dev",
    )
    refused(str(tmp_path), "no split 'tset'; did you mean 'test'", "glue:MNLI", tmp_path, split="tset")
