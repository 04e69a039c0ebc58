"""CoNLL's columns and CoNLL-U: words, tags, and the line of what is wrong."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from task_files import json_lines, refused, tabs, written

from qkv.data.formats import read
from qkv.errors import InputError

CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP I-NP I-ORG
rejects VBZ I-VP O
German JJ I-NP I-MISC

-DOCSTART- -X- -X- O

Peter NNP I-NP I-PER
Bonn NNP I-NP B-PER
"""


def test_the_last_of_four_columns_is_the_tag_and_iob1_comes_out_as_bio(tmp_path: Path) -> None:
    path = written(tmp_path / "eng.train", CONLL_2003)
    first, second = read("conll", path)
    assert (first.words, first.tags) == (("EU", "rejects", "German"), ("B-ORG", "O", "B-MISC"))
    assert (first.text, first.word_starts, first.location) == ("EU rejects German", (0, 3, 11), f"{path}:3")
    assert (second.tags, second.location) == (("B-PER", "B-PER"), f"{path}:9")


def test_another_column_is_chosen_by_its_name_or_number(tmp_path: Path) -> None:
    path = written(tmp_path / "eng.train", CONLL_2003)
    assert read("conll", path, columns={"tag": "pos"})[0].tags == ("NNP", "VBZ", "JJ")
    assert read("conll", path, columns={"tag": "2"}) == read("conll", path, columns={"tag": "pos"})
    assert read("conll", path, columns={"tag": "chunk"})[0].tags == ("B-NP", "B-VP", "B-NP")
    refused(
        f"{path}:3",
        "no column 'lemma'; the columns are: word, pos, chunk, ner, 1 to 4",
        "conll",
        path,
        columns={"tag": "lemma"},
    )


@pytest.mark.parametrize("blank", ["", "\t", "  "])
def test_two_columns_between_tabs_with_any_blank_line(tmp_path: Path, blank: str) -> None:
    path = written(
        tmp_path / "wnut.conll", tabs("New|B-location", "York|I-location") + blank + "\r\n" + tabs("a b|O", "#|O")
    )
    examples = read("conll", path)
    assert [one.words for one in examples] == [("New", "York"), ("a b", "#")]
    assert examples[1].text == "a b #"
    assert examples[1].location == f"{path}:4"


def test_white_space_that_is_no_space_may_be_a_word(tmp_path: Path) -> None:
    assert read("conll", written(tmp_path / "a.conll", "a\u00a0b O\n"))[0].words == ("a\u00a0b",)


def test_words_alone_have_no_tags(tmp_path: Path) -> None:
    assert read("conll", written(tmp_path / "a.conll", "New\nYork\n"))[0].tags is None


def test_parts_of_speech_are_not_checked_as_chunks(tmp_path: Path) -> None:
    assert read("conll", written(tmp_path / "a.conll", "a DT\ndog NN\n"))[0].tags == ("DT", "NN")


BAD = [
    (["a|B-x", "b|I-y"], 5, "tag 'I-y' after 'B-x' is not BIO"),
    (["a|O", "b|I-x"], 5, "tag 'I-x' after 'O' is not BIO"),
    (["a|x"], 4, "tag 'x' is not BIO"),
    (["a|B-"], 4, "tag 'B-' is not BIO"),
    (["a|O", "b"], 5, "1 column where the file has 2"),
    (["a|O|O"], 4, "3 columns where the file has 2"),
    (["a|O", "|O"], 5, "an empty column"),
    (["é|O", "\udce9|O"], 5, "byte 1 of the line, 0xE9, is not UTF-8"),
]


@pytest.mark.parametrize(("rows", "line", "complaint"), BAD)
def test_a_bad_sentence_is_named_by_line_and_skipped_whole(
    tmp_path: Path, rows: list[str], line: int, complaint: str
) -> None:
    good = tabs("New|B-location", "York|I-location") + "\n"
    path = written(tmp_path / "a.conll", (good + tabs(*rows) + "\n" + good).encode("utf-8", "surrogateescape"))
    said = refused(f"{path}:{line}", complaint, "conll", path)
    examples = read("conll", path, skip_bad=True)
    assert [one.words for one in examples] == [("New", "York"), ("New", "York")]
    assert examples.skipped == [said]


def test_a_bad_first_sentence_does_not_speak_for_the_columns_of_all(tmp_path: Path) -> None:
    good = tabs("New|B-location", "York|I-location") + "\n"
    path = written(tmp_path / "a.conll", "John Smith B-PER\n\n" + good * 3)
    refused(f"{path}:1", "3 columns where the file has 2", "conll", path)
    examples = read("conll", path, skip_bad=True)
    assert (len(examples), len(examples.skipped)) == (3, 1)


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "a.conll")
    writer = threading.Thread(target=pipe.write_text, args=("New B-x\nYork I-x\n\nis O\n",))
    writer.start()
    assert [one.words for one in read("conll", pipe)] == [("New", "York"), ("is",)]
    writer.join()


def test_bioes_is_checked_as_such_and_kept(tmp_path: Path) -> None:
    good = tabs("New|B-x", "York|E-x", "is|O", "big|S-y")
    assert read("conll", written(tmp_path / "a.conll", good))[0].tags == ("B-x", "E-x", "O", "S-y")
    path = written(tmp_path / "b.conll", good + "\n" + tabs("New|B-x", "is|O"))
    refused(f"{path}:7", "tag 'O' after 'B-x' is not BIOES", "conll", path)
    path = written(tmp_path / "c.conll", good + "\n" + tabs("New|B-x"))
    refused(f"{path}:6", "tag 'B-x' at the end of a sentence is not BIOES", "conll", path)


