"""Modules of all models; the package knows nothing of files, families or losses."""

from qkv.nn.model import Decoder, DecoderState, Encoder, EncoderDecoder, Model, build
from qkv.nn.ragged import BatchLayout, Ragged

__all__ = ["BatchLayout", "Decoder", "DecoderState", "Encoder", "EncoderDecoder", "Model", "Ragged", "build"]
