"""Another head on a model of a family without a Hugging Face form: the backbone stays, the head is new."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from qkv import InputError, ModelBundle, build, families, fit, load, read_recipe, save, spec
from qkv.checkpoints.state import unique_state_dict
from qkv.families import rnn, transformer
from qkv.nn import Encoder, EncoderDecoder, Ragged
from qkv.tokenization.tokenizer import train_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "generation"))
from writers import tiny

# encoder-decoders, and decoders with memory
NATIVE = [name for name in families.names() if "seq2seq_lm" in getattr(families.get_family(name), "HEAD_NAMES", ())]
RECURRENT = ("awd_lstm", "lstm_lm")
LABELS = ("bad", "good", "so so")


def saved(folder: Path, family: str, **config: object) -> Path:
    """Save a tiny encoder-decoder of a family."""
    letters = train_tokenizer("character", ["abcde"])
    torch.manual_seed(1)
    model = (
        tiny(family, vocabulary=9)
        if not config
        else build(
            families.get_family(family).make_spec(
                families.get_family(family).Config(**config), source_vocab_size=9, target_vocab_size=9
            )
        )
    )
    save(ModelBundle(model, letters, letters), folder)
    return folder


def source() -> Ragged:
    return Ragged.pack([torch.tensor([4, 5, 6]), torch.tensor([7, 8, 4, 5, 6])])


def logits(model: Encoder | EncoderDecoder) -> torch.Tensor:
    x = source()
    with torch.no_grad():
        return model(x) if isinstance(model, Encoder) else model(x, x.shift_right(model.spec.bos_id))


@pytest.mark.parametrize(
    ("head", "shape"), [("sequence", (2, 3)), ("token", (8, 3)), ("span", (8, 2)), ("choice", (2, 1))]
)
@pytest.mark.parametrize("family", NATIVE)
def test_a_native_run_gets_another_head_on_the_same_backbone(
    family: str, head: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    base = load(saved(tmp_path / "m", family)).model
    torch.manual_seed(7)
    bundle = load(tmp_path / "m", head=head, labels=LABELS)
    assert isinstance(bundle.model, Encoder)
    assert not bundle.model.training
    assert logits(bundle.model).shape == shape
    assert logits(bundle.model).isfinite().all()
    before, after = unique_state_dict(base), unique_state_dict(bundle.model)
    backbone = {name for name in after if not name.startswith("head.")}
    assert backbone == {name for name in before if name.startswith(("encoder.", "source_embedding."))}
    assert all(torch.equal(after[name], before[name]) for name in backbone)
    assert set(bundle.missing_keys) == set(after) - backbone
    assert any(name.startswith("decoder.") for name in bundle.unexpected_keys)
    with torch.no_grad():
        hidden = bundle.model.hidden_states(source()).hidden.values
        torch.testing.assert_close(hidden, base.encode(source()).hidden.values)


@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrent_language_model_gets_the_heads_of_its_family(family: str, tmp_path: Path) -> None:
    module, letters = families.get_family(family), train_tokenizer("character", ["abcde"])
    config = module.Config(d_model=6, hidden_size=8, layers=2)
    base = build(module.make_spec(config, target_vocab_size=9, bos_id=2, eos_id=3))
    save(ModelBundle(base, letters, letters), tmp_path / "m")
    for head, shape in (("sequence", (2, 3)), ("token", (8, 3)), ("span", (8, 2)), ("choice", (2, 1))):
        bundle = load(tmp_path / "m", head=head, labels=LABELS)
        expected = module.make_spec(config, target_vocab_size=9, bos_id=2, eos_id=3, head=head, labels=LABELS).head
        assert bundle.model.spec.head == spec.replace(expected, dropout=bundle.model.spec.head.dropout)
        assert bundle.model(source()).shape == shape
        assert all(name.startswith("head.") for name in bundle.missing_keys)
    assert load(tmp_path / "m", head="lm").model.spec == base.spec


@pytest.mark.parametrize("family", NATIVE)
def test_a_seed_draws_the_same_new_head(family: str, tmp_path: Path) -> None:
    saved(tmp_path / "m", family)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(logits(load(tmp_path / "m", head="sequence", labels=LABELS).model))
    assert torch.equal(*drawn)


def test_a_transformer_with_one_table_is_classified_through_its_decoder_as_bart_is(tmp_path: Path) -> None:
    base = load(
        saved(tmp_path / "m", "transformer", d_model=8, heads=2, layers=1, d_ff=16, share_embeddings=True)
    ).model
    bundle = load(tmp_path / "m", head="sequence", labels=LABELS)
    assert isinstance(bundle.model, EncoderDecoder)
    assert logits(bundle.model).shape == (2, 3)
    assert set(bundle.missing_keys) == {"head.linear.weight", "head.linear.bias"}
    before, after = unique_state_dict(base), unique_state_dict(bundle.model)
    assert all(torch.equal(after[name], before[name]) for name in after if not name.startswith("head."))
    assert isinstance(load(tmp_path / "m", head="token", labels=LABELS).model, Encoder)


@pytest.mark.parametrize("family", NATIVE)
def test_a_new_head_is_saved_and_its_weights_stay_if_only_the_labels_names_change(family: str, tmp_path: Path) -> None:
    first = load(saved(tmp_path / "m", family), head="sequence", labels=LABELS)
    save(first, tmp_path / "classifier")
    again = load(tmp_path / "classifier", labels=("x", "y", "z"))
    assert again.missing_keys == ()
    assert again.model.spec.head.labels == ("x", "y", "z")
    assert torch.equal(logits(again.model), logits(first.model))
    assert load(tmp_path / "classifier", head="sequence", labels=("x", "y")).missing_keys


@pytest.mark.parametrize("family", NATIVE)
def test_what_makes_no_sense_is_refused_in_one_line(family: str, tmp_path: Path) -> None:
    saved(tmp_path / "m", family)
    save(load(tmp_path / "m", head="token", labels=LABELS), tmp_path / "tagger")
    for folder, options, message in (
        ("m", {"head": "masked_lm"}, "head: this family has no 'masked_lm'"),
        ("m", {"head": "sequence"}, "'sequence' needs labels"),
        ("m", {"labels": LABELS}, r"its head \(seq2seq_lm\) has no labels"),
        ("tagger", {"head": "seq2seq_lm"}, "'seq2seq_lm' needs a decoder"),
    ):
        with pytest.raises(InputError, match=message):
            load(tmp_path / folder, **options)


def test_a_recurrent_classifier_is_what_its_family_makes_of_the_same_config(tmp_path: Path) -> None:
    config = {"d_model": 6, "hidden_size": 8, "attention": "additive"}
    bundle = load(saved(tmp_path / "m", "rnn", **config), head="sequence", labels=LABELS)
    assert bundle.model.spec == rnn.make_spec(rnn.Config(**config), source_vocab_size=9, head="sequence", labels=LABELS)


def test_a_transformer_under_a_task_is_made_from_scratch_too() -> None:
    made = transformer.make_spec(transformer.PRESETS["tiny"], head="sequence", labels=LABELS)
    assert made.decoder is None
    assert made.head.labels == LABELS


@pytest.mark.parametrize("finetune", ["{}", "{lora: {rank: 2}}"])
@pytest.mark.parametrize("family", NATIVE)
def test_a_recipe_fine_tunes_a_native_run_on_a_task(family: str, finetune: str, tmp_path: Path) -> None:
    if family == "rnn" and "lora" in finetune:
        pytest.skip("LoRA is for the matrices of Transformer blocks")
    base = saved(tmp_path / "base", family)
    (tmp_path / "mine.csv").write_text(
        "text,label\n" + "".join(f"{'abc' * (1 + i % 2)},{'xy'[i % 2]}\n" for i in range(12))
    )
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{init_from: {base}}}\ntask: text_classification\nfinetune: {finetune}\n"
        f"data: {{format: csv, train: {tmp_path / 'mine.csv'}, valid: {tmp_path / 'mine.csv'}}}\n"
        "train: {max_steps: 2, batch_tokens: 64, warmup_steps: 1}\nvalidation: {every_steps: 2}\n"
    )
    records = list(fit(read_recipe(tmp_path / "recipe.yaml"), tmp_path / "run", device="cpu"))
    assert records[-1].kind == "final"
    assert load(tmp_path / "run").model.spec.head.labels == ("x", "y")
