"""The machine's peak and what a trained token needs, the two sides of a share."""

from __future__ import annotations

import pytest
import torch

from qkv import spec
from qkv.errors import InputError
from qkv.families import get_family
from qkv.nn import build
from qkv.nn.construction import set_features_and_lora
from qkv.train.perf import mfu
from qkv.train.perf.mfu import (
    flops_per_token,
    measure_matmul_peak,
    named_peak_flops,
    peak_flops,
    trained_fraction,
)

CPU = torch.device("cpu")
WIDTH, HIDDEN, LAYERS, VOCABULARY = 8, 20, 3, 50


def gpt2() -> spec.Model:
    module = get_family("gpt2")
    shape = module.Config(d_model=WIDTH, heads=2, layers=LAYERS, d_ff=HIDDEN, max_length=64)
    made: spec.Model = module.make_spec(shape, target_vocab_size=VOCABULARY)
    return made


def bert(head: str) -> spec.Model:
    module = get_family("bert")
    shape = module.Config(d_model=WIDTH, heads=2, layers=LAYERS, d_ff=HIDDEN, max_length=64)
    made: spec.Model = module.make_spec(shape, source_vocab_size=VOCABULARY, head=head)
    return made


def body(length: int) -> int:
    """FLOPs of a token's forward pass: four projections, two feed-forward matrices, scores and mix."""
    return LAYERS * (2 * (4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN) + 4 * length * WIDTH)


def test_a_language_model_needs_six_flops_a_weight_and_its_attention() -> None:
    by_hand = 3 * (body(length=10) + 2 * WIDTH * VOCABULARY)
    assert flops_per_token(gpt2(), target_length=10) == by_hand


def test_the_work_is_the_customary_six_times_the_parameters_and_twelve_times_attention() -> None:
    """GPT-2 small at 1024 tokens: 6 N + 12 · layers · width · length, but for tables that are looked up and biases."""
    module = get_family("gpt2")
    model, parameters = module.make_spec(module.PRESETS["small"]), 124_439_808
    customary = 6 * parameters + 12 * 12 * 768 * 1024
    assert flops_per_token(model, target_length=1024) == pytest.approx(customary, rel=0.01)


def test_where_few_tokens_are_judged_only_their_logits_are_work() -> None:
    dense, linear = 2 * WIDTH * WIDTH, 2 * WIDTH * VOCABULARY
    by_hand = 3 * (body(length=10) + 0.15 * (dense + linear))
    assert flops_per_token(bert("masked_lm"), source_length=10, logits_fraction=0.15) == pytest.approx(by_hand)


def test_a_head_beside_is_work_for_every_sequence_however_few_tokens_are_judged() -> None:
    once = 2 * WIDTH * WIDTH + 2 * WIDTH * 2
    beside = flops_per_token(bert("pretraining"), source_length=10, logits_fraction=0.15)
    assert beside - flops_per_token(bert("masked_lm"), source_length=10, logits_fraction=0.15) == pytest.approx(
        3 * once / 10
    )


def test_a_pair_is_counted_over_the_tokens_of_both_sides() -> None:
    module = get_family("transformer")
    shape = module.Config(d_model=WIDTH, heads=2, layers=1, decoder_layers=1, d_ff=HIDDEN)
    model = module.make_spec(shape, source_vocab_size=VOCABULARY, target_vocab_size=VOCABULARY)
    m, n, square, forward = 6, 4, 2 * WIDTH * WIDTH, 4 * WIDTH * HIDDEN
    encoder = m * (4 * square + forward) + 4 * m * m * WIDTH
    decoder = n * (4 * square + forward) + 4 * n * n * WIDTH
    cross = n * 2 * square + m * 2 * square + 4 * m * n * WIDTH
    by_hand = 3 * (encoder + decoder + cross + n * 2 * WIDTH * VOCABULARY) / (m + n)
    assert flops_per_token(model, source_length=m, target_length=n) == pytest.approx(by_hand)


def test_sequences_of_many_lengths_cost_what_those_of_their_weighted_mean_do() -> None:
    lengths = [2, 6, 12]
    mean = sum(n * n for n in lengths) / sum(lengths)  # 9.2
    each = sum(n * flops_per_token(gpt2(), target_length=n) for n in lengths) / sum(lengths)
    assert flops_per_token(gpt2(), target_length=mean) == pytest.approx(each, rel=0.01)


def test_a_length_that_the_model_does_not_take_is_refused() -> None:
    with pytest.raises(InputError, match="target_length: 65 tokens; this model takes 1 to 64"):
        flops_per_token(gpt2(), target_length=65)


def test_the_peak_is_known_for_gpus_in_the_table_and_for_no_cpu() -> None:
    assert peak_flops(CPU, use_bf16=False) is None
    assert named_peak_flops("NVIDIA H200", True, "highest") == 989e12
    assert named_peak_flops("NVIDIA A100-SXM4-80GB", False, "high") == 156e12
    assert named_peak_flops("NVIDIA H100 PCIe", True, "highest") == 756e12
    assert named_peak_flops("NVIDIA L40S", False, "highest") == 91.6e12
    assert named_peak_flops("NVIDIA GeForce GTX 1080", False, "highest") is None


def test_measuring_leaves_a_runs_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    measure_matmul_peak(CPU, use_bf16=False, seconds=0.01)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_best_sample_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = iter([0.4, 0.9, 0.2, 0.5, 0.3])
    ticks = iter([0.0, 0.0, 0.0, 0.0, 0.0, 9.0])
    monkeypatch.setattr(mfu, "time_call", lambda *_: next(samples))
    monkeypatch.setattr(mfu.time, "perf_counter", lambda: next(ticks))
    assert measure_matmul_peak(CPU, use_bf16=False) == pytest.approx(2 * 1024**3 / 0.2)


def test_a_body_that_stays_as_it_is_costs_a_pass_and_one_with_adapters_two() -> None:
    model = build(bert("sequence"))
    assert trained_fraction(model) == 1
    model.freeze_backbone()
    assert trained_fraction(model) == pytest.approx(1 / 3)
    set_features_and_lora(model, "last", spec.LoraConfig(rank=2))
    model.freeze_backbone()
    assert trained_fraction(model) == pytest.approx(2 / 3)
