"""ViT against Hugging Face's, tiny and odd: both heads, every activation, both of their namings, pixels to logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import both as harness
import numpy as np
import pytest
import torch
import transformers
from both import (
    NEAR,
    Both,
    check_gradients,
    check_logits,
    check_maps,
    check_own_round_trip,
    check_round_trip,
    randomised,
)
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from qkv import checkpoints
from qkv.checkpoints.state import unique_state_dict
from qkv.data.image_processor import PREPROCESSOR
from qkv.errors import InputError
from qkv.families import vit
from qkv.families.hf.format import spec_from_hf_config
from qkv.families.hf.rules import Tie, match_pattern
from qkv.nn.construction import build_on_meta

ODD: dict[str, Any] = {
    "hidden_size": 35,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 51,
    "image_size": 15,
    "patch_size": 5,
    "num_labels": 4,
}
CASES: dict[str, dict[str, Any]] = {
    "odd": {},
    "no bias": {"qkv_bias": False},
    "regression": {"num_labels": 1},
    "one channel": {"num_channels": 1},
    "one patch": {"image_size": 5},
    "relu": {"hidden_act": "relu"},
    "gelu_new": {"hidden_act": "gelu_new"},
    "silu": {"hidden_act": "silu"},
    "other epsilon and one layer": {"layer_norm_eps": 1e-3, "num_hidden_layers": 1},
}


class Pictures(Both):
    """The harness, with images in the place of tokens."""

    def images(self) -> Tensor:
        side, channels = self.theirs.config.image_size, self.theirs.config.num_channels
        return torch.randn(6, channels, side, side, generator=torch.Generator().manual_seed(7))

    def their_output(self, **options: Any) -> Any:
        return self.theirs(self.images(), **options)

    def our_logits(self) -> Tensor:
        logits: Tensor = self.ours.model(self.images())
        return logits

    def their_logits(self, **options: Any) -> Tensor:
        found = self.their_output(**options)
        if "logits" in found:
            return found.logits
        return found.last_hidden_state.flatten(0, 1) if self.ours.model.head is None else found.pooler_output


def make(folder: Path, kind: str = "ForImageClassification", **changes: Any) -> Pictures:
    config = transformers.ViTConfig(**(ODD | changes))
    return Pictures(randomised(getattr(transformers, f"ViT{kind}")(config)), folder / "theirs")


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Pictures:
    return make(tmp_path, **request.param)


@pytest.fixture(autouse=True)
def _names_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parameters have other names in memory than in a file."""
    filed = harness.their_names
    monkeypatch.setattr(harness, "their_names", lambda *given: {renamed(k): t for k, t in filed(*given).items()})


def renamed(name: str) -> str:
    bare = not name.startswith(("vit.", "classifier."))
    for rule in vit.BACKBONE_RULES:
        places = match_pattern(rule.duplicate_of, f"vit.{name}" if bare else name) if isinstance(rule, Tie) else None
        if places is not None:
            return rule.hf.format(**places).removeprefix("vit." if bare else "")
    return name


def test_logits_equal_theirs(both: Pictures) -> None:
    check_logits(both)


def test_gradients_equal_theirs(both: Pictures) -> None:
    check_gradients(both)


def test_out_and_in_again_gives_equal_bytes(both: Pictures, tmp_path: Path) -> None:
    check_own_round_trip(both, tmp_path / "own")
    check_round_trip(both, tmp_path / "again")


def test_captured_maps_equal_eager_attention(tmp_path: Path) -> None:
    check_maps(make(tmp_path), attentions="encoder.{i}.self_attention")


def test_the_pooler_equals_theirs(tmp_path: Path) -> None:
    both = make(tmp_path, "Model")
    check_logits(both)
    check_gradients(both)
    with torch.no_grad():
        ours, theirs = both.ours.model.hidden_states(both.images()).hidden.values, both.their_output().last_hidden_state
    assert float((ours - theirs.flatten(0, 1)).abs().max()) <= NEAR
    check_own_round_trip(both, tmp_path / "own")
    check_round_trip(both, tmp_path / "again")


def test_a_body_without_pooler_loads_as_the_body_alone(tmp_path: Path) -> None:
    theirs = transformers.ViTModel(transformers.ViTConfig(**ODD), add_pooling_layer=False, use_mask_token=True)
    both = Pictures(randomised(theirs), tmp_path / "theirs")
    assert both.ours.model.head is None
    check_logits(both)
    check_gradients(both)
    check_own_round_trip(both, tmp_path / "own")


