"""word2vec: gradients in closed form, subsampling, windows, noise words, and the run as a whole."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qkv
from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.errors import InputError
from qkv.families import get_family
from qkv.nn import build
from qkv.objectives.base import TextContext
from qkv.objectives.negative_sampling import GROUP_SIZE, WordBlock
from qkv.objectives.word2vec import CBOW, Inputs, SkipGram, Word2Vec
from qkv.recipe.objectives import CBOWObjective, SkipGramObjective
from qkv.tokenization.tokenizer import train_tokenizer

WIDTH, WINDOW, NEGATIVES = 6, 3, 4
FAMILY = get_family("word2vec")
TEXT = " ".join(f"w{i % 7} x{i % 5} y{i % 11} the" for i in range(200))


def make_objective(name: str, **settings: Any) -> Word2Vec:
    shared = {"window": WINDOW, "negatives": NEGATIVES, "subsample": 0.0} | settings
    return SkipGram(SkipGramObjective(**shared)) if name == "skipgram" else CBOW(CBOWObjective(**shared))


def make_context(text: str = TEXT) -> TextContext:
    template = FAMILY.TOKENIZER_TEMPLATE
    tokenizer = train_tokenizer("word", [text], vocab_size=1000, template=template)
    spec = FAMILY.make_spec(FAMILY.Config(d_model=WIDTH), source_vocab_size=tokenizer.vocab_size)
    counts = np.bincount(tokenizer.encode(text), minlength=tokenizer.vocab_size)
    return TextContext(spec, tokenizer, token_counts=counts)


def make_batch(context: TextContext, lengths: list[int]) -> ChunkBatch:
    ids = context.tokenizer.encode(TEXT)[: sum(lengths)]
    return ChunkBatch(0, PackedChunks.from_arrays(ids, lengths, list(range(len(lengths)))))


def make_model(context: TextContext) -> Any:
    model = build(context.spec).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def pairs_of(objective: Word2Vec, block: WordBlock) -> list[tuple[int, list[int], list[int]]]:
    """Return each word with its context and the noise words of its group, read from the block one by one."""
    window = objective.config.window
    words = []
    for position, code in enumerate(block.spans.tolist()):
        left, right = divmod(code // GROUP_SIZE, window + 1)
        center = position + window
        around = [*range(center - left, center), *range(center + 1, center + right + 1)]
        context = block.tokens[around].tolist()
        words.append((int(block.tokens[center]), context, block.noise[position // GROUP_SIZE].tolist()))
    return words


def closed_form(objective: Word2Vec, v: Tensor, u: Tensor, block: WordBlock) -> tuple[float, Tensor, Tensor]:
    """Return loss and gradients of Mikolov et al. 2013b, equation 4, word by word; noise words are weighted."""
    loss, grad_v, grad_u = 0.0, torch.zeros_like(v), torch.zeros_like(u)
    weight = objective.config.negatives / GROUP_SIZE
    is_cbow = isinstance(objective, CBOW)
    for word, context, noise in pairs_of(objective, block):
        groups = [context] if is_cbow and context else [[c] for c in context]
        for group in groups:
            h = v[group].mean(0) if is_cbow else v[word]
            target = word if is_cbow else group[0]
            for output, label, factor in [(target, 1.0, 1.0), *((n, 0.0, weight) for n in noise)]:
                probability = torch.sigmoid(u[output] @ h)
                loss -= factor * float(torch.log(probability if label else 1 - probability))
                grad_u[output] += factor * (probability - label) * h
                for row in group if is_cbow else [word]:
                    divisor = len(group) if is_cbow and objective.config.gradient == "corrected" else 1
                    grad_v[row] += factor * (probability - label) * u[output] / divisor
    return loss, grad_v, grad_u


@pytest.mark.parametrize(
    ("name", "settings"),
    [("skipgram", {}), ("cbow", {"gradient": "corrected"}), ("cbow", {"gradient": "original"})],
    ids=["skipgram", "cbow-corrected", "cbow-original"],
)
def test_gradients_equal_the_closed_form(name: str, settings: dict[str, Any]) -> None:
    context, objective = make_context(), make_objective(name, **settings)
    inputs = objective.prepare(make_batch(context, [25, 1, 30]), context, CounterRNG(1, 0))
    block = whole_block(inputs)
    model = make_model(context)
    v, u = model.front_end.token_weight.detach(), model.head.linear.weight.detach()
    loss, *expected = closed_form(objective, v, u, block)
    gradients = objective.block_gradients(v, u, block)
    for side, expected_gradient in zip(gradients, expected, strict=True):
        summed = torch.zeros_like(v)
        for rows, values in side:
            summed.index_add_(0, rows, values)
        torch.testing.assert_close(summed, expected_gradient)
    assert float(objective.block_loss(v, u, block)) == pytest.approx(loss)


def whole_block(inputs: Inputs) -> WordBlock:
    """Return inputs of fewer words than a block, without factors on the steps of frequent words."""
    (block,) = inputs.blocks(0.0)
    return block


@pytest.mark.parametrize("name", ["skipgram", "cbow"])
def test_gradients_are_those_of_the_loss_except_in_the_original_cbow(name: str) -> None:
    context, objective = make_context(), make_objective(name)
    inputs = objective.prepare(make_batch(context, [40, 7]), context, CounterRNG(3, 0))
    model, block = make_model(context), whole_block(inputs)
    weights = model.front_end.token_weight, model.head.linear.weight
    objective.losses(model, inputs)[0].total.backward()
    with torch.no_grad():
        gradients = objective.block_gradients(*weights, block)
    for weight, side in zip(weights, gradients, strict=True):
        summed = torch.zeros_like(weight)
        for rows, values in side:
            summed.index_add_(0, rows, values)
        torch.testing.assert_close(weight.grad, summed)


def test_windows_stay_inside_their_text_and_have_every_size() -> None:
    context, objective = make_context(), make_objective("skipgram")
    lengths = [30, 2, 40]
    inputs = objective.prepare(make_batch(context, lengths), context, CounterRNG(2, 0))
    spans = inputs.spans.numpy()[: sum(lengths)] // GROUP_SIZE
    left, right = np.divmod(spans, WINDOW + 1)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    ends = np.repeat(np.cumsum(lengths), lengths)
    positions = np.arange(sum(lengths))
    assert (positions - left >= starts).all()
    assert (positions + right < ends).all()
    inner = (positions - starts >= WINDOW) & (ends - positions > WINDOW)
    assert set(left[inner]) == {1, 2, 3}
    assert (left == right)[inner].all()
    assert inputs.num_targets == (int((left + right).sum()),)


def test_frequent_words_are_subsampled_with_the_probability_of_the_paper() -> None:
    text = " ".join(["the"] * 3000 + [f"rare{i}" for i in range(100)] * 10)
    context, objective = make_context(text), make_objective("skipgram", subsample=0.01)
    ids = np.array(context.tokenizer.encode(text))
    batch = ChunkBatch(0, PackedChunks.from_arrays(ids, [len(ids)], [0]))
    tokens = objective.prepare(batch, context, CounterRNG(1, 0)).tokens.numpy()
    frequency, the = 3000 / 4000, context.tokenizer.token_to_id("the")
    expected = math.sqrt(0.01 / frequency) + 0.01 / frequency
    assert np.mean(tokens == the) * len(tokens) / 3000 == pytest.approx(expected, abs=0.02)
    assert sum(np.isin(tokens, ids[3000:])) == 1000


def test_noise_words_follow_the_power_of_their_frequency_and_are_never_special() -> None:
    context, objective = make_context(), make_objective("skipgram")
    inputs = [objective.prepare(make_batch(context, [800]), context, CounterRNG(1, epoch)) for epoch in range(20)]
    noise = np.concatenate([i.noise.numpy().ravel() for i in inputs])
    assert context.token_counts is not None
    expected = np.where(np.arange(len(context.token_counts)) > 3, context.token_counts, 0) ** 0.75
    observed = np.bincount(noise, minlength=len(expected)) / len(noise)
    np.testing.assert_allclose(observed, expected / expected.sum(), atol=0.01)
    assert observed[:4].sum() == 0


def test_unknown_words_are_not_in_the_text_that_is_learned() -> None:
    context, objective = make_context(), make_objective("cbow")
    ids = [*context.tokenizer.encode("w1 x1"), context.tokenizer.unk_id, *context.tokenizer.encode("y1")]
    batch = ChunkBatch(0, PackedChunks.from_arrays(ids, [4], [0]))
    inputs = objective.prepare(batch, context, CounterRNG(1, 0))
    assert inputs.tokens[WINDOW : WINDOW + 3].tolist() == [ids[0], ids[1], ids[3]]
    assert inputs.num_targets == (3,)


def test_an_update_is_a_step_against_the_gradient_of_each_block() -> None:
    context, objective = make_context(), make_objective("skipgram")
    inputs = objective.prepare(make_batch(context, [60]), context, CounterRNG(1, 0))
    model = make_model(context)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = objective.block_gradients(*before, next(inputs.blocks(0.001)))
    loss = objective.update(model, inputs, 0.001)
    for parameter, start, side in zip(model.parameters(), before, gradients, strict=True):
        for rows, values in side:
            start.index_add_(0, rows, values, alpha=-0.001)
        torch.testing.assert_close(parameter.detach(), start)
    assert loss.num_targets == inputs.num_examples


def test_the_steps_of_frequent_words_are_bounded() -> None:
    context, objective = make_context(), make_objective("skipgram")
    inputs = objective.prepare(make_batch(context, [60]), context, CounterRNG(1, 0))
    block, the = next(inputs.blocks(0.5)), context.tokenizer.token_to_id("the")
    expected_updates = 2048 * 0.25 * (WINDOW + 1) * (1 + NEGATIVES)  # every fourth word is "the"
    torch.testing.assert_close(block.in_steps[block.tokens == the][0], torch.tensor(2.5 / (0.5 * expected_updates)))
    assert (next(inputs.blocks(1e-6)).in_steps == 1).all()


def test_updates_do_not_depend_on_the_number_of_threads() -> None:
    context, objective = make_context(), make_objective("cbow")
    inputs = objective.prepare(make_batch(context, [800]), context, CounterRNG(1, 0))
    results = []
    for num_threads in (1, 2):
        torch.manual_seed(0)
        model, threads = build(context.spec), torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            objective.update(model, inputs, 0.05)
        finally:
            torch.set_num_threads(threads)
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_text_without_a_known_word_changes_nothing() -> None:
    context, objective = make_context(), make_objective("skipgram")
    batch = ChunkBatch(0, PackedChunks.from_arrays([context.tokenizer.unk_id] * 3, [3], [0]))
    inputs = objective.prepare(batch, context, CounterRNG(1, 0))
    assert inputs.num_targets == (0,)
    assert objective.update(make_model(context), inputs, 1.0).num_targets == 0
    assert float(objective.losses(make_model(context), inputs)[0].total) == 0


def test_another_family_and_a_stream_are_refused() -> None:
    objective, bert = make_objective("skipgram"), get_family("bert")
    with pytest.raises(InputError, match=r"skipgram .*\(word2vec\), and bert is more"):
        objective.check_model(bert.make_spec(bert.PRESETS["mini"], source_vocab_size=50))
    context = replace(make_context(), token_counts=None)
    with pytest.raises(InputError, match=r"set data\.streaming to false"):
        objective.prepare(make_batch(context, [5]), context, CounterRNG(1, 0))


# ---- runs -----------------------------------------------------------------------------------------------------------


def write_recipe(folder: Path, **train: Any) -> dict[str, Any]:
    """Return a recipe of a text in which words of one group of five occur together."""
    rng, groups = np.random.default_rng(0), [[f"{letter}{i}" for i in range(5)] for letter in "abcd"]
    lines = [" ".join(rng.choice(groups[i % 4], 12)) for i in range(200)]
    (folder / "text.txt").write_text("\n".join(lines))
    return {
        "name": "vectors",
        "objective": {"cbow": {"gradient": "original", "subsample": 0, "window": 3}},
        "data": {"train": str(folder / "text.txt"), "hold_out": 0.1, "format": "line_per_document"},
        "model": {"family": "word2vec", "d_model": 8, "max_length": 100},
        "tokenizer": {"vocab_size": 100},
        "train": {"epochs": 20, "batch_tokens": 500, "optimizer": "sgd", "learning_rate": 0.2, "warmup_steps": 0}
        | {"schedule": "linear"}
        | train,
        "validation": {"keep": "last", "every_steps": 40},
    }


def test_a_run_learns_which_words_occur_together_and_resumes_bit_exactly(tmp_path: Path) -> None:
    from qkv.checkpoints.word_vectors import load_word_vectors

    recipe = write_recipe(tmp_path)
    run = qkv.fit(recipe, tmp_path / "run").run(progress=False)
    losses = [record.values["loss"] for record in run.records if record.kind == "valid"]
    assert losses[-1] < losses[0]
    vectors = load_word_vectors(str(tmp_path / "run"))
    assert {neighbor.word for neighbor in vectors.similar("a0", 4)} == {"a1", "a2", "a3", "a4"}
    # noise words are drawn as often as in the training text, which evaluation therefore reads
    assert qkv.evaluate(tmp_path / "run")["loss"] == pytest.approx(losses[-1], abs=1e-12)
    interrupted = qkv.fit(recipe, tmp_path / "again")
    for record in interrupted:
        if record.kind == "valid":
            break
    next(interrupted)
    interrupted.close()
    qkv.fit(recipe, tmp_path / "again").run(progress=False)
    states = [qkv.load(tmp_path / name).model.state_dict() for name in ("run", "again")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("key", "value"), [("optimizer", "adamw"), ("gradient_accumulation_steps", 2), ("max_grad_norm", 1.0)]
)
def test_settings_that_need_gradients_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"train.{key}: this objective changes the weights itself"):
        list(itertools.islice(qkv.fit(write_recipe(tmp_path, **{key: value}), tmp_path / "run"), 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_update_on_a_gpu_equals_that_on_the_cpu() -> None:
    context, objective = make_context(), make_objective("skipgram")
    inputs = objective.prepare(make_batch(context, [400]), context, CounterRNG(1, 0))
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = build(context.spec).to(device)
        moved = type(inputs)(*(f.to(device) if isinstance(f, Tensor) else f for f in inputs))
        objective.update(model, moved, 0.05)
        results.append([parameter.detach().cpu() for parameter in model.parameters()])
    torch.testing.assert_close(results[0], results[1])
