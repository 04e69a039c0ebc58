"""Pictures are read from MNIST's files, from a folder a class and from a table; what is wrong is one line."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_pictures import NAMES, idx_bytes, pictures, write_folder, write_idx, write_table
from task_files import refused, written

from qkv.data.examples import ImageExample
from qkv.data.formats import has_splits, read

TRAIN, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


# ---- idx ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_every_picture_of_an_idx_file_has_its_bytes_and_its_label(tmp_path: Path, packed: bool) -> None:
    write_idx(tmp_path, packed=packed)
    for part, seed, count in (("train", 1, 90), ("test", 2, 30)):
        drawn, labels = pictures(count, seed)
        found = read("idx", tmp_path, split=part, columns={"names": NAMES})
        assert np.array_equal(np.stack([one.image for one in found]), drawn)
        assert [one.label for one in found] == [NAMES[label] for label in labels]


def test_all_pictures_of_an_idx_file_are_views_of_one_array(tmp_path: Path) -> None:
    found = read("idx", write_idx(tmp_path))
    bases = {id(one.image.base) for one in found}
    assert len(bases) == 1
    assert all(one.image.base is not None and one.image.base.size >= 90 * 64 for one in found)


def test_classes_without_names_are_called_by_their_numbers_and_names_may_have_commas_between(tmp_path: Path) -> None:
    write_idx(tmp_path)
    assert [one.label for one in read("idx", tmp_path)][:4] == ["0", "1", "2", "0"]
    found = read("idx", tmp_path, columns={"names": "dark, striped,bright"})
    assert [one.label for one in found][:3] == list(NAMES)


def test_a_file_is_named_itself_and_needs_no_labels_where_none_are_asked_for(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / LABELS).unlink()
    refused(str(tmp_path / LABELS), "no such file; it contains the labels of", "idx", tmp_path / TRAIN)
    assert {one.label for one in read("idx", tmp_path / TRAIN, columns={"label": None})} == {None}


def test_a_validation_part_is_not_made_up(tmp_path: Path) -> None:
    refused(str(tmp_path), "no split 'dev'", "idx", write_idx(tmp_path), split="dev")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (TRAIN, idx_bytes(np.zeros(90, np.uint8)), r"not an idx3 file: it begins with 0x00000801, not 0x00000803"),
        (LABELS, idx_bytes(np.zeros((9, 8, 8), np.uint8)), "not an idx1 file: it begins with 0x00000803"),
        (TRAIN, b"\x00\x00", "not an idx3 file: it begins with 0x0000,"),
        (TRAIN, b"", "empty, no images"),
        (TRAIN, idx_bytes(pictures(90)[0])[:-1], "ends early: 5,759 bytes for 90 x 8 x 8"),
        (TRAIN, idx_bytes(pictures(90)[0]) + b"x", "is too long"),
        (TRAIN, struct.pack(">4I", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1), "ends early: 0 bytes"),
        (LABELS, idx_bytes(np.zeros(89, np.uint8)), "89 labels for the 90 images of train-images"),
        (f"{TRAIN}.gz", gzip.compress(idx_bytes(pictures(90)[0]))[:-20], "the .gz file is broken or ends early"),
        (f"{TRAIN}.gz", b"plain", "the .gz file is broken"),
    ],
)
def test_a_broken_idx_file_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    write_idx(tmp_path)
    if name.endswith(".gz"):
        (tmp_path / TRAIN).unlink()
    refused(str(written(tmp_path / name, content)), said, "idx", tmp_path)


def test_a_class_that_has_no_name_is_refused_by_the_picture_or_skipped(tmp_path: Path) -> None:
    write_idx(tmp_path)
    place = f"{tmp_path / TRAIN}: image 3"
    refused(place, "has class 2, but names has 0 to 1", "idx", tmp_path, columns={"names": NAMES[:2]})
    found = read("idx", tmp_path, columns={"names": NAMES[:2]}, skip_bad=True)
    assert (len(found), len(found.skipped)) == (60, 30)


def test_a_name_that_does_not_tell_the_labels_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "mine", idx_bytes(pictures()[0]))
    refused(str(path), "its name has no images-idx3", "idx", path)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["png", "jpg", "webp"])
def test_a_folder_a_class_gives_its_names_as_labels(tmp_path: Path, kind: str) -> None:
    write_folder(tmp_path, kind=kind)
    written(tmp_path / "striped" / "notes.txt", "no picture")
    written(tmp_path / "striped" / ".hidden.png", "no picture")
    written(tmp_path / ".cache" / "a.png", "no picture")
    found = read("images", tmp_path)
    assert [(one.image.parent.name, one.label) for one in found] == [(n, n) for n in sorted(NAMES) for _ in range(4)]
    assert not has_splits("images", tmp_path)


def test_a_folder_of_parts_is_read_part_by_part(tmp_path: Path) -> None:
    for name, count in (("train", 12), ("val", 6)):
        write_folder(tmp_path / name, count)
    assert has_splits("images", tmp_path)
    assert [len(read("images", tmp_path, split=part)) for part in ("train", "dev", "valid")] == [12, 6, 6]
    refused(
        str(tmp_path),
        "no folder test for the split 'test'; the folder contains: train, val",
        "images",
        tmp_path,
        split="test",
    )


def test_a_table_names_pictures_from_its_own_folder_on(tmp_path: Path) -> None:
    table = write_table(tmp_path / "all.csv", write_folder(tmp_path / "pictures"))
    found = read("images", table)
    assert {one.label for one in found} == set(NAMES)
    assert (found[0].location, found[0].image.is_file()) == (f"{table}:2", True)
    assert {one.label for one in read("images", table, columns={"label": None})} == {None}
    refused(f"{table}:1", "no column 'path'; the columns are: file, label", "images", table, columns={"file": "path"})


def test_a_bad_picture_is_named_or_skipped(tmp_path: Path) -> None:
    table = write_table(tmp_path / "all.csv", write_folder(tmp_path / "pictures"))
    broken = tmp_path / "pictures" / "bright" / "002.png"
    broken.write_bytes(broken.read_bytes()[:-30])
    refused(str(broken), "a broken image", "images", tmp_path / "pictures")
    refused(f"{table}:2", "002.png: a broken image", "images", table)
    for path in (table, tmp_path / "pictures"):
        found = read("images", path, skip_bad=True)
        assert (len(found), len(found.skipped)) == (11, 1)
    broken.unlink()
    refused(f"{table}:2", "002.png: no such file", "images", table)


def test_a_folder_without_pictures_is_empty(tmp_path: Path) -> None:
    refused(str(tmp_path), "empty, no examples", "images", tmp_path)


# ---- what a picture says --------------------------------------------------------------------------------------------


def test_the_content_of_a_picture_does_not_depend_on_its_place(tmp_path: Path) -> None:
    first, second = pictures(2)[0]
    Image.fromarray(first).save(tmp_path / "a.png")
    Image.fromarray(first).save(tmp_path / "b.png")
    of = [ImageExample(one, "x", "y").content_hash() for one in (first, first.copy(), second, first.reshape(4, 16))]
    assert of[0] == of[1]
    assert len(set(of)) == 3
    assert ImageExample(tmp_path / "a.png", "a").content_hash() == ImageExample(tmp_path / "b.png", "b").content_hash()
