from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import naive_attend
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qkv.nn import BatchLayout
from qkv.nn.attention_score import AttentionScore, build_score
from qkv.nn.kernels import attend, select_kernel
from qkv.nn.mask import Bidirectional, Causal
from qkv.spec import Attention

DOTS = ["dot", "scaled_dot", "bilinear"]
KERNELS = ["bucketed", "padded", "eager"]
EVEN = [*KERNELS, "uniform"]  # what also takes sequences of one length


@dataclass
class Case:
    score: AttentionScore
    q: Tensor
    k: Tensor
    v: Tensor
    queries: list[int]
    keys: list[int]
    causal: bool

    def inputs(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.score.parameters()]

    def ours(self, kernel: str | None, **options: object) -> Tensor:
        queries = BatchLayout(self.queries)
        keys = queries if self.causal else BatchLayout(self.keys)
        mask = Causal() if self.causal else Bidirectional()
        return attend(self.q, self.k, self.v, queries, keys, score=self.score, mask=mask, kernel=kernel, **options)

    def naive(self) -> Tensor:
        return naive_attend(self.score, self.q, self.k, self.v, self.queries, self.keys, self.causal)


def make(kind: str, heads: int, sizes: tuple[int, int], queries: list[int], keys: list[int], causal: bool) -> Case:
    size, value = sizes
    score = build_score(Attention(query_dim=heads * size, heads=heads, score_fn=kind)).double()

    def numbers(tokens: int, width: int) -> Tensor:
        return torch.randn(tokens, heads, width, dtype=torch.double, requires_grad=True)

    keys = queries if causal else keys
    return Case(
        score, numbers(sum(queries), size), numbers(sum(keys), size), numbers(sum(keys), value), queries, keys, causal
    )


@st.composite
def cases(draw: st.DrawFn, kinds: list[str], even: bool = False) -> Case:
    torch.manual_seed(draw(st.integers(0, 999)))
    rows = draw(st.integers(1, 4))
    lengths = st.lists(st.integers(1, 6), min_size=rows, max_size=rows)
    if even or draw(st.booleans()):  # all sequences equally long: nothing to pad
        lengths = st.integers(1, 5).map(lambda n: [n] * rows)
    sizes = draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
    return make(
        draw(st.sampled_from(kinds)),
        draw(st.integers(1, 3)),
        sizes,
        draw(lengths),
        draw(lengths),
        draw(st.booleans()),
    )


def gradients(case: Case, out: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return list(torch.autograd.grad((out * weights).sum(), case.inputs()))


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None, max_examples=25)
@given(case=cases(DOTS))
def test_every_kernel_gives_the_values_of_the_formula(kernel: str, case: Case) -> None:
    torch.testing.assert_close(case.ours(kernel), case.naive())


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None, max_examples=25)
@given(case=cases(DOTS))
def test_every_kernel_gives_the_gradients_of_the_formula(kernel: str, case: Case) -> None:
    torch.testing.assert_close(gradients(case, case.ours(kernel)), gradients(case, case.naive()))


@pytest.mark.parametrize("kernel", EVEN)
@settings(deadline=None, max_examples=15)
@given(case=cases(DOTS, even=True))
def test_every_kernel_gives_sequences_of_one_length_the_values_and_gradients_of_the_formula(
    kernel: str, case: Case
) -> None:
    out, naive = case.ours(kernel), case.naive()
    torch.testing.assert_close(out, naive)
    torch.testing.assert_close(gradients(case, out), gradients(case, naive))


@settings(deadline=None, max_examples=20)
@given(case=cases(["additive", "mlp"]))
def test_scores_that_are_no_dot_product_give_the_values_of_the_formula(case: Case) -> None:
    torch.testing.assert_close(case.ours(None), case.naive())


@settings(deadline=None, max_examples=20)
@given(case=cases(["additive", "mlp"]))
def test_scores_that_are_no_dot_product_give_the_gradients_of_the_formula(case: Case) -> None:
    torch.testing.assert_close(gradients(case, case.ours(None)), gradients(case, case.naive()))


def by_sequence(case: Case) -> Tensor:
    """The same with matrices, for sequences too long for the double loop."""
    outputs = []
    parts = zip(case.q.split(case.queries), case.k.split(case.keys), case.v.split(case.keys), strict=True)
    for q, k, v in parts:
        e = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        if case.causal:
            e = e + torch.full(e.shape[1:], float("-inf"), dtype=e.dtype).triu(1)
        outputs.append(torch.einsum("hij,jhd->ihd", e.softmax(-1), v))
    return torch.cat(outputs)


