"""From a model to outputs: greedy, beam and sampling over one `step` interface, labels, answers, vectors."""

from qkv.generation.config import GenerationConfig, Prediction
from qkv.generation.generate import generate, predict
from qkv.generation.log_probs import token_log_probs
from qkv.generation.sampling import Hypothesis

__all__ = ["GenerationConfig", "Hypothesis", "Prediction", "embed", "generate", "predict", "token_log_probs"]
