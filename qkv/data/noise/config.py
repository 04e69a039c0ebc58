"""Settings of masking, denoising and span corruption. Imports no torch, so that recipes can be validated without it."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.errors import InputError


def _check_fractions(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 <= value <= 1:
            raise InputError(f"{name} is {value}; give a fraction between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class MLMConfig:
    """Settings of masked language modeling; the defaults are BERT's (Devlin et al. 2019)."""

    mask_prob: float = 0.15
    """Fraction of the text tokens to predict."""
    mask_token_prob: float = 0.8
    """Fraction of the tokens to predict that are replaced by the mask token."""
    random_token_prob: float = 0.1
    """Fraction of the tokens to predict that are replaced by a random text token; the others stay unchanged."""
    whole_word: bool = False
    """Predict either all tokens of a word or none of them."""

    def __post_init__(self) -> None:
        _check_fractions(self, "mask_prob", "mask_token_prob", "random_token_prob")
        if self.mask_token_prob + self.random_token_prob > 1:
            values = f"mask_token_prob {self.mask_token_prob} and random_token_prob {self.random_token_prob}"
            raise InputError(f"{values} add up to more than 1; make one of them smaller")


@dataclass(frozen=True, kw_only=True)
class DenoisingConfig:
    """Noise of denoising, in the order in which it is applied; the defaults are BART's (Lewis et al. 2020)."""

    permute_sentences: bool = True
    """Shuffle the sentences of a chunk."""
    rotate_prob: float = 0.0
    """Fraction of the chunks that are rotated to start at a random token."""
    delete_prob: float = 0.0
    """Fraction of the tokens to delete."""
    infill_ratio: float = 0.3
    """Fraction of the tokens to cover by spans, each of which is replaced by one mask token."""
    poisson_lambda: float = 3.0
    """Mean of the Poisson distribution of span lengths; a span of length 0 inserts a mask token."""

    def __post_init__(self) -> None:
        _check_fractions(self, "rotate_prob", "delete_prob", "infill_ratio")
        if self.poisson_lambda <= 0:
            raise InputError(f"poisson_lambda is {self.poisson_lambda}; spans need a mean length above 0")


@dataclass(frozen=True, kw_only=True)
class SpanCorruptionConfig:
    """Settings of span corruption; the defaults are T5's (Raffel et al. 2020)."""

    noise_density: float = 0.15
    """Fraction of the tokens to mask."""
    mean_noise_span_length: float = 3.0
    """Mean number of tokens of a masked span."""

    def __post_init__(self) -> None:
        if not 0 < self.noise_density < 1:
            raise InputError(f"noise_density is {self.noise_density}; give a fraction above 0 and below 1")
        if self.mean_noise_span_length < 1:
            raise InputError(f"mean_noise_span_length is {self.mean_noise_span_length}; a span has at least one token")


@dataclass(frozen=True, kw_only=True)
class PLMConfig:
    """Settings of permutation language modeling; the defaults are XLNet's (Yang et al. 2019)."""

    partial_prediction: int = 6
    """One in this many text tokens is predicted, the last ones of the order of factorization (K in the paper)."""
    max_span_length: int = 5
    """Maximum number of consecutive tokens to predict; 1 for single tokens."""

    def __post_init__(self) -> None:
        for name in ("partial_prediction", "max_span_length"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give a whole number of 1 or more")


DEFAULT_MLM = MLMConfig()
DEFAULT_PLM = PLMConfig()
DEFAULT_DENOISING = DenoisingConfig()
DEFAULT_SPAN_CORRUPTION = SpanCorruptionConfig()
