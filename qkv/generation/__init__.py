"""Text generation: greedy search, beam search and sampling; log-probabilities of given outputs; prompting."""

from qkv.generation.config import GenerationConfig
from qkv.generation.engine import Engine
from qkv.generation.generate import GeneratedText, generate, generate_texts
from qkv.generation.log_probs import token_log_probs
from qkv.generation.request import Hypothesis, Request

__all__ = [
    "Engine",
    "GeneratedText",
    "GenerationConfig",
    "Hypothesis",
    "Request",
    "generate",
    "generate_texts",
    "token_log_probs",
]