LONG = [3, 150, 1, 40, 160, 2, 150, 45]  # so uneven that no one group may hold them all


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_very_different_lengths_give_the_values_of_the_formula(kernel: str, causal: bool) -> None:
    case = make("scaled_dot", 2, (4, 3), LONG, [7, 1, 200, 3, 90, 60, 2, 199], causal)
    torch.testing.assert_close(case.ours(kernel), by_sequence(case))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_very_different_lengths_give_the_gradients_of_the_formula(kernel: str, causal: bool) -> None:
    case = make("scaled_dot", 2, (4, 3), LONG, [7, 1, 200, 3, 90, 60, 2, 199], causal)
    torch.testing.assert_close(gradients(case, case.ours(kernel)), gradients(case, by_sequence(case)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_layout_serves_memories_of_several_layouts(kernel: str) -> None:
    queries, outputs, expected = BatchLayout([2, 3]), [], []
    for keys in ([4, 1], [1, 4], [2, 2]):
        case = make("scaled_dot", 2, (4, 3), [2, 3], keys, causal=False)
        arguments = {"score": case.score, "mask": Bidirectional(), "kernel": kernel}
        outputs.append(attend(case.q, case.k, case.v, queries, BatchLayout(keys), **arguments))
        expected.append(case.naive())
    torch.testing.assert_close(outputs, expected)


def watched(case: Case) -> tuple[Tensor, list[int], list[int], list[int]]:
    seen = []
    case.ours(None, hook=lambda *told: seen.append(told))
    ((weights, rows, queries, keys),) = seen
    return weights, list(rows), list(queries), list(keys)


@settings(deadline=None, max_examples=25)
@given(case=cases([*DOTS, "additive", "mlp"]))
def test_watched_weights_of_real_queries_sum_to_one(case: Case) -> None:
    weights, _, queries, _ = watched(case)
    sums = torch.cat([weights[r, :, :n].sum(-1).flatten() for r, n in enumerate(queries)])
    torch.testing.assert_close(sums, torch.ones_like(sums))


@settings(deadline=None, max_examples=25)
@given(case=cases([*DOTS, "additive", "mlp"]))
def test_watched_weights_of_padding_are_zero(case: Case) -> None:
    weights, _, queries, keys = watched(case)
    behind = [weights[r, :, :n, m:] for r, (n, m) in enumerate(zip(queries, keys, strict=True))]
    assert all(bool((part == 0).all()) for part in behind)


@settings(deadline=None, max_examples=25)
@given(case=cases(DOTS))
def test_a_sink_is_told_which_sequences_it_sees_and_how_long_they_are(case: Case) -> None:
    _, rows, queries, keys = watched(case)
    told = sorted(zip(rows, queries, keys, strict=True))
    assert told == [(b, *pair) for b, pair in enumerate(zip(case.queries, case.keys, strict=True))]


@settings(deadline=None, max_examples=25)
@given(case=cases(DOTS))
def test_watching_changes_no_output(case: Case) -> None:
    torch.testing.assert_close(case.ours(None, hook=lambda *_: None), case.ours(None))


def test_a_watched_layer_takes_the_explicit_path() -> None:
    case = make("dot", 1, (4, 4), [3], [3], causal=False)
    assert select_kernel(case.q, case.v, score=case.score, dropout=0.0, return_weights=True) == "eager"


def test_an_unwatched_dot_product_keeps_a_fused_kernel() -> None:
    case = make("dot", 1, (4, 4), [3], [3], causal=False)
    assert select_kernel(case.q, case.v, score=case.score, dropout=0.0, return_weights=False) != "eager"


@pytest.mark.parametrize("kernel", EVEN)
def test_dropout_drops_weights_and_keeps_their_mean(kernel: str) -> None:
    case = make("dot", 1, (2, 1), [400], [400], causal=False)
    ones = torch.ones_like(case.v)
    arguments = {"score": case.score, "mask": Bidirectional(), "dropout": 0.5, "kernel": kernel}
    out = attend(case.q, case.k, ones, BatchLayout([400]), BatchLayout([400]), **arguments)
    assert 0.9 < out.mean() < 1.1
    assert out.std() > 0.01


def on_gpu(kind: torch.dtype, size: int = 16) -> Tensor:
    """A tensor that says it lies on a GPU; choosing looks at no number."""
    with FakeTensorMode():
        return torch.empty(8, 2, size, dtype=kind, device="cuda")


@pytest.mark.parametrize(
    ("asked", "kernel"),
    [
        ({}, "varlen"),
        ({"uniform_length": True}, "uniform"),
        ({"uniform_length": True, "dropout": 0.1}, "uniform"),
        ({"dropout": 0.1}, "padded"),
        ({"uniform_length": True, "has_bias": True}, "padded"),
        ({"uniform_length": True, "return_weights": True}, "eager"),
    ],
)
def test_a_gpu_in_half_precision_takes_the_fused_kernel_that_can_do_it(asked: dict[str, object], kernel: str) -> None:
    score, q = build_score(Attention(query_dim=32, heads=2)), on_gpu(torch.bfloat16)
    assert select_kernel(q, q, score=score, **({"dropout": 0.0, "return_weights": False} | asked)) == kernel


def test_where_all_must_be_deterministic_no_kernel_that_adds_in_any_order_is_taken() -> None:
    score, q = build_score(Attention(query_dim=32, heads=2)), on_gpu(torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        chosen = {
            select_kernel(q, q, score=score, dropout=0.0, return_weights=False, uniform_length=even)
            for even in (False, True)
        }
    finally:
        torch.use_deterministic_algorithms(False)
    assert chosen == {"padded"}


@pytest.mark.parametrize(
    ("asked", "kernel"),
    [
        ({"max_length": 64}, "short"),
        ({"max_length": 65}, "varlen"),
        ({"max_length": 64, "dropout": 0.1}, "padded"),
        ({"max_length": 64, "uniform_length": True}, "uniform"),
        ({"max_length": 64, "has_bias": True}, "padded"),
    ],
)
def test_short_sequences_take_their_own_kernel(
    asked: dict[str, object], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkv.nn.kernels.MAX_LENGTH", 64)
    score, q = build_score(Attention(query_dim=32, heads=2)), on_gpu(torch.bfloat16)
    assert select_kernel(q, q, score=score, **({"dropout": 0.0, "return_weights": False} | asked)) == kernel


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel of short sequences is for a GPU; there is none")
@pytest.mark.parametrize("size", [16, 24, 64])
@pytest.mark.parametrize("sizes", [([3, 17, 1, 32], [5, 2, 32, 30]), ([3, 17, 1, 64], [5, 2, 33, 64])], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_of_short_sequences_agrees_with_the_explicit_path(
    causal: bool, sizes: tuple[list[int], list[int]], size: int
) -> None:
    queries, keys = (BatchLayout(lengths, "cuda") for lengths in sizes)
    keys = queries if causal else keys
    score = build_score(Attention(query_dim=2 * size, heads=2)).cuda()
    q, k, v = (
        torch.randn(n, 2, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (queries.num_tokens, keys.num_tokens, keys.num_tokens)
    )
    arguments = {"score": score, "mask": Causal() if causal else Bidirectional()}
    short = attend(q, k, v, queries, keys, kernel="short", **arguments)
    exact = attend(q.float(), k.float(), v.float(), queries, keys, kernel="eager", **arguments)
    torch.testing.assert_close(short.float(), exact, atol=2e-2, rtol=2e-2)
    weights = torch.randn_like(exact)
    ours, wanted = (torch.autograd.grad((out.float() * weights).sum(), (q, k, v)) for out in (short, exact))
    torch.testing.assert_close(ours, wanted, atol=3e-2, rtol=3e-2)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="fused attention in half precision is for a GPU; there is none"
)
@pytest.mark.parametrize("causal", [False, True])
def test_one_call_for_sequences_of_one_length_agrees_with_the_explicit_path(causal: bool) -> None:
    queries = BatchLayout([64] * 3, "cuda")
    score = build_score(Attention(query_dim=2 * 16, heads=2)).cuda()
    q, k, v = (torch.randn(192, 2, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    arguments = {"score": score, "mask": Causal() if causal else Bidirectional()}
    fused = attend(q, k, v, queries, queries, **arguments)
    exact = attend(q.float(), k.float(), v.float(), queries, queries, kernel="eager", **arguments)
    torch.testing.assert_close(fused.float(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="variable-length flash attention is a CUDA kernel; no GPU")
@pytest.mark.parametrize("causal", [False, True])
def test_varlen_agrees_with_the_explicit_path(causal: bool) -> None:
    queries = BatchLayout([3, 17, 1, 64], "cuda")
    keys = queries if causal else BatchLayout([5, 2, 33, 64], "cuda")
    score = build_score(Attention(query_dim=2 * 16, heads=2)).cuda()
    q, k, v = (
        torch.randn(n, 2, 16, device="cuda", dtype=torch.bfloat16) for n in (85, keys.num_tokens, keys.num_tokens)
    )
    arguments = {"score": score, "mask": Causal() if causal else Bidirectional()}
    flash = attend(q, k, v, queries, keys, kernel="varlen", **arguments)
    exact = attend(q.float(), k.float(), v.float(), queries, keys, kernel="eager", **arguments)
    torch.testing.assert_close(flash.float(), exact, atol=2e-2, rtol=2e-2)
