"""Fine-tuning: every way of it learns, resumes to the bit and is saved; what contradicts itself is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from reviews import recipe_text, shape_of, write_model, write_reviews

from qkv import families, spec
from qkv.checkpoints import ModelBundle, load, save
from qkv.checkpoints.lora import merge_bundle
from qkv.checkpoints.safetensors_io import load_tensors
from qkv.errors import InputError
from qkv.recipe import read_recipe
from qkv.tasks.base import predict
from qkv.tasks.head_outputs import iter_outputs
from qkv.train.fit import fit
from qkv.train.workloads.finetuning import FinetuneWorkload
from qkv.train.workloads.task_data import read_split

FAMILIES = ("bert", "gpt2", "roberta", "bart", "t5")
WAYS = {
    "all": [],
    "head": ["finetune.trainable=head"],
    "last": ["finetune.feature_layers=last"],
    "concat_last_4": ["finetune.feature_layers=concat_last_4"],
    "scalar_mix": ["finetune.feature_layers=scalar_mix"],
    "decay": ["finetune.layerwise_lr_decay=0.7"],
    "adapters": ["finetune.lora={rank: 2, dropout: 0.1, target_modules: [q, v, down]}"],
    "balanced": ["finetune.class_weights=balanced", "train.label_smoothing=0.1"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with reviews and a tiny model of each family."""
    folder = tmp_path_factory.mktemp("tuning")
    write_reviews(folder / "mine.csv")
    for family in FAMILIES:
        write_model(family, folder / family)
    return folder


def recipe_of(home: Path, family: str, *changes: str, **sections):
    path = home / f"{family}.yaml"
    path.write_text(recipe_text(home / family, home / "mine.csv", **sections))
    return read_recipe(path, list(changes))


def run_all(recipe, folder: Path) -> list:
    return list(fit(recipe, folder, device="cpu"))


def weights(folder: Path) -> bytes:
    whole = folder / "model.safetensors"
    return (whole if whole.is_file() else folder / "lora.safetensors").read_bytes()


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def changed(folder: Path, base: Path) -> set[str]:
    """Names of the parameters that a run has moved."""
    before, after = load(base).model.state_dict(), load(folder).model.state_dict()
    return {name for name in after if name not in before or not torch.equal(after[name], before[name])}


# ---- what works -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_to_classify(family, home, tmp_path):
    recipe = recipe_of(home, family, "train.max_steps=80", "validation.every_steps=40", "train.learning_rate=0.01")
    finish = run_all(recipe, tmp_path / "run")[-1]
    assert finish.values["accuracy"] > 0.9
    loaded = load(tmp_path / "run")
    assert loaded.model.spec.head.labels == ("1", "5")
    work = FinetuneWorkload.build(recipe, tmp_path / "nowhere")
    right = [
        said == work.task.gold(one)
        for said, one in zip(predict(work.task, loaded, work.valid_examples), work.valid_examples, strict=True)
    ]
    assert sum(right) / len(right) == pytest.approx(finish.values["accuracy"])


