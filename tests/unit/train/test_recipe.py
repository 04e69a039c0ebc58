"""Recipes: what is written is what is run, and a slip is named."""

from __future__ import annotations

import pytest
import yaml
from words import write_task

from qkv import families
from qkv.errors import InputError
from qkv.recipe.model_section import model_config, model_spec
from qkv.recipe.parse import read_recipe, recipe_to_yaml
from qkv.recipe.schema import FinetuneRecipe, Seq2SeqRecipe
from qkv.tasks import get_task
from qkv.train.schedule import peak_learning_rate


@pytest.fixture
def recipe(tmp_path):
    return write_task(tmp_path)


def test_changes_on_the_command_line_win(recipe):
    read = read_recipe(recipe, ["train.max_steps=7", "model.d_model=32", "data.hold_out={test: 0.1}"])
    assert (read.train.max_steps, model_config(read).d_model, read.data.hold_out) == (7, 32, {"test": 0.1})


def test_a_recipe_written_down_reads_back_the_same(recipe, tmp_path):
    read = read_recipe(recipe, ["train.betas=[0.8, 0.9]"])
    (tmp_path / "again.yaml").write_text(recipe_to_yaml(read))
    assert read_recipe(tmp_path / "again.yaml") == read


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("train.stepps=3", r"unknown key 'train\.stepps'; did you mean 'max_steps'"),
        ("trian.max_steps=3", r"unknown key 'trian'; did you mean 'train'"),
        ("model.d_modle=3", r"unknown key 'model\.d_modle'; did you mean 'd_model'"),
        ("tokenizer.source.kinds=bpe", r"unknown key 'tokenizer\.source\.kinds'; did you mean 'kind'"),
        ("train={epochs: 2, max_steps: 3}", r"max_steps and epochs are both set"),
        ("train.max_steps=many", r"key 'train\.max_steps' cannot be 'many'"),
        ("model.family=transfromer", r"no family 'transfromer'; did you mean 'transformer'"),
        ("model.size=hug", "no size 'hug'"),
        ("model.d_model=wide", r"key 'model\.d_model' cannot be 'wide'"),
        ("train.schedule=round", r"key 'train': there is no schedule 'round'"),
        ("train.max_steps=0", r"key 'train\.max_steps' cannot be 0: it must be 1 or more"),
        ("train.batch_tokens=-5", r"key 'train\.batch_tokens' cannot be -5"),
        ("train.learning_rate=.nan", r"key 'train\.learning_rate' cannot be nan"),
        ("train.betas=[0.9]", r"key 'train\.betas' cannot be \[0\.9\]"),
        ("train.scheduled_sampling=1.5", r"key 'train\.scheduled_sampling' cannot be 1\.5"),
        ("validation.every_steps=0", r"key 'validation\.every_steps' cannot be 0"),
        ("model.heads=0", r"key 'model\.heads' cannot be 0"),
        ("model.dropout=1.5", r"key 'model\.dropout' cannot be 1\.5"),
        ("model.position=sinus", r"key 'model\.position' cannot be 'sinus'"),
        ("nonsense", "an override is key=value"),
        ("train.max_steps.more=1", "'max_steps' is a value, not a section"),
        ("train.max_steps=[", "not YAML"),
    ],
)
def test_a_slip_in_a_recipe_is_named_with_what_was_meant(recipe, change, said):
    with pytest.raises(InputError, match=said):
        read_recipe(recipe, [change])


def test_a_missing_key_is_named(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("data: {format: tsv, train: a.tsv}\n")
    with pytest.raises(InputError, match="key 'model' is missing"):
        read_recipe(path)


def test_broken_yaml_is_refused_with_its_line(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("a: 1\nb: [1, 2\nc: 3\n")
    with pytest.raises(InputError, match="line 3, column 2: not YAML"):
        read_recipe(path)


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.yaml: no such file"):
        read_recipe(tmp_path / "none.yaml")


def test_the_paper_rate_is_the_papers(recipe):
    """Vaswani et al. 2017, 5.3: base (512 wide, 4000 steps of warm-up) peaks at 512^-1/2 * 4000^-1/2."""
    read = read_recipe(recipe, ["train.noam_factor=1", "train.warmup_steps=4000", "model.d_model=512", "model.heads=8"])
    peak = peak_learning_rate(read.train, model_spec(read, source_vocab_size=9, target_vocab_size=9), 4000)
    assert peak == pytest.approx(512**-0.5 * 4000**-0.5)


def test_every_recipe_in_the_repository_reads_and_builds(request):
    paths = sorted((request.config.rootpath / "recipes").glob("*.yaml"))
    assert paths
    for path in paths:
        read = read_recipe(path)
        if "init_from" in read.model:  # it has its shape
            continue
        if isinstance(read, Seq2SeqRecipe):
            assert model_spec(read, source_vocab_size=30, target_vocab_size=40).head.num_outputs == 40
        else:
            module, head = families.get_family(read.model["family"]), "lm"
            given = {}
            if isinstance(read, FinetuneRecipe):
                head = get_task(read.task["name"]).head_kind
                given = {"head": head}
            assert module.make_spec(model_config(read), **given).head.kind == head


def test_the_recurrent_recipes_differ_in_their_attention_alone(request):
    paths = (request.config.rootpath / "recipes").glob("g2p-rnn-*.yaml")
    plain = [yaml.safe_load(p.read_text()) for p in paths]
    kinds = {p["model"].pop("attention") for p in plain}
    assert kinds == {"none", "dot", "scaled_dot", "bilinear", "additive", "mlp"}
    assert all(p == plain[0] for p in plain)
