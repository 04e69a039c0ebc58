"""From a model to outputs: greedy, beam and sampling over one `step` interface, labels, answers, vectors."""

from qkv.decode.embed import embed
from qkv.decode.predict import generate, predict
from qkv.decode.score import score
from qkv.decode.settings import Decoding, Prediction
from qkv.decode.write import Hypothesis

__all__ = ["Decoding", "Hypothesis", "Prediction", "embed", "generate", "predict", "score"]
