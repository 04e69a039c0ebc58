"""Encoder, Decoder and EncoderDecoder share one interface, so that callers need not know which one they have."""

from __future__ import annotations

import pytest
import torch

from qkv import spec
from qkv.errors import InputError
from qkv.nn import Ragged, build
from qkv.nn.model import Model
from qkv.nn.stack import Stack

WIDTH, VOCABULARY = 8, 11
ATTENTION = spec.Attention(query_dim=WIDTH, heads=2)
BLOCK = spec.Block(self_attention=ATTENTION, feedforward=spec.FeedForward(d_model=WIDTH, d_ff=16))
CROSS = spec.replace(BLOCK, cross_attention=ATTENTION)
EMBEDDING = spec.Embedding(vocab_size=VOCABULARY, d_model=WIDTH, max_length=10)
LM = spec.Head(kind="lm", d_model=WIDTH, num_outputs=VOCABULARY)
LABELS = spec.classification_head("sequence", WIDTH, ("no", "yes"), pool="last")
KINDS = ["encoder", "decoder", "encoder_decoder"]


def make(kind: str, head: spec.Head | None = LM) -> Model:
    torch.manual_seed(8)
    fields: dict[str, object] = {}
    if "encoder" in kind:
        fields |= {"source_embedding": EMBEDDING, "encoder": spec.TransformerStack(block=BLOCK, num_layers=2)}
    if "decoder" in kind:
        block = CROSS if "encoder" in kind else BLOCK
        decoder = spec.TransformerStack(block=block, num_layers=2, causal=True)
        fields |= {"target_embedding": EMBEDDING, "decoder": decoder}
    return build(spec.Model(family="test", head=head, **fields)).eval()


def batch() -> Ragged:
    return Ragged.pack([torch.tensor(row) for row in ([4, 5, 6], [7], [8, 9, 3, 10])])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_head_of_the_hidden_states(kind: str) -> None:
    for head in (LM, LABELS):
        model = make(kind, head)
        assert model.head is not None
        with torch.no_grad():
            torch.testing.assert_close(model.logits(batch()), model.head(model.hidden_states(batch()).hidden))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_positions_are_rows_of_all_logits(kind: str) -> None:
    model, positions = make(kind), torch.tensor([5, 0, 3])
    with torch.no_grad():
        torch.testing.assert_close(model.logits(batch(), positions), model.logits(batch())[positions])


@pytest.mark.parametrize("kind", KINDS)
def test_the_input_stack_reads_the_embedded_input(kind: str) -> None:
    model = make(kind)
    assert isinstance(model.input_stack, Stack)
    assert len(model.input_stack.all_hidden_states(model.embed_inputs(batch()))) == 3
    assert model.max_input_length == 10


def test_generative_shells_are_those_with_a_decoder_and_a_language_model_head() -> None:
    assert [make(kind).is_generative for kind in KINDS] == [False, True, True]
    assert [make(kind, LABELS).is_generative for kind in KINDS] == [False, False, False]
    assert [make(kind).continues_input for kind in KINDS] == [False, True, False]
    assert [make(kind).is_encoder_decoder for kind in KINDS] == [False, False, True]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_prefill_gives_the_first_tokens_logits_for_each_row_of_a_source(kind: str) -> None:
    model, source = make(kind), batch()
    with torch.no_grad():
        logits, state = model.prefill(source, 2, 4)
        if model.continues_input:
            expected = model(source)[source.layout.cu_seqlens[1:].long() - 1]
        else:
            expected = model(source, Ragged.pack([torch.tensor([model.spec.bos_id])] * 3))
        torch.testing.assert_close(logits, expected.repeat_interleave(2, 0))
        following, _ = model.step(torch.full((6,), 5), state)
    assert following.shape == (6, VOCABULARY)


def test_new_tokens_are_limited_by_the_model_and_the_request() -> None:
    assert make("encoder_decoder").max_new_tokens([1, 9], None) == [10, 10]
    assert make("encoder_decoder").max_new_tokens([1, 9], 4) == [4, 4]
    assert make("decoder").max_new_tokens([1, 9], None) == [9, 1]
    assert make("decoder").max_new_tokens([1, 9], 4) == [4, 1]
    with pytest.raises(InputError, match="leaves no room"):
        make("decoder").max_new_tokens([10], 4)


def test_an_encoder_refuses_to_generate() -> None:
    model = make("encoder")
    for call in (lambda: model.max_new_tokens([1]), lambda: model.prefill(batch(), 1, 1)):
        with pytest.raises(InputError, match="does not generate text"):
            call()


@pytest.mark.parametrize("kind", KINDS)
def test_token_types_are_refused_without_segment_embeddings(kind: str) -> None:
    with pytest.raises(InputError, match="no segment embeddings"):
        make(kind).logits(batch(), None, torch.zeros(8, dtype=torch.long))
