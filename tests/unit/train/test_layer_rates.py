"""Fine-tuning: a layer has a share of the rate of the one above it."""

from __future__ import annotations

import pytest
from reviews import recipe_text, shape_of, write_model, write_reviews

from qkv import families, spec
from qkv.checkpoints import load
from qkv.nn import build
from qkv.recipe import read_recipe
from qkv.recipe.schema import TrainConfig
from qkv.train.fit import fit
from qkv.train.optimizer import build_optimizer, layers_below_head

FAMILIES = ("bert", "gpt2", "roberta", "bart", "t5")


@pytest.mark.parametrize("family", [*FAMILIES, "rnn"])
def test_each_layer_has_a_share_of_the_rate_of_the_one_above_it(family):
    module = families.get_family(family)
    model = build(module.make_spec(shape_of(family), head="sequence"))
    opt = build_optimizer(model, TrainConfig(max_steps=1, weight_decay=0.1), 0.5)
    shares = {id(p): group["lr_scale"] for group in opt.param_groups for p in group["params"]}
    found = {name: shares[id(p)] for name, p in model.named_parameters()}
    depth = 2
    for name, share in found.items():
        if name.startswith("head."):
            assert share == 1, name
        elif ".blocks." in name or ".layers." in name:
            number = int(name.split(".")[2])
            assert share == 0.5 ** (depth - number), name
        elif name in ("encoder.norm.weight", "decoder.norm.weight", "decoder.norm.bias"):
            assert share == 1, name
        else:  # embeddings, and T5's distances
            assert share == 0.5 ** (depth + 1), name
    decays = {group["weight_decay"] for group in opt.param_groups}
    assert decays == {0.0, 0.1}


def test_the_rates_of_a_step_follow_their_shares(tmp_path):
    write_reviews(tmp_path / "mine.csv")
    write_model("bert", tmp_path / "bert")
    (tmp_path / "bert.yaml").write_text(recipe_text(tmp_path / "bert", tmp_path / "mine.csv"))
    changes = [
        "finetune.layerwise_lr_decay=0.5",
        "train.max_steps=1",
        "train.learning_rate=0.01",
        "train.warmup_ratio=0",
    ]
    list(
        fit(read_recipe(tmp_path / "bert.yaml", [*changes, "train.schedule=constant"]), tmp_path / "run", device="cpu")
    )
    before, after = load(tmp_path / "bert").model.state_dict(), load(tmp_path / "run").model.state_dict()

    def moved(name: str) -> float:
        return float((after[name] - before[name]).abs().max())

    lower, upper = (moved(f"encoder.blocks.{layer}.feedforward.up.weight") for layer in (0, 1))
    assert upper == pytest.approx(0.005, rel=0.01)  # Adam's first step is as long as the rate
    assert lower == pytest.approx(0.0025, rel=0.01)
    assert moved("source_embedding.position.weight") == pytest.approx(0.00125, rel=0.01)


def test_what_stands_on_the_body_has_the_whole_rate():
    s = spec.Model(family="x", encoder=build(families.get_family("bert").make_spec(shape_of("bert"))).spec.encoder)
    assert layers_below_head(s, "scalar_mix.weights") == 0
    assert layers_below_head(s, "encoder.blocks.1.self_attention.q.lora_A") == 1


def test_the_head_has_a_rate_of_its_own():
    model = build(families.get_family("bert").make_spec(shape_of("bert"), head="sequence"))
    opt = build_optimizer(model, TrainConfig(max_steps=1), 0.5, head_lr_factor=30)
    shares = {id(p): group["lr_scale"] for group in opt.param_groups for p in group["params"]}
    assert {shares[id(p)] for p in model.head.parameters()} == {30}
    assert max(shares[id(p)] for p in model.encoder.parameters()) == 0.5
