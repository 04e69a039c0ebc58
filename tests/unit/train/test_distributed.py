"""Several processes: the losses and weights of one, and checkpoints that any number of processes takes up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import forked
import pytest
import several
import torch
from several import CASES, SAVE, STEPS, train

from qkv.checkpoints.safetensors_io import load_tensors
from qkv.checkpoints.state import load_state, unique_state_dict
from qkv.errors import InputError
from qkv.nn import build
from qkv.train.checkpoint import TrainState
from qkv.train.distributed import sharded_checkpoint
from qkv.train.distributed.processes import (
    DistributedInfo,
    clip_grad_norm,
    destroy_process_group,
    init_distributed,
    wrap_model,
)
from qkv.train.distributed.sharded_checkpoint import (
    LAST,
    gather_state_dict,
    load_full_state_dict,
    load_sharded,
    save_sharded,
)

ALONE = DistributedInfo(0, 1, 0, torch.device("cpu"))
KINDS = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case by two processes."""
    folder = tmp_path_factory.mktemp("two")
    said = folder / "said.txt"
    processes = forked.start_two(str(folder), program=several.__file__, output=said)
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0], said.read_text()[-3000:]
    return folder


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    for name in CASES:
        train(name, "ddp", folder / name, ALONE)
    return folder


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "losses.json").read_text())