@pytest.mark.parametrize("way", WAYS)
def test_every_way_resumes_to_the_bit(way, home, tmp_path):
    recipe = recipe_of(home, "bert", "train.save_every=1", *WAYS[way])
    run_all(recipe, tmp_path / "whole")
    stopped = fit(recipe, tmp_path / "cut", device="cpu")
    for _ in range(3):
        next(stopped)
    stopped.close()
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    torch.manual_seed(99)  # the next process starts with another random state
    run_all(recipe, tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


@pytest.mark.parametrize("way", ["head", "last", "concat_last_4", "scalar_mix", "adapters"])
def test_a_frozen_body_does_not_move(way, home, tmp_path):
    run_all(recipe_of(home, "bert", *WAYS[way]), tmp_path / "run")
    parts = {name.split(".")[0] for name in changed(tmp_path / "run", home / "bert")}
    assert parts == {"head"} | ({"scalar_mix"} if way == "scalar_mix" else {"encoder"} if way == "adapters" else set())
    if way == "adapters":
        names = {n for n in changed(tmp_path / "run", home / "bert") if n.startswith("encoder")}
        assert all(name.endswith((".lora_A", ".lora_B")) for name in names)


@pytest.mark.parametrize("way", ["scalar_mix", "concat_last_4"])
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_features_are_read_from_every_kind_of_body(family, way, home, tmp_path):
    run_all(recipe_of(home, family, *WAYS[way]), tmp_path / "run")
    loaded = load(tmp_path / "run")
    assert loaded.model.spec.feature_layers == way
    with pytest.raises(InputError, match="which no Hugging Face class does"):
        save(loaded, tmp_path / "out", format="huggingface")
    again = load(tmp_path / "run", head="token", labels=["a", "b", "c"])  # the body goes on under another head
    assert (again.model.spec.feature_layers, again.model.spec.head.num_outputs) == ("last", 3)
    same = load(tmp_path / "run", head="sequence", labels=["1", "5"])
    assert ("head.linear.weight" in same.missing_keys) == (
        way == "concat_last_4"
    )  # which has no use for vectors of one layer


def test_epochs_shares_and_validations_become_steps(home, tmp_path):
    recipe = recipe_of(
        home, "bert", "train={epochs: 1.5, batch_tokens: 256, warmup_ratio: 0.5, log_every: 1}", "validation={}"
    )
    records = run_all(recipe, tmp_path / "run")
    note = next(record for record in records if record.kind == "note")
    epoch = FinetuneWorkload.build(recipe, tmp_path / "nowhere").steps_per_epoch()
    steps = round(1.5 * epoch)
    assert epoch > 2
    assert note.values["max_steps"] == steps
    assert [record.step for record in records if record.kind == "valid"] == [epoch, steps]
    rates = [record.values["learning_rate"] for record in records if record.kind == "train"]
    assert rates.index(max(rates)) + 1 == round(0.5 * steps)
    saved = read_recipe(tmp_path / "run" / "recipe.yaml")
    assert (saved.train, saved.validation) == (recipe.train, recipe.validation)  # as the user said it, not in steps


def test_the_next_token_can_be_asked_for_beside_the_task(home, tmp_path):
    plain, beside = (
        run_all(
            recipe_of(home, "gpt2", f"finetune.lm_loss_weight={weight}", "train.max_steps=2"), tmp_path / str(weight)
        )
        for weight in (0, 0.5)
    )
    first, second = (next(r.values for r in records if r.kind == "train") for records in (plain, beside))
    assert "lm_loss" not in first
    assert second["lm_loss"] > 0
    assert weights(tmp_path / "0") != weights(tmp_path / "0.5")
    with pytest.raises(InputError, match="goes with a decoder"):
        run_all(recipe_of(home, "bert", "finetune.lm_loss_weight=0.5"), tmp_path / "bert")


def test_patience_stops_a_run_that_gets_no_better(home, tmp_path):
    changes = [
        "train.learning_rate=0",
        "train.max_steps=50",
        "validation.every_steps=1",
        "validation.patience=3",
        "finetune.trainable=head",
    ]
    assert run_all(recipe_of(home, "bert", *changes), tmp_path / "run")[-1].step == 4


def test_smoothing_is_the_loss_of_the_smoothed_labels(home, tmp_path):
    first = {}
    for share in (0.0, 0.4):
        changes = [f"train.label_smoothing={share}", "train.max_steps=1", "train.log_every=1", "train.learning_rate=0"]
        records = run_all(recipe_of(home, "roberta", *changes), tmp_path / str(share))
        first[share] = next(record.values["loss"] for record in records if record.kind == "train")
    assert first[0.4] != first[0.0]
    assert (
        FinetuneWorkload.build(recipe_of(home, "bert", "train.label_smoothing=0.4"), tmp_path).task.label_smoothing
        == 0.4
    )


# ---- adapters -------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted(home, tmp_path):
    recipe = recipe_of(home, "bert", *WAYS["adapters"], "train.max_steps=20", "validation.every_steps=10")
    run_all(recipe, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_with_adapters_is_a_small_file_beside_its_base(adapted, home):
    assert not (adapted / "model.safetensors").exists()
    tensors, _ = load_tensors(adapted / "lora.safetensors")
    assert all(name.startswith("head.") or name.endswith((".lora_A", ".lora_B")) for name in tensors)
    notes = json.loads((adapted / "lora.json").read_text())
    assert notes["base"] == str(home / "bert")
    assert run_all(read_recipe(adapted / "recipe.yaml"), adapted) == []  # it is finished
    loaded = load(adapted)
    assert loaded.model.spec.lora == spec.LoraConfig(rank=2, dropout=0.1, target_modules=("q", "v", "down"))
    assert loaded.source_tokenizer is not None


def _all_logits(work: FinetuneWorkload, bundle: ModelBundle) -> list[torch.Tensor]:
    outputs = dict(iter_outputs(work.task, bundle, work.valid_examples))
    return [logits for index in range(len(work.valid_examples)) for _, logits in outputs[index]]


def test_a_merged_model_says_the_same_and_needs_no_base(adapted, home, tmp_path):
    loaded = load(adapted)
    work = FinetuneWorkload.build(recipe_of(home, "bert", *WAYS["adapters"]), tmp_path / "nowhere")
    save(merge_bundle(loaded), tmp_path / "ours")
    save(merge_bundle(loaded), tmp_path / "theirs", format="huggingface")
    wanted = _all_logits(work, loaded)
    for folder in ("ours", "theirs"):
        plain = load(tmp_path / folder)
        assert plain.model.spec.lora is None
        found = _all_logits(work, plain)
        assert max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) < 1e-5
    with pytest.raises(InputError, match="no LoRA weights to merge"):
        merge_bundle(load(tmp_path / "ours"))
    with pytest.raises(InputError, match="merge them"):
        save(loaded, tmp_path / "out", format="huggingface")


def test_an_adapted_model_goes_on_under_another_head_with_its_adapters_merged(adapted):
    plain, again = merge_bundle(load(adapted)).model, load(adapted, head="token", labels=["a", "b"]).model
    assert torch.equal(again.encoder.blocks[0].self_attention.q.weight, plain.encoder.blocks[0].self_attention.q.weight)
    assert again.spec.head.kind == "token"


def test_adapters_are_put_on_no_other_base(adapted, home, tmp_path):
    notes = adapted / "lora.json"
    said = json.loads(notes.read_text())
    notes.write_text(json.dumps(said | {"base": str(tmp_path / "gone")}))
    with pytest.raises(InputError, match=r"its base model '.*' cannot be loaded"):
        load(adapted)
    notes.write_text(json.dumps(said | {"base": str(home / "roberta")}))
    with pytest.raises(InputError, match="trained on other weights than"):
        load(adapted)
    shutil.copytree(home / "bert", tmp_path / "moved")
    notes.write_text(json.dumps(said | {"base": str(tmp_path / "moved")}))
    load(adapted)  # the same one, elsewhere
    notes.write_text("{}")
    with pytest.raises(InputError, match="does not name a base"):
        load(adapted)


def test_a_run_does_not_go_on_from_another_base(home, tmp_path):
    shutil.copytree(home / "bert", tmp_path / "base")
    (tmp_path / "r.yaml").write_text(recipe_text(tmp_path / "base", home / "mine.csv"))
    recipe = read_recipe(tmp_path / "r.yaml", ["train.save_every=1", *WAYS["adapters"]])
    stopped = fit(recipe, tmp_path / "cut", device="cpu")
    for _ in range(3):
        next(stopped)
    stopped.close()
    shutil.rmtree(tmp_path / "base")
    torch.manual_seed(1)
    other = load(home / "bert")
    with torch.no_grad():
        other.model.encoder.blocks[0].self_attention.k.weight.add_(1)
    save(other, tmp_path / "base")
    with pytest.raises(InputError, match="was started from other weights than"):
        run_all(recipe, tmp_path / "cut")


@pytest.mark.parametrize(
    "change",
    [
        "train.activation_checkpointing=true",
        "train.ema_decay=0.9",
        "train.average_checkpoints=2",
        "train.gradient_accumulation_steps=2",
    ],
)
def test_adapters_go_with_every_way_of_training(change, home, tmp_path):
    recipe = recipe_of(home, "gpt2", "finetune.lora={rank: 2}", change, "train.save_every=1")
    run_all(recipe, tmp_path / "whole")
    stopped = fit(recipe, tmp_path / "cut", device="cpu")
    for _ in range(3):
        next(stopped)
    stopped.close()
    run_all(recipe, tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    assert load(tmp_path / "cut").model.spec.lora is not None


# ---- from nothing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2", "rnn"])
def test_a_model_is_learned_from_nothing_with_a_tokeniser_of_its_own(family, home, tmp_path):
    fields = shape_of(family).__dict__ | {"family": family, "size": next(iter(families.get_family(family).PRESETS))}
    model = {key: value for key, value in fields.items() if value is not None}
    model.pop("scaled_residual_init", None)
    train = {"max_steps": 60, "learning_rate": 0.01, "save_every": 10}
    text = {"vocab_size": 400 if family == "gpt2" else 90}
    recipe = recipe_of(home, family, model=model, tokenizer=text, train=train, validation={"every_steps": 30})
    finish = run_all(recipe, tmp_path / "whole")[-1]
    assert finish.values["accuracy"] > 0.8
    stopped = fit(recipe, tmp_path / "cut", device="cpu")
    for _ in range(8):
        next(stopped)
    stopped.close()
    run_all(recipe, tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    assert load(tmp_path / "whole").model.spec.encoder is not None or family == "gpt2"


def test_a_bilstm_reads_its_states_by_attention_with_a_learned_query():
    s = families.get_family("rnn").make_spec(
        shape_of("rnn"), source_vocab_size=50, head="sequence", labels=("a", "b", "c")
    )
    assert (s.decoder, s.target_embedding, s.head.num_outputs) == (None, None, 3)
    assert isinstance(s.head.pool, spec.Attention)
    assert (
        families.get_family("rnn").make_spec(shape_of("rnn"), source_vocab_size=50, head="token").head.kind == "token"
    )
    assert families.get_family("rnn").make_spec(shape_of("rnn")).decoder is not None


# ---- folds ----------------------------------------------------------------------------------------------------------


def test_each_example_is_held_out_in_one_fold(home):
    recipe = recipe_of(home, "bert")
    whole = {one.location for part in ("train", "valid") for one in read_split(recipe.data, part)}
    seen: list[str] = []
    for number in range(1, 5):
        folded = recipe_of(home, "bert", "data.hold_out={}", f"data.fold=[{number}, 4]")
        held, rest = ({one.location for one in read_split(folded.data, part)} for part in ("valid", "train"))
        assert held | rest == whole
        assert not held & rest
        seen += held
    assert sorted(seen) == sorted(whole)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["train={epochs: 2, max_steps: 3}"], "max_steps and epochs are both set"),
        (["train.max_steps=null"], "'max_steps' is missing; set max_steps or epochs"),
        (["finetune.trainable=all", "finetune.lora={}"], "lora freezes the backbone, and trainable: all trains it"),
        (["finetune.trainable=head", "finetune.lora={}"], "and trainable: head only the head"),
        (["finetune.feature_layers=scalar_mix", "finetune.lora={}"], "lora and feature_layers exclude each other"),
        (["finetune.trainable=head", "finetune.layerwise_lr_decay=0.9"], "layerwise_lr_decay needs trained layers"),
        (["finetune.lora={rank: 0}"], "key 'finetune.lora.rank' cannot be 0"),
        (["finetune.lora={ranks: 2}"], "unknown key 'finetune.lora.ranks'; did you mean 'rank'"),
        (["finetune.lora={target_modules: [x]}"], "cannot be 'x'"),
        (["finetune.lora={target_modules: [gate]}"], "no block of this model has a layer 'gate'"),
        (["finetune.lora={}", "train.strategy=fsdp"], "is not supported with train.strategy: fsdp"),
        (["data.fold=[3, 2]"], "fold is [k, n]"),
        (["data.fold=[1, 2]"], "remove data.valid and data.hold_out.valid"),
        (["data.columns={text: reviews, label: stars}"], "no column 'reviews'; did you mean 'review'?"),
        (["data.columns={texts: review}"], "has no column or option 'texts'"),
        (["data.train=nowhere.csv"], "nowhere.csv: no such file"),
        (["data.hold_out={}"], "the recipe has no 'valid' data"),
        (["model={init_from: /nowhere/at/all}"], "/nowhere/at/all: no such folder"),
        (["model={}"], "key 'model.family' is missing (or model.init_from, a pretrained model)"),
        (["model={family: bert, size: mini}"], "training one needs tokenizer.vocab_size"),
        (
            ["model={family: bert, size: mini}", "tokenizer.vocab_size=90", "finetune.trainable=head"],
            "a new model has to be trained as a whole",
        ),
        (["tokenizer.vocab_size=90"], "a pretrained model has its own"),
        (["task=clasify"], "there is no 'clasify'; did you mean 'classify'"),
        (["task={name: text_classification, metrics: f1}"], "task: text_classification:"),
        (["validation.metric=acuracy"], "has no 'acuracy'; did you mean 'accuracy'"),
        (
            ["train.label_smoothing=0.1", "task={name: text_classification, label_smoothing: 0.2}"],
            "are the same setting; leave out one",
        ),
        (["train.batch_tokens=4"], "set train.batch_tokens to"),
        (["train.rdrop_alpha=2.0"], "goes with pairs"),
    ],
)
def test_a_slip_is_one_line(changes, said, home, tmp_path):
    with pytest.raises(InputError) as found:
        run_all(recipe_of(home, "bert", *changes), tmp_path / "run")
    assert said in str(found.value)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "run" / "last.safetensors").exists()


