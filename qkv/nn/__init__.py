"""The maths: knows nothing of files, families or losses."""

from qkv.nn.model import Decoder, Encoder, EncoderDecoder, State, build
from qkv.nn.ragged import Layout, Ragged

__all__ = ["Decoder", "Encoder", "EncoderDecoder", "Layout", "Ragged", "State", "build"]
