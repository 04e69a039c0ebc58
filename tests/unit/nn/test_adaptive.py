"""Adaptive embedding and softmax."""

from __future__ import annotations

from dataclasses import is_dataclass

import pytest
import torch
import torch.nn.functional as F

import qkv
from qkv import spec
from qkv.errors import InputError
from qkv.families import get_family
from qkv.generation import GenerationConfig, generate
from qkv.nn import Ragged, build
from qkv.objectives.chunked_cross_entropy import nll
from qkv.spec import serialization

FAMILY = get_family("transformer_xl")


def make_model(**settings):
    torch.manual_seed(0)
    sizes = {"d_model": 12, "heads": 2, "layers": 1, "d_ff": 16, "memory_length": 4, "cutoffs": (5, 9)}
    config = FAMILY.Config(**(sizes | settings))
    model = build(FAMILY.make_spec(config, target_vocab_size=20)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


@pytest.mark.parametrize(
    "settings", [{"cluster_divisor": 2}, {"embed_dim": 8}, {}], ids=["narrower", "projected", "plain"]
)
def test_the_loss_of_labels_is_that_of_the_log_probabilities_of_all_words(settings):
    model = make_model(**settings)
    features = torch.randn(40, 12, dtype=torch.float64)
    labels = torch.arange(40) % 20
    labels[7] = -100
    log_probs = model.head.compute_logits(features)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(40, dtype=torch.float64), atol=1e-6, rtol=0)
    expected = F.nll_loss(log_probs, labels, reduction="sum")
    torch.testing.assert_close(nll(model.head, features, labels), expected, atol=1e-5, rtol=1e-6)


def test_tied_tables_and_projections_are_parameters_of_the_embedding():
    model = make_model(cluster_divisor=2)
    tokens, softmax = model.target_embedding.tokens, model.head.adaptive_softmax
    assert all(ours.weight is theirs.weight for ours, theirs in zip(softmax.tables, tokens.tables, strict=True))
    assert [ours is theirs for ours, theirs in zip(softmax.projections, tokens.projections, strict=True)] == [
        False,
        True,
        True,
    ]


def test_words_of_every_cluster_are_generated_as_the_log_probabilities_say():
    model = make_model(cluster_divisor=2)
    source = Ragged.pack([torch.tensor([3, 12, 7])])
    tokens = generate(model, source, GenerationConfig(max_new_tokens=6))[0][0].tokens
    ids = [3, 12, 7]
    for token in tokens:
        assert int(model(Ragged.pack([torch.tensor(ids)]))[-1].argmax()) == token
        ids.append(token)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cutoffs": (9, 5)}, "cutoffs"),
        ({"cutoffs": (5, 20)}, "below the vocabulary of 20"),
        ({"cluster_divisor": 4, "embed_dim": 8}, "divisor"),
    ],
    ids=["unsorted", "too large", "too narrow"],
)
def test_clusters_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        make_model(**settings)


def test_a_saved_model_with_clusters_is_read_back_to_the_bit(tmp_path):
    model = make_model(cluster_divisor=2).float()
    qkv.save(qkv.ModelBundle(model), tmp_path / "saved")
    features = torch.randn(3, 12)
    loaded = qkv.load(tmp_path / "saved").model
    assert torch.equal(loaded.head.compute_logits(features), model.head.compute_logits(features))


def test_every_class_of_a_spec_can_be_written_and_read():
    classes = {value for value in vars(spec).values() if is_dataclass(value)}
    assert classes <= set(serialization._SPEC_CLASSES)
