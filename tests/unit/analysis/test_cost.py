"""Cost: counted from the spec, equal to what a real forward pass does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from qkv import nn, spec
from qkv.analysis import capture_attention, cost, render_cost_table
from qkv.analysis.cost import AttentionCost
from qkv.analysis.cost_table import format_quantity
from qkv.errors import InputError
from qkv.families import get_family
from qkv.nn import Ragged

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")  # what switching oneDNN off has to say

M, N = 7, 5
TRANSFORMER: dict[str, Any] = {"d_model": 32, "heads": 4, "layers": 2, "d_ff": 48, "decoder_layers": 3}
TRANSFORMERS = [
    TRANSFORMER,
    TRANSFORMER | {"share_embeddings": True, "position": "learned"},
    TRANSFORMER | {"norm_first": True, "gated": True, "activation": "silu"},
]
RNN: dict[str, Any] = {"d_model": 24, "hidden_size": 32}
RNNS = [RNN | {"attention": score} for score in ("none", "dot", "scaled_dot", "bilinear", "additive", "mlp")]
RNNS += [
    RNN | {"cell": "gru", "layers": 2, "decoder_layers": 2},
    RNN | {"bidirectional": False, "readout": False},
    RNN | {"attention": "mlp", "heads": 4},
    RNN | {"attention": "bilinear", "heads": 2},
]
MODELS = [("transformer", shape) for shape in TRANSFORMERS] + [("rnn", shape) for shape in RNNS]


def make(name: str, shape: dict[str, Any], vocabulary: int = 50) -> spec.Model:
    f = get_family(name)
    first = next(iter(f.PRESETS.values()))
    made: spec.Model = f.make_spec(
        dataclasses.replace(first, **shape), source_vocab_size=vocabulary, target_vocab_size=vocabulary
    )
    return made


def one_pair() -> tuple[Ragged, Ragged]:
    return Ragged.pack([torch.randint(4, 50, (M,))]), Ragged.pack([torch.randint(4, 50, (N,))])


def counted(model: Any, *inputs: Ragged) -> int:
    """FLOPs of a real forward pass, every product visible: explicit attention, cells without oneDNN's own kernel."""
    plain_cells = torch.backends.mkldnn.flags(enabled=False)
    with capture_attention(model), plain_cells, FlopCounterMode(display=False) as counter:
        model.eval()(*inputs)
    return int(counter.get_total_flops())


def value(formula: str, a: AttentionCost, m: int = M, n: int = N) -> float:
    """A formula's number."""
    return float(eval(formula.replace("·", "*").replace("²", "**2"), {"M": m, "N": n, "k": a.query_dim}))


@pytest.mark.parametrize(("name", "shape"), MODELS)
def test_forward_flops_are_those_of_a_real_forward_pass(name: str, shape: dict[str, Any]) -> None:
    s = make(name, shape)
    assert cost(s, source_length=M, target_length=N).forward_flops == counted(nn.build(s), *one_pair())


@pytest.mark.parametrize(("name", "shape"), MODELS)
def test_parameters_are_those_of_the_built_model(name: str, shape: dict[str, Any]) -> None:
    s = make(name, shape)
    parameters = cost(s, source_length=M, target_length=N).parameters
    assert parameters["total"] == sum(p.numel() for p in nn.build(s).parameters())
    assert parameters["total"] == sum(count for part, count in parameters.items() if part != "total")


@pytest.mark.parametrize(("name", "shape"), MODELS)
def test_source_and_target_tokens_make_up_the_pair(name: str, shape: dict[str, Any]) -> None:
    c = cost(make(name, shape), source_length=M, target_length=N)
    pair = M * sum(c.flops_per_source_token.values()) + N * sum(c.flops_per_target_token.values())
    assert c.forward_flops - N < pair <= c.forward_flops  # what is done once a pair is rounded down to a token's share


@pytest.mark.parametrize(("name", "shape"), MODELS)
def test_every_formula_gives_the_count_beside_it(name: str, shape: dict[str, Any]) -> None:
    c = cost(make(name, shape), source_length=M, target_length=N)
    for a in c.attentions:
        assert value(a.formula, a) == a.flops_per_layer
        assert a.total_flops == a.flops_per_layer * a.num_layers == c.attention_flops[a.name]
        assert value(a.projection_formula or "0", a) * a.num_layers == c.linear_flops.get(a.name, 0)


