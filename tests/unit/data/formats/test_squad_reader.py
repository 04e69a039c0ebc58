"""SQuAD 1.1 and 2.0, and flat questions: every answer stands where it says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from task_files import json_lines, refused, written

from qkv.data.examples import Answer, QAExample
from qkv.data.formats import read

CONTEXT = "Ada wrote the first program. Ada wrote it in 1843, in “Note G”."


def squad(*asked: dict[str, Any], context: str = CONTEXT, **version: str) -> str:
    return json.dumps({**version, "data": [{"title": "Ada", "paragraphs": [{"context": context, "qas": list(asked)}]}]})


def question(id: str, *answers: tuple[str, int], **more: Any) -> dict[str, Any]:
    listed = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": id, "question": "Who?", "answers": listed, **more}


WHO = question("q1", ("Ada", 0), ("Ada", 29))


def test_version_1_has_answers_with_their_offsets(tmp_path: Path) -> None:
    path = written(tmp_path / "train-v1.1.json.gz", gzip.compress(squad(WHO, version="1.1").encode()))
    right = (Answer("Ada", 0), Answer("Ada", 29))
    expected = QAExample("q1", "Who?", CONTEXT, right, f"{path}: question q1", answerable=True, title="Ada")
    assert read("squad", path) == [expected]
    assert read("squad", tmp_path, split="train") == [expected]


def test_version_2_marks_what_has_no_answer(tmp_path: Path) -> None:
    none = question("q2", is_impossible=True, plausible_answers=[{"text": "Ada", "answer_start": 0}])
    path = written(tmp_path / "dev.json", squad({**WHO, "is_impossible": False}, none, version="v2.0"))
    assert [(one.answerable, len(one.answers)) for one in read("squad", path)] == [(True, 2), (False, 0)]


def test_a_test_set_does_not_say(tmp_path: Path) -> None:
    path = written(tmp_path / "test.json", squad({"id": "q", "question": "Who?"}))
    assert [(one.answerable, one.answers) for one in read("squad", path)] == [(None, ())]


BAD = [
    (question("bad", ("Ada", 2)), "answer 'Ada' is not at character 2 of its context; the nearest is at 0"),
    (question("bad", ("Ada", 20)), "is not at character 20 of its context; the nearest is at 29"),
    (question("bad", ("Eve", 2)), "nowhere in the context"),
    (question("bad", ("Ada", 62)), "answer 62–65 is not inside its text: the text has 63 characters"),
    (question("bad", ("Ada", -1)), "answer -1–2 is not inside its text"),
    (question("bad", ("", 3)), "answer 3–3 is not inside its text: it is empty"),
    (question("bad"), "has no answer and is not marked impossible"),
    (question("bad", ("Ada", 0), is_impossible=True), "has answers and is marked impossible"),
    (question("bad", ("Ada", 0), is_impossible="no"), "is_impossible is 'no'"),
    ({"id": "bad", "answers": []}, "no field 'question'"),
    ({"id": "bad", "question": "Who?", "answers": [{"text": "Ada"}]}, "no field 'answer_start'"),
]


@pytest.mark.parametrize(("asked", "complaint"), BAD)
def test_a_bad_question_is_named_by_its_id_and_can_be_skipped(
    tmp_path: Path, asked: dict[str, Any], complaint: str
) -> None:
    path = written(tmp_path / "a.json", squad(WHO, asked, question("q3", ("1843", 45))))
    said = refused(f"{path}: question bad", complaint, "squad", path)
    examples = read("squad", path, skip_bad=True)
    assert [one.id for one in examples] == ["q1", "q3"]
    assert examples.skipped == [said]


def test_a_bad_paragraph_is_skipped_alone(tmp_path: Path) -> None:
    paragraphs = [{"context": 3, "qas": []}, {"context": CONTEXT, "qas": [WHO]}]
    path = written(tmp_path / "a.json", json.dumps({"data": [{}, {"paragraphs": paragraphs}]}))
    examples = read("squad", path, skip_bad=True)
    assert [one.id for one in examples] == ["q1"]
    assert [said.partition(": ")[2].partition(":")[0] for said in examples.skipped] == [
        "article 1",
        "article 2, paragraph 1",
    ]


@pytest.mark.parametrize(
    ("content", "line", "complaint"),
    [
        ('{"data":\n [{,}]}', ", line 2, column 4", "not JSON"),
        ("[]", "", "not a SQuAD file"),
        ('{"version": "1.1"}', "", "not a SQuAD file"),
        ("", "", "empty, no JSON"),
        (b'{"data":\n ["\xff"]}', ", line 2", "byte 0xFF is not UTF-8"),
        ("[" * 100_000, "", "too deeply"),
    ],
)
def test_a_file_that_is_not_squad_is_never_skipped(
    tmp_path: Path, content: str | bytes, line: str, complaint: str
) -> None:
    path = written(tmp_path / "a.json", content)
    refused(f"{path}{line}", complaint, "squad", path, skip_bad=True)


def test_flat_questions_are_read_in_both_their_shapes(tmp_path: Path) -> None:
    base = {"question": "Who?", "context": CONTEXT}
    path = json_lines(
        tmp_path / "mine.jsonl",
        {**base, "id": 7, "answers": {"text": ["Ada"], "answer_start": [29]}},
        {**base, "answers": [{"text": "1843", "answer_start": 45}]},
        {**base, "answers": {"text": [], "answer_start": []}},
    )
    found = [(one.id, one.answers, one.answerable) for one in read("questions", path)]
    assert found == [("7", (Answer("Ada", 29),), True), ("2", (Answer("1843", 45),), True), ("3", (), False)]
    assert read("questions", path, columns={"answers": None})[0].answerable is None


def test_flat_questions_with_wrong_offsets_are_named_by_line(tmp_path: Path) -> None:
    base = {"question": "Who?", "context": CONTEXT}
    path = json_lines(
        tmp_path / "mine.jsonl",
        {**base, "answers": {"text": ["Ada"], "answer_start": [0]}},
        {**base, "answers": {"text": ["Ada"], "answer_start": [1]}},
        {**base, "answers": {"text": ["Ada"], "answer_start": []}},
    )
    refused(f"{path}:2", "is not at character 1 of its context", "questions", path)
    skipped = read("questions", path, skip_bad=True).skipped
    assert [said.partition(": ")[0] for said in skipped] == [f"{path}:2", f"{path}:3"]
