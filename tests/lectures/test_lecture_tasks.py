"""The table of heads, what is tagged in the worked sentence, and how predictions are scored."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from qkv.metrics.classification import Accuracy, TokenAccuracy
from qkv.metrics.entities import EntityF1, get_entities
from qkv.metrics.rouge import Rouge
from qkv.metrics.sacrebleu import Bleu
from qkv.nn import Ragged, build
from qkv.spec import Attention, Block, Embedding, FeedForward, Head, Model, TransformerStack

WIDTH = 8
WAFFLES = "British Left Waffles on Falkland Islands"


def logits_of(head: Head) -> torch.Tensor:
    """What a small encoder says under a head of two sequences, of three tokens and of four."""
    block = Block(self_attention=Attention(query_dim=WIDTH, heads=2), feedforward=FeedForward(d_model=WIDTH, d_ff=16))
    body = Embedding(vocab_size=20, d_model=WIDTH, max_length=8)
    model = build(
        Model(family="bert", source_embedding=body, encoder=TransformerStack(block=block, num_layers=1), head=head)
    )
    found = model(Ragged.from_lengths(torch.arange(7), [3, 4]))
    return found.values if isinstance(found, Ragged) else found


@pytest.mark.parametrize(
    ("kind", "outputs", "shape"),
    [
        pytest.param("lm", 20, (7, 20), id="Language Modeling and Masked LM: x_n in V"),
        pytest.param("sequence", 3, (2, 3), id="Sequence Classification: y in C"),
        pytest.param("token", 3, (7, 3), id="Token Classification: y_1:N in C^N"),
        pytest.param("span", 2, (7, 2), id="Question Answering: y span [1 : N], where it begins and ends"),
        pytest.param("choice", 1, (2, 1), id="Multiple Choice: y in X, a score for each"),
    ],
)
def test_a_head_gives_what_its_row_of_the_table_has_as_output(kind: str, outputs: int, shape: tuple[int, ...]) -> None:
    """Language Modeling (CMSC 473/673), the table of heads (Wolf et al. 2020, figure 2), column "Output"."""
    head = Head(kind=kind, d_model=WIDTH, num_outputs=outputs)  # type: ignore[arg-type]
    assert logits_of(head).shape == shape


def test_the_worked_sentence_has_two_named_entities() -> None:
    """Language Modeling (CMSC 473/673), "Example 2: Named Entity Recognition": ORG ORG Other Other LOC LOC."""
    words = WAFFLES.split()
    tags = ["B-ORG", "I-ORG", "O", "O", "B-LOC", "I-LOC"]
    found = [(one.type, " ".join(words[one.start : one.end])) for one in get_entities(tags)]
    assert found == [("ORG", "British Left"), ("LOC", "Falkland Islands")]


def test_a_metric_per_token_and_one_per_sequence() -> None:
    """Language Modeling (CMSC 473/673), "How to evaluate sequence prediction": "For every token, did you make the
    correct prediction?" and "For every sequence, was the entire sequence correct?"."""
    right = [["Noun", "Verb", "Noun", "Prep", "Noun", "Noun"], ["Noun", "Verb"]]
    said = [["Noun", "Noun", "Noun", "Prep", "Noun", "Noun"], ["Noun", "Verb"]]
    assert TokenAccuracy()(said, right) == {"accuracy": pytest.approx(7 / 8)}
    assert Accuracy()(said, right) == {"accuracy": pytest.approx(1 / 2)}


def test_an_entity_counts_as_a_whole() -> None:
    """Language Modeling (CMSC 473/673), "How to evaluate sequence prediction": precision, recall, F1; of entities, half
    of "British Left" is none of it."""
    right, said = [["B-ORG", "I-ORG", "O", "O", "B-LOC", "I-LOC"]], [["B-ORG", "O", "O", "O", "B-LOC", "I-LOC"]]
    assert EntityF1(("LOC", "ORG"))(said, right)["f1_micro"] == pytest.approx(1 / 2)
    assert TokenAccuracy()(said, right)["accuracy"] == pytest.approx(5 / 6)


CORPUS = ["the cat sat on the mat", "dogs bark"], [["the cat sat on a mat"], ["dogs bark"]]


def test_corpus_bleu_is_micro_and_sentence_bleu_macro() -> None:
    """Language Modeling (CMSC 473/673), "A note on {BLEU, ROUGE}": "corpus" → micro, "sentence" → macro: the counts of
    all sentences added up are not the mean of the sentences' own figures."""
    said, right = CORPUS
    corpus = Bleu()(said, right)["bleu"]
    sentences = [Bleu(effective_order=True)([a], [b])["bleu"] for a, b in zip(said, right, strict=True)]
    counted = Bleu().statistics(said, right).sum(0)
    assert Bleu().score(counted)["bleu"] == pytest.approx(corpus)
    assert abs(corpus - statistics.fmean(sentences)) > 1


def test_rouge_is_the_mean_of_its_sentences() -> None:
    """Language Modeling (CMSC 473/673), "A note on {BLEU, ROUGE}": ROUGE as everybody reports it is macro."""
    said, right = CORPUS
    each = [Rouge()([a], [b])["rouge1"] for a, b in zip(said, right, strict=True)]
    assert Rouge()(said, right)["rouge1"] == pytest.approx(statistics.fmean(each))


def test_rouge_is_recall_based_where_bleu_is_precision_based() -> None:
    """Language Modeling (CMSC 473/673), "Automatic Eval": a hypothesis of two right words out of six is precise and
    recalls little; BLEU needs its brevity penalty to see that."""
    short, whole = "the cat", "the cat sat on a mat"
    assert Rouge()([short], [[whole]])["rouge1_recall"] == pytest.approx(2 / 6)
    assert Rouge()([short], [[whole]])["rouge1_precision"] == 1
    assert Bleu(effective_order=True)([short], [[whole]])["bleu"] == pytest.approx(100 * math.exp(1 - 6 / 2))