@pytest.mark.parametrize("kind", ["ForImageClassification", "Model"])
def test_names_as_in_their_memory_load_like_names_as_in_their_files(kind: str, tmp_path: Path) -> None:
    both = make(tmp_path, kind)
    names = both.theirs.state_dict()
    assert any(".q_proj." in name for name in names)
    save_file({k: t.clone() for k, t in names.items()}, both.folder / "model.safetensors")
    again = checkpoints.load(both.folder)
    assert again.model.spec == both.ours.model.spec
    before, after = unique_state_dict(both.ours.model), unique_state_dict(again.model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    twice = names | {"vit.encoder.layer.0.output.dense.bias": torch.ones(35)}
    twice = twice if kind != "Model" else {k.removeprefix("vit."): t for k, t in twice.items()}
    save_file({k: t.clone() for k, t in twice.items()}, both.folder / "model.safetensors")
    with pytest.raises(InputError, match=r"mlp.fc2.bias' and .*output.dense.bias' are one tensor .* differ"):
        checkpoints.load(both.folder)


def test_pictures_go_from_files_to_logits_as_theirs_do(tmp_path: Path) -> None:
    make(tmp_path)
    processor = transformers.ViTImageProcessorPil(size={"height": 15, "width": 15}, resample=3)
    processor.save_pretrained(tmp_path / "theirs")
    both = Pictures(transformers.ViTForImageClassification.from_pretrained(tmp_path / "theirs"), tmp_path / "theirs")
    paths = []
    for number, (height, width) in enumerate([(23, 31), (15, 15), (8, 40)]):
        drawn = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(drawn).save(paths[-1])
    images = both.ours.image_processor
    assert images is not None
    ours = both.ours.model(images.preprocess_batch(paths))
    theirs = both.theirs(processor([str(path) for path in paths], return_tensors="pt").pixel_values).logits
    assert float((ours - theirs).detach().abs().max()) <= NEAR
    for layout in ("qkv", "huggingface"):
        checkpoints.save(both.ours, tmp_path / layout, layout)
        written = (tmp_path / layout / PREPROCESSOR).read_bytes()
        assert written == (tmp_path / "theirs" / PREPROCESSOR).read_bytes()
        assert checkpoints.load(tmp_path / layout).image_processor == images


# ---- what a checkpoint may say --------------------------------------------------------------------------------------


def test_what_a_config_leaves_out_is_what_theirs_assumes() -> None:
    whole = transformers.ViTConfig().to_dict()
    assert spec_from_hf_config(vit, {}, "here", "pooler", ()) == spec_from_hf_config(vit, whole, "here", "pooler", ())


def change(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_two_equal_sides_are_one_number(tmp_path: Path) -> None:
    both = make(tmp_path)
    change(both.folder, image_size=[15, 15], patch_size=[5, 5])
    assert checkpoints.load(both.folder).model.spec == both.ours.model.spec


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image_size": [15, 20]}, r"image_size is \[15, 20\]; .* square"),
        ({"patch_size": [5, 3]}, r"patch_size is \[5, 3\]; .* square"),
        ({"image_size": "15"}, "image_size cannot be '15'"),
        ({"patch_size": 4}, "sides of 15 pixels does not divide into patches of 4"),
        ({"pooler_output_size": 7}, "pooler_output_size is 7"),
        ({"pooler_act": "relu"}, "pooler_act is 'relu'"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is unknown"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, "'ViTForMaskedImageModeling'"),
        ({"num_channels": 1}, r"'source_embedding.projection.weight' has shape \[35, 3, 5, 5\]"),
    ],
)
def test_what_we_do_not_have_is_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    both = make(tmp_path)
    change(both.folder, **changes)
    with pytest.raises(InputError, match=said) as error:
        checkpoints.load(both.folder)
    assert "\n" not in str(error.value)


def test_a_body_pretrained_on_masked_images_serves_a_new_head(tmp_path: Path) -> None:
    theirs = randomised(transformers.ViTForMaskedImageModeling(transformers.ViTConfig(**ODD, encoder_stride=5)))
    theirs.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="ViTForMaskedImageModeling"):
        checkpoints.load(tmp_path)
    bundle = checkpoints.load(tmp_path, head="sequence", labels=["cat", "dog", "bird"])
    assert bundle.missing_keys == ("head.linear.bias", "head.linear.weight")
    assert bundle.unexpected_keys == ("decoder.0.bias", "decoder.0.weight")
    assert bundle.model(torch.randn(2, 3, 15, 15)).shape == (2, 3)


def test_sizes_have_the_parameters_of_the_paper() -> None:
    """Table 1 says 86, 307 and 632 million; exactly, and under 1000 classes, they are as many as timm's models have."""
    labels = tuple(map(str, range(1000)))
    counted = {
        name: sum(p.numel() for p in build_on_meta(vit.make_spec(shape, labels=labels)).parameters())
        for name, shape in vit.PRESETS.items()
    }
    assert counted == {
        "base_16": 86_567_656,
        "base_32": 88_224_232,
        "large_16": 304_326_632,
        "large_32": 306_535_400,
        "huge_14": 632_045_800,
    }
