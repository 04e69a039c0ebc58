"""Attention maps of a model: `with capture_attention(model) as maps`."""

from __future__ import annotations

from qkv.nn.capture import AttentionMaps, capture_attention, named_attentions

__all__ = ["AttentionMaps", "capture_attention", "named_attentions"]
