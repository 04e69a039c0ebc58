"""Pairs of texts: scored as texts, learned from fresh or from a pretrained model, alone or mixed by prefix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sentences import FRESH, TEXT, framed, mixed, pretrained, summaries, write_recipe

from qkv.checkpoints import load
from qkv.data.pair import Pair
from qkv.errors import InputError
from qkv.generation import GenerationConfig
from qkv.metrics import evaluate, reference_loss
from qkv.metrics.sacrebleu import Bleu
from qkv.recipe import read_recipe
from qkv.recipe.parse import recipe_to_yaml
from qkv.recipe.schema import SideTokenizer, SideTokenizers
from qkv.tasks.predictor import predict
from qkv.train.fit import fit
from qkv.train.workloads.pair_data import to_examples
from qkv.train.workloads.seq2seq import Seq2SeqWorkload
from qkv.train.workloads.seq2seq_data import build_tokenizers, eval_examples

HARD = "Der „Café“-Besitzer sagt:  »É, ½ Straße …« (3,5 %)\tund  geht — tschüß! 你好 😀 <s> </s>"


def run_all(recipe: Path, folder: Path, *changes: str) -> list:
    return list(fit(read_recipe(recipe, list(changes)), folder, device="cpu"))


# ---- figures of texts -----------------------------------------------------------------------------------------------


def test_byte_pairs_give_every_text_back_as_it_was() -> None:
    pairs = [Pair("a man sees „Café“", "ein Mann sieht „Kaffee“", "here")] * 5
    for size in (300, 320):
        both, _ = build_tokenizers(
            SideTokenizers(source=SideTokenizer(kind="bpe", vocab_size=size), joint_vocab=True), pairs
        )
        assert both.decode(both.encode(HARD)) == HARD


def test_unigram_pieces_give_back_what_they_know() -> None:
    pairs = [Pair("a man sees „Café“.", "ein Mann sieht „Kaffee“.", "here")] * 5
    source, target = build_tokenizers(SideTokenizers(source=SideTokenizer(kind="unigram", vocab_size=40)), pairs)
    assert source is not target
    assert target.decode(target.encode("sieht ein „Kaffee“.")) == "sieht ein „Kaffee“."
    assert (source.pad_id, source.unk_id, source.bos_id, source.eos_id) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("metric", "more"),
    [("bleu", True), ("chrf", True), ("rougeL", True), ("ter", False), ("loss", False), ("sequence_error_rate", False)],
)
def test_a_run_is_steered_by_the_metric_that_is_chosen(tmp_path, metric, more):
    recipe = write_recipe(tmp_path)
    work = Seq2SeqWorkload.build(read_recipe(recipe, [f"validation.metric={metric}"]), tmp_path / "nowhere")
    assert (work.metric, work.higher_is_better) == (metric, more)
    records = run_all(recipe, tmp_path / "run", f"validation.metric={metric}")
    values = [record.values[metric] for record in records if record.kind == "valid"]
    assert records[-1].values[metric] == (max(values) if more else min(values))


def test_held_out_bleu_is_that_of_the_written_texts_against_the_files(tmp_path):
    recipe = write_recipe(tmp_path)
    records = run_all(recipe, tmp_path / "run")
    sources = (tmp_path / "valid.en").read_text("utf-8").splitlines()
    right = (tmp_path / "valid.de").read_text("utf-8").splitlines()
    written = [found.text for found in predict(load(tmp_path / "run"), sources)]
    finished = next(r for r in records if r.kind == "valid" and r.step == records[-1].values["best_step"])
    assert finished.values["bleu"] == pytest.approx(Bleu()(written, [[line] for line in right])["bleu"])


def test_evaluating_gives_figures_with_intervals_and_signatures(tmp_path):
    run_all(write_recipe(tmp_path), tmp_path / "run")
    pairs = [Pair("a man.", "ein Mann.", "1"), Pair("old dog.", "alt Hund.", "2"), Pair("a man.", "ein Mann.", "3")]
    found = evaluate(
        load(tmp_path / "run"), to_examples(pairs, False), None, ["bleu", "chrf", "sequence_error_rate"], resamples=20
    )
    assert list(found.values) == ["bleu", "bleu_lowercase", "chrf", "sequence_error_rate"]
    cased, lower = found.metrics[:2]
    assert "case:mixed" in cased.signature
    assert "case:lc" in lower.signature
    assert cased.interval.low <= cased.value <= cased.interval.high
    assert found.num_examples == 3


def test_an_unknown_metric_of_texts_is_refused(tmp_path):
    run_all(write_recipe(tmp_path), tmp_path / "run")
    with pytest.raises(InputError, match=r"'accuracy' is not a metric of texts; known: .*bleu"):
        evaluate(load(tmp_path / "run"), [Pair("a man.", "ein Mann.", "1")], None, ["accuracy"])


def test_lines_are_examples_of_a_text_metric_and_sources_those_of_error_rates():
    pairs = [
        Pair("a", "x", "f:1"),
        Pair("b", "y", "f:2"),
        Pair("a", "z", "f:3"),
        Pair("c", "u", "g:1"),
        Pair("c", "v", "g:1"),
    ]
    assert [e.references for e in to_examples(pairs, True)] == [("x", "z"), ("y",), ("u", "v")]
    assert [e.references for e in to_examples(pairs, False)] == [("x",), ("y",), ("z",), ("u", "v")]


def test_the_log_shows_held_out_sources_with_what_the_model_writes(tmp_path):
    records = run_all(write_recipe(tmp_path), tmp_path / "run", "validation.num_samples=3")
    shown = [record.samples for record in records if record.kind == "valid"]
    assert all(len(some) == 3 and all(" → " in one for one in some) for some in shown)
    first = (tmp_path / "valid.en").read_text("utf-8").splitlines()[0]
    assert shown[0][0].startswith(first)
    assert run_all(write_recipe(tmp_path), tmp_path / "other", "validation.num_samples=0")[-2].samples == ()


def test_the_held_out_loss_falls_as_the_training_pairs_are_learned(tmp_path):
    recipe = write_recipe(tmp_path)
    records = run_all(
        recipe, tmp_path / "run", "validation.metric=loss", "train.max_steps=30", "validation.every_steps=10"
    )
    values = [record.values["loss"] for record in records if record.kind == "valid"]
    assert values == sorted(values, reverse=True)


def test_the_held_out_loss_is_without_dropout(tmp_path, monkeypatch):
    evaluate_workload, modes = Seq2SeqWorkload.evaluate, []

    def record_mode(work, model):
        modes.append(model.training)
        return evaluate_workload(work, model)

    monkeypatch.setattr(Seq2SeqWorkload, "evaluate", record_mode)
    changes = ["validation.metric=loss", "model.dropout=0.5", "train.max_steps=2", "validation.every_steps=1"]
    losses = [
        record for record in run_all(write_recipe(tmp_path), tmp_path / "run", *changes) if record.kind == "valid"
    ]
    assert modes == [False] * len(losses) != []
    bundle = load(tmp_path / "run")
    examples = eval_examples(
        read_recipe(tmp_path / "run" / "recipe.yaml"), "valid", bundle.source_tokenizer, bundle.model.spec
    )
    best = min(record.values["loss"] for record in losses)
    assert reference_loss(bundle, next(iter(examples.values()))) == pytest.approx(best, rel=1e-6)


def test_a_package_that_is_not_there_is_said_before_training(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(InputError, match="needs the package rouge-score"):
        run_all(write_recipe(tmp_path), tmp_path / "run", "validation.metric=rouge1")
    assert not (tmp_path / "run").exists()


# ---- pretrained models ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["t5", "bart", "marian"])
def tuned(request, tmp_path) -> tuple[Path, Path]:
    """A recipe that starts from a pretrained model, and that model."""
    model = pretrained(tmp_path / request.param, request.param)
    return write_recipe(tmp_path, f"{{init_from: {model}}}", text=""), model


def test_both_sides_are_framed_as_the_checkpoints_family_has_them(tuned, tmp_path):
    recipe, model = tuned
    work = Seq2SeqWorkload.build(read_recipe(recipe, ["data.prefix='translate English to German: '"]), tmp_path / "no")
    loaded = load(model)
    _, batch = next(work.batches_from(0, 0))
    given = work.collate(batch, 1)
    lines = (tmp_path / "train.en").read_text("utf-8").splitlines()
    sources = [framed(loaded.source_tokenizer, f"translate English to German: {line}") for line in lines]
    targets = [
        framed(loaded.target_tokenizer, line) for line in (tmp_path / "train.de").read_text("utf-8").splitlines()
    ]
    known = {tuple(a): b for a, b in zip(sources, targets, strict=True)}
    labels = list(given.labels.split(given.target.layout.lengths_list))
    for source, target, label in zip(given.source.sequences(), given.target.sequences(), labels, strict=True):
        right = known[tuple(source.tolist())]
        assert label.tolist() == right
        assert target.tolist() == [work.spec.bos_id, *right[:-1]]


def test_a_run_begins_with_the_pretrained_weights_and_ends_with_others(tuned, tmp_path):
    recipe, model = tuned
    run_all(recipe, tmp_path / "still", "train.learning_rate=0", "train.weight_decay=0")
    run_all(recipe, tmp_path / "moved")
    first, still, moved = (load(path).model.state_dict() for path in (model, tmp_path / "still", tmp_path / "moved"))
    assert all(torch.equal(first[name], still[name]) for name in first)
    assert any(not torch.equal(first[name], moved[name]) for name in first)


def test_a_tuned_run_translates_with_the_tokeniser_of_its_model(tuned, tmp_path):
    recipe, model = tuned
    run_all(recipe, tmp_path / "run")
    loaded = load(tmp_path / "run")
    assert loaded.source_tokenizer.encode("a man sees") == load(model).source_tokenizer.encode("a man sees")
    assert isinstance(predict(loaded, ["a man."], GenerationConfig(num_beams=2, max_new_tokens=8))[0].text, str)


def test_a_tuned_run_stopped_and_resumed_ends_with_the_same_weights(tuned, tmp_path):
    recipe, _ = tuned
    run_all(recipe, tmp_path / "whole", "train.save_every=1")
    stopped = fit(read_recipe(recipe, ["train.save_every=1"]), tmp_path / "cut", device="cpu")
    for record in stopped:
        if record.kind == "valid":
            break
    stopped.close()
    run_all(recipe, tmp_path / "cut", "train.save_every=1")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == other


def test_the_reference_loss_of_a_framed_pair_is_the_models_own(tuned):
    _, folder = tuned
    loaded = load(folder)
    found = reference_loss(loaded, to_examples([Pair("a man.", "ein Mann.", "1")], True))
    from qkv.nn import Ragged

    source, right = framed(loaded.source_tokenizer, "a man."), framed(loaded.target_tokenizer, "ein Mann.")
    target = [loaded.model.spec.bos_id, *right[:-1]]
    with torch.no_grad():
        logits = loaded.model(Ragged.pack([torch.tensor(source)]), Ragged.pack([torch.tensor(target)]))
    log_probabilities = torch.log_softmax(logits, -1)[torch.arange(len(right)), torch.tensor(right)]
    assert found == pytest.approx(-float(log_probabilities.mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("model", "text", "said"),
    [
        (FRESH, "", "key 'tokenizer' is missing"),
        ("{init_from: t5}", TEXT, "leave out this section, or model.init_from"),
        ("{init_from: t5, d_model: 3}", "", r"a pretrained model has a fixed shape, except dropout; leave out d_model"),
    ],
)
def test_a_text_section_goes_with_a_fresh_model_and_with_no_other(tmp_path, model, text, said):
    pretrained(tmp_path / "t5", "t5")
    recipe = write_recipe(tmp_path, model.replace("t5", str(tmp_path / "t5")), text)
    with pytest.raises(InputError, match=said):
        run_all(recipe, tmp_path / "run")


def test_a_model_that_is_there_is_trained_with_another_dropout_where_the_recipe_says_so(tmp_path):
    pretrained(tmp_path / "t5", "t5")
    recipe = write_recipe(tmp_path, f"{{init_from: {tmp_path / 't5'}, dropout: 0.3}}", "")
    run_all(recipe, tmp_path / "run")
    was, trained = (load(tmp_path / name).model.spec for name in ("t5", "run"))
    assert was.encoder.block.dropout != 0.3
    assert trained.encoder.block.dropout == trained.decoder.block.dropout == trained.source_embedding.dropout == 0.3
    assert trained.encoder.block.self_attention.dropout == was.encoder.block.self_attention.dropout
    with pytest.raises(
        InputError, match=r"model\.attention_dropout' cannot be 1\.0: it must be at least 0 and below 1"
    ):
        read_recipe(recipe, ["model.attention_dropout=1.0"])


def test_a_model_that_does_not_write_is_refused(tmp_path):
    from qkv import ModelBundle, build, save
    from qkv.families import gpt2
    from qkv.tokenization.tokenizer import train_tokenizer

    tokeniser = train_tokenizer("byte_bpe", ["a man"], vocab_size=270, template=gpt2.TOKENIZER_TEMPLATE)
    shape = gpt2.Config(d_model=12, heads=2, layers=1, max_length=24)
    save(
        ModelBundle(build(gpt2.make_spec(shape, target_vocab_size=tokeniser.vocab_size)), tokeniser, tokeniser),
        tmp_path / "gpt2",
    )
    with pytest.raises(InputError, match="is no encoder-decoder with a language model head"):
        run_all(write_recipe(tmp_path, f"{{init_from: {tmp_path / 'gpt2'}}}", ""), tmp_path / "run")


# ---- summaries, lengths ---------------------------------------------------------------------------------------------


def test_a_folder_of_summaries_has_its_own_parts_and_all_references(tmp_path):
    read = read_recipe(summaries(tmp_path))
    work = Seq2SeqWorkload.build(read, tmp_path / "no")
    assert len(work.pairs) == 40  # two summaries of each of twenty
    assert [len(e.references) for e in work.valid_examples] == [2] * 5
    test = eval_examples(read, "test", work.source_tokenizer, work.spec)[""]
    first = json.loads((tmp_path / "test.jsonl").read_text("utf-8").splitlines()[0])
    assert test[0].references == tuple(first["target"])


def test_long_documents_are_cut_to_what_is_read_and_that_is_said(tmp_path):
    read = read_recipe(summaries(tmp_path))
    work = Seq2SeqWorkload.build(read, tmp_path / "no")
    assert max(work.pairs.source_lengths) == 11  # and the end
    assert max(work.pairs.target_lengths) == 8
    assert "40 of the 40 training pairs are longer than 11 and 8 tokens and are truncated" in work.data_notes
    full = " ".join(json.loads((tmp_path / "dev.jsonl").read_text("utf-8").splitlines()[0])["source"])
    shown = work.valid_examples[0].source
    assert f"summarize: {full}".startswith(shown)
    assert len(framed(work.source_tokenizer, shown)) == 12
    records = run_all(summaries(tmp_path), tmp_path / "run")
    assert records[0].kind == "note"
    assert all(
        len(framed(work.source_tokenizer, s.split(" → ")[1])) <= 10 for r in records for s in r.samples if " → " in s
    )


def test_a_long_document_is_refused_by_its_place_unless_somebody_chose(tmp_path):
    with pytest.raises(InputError, match=r"train\.jsonl:1: \d+ and \d+ tokens.*data\.on_too_long: drop or truncate"):
        run_all(summaries(tmp_path), tmp_path / "run", "data.on_too_long=refuse")


# ---- several sets ---------------------------------------------------------------------------------------------------


def test_sets_are_told_apart_by_their_prefixes_and_scored_each(tmp_path):
    records = run_all(mixed(tmp_path), tmp_path / "run")
    assert records[0].samples[:2] == (
        "translate English to German: 60 pairs, 60.0% of an epoch",
        "tldr: 40 pairs, 40.0% of an epoch",
    )
    valid = next(record for record in records if record.kind == "valid").values
    each = valid["chrf translate English to German"], valid["chrf tldr"]
    assert valid["chrf"] == pytest.approx(sum(each) / 2)
    work = Seq2SeqWorkload.build(read_recipe(mixed(tmp_path)), tmp_path / "no")
    assert {e.source.split(": ")[0] for e in work.valid_examples} == {"translate English to German", "summarize"}


def test_weights_decide_how_much_of_an_epoch_a_set_is(tmp_path):
    work = Seq2SeqWorkload.build(read_recipe(mixed(tmp_path, weights=(1, 3))), tmp_path / "no")
    assert work.data_notes[:2] == (
        "translate English to German: 60 pairs, 25.0% of an epoch",
        "tldr: 40 pairs, 75.0% of an epoch",
    )


def test_a_recipe_of_several_sets_written_down_reads_back_the_same(tmp_path):
    read = read_recipe(mixed(tmp_path))
    (tmp_path / "again.yaml").write_text(recipe_to_yaml(read), "utf-8")
    assert read_recipe(tmp_path / "again.yaml") == read


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.train=a.tsv", "with datasets, files and prefixes are set in each dataset"),
        ("data.datasets=[{format: tsv}]", "'train' is missing in one of datasets"),
        (
            "data.datasets=[{format: tsv, train: a}, {format: tsv, train: b, name: '1'}]",
            "two datasets have the same name",
        ),
        ("data.datasets=[{format: tsv, trian: a}]", r"unknown key 'data\.datasets\.0\.trian'; did you mean 'train'"),
        ("data.datasets=[]", "'format' is missing"),
    ],
)
def test_a_slip_in_a_mix_is_named(tmp_path, change, said):
    with pytest.raises(InputError, match=said):
        read_recipe(mixed(tmp_path), [change])
