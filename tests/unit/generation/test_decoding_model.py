"""The copy of a model that decodes on a CPU: it follows the model, and is made only if that pays."""

from __future__ import annotations

import warnings

import pytest
import torch

from qkv import spec
from qkv.families import get_family
from qkv.generation import GenerationConfig, decoding_model, generate
from qkv.generation.decoding_model import host_model
from qkv.generation.engine import Engine
from qkv.generation.int8_report import int8_differences, report_int8
from qkv.generation.request import Request
from qkv.nn import Model, Ragged, build, int8_linear
from qkv.nn.packed_linear import can_pack

pytestmark = pytest.mark.skipif(not can_pack(), reason="this build of PyTorch has no oneDNN kernels")
SOURCE = Ragged.pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])])


@pytest.fixture
def model() -> Model:
    gpt2 = get_family("gpt2")
    config = gpt2.Config(layers=2, d_model=64, heads=4, d_ff=128, max_length=40)
    return build(gpt2.make_spec(config, target_vocab_size=90, head="lm")).eval()


@pytest.fixture
def packed_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_model, "_MIN_WEIGHTS", 0)
    monkeypatch.setattr(decoding_model, "_MIN_STEPS", 0)


def first_logits(model: Model) -> torch.Tensor:
    with torch.inference_mode():
        logits, state = model.prefill(SOURCE, 1, 4)
        return torch.cat([logits, model.step(logits.argmax(-1), state)[0]])


def test_a_copy_is_made_only_if_it_pays(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_model(model, None, 1000) is model  # too small
    monkeypatch.setattr(decoding_model, "_MIN_WEIGHTS", 0)
    assert host_model(model, None, 20) is model
    assert host_model(model, None, 20) is not model  # two short searches with the same weights are a long one
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert host_model(model, None, 20) is model


@pytest.mark.usefixtures("packed_always")
def test_the_copy_follows_the_weights_and_the_spec(model: Model) -> None:
    before = first_logits(host_model(model, None, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    copy = host_model(model, None, 1)
    torch.testing.assert_close(first_logits(copy), first_logits(model), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(first_logits(copy), before, atol=1e-2)
    assert host_model(model, None, 1) is copy
    model.spec = spec.replace(model.spec, eos_id=7, suppress_tokens=(8,))
    copy = host_model(model, None, 1)
    assert copy.spec.eos_id == 7
    assert bool((first_logits(copy)[:, 8] == float("-inf")).all())


@pytest.mark.usefixtures("packed_always")
def test_one_row_and_many_rows_share_a_copy(model: Model) -> None:
    single = Ragged.pack([torch.tensor([5, 6, 7])])
    config = GenerationConfig(max_new_tokens=6)
    for source in (single, SOURCE, single):
        expected = [[h.tokens for h in rows] for rows in generate_plainly(model, source, config)]
        assert [[h.tokens for h in rows] for rows in generate(model, source, config)] == expected


def generate_plainly(model: Model, source: Ragged, config: GenerationConfig) -> list[list[object]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qkv.generation.engine.host_model", lambda model, *_: model)
        requests = [Request(ids, config, i) for i, ids in enumerate(source.sequences())]
        return [request.outputs or [] for request in Engine(model).run(requests)]


@pytest.mark.usefixtures("packed_always")
def test_int8_is_close_to_float32_in_log_probabilities(model: Model) -> None:
    expected = torch.log_softmax(first_logits(model), -1)
    actual = torch.log_softmax(first_logits(host_model(model, "int8", 1)), -1)
    assert 0 < float((actual - expected).abs().mean()) < 0.02


def test_int8_without_a_correct_kernel_is_float32_with_one_line(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"wrong": lambda weight, _: lambda x: x.new_zeros(len(x), len(weight.scales))}
    monkeypatch.setattr(int8_linear, "KERNELS", wrong)
    int8_linear.choose_kernels.cache_clear()
    with pytest.warns(UserWarning, match=r"int8: no kernel .* so float32 is used \(wrong: wrong by 100%\)"):
        outputs = generate(model, SOURCE, GenerationConfig(max_new_tokens=3, dtype="int8"))
    int8_linear.choose_kernels.cache_clear()
    expected = generate(model, SOURCE, GenerationConfig(max_new_tokens=3))
    assert [[h.tokens for h in rows] for rows in outputs] == [[h.tokens for h in rows] for rows in expected]


def test_int8_states_its_distance_from_float32_once(model: Model) -> None:
    source = torch.tensor([5, 6, 7])
    requests = [Request(source, GenerationConfig(max_new_tokens=3, dtype="int8"))]
    finished = list(Engine(model).run(requests))
    with pytest.warns(UserWarning, match=r"differs from float32 by 0\.\d{3} on .* \(3 tokens of the first 1 output\)"):
        assert list(report_int8(model, finished)) == finished
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(report_int8(model, finished)) == finished
    exact = list(Engine(model).run([Request(source, GenerationConfig(max_new_tokens=3))]))
    assert float(int8_differences(model, exact).max()) < 1e-5


def test_int8_without_a_large_layer_says_that_nothing_was_quantized() -> None:
    gpt2 = get_family("gpt2")
    config = gpt2.Config(layers=1, d_model=16, heads=2, d_ff=32, max_length=40)
    small = build(gpt2.make_spec(config, target_vocab_size=30, head="lm")).eval()
    requests = [Request(torch.tensor([5, 6, 7]), GenerationConfig(max_new_tokens=3, dtype="int8"))]
    finished = list(Engine(small).run(requests))
    with pytest.warns(UserWarning, match="int8: no layer of this model was quantized, so float32 is used"):
        list(report_int8(small, finished))
