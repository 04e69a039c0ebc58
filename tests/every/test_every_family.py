"""One law, every model: what holds for all registered families in all their variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CASES, Batch, Case, begin, outputs, with_decoder, with_stack
from torch import Tensor

from qkv.analysis.cost import cost
from qkv.checkpoints import ModelBundle, load, save
from qkv.checkpoints.state import unique_state_dict
from qkv.errors import InputError
from qkv.families import get_family
from qkv.nn import build
from qkv.nn.attention import Attention
from qkv.spec import BagOfWords, from_json, to_json

BATCH = Batch.random([5, 1, 7, 3], [4, 6, 2, 1])
EVEN = Batch.random([5, 2, 7], [6, 6, 6])


def law(cases: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in cases.items()])


def walk(model: Any, state: Any, columns: Tensor) -> tuple[Tensor, Any]:
    """Logits of each step when the rows of [R, N] are fed one column at a time.  # [R, N, vocabulary]"""
    logits = []
    for tokens in columns.T:
        step, state = model.step(tokens, state)
        logits.append(step)
    return torch.stack(logits, 1), state


@law(CASES)
def test_a_spec_comes_back_from_json_as_it_was(case: Case) -> None:
    assert from_json(to_json(case.spec())) == case.spec()


@law(CASES)
def test_a_sequence_does_not_depend_on_its_batch_mates(case: Case) -> None:
    model = case.model()
    alone = [outputs(model, BATCH.take([i]))[0] for i in range(len(BATCH))]
    torch.testing.assert_close(outputs(model, BATCH), alone)


@law(CASES)
def test_the_order_of_sequences_in_a_batch_does_not_matter(case: Case) -> None:
    model, order = case.model(), [2, 0, 3, 1]
    ordered = outputs(model, BATCH)
    torch.testing.assert_close(outputs(model, BATCH.take(order)), [ordered[i] for i in order])


@law(with_decoder())
def test_an_output_does_not_depend_on_future_tokens(case: Case) -> None:
    model = case.model()
    changed = Batch(EVEN.sources, [torch.cat([t[:3], (t[3:] + 1) % 13]) for t in EVEN.targets])
    before = [o[:3] for o in outputs(model, EVEN)]
    torch.testing.assert_close([o[:3] for o in outputs(model, changed)], before)


@law(with_decoder())
def test_an_output_depends_on_its_own_token(case: Case) -> None:
    model = case.model()
    changed = Batch(EVEN.sources, [torch.cat([t[:3], (t[3:] + 1) % 13]) for t in EVEN.targets])
    assert not any(
        torch.allclose(a[3], b[3]) for a, b in zip(outputs(model, EVEN), outputs(model, changed), strict=True)
    )


@law(with_decoder())
def test_cached_steps_equal_the_full_forward(case: Case) -> None:
    model = case.model()
    steps, _ = walk(model, begin(model, EVEN, rows=3, limit=6), torch.stack(EVEN.targets))
    torch.testing.assert_close(list(steps), outputs(model, EVEN))


@law(with_decoder())
def test_beams_of_one_sentence_equal_that_sentence_alone(case: Case) -> None:
    model, tokens = case.model(), torch.stack(EVEN.targets)
    one, _ = walk(model, begin(model, EVEN, rows=3, limit=6), tokens)
    two, _ = walk(model, begin(model, EVEN, rows=6, limit=6), tokens.repeat_interleave(2, 0))
    torch.testing.assert_close(two, one.repeat_interleave(2, 0))


@law(with_decoder())
def test_after_reorder_a_row_goes_on_from_the_row_it_was_given(case: Case) -> None:
    model, beams = case.model(), torch.randint(13, (6, 4), generator=torch.Generator().manual_seed(5))
    chosen = torch.tensor([1, 0, 3, 3, 4, 4])  # within each sentence's two rows
    _, state = walk(model, begin(model, EVEN, rows=6, limit=6), beams[:, :3])
    state.reorder(chosen)
    after, _ = walk(model, state, beams[chosen, 3:])
    straight, _ = walk(model, begin(model, EVEN, rows=6, limit=6), beams[chosen])
    torch.testing.assert_close(after[:, 0], straight[:, 3])