def test_the_three_attentions_of_the_transformer() -> None:
    """Problem: Machine Translation, question 3 (Transformers and Pretraining)."""
    found = cost(make("transformer", TRANSFORMER), source_length=M, target_length=N).attentions
    assert {a.name: (a.formula, a.projection_formula) for a in found} == {
        "encoder self-attention": ("4·M²·k", "8·M·k²"),
        "decoder cross-attention": ("4·M·N·k", "4·N·k² + 4·M·k²"),
        "decoder self-attention": ("4·N²·k", "8·N·k²"),
    }
    assert [a.num_layers for a in found] == [2, 3, 3]


@pytest.mark.parametrize(
    ("score", "formula"),
    [
        ("dot", "4·M·N·k"),
        ("scaled_dot", "4·M·N·k"),
        ("bilinear", "2·M·k² + 4·M·N·k"),
        ("additive", "2·M·k² + 2·N·k² + 4·M·N·k"),
        ("mlp", "2·M·k² + 2·N·k² + 2·M·N·k² + 4·M·N·k"),
    ],
)
def test_each_score_has_its_own_formula_and_the_keys_share_is_paid_once_a_source(score: str, formula: str) -> None:
    """Attention weights (Sequence to Sequence models: Attention Models)."""
    (a,) = cost(make("rnn", RNN | {"attention": score}), source_length=M, target_length=N).attentions
    assert a.formula == formula


def test_a_width_that_is_no_multiple_is_written_as_a_number() -> None:
    s = make("transformer", TRANSFORMER)
    odd = spec.replace(s.encoder.block.self_attention, head_dim=5, v_head_dim=7)  # type: ignore[union-attr]
    block = spec.replace(s.encoder.block, self_attention=odd)  # type: ignore[union-attr]
    s = spec.replace(s, encoder=spec.replace(s.encoder, block=block))  # type: ignore[type-var]
    c = cost(s, source_length=M, target_length=N)
    assert c.attentions[0].formula == "96·M²"
    assert c.forward_flops == counted(nn.build(s), *one_pair())


def test_a_second_language_costs_the_decoder_again() -> None:
    """Problem: Machine Translation, question 4."""
    s = make("transformer", TRANSFORMER)
    model = nn.build(s).eval()
    source, target = one_pair()
    memory = model.encode(source)  # type: ignore[union-attr,operator]
    with capture_attention(model), FlopCounterMode(display=False) as again, torch.no_grad():
        model.head(model.decode(memory, target))  # type: ignore[union-attr,operator,misc]
    assert cost(s, source_length=M, target_length=N).second_target_flops == again.get_total_flops()


def test_a_cached_decoder_needs_half_of_the_scores_that_are_counted() -> None:
    s = make("transformer", TRANSFORMER)
    model: Any = nn.build(s).eval()
    source, target = one_pair()
    with torch.no_grad(), capture_attention(model):
        memory = model.encode(source)
        with FlopCounterMode(display=False) as stepped:
            state = model.init_state(memory, num_rows=1, max_length=N)
            for token in target.values:
                _, state = model.step(token[None], state)
    c = cost(s, source_length=M, target_length=N)
    hidden_by_the_mask = c.attention_flops["decoder self-attention"] * (N - 1) // (2 * N)
    assert stepped.get_total_flops() == c.second_target_flops - hidden_by_the_mask


def test_what_is_tied_is_counted_once() -> None:
    own = cost(make("transformer", TRANSFORMER), source_length=M, target_length=N).parameters
    shared = cost(
        make("transformer", TRANSFORMER | {"share_embeddings": True}), source_length=M, target_length=N
    ).parameters
    assert own["source embedding"] == own["target embedding"] == shared["source embedding"] == 50 * 32
    assert own["head"] == shared["head"] == shared["target embedding"] == 0


