from __future__ import annotations

import pytest
import torch

from qkv import spec
from qkv.families import get_family
from qkv.nn import Decoder, Encoder, EncoderDecoder, Ragged, build

transformer = get_family("transformer")
BLOCK = spec.Block(
    self_attention=spec.Attention(query_dim=8, heads=2), feedforward=spec.FeedForward(d_model=8, d_ff=12)
)
EMBED = spec.Embedding(vocab_size=11, d_model=8)
LM = spec.Head(kind="lm", d_model=8, num_outputs=11)
IDS = Ragged.from_lengths(torch.arange(7), [3, 4])


def pair(**fields: object) -> spec.Model:
    shape = transformer.Config(**{"d_model": 8, "heads": 2, "layers": 1, "d_ff": 12} | fields)
    return transformer.make_spec(shape, source_vocab_size=11, target_vocab_size=11)


def test_a_spec_with_an_encoder_alone_builds_an_encoder() -> None:
    model = build(
        spec.Model(family="test", source_embedding=EMBED, encoder=spec.TransformerStack(block=BLOCK, num_layers=1))
    )
    assert isinstance(model, Encoder)


def test_a_spec_with_a_decoder_alone_builds_a_decoder() -> None:
    stack = spec.TransformerStack(block=BLOCK, num_layers=1, causal=True)
    assert isinstance(build(spec.Model(family="test", target_embedding=EMBED, decoder=stack, head=LM)), Decoder)


def test_a_spec_with_both_builds_an_encoder_decoder() -> None:
    assert isinstance(build(pair()), EncoderDecoder)


def test_a_tied_head_is_the_target_embedding_itself() -> None:
    model = build(pair())
    assert model.head.linear.weight is model.target_embedding.tokens.weight


def test_a_shared_vocabulary_is_one_table() -> None:
    model = build(pair(share_embeddings=True))
    assert model.source_embedding.tokens.weight is model.target_embedding.tokens.weight


def test_vocabularies_that_are_not_shared_are_two_tables() -> None:
    model = build(pair(share_embeddings=False))
    assert model.source_embedding.tokens.weight is not model.target_embedding.tokens.weight


def test_tied_weights_stay_one_tensor_after_a_state_dict_is_loaded() -> None:
    model = build(pair(share_embeddings=True))
    model.load_state_dict(build(pair(share_embeddings=True)).state_dict())
    assert model.head.linear.weight is model.source_embedding.tokens.weight


def test_tie_makes_one_tensor_again_after_weights_were_replaced() -> None:
    model = build(pair(share_embeddings=True))
    model.target_embedding.tokens.weight = torch.nn.Parameter(torch.randn(11, 8))
    model.tie_weights()
    assert model.head.linear.weight is model.source_embedding.tokens.weight is model.target_embedding.tokens.weight


@pytest.mark.parametrize("head", [None, spec.Head(kind="sequence", d_model=8, num_outputs=3)])
def test_a_model_without_a_language_model_head_does_not_write(head: spec.Head | None) -> None:
    model = build(spec.replace(pair(), head=head))
    state = model.init_state(model.encode(IDS), num_rows=2, max_length=3)
    with pytest.raises(ValueError, match="head of kind 'lm'"):
        model.step(torch.tensor([2, 2]), state)


def test_two_heads_read_the_same_states() -> None:
    one, two = spec.Head(kind="token", d_model=8, num_outputs=4), spec.Head(kind="choice", d_model=8, num_outputs=1)
    body = spec.Model(
        family="test",
        source_embedding=EMBED,
        encoder=spec.TransformerStack(block=BLOCK, num_layers=1),
        head=one,
        aux_head=two,
    )
    model = build(body)
    tokens, sequences = model.forward_with_aux_head(IDS)
    torch.testing.assert_close(tokens, model(IDS))
    torch.testing.assert_close(sequences, model.aux_head(model.hidden_states(IDS).hidden))


def test_a_head_beside_none_is_refused() -> None:
    two = spec.Head(kind="choice", d_model=8, num_outputs=1)
    with pytest.raises(ValueError, match="set head instead"):
        build(
            spec.Model(
                family="test",
                source_embedding=EMBED,
                encoder=spec.TransformerStack(block=BLOCK, num_layers=1),
                aux_head=two,
            )
        )


