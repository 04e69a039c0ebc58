"""AWD-LSTM against a restatement with `torch.nn.LSTM`, whose dropout masks are those that the model drew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.families import get_family
from qkv.nn import Ragged, build
from qkv.objectives.clm import CausalLM, Inputs, activation_penalty
from qkv.recipe.objectives import CLMObjective

VOCABULARY, LENGTHS = 11, [4, 6, 2]
TOKENS = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))


def make_model(family: str = "awd_lstm", **changes: Any) -> Any:
    module = get_family(family)
    torch.manual_seed(0)
    config = module.Config(d_model=5, hidden_size=7, layers=3, **changes)
    return build(module.make_spec(config, target_vocab_size=VOCABULARY)).double().train()


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Record the mask of every dropout, in the order of the calls."""
    drawn: list[Tensor] = []
    generator = torch.Generator().manual_seed(5)

    def dropout(x: Tensor, p: float) -> Tensor:
        drawn.append((torch.rand(x.shape, generator=generator) >= p).to(x) / (1 - p))
        return x * drawn[-1]

    for module in ("recurrent_stack", "embedding", "heads"):
        monkeypatch.setattr(f"qkv.nn.{module}.dropout", dropout)
    return drawn


def restate(model: Any, masks: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return logits, hidden states after dropout and those before it, per sequence, computed one sequence at a time."""
    words, inputs, weight_0, hidden_0, weight_1, hidden_1, weight_2, outputs = masks
    order = sorted(range(len(LENGTHS)), key=lambda row: -LENGTHS[row])
    results: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    weight = model.target_embedding.tokens.weight
    for row, tokens in enumerate(torch.split(TOKENS, LENGTHS)):
        rank = order.index(row)
        x = F.embedding(tokens, weight * words) * inputs[rank]
        raw = x
        layer_masks = zip(
            model.decoder.layers, (weight_0, weight_1, weight_2), (hidden_0, hidden_1, outputs), strict=True
        )
        for layer, weight_mask, mask in layer_masks:
            lstm = nn.LSTM(layer.input_size, layer.hidden_size).double()
            with torch.no_grad():
                for name, parameter in lstm.named_parameters():
                    source = getattr(layer, name)
                    parameter.copy_(source * weight_mask if name == "weight_hh_l0" else source)
            raw, _ = lstm(x[:, None])
            raw = raw[:, 0]
            x = raw * mask[rank]
        results[0].append(x @ weight.T + model.head.linear.bias)
        results[1].append(x)
        results[2].append(raw)
    return results


def test_awd_lstm_equals_its_restatement_with_the_same_masks(masks: list[Tensor]) -> None:
    model = make_model(word_dropout=0.3, weight_dropout=0.5)
    source = Ragged.from_lengths(TOKENS, LENGTHS)
    output = model.hidden_with_memory(source, model.initial_memory(3))
    logits = model.head(output.hidden.values)
    with torch.no_grad():
        expected, dropped, undropped = restate(model, masks)
    torch.testing.assert_close(logits, torch.cat(expected))
    config = CLMObjective(activation_penalty=2.0, temporal_penalty=3.0)
    penalty = sum(2 * h.square().mean(1).sum() for h in dropped)
    penalty += sum(3 * (h[1:] - h[:-1]).square().mean(1).sum() for h in undropped)
    assert activation_penalty(output, config).total.item() == pytest.approx(float(penalty))


@pytest.mark.parametrize("lengths", [LENGTHS, [4, 4, 4]], ids=["ragged", "uniform"])
def test_a_dropped_weight_keeps_its_gradient(lengths: list[int], masks: list[Tensor]) -> None:
    model = make_model(weight_dropout=0.5, word_dropout=0.0, input_dropout=0.0, dropout=0.0, output_dropout=0.0)
    weight = model.decoder.layers[0].weight_hh_l0
    model(Ragged.from_lengths(TOKENS, lengths)).square().sum().backward()
    assert isinstance(weight, nn.Parameter)
    assert torch.equal(weight.grad == 0, masks[0] == 0)  # exactly the entries that took part in the product
    eval_logits = model.eval()(Ragged.from_lengths(TOKENS, lengths))
    assert torch.equal(eval_logits, model(Ragged.from_lengths(TOKENS, lengths)))  # and no mask is left behind


def test_a_locked_mask_is_the_same_at_every_token() -> None:
    model = make_model(weight_dropout=0.0, word_dropout=0.0, input_dropout=0.0, dropout=0.0, output_dropout=0.5)
    source = Ragged.from_lengths(TOKENS, LENGTHS)
    output = model.hidden_with_memory(source, model.initial_memory(3))
    is_dropped = output.hidden.with_values(output.hidden.values == 0).sequences()
    assert all(bool((rows == rows[0]).all()) for rows in is_dropped)
    assert any(bool(rows.any()) for rows in is_dropped)


def test_word_dropout_drops_a_token_wherever_it_occurs() -> None:
    model = make_model(word_dropout=0.5, input_dropout=0.0)
    tokens = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8] * 2)
    first, second = model.embed_inputs(Ragged.from_lengths(tokens, [8, 8])).sequences()
    assert torch.equal(first, second)
    is_zero = (first == 0).all(1)
    assert is_zero.any()
    assert not is_zero.all()


def test_gru_and_lstm_models_have_penalties_with_and_without_memory() -> None:
    for cell in ("gru", "lstm"):
        model = make_model("lstm_lm", cell=cell).eval()
        source = Ragged.from_lengths(TOKENS, LENGTHS)
        config = CLMObjective(activation_penalty=1.0)
        inputs = Inputs(source, None, TOKENS.roll(-1))
        plain = CausalLM(CLMObjective()).losses(model, inputs)
        penalized = CausalLM(config).losses(model, inputs)
        torch.testing.assert_close(penalized[0].total, plain[0].total)
        assert penalized[1].total.item() > 0
