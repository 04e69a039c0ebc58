"""Pretraining from text: every objective learns, resumes to the bit, and says what it now knows."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path

import forked
import pytest
import torch

from qkv.checkpoints import load, save
from qkv.checkpoints.safetensors_io import load_tensors
from qkv.data.corpora import corpus
from qkv.errors import InputError
from qkv.recipe import read_recipe
from qkv.train import in_place_step
from qkv.train.checkpoint import LAST_CHECKPOINT
from qkv.train.fit import fit
from qkv.train.text_evaluation import evaluate_text
from qkv.train.workloads.pretraining import PretrainingWorkload

RECIPES = Path(__file__).parents[3] / "recipes"
FAMILIES = ("gpt2", "bert", "roberta", "bart", "t5")
# the mini recipes at a size for tests: text is written here, a few sentences said over and over
TINY = [
    "model.d_model=32", "model.heads=2", "model.layers=1", "model.d_ff=64", "model.max_length=64", "data.max_length=32",
    "tokenizer.vocab_size=400", "train.batch_tokens=512", "train.max_steps=6", "train.log_every=2",
    "train.warmup_steps=2", "validation.every_steps=3", "validation.max_tokens=600",
]  # fmt: skip
OWN = {"bart": ["model.decoder_layers=1", "model.decoder_heads=2", "model.decoder_d_ff=64"],
       "t5": ["model.decoder_layers=1", "model.max_length=64"]}  # fmt: skip


def write_text(folder: Path, documents: int = 60) -> Path:
    chance = random.Random(3)
    who, does, what = (
        ("The cat", "A dog", "My aunt", "The king"),
        ("sees", "likes", "finds"),
        ("tea", "a house", "bees"),
    )
    path = folder / "text.txt"
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(documents):
            said = [f"{chance.choice(who)} {chance.choice(does)} {chance.choice(what)}." for _ in range(6)]
            file.write("\n".join(said) + "\n\n")
    return path


def recipe_of(family: str, folder: Path, *changes: str):
    text = write_text(folder)
    data = [f"data.train={text}", "data.format=blank_line_separated", "data.hold_out=0.2"]
    return read_recipe(RECIPES / f"pretrain-{family}-mini.yaml", [*TINY, *OWN.get(family, []), *data, *changes])


def run_all(recipe, folder: Path) -> list:
    return list(fit(recipe, folder, device="cpu"))


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


# of a text of so few words; a model that says all of them equally often begins at the logarithm of its vocabulary, 6
REACHED = {"gpt2": 1.3, "bert": 2.5, "roberta": 2.3, "bart": 2.2, "t5": 2.9}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_mini_recipe_at_a_tiny_size_reaches_its_loss(family, tmp_path):
    recipe = recipe_of(family, tmp_path, "train.max_steps=80", "validation.every_steps=80", "train.learning_rate=0.01",
                       "train.schedule=linear", "validation.num_samples=1")  # fmt: skip
    records = run_all(recipe, tmp_path / "run")
    valid = next(record for record in records if record.kind == "valid")
    assert valid.values["loss"] < REACHED[family]
    assert valid.values["perplexity"] == pytest.approx(math.exp(valid.values["loss"]))
    assert len(valid.samples) == 1
    assert valid.samples[0]
    loaded = load(tmp_path / "run")
    assert evaluate_text(loaded, recipe)["perplexity"] == pytest.approx(valid.values["perplexity"], rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", [(), ("train.num_workers=3",), ("data.streaming=true", "train.num_workers=2")],
                         ids=["plain", "workers", "stream"])  # fmt: skip
def test_a_stopped_run_resumes_to_the_bit(family, changes, tmp_path):
    recipe = recipe_of(family, tmp_path, "train.save_every=1", "train.gradient_accumulation_steps=2", *changes)
    run_all(recipe, tmp_path / "whole")
    stopped = fit(recipe, tmp_path / "cut", device="cpu")
    for _ in range(2):
        next(record for record in stopped if record.kind == "train")
    stopped.close()
    torch.manual_seed(99)  # the next process starts with another random state
    run_all(recipe, tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_a_process_killed_at_any_moment_resumes_to_the_same_bits(tmp_path):
    """Without warning, while workers read a stream; `bench/kill_resume.py` is the long form."""
    given = [
        *TINY,
        f"data.train={write_text(tmp_path)}",
        "data.format=blank_line_separated",
        "data.hold_out=0.2",
        "validation.num_samples=0",
    ]
    given += [
        "data.streaming=true",
        "train.num_workers=2",
        "train.max_steps=60",
        "train.save_every=2",
        "validation.every_steps=30",
    ]
    mini = str(RECIPES / "pretrain-bert-mini.yaml")
    run_all(read_recipe(mini, given), tmp_path / "whole")
    begun, chance = tmp_path / "cut" / LAST_CHECKPOINT, random.Random(1)
    for _ in range(2):  # once training has begun, each a little later than a checkpoint
        process = forked.start("train", mini, *given, "--device", "cpu", "-o", str(tmp_path / "cut"))
        before = begun.stat().st_mtime_ns if begun.exists() else 0
        while process.is_alive() and not (begun.exists() and begun.stat().st_mtime_ns > before):
            time.sleep(0.005)
        time.sleep(chance.random() * 0.02)
        process.kill()
        process.join()
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    run_all(read_recipe(mini, given), tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_workers_change_no_weight(tmp_path):
    found = []
    for workers in (0, 3):
        recipe = recipe_of("bert", tmp_path, f"train.num_workers={workers}")
        run_all(recipe, tmp_path / f"run{workers}")
        found.append(weights(tmp_path / f"run{workers}"))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "change", ["train.ema_decay=0.9", "train.activation_checkpointing=true", "train.average_checkpoints=2"]
)
def test_every_way_of_training_resumes_to_the_bit(change, tmp_path):
    recipe = recipe_of("gpt2", tmp_path, "train.save_every=1", change)
    run_all(recipe, tmp_path / "whole")
    stopped = fit(recipe, tmp_path / "cut", device="cpu")
    for _ in range(3):
        next(record for record in stopped if record.kind == "train")
    stopped.close()
    run_all(recipe, tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_working_activations_out_again_changes_no_weight(tmp_path):
    for change in ("false", "true"):
        run_all(recipe_of("t5", tmp_path, f"train.activation_checkpointing={change}"), tmp_path / change)
    assert weights(tmp_path / "true") == weights(tmp_path / "false")


def test_the_averaged_weights_are_what_is_scored_and_kept(tmp_path):
    run_all(recipe_of("gpt2", tmp_path, "train.ema_decay=0.5", "train.keep_checkpoint=true"), tmp_path / "run")
    kept, _ = load_tensors(tmp_path / "run" / "model.safetensors")
    last, _ = load_tensors(tmp_path / "run" / LAST_CHECKPOINT)
    name = "target_embedding.tokens.weight"
    assert torch.equal(kept[name], last[f"ema.{name}"])
    assert not torch.equal(kept[name], last[f"model.{name}"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_is_there_is_pretrained_on(family, tmp_path):
    first = run_all(recipe_of(family, tmp_path), tmp_path / "first")
    on = [
        f"model={{init_from: {tmp_path / 'first'}}}",
        "tokenizer={}",
        "train.learning_rate=1.0e-9",
        "train.warmup_steps=0",
    ]
    more = run_all(recipe_of(family, tmp_path, *on), tmp_path / "more")
    began, ended = (next(r for r in records if r.kind == "valid") for records in (more, first[::-1]))
    assert began.values["loss"] == pytest.approx(ended.values["loss"], abs=1e-4)  # nothing of it was lost
    one, other = (load(tmp_path / name) for name in ("first", "more"))
    assert one.model.spec == other.model.spec
    assert one.source_tokenizer.encode("The cat sees bees.") == other.source_tokenizer.encode("The cat sees bees.")


def test_a_run_that_goes_on_from_another_resumes_to_the_bit(tmp_path):
    run_all(recipe_of("bart", tmp_path), tmp_path / "first")
    on = [f"model={{init_from: {tmp_path / 'first'}, dropout: 0.3}}", "tokenizer={}", "train.save_every=1"]
    run_all(recipe_of("bart", tmp_path, *on), tmp_path / "whole")
    stopped = fit(recipe_of("bart", tmp_path, *on), tmp_path / "cut", device="cpu")
    for _ in range(2):
        next(record for record in stopped if record.kind == "train")
    stopped.close()
    torch.manual_seed(99)
    run_all(recipe_of("bart", tmp_path, *on), tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_a_checkpoint_whose_head_says_nothing_of_text_gets_one_to_be_pretrained_on(tmp_path):
    run_all(recipe_of("bert", tmp_path), tmp_path / "first")
    on = [
        f"model={{init_from: {tmp_path / 'body'}, dropout: 0.2}}",
        "tokenizer={}",
        "objective.mlm.next_sentence=false",
    ]
    save(load(tmp_path / "first", head="backbone"), tmp_path / "body")
    run_all(recipe_of("bert", tmp_path, *on), tmp_path / "more")
    trained = load(tmp_path / "more").model.spec
    assert trained.head.kind == "lm"
    assert trained.encoder.block.dropout == 0.2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["tokenizer.vocab_size=300"], "tokenizer: a pretrained model has its own"),
        (["tokenizer={}", "objective={clm: {}}"], "objective: clm needs a decoder, and bert is an encoder"),
        (["tokenizer={}", "model.d_model=8"], "has a fixed shape, except dropout; leave out d_model"),
    ],
)
def test_what_does_not_go_with_a_model_that_is_pretrained_on_is_said(changes, said, tmp_path):
    run_all(recipe_of("bert", tmp_path), tmp_path / "first")
    with pytest.raises(InputError, match=said):
        run_all(recipe_of("bert", tmp_path, f"model={{init_from: {tmp_path / 'first'}}}", *changes), tmp_path / "more")


def test_a_built_corpus_trains_as_its_text_does(tmp_path):
    from qkv.data.corpora.shards import build_shards

    text = write_text(tmp_path)
    recipe = recipe_of("bert", tmp_path, f"data.valid={text}")
    run_all(recipe, tmp_path / "run")
    tokeniser = load(tmp_path / "run").source_tokenizer
    build_shards(tmp_path / "shards", corpus.Corpus([text], format="blank_line_separated"), tokeniser)
    built = recipe_of("bert", tmp_path, f"data.train={tmp_path / 'shards'}", f"data.valid={text}",
                      f"tokenizer.path={tmp_path / 'run'}", "tokenizer.vocab_size=null")  # fmt: skip
    run_all(built, tmp_path / "built")
    assert weights(tmp_path / "built") == weights(tmp_path / "run")


def test_several_objectives_are_mixed_by_weight(tmp_path):
    recipe = recipe_of(
        "t5", tmp_path, "objective={span_corruption: {weight: 3}, denoising: {permute_sentences: false}}"
    )
    work = PretrainingWorkload.build(recipe, tmp_path)
    taken = [work.objectives.at_step(step).name for step in range(400)]
    assert taken.count("span_corruption") == pytest.approx(300, abs=40)
    assert run_all(recipe, tmp_path / "run")[-1].kind == "final"


def test_held_out_perplexity_is_not_smoothed(tmp_path):
    recipe = recipe_of("t5", tmp_path, "train.label_smoothing=0.3", "validation.every_steps=6")
    records = run_all(recipe, tmp_path / "run")
    found = evaluate_text(load(tmp_path / "run"), recipe_of("t5", tmp_path, "train.label_smoothing=0"))
    valid = next(record for record in records if record.kind == "valid")
    assert valid.values["loss"] == pytest.approx(found["loss"], rel=1e-4)


def test_next_sentences_have_a_loss_of_their_own(tmp_path):
    records = run_all(recipe_of("bert", tmp_path), tmp_path / "run")
    trained = [record.values for record in records if record.kind == "train"]
    assert all(0 < values["next_sentence_loss"] < 3 for values in trained)
    assert load(tmp_path / "run").model.aux_head is not None


def test_the_log_holds_speed_time_left_and_samples_and_no_utilization_of_a_cpu(tmp_path):
    run_all(recipe_of("gpt2", tmp_path), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    train = next(line for line in lines if line["kind"] == "train")
    assert train["tokens_per_second"] > 0
    assert "mfu" not in train
    assert train["eta_seconds"] >= 0
    assert [len(line["samples"]) for line in lines if line["kind"] == "valid"] == [2, 2]


def test_weights_that_are_no_numbers_are_never_saved(tmp_path):
    recipe = recipe_of("gpt2", tmp_path, "train.save_every=1", "train.max_steps=9", "validation.every_steps=9")
    run = fit(recipe, tmp_path / "run", device="cpu")
    next(record for record in run if record.kind == "train")  # of step 2
    saved = (tmp_path / "run" / LAST_CHECKPOINT).read_bytes()
    run.close()
    broken = recipe_of("gpt2", tmp_path, "train.save_every=1", "train.max_steps=9", "validation.every_steps=9")

    class Diverging(in_place_step.TrainStep):
        def __call__(self, step, ready, learning_rate, tally):
            super().__call__(step, ready, learning_rate, tally)
            with torch.no_grad():
                next(self.model.parameters()).fill_(math.nan)  # as an endless gradient would, after a finite loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_place_step, "TrainStep", Diverging)
        with pytest.raises(InputError, match="weights are not finite by step 2"):
            run_all(broken, tmp_path / "run")
    assert (tmp_path / "run" / LAST_CHECKPOINT).read_bytes() == saved
    run_all(recipe, tmp_path / "run")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory")])  # fmt: skip
def test_no_memory_is_one_line_and_the_run_goes_on_with_smaller_parts(error, tmp_path, monkeypatch):
    recipe = recipe_of("gpt2", tmp_path, "train.save_every=1")
    steps = []

    def train_step(self, step, ready, learning_rate, tally, real=in_place_step.TrainStep.__call__):
        steps.append(1)
        if len(steps) == 4:
            raise error
        real(self, step, ready, learning_rate, tally)

    with monkeypatch.context() as patch:
        patch.setattr(in_place_step.TrainStep, "__call__", train_step)
        with pytest.raises(InputError, match=r"out of memory; raise train\.gradient_accumulation_steps"):
            run_all(recipe, tmp_path / "run")
    smaller = recipe_of("gpt2", tmp_path, "train.save_every=1", "train.gradient_accumulation_steps=4")
    assert run_all(smaller, tmp_path / "run")[-1].kind == "final"


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("gpt2", "objective=mlm", "mlm needs an encoder, and gpt2 is a decoder; try clm"),
        ("bert", "objective=clmm", "unknown key 'objective.clmm'; did you mean 'clm'"),
        ("bert", "objective.mlm.mask_prob=2", "mask_prob is 2"),
        (
            "roberta",
            "objective.mlm.next_sentence=true",
            "objective.mlm: roberta has no head for next-sentence prediction",
        ),
        ("bert", "data.max_length=65", "the model takes at most 64"),
        ("bert", "data.max_length=4", "leaves no room for text"),
        ("bert", "data.chunking=packed", "cut at sentences, not packed"),
        ("bert", "data.hold_out=0", "no held-out text"),
        ("bert", "data.valid=nowhere.txt", "nowhere.txt: no such file"),
        ("bert", "train.batch_tokens=20", "set train.batch_tokens to"),
        ("bert", "tokenizer={path: nowhere}", "nowhere"),
        ("bert", "tokenizer.path=nowhere", "leave out those keys"),
        ("bert", "tokenizer.vocab_size=null", "training one needs tokenizer.vocab_size"),
        ("gpt2", "train.label_smoothing=0.1", "is not supported by clm; set it to 0"),
        ("gpt2", "train.rdrop_alpha=2.0", "train.rdrop_alpha: goes with pairs"),
    ],
)
def test_a_slip_is_one_line_that_names_its_key(family, change, said, tmp_path):
    with pytest.raises(InputError) as found:
        run_all(recipe_of(family, tmp_path, change), tmp_path / "run")
    assert said in str(found.value)
    assert not (tmp_path / "run").exists()
