"""Deck "(Even More) Language Modeling: Attention, and Building Blocks of Transformers"."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from qkv.generation import token_log_probs
from qkv.nn import Ragged

sys.path.append(str(Path(__file__).parents[1] / "unit" / "generation"))
from writers import Written, sources, tiny

# the slide's eight columns: each word's probability at its step, whatever was read before
TABLES = [
    {"The": 0.2, "gray": 0.01},
    {"black": 0.2, "gray": 0.12},
    {"fluffy": 0.2, "gray": 0.01},
    {"dog": 0.2, "cat": 0.19},
    {"meowed": 0.3, "purred": 0.2},
    {"very": 0.2, "lots": 0.1},
    {"loudly": 0.2, "softly": 0.01},
    {"EOS": 0.3, "and": 0.1},
]
REFERENCE = ["The", "gray", "fluffy", "cat", "meowed", "very", "loudly", "EOS"]


def test_the_worked_example_sums_the_references_log_probabilities():
    """Slide "Teacher Forcing vs. No Teacher Forcing": log.2 + log.12 + log.2 + log.19 + log.3 + log.2 + log.2 + …

    Without a teacher the likeliest words are read ("The black fluffy dog meowed …"); "gray" and "cat" are scored all
    the same. The slide's table gives EOS .3 and its sum says log .2; the table is a distribution, so we follow it.
    """
    words = sorted({word for table in TABLES for word in table} - {"EOS"})
    ids = {word: 4 + i for i, word in enumerate(words)} | {"EOS": 3}
    others = range(4 + len(words), 24 + len(words))  # the slide's "…": the rest of the vocabulary
    said: tuple[int, ...] = ()
    told = {}
    for table in TABLES:
        rest = (1 - sum(table.values())) / len(others)
        told[said] = {ids[word]: p for word, p in table.items()} | dict.fromkeys(others, rest)
        said = (*said, ids[max(table, key=table.get)])
    model = Written(told, 24 + len(words))
    labels = torch.tensor([ids[word] for word in REFERENCE])
    target = Ragged.pack([torch.tensor([2, *labels[:-1]])])
    found = token_log_probs(model, sources(3), target, labels, free_running=True)
    shown = [0.2, 0.12, 0.2, 0.19, 0.3, 0.2, 0.2, 0.3]
    assert found.values.exp().tolist() == pytest.approx(shown, abs=1e-5)
    assert -found.values.mean().item() == pytest.approx(1.5783, abs=1e-4)


def test_without_a_teacher_the_model_reads_its_own_words_and_the_reference_is_scored():
    """Slide "Teacher Forcing vs. No Teacher Forcing": "black" and "dog" are fed back, "gray" and "cat" are scored."""
    model = tiny("rnn", seed=8)
    source, labels = sources(4), torch.tensor([7, 8, 9, 3])
    target = Ragged.pack([torch.tensor([2, 7, 8, 9])])
    found = token_log_probs(model, source, target, labels, free_running=True)
    said, wanted = [2], []
    with torch.no_grad():
        for label in labels:
            log_probabilities = torch.log_softmax(model(source, Ragged.pack([torch.tensor(said)]))[-1], -1)
            wanted.append(float(log_probabilities[label]))
            said.append(int(log_probabilities.argmax()))
    assert found.values.tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_model_that_says_the_reference_itself_needs_no_teacher():
    """Slide "Teacher Forcing vs. No Teacher Forcing": the two differ only where the model would have said otherwise."""
    model, source = tiny("transformer", seed=1), sources(5)
    said = [2]
    with torch.no_grad():
        for _ in range(4):
            said.append(int(model(source, Ragged.pack([torch.tensor(said)]))[-1].argmax()))
    target, labels = Ragged.pack([torch.tensor(said[:-1])]), torch.tensor(said[1:])
    taught, free = (token_log_probs(model, source, target, labels, free_running=free).values for free in (False, True))
    torch.testing.assert_close(taught, free, rtol=1e-4, atol=1e-5)