def test_logits_at_chosen_tokens_are_those_of_all_tokens() -> None:
    head = spec.Head(kind="token", d_model=8, num_outputs=4, dense_activation="tanh")
    model = build(
        spec.Model(
            family="test", source_embedding=EMBED, encoder=spec.TransformerStack(block=BLOCK, num_layers=1), head=head
        )
    )
    chosen = torch.tensor([5, 0, 3])
    torch.testing.assert_close(model(IDS, positions=chosen), model(IDS)[chosen])


def test_before_its_last_layer_every_shell_gives_the_rows_that_this_reads() -> None:
    two = spec.Model(
        family="test",
        source_embedding=EMBED,
        encoder=spec.TransformerStack(block=BLOCK, num_layers=1),
        head=LM,
        aux_head=spec.Head(kind="token", d_model=8, num_outputs=2),
    )
    one = spec.Model(
        family="test",
        target_embedding=EMBED,
        decoder=spec.TransformerStack(block=BLOCK, num_layers=1, causal=True),
        head=LM,
    )
    at = torch.tensor([1, 5])
    for model, given in ((build(two), (IDS, None, at)), (build(one), (IDS, at)), (build(pair()), (IDS, IDS))):
        model.eval()
        assert torch.equal(model.head.compute_logits(model(*given, return_logits=False)), model(*given))
    model = build(two).eval()
    (rows, beside), (logits, judged) = (
        model.forward_with_aux_head(IDS, None, at, return_logits=False),
        model.forward_with_aux_head(IDS, None, at),
    )
    assert torch.equal(model.head.compute_logits(rows), logits)
    assert torch.equal(beside, judged)


def test_a_dot_score_between_states_of_unequal_width_is_refused() -> None:
    rnn = get_family("rnn")
    model = rnn.make_spec(
        rnn.Config(d_model=4, hidden_size=6, attention="dot"), source_vocab_size=11, target_vocab_size=11
    )
    uneven = spec.replace(model.decoder, attention=spec.replace(model.decoder.attention, query_dim=7))
    with pytest.raises(ValueError, match=r"attention\.query_dim is 7, and the width of its queries is 6"):
        build(spec.replace(model, decoder=uneven))


@pytest.mark.parametrize("missing", ["source_embedding", "target_embedding"])
def test_a_spec_without_its_embedding_is_refused(missing: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        build(spec.replace(pair(), **{missing: None}))


def test_an_encoder_without_a_head_gives_a_vector_for_each_token() -> None:
    model = build(
        spec.Model(family="test", source_embedding=EMBED, encoder=spec.TransformerStack(block=BLOCK, num_layers=1))
    )
    assert model(IDS).shape == (7, 8)


def test_an_encoder_with_a_sequence_head_gives_logits_for_each_sequence() -> None:
    head = spec.Head(kind="sequence", d_model=8, num_outputs=3)
    model = build(
        spec.Model(
            family="test", source_embedding=EMBED, encoder=spec.TransformerStack(block=BLOCK, num_layers=1), head=head
        )
    )
    assert model(IDS).shape == (2, 3)


def test_a_decoder_alone_steps_to_the_logits_of_its_forward() -> None:
    stack = spec.TransformerStack(block=BLOCK, num_layers=2, causal=True)
    model = build(spec.Model(family="test", target_embedding=EMBED, decoder=stack, head=LM)).double()
    ids = Ragged.from_lengths(torch.arange(8), [4, 4])
    state, logits = model.init_state(None, num_rows=2, max_length=4), []
    for tokens in ids.values.view(2, 4).T:
        step, state = model.step(tokens, state)
        logits.append(step)
    torch.testing.assert_close(torch.stack(logits, 1).flatten(0, 1), model(ids))


def test_dropout_of_a_whole_model_is_off_in_eval() -> None:
    model = build(pair(dropout=0.5, attention_dropout=0.5)).eval()
    assert torch.equal(model(IDS, IDS), model(IDS, IDS))


def test_every_layer_has_weights_of_its_own() -> None:
    first, second = build(pair(layers=2)).encoder.blocks
    assert not torch.equal(first.self_attention.q.weight, second.self_attention.q.weight)


def test_embeddings_begin_with_the_papers_spread_whether_tied_or_not() -> None:
    module = get_family("transformer")
    shape = module.Config(d_model=64, heads=2, layers=1, d_ff=64)
    for vocabulary in (50, 4000):
        model = build(module.make_spec(shape, source_vocab_size=vocabulary, target_vocab_size=vocabulary))
        assert isinstance(model, EncoderDecoder)
        for embed in (model.source_embedding, model.target_embedding):
            assert float(embed.tokens.weight.std()) == pytest.approx(64**-0.5, rel=0.1)
