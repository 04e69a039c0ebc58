"""Which objective a model takes, and which of several a batch gets."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qkv import spec
from qkv.errors import InputError, did_you_mean

# What reads and writes: an encoder alone, a decoder alone, or both. Permutation LM will join them with XLNet, and the
# forward and backward LM with ELMo.
ARCHITECTURE_OF = {
    "mlm": "an encoder",
    "clm": "a decoder",
    "denoising": "an encoder-decoder",
    "span_corruption": "an encoder-decoder",
}


def check_objective(objective: str, model: spec.Model) -> None:
    """Refuses a model that the objective does not fit.

    A decoder alone is not asked to restore a text, nor an encoder to continue one, which sees what comes next. An
    encoder-decoder continues nothing without a source: it is pretrained by restoring.
    """
    if objective not in ARCHITECTURE_OF:
        raise InputError(f"objective: there is no '{objective}'; {did_you_mean(objective, ARCHITECTURE_OF)}")
    architecture = "an encoder" if model.decoder is None else "a decoder" if model.encoder is None else "an encoder-decoder"
    if architecture != ARCHITECTURE_OF[objective]:
        alternatives = ", ".join(name for name, needed in ARCHITECTURE_OF.items() if needed == architecture)
        raise InputError(f"objective: {objective} needs {ARCHITECTURE_OF[objective]}, and {model.family} is {architecture}; try {alternatives}")
    if model.head is None or model.head.kind != "lm":
        raise InputError(f"objective: {objective} needs a head of kind 'lm', which this {model.family} lacks")


def sample_objective(weights: Mapping[str, float], *, seed: int, step: int) -> str:
    """One of several objectives, each as often as its weight says: a function of seed and step alone."""
    if not weights or min(weights.values()) < 0 or not sum(weights.values()) > 0:
        raise InputError("objective: give each a weight of 0 or more, and one at least above 0")
    # sorted: a recipe that comes back with its keys in another order mixes the same
    names = sorted(name for name, weight in weights.items() if weight)
    cumulative = np.cumsum([weights[name] for name in names])
    # the last word keeps this stream apart from those of the data, and of a step or seed that ends in zeros
    random_bits = np.random.PCG64(np.random.SeedSequence([seed, step, 0, int.from_bytes(b"mix", "big")])).random_raw()
    threshold = (random_bits >> 11) * 2.0**-53 * cumulative[-1]
    return names[int(np.searchsorted(cumulative[:-1], threshold, side="right"))]
