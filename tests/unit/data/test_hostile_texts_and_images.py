"""Texts and images that would fill the memory or hang are refused in one line."""

from __future__ import annotations

import gzip
import json
import os
import resource
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qkv import files
from qkv.data.corpora.corpus import Corpus
from qkv.data.corpora.shards import Shards, build_shards
from qkv.data.image_processor import ImageProcessor
from qkv.errors import InputError
from qkv.tokenization.tokenizer import train_tokenizer


def refused(pattern: str, action: Any) -> str:
    with pytest.raises(InputError, match=pattern) as problem:
        action()
    assert "\n" not in str(problem.value)
    return str(problem.value)


def read_all(path: Path, format: str = "line_per_document") -> list[str]:
    return [document.text for document in Corpus([path], format=format)]


# ---- texts ----------------------------------------------------------------------------------------------------------


def test_a_gigabyte_of_zeros_in_a_gzip_is_refused_in_little_memory(tmp_path: Path) -> None:
    compressor = zlib.compressobj(wbits=31)
    block = bytes(1 << 20)
    packed = b"".join([*(compressor.compress(block) for _ in range(100)), compressor.flush()])  # a tenth of it
    (tmp_path / "bomb.txt.gz").write_bytes(packed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for format in ("line_per_document", "blank_line_separated", "file_per_document"):
        refused("bomb.txt.gz:1: the line has too many bytes", lambda: read_all(tmp_path / "bomb.txt.gz", format))  # noqa: B023
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_millions_of_empty_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_LIMIT_EMPTY_LINES", "1000")
    (tmp_path / "a.txt").write_bytes(b"\n" * 1002)
    message = "a.txt:1001: too many empty lines in succession; the limit is 1,000; QKV_LIMIT_EMPTY_LINES"
    refused(message, lambda: read_all(tmp_path / "a.txt"))


@pytest.mark.parametrize("format", ["blank_line_separated", "file_per_document"])
def test_a_document_of_many_lines_has_a_limit(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_LIMIT_DOCUMENT_BYTES", "1000")
    (tmp_path / "a.txt").write_text("a line of a document\n" * 40 + "\n" + "another\n")
    assert read_all(tmp_path / "a.txt", format)
    (tmp_path / "a.txt").write_text("a line of a document\n" * 60)
    refused("the document has too many bytes; the limit is 1,000", lambda: read_all(tmp_path / "a.txt", format))


def test_a_zero_byte_in_a_corpus_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\nnot \0 fine\n")
    refused("a.txt:2: byte 5 of the line, 0x00, is not text", lambda: read_all(tmp_path / "a.txt"))


def test_special_files_are_no_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_FIFO_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe.txt")
    refused("nobody writes to", lambda: read_all(tmp_path / "pipe.txt"))
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    refused("zero.txt: is a device", lambda: read_all(tmp_path / "zero.txt"))
    refused("file name too long", lambda: read_all(Path("x" * 5000 + ".txt")))


@pytest.mark.parametrize(
    "change",
    [
        {"shards": 3},
        {"shards": [3]},
        {"shards": [{}]},
        {"tokenizer_fingerprint": None},
        {"version": "x" * 5000},
        {"version": None},
    ],
)
def test_a_damaged_index_of_a_built_corpus_is_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = train_tokenizer("character", ["abc"])
    (tmp_path / "a.txt").write_text("abc\n")
    build_shards(tmp_path / "built", Corpus([tmp_path / "a.txt"], format="line_per_document"), tokenizer)
    path = tmp_path / "built" / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert len(refused("meta.json: (damaged|has version)", lambda: Shards(tmp_path / "built", tokenizer))) < 400


# ---- images ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"size": 10**9}, "with size 1000000000 × 1000000000, an image would be resized to too many pixels"),
        ({"size": {"shortest_edge": 10**9}}, "with size 1000000000, an image would be resized"),
        ({"size": {"height": 1, "width": 2**62}}, "too many pixels; the limit is 16,777,216; QKV_LIMIT_RESIZED_PIXELS"),
        ({"do_center_crop": True, "crop_size": 10**6}, "with crop_size 1000000 × 1000000, an image would be resized"),
        ({"size": -1}, "size cannot be -1"),
        ({"size": 2.5}, "size cannot be 2.5"),
        ({"image_mean": [0.5, 0.5]}, "image_std needs as many numbers as image_mean"),
        ({"image_mean": [0.5] * 1000, "image_std": [0.5] * 1000}, "give one number per channel"),
        ({"image_std": [0.0, 1, 1]}, "none of them 0"),
        ({"image_std": [1e-300, 1, 1]}, "none of them 0"),
        ({"image_mean": [1e300, 1, 1]}, "image_mean cannot be"),
        ({"rescale_factor": 10**300}, "rescale_factor cannot be"),
        ({"resample": 2.0}, "resample cannot be 2.0"),
        ({"do_resize": "x" * 5000}, "do_resize cannot be 'x{59}…'"),
        ({"x" * 5000: 1}, "an option that qkv does not support"),
    ],
)
def test_the_numbers_of_an_image_processor_have_bounds(options: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({"image_processor_type": "ViTImageProcessor"} | options))
    assert len(refused(pattern, lambda: ImageProcessor.load(path)).replace(str(path), "")) < 400


@pytest.mark.parametrize(
    "text", ['{"image_mean": [NaN, 1, 1]}', '{"image_std": [1e999, 1, 1]}', '{"size": 1' + "9" * 5000]
)
def test_an_image_processor_has_numbers_that_json_has(text: str, tmp_path: Path) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(text)
    refused(str(path), lambda: ImageProcessor.load(path))


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [9000, 10**6])
def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(side: int, tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(png_header(side, side))
    pattern = "bomb.png: the image has .*pixels; the limit is 67,108,864; QKV_LIMIT_IMAGE_PIXELS raises it"
    refused(pattern, lambda: ImageProcessor().preprocess(tmp_path / "bomb.png"))


def test_a_narrow_image_is_not_resized_to_billions_of_pixels() -> None:
    narrow = np.zeros((1, 60000), np.uint8)
    refused("60,000 × 1 pixels would be resized to too many", lambda: ImageProcessor(size=224).preprocess(narrow))


def test_special_and_truncated_image_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_FIFO_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe.png")
    refused("nobody writes to", lambda: ImageProcessor().preprocess(tmp_path / "pipe.png"))
    refused("/dev/zero: is a device", lambda: ImageProcessor().preprocess("/dev/zero"))
    Image.new("RGB", (30, 30), (1, 2, 3)).save(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:400])
    refused("a.jpg: (a broken|not an) image", lambda: ImageProcessor().preprocess(tmp_path / "a.jpg"))
    (tmp_path / "b.png").write_bytes(gzip.compress(b"x"))
    refused("b.png: not an image", lambda: ImageProcessor().preprocess(tmp_path / "b.png"))
