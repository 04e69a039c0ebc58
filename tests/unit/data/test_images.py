"""Pictures come out as Hugging Face's ViTImageProcessor gives them, and bad ones are refused in one line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from qkv.data.image_files import thumbnail_png, verify_image
from qkv.data.image_processor import PREPROCESSOR, ImageProcessor
from qkv.errors import InputError

transformers = pytest.importorskip("transformers")

MODES = {"RGB": 3, "L": 1, "RGBA": 4}
SHAPES = [(37, 54), (64, 23), (5, 7), (31, 31), (1, 9)]
MEAN = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "one number": {"size": 19},
    "height and width": {"size": {"height": 17, "width": 29}},
    "shorter side": {"size": {"shortest_edge": 21}},
    "one number for the shorter side": {"size": 21, "default_to_square": False},
    "nearest": {"size": 19, "resample": 0},
    "lanczos": {"size": 19, "resample": 1},
    "bicubic": {"size": 19, "resample": 3},
    "box": {"size": 19, "resample": 4},
    "hamming": {"size": 19, "resample": 5},
    "other means": {"size": 15} | MEAN,
    "not resized": {"do_resize": False},
    "cropped": {"size": {"shortest_edge": 21}, "do_center_crop": True, "crop_size": 16},
    "cropped oddly": {"size": 24, "do_center_crop": True, "crop_size": {"height": 13, "width": 18}},
    "cropped beyond its edge": {"do_resize": False, "do_center_crop": True, "crop_size": {"height": 40, "width": 26}},
    "not rescaled": {"size": 19, "do_rescale": False},
    "another factor": {"size": 19, "rescale_factor": 0.0078},
    "not normalised": {"size": 19, "do_normalize": False},
    "bytes": {"size": 19, "do_normalize": False, "do_rescale": False},
}


def pixels(height: int, width: int, channels: int) -> np.ndarray:
    drawn = np.random.default_rng(height * width).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return drawn[..., 0] if channels == 1 else drawn


def pictures() -> Iterator[tuple[str, Image.Image]]:
    for height, width in SHAPES:
        for mode, channels in MODES.items():
            yield f"{mode}-{height}x{width}", Image.fromarray(pixels(height, width, channels))
        palette = Image.fromarray(pixels(height, width, 3)).convert("P", palette=Image.Palette.ADAPTIVE)
        yield f"P-{height}x{width}", palette


def seeing_through(picture: Image.Image) -> Image.Image:
    """A palette one of whose colours is transparent."""
    picture.info["transparency"] = int(np.asarray(picture)[0, 0])
    return picture


def both(folder: Path, options: dict[str, Any]) -> tuple[ImageProcessor, Any]:
    (folder / PREPROCESSOR).write_text(json.dumps({"image_processor_type": "ViTImageProcessor"} | options))
    return ImageProcessor.load(folder / PREPROCESSOR), transformers.ViTImageProcessorPil.from_pretrained(folder)


def must_agree(images: ImageProcessor, theirs: Any, ours: Any, given: Any = None) -> None:
    found = images.preprocess(ours)
    wanted = theirs(ours if given is None else given, return_tensors="pt").pixel_values[0]
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_files_of_every_mode_come_out_as_theirs(options: dict[str, Any], tmp_path: Path) -> None:
    images, theirs = both(tmp_path, options)
    for name, picture in pictures():
        path = tmp_path / f"{name}.png"
        picture.save(path)
        must_agree(images, theirs, path, str(path))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_pictures_and_arrays_come_out_as_theirs(options: dict[str, Any], tmp_path: Path) -> None:
    images, theirs = both(tmp_path, options)
    for height, width in SHAPES[:-1]:
        array = pixels(height, width, 3)
        must_agree(images, theirs, Image.fromarray(array))
        must_agree(images, theirs, array)
        must_agree(images, theirs, array.transpose(2, 0, 1))
        must_agree(images, theirs, torch.from_numpy(array))


def test_conversion_to_rgb_lays_every_mode_on_white_as_theirs_does(tmp_path: Path) -> None:
    images, theirs = both(tmp_path, {"size": 19, "do_convert_rgb": True} | MEAN)
    for name, picture in pictures():
        must_agree(images, theirs, picture)
        if name.startswith("P"):
            must_agree(images, theirs, seeing_through(picture))
    for channels in (1, 3, 4):
        must_agree(images, theirs, pixels(37, 53, channels).reshape(37, 53, channels))
    assert (
        images.preprocess(Image.new("RGBA", (5, 6))) - images.preprocess(Image.new("RGB", (5, 6), "white"))
    ).abs().max() == 0


def test_channels_stay_as_they_are_where_the_means_are_as_many(tmp_path: Path) -> None:
    grey, theirs = both(tmp_path, {"size": 19, "image_mean": [0.3], "image_std": [0.2]})
    must_agree(grey, theirs, Image.fromarray(pixels(37, 53, 1)))
    must_agree(grey, theirs, pixels(37, 53, 1)[None])
    four, theirs = both(tmp_path, {"size": 19, "image_mean": [0.3] * 4, "image_std": [0.2] * 4})
    must_agree(four, theirs, Image.fromarray(pixels(37, 53, 4)))


def test_a_picture_whose_channels_do_not_fit_the_means_becomes_rgb_as_a_file_does(tmp_path: Path) -> None:
    images, theirs = both(tmp_path, {"size": 19})
    for _, picture in pictures():
        must_agree(images, theirs, picture, picture.convert("RGB"))


def test_a_file_is_turned_as_the_camera_says_and_a_jpeg_reads_as_theirs(tmp_path: Path) -> None:
    images, theirs = both(tmp_path, {"size": {"shortest_edge": 21}})
    for turn in range(1, 9):
        exif, path = Image.Exif(), tmp_path / f"{turn}.jpg"
        exif[0x0112] = turn
        Image.fromarray(pixels(37, 53, 3)).save(path, exif=exif)
        must_agree(images, theirs, path, str(path))
    assert images.preprocess(tmp_path / "6.jpg").shape == (3, 30, 21)


def test_a_batch_is_its_pictures_stacked() -> None:
    images = ImageProcessor(size=(9, 11))
    batch = [pixels(37, 53, 3), Image.fromarray(pixels(5, 7, 1))]
    assert torch.equal(images.preprocess_batch(batch), torch.stack([images.preprocess(one) for one in batch]))


def test_pictures_of_a_batch_that_differ_in_size_are_refused() -> None:
    with pytest.raises(InputError, match=r"one shape after preprocessing, not \[3, 9, 12\] and \[3, 9, 25\]"):
        ImageProcessor(size=9).preprocess_batch([pixels(5, 14, 3), pixels(37, 53, 3)])
    with pytest.raises(InputError, match="an empty batch"):
        ImageProcessor().preprocess_batch([])


# ---- the file -------------------------------------------------------------------------------------------------------


def test_saving_writes_what_was_read_byte_for_byte(tmp_path: Path) -> None:
    written = b'{"size" :\t19, "do_pad": null,\r\n "image_std": [0.50,0.5,5e-1], "processor_class": "\xc3\xa9"}'
    (tmp_path / "in.json").write_bytes(written)
    ImageProcessor.load(tmp_path / "in.json").save(tmp_path / "out.json")
    assert (tmp_path / "out.json").read_bytes() == written


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_what_was_read_from_no_file_is_written_so_that_it_reads_back(options: dict[str, Any], tmp_path: Path) -> None:
    read, _ = both(tmp_path, options)
    again = ImageProcessor(**{key: getattr(read, key) for key in read.__dataclass_fields__ if key != "raw_config"})
    again.save(tmp_path / PREPROCESSOR)
    assert ImageProcessor.load(tmp_path / PREPROCESSOR) == read
    picture = pixels(37, 53, 3)
    must_agree(read, transformers.ViTImageProcessorPil.from_pretrained(tmp_path), picture)


def test_what_transformers_writes_reads_back(tmp_path: Path) -> None:
    transformers.ViTImageProcessorPil(size=19, resample=3).save_pretrained(tmp_path)
    assert ImageProcessor.load(tmp_path / PREPROCESSOR) == ImageProcessor(size=(19, 19), resample=3)


def test_an_old_extractor_and_options_that_say_nothing_are_taken(tmp_path: Path) -> None:
    old = {"feature_extractor_type": "ViTFeatureExtractor", "size": 224, "do_pad": False, "device": "cpu"}
    (tmp_path / PREPROCESSOR).write_text(json.dumps(old | {"do_reduce_labels": None, "crop_size": None}))
    assert ImageProcessor.load(tmp_path / PREPROCESSOR) == ImageProcessor(processor_type="ViTFeatureExtractor")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"do_pad": True}, "'do_pad' is True"),
        ({"crop_pct": 0.9}, "'crop_pct' is 0.9"),
        ({"image_processor_type": "ConvNextImageProcessor"}, "processor 'ConvNextImageProcessor' is not supported"),
        ({"feature_extractor_type": "WhisperFeatureExtractor"}, "processor 'WhisperFeatureExtractor' is not supported"),
        ({"data_format": "channels_last"}, "data_format cannot be 'channels_last'"),
        ({"input_data_format": "channels_last"}, "'input_data_format' is 'channels_last'"),
        ({"resample": 6}, "resample cannot be 6"),
        ({"resample": True}, "resample cannot be True"),
        ({"resample": [2]}, r"resample cannot be \[2\]"),
        ({"do_resize": 1}, "do_resize cannot be 1"),
        ({"size": 0}, "size cannot be 0"),
        ({"size": "224"}, "size cannot be '224'"),
        ({"size": {"longest_edge": 9}}, "size cannot be {'longest_edge': 9}"),
        ({"size": {"shortest_edge": 9, "longest_edge": 19}}, "size cannot be {'shortest_edge': 9, 'longest_edge': 19}"),
        ({"size": {"height": 9, "width": 1.5}}, "size cannot be 1.5"),
        ({"do_center_crop": True}, "crop_size cannot be None"),
        ({"do_center_crop": True, "crop_size": {"shortest_edge": 9}}, "crop_size cannot be {'shortest_edge': 9}"),
        ({"rescale_factor": "a"}, r"rescale_factor cannot be \['a'\]"),
        ({"image_mean": 0.5}, "image_mean cannot be 0.5"),
        ({"image_mean": [0.5, None, 0.5]}, "image_mean cannot be"),
        ({"image_std": [0.5, 0.0, 0.5]}, "none of them 0"),
        ({"image_std": [0.5]}, "as many numbers as image_mean"),
    ],
)
def test_an_option_that_we_do_not_have_is_refused_by_name(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / PREPROCESSOR).write_text(json.dumps(options))
    must_refuse(rf"{PREPROCESSOR}: .*{said}", lambda: ImageProcessor.load(tmp_path / PREPROCESSOR))


def must_refuse(said: str, act: Any) -> None:
    with pytest.raises(InputError, match=said) as error:
        act()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("written", [b"{", b"[]", b"\xff\xfe{"], ids=["broken", "a list", "not text"])
def test_a_file_that_is_no_json_object_is_refused(written: bytes, tmp_path: Path) -> None:
    (tmp_path / PREPROCESSOR).write_bytes(written)
    must_refuse(PREPROCESSOR, lambda: ImageProcessor.load(tmp_path / PREPROCESSOR))
    must_refuse("no such file", lambda: ImageProcessor.load(tmp_path / "none.json"))


# ---- bad pictures ---------------------------------------------------------------------------------------------------


def test_what_is_no_picture_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "words.jpg").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    must_refuse("words.jpg: not an image", lambda: ImageProcessor().preprocess(tmp_path / "words.jpg"))
    must_refuse("empty.png: not an image", lambda: ImageProcessor().preprocess(str(tmp_path / "empty.png")))
    must_refuse("none.png: no such file", lambda: ImageProcessor().preprocess(tmp_path / "none.png"))
    must_refuse("is a folder", lambda: ImageProcessor().preprocess(tmp_path))


@pytest.mark.parametrize("kind", ["png", "jpg", "gif", "bmp", "tiff", "webp"])
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
def test_a_truncated_file_is_refused_by_its_name(kind: str, kept: float, tmp_path: Path) -> None:
    path = tmp_path / f"cut.{kind}"
    Image.fromarray(pixels(64, 64, 3)).save(path)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    must_refuse(rf"cut.{kind}: (not an|a broken) image", lambda: ImageProcessor().preprocess(path))


def test_a_broken_file_that_somebody_opened_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "cut.png"
    Image.fromarray(pixels(64, 64, 3)).save(path)
    path.write_bytes(path.read_bytes()[:4000])
    with Image.open(path) as picture:
        must_refuse("the image: a broken image", lambda: ImageProcessor().preprocess(picture))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((5, 6, 2), np.uint8),
        np.zeros(4, np.uint8),
        np.zeros((0, 4), np.uint8),
        np.zeros((2, 3, 4, 3), np.uint8),
    ],
    ids=["two channels", "a line", "nothing", "a batch"],
)
def test_an_array_of_another_shape_is_refused(array: np.ndarray) -> None:
    must_refuse("is not an image: give .H, W., .H, W, C. or .C, H, W.", lambda: ImageProcessor().preprocess(array))


def test_numbers_that_are_no_bytes_are_refused() -> None:
    must_refuse("an array of float64 is not an image", lambda: ImageProcessor().preprocess(np.random.rand(4, 5, 3)))
    must_refuse("an array of int64 is not an image", lambda: ImageProcessor().preprocess(np.full((4, 5, 3), 256)))
    assert ImageProcessor().preprocess(np.full((4, 5, 3), 255)).max() == 1


def test_a_picture_without_pixels_is_refused() -> None:
    must_refuse("has no pixels", lambda: ImageProcessor(size=9).preprocess(Image.new("RGB", (0, 4))))


def test_channels_that_fit_no_means_are_refused(tmp_path: Path) -> None:
    Image.fromarray(pixels(9, 9, 3)).save(tmp_path / "colour.png")
    two = ImageProcessor(mean=(0.5, 0.5), std=(0.5, 0.5))
    must_refuse("colour.png: has 3 channels and .* has means for 2", lambda: two.preprocess(tmp_path / "colour.png"))


def test_one_mean_makes_a_picture_grey_and_a_grey_file_keeps_its_bytes(tmp_path: Path) -> None:
    grey = ImageProcessor(size=None, mean=(0.0,), std=(1.0,), rescale_factor=1.0)
    drawn = pixels(9, 12, 1)
    Image.fromarray(drawn).save(tmp_path / "grey.png")
    assert torch.equal(grey.preprocess(tmp_path / "grey.png"), torch.from_numpy(drawn)[None].float())
    colour = Image.fromarray(pixels(9, 12, 3))
    assert torch.equal(grey.preprocess(colour), torch.from_numpy(np.array(colour.convert("L")))[None].float())


@pytest.mark.parametrize(("channels", "rgb"), [(1, False), (3, False), (3, True)])
def test_a_batch_of_bytes_is_scaled_to_the_bits_that_reading_gives(channels: int, rgb: bool) -> None:
    mean, deviation = (0.286, 0.4, 0.41)[:channels], (0.353, 0.2, 0.21)[:channels]
    images = ImageProcessor(size=(7, 9), convert_rgb=rgb, mean=mean, std=deviation)
    batch = [pixels(7, 9, channels), pixels(20, 31, channels), pixels(7, 9, 3)]
    found = images.normalize(np.stack([images.to_pixels(one) for one in batch]))
    assert torch.equal(found, images.preprocess_batch([Image.fromarray(one) for one in batch]))


@pytest.mark.parametrize("kind", ["png", "jpg", "gif", "webp"])
def test_checking_refuses_what_reading_refuses(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    Image.fromarray(pixels(64, 64, 3)).save(path)
    verify_image(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    must_refuse(rf"a.{kind}: (not an|a broken) image", lambda: verify_image(path))


def test_a_picture_for_a_page_is_a_small_png(tmp_path: Path) -> None:
    Image.fromarray(pixels(300, 200, 3)).save(tmp_path / "a.jpg")
    with Image.open(io.BytesIO(thumbnail_png(tmp_path / "a.jpg", 90))) as shown:
        assert (shown.format, shown.size) == ("PNG", (60, 90))
    with Image.open(io.BytesIO(thumbnail_png(pixels(5, 6, 1), 90))) as shown:
        assert np.array_equal(np.asarray(shown), pixels(5, 6, 1))


def test_sixteen_bits_a_pixel_are_the_picture_that_eight_show(tmp_path: Path) -> None:
    shown = pixels(9, 12, 1)
    deep = Image.fromarray(shown.astype(np.uint16) * 257)
    deep.save(tmp_path / "deep.png")
    plain = ImageProcessor(mean=(0.5,), std=(0.5,), size=(9, 12))
    assert Image.open(tmp_path / "deep.png").mode == "I;16"
    verify_image(tmp_path / "deep.png")
    for picture in (tmp_path / "deep.png", deep):
        assert torch.equal(plain.preprocess(picture), plain.preprocess(shown))


def test_thirty_two_bits_a_pixel_are_refused_for_nothing_says_what_is_white(tmp_path: Path) -> None:
    Image.fromarray(pixels(9, 12, 1).astype(np.float32)).save(tmp_path / "float.tiff")
    for reading in (verify_image, ImageProcessor().preprocess):
        with pytest.raises(InputError, match=r"float.tiff: has 32 bits per pixel .* save it with 8 or 16"):
            reading(tmp_path / "float.tiff")
