"""XLNet's two streams: what the query stream can know, and what memory carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.checkpoints import ModelBundle, save
from qkv.errors import InputError
from qkv.families import bert, xlnet
from qkv.nn import Ragged, build
from qkv.nn.memory import Memory
from qkv.nn.two_stream import TwoStreamEncoder
from qkv.spec import LoraConfig, replace

VOCABULARY, MEMORY = 23, 6
LENGTHS = [7, 12, 3]
# ranks of three sequences; 0: given
ORDER = torch.tensor([0, 3, 0, 1, 0, 0, 2, 0, 0, 4, 1, 2, 0, 0, 0, 3, 5, 0, 0, 1, 0, 2])


def make_model(**changes: Any) -> TwoStreamEncoder:
    torch.manual_seed(3)
    config = xlnet.Config(d_model=24, heads=3, layers=3, d_ff=32, init_std=0.3, **changes)
    model = build(xlnet.make_spec(config, source_vocab_size=VOCABULARY)).double().eval()
    assert isinstance(model, TwoStreamEncoder)
    return model


def tokens(seed: int = 0, lengths: list[int] = LENGTHS) -> Ragged:
    ids = torch.randint(VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return Ragged.from_lengths(ids, lengths)


def predict(model: TwoStreamEncoder, source: Ragged) -> Tensor:
    """Return the logits of all targets, in the order of the text."""
    with torch.no_grad():
        return model(source, source.layout.positions % 2, ORDER.nonzero().flatten(), order=ORDER)


def test_a_prediction_depends_on_tokens_of_lower_ranks_only() -> None:
    model, source = make_model(), tokens()
    targets, sequence = ORDER.nonzero().flatten(), source.layout.sequence_ids()
    before = predict(model, source)
    for changed in range(len(ORDER)):
        ids = source.values.clone()
        ids[changed] = (ids[changed] + 1) % VOCABULARY
        moved = (predict(model, source.with_values(ids)) - before).abs().amax(-1) > 1e-9
        sees = (sequence[targets] == sequence[changed]) & (ORDER[changed] < ORDER[targets])
        assert torch.equal(moved, sees), f"token {changed}"


def test_the_first_token_of_an_order_is_predicted_from_its_position_alone() -> None:
    model = make_model()
    order, targets = torch.arange(5), torch.arange(5)
    logits = [model(tokens(seed, [5]), None, targets, order=order)[0] for seed in (0, 1)]
    torch.testing.assert_close(*logits)
    assert torch.isfinite(logits[0]).all()


def test_predictions_of_a_sequence_do_not_depend_on_the_batch() -> None:
    model, source = make_model(), tokens()
    whole, offset, alone = predict(model, source), 0, []
    for ids in source.sequences():
        order = ORDER[offset : offset + len(ids)]
        single = Ragged.pack([ids])
        alone.append(model(single, single.layout.positions % 2, order.nonzero().flatten(), order=order))
        offset += len(ids)
    torch.testing.assert_close(torch.cat(alone), whole)


def test_a_masked_token_is_predicted_without_its_content() -> None:
    model, positions = make_model(), torch.tensor([2, 9, 20])
    first, second = tokens(), tokens()
    second.values[positions] = (second.values[positions] + 3) % VOCABULARY
    torch.testing.assert_close(model.logits(first, positions), model.logits(second, positions))


def test_gradients_of_recomputed_blocks_are_equal() -> None:
    from qkv.nn.stack import enable_activation_checkpointing

    model, gradients = make_model(dropout=0.2).train(), []
    for enabled in (False, True):
        enable_activation_checkpointing(model, enabled)
        model.zero_grad()
        torch.manual_seed(1)
        model(tokens(), None, ORDER.nonzero().flatten(), order=ORDER).sin().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_an_empty_memory_changes_nothing() -> None:
    model, source = make_model(memory_length=MEMORY), tokens()
    with_memory, _ = model.forward_with_memory(source, model.initial_memory(3))
    torch.testing.assert_close(with_memory, model(source))


def read(model: TwoStreamEncoder, memory: Memory, seed: int) -> tuple[Tensor, Memory]:
    with torch.no_grad():
        return model.forward_with_memory(tokens(seed), memory)


def test_a_stored_memory_continues_bit_equal() -> None:
    model = make_model(memory_length=MEMORY).float()
    _, memory = read(model, model.initial_memory(3), 0)
    state = {name: tensor.clone() for name, tensor in memory.to_state_dict().items()}
    again = Memory.from_state_dict(state, model.initial_memory(3))
    assert torch.equal(read(model, memory, 1)[0], read(model, again, 1)[0])


def test_memory_holds_the_last_tokens_of_texts_of_different_lengths() -> None:
    model = make_model(memory_length=MEMORY)
    _, memory = read(model, model.initial_memory(3), 0)
    embedded = model.embed_inputs(tokens()).sequences()
    assert memory["num_tokens"].tolist() == [min(MEMORY, n) for n in LENGTHS]
    for row, length in enumerate(memory["num_tokens"].tolist()):
        torch.testing.assert_close(memory["hidden"][row, 0, MEMORY - length :], embedded[row][-length:].detach())


def test_a_reset_stream_reads_as_a_new_one_and_the_others_go_on() -> None:
    model = make_model(memory_length=MEMORY)
    _, memory = read(model, model.initial_memory(3), 0)
    went_on, fresh = read(model, memory, 1)[0], read(model, model.initial_memory(3), 1)[0]
    mixed = read(model, memory.reset(torch.tensor([False, True, False])), 1)[0]
    is_reset = tokens(1).layout.sequence_ids() == 1
    torch.testing.assert_close(mixed[is_reset], fresh[is_reset])
    torch.testing.assert_close(mixed[~is_reset], went_on[~is_reset])
    assert not torch.allclose(went_on[is_reset], fresh[is_reset])


def test_a_segment_changes_the_scores_only_where_it_differs() -> None:
    model, source = make_model(), tokens()
    torch.testing.assert_close(model(source, torch.full((22,), 2)), model(source))
    assert not torch.allclose(model(source, source.layout.positions % 2), model(source))


def test_an_adapter_for_peft_is_refused_because_its_projections_are_no_layers(tmp_path: Path) -> None:
    s = xlnet.make_spec(xlnet.Config(d_model=24, heads=3, layers=1, d_ff=8), source_vocab_size=VOCABULARY, head="token")
    with pytest.raises(InputError, match="PEFT cannot adapt the attention of this xlnet"):
        save(ModelBundle(build(replace(s, lora=LoraConfig(rank=2)))), tmp_path, "peft")


def test_wrong_inputs_are_refused_in_one_line() -> None:
    model = make_model()
    with pytest.raises(InputError, match="at least one token to predict"):
        model(tokens(), None, torch.tensor([0]), order=ORDER)
    with pytest.raises(InputError, match="this model has no memory"):
        model.initial_memory(2)
    classifier = build(xlnet.make_spec(xlnet.Config(d_model=24, heads=3, layers=1, d_ff=8), head="token"))
    with pytest.raises(InputError, match="head of kind 'lm'"):
        classifier(tokens(), None, torch.arange(22), order=ORDER)
    bert_spec = bert.make_spec(bert.Config(d_model=24, heads=3, layers=1, d_ff=8), source_vocab_size=VOCABULARY)
    with pytest.raises(InputError, match="memory_length: needs"):
        build(replace(bert_spec, encoder=replace(bert_spec.encoder, memory_length=4)))
