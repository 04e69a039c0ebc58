"""From a model to outputs: greedy, beam, sampling, over one `step` interface."""

from qkv.decode.predict import Decoding, Prediction, generate, predict
from qkv.decode.score import score
from qkv.decode.write import Hypothesis

__all__ = ["Decoding", "Hypothesis", "Prediction", "generate", "predict", "score"]
