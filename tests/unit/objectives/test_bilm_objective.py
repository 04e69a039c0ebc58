"""Bidirectional language modeling: which state predicts which word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import qkv
from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.errors import InputError
from qkv.families import elmo
from qkv.nn import Ragged, build
from qkv.objectives.base import TextContext
from qkv.objectives.bilm import BidirectionalLM
from qkv.recipe.objectives import BiLMObjective
from qkv.recipe.parse import parse_recipe
from qkv.tokenization.spelled_words import vocabulary_words
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer
from qkv.train.fit import fit

TEXT = "the cat saw the dog . the dog ran ."
CONFIG = elmo.Config(char_dim=4, filter_widths=(1, 3), filter_counts=(4, 4), d_model=8, hidden_size=8, dropout=0.0)
OBJECTIVE = BidirectionalLM(BiLMObjective())
RNG = CounterRNG(1, 0)


def make_tokenizer() -> Tokenizer:
    return train_tokenizer(
        "spelled_word", [TEXT], vocab_size=4 + 5 + 256, template=elmo.TOKENIZER_TEMPLATE
    )  # the . dog cat ran


def make_model(tokenizer: Tokenizer, head: str = "lm") -> Any:
    torch.manual_seed(0)
    words = vocabulary_words(tokenizer)
    return build(elmo.make_spec(CONFIG, source_vocab_size=tokenizer.vocab_size, words=words, head=head)).eval()


def batch_of(*texts: list[int]) -> ChunkBatch:
    ids = [token for text in texts for token in text]
    return ChunkBatch(0, PackedChunks.from_arrays(ids, list(map(len, texts)), range(len(texts))))


def test_words_of_the_vocabulary_are_tokens_and_others_are_spelled() -> None:
    tokenizer = make_tokenizer()
    encoding = tokenizer.encode_plus("The dog saw .")
    names = [tokenizer.backend.id_to_token(i) for i in encoding.ids]
    assert names == ["<S>", "Ġ", "T", "h", "e", "Ġdog", "Ġ", "s", "a", "w", "Ġ.", "</S>"]
    assert encoding.word_ids == [None, 0, 0, 0, 0, 1, 2, 2, 2, 2, 3, None]
    assert vocabulary_words(tokenizer) == ("", "", "", "", "the", ".", "dog", "cat", "ran")
    assert tokenizer.decode(tokenizer.encode("the zoë ran")).split() == ["the", "zoë", "ran"]


def test_a_saved_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert again.encode_plus("the zebra . <S>") == tokenizer.encode_plus("the zebra . <S>")
    assert again.encode("<S>") == tokenizer.encode("<S>") != [tokenizer.bos_id]


def test_a_tokenizer_without_letters_is_refused() -> None:
    with pytest.raises(InputError, match="needs whole words and letters"):
        vocabulary_words(train_tokenizer("word", [TEXT], vocab_size=20))


@torch.no_grad()
def test_the_loss_is_that_of_the_words_on_both_sides() -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    context = TextContext(model.spec, tokenizer)
    texts = [tokenizer.encode("the cat saw"), tokenizer.encode("ran")]  # "saw" is spelled
    inputs = OBJECTIVE.prepare(batch_of(*texts), context, RNG)
    bos, eos, unk = 2, 3, 1
    words = [[bos, 4, 7, unk, eos], [bos, 8, eos]]
    expected, count = 0.0, 0
    for text, labels in zip(texts, words, strict=True):
        source = Ragged.pack([torch.tensor([bos, *text, eos])])
        hidden = model.hidden_states(source).hidden.values.view(len(labels), 2, -1)
        for place in range(1, len(labels) - 1):
            for state in (hidden[place - 1, 0], hidden[place + 1, 1]):
                expected += float(F.cross_entropy(model.head(state[None])[0], torch.tensor(labels[place])))
                count += 1
    (loss,) = OBJECTIVE.losses(model, inputs)
    assert (loss.num_targets, inputs.num_targets) == (count, (count,))
    assert float(loss.total) == pytest.approx(expected, rel=1e-5)
    memory = model.initial_memory(2)
    (same,), _ = OBJECTIVE.losses_with_memory(model, inputs, memory)
    assert float(same.total) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_a_sample_shows_both_directions() -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    line = OBJECTIVE.sample(model, batch_of(tokenizer.encode("the cat saw")), TextContext(model.spec, tokenizer), RNG)
    assert line.startswith("the [→ ")
    assert line.endswith("(was: cat)] saw")


def test_models_that_it_cannot_train_are_refused() -> None:
    letters_only = elmo.make_spec(CONFIG, source_vocab_size=4 + 256)
    with pytest.raises(InputError, match="letters only"):
        OBJECTIVE.check_model(letters_only)
    bert = qkv.families.get_family("bert")
    with pytest.raises(InputError, match=r"\(elmo\), and bert is"):
        OBJECTIVE.check_model(bert.make_spec(bert.PRESETS["mini"]))


def pretrain(folder: Path, **data: Any) -> Path:
    (folder / "text.txt").write_text(f"{TEXT}\n" * 20)
    sizes = {"char_dim": 4, "filter_widths": [1, 2], "filter_counts": [4, 4], "d_model": 8, "hidden_size": 8}
    source = {"train": str(folder / "text.txt"), "hold_out": 0.2, "split_by": "position", "format": "file_per_document"}
    recipe = {
        "name": "elmo",
        "objective": "bilm",
        "data": source | {"max_length": 32} | data,
        "model": {"family": "elmo"} | sizes,
        "tokenizer": {"vocab_size": 265},
        "train": {"max_steps": 3, "batch_tokens": 64, "learning_rate": 0.01},
    }
    for _ in fit(parse_recipe(recipe, "test"), folder / "elmo", device="cpu"):
        pass
    return folder / "elmo"


@pytest.mark.parametrize("carry_memory", [False, True])
def test_a_recipe_pretrains_with_memory_and_without(carry_memory: bool, tmp_path: Path) -> None:
    folder = pretrain(tmp_path, carry_memory=carry_memory)
    assert qkv.embed(folder, ["the zebra"], pool="words", layers=0)[0].shape == (2, 16)
    model = qkv.load(folder)
    assert model(["the zebra"]).logits[0].shape == (1 + 1 + 6 + 1, 2, 265)  # <S>, the, Ġzebra, </S>; both directions


@pytest.mark.parametrize("trainable", ["head", "all"])
def test_a_task_learns_a_mean_of_all_layers_frozen_or_not(trainable: str, tmp_path: Path) -> None:
    (tmp_path / "task.csv").write_text("text,label\n" + "the dog ran,a\na zebra,b\n" * 8)
    base = pretrain(tmp_path, carry_memory=False)
    recipe = {
        "name": "task",
        "task": "text_classification",
        "data": {"format": "csv", "train": str(tmp_path / "task.csv"), "valid": str(tmp_path / "task.csv")},
        "model": {"init_from": str(base)},
        "finetune": {"feature_layers": "scalar_mix", "trainable": trainable},
        "train": {"max_steps": 2, "batch_tokens": 64, "learning_rate": 0.1},
    }
    for _ in fit(parse_recipe(recipe, "test"), tmp_path / "run", device="cpu"):
        pass
    before, after = (dict(qkv.load(folder).model.named_parameters()) for folder in (base, tmp_path / "run"))
    assert after["scalar_mix.weights"].shape == (3,)
    assert after["scalar_mix.weights"].any()
    weights = [name for name in before if name.startswith(("encoder", "source_embedding.filters"))]
    assert all(torch.equal(before[name], after[name]) == (trainable == "head") for name in weights)
