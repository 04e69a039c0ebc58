"""A decoder that reads prompts of different lengths and goes on from each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qkv import spec
from qkv.analysis.capture import capture_attention
from qkv.errors import InputError
from qkv.nn import Decoder, Ragged, build

VOCABULARY, LIMIT, ROWS = 13, 5, 3
SIZES = [4, 7, 1, 5]
KINDS: dict[str, dict[str, Any]] = {
    "sinusoids": {},
    "learned positions": {"position": "learned"},
    "distances": {
        "position": "none",
        "relative_position_bias": spec.RelativePositionBias(num_buckets=4, max_distance=6),
    },
    "scaled by depth": {"scale_attn_by_inverse_layer_idx": True, "score": "dot"},
    "bilinear": {"score": "bilinear"},
    "additive": {
        "score": "additive",
        "relative_position_bias": spec.RelativePositionBias(num_buckets=4, max_distance=6),
    },
    "mlp": {"score": "mlp"},
}


def decoder(
    position: Any = "sinusoid", score: Any = "scaled_dot", length: int = 16, head: Any = "lm", **stack: Any
) -> Decoder:
    """In double precision, so that equal means equal."""
    torch.manual_seed(1)
    block = spec.Block(
        self_attention=spec.Attention(query_dim=12, heads=3, score_fn=score),
        feedforward=spec.FeedForward(d_model=12, d_ff=20),
        norm_first=True,
    )
    model = build(
        spec.Model(
            family="test",
            target_embedding=spec.Embedding(vocab_size=VOCABULARY, d_model=12, max_length=length, position=position),
            decoder=spec.TransformerStack(block=block, num_layers=2, causal=True, final_norm=True, **stack),
            head=spec.Head(kind=head, d_model=12, num_outputs=VOCABULARY),
            init_std=0.5,
        )
    )
    assert isinstance(model, Decoder)
    return model.double().eval()


def drawn(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(sum(shape)))


PROMPTS = Ragged.from_lengths(drawn(sum(SIZES)), SIZES)
MORE = drawn(len(SIZES) * ROWS, LIMIT)  # what each row goes on with: all of them differ


def followed(model: Decoder, prompts: Ragged, more: Tensor, rows: int) -> Tensor:
    """The full forward's logits from each prompt's last token on, for what each row goes on with.  # [R, n + 1, V]"""
    whole = [
        torch.cat([prompt, tokens])
        for prompt, each in zip(prompts.sequences(), more.view(len(prompts), rows, -1), strict=True)
        for tokens in each
    ]
    outputs = Ragged.pack(whole).with_values(model(Ragged.pack(whole))).sequences()
    return torch.stack([out[-more.shape[1] - 1 :] for out in outputs])


def walk(model: Decoder, logits: Tensor, state: Any, more: Tensor) -> tuple[Tensor, Any]:
    seen = [logits]
    for tokens in more.T:
        logits, state = model.step(tokens, state)
        seen.append(logits)
    return torch.stack(seen, 1), state  # [R, n + 1, V]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("rows", [1, ROWS])
def test_steps_after_prompts_of_different_lengths_equal_the_full_forward(kind: dict[str, Any], rows: int) -> None:
    model, more = decoder(**kind), MORE[: len(SIZES) * rows]
    steps, _ = walk(model, *model.prefill(PROMPTS, rows, LIMIT + 1), more)
    torch.testing.assert_close(steps, followed(model, PROMPTS, more, rows))


def test_prompts_of_one_length_need_no_mask_and_equal_the_full_forward() -> None:
    model, prompts = decoder(), Ragged.from_lengths(drawn(12), [6, 6])
    logits, state = model.prefill(prompts, ROWS, LIMIT + 1)
    assert all(cache.mask is None for cache in state.layer_states.caches)
    steps, _ = walk(model, logits, state, MORE[: 2 * ROWS])
    torch.testing.assert_close(steps, followed(model, prompts, MORE[: 2 * ROWS], ROWS))


@pytest.mark.parametrize("kind", [KINDS["learned positions"], KINDS["distances"]], ids=["learned", "distances"])
def test_after_reorder_a_row_goes_on_from_the_row_it_was_given(kind: dict[str, Any]) -> None:
    model = decoder(**kind)
    chosen = torch.tensor([1, 0, 2, 3, 3, 3, 8, 6, 7, 11, 10, 9])  # within each prompt's three rows
    before, state = walk(model, *model.prefill(PROMPTS, ROWS, LIMIT + 1), MORE[:, :3])
    state.reorder(chosen)
    after, _ = walk(model, before[chosen, -1], state, MORE[chosen, 3:])
    torch.testing.assert_close(after, followed(model, PROMPTS, MORE[chosen], ROWS)[:, 3:])


def test_a_row_that_has_no_place_left_is_carried_along_and_disturbs_no_other() -> None:
    model = decoder(position="learned", length=8)  # the prompt of seven tokens has room for one more
    steps, _ = walk(model, *model.prefill(PROMPTS, 1, 4), MORE[: len(SIZES), :3])
    others, kept = [0, 2], Ragged.pack([PROMPTS.sequences()[i] for i in (0, 2)])
    torch.testing.assert_close(steps[others], followed(model, kept, MORE[others, :3], 1))


def test_what_comes_after_one_prompt_does_not_depend_on_the_others() -> None:
    model, more = decoder(), MORE[: len(SIZES)]
    together, _ = walk(model, *model.prefill(PROMPTS, 1, LIMIT + 1), more)
    for i, prompt in enumerate(PROMPTS.sequences()):
        alone, _ = walk(model, *model.prefill(Ragged.pack([prompt]), 1, LIMIT + 1), more[i : i + 1])
        torch.testing.assert_close(alone[0], together[i])


def test_maps_watched_while_going_on_equal_those_of_the_full_forward() -> None:
    model, more = decoder(), MORE[: len(SIZES)]
    whole = Ragged.pack([torch.cat([p, m]) for p, m in zip(PROMPTS.sequences(), more, strict=True)])
    with capture_attention(model) as maps:
        model(whole)
        wanted = {name: [rows.clone() for rows in maps[name]] for name in maps}
    with capture_attention(model) as maps:
        walk(model, *model.prefill(PROMPTS, 1, LIMIT + 1), more)
        for name in wanted:
            torch.testing.assert_close(maps[name], wanted[name])


def test_reading_without_a_language_model_head_is_refused() -> None:
    with pytest.raises(InputError, match="head of kind 'lm'"):
        decoder(head="token").prefill(PROMPTS, 1, 2)


def test_a_prompt_longer_than_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="at most 6"):
        decoder(length=6).prefill(PROMPTS, 1, 2)
