"""Train tiny models for a few steps with any number of processes; torchrun starts this file.

    python -m torch.distributed.run --standalone --nproc-per-node 2 several.py FOLDER

The results are in FOLDER/<model>-<kind>: `losses.json`, `model.safetensors` and, with shards, the checkpoint.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.checkpoints.safetensors_io import load_tensors, save_tensors
from qkv.checkpoints.state import unique_state_dict
from qkv.families import bert, gpt2, rnn, t5
from qkv.files import atomic_write_text
from qkv.nn import Decoder, Ragged, build
from qkv.objectives import clm, mlm, seq2seq
from qkv.objectives.loss import LossSum
from qkv.train.checkpoint import TrainState
from qkv.train.distributed.processes import (
    DistributedInfo,
    all_reduce_sum,
    clip_grad_norm,
    destroy_process_group,
    init_distributed,
    maybe_no_sync,
    on_main_rank,
    unsharded_copy,
    wrap_model,
)
from qkv.train.distributed.sharded_checkpoint import gather_state_dict, load_full_state_dict, load_sharded, save_sharded

STEPS, SAVE, PARTS = 5, 3, 3  # three micro-batches per batch, which two ranks cannot share equally
WORDS = 31


class Case(NamedTuple):
    spec: spec.Model
    draw: Callable[[torch.Generator], Any]  # one micro-batch
    losses: Callable[[Any, Any], tuple[LossSum, ...]]


class Judge(nn.Module):
    def __init__(self, model: nn.Module, losses: Callable[[Any, Any], tuple[LossSum, ...]]):
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, part: Any) -> tuple[LossSum, ...]:
        return self.losses(self.model, part)


def run_of(chance: torch.Generator, sequences: int = 3) -> Ragged:
    lengths = torch.randint(2, 9, (sequences,), generator=chance)
    return Ragged.from_lengths(torch.randint(WORDS, (int(lengths.sum()),), generator=chance), lengths)


def pairs_with_masks(chance: torch.Generator) -> mlm.Inputs:
    source = run_of(chance)
    tokens = source.values
    at = torch.arange(0, len(tokens), 3)
    segments = torch.randint(2, tokens.shape, generator=chance)
    return mlm.Inputs(source, segments, at, tokens[at], torch.randint(2, (len(source),), generator=chance).bool())


def text(chance: torch.Generator) -> clm.Inputs:
    tokens = run_of(chance)
    return clm.Inputs(tokens, None, torch.roll(tokens.values, -1))


def pairs(chance: torch.Generator) -> seq2seq.Inputs:
    source, target = run_of(chance), run_of(chance)
    return seq2seq.Inputs(source, target, torch.roll(target.values, -1))


def one(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], tuple[LossSum, ...]]:
    return lambda model, part: (LossSum(loss(model, part), len(part.labels)),)


# odd widths, so that shards differ in size
_BERT = bert.Config(d_model=18, heads=2, layers=2, d_ff=25, max_length=16, dropout=0.1, attention_dropout=0.0)
_GPT2 = gpt2.Config(d_model=18, heads=2, layers=2, max_length=16, dropout=0.0, embed_dropout=0.0, attention_dropout=0.0)
_T5 = t5.Config(d_model=18, heads=2, d_kv=5, layers=1, d_ff=25, dropout=0.0, max_length=16)
_RNN = rnn.Config(d_model=12, hidden_size=14, layers=1, dropout=0.0, max_length=16)

CASES = {
    "bert": Case(
        bert.make_spec(_BERT, source_vocab_size=WORDS, head="pretraining"), pairs_with_masks, mlm.mlm_and_nsp_losses
    ),
    "gpt2": Case(gpt2.make_spec(_GPT2, target_vocab_size=WORDS), text, lambda model, part: (clm.loss(model, part),)),
    "t5": Case(t5.make_spec(_T5, source_vocab_size=WORDS, target_vocab_size=WORDS), pairs, one(seq2seq.loss)),
    "rnn": Case(rnn.make_spec(_RNN, source_vocab_size=WORDS, target_vocab_size=WORDS), pairs, one(seq2seq.loss)),
}


def train(name: str, kind: str, folder: Path, ranks: DistributedInfo) -> list[float]:
    """Return the loss of each step over the global batch, starting from the folder's checkpoint if it has one."""
    case = CASES[name]
    torch.manual_seed(7)
    model = build(case.spec)
    judge = wrap_model(Judge(model, case.losses), model, kind, False, ranks)
    # a large epsilon: the gradient of a key's bias is only rounding error, which Adam would scale up to full steps
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-4, fused=True)
    progress = load_sharded(folder, model, optimiser, ranks) if kind == "fsdp" else TrainState()
    losses = []
    while progress.step < STEPS:
        progress.step += 1
        losses.append(step(case, judge, model, optimiser, progress.step, ranks))
        if kind == "fsdp" and progress.step == SAVE:
            save_sharded(folder, model, optimiser, progress, ranks)
            validate(case, folder, model, judge, ranks)
    weights = gather_state_dict(model, ranks) if kind == "fsdp" else unique_state_dict(model)
    on_main_rank(ranks, lambda: save_tensors(folder / "model.safetensors", weights))
    on_main_rank(ranks, lambda: atomic_write_text(folder / "losses.json", json.dumps(losses)))
    return losses


