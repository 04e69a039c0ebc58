"""Score functions of attention by name, without importing them or torch, so that a recipe's names can be checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkv.registry import Registry

if TYPE_CHECKING:
    from qkv.nn.attention_score import AttentionScore

SCORE_FUNCTIONS: Registry[type[AttentionScore]] = Registry(
    "score function",
    {
        "scaled_dot": "qkv.nn.attention_score:ScaledDotScore",
        "dot": "qkv.nn.attention_score:DotScore",
        "bilinear": "qkv.nn.attention_score:BilinearScore",
        "additive": "qkv.nn.attention_score:AdditiveScore",
        "mlp": "qkv.nn.attention_score:MLPScore",
    },
)
