"""LoRA adapters in PEFT's format, both ways: an adapter of PEFT gives PEFT's logits here, and ours give ours there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from both import ids, randomised
from safetensors.torch import load_file, save_file
from torch import Tensor

import qkv
from qkv import spec
from qkv.nn import EncoderDecoder, Ragged
from qkv.nn.construction import set_features_and_lora

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

BERT = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
BERT |= {"max_position_embeddings": 24}
GPT2 = {"n_embd": 12, "n_layer": 2, "n_head": 2, "vocab_size": 20, "n_positions": 24, "pad_token_id": 0}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 1}
T5 = {"d_model": 12, "d_kv": 6, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 20}
T5 |= {"decoder_start_token_id": 0}
BART = {"d_model": 12, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 20, "max_position_embeddings": 24}
VIT = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
VIT |= {"image_size": 4, "patch_size": 2}
SIZES = {"Bert": BERT, "Roberta": BERT, "GPT2": GPT2, "T5": T5, "Bart": BART, "ViT": VIT}
LENGTHS, NEAR = [4, 7, 2], 1e-5


def make_model(family: str, kind: str) -> Any:
    num_labels = 2 if kind == "ForQuestionAnswering" else 3
    config = getattr(transformers, f"{family}Config")(**SIZES[family], num_labels=num_labels)
    return randomised(getattr(transformers, f"{family}{kind}")(config))


def peft_logits(model: Any) -> Tensor:
    """Return the logits of a PEFT model, without padding."""
    if model.config.model_type == "vit":
        return model(pixel_values=images()).logits.detach()
    source = sentences()
    inputs = {"input_ids": source.to_padded().long(), "attention_mask": source.layout.valid_mask().long()}
    is_lm = type(model.get_base_model()).__name__.endswith(("Generation", "LMHeadModel"))
    if model.config.is_encoder_decoder and is_lm:
        inputs["decoder_input_ids"] = source.to_padded().long()
    output = model(**inputs)
    logits = torch.stack([output.start_logits, output.end_logits], -1) if "start_logits" in output else output.logits
    return (logits[source.layout.valid_mask()] if logits.dim() == 3 else logits).detach()


def sentences() -> Ragged:
    """Return sentences that end with BART's EOS, which its classifier looks for."""
    source = ids(LENGTHS, 20, 1)
    source.values[source.layout.cu_seqlens[1:].long() - 1] = 2
    return source


def images() -> Tensor:
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(2))


def our_logits(bundle: qkv.ModelBundle) -> Tensor:
    model = bundle.model
    if model.spec.family == "vit":
        return model(images()).detach()
    source = sentences()
    reads_targets = isinstance(model, EncoderDecoder) and model.spec.head.kind == "lm"
    return (model(source, source) if reads_targets else model.logits(source)).detach()


