"""What attention costs: counted, not timed. One multiply-add is two of the counter's operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from qkv.families import get_family
from qkv.nn import EncoderDecoder, Ragged, build
from qkv.nn.attention import Attention
from qkv.nn.mask import Causal
from qkv.spec import Attention as Spec


@pytest.fixture(autouse=True)
def _explicit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter does not see into fused kernels."""
    monkeypatch.setattr("qkv.nn.kernels.select_kernel", lambda *_, **__: "eager")


def multiply_adds(f: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        f()
    return counter.get_total_flops() // 2


def tokens(length: int, width: int) -> Ragged:
    return Ragged.from_lengths(torch.randn(length, width), [length])


def plain(k: int) -> Attention:
    """Scores and weighted sum alone, without the projections."""
    return Attention(Spec(query_dim=k, heads=2, use_projections=False))


@pytest.mark.parametrize(("m", "k"), [(3, 8), (6, 8), (7, 4)])
def test_encoder_self_attention_costs_m_squared_k(m: int, k: int) -> None:
    """Transformers and Pretraining, "Problem: Machine Translation", 3: encoder self-attention is O(M²k): M²k for the
    scores and M²k for the sums."""
    assert multiply_adds(lambda: plain(k)(tokens(m, k))) == 2 * m * m * k


@pytest.mark.parametrize(("m", "n", "k"), [(3, 5, 8), (6, 5, 8), (7, 11, 4)])
def test_decoder_encoder_attention_costs_m_n_k(m: int, n: int, k: int) -> None:
    """Transformers and Pretraining, "Problem: Machine Translation", 3: decoder-encoder attention is O(MNk)."""
    assert multiply_adds(lambda: plain(k)(tokens(n, k), tokens(m, k))) == 2 * m * n * k


@pytest.mark.parametrize(("n", "k"), [(5, 8), (10, 8), (11, 4)])
def test_decoder_self_attention_costs_n_squared_k(n: int, k: int) -> None:
    """Transformers and Pretraining, "Problem: Machine Translation", 3: decoder self-attention is O(N²k)."""
    assert multiply_adds(lambda: plain(k)(tokens(n, k), mask=Causal())) == 2 * n * n * k


def test_self_attention_takes_n_squared_dot_products() -> None:
    """Sequence to Sequence models: Attention Models, "Processing order": "n² <q_n, k_n> dot products to compute"."""
    module, scores = Attention(Spec(query_dim=8)), []
    module.hook = lambda weights, *_: scores.append(weights.numel())
    module(tokens(9, 8))
    assert scores == [81]


def test_cost_does_not_depend_on_the_number_of_heads() -> None:
    """Transformers and Pretraining, 1.2 "Encoder Attention": H heads of D/H: the same work, cut otherwise."""
    costs = {multiply_adds(lambda h=h: Attention(Spec(query_dim=8, heads=h))(tokens(5, 8))) for h in (1, 2, 4, 8)}
    assert len(costs) == 1


def translator() -> EncoderDecoder:
    module = get_family("transformer")
    model = build(
        module.make_spec(
            module.Config(d_model=8, heads=2, layers=2, d_ff=16), source_vocab_size=20, target_vocab_size=20
        )
    ).eval()
    assert isinstance(model, EncoderDecoder)
    return model


def words(length: int) -> Ragged:
    return Ragged.from_lengths(torch.arange(length) % 20, [length])


def test_encoder_activations_do_not_depend_on_the_decoder() -> None:
    """Transformers and Pretraining, "Problem: Machine Translation", 4: "Do activation of the encoder depend on decoder
    activation?" No."""
    model, seen = translator(), []
    model.encoder.register_forward_hook(lambda _, __, out: seen.append(out.hidden.values))
    model(words(6), words(4))
    model(words(6), words(9))
    assert torch.equal(seen[0], seen[1])


def test_one_encoding_serves_a_second_target() -> None:
    """Transformers and Pretraining, "Problem: Machine Translation", 4: to translate "a source sequence into a different
    target language" the encoder's output is used again."""
    model = translator()
    memory = model.encode(words(6))
    for target in (words(4), words(9)):
        torch.testing.assert_close(model.head(model.decode(memory, target)), model(words(6), target))


def test_a_second_target_costs_nothing_quadratic_in_the_source() -> None:
    """Transformers and Pretraining, "Problem: Machine Translation", 4: "How much additional computation is needed … in
    terms of M and N?" O(MN + N²): the decoder alone, linear in M."""
    model = translator()
    costs = []
    for m in (5, 10, 15):
        memory = model.encode(words(m))
        costs.append(multiply_adds(lambda memory=memory: model.decode(memory, words(4))))
    assert costs[2] - costs[1] == costs[1] - costs[0] > 0


def test_an_encoding_costs_something_quadratic_in_the_source() -> None:
    """Transformers and Pretraining, 1.4 "Why Transformers": "computations take O(n²) time": the second difference is
    the two layers' 2 · M² · k."""
    model = translator()
    costs = [multiply_adds(lambda m=m: model.encode(words(m))) for m in (5, 10, 15)]
    layers, k = 2, 8
    assert costs[2] - 2 * costs[1] + costs[0] == layers * 2 * k * (15**2 - 2 * 10**2 + 5**2)
