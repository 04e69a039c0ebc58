"""How good it is."""

from qkv.metrics.error_rate import edit_distance, error_rates
from qkv.metrics.seq2seq import EvaluationResult, evaluate, reference_loss

__all__ = ["EvaluationResult", "edit_distance", "error_rates", "evaluate", "reference_loss"]