def check_equal(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float(theirs.abs().max()) > 0.1, "the models say next to nothing: nothing would be compared"
    assert float((ours - theirs).abs().max()) <= NEAR


CLASSIFIER = "ForSequenceClassification"
IMPORTS: dict[str, tuple[str, str, dict[str, Any]]] = {  # family, kind, options of PEFT's LoraConfig
    "bert": ("Bert", CLASSIFIER, {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}),
    "bert tagger": ("Bert", "ForTokenClassification", {"task_type": "TOKEN_CLS"}),
    "bert span": ("Bert", "ForQuestionAnswering", {"task_type": "QUESTION_ANS"}),
    "bert backbone": ("Bert", "ForMaskedLM", {"target_modules": ["key", "intermediate.dense"]}),
    "roberta": ("Roberta", CLASSIFIER, {"task_type": "SEQ_CLS", "use_rslora": True, "bias": "all"}),
    "gpt2": ("GPT2", CLASSIFIER, {"task_type": "SEQ_CLS", "target_modules": ["c_attn", "c_proj"]}),
    "gpt2 lm": ("GPT2", "LMHeadModel", {"task_type": "CAUSAL_LM", "target_modules": ["c_attn", "c_fc"]}),
    "gpt2 embedding": ("GPT2", CLASSIFIER, {"task_type": "SEQ_CLS", "target_modules": ["c_attn", "wte"]}),
    "t5": ("T5", "ForConditionalGeneration", {"task_type": "SEQ_2_SEQ_LM", "target_modules": ["q", "wi"]}),
    "bart": ("Bart", "ForConditionalGeneration", {"task_type": "SEQ_2_SEQ_LM"}),
    "patterns": (
        "Bert",
        CLASSIFIER,
        {
            "task_type": "SEQ_CLS",
            "target_modules": ["query", "value", "pooler.dense", "classifier"],
            "rank_pattern": {"query": 5},
            "alpha_pattern": {"layer.1.attention.self.query": 3},
            "layers_to_transform": None,
        },
    ),
    "vit": ("ViT", "ForImageClassification", {"target_modules": ["q_proj"], "modules_to_save": ["classifier"]}),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor]]:
    """Return a function that gives the folder of an adapter that PEFT wrote, and PEFT's logits."""
    made: dict[str, tuple[Path, Tensor]] = {}

    def make(name: str) -> tuple[Path, Tensor]:
        if name not in made:
            family, kind, options = IMPORTS[name]
            folder = tmp_path_factory.mktemp("peft")
            make_model(family, kind).save_pretrained(folder / "base")
            base = getattr(transformers, f"{family}{kind}").from_pretrained(folder / "base")
            config = peft.LoraConfig(**{"r": 4, "lora_alpha": 12, "lora_dropout": 0.1} | options)
            model = randomised(peft.get_peft_model(base, config))
            model.save_pretrained(folder / "adapter")
            # the frozen weights were drawn again as well; the base of the adapter are those of the files
            base = getattr(transformers, f"{family}{kind}").from_pretrained(folder / "base")
            loaded = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
            made[name] = folder / "adapter", peft_logits(loaded)
        return made[name]

    return make


@pytest.mark.parametrize("name", IMPORTS)
def test_an_adapter_of_peft_gives_its_logits(name: str, adapters: Callable[[str], tuple[Path, Tensor]]) -> None:
    folder, logits = adapters(name)
    bundle = qkv.load(folder)
    assert bundle.model.spec.lora is not None
    assert bundle.missing_keys == ()
    check_equal(our_logits(bundle), logits)


def test_an_imported_adapter_stays_the_same_in_our_format_and_merged(
    adapters: Callable[[str], tuple[Path, Tensor]], tmp_path: Path
) -> None:
    from qkv.checkpoints.lora import merge_bundle

    folder, logits = adapters("gpt2")
    qkv.save(qkv.load(folder), tmp_path / "ours")
    again = qkv.load(tmp_path / "ours")
    check_equal(our_logits(again), logits)
    check_equal(our_logits(merge_bundle(again)), logits)


EXPORTS = {
    "bert": ("Bert", "ForMaskedLM", CLASSIFIER, "sequence", ("q", "v")),
    "bert tagger": ("Bert", "Model", "ForTokenClassification", "token", ("k", "down", "o")),
    "roberta": ("Roberta", "ForMaskedLM", CLASSIFIER, "sequence", ("q", "up")),
    "gpt2": ("GPT2", "LMHeadModel", CLASSIFIER, "sequence", ("q", "v", "o")),
    "gpt2 keys": ("GPT2", "LMHeadModel", CLASSIFIER, "sequence", ("k",)),
    "t5": ("T5", "ForConditionalGeneration", "ForConditionalGeneration", None, ("q", "v", "down")),
    "bart": ("Bart", "ForConditionalGeneration", "ForConditionalGeneration", None, ("q", "v")),
    "bart classifier": ("Bart", "ForConditionalGeneration", CLASSIFIER, "sequence", ("q", "v")),
    "vit": ("ViT", "ForImageClassification", "ForImageClassification", "sequence", ("q", "v")),
}


def our_lora_model(base: Path, head: str | None, targets: tuple[str, ...]) -> qkv.ModelBundle:
    labels = None if head is None else ["a", "b", "c"]
    bundle = qkv.load(base, head=head, labels=labels)
    set_features_and_lora(bundle.model, "last", spec.LoraConfig(rank=3, alpha=7.0, target_modules=targets))
    torch.manual_seed(4)
    for name, parameter in bundle.model.named_parameters():
        if name.startswith("head") or "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    bundle.model.eval()
    return bundle


