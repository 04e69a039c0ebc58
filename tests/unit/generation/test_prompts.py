"""Continuing prompts: greedy, beam and sampling for a decoder without encoder, against the full forward."""

from __future__ import annotations

import itertools

import pytest
import torch

from qkv import spec
from qkv.errors import InputError
from qkv.families import gpt2
from qkv.generation import GenerationConfig, generate
from qkv.nn import Decoder, Ragged, build

END = 3


def tiny(seed: int = 0, vocabulary: int = 11, end: int = END, length: int = 24) -> Decoder:
    """A random model, sharp enough that its outputs differ in probability and that some of them end."""
    torch.manual_seed(seed)
    shape = gpt2.Config(d_model=12, heads=2, layers=2, max_length=length, init_std=0.4)
    model = build(gpt2.make_spec(shape, target_vocab_size=vocabulary, bos_id=2, eos_id=end))
    assert isinstance(model, Decoder)
    return model.eval()


def prompts(*lengths: int) -> Ragged:
    chance = torch.Generator().manual_seed(sum(lengths))
    return Ragged.pack([torch.randint(4, 6, (n,), generator=chance) for n in lengths])


def log_probability(model: Decoder, prompt: torch.Tensor, tokens: list[int]) -> float:
    """Teacher-forced log p of a continuation."""
    whole = torch.cat([prompt, torch.tensor(tokens)])
    with torch.no_grad():
        logits = model(Ragged.pack([whole[:-1]]))[-len(tokens) :]
    return float(torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None]).sum())


def test_greedy_takes_the_likeliest_token_at_each_step_of_each_prompt() -> None:
    model, batch = tiny(seed=1), prompts(5, 1, 8, 3)
    for prompt, found in zip(
        batch.sequences(), generate(model, batch, GenerationConfig(max_new_tokens=9)), strict=True
    ):
        written = prompt.tolist()
        with torch.no_grad():
            while len(written) < len(prompt) + 9 and END not in written[len(prompt) :]:
                written.append(int(model(Ragged.pack([torch.tensor(written)]))[-1].argmax()))
        assert found[0].tokens == [t for t in written[len(prompt) :] if t != END]
        assert found[0].finished == (END in written[len(prompt) :])


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_beam_as_wide_as_the_space_finds_the_best_continuations_there_are(penalty: float) -> None:
    model, prompt = tiny(vocabulary=6), torch.tensor([4, 5, 4])
    letters = [t for t in range(6) if t != END]
    ended = [[*w, END] for n in range(3) for w in itertools.product(letters, repeat=n)]
    cut = [list(w) for w in itertools.product(letters, repeat=3)]  # what the limit of three tokens cuts short
    scores = {tuple(w): log_probability(model, prompt, w) for w in ended + cut}
    best = sorted(scores, key=lambda w: -scores[w] / len(w) ** penalty)[:8]
    config = GenerationConfig(num_beams=200, n_best=8, max_new_tokens=3, length_penalty=penalty)
    found = generate(model, Ragged.pack([prompt]), config)[0]
    assert [(*h.tokens, END) if h.finished else tuple(h.tokens) for h in found] == best
    assert [h.score for h in found] == pytest.approx([scores[w] for w in best], abs=1e-4)


@pytest.mark.parametrize(
    "how",
    [
        GenerationConfig(max_new_tokens=7),
        GenerationConfig(num_beams=4, n_best=4, max_new_tokens=7),
        GenerationConfig(num_beams=4, n_best=4, max_new_tokens=7, unfinished_beams="last"),
        GenerationConfig(
            num_beams=3, n_best=3, length_penalty=0.0
        ),  # up to the model's own length, which differs by prompt
        GenerationConfig(do_sample=True, n_best=3, seed=5),
    ],
)
def test_continuations_do_not_depend_on_batch_mates(how: GenerationConfig) -> None:
    """Over many models, since most of them agree by luck."""
    for seed in range(10):
        model, batch = tiny(seed), prompts(3, 9, 5, 1)
        for i, (mates, prompt) in enumerate(zip(generate(model, batch, how), batch.sequences(), strict=True)):
            alone = generate(model, Ragged.pack([prompt]), how, [i])[0]
            assert [(h.tokens, h.finished) for h in mates] == [(h.tokens, h.finished) for h in alone]
            assert [h.score for h in mates] == pytest.approx([h.score for h in alone], abs=1e-3)


def test_a_prompt_is_continued_as_far_as_the_model_reaches_whatever_its_mates_have_left() -> None:
    model = tiny(end=-1, length=12)
    for how in (GenerationConfig(), GenerationConfig(num_beams=3), GenerationConfig(do_sample=True)):
        found = generate(model, prompts(11, 2, 7), how)
        assert [len(rows[0].tokens) for rows in found] == [1, 10, 5]
        assert not any(rows[0].finished for rows in found)


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(InputError, match="leaves no room"):
        generate(tiny(length=6), prompts(2, 6), GenerationConfig())


def endless() -> tuple[Decoder, Ragged]:
    """A model that would rather go on than end, and a prompt after which both happen within the limit."""
    for seed in range(50):
        model, batch = tiny(seed), prompts(4)
        finished = [
            h.finished for h in generate(model, batch, GenerationConfig(num_beams=4, n_best=4, max_new_tokens=5))[0]
        ]
        if True in finished and not finished[0]:
            return model, batch
    raise AssertionError("no such model")


def test_what_the_limit_cut_short_is_ranked_with_the_rest_or_comes_last() -> None:
    model, batch = endless()
    ranked = generate(model, batch, GenerationConfig(num_beams=4, n_best=4, max_new_tokens=5))[0]
    last = generate(model, batch, GenerationConfig(num_beams=4, n_best=4, max_new_tokens=5, unfinished_beams="last"))[0]
    ranks = [h.score / (len(h.tokens) + h.finished) for h in ranked]
    assert ranks == sorted(ranks, reverse=True)
    assert not ranked[0].finished
    assert last[0].finished
    assert [h.finished for h in last] == sorted((h.finished for h in last), reverse=True)


def test_another_word_for_what_to_do_with_the_unfinished_is_refused() -> None:
    with pytest.raises(InputError, match="unfinished_beams is last or ranked"):
        generate(tiny(), prompts(2), GenerationConfig(unfinished_beams="first"))


def test_a_token_that_is_never_written_is_not_written() -> None:
    model, batch = tiny(end=-1), prompts(3, 5)
    written = {t for rows in generate(model, batch, GenerationConfig(max_new_tokens=8)) for t in rows[0].tokens}
    model.spec = spec.replace(model.spec, suppress_tokens=tuple(written))
    for how in (
        GenerationConfig(max_new_tokens=8),
        GenerationConfig(max_new_tokens=8, num_beams=3),
        GenerationConfig(max_new_tokens=8, do_sample=True),
    ):
        assert not written & {t for rows in generate(model, batch, how) for t in rows[0].tokens}
