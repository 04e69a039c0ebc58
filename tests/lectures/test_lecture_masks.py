"""Who may look at whom: the future, and padding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkv.families import get_family
from qkv.nn import EncoderDecoder, Ragged, build
from qkv.nn.attention import Attention
from qkv.nn.mask import Bidirectional, Causal, Mask
from qkv.spec import Attention as Spec

N = 5


def weights_of(module: Attention, x: Ragged, mask: Mask) -> Tensor:
    seen = []
    module.hook = lambda weights, *_: seen.append(weights)
    module(x, mask=mask)
    return seen[0]


def test_a_position_attends_to_all_previous_ones_and_to_no_future_one() -> None:
    """Transformers and Pretraining, 1.3 "Masked Decoder Self-Attention": "we would like every position to pay attention
    to all previous positions, but not future positions"."""
    weights = weights_of(Attention(Spec(query_dim=6)), Ragged.from_lengths(torch.randn(N, 6), [N]), Causal())[0, 0]
    assert (weights > 0).tolist() == [[j <= i for j in range(N)] for i in range(N)]


def test_the_mask_keeps_scores_where_i_is_at_or_after_j() -> None:
    """Transformers and Pretraining, 1.3 "Masked Decoder Self-Attention" prints "q_i^T k_j / √D if i ≤ j and -∞
    otherwise", the inequality turned round: query i may look at key j where i ≥ j."""
    i, j = torch.arange(N)[:, None], torch.arange(N)[None]
    assert torch.equal(Causal().as_tensor(N, N), i >= j)
    assert not torch.equal(Causal().as_tensor(N, N), i <= j)


def test_a_masked_score_is_minus_infinity_before_the_softmax() -> None:
    """Transformers and Pretraining, 1.3 "Masked Decoder Self-Attention": scores are q_i^T k_j / √D or -∞."""
    x = torch.randn(N, 6)
    scores = (x @ x.T / math.sqrt(6)).masked_fill(torch.arange(N)[None] > torch.arange(N)[:, None], float("-inf"))
    weights = weights_of(Attention(Spec(query_dim=6, use_projections=False)), Ragged.from_lengths(x, [N]), Causal())[
        0, 0
    ]
    torch.testing.assert_close(weights, torch.softmax(scores, -1))


def test_masking_forces_weights_after_t_to_zero() -> None:
    """Sequence to Sequence models: Attention Models, "Self attention and masked self attention": "The attention will
    have to be 'masked', forcing attention weights for t+1 and later to 0"."""
    weights = weights_of(Attention(Spec(query_dim=6)), Ragged.from_lengths(torch.randn(N, 6), [N]), Causal())[0, 0]
    assert bool((weights.triu(1) == 0).all())


def test_the_encoder_looks_ahead() -> None:
    """Sequence to Sequence models: Attention Models, "Self attention and masked self attention": self-attention in the
    encoder "can use input embedding at time t+1 and further … because all inputs are available"."""
    weights = weights_of(Attention(Spec(query_dim=6)), Ragged.from_lengths(torch.randn(N, 6), [N]), Bidirectional())[
        0, 0
    ]
    assert bool((weights > 0).all())


def test_masked_weights_sum_to_one_over_the_keys_that_are_left() -> None:
    """Transformers and Pretraining, 1.2 "Encoder Attention": "we want each score to sum to one over the keys K"."""
    weights = weights_of(
        Attention(Spec(query_dim=6, heads=2)), Ragged.from_lengths(torch.randn(9, 6), [5, 4]), Causal()
    )
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, 5))


def test_padding_gets_no_weight() -> None:
    """Transformers and Pretraining, 1.2 "Encoder Attention": "To prevent our model from paying attention to padded
    positions, we add -∞ to attention scores prior to the Softmax"."""
    x = Ragged.from_lengths(torch.randn(8, 6), [5, 3])
    weights = weights_of(Attention(Spec(query_dim=6)), x, Bidirectional())  # [2, 1, 5, 5]
    assert bool((weights[1, :, :3, 3:] == 0).all())
    torch.testing.assert_close(weights[1, :, :3, :3].sum(-1), torch.ones(1, 3))


def test_a_padded_batch_gives_what_each_sequence_gives_alone() -> None:
    """Transformers and Pretraining, 1.2 "Encoder Attention": "We pad each sequence to L_source"; we do not, and need
    not: what is said of padding holds because there is none."""
    padded = torch.randn(2, 7, 6)
    module = Attention(Spec(query_dim=6, heads=2))
    together = module(Ragged.from_padded(padded, [7, 3])).sequences()
    alone = module(Ragged.pack([padded[1, :3]])).values
    torch.testing.assert_close(together[1], alone)


def test_the_decoder_of_a_whole_model_prevents_lookups_into_the_future() -> None:
    """Transformers and Pretraining, 1 "Transformers": "Masked Decoding: Prevent attention lookups into the future"."""
    module = get_family("transformer")
    shape = module.Config(d_model=12, heads=2, layers=2, d_ff=16)
    model = build(module.make_spec(shape, source_vocab_size=9, target_vocab_size=9)).eval()
    assert isinstance(model, EncoderDecoder)
    source, target = Ragged.from_lengths(torch.arange(4), [4]), torch.arange(6)
    before = model(source, Ragged.from_lengths(target, [6]))
    target[4:] += 2
    after = model(source, Ragged.from_lengths(target, [6]))
    torch.testing.assert_close(after[:4], before[:4])
    assert not torch.allclose(after[4], before[4])
