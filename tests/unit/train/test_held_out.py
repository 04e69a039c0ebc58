"""Which examples are held out: what belongs together stays together, and several files are one set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkv.errors import InputError
from qkv.recipe.parse import parse_recipe
from qkv.recipe.schema import FinetuneRecipe, PairData, PairDataset, TaskData
from qkv.train.workloads import finetuning, pair_data
from qkv.train.workloads.task_data import read_split


def articles(folder: Path) -> str:
    """Twelve articles of three paragraphs with three questions each."""
    told = []
    for article in range(12):
        paragraphs = []
        for paragraph in range(3):
            context = f"Article {article} has a paragraph {paragraph} of its own."
            answers = [{"text": "Article", "answer_start": 0}]
            asked = [{"id": f"{article}.{paragraph}.{n}", "question": f"What {n}?", "answers": answers} for n in "abc"]
            paragraphs.append({"context": context, "qas": asked})
        told.append({"title": f"Title {article}", "paragraphs": paragraphs})
    (folder / "squad.json").write_text(json.dumps({"data": told}), encoding="utf-8")
    return str(folder / "squad.json")


def contexts_and_titles(data: TaskData) -> dict[str, tuple[set[str], set[str]]]:
    parts = {part: read_split(data, part) for part in ("train", "valid")}
    assert sum(map(len, parts.values())) == 108
    assert all(parts.values())
    return {part: ({one.context for one in some}, {one.title for one in some}) for part, some in parts.items()}


def test_no_question_of_training_is_about_a_context_of_validation(tmp_path: Path) -> None:
    parts = contexts_and_titles(TaskData(format="squad", train=articles(tmp_path), hold_out={"valid": 0.3}))
    assert not parts["train"][0] & parts["valid"][0]
    assert parts["train"][1] & parts["valid"][1]  # but articles may be cut in two


def test_whole_articles_are_held_out_where_titles_go_together(tmp_path: Path) -> None:
    data = TaskData(format="squad", train=articles(tmp_path), hold_out={"valid": 0.3}, group_by="title")
    parts = contexts_and_titles(data)
    assert not parts["train"][1] & parts["valid"][1]


def test_a_fold_keeps_together_what_goes_together(tmp_path: Path) -> None:
    data = TaskData(format="squad", train=articles(tmp_path), fold=[1, 3], group_by="title")
    parts = contexts_and_titles(data)
    assert not parts["train"][1] & parts["valid"][1]


def test_what_goes_together_has_to_be_there(tmp_path: Path) -> None:
    data = TaskData(format="squad", train=articles(tmp_path), hold_out={"valid": 0.3}, group_by="author")
    with pytest.raises(
        InputError, match=r"data.group_by: .*squad.json: question 0.0.a has no 'author'; name a field that all"
    ):
        read_split(data, "train")


def test_pairs_of_several_files_are_one_set(tmp_path: Path) -> None:
    files = []
    for number in range(2):
        path = tmp_path / f"{number}.tsv"
        path.write_text("".join(f"{number}{n}\tx\n" for n in range(50)), encoding="utf-8")
        files.append(str(path))
    data = PairData(format="tsv", train=files, hold_out={"valid": 0.3})
    train, valid = (pair_data.read_pair_split(data, part) for part in ("train", "valid"))
    assert len(train) + len(valid) == 100
    for part in (train, valid):
        assert {Path(pair.location.partition(":")[0]).name for pair in part} == {"0.tsv", "1.tsv"}


def test_aligned_pairs_take_two_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"aligned takes two files, \[source, target\], not 3"):
        pair_data.read_pair_split(PairData(format="aligned", train=[str(tmp_path)] * 3), "train")


def test_a_share_that_takes_nothing_is_said(tmp_path: Path) -> None:
    raw = {"name": "x", "task": "question_answering", "model": {"init_from": "models/none"}, "train": {"max_steps": 1}}
    raw["data"] = {"format": "squad", "train": articles(tmp_path), "hold_out": {"valid": 0.001}, "group_by": "title"}
    recipe = parse_recipe(raw, "here")
    assert isinstance(recipe, FinetuneRecipe)
    with pytest.raises(InputError, match=r"none of the 108 was held out by their title; raise data\.hold_out\.valid"):
        finetuning.FinetuneWorkload.build(recipe, tmp_path)


def test_the_set_of_a_mix_that_lacks_a_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\n", encoding="utf-8")
    mix = [PairDataset(format="tsv", train=str(tmp_path / "a.tsv"), prefix="upper: ")]
    with pytest.raises(InputError, match="the recipe's dataset 'upper' has no 'test' data"):
        pair_data.read_pair_split(PairData(datasets=mix), "test")
