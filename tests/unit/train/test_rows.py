"""An embedding trained by rows ends where AdamW on all of it ends, and is right wherever it is looked at."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from reviews import recipe_text, write_model, write_reviews
from torch import Tensor, nn

from qkv.checkpoints import load
from qkv.checkpoints.safetensors_io import load_tensors
from qkv.families import bert, gpt2
from qkv.nn import build
from qkv.recipe import read_recipe
from qkv.train.distributed.processes import clip_grad_norm
from qkv.train.fit import fit
from qkv.train.optimizer import load_optimizer_state, optimizer_state_tensors
from qkv.train.perf import lazy_adamw
from qkv.train.perf.lazy_adamw import LazyEmbedding, LazyEmbeddingAdamW, find_lazy_embeddings

ROWS, WIDTH = 60, 8
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-8, "fused": True}


class Words(nn.Module):
    """A lookup with something behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.tokens(ids)).square().sum()


def pair() -> tuple[Words, torch.optim.Optimizer, Words, LazyEmbeddingAdamW]:
    torch.manual_seed(4)
    plain = Words()
    ours = copy.deepcopy(plain)
    usual = torch.optim.AdamW(_groups(plain), **SETTINGS)
    return plain, usual, ours, LazyEmbeddingAdamW(_groups(ours), [LazyEmbedding(ours.tokens)], **SETTINGS)


def _groups(model: nn.Module) -> list[dict[str, object]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]


def learn(model: Words, opt: torch.optim.Optimizer, step: int, most: int = ROWS, limit: float = 1.0) -> Tensor:
    """A step on words of which later steps have others, with a rate that changes."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, min(most, 4 + step), (9,), generator=generator)
    for group in opt.param_groups:
        group["lr"] = 0.01 * (1 + step % 3)
    opt.zero_grad(set_to_none=True)
    loss = model(ids)
    loss.backward()
    clip_grad_norm(model.parameters(), limit)
    opt.step()
    return loss.detach()


def assert_same(plain: nn.Module, ours: nn.Module) -> None:
    for (name, wanted), (_, found) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        torch.testing.assert_close(found, wanted, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("limit", [0.5, 1e9], ids=["clipped", "not clipped"])
def test_all_weights_and_moments_are_those_of_adamw_on_the_whole(limit: float) -> None:
    plain, usual, ours, lazy = pair()
    for step in range(1, 25):
        wanted = learn(plain, usual, step, limit=limit)
        torch.testing.assert_close(learn(ours, lazy, step, limit=limit), wanted)  # what is looked up is right
    assert lazy.embeddings
    assert not torch.equal(ours.tokens.weight[40:], plain.tokens.weight[40:])  # these wait
    lazy.flush()
    assert_same(plain, ours)
    for name, wanted in optimizer_state_tensors(usual).items():
        torch.testing.assert_close(optimizer_state_tensors(lazy)[name], wanted, msg=name)


def test_rows_that_sleep_are_neither_read_nor_written_in_a_step() -> None:
    *_, ours, lazy = pair()
    before = ours.tokens.weight.detach().clone()
    for step in range(1, 8):
        learn(ours, lazy, step, most=10)
    assert torch.equal(ours.tokens.weight[10:], before[10:])
    assert lazy.state[ours.tokens.weight]["exp_avg"][10:].abs().sum() == 0


def test_a_row_that_is_looked_at_without_a_gradient_is_right_and_sleeps_on() -> None:
    plain, usual, ours, lazy = pair()
    for step in range(1, 6):
        learn(plain, usual, step, most=10), learn(ours, lazy, step, most=10)
        with torch.inference_mode():
            torch.testing.assert_close(ours(torch.tensor([50, 51])), plain(torch.tensor([50, 51])))
    assert not lazy.embeddings[ours.tokens.weight].active[50]
    lazy.flush()
    assert_same(plain, ours)


def test_a_restored_optimiser_goes_on_to_the_bit() -> None:
    *_, ours, lazy = pair()
    for step in range(1, 9):
        learn(ours, lazy, step)
    lazy.flush()  # as before anything is saved
    other = Words()
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    again = LazyEmbeddingAdamW(_groups(other), [LazyEmbedding(other.tokens)], **SETTINGS)
    load_optimizer_state(again, copy.deepcopy(optimizer_state_tensors(lazy)))
    for step in range(9, 20):
        learn(ours, lazy, step), learn(other, again, step)
    lazy.flush(), again.flush()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))


def test_a_table_most_of_which_is_used_is_trained_as_a_whole_from_then_on() -> None:
    plain, usual, ours, lazy = pair()
    for step in range(1, 90):
        learn(plain, usual, step), learn(ours, lazy, step)
    assert not lazy.embeddings
    assert not ours.tokens.sparse
    assert not ours.tokens._forward_pre_hooks
    assert_same(plain, ours)


def test_only_large_embeddings_that_are_looked_up_alone_are_trained_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_adamw, "_MIN_ROWS", 40)
    small = {"d_model": 16, "heads": 2, "layers": 1, "d_ff": 32}

    def found(family, head: str, **fields: int) -> list[LazyEmbedding]:
        return find_lazy_embeddings(build(family.make_spec(family.Config(**small), head=head, **fields)))

    assert [table.module.num_embeddings for table in found(bert, "sequence", source_vocab_size=40)] == [
        40
    ]  # no positions
    assert not found(bert, "sequence", source_vocab_size=39)
    assert not found(bert, "masked_lm", source_vocab_size=40)  # its head has the same weights
    assert not found(gpt2, "lm", target_vocab_size=40)
    frozen = build(bert.make_spec(bert.Config(**small), head="sequence", source_vocab_size=40)).requires_grad_(False)
    assert not find_lazy_embeddings(frozen)


def test_embeddings_trained_by_rows_end_as_whole_ones_do_and_resume_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_reviews(tmp_path / "mine.csv")
    write_model("bert", tmp_path / "bert")
    (tmp_path / "recipe.yaml").write_text(recipe_text(tmp_path / "bert", tmp_path / "mine.csv"))
    # key biases have a gradient of rounding noise only; a larger epsilon keeps Adam from amplifying it
    changes = ["train.save_every=2", "train.weight_decay=0.1", "train.learning_rate=0.01", "train.adam_epsilon=1e-6"]
    recipe = read_recipe(tmp_path / "recipe.yaml", changes)
    list(fit(recipe, tmp_path / "usual", device="cpu"))
    monkeypatch.setattr(lazy_adamw, "_MIN_ROWS", 1)
    monkeypatch.setattr(lazy_adamw, "_MAX_ACTIVE_FRACTION", 1.0)
    taken = []
    monkeypatch.setattr(
        lazy_adamw.LazyEmbedding,
        "activate",
        lambda self, of, wake=lazy_adamw.LazyEmbedding.activate: (taken.append(self), wake(self, of)),
    )
    list(fit(recipe, tmp_path / "whole", device="cpu"))
    assert taken
    asleep = ~taken[-1].active
    usual, found = (load_tensors(tmp_path / run / "model.safetensors")[0] for run in ("usual", "whole"))
    assert asleep.any()
    assert (
        usual["source_embedding.tokens.weight"][asleep]
        != load(tmp_path / "bert").model.source_embedding.tokens.weight[asleep]
    ).any()
    torch.testing.assert_close(found, usual, atol=1e-5, rtol=1e-4)
    stopped = fit(recipe, tmp_path / "cut", device="cpu")
    for _ in range(3):
        next(stopped)
    stopped.close()
    list(fit(recipe, tmp_path / "cut", device="cpu"))
    ends = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("cut", "whole")]
    assert ends[0] == ends[1]