def test_a_scheme_that_is_named_is_held_to(tmp_path: Path) -> None:
    path = written(tmp_path / "a.conll", tabs("Bonn|I-x"))
    assert read("conll", path)[0].tags == ("B-x",)  # as IOB1
    refused(f"{path}:1", "tag 'I-x' after 'O' is not BIO", "conll", path, scheme="bio")
    assert read("conll", path, scheme="none")[0].tags == ("I-x",)
    assert read("conll", path, scheme=None)[0].tags == ("I-x",)  # what --reader-option scheme=none says
    with pytest.raises(InputError, match="tag scheme 'bioe' is unknown; did you mean 'BIOES'"):
        read("conll", path, scheme="bioe", skip_bad=True)


def test_json_lines_of_words_and_tags_are_read_alike(tmp_path: Path) -> None:
    path = json_lines(
        tmp_path / "a.jsonl", {"words": ["New", "York"], "ner": ["I-x", "I-x"]}, {"words": ["a"], "ner": ["O"]}
    )
    assert [one.tags for one in read("words", path, columns={"tags": "ner"})] == [("B-x", "I-x"), ("O",)]
    assert read("words", path, columns={"tags": None})[0].tags is None
    path = json_lines(tmp_path / "b.jsonl", {"words": ["a", "b"], "tags": ["O"]})
    refused(f"{path}:1", "2 words have 1 tags", "words", path)


# CoNLL-U

EWT = """# newdoc id = weblog-1
# sent_id = weblog-1-0001
# text = She doesn't want (it).
1|She|she|PRON|PRP|Case=Nom|4|nsubj|4:nsubj|_
2-3|doesn't|_|_|_|_|_|_|_|_
2|does|do|AUX|VBZ|Mood=Ind|4|aux|4:aux|_
3|n't|not|PART|RB|_|4|advmod|4:advmod|_
4|want|want|VERB|VB|VerbForm=Inf|0|root|0:root|_
4.1|seen|see|VERB|VBN|_|_|_|0:root|CopyOf=4
5|(|(|PUNCT|-LRB-|_|6|punct|6:punct|SpaceAfter=No
6|it|it|PRON|PRP|_|4|obj|4:obj|SpaceAfter=No
7|)|)|PUNCT|-RRB-|_|6|punct|6:punct|SpaceAfter=No
8|.|.|PUNCT|.|_|4|punct|4:punct|_"""


def test_ranges_empty_nodes_and_comments_are_understood(tmp_path: Path) -> None:
    path = written(tmp_path / "en_ewt-ud-train.conllu", tabs(*EWT.split("\n")) + "\n")
    (sentence,) = read("conllu", tmp_path, split="train")
    assert sentence.words == ("She", "does", "n't", "want", "(", "it", ")", ".")
    assert sentence.tags == ("PRON", "AUX", "PART", "VERB", "PUNCT", "PRON", "PUNCT", "PUNCT")
    assert sentence.text == "She doesn't want (it)."
    assert [
        sentence.text[start:][: len(word)] for start, word in zip(sentence.word_starts, sentence.words, strict=True)
    ] == list(sentence.words)
    assert (sentence.location, sentence.id) == (f"{path}:4", "weblog-1-0001")


@pytest.mark.parametrize(
    ("tag", "second"), [("xpos", "VBZ"), ("lemma", "do"), ("feats", "Mood=Ind"), ("deprel", "aux")]
)
def test_any_column_may_be_the_tag(tmp_path: Path, tag: str, second: str) -> None:
    path = written(tmp_path / "a.conllu", tabs(*EWT.split("\n")))
    tags = read("conllu", path, columns={"tag": tag})[0].tags
    assert tags is not None
    assert tags[1] == second


def word(number: str, form: str, misc: str = "_", upos: str = "X") -> str:
    return f"{number}|{form}|_|{upos}|_|_|_|_|_|{misc}"


def test_a_range_whose_words_are_not_what_is_written_is_written_apart(tmp_path: Path) -> None:
    rows = [word("1-2", "zum", "SpaceAfter=No"), word("1", "zu"), word("2", "dem"), word("3", ".")]
    assert read("conllu", written(tmp_path / "a.conllu", tabs(*rows)))[0].text == "zu dem."


def test_a_column_without_values_is_no_tags(tmp_path: Path) -> None:
    path = written(tmp_path / "a.conllu", tabs(word("1", "a", upos="_"), word("2", "b", upos="_")))
    assert read("conllu", path)[0].tags is None


@pytest.mark.parametrize(
    ("rows", "line", "complaint"),
    [
        (["1|a|b"], 3, "3 columns where CoNLL-U has 10"),
        ([word("x", "a")], 3, "id 'x' is not a word"),
        ([word("1" * 5000, "a")], 3, "is not a word"),
        ([word("1", "a"), word("3", "b")], 4, "word 3 where 2 is expected"),
        ([word("1", "a"), word("1-4", "b")], 4, "the range 1-4 is outside the 1 words"),
        ([word("1", " ")], 3, "the word is empty"),
        (["# ok", word("1", "\udcff")], 4, "byte 3 of the line, 0xFF, is not UTF-8"),
    ],
)
def test_a_bad_sentence_of_conllu_is_named_by_line(tmp_path: Path, rows: list[str], line: int, complaint: str) -> None:
    content = tabs(word("1", "good")) + "\n" + tabs(*rows)
    path = written(tmp_path / "a.conllu", content.encode("utf-8", "surrogateescape"))
    said = refused(f"{path}:{line}", complaint, "conllu", path)
    assert read("conllu", path, skip_bad=True).skipped == [said]


def test_a_column_that_conllu_has_not_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.conllu", tabs(word("1", "a")))
    refused(
        str(path),
        "no column 'pos'; the columns are: id, form, lemma, upos, xpos",
        "conllu",
        path,
        columns={"tag": "pos"},
        skip_bad=True,
    )
