"""A sequence goes in, one label comes out."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv import spec
from qkv.nn import Encoder, Ragged, build
from qkv.nn.heads import AttentionPool, Head

STATES = Ragged.from_lengths(torch.randn(7, 6, generator=torch.Generator().manual_seed(1)), [3, 4])
DOT = spec.Attention(query_dim=6, score_fn="dot", use_projections=False)


def pooled(query: Tensor) -> Tensor:
    pool = AttentionPool(DOT)
    pool.query.data = query
    return pool(STATES)


def test_vanilla_attention_weighs_hidden_states_by_w_a_h() -> None:
    """DS 4440 RNNs → Contextual embeddings → Transformers, "(Vanilla) ATTENTION!": a_j = W_a · h_j, α = SoftMax(a),
    h̄ = Σ_j α_j h_j. The trainable query is W_a."""
    w_a = torch.randn(6)
    naive = []
    for states in STATES.sequences():
        alpha = torch.softmax(torch.stack([w_a @ h for h in states]), 0)
        naive.append(sum(a * h for a, h in zip(alpha, states, strict=True)))
    torch.testing.assert_close(pooled(w_a), torch.stack(naive))


def test_the_label_is_predicted_from_the_weighted_average() -> None:
    """DS 4440 RNNs → Contextual embeddings → Transformers, "(Vanilla) ATTENTION!": P(y | h̄)."""
    head = Head(spec.Head(kind="sequence", d_model=6, num_outputs=3, bias=True, pool=DOT))
    assert head.pool is not None
    torch.testing.assert_close(head(STATES), head.pool(STATES) @ head.linear.weight.T + head.linear.bias)


def test_the_query_may_be_a_trainable_vector() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Attention Mechanism", use case #1: "No context: q can be any fixed
    vector (e.g., a vector of 1s), or a trainable vector"."""
    pool = AttentionPool(DOT)
    (pool(STATES) * torch.randn(2, 6)).sum().backward()
    assert pool.query.grad is not None
    assert bool(pool.query.grad.any())


def test_the_query_may_be_a_vector_of_ones() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Attention Mechanism", use case #1: q "a vector of 1s", and
    k_i = v_i = s_i^RNN: each state is weighed by the softmax of its sum."""
    naive = [torch.softmax(states.sum(-1), 0) @ states for states in STATES.sequences()]
    torch.testing.assert_close(pooled(torch.ones(6)), torch.stack(naive))


def test_a_recurrent_classifier_attends_over_all_its_states() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Origins of Attention": "representation of the sequence as a
    weighted average of token representations", with RNNs "the hidden state of the RNN after processing of the
    token"."""
    model = build(
        spec.Model(
            family="test",
            source_embedding=spec.Embedding(vocab_size=9, d_model=4, position="none"),
            encoder=spec.RecurrentEncoder(d_model=4, hidden_size=3),
            head=spec.Head(kind="sequence", d_model=6, num_outputs=2, pool=DOT),
        )
    )
    assert isinstance(model, Encoder)
    words = Ragged.from_lengths(torch.tensor([1, 2, 3, 4, 5]), [5])
    states, query = model.hidden_states(words).hidden.values, model.head.pool.query
    average = torch.softmax(states @ query, 0) @ states
    torch.testing.assert_close(model(words)[0], model.head.linear(average))


def test_a_sequence_is_classified_from_its_first_token() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Fine-Tuning Transformers": ŷ = classifier(x_CLS), "the
    representation of the sequence start token [CLS]"."""
    head = Head(spec.Head(kind="sequence", d_model=6, num_outputs=3, bias=True))
    firsts = torch.stack([states[0] for states in STATES.sequences()])
    torch.testing.assert_close(head(STATES), firsts @ head.linear.weight.T + head.linear.bias)


def test_one_linear_layer_is_used_again_for_every_token() -> None:
    """(Even More) Language Modeling: Attention, "BERTForTokenClassification": "single linear layer, re-used across the
    tokens"; Multilingual NLP, "Pretraining Transformers": ŷ = softmax(x W_lm)."""
    head = Head(spec.Head(kind="lm", d_model=6, num_outputs=5))
    torch.testing.assert_close(head(STATES.values), torch.stack([head.linear.weight @ x for x in STATES.values]))
