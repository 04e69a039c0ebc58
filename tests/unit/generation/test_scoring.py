"""Log-probabilities of given texts: any batch, prompts, windows of long texts, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from writers import tiny

from qkv import ModelBundle, Predictor, build
from qkv.errors import InputError
from qkv.families import bert, gpt2, word2vec
from qkv.generation import GenerationConfig, log_probs
from qkv.generation.ensemble import ensemble_bundle
from qkv.generation.scoring import text_log_probs
from qkv.nn import Ragged
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer

TEXTS = ["a good film", "so bad a film it is good", "a film", "good, so good"]
LENGTH = 24


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer("byte_bpe", TEXTS * 4, vocab_size=280, template=gpt2.TOKENIZER_TEMPLATE)


def language_model(tokenizer: Tokenizer, seed: int = 4) -> ModelBundle:
    torch.manual_seed(seed)
    config = gpt2.Config(d_model=16, heads=2, layers=2, max_length=LENGTH, init_std=0.4)
    model = build(gpt2.make_spec(config, target_vocab_size=tokenizer.vocab_size, bos_id=0))
    return ModelBundle(model.eval(), tokenizer, tokenizer)


def translator(seed: int = 0) -> ModelBundle:
    source = train_tokenizer("whitespace", ["a b c d e"])
    target = train_tokenizer("whitespace", ["u v w x y z q"])
    return ModelBundle(tiny("transformer", seed), source, target)


@torch.no_grad()
def exact(bundle: ModelBundle, ids: list[int], first: int) -> list[float]:
    """Return the log-probabilities of ids[first:] from one pass."""
    all_log_probs = torch.log_softmax(bundle.model(Ragged.pack([torch.tensor(ids[:-1])])), -1)
    return [float(all_log_probs[i - 1, ids[i]]) for i in range(first, len(ids))]


def score(bundle: ModelBundle, texts: list[Any], config: GenerationConfig | None = None, **options: Any) -> list[Any]:
    return text_log_probs(bundle, texts, config or GenerationConfig(), [str(text) for text in texts], **options)


@pytest.mark.parametrize("batch_tokens", [1, 30, 8192])
def test_log_probabilities_depend_neither_on_the_batch_nor_on_the_chunk(
    tokenizer: Tokenizer, batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = language_model(tokenizer)
    if batch_tokens == 30:
        monkeypatch.setattr(log_probs, "_MAX_LOGITS_CPU", 3 * tokenizer.vocab_size)
    for text, result in zip(TEXTS, score(bundle, TEXTS, GenerationConfig(batch_tokens=batch_tokens)), strict=True):
        ids = tokenizer.encode(text)
        assert list(result.tokens) == ids[1:]  # nothing precedes the first token
        assert result.token_log_probs == pytest.approx(exact(bundle, ids, 1), abs=1e-4)
        assert result.log_prob == pytest.approx(sum(result.token_log_probs))
        assert result.perplexity == pytest.approx(math.exp(-result.log_prob / len(result.tokens)))


def test_bos_makes_the_first_token_count(tokenizer: Tokenizer) -> None:
    bundle = language_model(tokenizer)
    ids = [bundle.model.spec.bos_id, *tokenizer.encode(TEXTS[0])]
    (result,) = score(bundle, TEXTS[:1], add_bos=True)
    assert result.token_log_probs == pytest.approx(exact(bundle, ids, 1), abs=1e-4)


def test_only_the_continuation_of_a_prompt_is_scored(tokenizer: Tokenizer) -> None:
    bundle = language_model(tokenizer)
    ids, num_prompt = tokenizer.encode("a good film"), len(tokenizer.encode("a good"))
    (result,) = score(bundle, [("a good", " film")])
    assert list(result.tokens) == ids[num_prompt:]
    assert result.token_log_probs == pytest.approx(exact(bundle, ids, num_prompt), abs=1e-4)
    assert score(bundle, [("", "a good film")]) == score(bundle, ["a good film"])


@pytest.mark.parametrize("stride", [1, 7, 12, 23])
def test_a_long_text_is_scored_in_windows_each_token_once(tokenizer: Tokenizer, stride: int) -> None:
    bundle, text = language_model(tokenizer), "so bad a film it is good, " * 8
    ids = tokenizer.encode(text)
    assert len(ids) > 2 * LENGTH
    (result,) = score(bundle, [text], stride=stride)
    assert list(result.tokens) == ids[1:]
    expected, begin, end = exact(bundle, ids[:LENGTH], 1), 0, LENGTH
    while end < len(ids):
        begin += stride
        last = min(begin + LENGTH, len(ids))
        expected += exact(bundle, ids[begin:last], end - begin)
        end = max(last, end)
    assert result.token_log_probs == pytest.approx(expected, abs=1e-4)
    (continuation,) = score(bundle, [(text, " good film")], stride=stride)
    assert list(continuation.tokens) == tokenizer.encode(text + " good film")[-len(continuation.tokens) :]


def test_a_text_that_is_too_long_is_refused_or_loses_its_prompts_beginning(tokenizer: Tokenizer) -> None:
    bundle, prompt = language_model(tokenizer), "so bad a film it is good, " * 8
    with pytest.raises(InputError, match="the model takes at most 24; score it in windows with --stride"):
        score(bundle, [prompt])
    (whole,) = score(bundle, [(prompt, " good")], GenerationConfig(on_too_long="truncate"))
    ids = tokenizer.encode(prompt + " good")[-LENGTH:]
    assert whole.token_log_probs == pytest.approx(exact(bundle, ids, LENGTH - len(whole.tokens)), abs=1e-4)
    with pytest.raises(InputError, match="--stride must be at least 1 and below 24"):
        score(bundle, [prompt], stride=24)


def test_a_target_is_scored_with_its_end_after_its_source() -> None:
    bundle = translator()
    results = Predictor(bundle).log_probs([("a b", "u w x"), ("c", "q")])
    assert bundle.source_tokenizer is not None
    for (source, target), result in zip([("a b", "u w x"), ("c", "q")], results, strict=True):
        source_ids = [*bundle.source_tokenizer.encode(source), bundle.model.spec.eos_id]
        target_ids = bundle.target_tokenizer.encode(target)  # type: ignore[union-attr]
        inputs = [torch.tensor(source_ids), torch.tensor([bundle.model.spec.bos_id, *target_ids])]
        with torch.no_grad():
            all_log_probs = torch.log_softmax(bundle.model(*(Ragged.pack([row]) for row in inputs)), -1)
        labels = [*target_ids, bundle.model.spec.eos_id]
        assert list(result.tokens) == labels
        assert result.token_log_probs == pytest.approx(
            [float(row[label]) for row, label in zip(all_log_probs, labels, strict=True)], abs=1e-4
        )


def test_an_ensemble_gives_a_token_the_mean_of_its_probabilities() -> None:
    bundles, pair = [translator(0), translator(1)], ("a b", "u w x")
    (mixed,) = score(ensemble_bundle(bundles, ["a", "b"]), [pair])
    singles = torch.tensor([score(bundle, [pair])[0].token_log_probs for bundle in bundles])
    assert mixed.token_log_probs == pytest.approx(singles.exp().mean(0).log().tolist(), abs=1e-4)


def test_what_has_no_log_probability_is_one_line(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="scores a target after its source; give both, separated by a tab"):
        score(translator(), ["a b"])
    with pytest.raises(InputError, match=r"'unknown' in 'unknown' was never seen in training"):
        score(translator(), [("a", "unknown")])
    with pytest.raises(InputError, match="--stride is for language models, and this transformer scores targets"):
        score(translator(), [("a", "u")], stride=3)
    with pytest.raises(InputError, match="the continuation has no token of its own"):
        score(language_model(tokenizer), [("a good film", "")])
    model = build(gpt2.make_spec(gpt2.Config(d_model=16, heads=2, layers=1), target_vocab_size=tokenizer.vocab_size))
    with pytest.raises(InputError, match="this gpt2 has no BOS token; leave out --bos"):
        score(ModelBundle(model.eval(), tokenizer, tokenizer), TEXTS, add_bos=True)
    config = bert.Config(d_model=16, heads=2, layers=1, d_ff=16, max_length=LENGTH)
    masked = build(bert.make_spec(config, source_vocab_size=tokenizer.vocab_size, head="masked_lm")).eval()
    with pytest.raises(InputError, match="this bert is a masked language model"):
        score(ModelBundle(masked, tokenizer, tokenizer), TEXTS)
    vectors = build(word2vec.make_spec(word2vec.Config(d_model=4), source_vocab_size=tokenizer.vocab_size)).eval()
    with pytest.raises(InputError, match="this word2vec has one vector per word"):
        score(ModelBundle(vectors, tokenizer, tokenizer), TEXTS)
    assert score(language_model(tokenizer), ["a"])[0].log_prob == 0.0
