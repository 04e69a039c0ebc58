"""Any front end feeds any shell: an encoder-decoder that reads images is a matter of its spec."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkv import spec
from qkv.errors import InputError
from qkv.generation import GenerationConfig, generate
from qkv.nn import BatchLayout, EncoderDecoder, Ragged, build
from qkv.nn.embedding import PatchEmbedding, TokenEmbedding
from qkv.nn.frontend import build_front_end

WIDTH, VOCABULARY = 8, 11
PATCHES = spec.PatchEmbedding(image_size=6, patch_size=2, num_channels=3, d_model=WIDTH)
TOKENS = spec.Embedding(vocab_size=VOCABULARY, d_model=WIDTH, max_length=12)


def block(cross: bool) -> spec.Block:
    attention = spec.Attention(query_dim=WIDTH, heads=2)
    return spec.Block(
        self_attention=attention,
        cross_attention=attention if cross else None,
        feedforward=spec.FeedForward(d_model=WIDTH, d_ff=16),
    )


def captioner(**changes: object) -> EncoderDecoder:
    torch.manual_seed(4)
    model_spec = spec.Model(
        family="test",
        source_embedding=PATCHES,
        encoder=spec.TransformerStack(block=block(cross=False), num_layers=2),
        target_embedding=TOKENS,
        decoder=spec.TransformerStack(block=block(cross=True), num_layers=2, causal=True),
        head=spec.Head(kind="lm", d_model=WIDTH, num_outputs=VOCABULARY, tie_embeddings=True),
    )
    model = build(spec.replace(model_spec, **changes)).eval()
    assert isinstance(model, EncoderDecoder)
    return model


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def packed_images(count: int = 3) -> Ragged:
    """Images in the layout of the vectors that they become, as batches hold them."""
    return Ragged(images(count), BatchLayout([PATCHES.max_length] * count))


def targets() -> Ragged:
    return Ragged.pack([torch.tensor(row) for row in ([2, 5, 6], [2, 7], [2, 4, 4, 9])])


def test_one_factory_builds_every_front_end() -> None:
    assert isinstance(build_front_end(TOKENS), TokenEmbedding)
    assert isinstance(build_front_end(PATCHES), PatchEmbedding)
    with pytest.raises(InputError, match="no target_embedding, which the decoder needs"):
        build_front_end(None, "target")


def test_an_encoder_decoder_over_image_patches_runs_forward() -> None:
    model = captioner()
    with torch.no_grad():
        out = model(images(), targets())
        assert out.shape == (9, VOCABULARY)
        torch.testing.assert_close(model(packed_images(), targets()), out)


def test_every_image_patch_reaches_the_decoder() -> None:
    model, pixels = captioner(), images().requires_grad_()
    model(pixels, targets()).square().sum().backward()
    assert pixels.grad is not None
    assert bool((pixels.grad.abs().sum(1) > 0).all())


def test_an_encoder_decoder_over_image_patches_generates_what_its_teacher_forced_pass_prefers() -> None:
    model, source = captioner(), packed_images()
    with torch.no_grad():
        hypotheses = [rows[0] for rows in generate(model, source, GenerationConfig(max_new_tokens=5))]
        fed = Ragged.pack([torch.tensor([model.spec.bos_id, *h.tokens]) for h in hypotheses])
        logits = fed.with_values(model(source, fed)).sequences()
    for hypothesis, rows in zip(hypotheses, logits, strict=True):
        assert rows.argmax(-1).tolist()[: len(hypothesis.tokens)] == hypothesis.tokens
        assert 0 <= len(hypothesis.tokens) <= 5


def test_beam_search_reads_images_too() -> None:
    model, source = captioner(), packed_images(2)
    with torch.no_grad():
        rows = generate(model, source, GenerationConfig(num_beams=3, max_new_tokens=4))
    assert [len(hypotheses) > 0 for hypotheses in rows] == [True, True]


def test_prefill_takes_bare_images() -> None:
    model = captioner()
    with torch.no_grad():
        logits, state = model.prefill(images(), 2, 4)
        packed, _ = model.prefill(packed_images(), 2, 4)
    assert logits.shape == (6, VOCABULARY)
    assert state.position.tolist() == [1] * 6
    assert torch.equal(logits, packed)


def test_an_image_has_no_embedding_to_share_and_no_tokens_to_shift() -> None:
    with pytest.raises(InputError, match=r"model\.share_embeddings: source and target must both be tokens"):
        captioner(share_embeddings=True)
    with pytest.raises(InputError, match="give it target tokens"):
        captioner().logits(packed_images())


def test_a_front_end_without_segments_refuses_token_types() -> None:
    with pytest.raises(InputError, match="leave"):
        captioner().embed_inputs(images(), torch.zeros(30, dtype=torch.long))