def test_the_papers_base_model_has_65_million_parameters() -> None:
    """Table 3 of Vaswani et al. 2017, with the joint vocabulary of about 37,000."""
    f = get_family("transformer")
    s = f.make_spec(
        dataclasses.replace(f.PRESETS["base"], share_embeddings=True), source_vocab_size=37000, target_vocab_size=37000
    )
    parameters = cost(s, source_length=M, target_length=N).parameters
    assert parameters["total"] == pytest.approx(65e6, rel=0.04)
    assert parameters["encoder feed-forward"] == 6 * (2 * 512 * 2048 + 512 + 2048)


def test_no_weights_are_made() -> None:
    enormous = make("transformer", {"d_model": 65536, "heads": 64, "layers": 2, "d_ff": 4 * 65536}, vocabulary=10**6)
    assert cost(enormous, source_length=M, target_length=N).parameters["total"] > 3e11  # 1.2 TB, if it were built


@pytest.mark.parametrize(("cell", "gates"), [("lstm", 4), ("gru", 3)])
def test_a_cell_costs_its_gates(cell: str, gates: int) -> None:
    c = cost(make("rnn", RNN | {"cell": cell}), source_length=M, target_length=N)
    assert c.linear_flops["encoder recurrence"] == M * 2 * (
        2 * gates * 16 * (24 + 16)
    )  # two directions of half the width
    assert c.linear_flops["decoder recurrence"] == N * 2 * gates * 32 * (
        24 + 32 + 32
    )  # input and context, and the state


@pytest.mark.parametrize("pool", [None, "additive", "scaled_dot"])
def test_a_classifier_is_counted_too(pool: Any) -> None:
    s = make("transformer", TRANSFORMER)
    asks = None if pool is None else spec.Attention(query_dim=32, score_fn=pool, use_projections=False)
    head = spec.Head(kind="sequence", d_model=32, num_outputs=3, pool=asks)
    s = spec.Model(family="test", encoder=s.encoder, source_embedding=s.source_embedding, head=head)
    c = cost(s, source_length=M, target_length=N)
    assert c.forward_flops == counted(nn.build(s), one_pair()[0])
    assert c.target_length == 0
    assert c.flops_per_target_token == {}
    assert "head" in render_cost_table(c)


def test_a_language_model_is_counted_too() -> None:
    s = make("transformer", TRANSFORMER)
    block = spec.replace(s.decoder.block, cross_attention=None)  # type: ignore[union-attr]
    s = spec.Model(
        family="test", decoder=spec.replace(s.decoder, block=block), target_embedding=s.target_embedding, head=s.head
    )  # type: ignore[type-var]
    c = cost(s, source_length=M, target_length=N)
    assert c.forward_flops == counted(nn.build(s), one_pair()[1])
    assert [a.formula for a in c.attentions] == ["4·N²·k"]
    assert "second language" not in render_cost_table(c)


def test_training_is_three_forwards_and_a_run_its_tokens() -> None:
    s = make("transformer", TRANSFORMER)
    c = cost(s, source_length=M, target_length=N, batch_tokens=1000, steps=10)
    assert c.training_flops == 3 * c.forward_flops
    assert c.total_training_flops == pytest.approx(
        10 * 100 * c.training_flops
    )  # a pair has 12 tokens, 10 of which a budget counts
    assert cost(s, source_length=M, target_length=N, steps=10).total_training_flops is None
    model: Any = nn.build(s)
    with capture_attention(model), FlopCounterMode(display=False) as counter:
        model(*one_pair()).sum().backward()
    # the first layer on each side needs no gradient of its input, but here it is an embedding, which does
    assert counter.get_total_flops() == pytest.approx(c.training_flops, rel=0.01)


@pytest.mark.parametrize(("name", "shape"), [*MODELS[:3], ("rnn", RNN), ("rnn", RNN | {"attention": "mlp"})])
def test_the_activations_estimate_is_of_the_right_size(name: str, shape: dict[str, Any]) -> None:
    s = make(name, shape)
    model: Any = nn.build(s)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    source = Ragged.pack(torch.randint(4, 50, (20,)) for _ in range(8))
    target = Ragged.pack(torch.randint(4, 50, (15,)) for _ in range(8))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        torch.nn.functional.cross_entropy(model(source, target), target.values)
    true = sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in own)
    estimate = cost(s, source_length=20, target_length=15, batch_tokens=8 * 35).memory["activations (estimate)"]
    assert 0.5 < estimate / true < 1.1


