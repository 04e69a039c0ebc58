"""The maths: knows nothing of files, families or losses."""

from qkv.nn.model import Decoder, DecoderState, Encoder, EncoderDecoder, build
from qkv.nn.ragged import BatchLayout, Ragged

__all__ = ["Decoder", "Encoder", "EncoderDecoder", "BatchLayout", "Ragged", "DecoderState", "build"]
