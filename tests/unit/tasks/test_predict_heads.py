"""Predictions of plain checkpoints, equal to the head's logits read by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import qkv
from qkv.nn.subword_pooling import pool_subwords
from qkv.tasks.predictor import Predictor
from qkv.tasks.text_classification import TextClassification
from qkv.tasks.token_classification import TokenClassification

sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))
from checkpoints import checkpoint

CAT = "the cat sat unhappyly on the mat"


def loaded(tmp_path: Path, head: str) -> qkv.ModelBundle:
    return qkv.load(checkpoint(tmp_path / head, head))


def logits(model: qkv.ModelBundle, text: str, pair: str | None = None) -> torch.Tensor:
    frame = model.source_tokenizer.encode_plus(text, pair, parse_special_tokens=True)
    with torch.no_grad():
        return model.model(
            qkv.Ragged.from_lengths(torch.tensor(frame.ids), [len(frame.ids)]), torch.tensor(frame.token_type_ids)
        )


def test_a_mask_is_filled_with_the_likeliest_words(tmp_path: Path) -> None:
    model = loaded(tmp_path, "masked_lm")
    text = "the [MASK] sat on the mat"
    prediction = qkv.predict(model, [text], qkv.GenerationConfig(n_best=3))[0]
    scores, tokens = torch.softmax(logits(model, text)[2], -1).topk(3)
    assert [alternative.score for alternative in prediction.alternatives] == pytest.approx(scores.tolist(), abs=1e-5)
    assert (
        prediction.text
        == prediction.alternatives[0].text
        == model.source_tokenizer.decode([10, int(tokens[0]), 8, 9, 10, 11])
    )


def test_several_masks_are_filled_in_their_places(tmp_path: Path) -> None:
    model = loaded(tmp_path, "masked_lm")
    texts = ["[MASK] cat [MASK]", "the [MASK]"]
    together, alone = qkv.predict(model, texts), [qkv.predict(model, [text])[0] for text in texts]
    assert [p.text for p in together] == [p.text for p in alone]
    assert [p.score for p in together] == pytest.approx([p.score for p in alone], abs=1e-5)


def test_a_text_without_a_mask_is_refused(tmp_path: Path) -> None:
    with pytest.raises(qkv.InputError, match=r"'a cat': has no \[MASK\]"):
        qkv.predict(loaded(tmp_path, "masked_lm"), ["a cat"])


def test_a_text_is_given_its_labels_in_order_of_probability(tmp_path: Path) -> None:
    model = loaded(tmp_path, "sequence")
    prediction = qkv.predict(model, [CAT, "a dog"], qkv.GenerationConfig(n_best=3))[0]
    wanted = torch.softmax(logits(model, CAT)[0], -1)
    assert sorted(prediction.fields["probabilities"]) == ["bad", "good", "so so"]
    assert [p.score for p in prediction.alternatives] == pytest.approx(sorted(wanted.tolist(), reverse=True), abs=1e-5)


def test_two_texts_are_read_with_their_segments(tmp_path: Path) -> None:
    model = loaded(tmp_path, "next_sentence")
    prediction = qkv.predict(model, [("a cat sat", "on the mat")], qkv.GenerationConfig(n_best=2))[0]
    wanted = torch.softmax(logits(model, "a cat sat", "on the mat")[0], -1)
    assert prediction.fields["probabilities"] == pytest.approx(
        {"follows": float(wanted[0]), "does not follow": float(wanted[1])}, abs=1e-5
    )


@pytest.mark.parametrize("word", ["first", "mean"])
def test_every_word_is_tagged_once_whatever_its_pieces(tmp_path: Path, word: str) -> None:
    model = loaded(tmp_path, "token")
    (prediction,) = Predictor(model, TokenClassification(subword_pooling=word))([CAT])
    words = prediction.fields["words"]
    assert [word["text"] for word in words] == CAT.split()
    assert [CAT[word["start"] : word["end"]] for word in words] == CAT.split()
    assert prediction.text.startswith(f"the/{words[0]['tag']} ")


def test_a_words_label_is_that_of_its_first_piece(tmp_path: Path) -> None:
    model = loaded(tmp_path, "token")
    (prediction,) = qkv.predict(model, [CAT])
    rows = torch.log_softmax(logits(model, CAT), -1)
    firsts = [1, 2, 3, 4, 7, 8, 9]  # behind [CLS]; "unhappyly" has three pieces
    labels = [("bad", "good", "so so")[int(rows[i].argmax())] for i in firsts]
    assert prediction.prediction == tuple(labels)


def test_an_answer_is_a_span_of_the_second_text(tmp_path: Path) -> None:
    model = loaded(tmp_path, "span")
    context = "the cat sat on the mat"
    prediction = qkv.predict(model, [("a dog sat", context)], qkv.GenerationConfig(n_best=2))[0]
    rows = logits(model, "a dog sat", context)[5:11]  # [CLS] a dog sat [SEP] the cat sat on the mat [SEP]
    best = max((float(rows[i, 0] + rows[j, 1]), i, j) for i in range(6) for j in range(i, 6))
    assert prediction.text == " ".join(context.split()[best[1] : best[2] + 1])
    start, end = prediction.span
    assert context[start:end] == prediction.text == prediction.fields["answer"] != ""


def test_choices_are_ranked_by_their_own_scores(tmp_path: Path) -> None:
    model = loaded(tmp_path, "choice")
    prediction = qkv.predict(model, [("the cat", "sat", "on", "a mat")], qkv.GenerationConfig(n_best=3))[0]
    raw = torch.stack([logits(model, "the cat", choice)[0, 0] for choice in ("sat", "on", "a mat")])
    assert [p.score for p in prediction.alternatives] == pytest.approx(
        raw.softmax(0).sort(descending=True).values.tolist(), abs=1e-5
    )


@pytest.mark.parametrize("head", ["span", "choice", "next_sentence"])
def test_a_single_text_is_refused_where_several_belong_together(tmp_path: Path, head: str) -> None:
    with pytest.raises(qkv.InputError, match="'a cat': this model takes"):
        qkv.predict(loaded(tmp_path, head), ["a cat"])


def test_a_model_without_a_head_predicts_embeddings(tmp_path: Path) -> None:
    model = loaded(tmp_path, "pooler")
    (prediction,) = qkv.predict(model, ["a cat"])
    torch.testing.assert_close(prediction.prediction, qkv.embed(model, ["a cat"])[0])
    assert prediction.fields["vector"] == prediction.prediction.tolist()


def test_a_text_that_is_too_long_is_refused_or_truncated_in_its_longer_part(tmp_path: Path) -> None:
    model = loaded(tmp_path, "sequence")
    pair = ("a cat", "the mat " * 20)
    with pytest.raises(qkv.InputError, match="45 tokens, and the model takes at most 16"):
        Predictor(model, TextClassification(on_too_long="refuse"))([pair])
    (cut,), (short,) = qkv.predict(model, [pair]), qkv.predict(model, [("a cat", "the mat " * 5 + "the")])
    assert cut.truncated
    assert cut == replace(short, truncated=True)


def test_an_empty_text_is_refused_by_its_location(tmp_path: Path) -> None:
    with pytest.raises(qkv.InputError, match="line 7: is empty"):
        Predictor(loaded(tmp_path, "sequence"))([" "], locations=["line 7"])


def test_a_model_in_training_mode_is_refused(tmp_path: Path) -> None:
    model = loaded(tmp_path, "sequence")
    model.model.train()
    with pytest.raises(qkv.InputError, match="training mode"):
        qkv.predict(model, ["a cat"])
    assert model.model.training


def test_a_tab_separates_texts_in_python_as_in_the_command(tmp_path: Path) -> None:
    model = loaded(tmp_path, "sequence")
    assert qkv.predict(model, ["a cat\tthe mat"]) == qkv.predict(model, [("a cat", "the mat")])


def test_a_special_token_that_a_user_writes_is_text_to_a_classifier(tmp_path: Path) -> None:
    model = loaded(tmp_path, "sequence")
    assert qkv.predict(model, ["a [SEP] cat"]) != qkv.predict(model, [("a", "cat")])


def test_vectors_do_not_depend_on_batch_mates(tmp_path: Path) -> None:
    model = loaded(tmp_path, "pooler")
    texts = [CAT, "a dog", "the mat", CAT + " a"]
    for pool in ("mean", "cls", "tokens", "words"):
        alone = [qkv.embed(model, [text], pool=pool)[0] for text in texts]
        torch.testing.assert_close(qkv.embed(model, texts, pool=pool), alone)


def test_a_words_vector_is_its_first_pieces_or_the_mean_of_them() -> None:
    hidden = qkv.Ragged.from_lengths(torch.arange(16.0).view(8, 2), [5, 3])
    words = [[None, 0, 1, 1, None], [0, 0, 1]]
    first, mean = pool_subwords(hidden, words), pool_subwords(hidden, words, "mean")
    assert first.layout.lengths_list == mean.layout.lengths_list == (2, 2)
    assert first.values.tolist() == [[2, 3], [4, 5], [10, 11], [14, 15]]
    assert mean.values.tolist() == [[2, 3], [5, 6], [11, 12], [14, 15]]


def test_vectors_of_length_one(tmp_path: Path) -> None:
    (vector,) = qkv.embed(loaded(tmp_path, "pooler"), [CAT], normalize=True)
    assert float(vector.norm()) == pytest.approx(1.0)


def test_more_fillings_than_words_are_all_words(tmp_path: Path) -> None:
    model = loaded(tmp_path, "masked_lm")
    (prediction,) = qkv.predict(model, ["a [MASK]"], qkv.GenerationConfig(n_best=1000))
    assert len(prediction.alternatives) == model.model.spec.source_embedding.vocab_size


def test_a_message_repeats_the_beginning_of_a_long_text_only(tmp_path: Path) -> None:
    with pytest.raises(qkv.InputError, match="tokens, and the model takes") as found:
        qkv.predict(loaded(tmp_path, "masked_lm"), ["the cat " * 500])
    assert len(str(found.value)) < 250


def test_a_text_instead_of_a_list_of_texts_is_a_list_of_one(tmp_path: Path) -> None:
    bundle = loaded(tmp_path, "sequence")
    assert qkv.predict(bundle, "hello") == qkv.predict(bundle, ["hello"])