@pytest.mark.parametrize(("name", "shape"), MODELS)
def test_decoding_keeps_what_the_model_allocates(name: str, shape: dict[str, Any]) -> None:
    s = make(name, shape)
    model: Any = nn.build(s).eval()
    kept = cost(s, source_length=M, target_length=N).cache
    with torch.no_grad():
        body = model.init_state(model.encode(one_pair()[0]), num_rows=1, max_length=N).layer_states
    if name == "transformer":
        assert sum(c.keys.nbytes + c.values.nbytes for c in body.caches) == N * kept["target token"]
        memories = body.cross_kv
    else:
        assert sum(part.nbytes for layer in body.layers for part in layer) == kept["row"]
        memories = [body.cross_kv] if body.cross_kv is not None else []
    assert sum(m.keys.nbytes + m.values.nbytes for m in memories) == M * kept["source token"]


def test_memory_of_training_is_four_times_the_weights() -> None:
    c = cost(make("rnn", RNN), source_length=M, target_length=N)
    assert c.memory["weights"] == 4 * c.parameters["total"]
    assert sum(c.memory.values()) == 4 * c.memory["weights"]  # gradients and Adam's two moments


@pytest.mark.parametrize("length", [0, -1, 513])
def test_a_length_that_the_model_does_not_take_is_refused(length: int) -> None:
    with pytest.raises(InputError, match=f"source_length: {length} tokens; this model takes 1 to 512"):
        cost(make("rnn", RNN), source_length=length, target_length=N)


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0, "", "0"),
        (999, "", "999"),
        (1000, "", "1.00 k"),
        (999_600, "", "1.00 M"),
        (60_512_000, "", "60.5 M"),
        (1.84e6, "FLOP", "1.84 MFLOP"),
        (242e6, "B", "242 MB"),
        (4.77e20, "FLOP", "477 EFLOP"),
    ],
)
def test_numbers_have_three_digits_and_a_prefix(number: float, unit: str, text: str) -> None:
    assert format_quantity(number, unit) == text


@pytest.mark.parametrize(("name", "shape"), MODELS)
def test_the_table_is_aligned_and_names_every_part(name: str, shape: dict[str, Any]) -> None:
    c = cost(make(name, shape), source_length=M, target_length=N, batch_tokens=1000, steps=100)
    text = render_cost_table(c)
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("module "))
    parts = lines[begin : lines.index("", begin)]
    assert len({len(line) for line in parts}) == 1
    assert all(
        part in text
        for part in [*c.parameters, *c.linear_flops, *c.attention_flops, *(a.formula for a in c.attentions)]
    )
    assert max(map(len, lines)) <= 120
    assert not text.endswith("\n")  # print adds it


def test_attention_to_a_memory_is_counted_as_a_real_forward_pass_computes_it() -> None:
    family, memory_length, length = get_family("transformer_xl"), 24, 8
    config = family.Config(d_model=32, heads=4, layers=2, d_ff=48, memory_length=memory_length)
    model_spec = family.make_spec(config, target_vocab_size=50, eos_id=0)
    model = nn.build(model_spec).eval()
    source = Ragged.pack([torch.arange(length)])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.forward_with_memory(source, model.initial_memory(1))
    with_memory = cost(model_spec, source_length=0, target_length=length, memory_length=memory_length)
    assert with_memory.forward_flops == pytest.approx(counter.get_total_flops(), rel=0.05)
    assert with_memory.attentions[0].formula == "2·N²·k + 6·N·(N+P)·k"
    assert value(with_memory.attentions[0].formula.replace("(N+P)", "32"), with_memory.attentions[0], n=length) == (
        with_memory.attentions[0].flops_per_layer
    )
    assert "N = 8 target tokens after P = 24 of memory" in render_cost_table(with_memory)
    without = cost(model_spec, source_length=0, target_length=length)
    assert without.attentions[0].formula == "8·N²·k"
