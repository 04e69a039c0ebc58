"""How fresh weights begin, measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv import spec
from qkv.checkpoints import ModelBundle, load, save
from qkv.families import get_family
from qkv.nn import build
from qkv.nn.construction import build_on_meta
from qkv.nn.init import init_weights

WRITING = ("self_attention.o.weight", "cross_attention.o.weight", "feedforward.down.weight")


def gpt2(**fields: Any) -> spec.Model:
    module = get_family("gpt2")
    made: spec.Model = module.make_spec(
        module.Config(d_model=96, heads=2, layers=8, max_length=64, **fields), target_vocab_size=300
    )
    return made


def spreads(model: torch.nn.Module) -> dict[str, float]:
    return {name: float(p.detach().std()) for name, p in model.named_parameters() if p.dim() > 1}


def measured(tensor: Tensor) -> float:
    return float(tensor.detach().std())


def test_gpt2_writes_into_the_residual_stream_with_matrices_that_start_smaller() -> None:
    """Radford et al. 2019, 2.3: "by a factor of 1/√N where N is the number of residual layers"; 8 blocks have 16."""
    found = spreads(build(gpt2()))
    writing = {name: spread for name, spread in found.items() if name.endswith(WRITING)}
    assert len(writing) == 16
    assert list(writing.values()) == pytest.approx([0.02 / 4] * 16, rel=0.05)
    others = [spread for name, spread in found.items() if name not in writing]
    assert others == pytest.approx([0.02] * len(others), rel=0.05)


def test_the_sum_over_all_layers_spreads_as_one_layer_does_without_it() -> None:
    matrices = [p.detach() for name, p in build(gpt2()).named_parameters() if name.endswith(WRITING[0])]
    matrices += [p.detach()[:, :96] for name, p in build(gpt2()).named_parameters() if name.endswith(WRITING[2])]
    assert measured(torch.stack(matrices).sum(0)) == pytest.approx(0.02, rel=0.05)


def test_cross_attention_counts_as_a_residual_layer() -> None:
    module = get_family("transformer")
    plain = module.make_spec(
        module.Config(d_model=96, heads=2, layers=3, d_ff=96), source_vocab_size=11, target_vocab_size=11
    )
    scaled = spec.replace(plain, init_std=0.03, decoder=spec.replace(plain.decoder, scaled_residual_init=True))
    found = spreads(build(scaled).decoder)
    assert [s for name, s in found.items() if name.endswith(WRITING)] == pytest.approx([0.03 / 3] * 9, rel=0.05)


@pytest.mark.parametrize("name", ["gpt", "bert", "bart", "t5", "vit", "transformer"])
def test_the_other_families_start_all_layers_alike(name: str) -> None:
    module = get_family(name)
    made = module.make_spec(
        next(iter(module.PRESETS.values())),
        **({"source_vocab_size": 9, "target_vocab_size": 9} if name == "transformer" else {}),
    )
    assert not any(
        part.scaled_residual_init for part in (made.encoder, made.decoder) if isinstance(part, spec.TransformerStack)
    )


def test_json_says_how_a_model_starts_and_may_leave_it_out() -> None:
    said = json.loads(spec.to_json(gpt2()))
    assert spec.from_json(json.dumps(said)).decoder.scaled_residual_init is True
    del said["decoder"]["scaled_residual_init"]
    assert spec.from_json(json.dumps(said)).decoder.scaled_residual_init is False


def test_a_gpt2_saved_before_the_field_was_there_is_still_a_plain_gpt2(tmp_path: Path) -> None:
    save(ModelBundle(build(gpt2())), tmp_path / "old")
    said = json.loads((tmp_path / "old" / "spec.json").read_text())
    del said["decoder"]["scaled_residual_init"]
    (tmp_path / "old" / "spec.json").write_text(json.dumps(said))
    save(load(tmp_path / "old"), tmp_path / "theirs", "huggingface")
    assert load(tmp_path / "theirs").model.spec == gpt2()


def vit(**fields: Any) -> spec.Model:
    module = get_family("vit")
    small = {"d_model": 96, "heads": 2, "layers": 1, "d_ff": 96, "image_size": 32, "patch_size": 4}
    made: spec.Model = module.make_spec(module.Config(**small | fields))
    return made


@pytest.mark.parametrize("spread", [0.02, 0.05])
def test_a_fresh_vit_starts_with_its_spread_everywhere(spread: float) -> None:
    model = build(vit(init_std=spread))
    assert list(spreads(model).values()) == pytest.approx([spread] * len(spreads(model)), rel=0.2)
    assert measured(model.source_embedding.position) == pytest.approx(spread, rel=0.05)
    assert measured(model.source_embedding.projection.weight) == pytest.approx(spread, rel=0.05)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_patches_without_memory_begin_afresh_when_they_are_given_some() -> None:
    model = build_on_meta(vit())
    patches = model.source_embedding.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in patches.parameters():
            parameter.fill_(7.0)
    init_weights(model.spec, patches.modules())
    assert measured(patches.cls_token) == pytest.approx(0.02, rel=0.2)
    assert measured(patches.position) == pytest.approx(0.02, rel=0.05)
    assert measured(patches.projection.weight) == pytest.approx(0.02, rel=0.05)
    assert not patches.projection.bias.any()
