"""Self-attention with a memory: a sequence has more keys than queries, and its queries are its last tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import naive_attend
from torch import Tensor

from qkv.errors import InputError
from qkv.nn import BatchLayout, Ragged
from qkv.nn.attention import Attention
from qkv.nn.attention_score import build_score
from qkv.nn.kernels import attend, select_kernel
from qkv.nn.mask import Bidirectional, Causal
from qkv.nn.position import RelativePositionBias
from qkv.spec import Attention as AttentionSpec
from qkv.spec import RelativePositionBias as BiasSpec

KERNELS = ["bucketed", "padded", "eager"]
HEADS, SIZE = 2, 4
# (queries, memory) of each sequence: none, equal, and different memories; short sequences and long ones
BATCHES = [
    [(3, 0), (2, 0)],
    [(3, 2), (1, 2), (5, 2)],
    [(3, 0), (2, 4), (4, 1), (1, 4)],
    [(40, 7), (2, 90), (33, 7), (3, 0), (60, 64)],
]


@dataclass
class Case:
    """Random queries, keys and values in double precision."""

    pairs: list[tuple[int, int]]
    score_fn: str = "scaled_dot"

    def __post_init__(self) -> None:
        torch.manual_seed(5)
        self.num_queries, self.num_keys = [n for n, _ in self.pairs], [n + m for n, m in self.pairs]
        self.score = build_score(AttentionSpec(query_dim=HEADS * SIZE, heads=HEADS, score_fn=self.score_fn)).double()
        self.q = torch.randn(sum(self.num_queries), HEADS, SIZE).double().requires_grad_()
        self.k, self.v = (torch.randn(sum(self.num_keys), HEADS, SIZE).double().requires_grad_() for _ in range(2))

    def attend(self, kernel: str | None, mask: Causal | Bidirectional | None = None, **options: object) -> Tensor:
        layouts = BatchLayout(self.num_queries), BatchLayout(self.num_keys)
        return attend(
            self.q, self.k, self.v, *layouts, score=self.score, mask=mask or Causal(), kernel=kernel, **options
        )

    def naive(self) -> Tensor:
        return naive_attend(self.score, self.q, self.k, self.v, self.num_queries, self.num_keys, causal=True)

    def gradients(self, out: Tensor) -> list[Tensor]:
        weights = torch.linspace(-1, 1, out.numel()).double().view_as(out)
        return list(torch.autograd.grad((out * weights).sum(), [self.q, self.k, self.v]))


@pytest.mark.parametrize(("n", "m", "offset"), [(1, 5, 4), (3, 5, 2), (4, 4, 0), (2, 6, 1)])
def test_a_causal_mask_with_an_offset_shows_each_query_the_memory_and_what_precedes_it(
    n: int, m: int, offset: int
) -> None:
    assert Causal().as_tensor(n, m, offset).tolist() == [[j <= offset + i for j in range(m)] for i in range(n)]


def test_a_bidirectional_mask_ignores_the_offset() -> None:
    assert bool(Bidirectional().as_tensor(2, 5, 3).all())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("pairs", BATCHES, ids=str)
def test_causal_attention_with_memory_equals_the_formula(pairs: list[tuple[int, int]], kernel: str) -> None:
    case = Case(pairs)
    out, naive = case.attend(kernel), case.naive()
    torch.testing.assert_close(out, naive)
    torch.testing.assert_close(case.gradients(out), case.gradients(naive))


@settings(deadline=None, max_examples=25)
@given(pairs=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=6))
def test_kernels_agree_whatever_the_memories(pairs: list[tuple[int, int]]) -> None:
    case = Case(pairs)
    first, *others = (case.attend(kernel) for kernel in KERNELS)
    for other in others:
        torch.testing.assert_close(other, first)


def test_one_call_for_sequences_of_one_length_equals_the_formula() -> None:
    case = Case([(3, 2)] * 4)
    torch.testing.assert_close(case.attend("uniform"), case.naive())


@pytest.mark.parametrize("score_fn", ["bilinear", "additive", "mlp"])
def test_every_score_function_takes_a_memory(score_fn: str) -> None:
    case = Case([(2, 3), (4, 1)], score_fn)
    torch.testing.assert_close(case.attend(None), case.naive())


def test_more_queries_than_keys_are_refused() -> None:
    case = Case([(2, 3)])
    with pytest.raises(InputError, match="at least as many keys as queries"):
        attend(case.k, case.q, case.q, BatchLayout([5]), BatchLayout([2]), score=case.score, mask=Causal())


def test_attention_with_memory_equals_the_last_queries_of_the_whole_sequence() -> None:
    torch.manual_seed(2)
    attention = Attention(AttentionSpec(query_dim=8, heads=2)).double()
    sequences = [torch.randn(n, 8).double() for n in (6, 9)]
    whole = attention(Ragged.pack(sequences), mask=Causal()).sequences()
    queries = Ragged.pack([sequences[0][4:], sequences[1][2:]])
    last = attention(queries, Ragged.pack(sequences), mask=Causal()).sequences()
    torch.testing.assert_close(last, [whole[0][4:], whole[1][2:]])


def query_dependent_bias(num_queries: int, num_keys: int, offset: int = 0, queries: Tensor | None = None) -> Tensor:
    """Transformer-XL's kind of term: the query times a vector of the distance."""
    assert queries is not None
    distance = torch.arange(num_keys)[None] - torch.arange(num_queries)[:, None] - offset  # [N, M]
    vectors = torch.sin(distance[..., None].double() * torch.linspace(0.1, 1, SIZE).double())  # [N, M, size]
    return torch.einsum("bhns,nms->bhnm", queries, vectors)