@pytest.mark.parametrize("name", EXPORTS)
def test_our_adapter_gives_our_logits_in_peft(name: str, tmp_path: Path) -> None:
    family, base_kind, kind, head, targets = EXPORTS[name]
    make_model(family, base_kind).save_pretrained(tmp_path / "original")
    bundle = our_lora_model(tmp_path / "original", head, targets)
    qkv.save(bundle, tmp_path / "adapter", "peft")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    base = getattr(transformers, f"{family}{kind}").from_pretrained(tmp_path / "original", num_labels=3)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    check_equal(our_logits(bundle), peft_logits(adapted))
    assert Path(config["base_model_name_or_path"]) == tmp_path / "adapter" / "base"  # no run names another one
    again = qkv.load(tmp_path / "adapter")
    check_equal(our_logits(again), our_logits(bundle))
    if head is not None:
        assert again.model.spec.head.labels == ("a", "b", "c")


def test_an_adapted_embedding_that_the_output_layer_shares_is_refused(tmp_path: Path) -> None:
    base = make_model("GPT2", "LMHeadModel")
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["wte"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(qkv.InputError, match="whose matrix other layers of this model use unchanged"):
        qkv.load(tmp_path / "adapter", base=tmp_path / "base")


def change_config(folder: Path, copy: Path, **values: Any) -> Path:
    """Return a copy of an adapter with other values in its config."""
    copy.mkdir()
    config = json.loads((folder / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | values))
    (copy / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    return copy


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "LORA adapters only"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"r": 0}, "r cannot be 0"),
        ({"r": "8"}, "r cannot be"),
        ({"lora_alpha": 0}, "must be positive"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "no expressions"),
        ({"task_type": "POETRY"}, "task_type"),
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"base_model_name_or_path": "x" * 5000}, "cannot be loaded"),
        ({"base_model_name_or_path": ["x"]}, "base_model_name_or_path"),
    ],
)
def test_an_adapter_that_we_cannot_compute_is_refused(
    adapters: Callable[[str], tuple[Path, Tensor]], tmp_path: Path, values: dict[str, Any], part: str
) -> None:
    folder = change_config(adapters("bert")[0], tmp_path / "copy", **values)
    with pytest.raises(qkv.InputError) as error:
        qkv.load(folder)
    assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 800


def test_the_base_of_an_adapter_can_be_given(adapters: Callable[[str], tuple[Path, Tensor]], tmp_path: Path) -> None:
    folder, logits = adapters("bert")
    moved = change_config(folder, tmp_path / "moved", base_model_name_or_path="elsewhere/lost")
    check_equal(our_logits(qkv.load(moved, base=folder.parent / "base")), logits)
    with pytest.raises(qkv.InputError, match="is a whole model"):
        qkv.load(folder.parent / "base", base=folder)
    with pytest.raises(qkv.InputError, match="no checkpoint in Hugging Face's format"):
        qkv.load(moved, base=folder)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda t, key: t.pop(key), "fit together"),
        (lambda t, key: t.update({key: t[key][:, :-1].contiguous()}), "the base model has"),
        (lambda t, key: t.update({key: t[key].to(torch.int32)}), "floating-point"),
        (lambda t, key: t.update({key: torch.zeros(0, 12)}), "fit together"),
        (
            lambda t, key: t.update({key.replace("A.weight", "magnitude_vector"): t[key].clone()}),
            "plain LoRA",
        ),
        (lambda t, key: t.update({key.replace("query", "other"): t.pop(key)}), "fit together"),
        (lambda t, _: t.clear(), "no LoRA weights"),
    ],
)
def test_damaged_tensors_of_an_adapter_are_refused(
    adapters: Callable[[str], tuple[Path, Tensor]], tmp_path: Path, change: Any, part: str
) -> None:
    folder = change_config(adapters("bert")[0], tmp_path / "copy")
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors, next(key for key in tensors if "query.lora_A" in key))
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(qkv.InputError) as error:
        qkv.load(folder)
    assert part in str(error.value)
