"""Distances in buckets (Raffel et al. 2020): which bucket, and the same answer from every kernel and step by step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkv import spec
from qkv.errors import InputError
from qkv.nn import BatchLayout, Decoder, Ragged, build
from qkv.nn.attention_score import build_score
from qkv.nn.kernels import attend
from qkv.nn.mask import Bidirectional, Causal
from qkv.nn.position import RelativePositionBias
from qkv.nn.stack import EncoderOutput, Stack

KERNELS = ["bucketed", "padded", "eager"]
SIZES = [(32, 128), (8, 20), (5, 7), (4, 3)]
LENGTHS = [[1], [5, 1, 7, 3], [33, 2, 40, 1, 1], [31, 31], [9] * 8, [20, 13]]


def naive_bucket(distance: int, buckets: int, furthest: int, causal: bool) -> int:
    """How far a key stands behind (or, where that is allowed, ahead of) its query: whole numbers alone."""
    if not causal:
        half = buckets // 2
        return (half if distance > 0 else 0) + naive_bucket(-abs(distance), half, furthest, causal=True)
    back = max(-distance, 0)
    exact = buckets // 2
    if back < exact:
        return back
    shared = buckets - exact
    # the j-th shared bucket begins at exact * (furthest / exact)^(j / shared)
    begun = [j for j in range(shared) if furthest**j * exact ** (shared - j) <= back**shared]
    return exact + begun[-1]


@pytest.mark.parametrize(("buckets", "furthest"), SIZES)
@pytest.mark.parametrize("causal", [True, False])
def test_a_bucket_is_what_the_paper_says_written_out(buckets: int, furthest: int, causal: bool) -> None:
    relative = RelativePositionBias(
        spec.RelativePositionBias(num_buckets=buckets, max_distance=furthest), heads=1, causal=causal
    )
    distances = torch.arange(-3 * furthest, 3 * furthest + 1)
    naive = [naive_bucket(d, buckets, furthest, causal) for d in distances.tolist()]
    assert relative.compute_bucket(distances[None])[0].tolist() == naive


def test_every_bucket_is_used_and_far_ones_hold_more() -> None:
    relative = RelativePositionBias(spec.RelativePositionBias(), heads=1, causal=True)
    counts = torch.bincount(relative.compute_bucket(-torch.arange(128)[None])[0], minlength=32)
    assert counts[:16].tolist() == [1] * 16
    assert (counts[16:-1].diff() >= -1).all()
    assert counts.min() >= 1


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 16), (2, 128), (3, 128)])
def test_buckets_that_cannot_be_filled_are_refused(buckets: int, furthest: int) -> None:
    with pytest.raises(InputError, match=f"{buckets} buckets"):
        RelativePositionBias(
            spec.RelativePositionBias(num_buckets=buckets, max_distance=furthest), 1, causal=furthest == 16
        )


def test_a_position_bias_needs_as_many_keys_as_queries() -> None:
    score, layouts = build_score(spec.Attention(query_dim=4, score_fn="dot")), (BatchLayout([2]), BatchLayout([1]))
    x = torch.randn(2, 1, 4)
    with pytest.raises(InputError, match="at least as many keys as queries"):
        attend(x, x[:1], x[:1], *layouts, score=score, mask=Bidirectional(), bias=lambda n, m, *_: torch.zeros(1, n, m))


class Case:
    """Queries, keys and values of some sequences, and a table of distances, in double precision."""

    def __init__(self, lengths: list[int], causal: bool, heads: int = 3, size: int = 4):
        self.lengths, self.causal = lengths, causal
        self.score = build_score(spec.Attention(query_dim=heads * size, heads=heads, score_fn="dot"))
        self.q, self.k, self.v = (torch.randn(sum(lengths), heads, size).double().requires_grad_() for _ in range(3))
        self.relative = RelativePositionBias(
            spec.RelativePositionBias(num_buckets=8, max_distance=20), heads, causal
        ).double()
        torch.nn.init.normal_(self.relative.weight)

    def bias(self, num_queries: int, num_keys: int, offset: int = 0, queries: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self.relative(torch.arange(num_queries) + offset, torch.arange(num_keys))

    def ours(self, kernel: str | None) -> Tensor:
        layout, mask = BatchLayout(self.lengths), Causal() if self.causal else Bidirectional()
        given = {"score": self.score, "mask": mask, "bias": self.bias, "kernel": kernel}
        return attend(self.q, self.k, self.v, layout, layout, **given)

    def naive(self) -> Tensor:
        rows = []
        for q, k, v in zip(*(x.split(self.lengths) for x in (self.q, self.k, self.v)), strict=True):
            for i in range(len(q)):
                keys = range(i + 1 if self.causal else len(k))
                buckets = [naive_bucket(j - i, 8, 20, self.causal) for j in keys]
                e = (q[i] * k[: len(keys)]).sum(-1) + self.relative.weight[buckets]  # [keys, H]
                w = e.exp() / e.exp().sum(0)
                rows.append((w[..., None] * v[: len(keys)]).sum(0))
        return torch.stack(rows)

    def gradients(self, out: Tensor) -> list[Tensor]:
        wanted = [self.q, self.k, self.v, self.relative.weight]
        return list(torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), wanted))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_kernel_adds_a_number_a_distance(lengths: list[int], causal: bool, kernel: str) -> None:
    case = Case(lengths, causal)
    torch.testing.assert_close(case.ours(kernel), case.naive())
    torch.testing.assert_close(case.gradients(case.ours(kernel)), case.gradients(case.naive()))


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), causal=st.booleans())
@settings(max_examples=20, deadline=None)
def test_kernels_agree_whatever_the_lengths(lengths: list[int], causal: bool) -> None:
    case = Case(lengths, causal)
    first, *others = (case.ours(kernel) for kernel in KERNELS)
    for other in others:
        torch.testing.assert_close(other, first)


def stack(causal: bool = True) -> spec.TransformerStack:
    block = spec.Block(
        self_attention=spec.Attention(query_dim=12, heads=2, score_fn="dot", bias=False),
        feedforward=spec.FeedForward(d_model=12, d_ff=8),
        norm=spec.Norm(kind="rms"),
        norm_first=True,
    )
    return spec.TransformerStack(
        block=block,
        num_layers=2,
        causal=causal,
        relative_position_bias=spec.RelativePositionBias(num_buckets=8, max_distance=20),
    )


def drawn(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module.double().eval()


def test_one_table_serves_all_layers() -> None:
    names = [name for name, _ in Stack(stack()).named_parameters() if "relative" in name]
    assert names == ["relative_position_bias.weight"]


def test_steps_equal_the_full_forward() -> None:
    model = drawn(Stack(stack()))
    x = torch.randn(3, 30, 12).double()  # [rows, tokens, width]
    full = model(Ragged.from_lengths(x.flatten(0, 1), [30] * 3))
    assert isinstance(full, EncoderOutput)
    state = model.init_state(None, 3, 30, x)
    steps = torch.stack([model.step(x[:, t], state) for t in range(30)], 1)
    torch.testing.assert_close(steps.flatten(0, 1), full.hidden.values)


def test_steps_after_prompts_of_any_length_equal_the_full_forward() -> None:
    embed = spec.Embedding(vocab_size=11, d_model=12, position="none")
    head = spec.Head(kind="lm", d_model=12, num_outputs=11)
    model = drawn(build(spec.Model(family="test", target_embedding=embed, decoder=stack(), head=head)))
    assert isinstance(model, Decoder)
    prompts, more = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [3]], [[5, 8], [9, 7], [9, 3]]
    logits, state = model.prefill(Ragged.pack([torch.tensor(p) for p in prompts]), rows_per_source=1, max_new_tokens=2)
    found = [logits]
    for tokens in torch.tensor(more).T:
        logits, state = model.step(tokens, state)
        found.append(logits)
    for row, (prompt, rest) in enumerate(zip(prompts, more, strict=True)):
        whole = model(Ragged.pack([torch.tensor([*prompt, *rest])]))
        torch.testing.assert_close(torch.stack([step[row] for step in found]), whole[len(prompt) - 1 :])


def test_an_unscaled_dot_product_begins_as_small_as_the_scaled_one() -> None:
    spreads = {}
    for score in ("dot", "scaled_dot"):
        attention = spec.Attention(query_dim=256, heads=4, score_fn=score, bias=False)
        block = spec.replace(stack().block, self_attention=attention, feedforward=spec.FeedForward(d_model=256, d_ff=8))
        embed = spec.Embedding(vocab_size=9, d_model=256, position="none")
        model = build(
            spec.Model(family="test", source_embedding=embed, encoder=spec.TransformerStack(block=block, num_layers=1))
        )
        made = model.encoder.blocks[0].self_attention
        q, k = (
            layer(torch.randn(50, 256)).view(50, 4, 64).transpose(0, 1) for layer in (made.q, made.k)
        )  # [H, T, key]
        spreads[score] = float(made.score(q, k).detach().std())
    assert spreads["dot"] == pytest.approx(spreads["scaled_dot"], rel=0.2)