def naive_biased(case: Case, causal: bool) -> Tensor:
    rows = []
    parts = zip(case.q.split(case.num_queries), case.k.split(case.num_keys), case.v.split(case.num_keys), strict=True)
    for q, k, v in parts:
        for i in range(len(q)):
            position = len(k) - len(q) + i
            visible = position + 1 if causal else len(k)
            for head in range(HEADS):
                vectors = torch.stack(
                    [torch.sin((j - position) * torch.linspace(0.1, 1, SIZE).double()) for j in range(visible)]
                )
                e = k[:visible, head] @ q[i, head] / SIZE**0.5 + vectors @ q[i, head]
                rows.append(e.softmax(0) @ v[:visible, head])
    return torch.stack(rows).view(-1, HEADS, SIZE)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pairs", BATCHES[:3], ids=str)
def test_a_bias_may_depend_on_the_queries(pairs: list[tuple[int, int]], causal: bool, kernel: str) -> None:
    case = Case(pairs)
    out = case.attend(kernel, Causal() if causal else Bidirectional(), bias=query_dependent_bias)
    naive = naive_biased(case, causal)
    torch.testing.assert_close(out, naive)
    torch.testing.assert_close(case.gradients(out), case.gradients(naive))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_relative_position_bias_counts_distances_from_the_memory(kernel: str) -> None:
    torch.manual_seed(3)
    relative = RelativePositionBias(BiasSpec(num_buckets=8, max_distance=20), HEADS, causal=True).double()
    torch.nn.init.normal_(relative.weight)

    def bias(num_queries: int, num_keys: int, offset: int = 0, queries: Tensor | None = None) -> Tensor:  # noqa: ARG001
        return relative(torch.arange(num_queries) + offset, torch.arange(num_keys))

    whole = Case([(9, 0), (6, 0)])
    expected = whole.attend("eager", bias=bias).split([9, 6])
    with_memory = Case([(5, 4), (2, 4)])
    with_memory.q = torch.cat([whole.q[4:9], whole.q[13:]])
    with_memory.k, with_memory.v, with_memory.score = whole.k, whole.v, whole.score
    torch.testing.assert_close(with_memory.attend(kernel, bias=bias), torch.cat([expected[0][4:], expected[1][4:]]))


def test_recorded_weights_name_their_sequences_when_memories_differ() -> None:
    case = Case([(2, 3), (1, 0), (2, 1)])
    recorded = {}

    def hook(weights: Tensor, rows: list[int], queries: list[int], keys: list[int]) -> None:
        recorded.update({row: (n, m) for row, n, m in zip(rows, queries, keys, strict=True)})
        assert len(weights) == len(rows)

    case.attend(None, hook=hook)
    assert recorded == {0: (2, 5), 1: (1, 1), 2: (2, 3)}


def test_a_memory_on_a_gpu_goes_to_a_kernel_that_aligns_queries_to_the_last_key() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(8, 2, 16, dtype=torch.bfloat16, device="cuda")
    score = build_score(AttentionSpec(query_dim=32, heads=2))
    options = {"score": score, "return_weights": False, "uniform_length": True, "has_memory": True}
    assert select_kernel(q, q, dropout=0.0, **options) == "varlen"
    assert select_kernel(q, q, dropout=0.1, **options) == "padded"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="variable-length flash attention is a CUDA kernel; no GPU")
@pytest.mark.parametrize("kernel", ["varlen", "padded", "uniform"])
def test_gpu_kernels_agree_with_the_explicit_path(kernel: str) -> None:
    num_queries, num_keys = ([64] * 3, [192] * 3) if kernel == "uniform" else ([3, 17, 1, 64], [5, 17, 33, 200])
    queries, keys = BatchLayout(num_queries, "cuda"), BatchLayout(num_keys, "cuda")
    score = build_score(AttentionSpec(query_dim=2 * 16, heads=2)).cuda()
    q, k, v = (
        torch.randn(n, 2, 16, device="cuda", dtype=torch.bfloat16)
        for n in (sum(num_queries), sum(num_keys), sum(num_keys))
    )
    out = attend(q, k, v, queries, keys, score=score, mask=Causal(), kernel=kernel)
    exact = attend(q.float(), k.float(), v.float(), queries, keys, score=score, mask=Causal(), kernel="eager")
    torch.testing.assert_close(out.float(), exact, atol=2e-2, rtol=2e-2)