def test_a_label_that_was_never_seen_is_named_or_skipped(home, tmp_path):
    valid = write_reviews(tmp_path / "valid.csv", 12, [("a house 999", "3")])
    changes = [f"data.valid={valid}", "data.hold_out={}"]
    with pytest.raises(InputError, match=r"valid\.csv:14: label '3' was never seen in training; known: 1, 5"):
        run_all(recipe_of(home, "bert", *changes), tmp_path / "run")
    note = run_all(recipe_of(home, "bert", *changes, "data.skip_bad=true"), tmp_path / "run")[0]
    assert note.samples[0].endswith("12 validation examples")
    assert note.samples[-2] == "1 bad example was skipped:"
    assert "label '3' was never seen in training" in note.samples[-1]


def test_a_head_that_a_family_lacks_is_named(home, tmp_path):
    data = tmp_path / "choices.jsonl"
    rows = [{"question": f"the cat {i}", "choices": ["sat", "ran"], "answer": i % 2} for i in range(40)]
    data.write_text("\n".join(map(json.dumps, rows)))
    changes = [f"data={{format: choices, train: {data}, hold_out: {{valid: 0.2}}}}", "task=multiple_choice"]
    with pytest.raises(InputError) as found:
        run_all(recipe_of(home, "t5", *changes), tmp_path / "run")
    assert "multiple_choice needs a 'choice' head: this family has no 'choice'" in str(found.value)


def test_a_model_without_a_tokeniser_is_named(home, tmp_path):
    shutil.copytree(home / "bert", tmp_path / "mute")
    (tmp_path / "mute" / "source.tokenizer.json").unlink()
    with pytest.raises(InputError, match="has no tokenizer"):
        run_all(recipe_of(home, "bert", f"model={{init_from: {tmp_path / 'mute'}}}"), tmp_path / "run")


def test_long_and_short_examples_share_batches(home, tmp_path):
    """Sorted by length they would share them with their like, of which labels are too often the same."""
    work = FinetuneWorkload.build(recipe_of(home, "bert", "train.batch_tokens=120"), tmp_path / "nowhere")
    lengths = sorted(one.length for one in work.features)
    third = len(lengths) // 3
    short, long = lengths[third], lengths[-third]
    assert short < long
    both = 0
    for _, (_, batch) in zip(range(work.steps_per_epoch()), work.batches_from(0, 0), strict=False):
        sizes = [one.length for one in batch.features]
        both += min(sizes) <= short and max(sizes) >= long
    assert both > work.steps_per_epoch() / 2