def validate(case: Case, folder: Path, model: Any, judge: nn.Module, ranks: DistributedInfo) -> None:
    """Run a validation between two steps: all ranks call the sharded model, and only the first decodes."""
    with torch.no_grad():
        judge(case.draw(torch.Generator().manual_seed(0)))
    with unsharded_copy(model) as piece:
        if ranks.is_main and isinstance(piece, Decoder):
            save_tensors(folder / "said.safetensors", {"logits": continued(piece.eval()), **unique_state_dict(piece)})


def step(
    case: Case,
    judge: nn.Module,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    number: int,
    ranks: DistributedInfo,
) -> float:
    chance = torch.Generator().manual_seed(number)
    parts = [case.draw(chance) for _ in range(PARTS)]
    # all ranks process equally many micro-batches: a rank with one fewer gets one with zero weight
    mine = range(ranks.rank, -(-PARTS // ranks.world_size) * ranks.world_size, ranks.world_size)
    found = torch.zeros(())
    optimiser.zero_grad(set_to_none=True)
    counts = all_reduce_sum(
        torch.tensor([targets(parts[place]) for place in mine if place < PARTS]).sum(0), ranks
    )  # [kinds]
    for place in mine:
        part, weight = parts[place % PARTS], float(place < PARTS)
        torch.manual_seed(1000 * number + place)
        with maybe_no_sync(judge, is_last=place == mine[-1]):
            terms = judge(part)
            # inputs may count targets of further losses, which follow
            loss = sum(term.total / count for term, count in zip(terms, counts, strict=False)) * weight
            (loss * ranks.world_size).backward()
        found += loss.detach()
    clip_grad_norm(model.parameters(), 1.0)
    optimiser.step()
    return float(all_reduce_sum(found, ranks))


def targets(part: Any) -> tuple[int, ...]:
    return getattr(part, "num_targets", None) or (len(part.labels),)


def continued(model: Any) -> Tensor:
    """Return the logits after prompts and two more tokens, by decoding steps, which bypass the model's forward."""
    with torch.no_grad():
        logits, going = model.prefill(run_of(torch.Generator().manual_seed(1)), 1, 4)
        said = [logits]
        for _ in range(2):
            logits, going = model.step(said[-1].argmax(-1), going)
            said.append(logits)
    return torch.cat(said)


def refilled(folder: Path, ranks: DistributedInfo) -> None:
    """Load unsharded weights into shards and gather them again."""
    torch.manual_seed(8)
    model = build(CASES["gpt2"].spec)
    wrap_model(Judge(model, CASES["gpt2"].losses), model, "fsdp", False, ranks)
    load_full_state_dict(model, load_tensors(folder / "gpt2-fsdp" / "model.safetensors")[0], "there")
    weights = gather_state_dict(model, ranks)
    on_main_rank(ranks, lambda: save_tensors(folder / "refilled.safetensors", weights))


def all_of_them(folder: Path, ranks: DistributedInfo) -> None:
    for name in CASES:
        train(name, "ddp", folder / f"{name}-ddp", ranks)
        train(name, "fsdp", folder / f"{name}-fsdp", ranks)
        on_main_rank(ranks, lambda name=name: copied(folder / f"{name}-fsdp", folder / f"{name}-resumed"))
        train(name, "fsdp", folder / f"{name}-resumed", ranks)
    refilled(folder, ranks)


def copied(run: Path, folder: Path) -> None:
    """Copy a run in the state that a kill after its checkpoint would leave."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("model.safetensors", "losses.json"))


if __name__ == "__main__":
    us = init_distributed("cpu")
    all_of_them(Path(sys.argv[1]), us)
    destroy_process_group(us)
