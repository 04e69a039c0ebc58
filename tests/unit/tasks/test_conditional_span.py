"""Question answering with ends that depend on starts (Yang et al. 2019): which spans are scored, and how."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv.checkpoints import ModelBundle
from qkv.families import xlnet
from qkv.nn import Ragged, build
from qkv.tokenization.tokenizer import train_tokenizer

pytest.importorskip("sentencepiece")
QUESTION, CONTEXT = "who sat there", "a black cat sat on the mat and a dog sat on the cat"


@pytest.fixture(scope="module")
def bundle() -> ModelBundle:
    tokenizer = train_tokenizer("unigram", [QUESTION, CONTEXT] * 20, vocab_size=45, template=xlnet.TOKENIZER_TEMPLATE)
    torch.manual_seed(0)
    config = xlnet.Config(d_model=16, heads=2, layers=1, d_ff=16, init_std=0.4, start_beams=3)
    model = build(xlnet.make_spec(config, source_vocab_size=tokenizer.vocab_size, head="span_beam")).eval()
    return ModelBundle(model, tokenizer, tokenizer)


def test_the_answer_is_the_most_probable_pair_of_start_and_end(bundle: ModelBundle) -> None:
    prediction = qkv.predict(bundle, [(QUESTION, CONTEXT)])[0].prediction
    encoding = bundle.source_tokenizer.encode_plus(QUESTION, CONTEXT)
    segments = torch.tensor(encoding.token_type_ids)
    with torch.no_grad():
        logits = bundle.model(Ragged.pack([torch.tensor(encoding.ids)]), segments)
    hidden = segments == 0
    starts = torch.log_softmax(logits[:, 0].masked_fill(hidden, float("-inf")), 0)
    best, found = -float("inf"), None
    for beam, start in enumerate(starts.topk(3).indices.tolist()):
        ends = torch.log_softmax(logits[:, 2 + beam].masked_fill(hidden, float("-inf")), 0)
        for end in range(start, len(ends)):
            in_context = encoding.sequence_ids[start] == encoding.sequence_ids[end] == 1
            if in_context and float(starts[start] + ends[end]) > best:
                best, found = float(starts[start] + ends[end]), (start, end)
    assert found is not None
    answer = prediction.n_best[0]
    assert answer.score == pytest.approx(best, abs=1e-5)
    assert answer.text == CONTEXT[encoding.offsets[found[0]][0] : encoding.offsets[found[1]][1]].strip()


def test_no_answer_has_a_score_of_its_own(bundle: ModelBundle) -> None:
    prediction = qkv.predict(bundle, [(QUESTION, CONTEXT)])[0].prediction
    encoding = bundle.source_tokenizer.encode_plus(QUESTION, CONTEXT)
    with torch.no_grad():
        logits = bundle.model(Ragged.pack([torch.tensor(encoding.ids)]), torch.tensor(encoding.token_type_ids))
    assert prediction.null_score_diff == pytest.approx(float(logits[0, 1]), abs=1e-5)


def test_a_text_with_fewer_tokens_than_beams_is_read(bundle: ModelBundle) -> None:
    assert qkv.predict(bundle, [("who", "cat")])[0].prediction.n_best[0].text