def assert_same_weights(one: Path, other: Path, within: float) -> None:
    (a, _), (b, _) = load_tensors(one / "model.safetensors"), load_tensors(other / "model.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=0, atol=within, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_have_the_losses_and_weights_of_one(by_one, by_two, name, kind):
    one, two = losses(by_one / name), losses(by_two / f"{name}-{kind}")
    assert len(set(one)) == STEPS  # it learned something at each
    assert two == pytest.approx(one, rel=1e-5)
    assert_same_weights(by_one / name, by_two / f"{name}-{kind}", within=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_what_two_processes_saved_in_shards_goes_on_in_one(by_one, by_two, tmp_path, name):
    several.copied(by_two / f"{name}-fsdp", tmp_path / name)
    assert train(name, "fsdp", tmp_path / name, ALONE) == pytest.approx(losses(by_one / name)[SAVE:], rel=1e-5)
    assert_same_weights(by_one / name, tmp_path / name, within=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_what_two_processes_saved_in_shards_goes_on_in_two_to_the_same_bits(by_two, name):
    never_stopped, resumed = by_two / f"{name}-fsdp", by_two / f"{name}-resumed"
    assert losses(resumed) == losses(never_stopped)[SAVE:]
    assert_same_weights(never_stopped, resumed, within=0.0)


@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_shards_are_those_that_one_process_takes(by_two, name):
    tensors, _ = load_tensors(by_two / f"{name}-fsdp" / "model.safetensors")
    model = build(CASES[name].spec)
    load_state(model, tensors, "two", assign=True)
    part = CASES[name].draw(torch.Generator().manual_seed(0))
    with torch.no_grad():
        (term, *_) = CASES[name].losses(model.eval(), part)
    assert torch.isfinite(term.total)
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in unique_state_dict(model).items())


def test_one_of_two_processes_decodes_with_a_copy_in_one_piece(by_two):
    found, _ = load_tensors(by_two / "gpt2-fsdp" / "said.safetensors")
    said = found.pop("logits")
    model = build(CASES["gpt2"].spec)
    load_sharded(by_two / "gpt2-fsdp", model, torch.optim.AdamW(model.parameters()), ALONE)  # the same step's
    assert all(torch.equal(tensor, found[name]) for name, tensor in unique_state_dict(model).items())
    torch.testing.assert_close(several.continued(model.eval()), said)


def test_whole_weights_go_into_shards_and_come_out_again(by_two):
    found, _ = load_tensors(by_two / "refilled.safetensors")
    tensors, _ = load_tensors(by_two / "gpt2-fsdp" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


# ---- checkpoints in shards, by one process: what is written when ----------------------------------------------------


def begun(step: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model that has made so many steps."""
    case = CASES["gpt2"]
    torch.manual_seed(7)
    model = build(case.spec)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(1, step + 1):
        several.step(case, several.Judge(model, case.losses), model, optimiser, number, ALONE)
    return model, optimiser


def assert_like(model: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, a), b in zip(unique_state_dict(model).items(), unique_state_dict(other).values(), strict=True):
        assert torch.equal(a, b), name


def test_a_kill_between_the_shards_and_their_note_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    older, optimiser = begun(1)
    save_sharded(tmp_path, older, optimiser, TrainState(step=1), ALONE)
    newer, moments = begun(2)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sharded_checkpoint, "atomic_write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            save_sharded(tmp_path, newer, moments, TrainState(step=2), ALONE)
    assert (tmp_path / "last-2" / ".metadata").is_file()
    fresh, optimiser = begun()
    assert load_sharded(tmp_path, fresh, optimiser, ALONE).step == 1
    assert_like(fresh, older)
    save_sharded(tmp_path, newer, moments, TrainState(step=2), ALONE)
    assert load_sharded(tmp_path, fresh, optimiser, ALONE).step == 2
    assert_like(fresh, newer)
    assert [path.name for path in tmp_path.glob("last-*")] == ["last-2"]


def test_shards_that_cannot_be_written_leave_the_older_checkpoint_and_one_line(tmp_path, monkeypatch):
    model, optimiser = begun(1)
    save_sharded(tmp_path, model, optimiser, TrainState(step=1), ALONE)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sharded_checkpoint, "save", full)
        with pytest.raises(InputError, match=r"No space left.*last-1 is intact"):
            save_sharded(tmp_path, model, optimiser, TrainState(step=2), ALONE)
    assert load_sharded(tmp_path, model, optimiser, ALONE).step == 1


def test_a_step_that_is_saved_twice_is_never_without_a_checkpoint(tmp_path, monkeypatch):
    model, optimiser = begun(1)
    save_sharded(tmp_path, model, optimiser, TrainState(step=1), ALONE)
    during = []
    write = sharded_checkpoint.save

    def watched(*given: object, **named: object) -> None:
        during.append((tmp_path / json.loads((tmp_path / LAST).read_text())["folder"] / ".metadata").is_file())
        write(*given, **named)

    monkeypatch.setattr(sharded_checkpoint, "save", watched)
    for finished in (True, False):
        save_sharded(tmp_path, model, optimiser, TrainState(step=1, finished=finished), ALONE)
        assert load_sharded(tmp_path, model, optimiser, ALONE).finished is finished
    assert during == [True, True]


def test_weights_that_will_not_be_averaged_go_with_the_checkpoint_that_needs_them(tmp_path):
    for step in (1, 2):
        (tmp_path / f"step-{step}.safetensors").touch()
    save_sharded(tmp_path, *begun(1), TrainState(step=2, averaging_steps=[2]), ALONE)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2.safetensors"]


def test_a_run_without_a_checkpoint_begins_afresh(tmp_path):
    assert load_sharded(tmp_path, *begun(), ALONE) == TrainState()


@pytest.mark.parametrize(
    "note", ["", "{}", '{"folder": "last-1"}', "[]", '{"folder": "last-1", "train_state": {"x": 1}}']
)
def test_a_damaged_note_is_refused_by_name(tmp_path, note):
    (tmp_path / LAST).write_text(note)
    with pytest.raises(InputError, match=LAST):
        load_sharded(tmp_path, *begun(), ALONE)


def test_another_models_shards_are_refused_by_name(tmp_path):
    model, optimiser = begun(1)
    save_sharded(tmp_path, model, optimiser, TrainState(step=1), ALONE)
    other = build(CASES["t5"].spec)
    with pytest.raises(InputError, match="last-1: not a complete checkpoint of this model"):
        load_sharded(tmp_path, other, torch.optim.AdamW(other.parameters()), ALONE)
    shutil.rmtree(tmp_path / "last-1")
    with pytest.raises(InputError, match="last-1: not a complete checkpoint of this model"):
        load_sharded(tmp_path, model, optimiser, ALONE)


# ---- who is there ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 1])
def test_one_process_touches_no_other(monkeypatch, size):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
        if size:
            monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    ranks = init_distributed("cpu")
    assert ranks == ALONE
    assert not torch.distributed.is_initialized()
    model, _ = begun()
    judge = several.Judge(model, CASES["gpt2"].losses)
    assert all(wrap_model(judge, model, kind, False, ranks) is judge for kind in KINDS)
    destroy_process_group(ranks)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"RANK": "0"}, "has RANK and lacks WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "lacks LOCAL_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0"}, "must be integers"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "rank 2 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "lacks MASTER_ADDR"),
    ],
)
def test_half_an_environment_is_refused_with_what_it_lacks(monkeypatch, said, message):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        init_distributed("cpu")


def test_whole_weights_go_back_into_the_model_that_gave_them():
    model, _ = begun(1)
    weights = {name: tensor + 1 for name, tensor in gather_state_dict(model, ALONE).items()}
    load_full_state_dict(model, weights, "there")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in unique_state_dict(model).items())
    with pytest.raises(InputError, match="there: lacks"):
        load_full_state_dict(model, {}, "there")


@pytest.mark.parametrize(("limit", "scale"), [(0.5, 1.0), (1e6, 1.0), (1.0, torch.nan)])
def test_gradients_on_a_host_are_clipped_as_torch_clips_them(limit: float, scale: float) -> None:
    torch.manual_seed(1)
    ours, theirs = ([torch.nn.Parameter(torch.zeros(300, 70)), torch.nn.Parameter(torch.zeros(9))] for _ in range(2))
    for mine, its in zip(ours, theirs, strict=True):
        mine.grad = torch.randn(mine.shape) * scale
        its.grad = mine.grad.clone()
    norm, expected = clip_grad_norm(ours, limit), torch.nn.utils.clip_grad_norm_(theirs, limit)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, its.grad, equal_nan=True)