@law(with_stack())
@pytest.mark.parametrize("kernel", ["bucketed", "padded", "eager"])
def test_every_kernel_agrees(case: Case, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, used = case.model(), []
    chosen = outputs(model, BATCH)
    monkeypatch.setattr("qkv.nn.kernels.select_kernel", lambda *_, **__: used.append(kernel) or kernel)
    torch.testing.assert_close(outputs(model, BATCH), chosen)
    assert used, "the forced kernel was never asked for"


def watch(model: Any) -> list[tuple[Tensor, list[int]]]:
    """Places a sink in each attention; gives what they will be told: weights and how many queries are real."""
    seen: list[tuple[Tensor, list[int]]] = []
    for module in model.modules():
        if isinstance(module, Attention):
            module.hook = lambda weights, _, queries, __: seen.append((weights, list(queries)))
    return seen


@law(CASES)
def test_watching_changes_no_output(case: Case) -> None:
    model = case.model()
    unwatched = outputs(model, BATCH)
    watch(model)
    torch.testing.assert_close(outputs(model, BATCH), unwatched)


@law({name: case for name, case in CASES.items() if any(isinstance(m, Attention) for m in case.model().modules())})
def test_watched_rows_sum_to_one(case: Case) -> None:
    model = case.model()
    seen = watch(model)
    outputs(model, BATCH)
    sums = [w[row, :, :n].sum(-1).flatten() for w, queries in seen for row, n in enumerate(queries)]
    torch.testing.assert_close(torch.cat(sums), torch.ones(sum(map(len, sums)), dtype=torch.double))


def gradients(model: Any, batches: list[Batch]) -> dict[str, Tensor | None]:
    """Of a sum over all outputs, gathered over batches."""
    model.zero_grad()
    for batch in batches:
        sum((out * (1 + out).cos()).sum() for out in outputs(model, batch)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


@law(CASES)
def test_gradients_do_not_depend_on_how_a_batch_is_cut(case: Case) -> None:
    model = case.model()
    whole = {name: None if g is None else g.clone() for name, g in gradients(model, [BATCH]).items()}
    cut = gradients(model, [BATCH.take([3, 0]), BATCH.take([1]), BATCH.take([2])])
    torch.testing.assert_close(cut, whole)


@law(CASES)
def test_every_parameter_receives_a_gradient(case: Case) -> None:
    found = gradients(case.model(), [BATCH])
    # the softmax cancels a key's bias, so that its gradient is zero: only matrices must move
    still = [name for name, g in found.items() if g is None or (g.dim() > 1 and not g.any())]
    assert not still


@law(CASES)
def test_outputs_are_the_same_twice_in_eval(case: Case) -> None:
    model = case.model()
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, BATCH), outputs(model, BATCH), strict=True))


@law({name: case for name, case in CASES.items() if hasattr(get_family(case.name), "HF_FORMAT")})
def test_a_checkpoint_goes_out_and_comes_in_again_as_it_was(case: Case, tmp_path: Path) -> None:
    model = case.model().float()
    try:
        save(ModelBundle(model), tmp_path, "huggingface")
    except InputError:  # a variant that their config cannot say is refused, never written as something else
        assert case.shape != CASES[case.name].shape or case.pooling is not None
        assert not (tmp_path / "model.safetensors").exists()
        return
    again = load(tmp_path)
    assert (again.missing_keys, again.unexpected_keys, again.model.spec) == ((), (), model.spec)
    before, after = unique_state_dict(model), unique_state_dict(again.model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@law(CASES)
def test_a_folder_of_ours_gives_the_model_back_as_it_was(case: Case, tmp_path: Path) -> None:
    model = case.model().float()
    save(ModelBundle(model), tmp_path)
    again = load(tmp_path).model
    assert again.spec == model.spec
    before, after = unique_state_dict(model), unique_state_dict(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@law(CASES)
def test_the_cost_counts_every_parameter_once(case: Case) -> None:
    model = case.spec()
    lengths = {
        "source_length": min(5, model.source_embedding.max_length) if model.source_embedding else 0,
        "target_length": 4,
    }
    counted = cost(model, **lengths)
    assert counted.parameters["total"] == sum(p.numel() for p in build(model).parameters())
    multiplies = model.head is not None or not isinstance(model.encoder, BagOfWords)
    assert (sum(counted.linear_flops.values()) > 0) == multiplies
