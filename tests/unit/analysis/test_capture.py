"""Capture: every row sums to one, nothing else changes, and nothing is left behind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from qkv import nn, spec
from qkv.analysis import capture_attention
from qkv.analysis.capture import named_attentions
from qkv.errors import InputError
from qkv.families import get_family
from qkv.nn import Ragged

SOURCES, TARGETS = [5, 2, 7], [3, 6, 1]  # neither sorted nor alike, so that order and cropping show
TRANSFORMER: dict[str, Any] = {"d_model": 16, "heads": 4, "layers": 2, "d_ff": 24, "dropout": 0.0}
RNN: dict[str, Any] = {"d_model": 12, "hidden_size": 16, "heads": 2, "dropout": 0.0}
SCORES = ["dot", "scaled_dot", "bilinear", "additive", "mlp"]
MODELS = [("transformer", TRANSFORMER), *(("rnn", RNN | {"attention": score}) for score in SCORES)]
every_model = pytest.mark.parametrize(("name", "shape"), MODELS, ids=lambda v: v if isinstance(v, str) else None)


def make(name: str, shape: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    f = get_family(name)
    first = next(iter(f.PRESETS.values()))
    return nn.build(f.make_spec(dataclasses.replace(first, **shape), source_vocab_size=20, target_vocab_size=30))


def batch() -> tuple[Ragged, Ragged]:
    torch.manual_seed(1)
    pack = Ragged.pack
    return pack(torch.randint(4, 20, (n,)) for n in SOURCES), pack(torch.randint(4, 30, (n,)) for n in TARGETS)


@every_model
def test_rows_sum_to_one_and_maps_are_cropped_in_batch_order(name: str, shape: dict[str, Any]) -> None:
    model = make(name, shape)
    with capture_attention(model) as maps:
        model(*batch())
    assert maps
    for layer, sequences in maps.items():
        queries = SOURCES if layer.startswith("encoder") else TARGETS
        keys = (
            TARGETS if layer.startswith("decoder") and name != "rnn" and layer.endswith("self_attention") else SOURCES
        )
        assert [tuple(s.shape) for s in sequences] == [
            (shape["heads"], n, m) for n, m in zip(queries, keys, strict=True)
        ]
        for weights in sequences:
            assert weights.dtype == torch.float32
            assert not weights.requires_grad
            assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:2]), atol=1e-5)


@every_model
def test_capture_changes_no_output_and_gradients_flow(name: str, shape: dict[str, Any]) -> None:
    model = make(name, shape)
    source, target = batch()
    plain = model(source, target)
    plain.square().sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with capture_attention(model):
        watched = model(source, target)
    assert torch.allclose(watched, plain, atol=1e-6)
    watched.square().sum().backward()
    for n, p in model.named_parameters():
        assert torch.allclose(p.grad, gradients[n], atol=1e-4), n


@every_model
def test_a_sentences_map_does_not_depend_on_its_batch_mates(name: str, shape: dict[str, Any]) -> None:
    model = make(name, shape)
    source, target = batch()
    with capture_attention(model) as together:
        model(source, target)
    for i, (s, t) in enumerate(zip(source.sequences(), target.sequences(), strict=True)):
        with capture_attention(model) as alone:
            model(Ragged.pack([s]), Ragged.pack([t]))
        for layer in together:
            assert torch.allclose(together[layer][i], alone[layer][0], atol=1e-6), layer


@every_model
def test_stepping_gives_the_map_of_the_whole_forward(name: str, shape: dict[str, Any]) -> None:
    model = make(name, shape).eval()
    source = batch()[0]
    target = torch.randint(4, 30, (len(SOURCES), 4))
    with torch.inference_mode(), capture_attention(model) as whole:
        model(source, Ragged.pack(target))
    with torch.inference_mode(), capture_attention(model) as stepped:
        state = model.init_state(model.encode(source), num_rows=len(SOURCES), max_length=4)
        for tokens in target.T:
            _, state = model.step(tokens, state)
    for layer in whole:
        for a, b in zip(whole[layer], stepped[layer], strict=True):
            assert torch.allclose(a, b, atol=1e-5), layer  # also where keys came one by one


def test_beams_of_a_sentence_are_queries_side_by_side() -> None:
    model = make("rnn", RNN).eval()
    source = batch()[0]
    tokens = torch.tensor([4, 5, 6, 7, 8, 9])
    with torch.inference_mode(), capture_attention(model) as maps:
        state = model.init_state(model.encode(source), num_rows=6, max_length=4)
        for _ in range(3):
            _, state = model.step(tokens, state)
    assert [tuple(m.shape) for m in maps["decoder.attention"]] == [(2, 3 * 2, m) for m in SOURCES]


@every_model
def test_the_maps_are_those_of_the_last_batch(name: str, shape: dict[str, Any]) -> None:
    model = make(name, shape)
    source, target = batch()
    other = Ragged.pack([torch.tensor([7, 8])]), Ragged.pack([torch.tensor([9])])
    with capture_attention(model) as once:
        model(source, target)
    with capture_attention(model) as twice:
        model(*other)
        model(source, target)
    for layer in once:
        for a, b in zip(once[layer], twice[layer], strict=True):
            assert torch.equal(a, b)


def test_encoding_the_next_sentences_drops_what_was_stepped_before() -> None:
    model = make("rnn", RNN).eval()
    with torch.inference_mode(), capture_attention(model) as maps:
        for _ in range(2):
            state = model.init_state(model.encode(batch()[0]), num_rows=3, max_length=4)
            model.step(torch.tensor([4, 5, 6]), state)
        assert [m.shape[1] for m in maps["decoder.attention"]] == [1, 1, 1]


def test_decoding_anew_from_one_encoding_keeps_the_encoders_maps() -> None:
    model = make("transformer", TRANSFORMER)
    source, target = batch()
    with capture_attention(model) as maps:
        memory = model.encode(source)
        for _ in range(2):
            model.decode(memory, target)
    assert [m.shape[1] for m in maps["encoder.0.self_attention"]] == SOURCES
    assert [m.shape[1] for m in maps["decoder.0.cross_attention"]] == TARGETS


def test_clear_forgets() -> None:
    model = make("rnn", RNN)
    with capture_attention(model) as maps:
        model(*batch())
        maps.clear()
    assert maps["decoder.attention"] == []


def test_names_are_those_of_the_parts() -> None:
    blocks = [f"decoder.{i}.{part}" for i in range(2) for part in ("self_attention", "cross_attention")]
    assert list(named_attentions(make("transformer", TRANSFORMER))) == [
        "encoder.0.self_attention",
        "encoder.1.self_attention",
        *blocks,
    ]
    assert list(named_attentions(make("rnn", RNN))) == ["decoder.attention"]


@pytest.mark.parametrize(
    "layers",
    ["decoder.*.cross_attention", ["decoder.0.cross_attention", "decoder.1.cross_attention"], ("*.cross_attention",)],
)
def test_only_the_layers_that_are_asked_for_are_watched(layers: Any) -> None:
    model = make("transformer", TRANSFORMER)
    with capture_attention(model, layers=layers) as maps:
        watched = {name for name, module in named_attentions(model).items() if module.hook is not None}
        model(*batch())
    assert set(maps) == watched == {"decoder.0.cross_attention", "decoder.1.cross_attention"}


def test_only_the_heads_that_are_asked_for_are_kept() -> None:
    model = make("transformer", TRANSFORMER)
    with capture_attention(model) as every, capture_attention(model, heads=[3, 1]) as some:
        model(*batch())
    for layer in every:
        for a, b in zip(every[layer], some[layer], strict=True):
            assert torch.equal(a[[3, 1]], b)


def test_an_unknown_layer_is_refused_and_the_nearest_named() -> None:
    model = make("transformer", TRANSFORMER)
    with pytest.raises(InputError, match=r"'decoder\.0\.cross_attentionn'; did you mean 'decoder\.0\.cross_attention'"):
        capture_attention(model, layers="decoder.0.cross_attentionn").__enter__()
    none = make("rnn", RNN | {"attention": "none"})
    with pytest.raises(InputError, match="no attention"):
        capture_attention(none, layers="decoder.attention").__enter__()
    assert all(module.hook is None for module in named_attentions(model).values())


@pytest.mark.parametrize("heads", [[4], [-1], []])
def test_a_head_that_is_not_there_is_refused(heads: list[int]) -> None:
    with pytest.raises(InputError, match="heads"):
        capture_attention(make("transformer", TRANSFORMER), heads=heads).__enter__()


def test_a_model_without_attention_has_no_maps() -> None:
    model = make("rnn", RNN | {"attention": "none"})
    with capture_attention(model) as maps:
        model(*batch())
    assert len(maps) == 0


def stop(*_: Any) -> None:
    raise RuntimeError("stop")


def test_what_was_there_is_back_after_an_exception() -> None:
    model = make("transformer", TRANSFORMER)
    seen: list[int] = []
    watched = model.decoder.blocks[0].cross_attention
    watched.hook = earlier = lambda weights, *_: seen.append(len(weights))
    model.head.register_forward_hook(stop)
    with pytest.raises(RuntimeError, match="stop"), capture_attention(model):
        model(*batch())
    assert watched.hook is earlier
    assert seen == [3]  # who watched before went on watching
    assert [m.hook for m in named_attentions(model).values() if m is not watched] == [None] * 5
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_map_holds_no_more_memory_than_it_shows() -> None:
    model = make("transformer", TRANSFORMER)
    with capture_attention(model) as maps:
        model(*batch())
    short = maps["encoder.0.self_attention"][1]
    assert short.untyped_storage().nbytes() == short.numel() * 4


def test_a_classifiers_learned_query_and_a_language_model_are_watched_too() -> None:
    s = make("transformer", TRANSFORMER).spec
    pool = spec.Attention(query_dim=16, score_fn="additive", use_projections=False)
    head = spec.Head(kind="sequence", d_model=16, num_outputs=3, pool=pool)
    classifier = nn.build(spec.Model(family="test", encoder=s.encoder, source_embedding=s.source_embedding, head=head))
    with capture_attention(classifier) as maps:
        classifier(batch()[0])
    assert [tuple(m.shape) for m in maps["head.pool.attention"]] == [(1, 1, m) for m in SOURCES]
    alone = spec.replace(s.decoder, block=spec.replace(s.decoder.block, cross_attention=None))
    writer = nn.build(spec.Model(family="test", decoder=alone, target_embedding=s.target_embedding, head=s.head))
    with capture_attention(writer) as maps:
        for _ in range(2):
            writer(batch()[1])
    assert [tuple(m.shape) for m in maps["decoder.1.self_attention"]] == [(4, n, n) for n in TARGETS]
    assert all(torch.equal(m, m.tril()) for m in maps["decoder.1.self_attention"])


def test_a_bare_part_can_be_watched() -> None:
    stack = make("transformer", TRANSFORMER).encoder
    x = Ragged.pack(torch.randn(n, 16) for n in SOURCES)
    with capture_attention(stack) as maps:
        for _ in range(2):
            stack(x)
    assert list(maps) == ["0.self_attention", "1.self_attention"]
    assert [m.shape[1] for m in maps["0.self_attention"]] == SOURCES
