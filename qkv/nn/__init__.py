"""Modules of all models; the package knows nothing of files, families or losses."""

from qkv.nn.construction import build
from qkv.nn.model import Decoder, DecoderState, Encoder, EncoderDecoder, Model
from qkv.nn.ragged import BatchLayout, Ragged

__all__ = ["BatchLayout", "Decoder", "DecoderState", "Encoder", "EncoderDecoder", "Model", "Ragged", "build"]
