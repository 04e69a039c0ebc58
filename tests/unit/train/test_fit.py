"""Training: exact resume, the same gradient however a batch is cut, the finished weights, the log."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import forked
import pytest
import torch
from words import SMALL, write_task

from qkv import families
from qkv.checkpoints import load
from qkv.checkpoints.safetensors_io import load_tensors, save_tensors
from qkv.data.batching import EncodedPairs
from qkv.data.pair import Pair
from qkv.errors import InputError
from qkv.metrics import evaluate
from qkv.nn import build
from qkv.objectives.seq2seq import loss, make_inputs
from qkv.recipe import read_recipe
from qkv.tasks.predictor import predict
from qkv.train.fit import fit
from qkv.train.workloads.seq2seq import Seq2SeqWorkload

FAMILIES = list(SMALL)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def run_all(recipe: Path, folder: Path, *changes: str) -> list[object]:
    return list(fit(read_recipe(recipe, list(changes)), folder, device="cpu"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stop_after", [1, 2, 4, 5])
def test_a_run_stopped_and_resumed_ends_with_the_weights_of_one_never_stopped(tmp_path, family, stop_after):
    recipe = write_task(tmp_path, family)
    changes = ["train.save_every=1"]
    run_all(recipe, tmp_path / "whole", *changes)
    stopped = fit(read_recipe(recipe, changes), tmp_path / "cut", device="cpu")
    for _, _record in zip(range(stop_after), stopped, strict=False):
        pass
    stopped.close()
    torch.manual_seed(99)  # the next process starts with another random state
    run_all(recipe, tmp_path / "cut", *changes)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


def test_a_process_killed_at_any_moment_resumes_to_the_same_bits(tmp_path):
    recipe = write_task(tmp_path)
    changes = ["train.max_steps=60", "train.save_every=2", "validation.every_steps=20"]
    run_all(recipe, tmp_path / "whole", *changes)
    process = forked.start("train", str(recipe), *changes, "-o", str(tmp_path / "cut"))
    while process.is_alive() and not (tmp_path / "cut" / "last.safetensors").exists():
        time.sleep(0.005)
    process.kill()  # without warning, wherever it falls once training has begun; of text, it falls twice
    process.join()
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    run_all(recipe, tmp_path / "cut", *changes)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


def test_a_folder_in_which_a_run_is_going_on_is_refused_and_free_again_behind_it(tmp_path):
    recipe = read_recipe(write_task(tmp_path))
    first = fit(recipe, tmp_path / "run", device="cpu")
    next(first)
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    with pytest.raises(InputError, match="run: another process is training here"):
        list(fit(recipe, tmp_path / "run", device="cpu"))
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log
    first.close()
    list(fit(recipe, tmp_path / "run", device="cpu"))
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_the_log_of_a_resumed_run_has_each_step_once(tmp_path):
    recipe = write_task(tmp_path)
    stopped = fit(read_recipe(recipe), tmp_path / "run", device="cpu")
    for record in stopped:
        if record.kind == "train" and record.step == 9:  # past the last checkpoint, which is at step 8
            break
    stopped.close()
    run_all(recipe, tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    steps = [r["step"] for r in records if r["kind"] == "train"]
    assert steps == sorted(set(steps)) == [3, 6, 9, 12]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(family, parts):
    torch.manual_seed(0)
    module = families.get_family(family)
    shape = next(iter(module.PRESETS.values()))
    model = build(module.make_spec(shape, source_vocab_size=20, target_vocab_size=20)).eval()
    lengths = [3, 9, 1, 5, 7, 2, 6]
    batch = EncodedPairs([[4] * n for n in lengths], [[5 + n] * (n + 1) for n in lengths]).gather(range(7))
    gradients = []
    for cut in (1, parts):
        model.zero_grad()
        for part in batch.split(cut):
            total = loss(model, make_inputs(part, bos_id=2, eos_id=3), label_smoothing=0.1)
            (total / (len(batch.target) + len(batch))).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_accumulating_changes_no_weight(tmp_path):
    recipe = write_task(tmp_path)
    still = [
        "model.dropout=0",
        "train.max_steps=1",
        "train.warmup_steps=0",
        "train.adam_epsilon=0.01",
    ]  # Adam divides by |g|: not by 0
    run_all(recipe, tmp_path / "whole", *still)
    run_all(recipe, tmp_path / "parts", *still, "train.gradient_accumulation_steps=3")
    one, other = (load_tensors(tmp_path / name / "model.safetensors")[0] for name in ("whole", "parts"))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


def test_a_finished_run_is_left_alone(tmp_path):
    recipe = write_task(tmp_path)
    run_all(recipe, tmp_path / "run")
    before = (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns
    assert run_all(recipe, tmp_path / "run") == []
    assert (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns == before


def test_early_stopping_ends_a_run_that_does_not_get_better(tmp_path):
    recipe = write_task(tmp_path)
    still = ["train.learning_rate=0", "train.max_steps=400", "validation.patience=2", "validation.every_steps=2"]
    records = run_all(recipe, tmp_path / "run", *still)
    assert records[-1].kind == "final"
    assert records[-1].step == 6  # the best is step 2, then two validations without a better one


def test_averaged_weights_are_kept_only_where_they_do_no_worse(tmp_path):
    records = run_all(write_task(tmp_path), tmp_path / "run")
    best = min(r.values["token_error_rate"] for r in records if r.kind == "valid")
    assert records[-1].values["token_error_rate"] <= best


def test_a_tiny_model_learns_to_spell(tmp_path):
    recipe = write_task(tmp_path, "transformer", train=400)
    changes = [
        "train.max_steps=250",
        "validation.every_steps=250",
        "train.warmup_steps=20",
        "train.average_checkpoints=1",
        "model.dropout=0",
    ]
    changes += ["train.batch_tokens=400", "train.learning_rate=0.007", "model.d_model=48", "model.d_ff=96"]
    changes += ["model.norm_first=true", "train.schedule=linear"]
    records = run_all(recipe, tmp_path / "run", *changes)
    assert records[-1].values["token_error_rate"] < 0.10


def test_feeding_a_transformer_its_own_outputs_is_refused_before_training(tmp_path):
    with pytest.raises(InputError, match=r"train\.scheduled_sampling.*recurrent"):
        run_all(write_task(tmp_path), tmp_path / "run", "train.scheduled_sampling=0.5")


def test_a_recurrent_decoder_trains_on_its_own_outputs_and_resumes_exactly(tmp_path):
    recipe = write_task(tmp_path, "rnn")
    changes = ["train.scheduled_sampling=0.5", "train.save_every=1"]
    run_all(recipe, tmp_path / "whole", *changes)
    stopped = fit(read_recipe(recipe, changes), tmp_path / "cut", device="cpu")
    next(record for record in stopped if record.kind == "train")
    stopped.close()
    run_all(recipe, tmp_path / "cut", *changes)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


def test_another_recipe_does_not_go_on_in_the_folder_of_a_run(tmp_path):
    recipe = write_task(tmp_path)
    run_all(recipe, tmp_path / "run")
    with pytest.raises(InputError, match=r"model\.heads was 2, is 4; train\.learning_rate was 0\.01, is 0\.02\)"):
        run_all(recipe, tmp_path / "run", "model.heads=4", "train.learning_rate=0.02")


def test_what_does_not_change_the_numbers_may_change(tmp_path):
    recipe = write_task(tmp_path)
    changed = ["train.num_workers=2", "train.log_every=1"]
    run_all(recipe, tmp_path / "one")
    run_all(recipe, tmp_path / "two", *changed)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    assert run_all(recipe, tmp_path / "one", *changed) == []


def test_a_run_folder_is_a_model_folder(tmp_path):
    run_all(write_task(tmp_path), tmp_path / "run")
    loaded = load(tmp_path / "run")
    assert loaded.source_tokenizer.vocab_size == loaded.model.spec.source_embedding.vocab_size
    assert not loaded.model.training


def test_validation_can_leave_out_what_training_has_seen(tmp_path):
    recipe = write_task(tmp_path)
    seen = (tmp_path / "train.dict").read_text().splitlines()[:5]
    fresh = (tmp_path / "valid.dict").read_text().splitlines()
    (tmp_path / "valid.dict").write_text("\n".join([*seen, *fresh]) + "\n")
    words = {line.split()[0] for line in (tmp_path / "train.dict").read_text().splitlines()}
    task = Seq2SeqWorkload.build(
        read_recipe(recipe, ["validation.exclude_train_sources=true", "validation.max_examples=1000"]), tmp_path / "run"
    )
    assert {e.source for e in task.valid_examples} == {line.split()[0] for line in fresh} - words


@pytest.mark.parametrize(
    "change", ["train.optimizer=adam", "train.schedule=cosine", "train.max_grad_norm=0.5", "train.label_smoothing=0.1"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_training_finishes_with_a_model(tmp_path, family, change):
    run_all(write_task(tmp_path, family), tmp_path / "run", change, "train.max_steps=4")
    assert load(tmp_path / "run").model.spec.family == family


def test_half_precision_is_refused_where_there_is_no_gpu(tmp_path):
    with pytest.raises(InputError, match=r"train\.precision: bf16 needs a GPU"):
        run_all(write_task(tmp_path), tmp_path / "run", "train.precision=bf16")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("transformer", []),
        ("rnn", ["validation.patience=1", "validation.every_steps=2", "train.average_checkpoints=3"]),
    ],
)
def test_a_run_killed_before_or_after_any_of_its_writes_ends_with_the_same_bits(tmp_path, family, changes, monkeypatch):
    """What a process that dies before or after any of its renames leaves behind is what the folder holds then."""
    recipe = write_task(tmp_path, family)
    real, left = os.replace, {}  # what is in the folder beside files that were not yet renamed, and a copy of it

    def keep(folder):
        held = hashlib.sha256()
        for file in sorted(folder.rglob("*")):
            if file.is_file() and not file.name.endswith(".part"):
                held.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
        copy = tmp_path / f"killed-{len(left)}"
        if left.setdefault(held.digest(), copy) is copy:
            shutil.copytree(folder, copy)

    def replace(source, target):
        keep(tmp_path / "whole")
        real(source, target)
        keep(tmp_path / "whole")

    monkeypatch.setattr(os, "replace", replace)
    run_all(recipe, tmp_path / "whole", *changes)
    monkeypatch.setattr(os, "replace", real)
    assert len(left) > 12
    for copy in left.values():
        run_all(recipe, copy, *changes)
        assert digest(copy) == digest(tmp_path / "whole"), sorted(file.name for file in copy.iterdir())


def test_other_training_data_does_not_go_on_in_the_folder_of_a_run(tmp_path):
    recipe = write_task(tmp_path)
    stopped = fit(read_recipe(recipe, ["train.save_every=1"]), tmp_path / "run", device="cpu")
    next(record for record in stopped if record.kind == "train")
    stopped.close()
    lines = (tmp_path / "train.dict").read_text().splitlines(keepends=True)
    (tmp_path / "train.dict").write_text("".join(reversed(lines)))
    with pytest.raises(InputError, match="other training data"):
        run_all(recipe, tmp_path / "run", "train.save_every=1")


@pytest.mark.parametrize("format", ["tsv", "jsonl", "aligned"])
def test_other_formats_and_subwords_with_one_shared_vocabulary_train(tmp_path, format):
    pairs = [("a b c", "c b a"), ("b c", "c b"), ("a c", "c a")] * 8
    if format == "aligned":
        (tmp_path / "s").write_text("".join(f"{s}\n" for s, _ in pairs))
        (tmp_path / "t").write_text("".join(f"{t}\n" for _, t in pairs))
        files = f"[{tmp_path}/s, {tmp_path}/t]"
    else:
        line = (
            (lambda s, t: f"{s}\t{t}\n") if format == "tsv" else (lambda s, t: json.dumps({"from": s, "to": t}) + "\n")
        )
        (tmp_path / "all").write_text("".join(line(s, t) for s, t in pairs))
        files = f"{tmp_path}/all"
    recipe = write_task(tmp_path)
    changes = [f"data.format={format}", *(f"data.{part}={files}" for part in ("train", "valid", "test"))]
    changes += ["data.source_field=from", "data.target_field=to", "tokenizer.source={kind: bpe, vocab_size: 280}"]
    changes += [
        "tokenizer.target={kind: bpe, vocab_size: 280}",
        "tokenizer.joint_vocab=true",
        "model.share_embeddings=true",
        "train.max_steps=3",
    ]
    run_all(recipe, tmp_path / "run", *changes)
    model = load(tmp_path / "run").model
    assert model.source_embedding.tokens.weight is model.target_embedding.tokens.weight


def test_a_shared_table_without_a_joint_vocabulary_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"model\.share_embeddings.*tokenizer\.joint_vocab"):
        run_all(
            write_task(tmp_path), tmp_path / "run", "model.share_embeddings=true", "tokenizer.target={kind: character}"
        )


def test_pairs_over_the_maximum_length_are_dropped_where_that_is_chosen(tmp_path):
    recipe = write_task(tmp_path)
    for part in ("train", "valid"):
        with open(tmp_path / f"{part}.dict", "a") as file:
            file.write("BAD" * 20 + "  B\n")
    read = read_recipe(recipe, ["data.on_too_long=drop", "validation.max_examples=1000"])
    task = Seq2SeqWorkload.build(read, tmp_path / "run")
    assert len(task.pairs) == 120
    assert all(len(e.source) < 24 for e in task.valid_examples)


def test_the_log_counts_only_the_time_of_training(tmp_path):
    """Validation at other steps than the records must not make the speed look higher than it was."""
    began = time.perf_counter()
    records = run_all(write_task(tmp_path), tmp_path / "run", "train.log_every=5", "validation.every_steps=4")
    whole = time.perf_counter() - began
    assert 0 < records[-1].values["seconds"] < whole
    tokens = sum(r.values["tokens_per_second"] for r in records if r.kind == "train")
    assert tokens > 0


def test_compiled_training_follows_the_same_path(tmp_path):
    recipe = write_task(tmp_path)
    still = [
        "model.dropout=0",
        "train.max_steps=3",
        "train.average_checkpoints=1",
        "validation.every_steps=3",
        "train.adam_epsilon=0.01",
    ]
    run_all(recipe, tmp_path / "plain", *still)
    run_all(recipe, tmp_path / "compiled", *still, "train.compile=true")
    one, other = (load_tensors(tmp_path / name / "model.safetensors")[0] for name in ("plain", "compiled"))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)


def test_a_run_that_diverges_stops_and_says_so(tmp_path):
    with pytest.raises(InputError, match="not finite"):
        run_all(write_task(tmp_path), tmp_path / "run", "train.learning_rate=1e12")
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_checkpoint_without_its_optimiser_is_not_resumed(tmp_path):
    recipe = write_task(tmp_path)
    stopped = fit(read_recipe(recipe, ["train.save_every=1"]), tmp_path / "run", device="cpu")
    next(record for record in stopped if record.kind == "train")
    stopped.close()
    tensors, notes = load_tensors(tmp_path / "run" / "last.safetensors")
    save_tensors(
        tmp_path / "run" / "last.safetensors", {k: v for k, v in tensors.items() if ".exp_avg" not in k}, notes
    )
    with pytest.raises(InputError, match="not a complete checkpoint"):
        run_all(recipe, tmp_path / "run", "train.save_every=1")


def test_a_run_that_was_refused_leaves_the_folder_free_for_the_remedy(tmp_path):
    recipe = write_task(tmp_path)
    with pytest.raises(InputError, match=r"train\.batch_tokens"):
        run_all(recipe, tmp_path / "run", "train.batch_tokens=3")
    assert run_all(recipe, tmp_path / "run")[-1].kind == "final"


@pytest.mark.parametrize("kind", ["character", "whitespace"])
def test_a_rate_counts_the_targets_own_tokens_whatever_case_it_folds(tmp_path, kind):
    recipe = write_task(tmp_path)
    run_all(recipe, tmp_path / "run", f"tokenizer.target={{kind: {kind}, lowercase: true}}", "train.max_steps=2")
    loaded = load(tmp_path / "run")
    said = predict(loaded, ["bad"])[0].text
    assert evaluate(loaded, [Pair("bad", said.upper() or "B", "here")]).sequence_error_rate == (0.0 if said else 1.0)
