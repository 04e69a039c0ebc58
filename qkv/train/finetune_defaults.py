"""Settings of fine-tuning for a dataset and a model, chosen by the study in docs/results.md (`bench/defaults.py`).

A text model that is fine-tuned takes about 500 steps of at most 64 examples, in 3 to 30 epochs, and keeps the weights
of the last one: small sets need enough steps (Mosbach et al. 2021; Zhang et al. 2021), and once the learning rate has
decayed to zero, a small validation set chooses worse than the end of the run does. The new head learns 30 times as fast
as the backbone (Howard & Ruder 2018), whose rate is 2e-4 for small models and 5e-5 for larger ones. If only the head is
trained, it reads the mean of all tokens, with a rate of 1e-2; sentence encoders keep their own pooling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from qkv import spec
from qkv.checkpoints.model_folder import read_spec
from qkv.checkpoints.sentence_encoder import sentence_pooling
from qkv.data.examples import MultipleChoiceExample
from qkv.nn.construction import build_on_meta
from qkv.recipe.model_section import model_config
from qkv.recipe.schema import FinetuneRecipe
from qkv.tasks.base import get_task

_STEPS, _EPOCH_RANGE = 500, (3, 30)
_MAX_FROZEN_EPOCHS = 50  # a frozen backbone runs once, and its head is cheap
_SMALL_MODEL = 50_000_000  # parameters below which a model is trained with a larger learning rate
_SMALL_RATE, _LARGE_RATE, _FROZEN_RATE = 2e-4, 5e-5, 1e-2
_HEAD_LR_FACTOR = 30
_LORA_LR_FACTOR = 10  # LoRA matrices start at zero, too
_MAX_BATCH_TOKENS, _EXAMPLES_PER_BATCH, _MIN_STEPS_PER_EPOCH = 2048, 64, 10
_TEMPLATE_ROOM = 64  # more tokens than any template adds
_CHARS_PER_TOKEN, _TEMPLATE_TOKENS = 4, 2
# models of images, and those from random weights: not part of the study
_EXAMPLES_TO_SEE, _NEW_EPOCH_RANGE, _NEW_RATE = 60_000, (3, 20), 3e-4


class FinetuneDefaults(NamedTuple):
    """Defaults of three sections of a recipe."""

    train: dict[str, Any]
    finetune: dict[str, Any]
    validation: dict[str, Any]


_OPTIMIZER = {
    "betas": [0.9, 0.999],
    "adam_epsilon": 1e-8,
    "weight_decay": 0.01,
    "schedule": "linear",
    "warmup_ratio": 0.1,
    "max_grad_norm": 1.0,
}


def finetune_defaults(recipe: FinetuneRecipe, train_examples: Sequence[Any]) -> FinetuneDefaults:
    """Return the settings for a recipe's model and training examples."""
    init_from, task = recipe.model.get("init_from"), get_task(recipe.task["name"])
    if init_from is None or task.modality == "image":
        return _unstudied_defaults(recipe, train_examples)
    model_spec = read_spec(str(init_from))
    num_parameters = sum(p.numel() for p in build_on_meta(model_spec).parameters())
    finetune, rate = recipe.finetune, _SMALL_RATE if num_parameters < _SMALL_MODEL else _LARGE_RATE
    head_lr_factor, max_epochs = _HEAD_LR_FACTOR, _EPOCH_RANGE[1]
    if finetune.lora is not None:
        rate, head_lr_factor = rate * _LORA_LR_FACTOR, _HEAD_LR_FACTOR // _LORA_LR_FACTOR
    elif finetune.backbone_frozen:
        rate, head_lr_factor, max_epochs = _FROZEN_RATE, 1, _MAX_FROZEN_EPOCHS
    batch_tokens = default_batch_tokens(train_examples)
    epochs = round(_STEPS * batch_tokens / max(1, sum(map(_estimate_tokens, train_examples))))
    train = {"epochs": min(max(epochs, _EPOCH_RANGE[0]), max_epochs), "batch_tokens": batch_tokens}
    head = {"head_lr_factor": float(head_lr_factor)} if head_lr_factor != 1 else {}
    if task.head_kind in ("sequence", "choice"):
        head |= _pooling_default(recipe, model_spec)
    return FinetuneDefaults(train | {"learning_rate": rate} | _OPTIMIZER, head, {"keep": "last"})


def _pooling_default(recipe: FinetuneRecipe, model_spec: spec.Model) -> dict[str, Any]:
    if model_spec.decoder is not None or not isinstance(model_spec.encoder, spec.TransformerStack):
        return {}
    pooling: str | None = sentence_pooling(str(recipe.model["init_from"]))
    is_frozen = recipe.finetune.backbone_frozen and recipe.finetune.lora is None
    pooling = pooling or ("mean" if is_frozen else None)
    return {} if pooling is None else {"pooling": pooling}


def _unstudied_defaults(recipe: FinetuneRecipe, train_examples: Sequence[Any]) -> FinetuneDefaults:
    """Return the settings for a model of images or from random weights."""
    init_from, num_examples = recipe.model.get("init_from"), len(train_examples)
    input_config: Any = model_config(recipe) if init_from is None else read_spec(str(init_from)).source_embedding
    batch_tokens = default_batch_tokens(train_examples, _MAX_BATCH_TOKENS)
    # another kind of model is refused when the run starts
    if get_task(recipe.task["name"]).modality == "image" and _reads_images(input_config):
        batch_tokens = _image_batch_tokens(num_examples, (input_config.image_size // input_config.patch_size) ** 2)
    epochs = min(max(round(_EXAMPLES_TO_SEE / max(1, num_examples)), _NEW_EPOCH_RANGE[0]), _NEW_EPOCH_RANGE[1])
    rate = _NEW_RATE if init_from is None else _image_rate(str(init_from))
    rate *= 10 if recipe.finetune.backbone_frozen else 1
    train = {"epochs": epochs, "batch_tokens": batch_tokens, "learning_rate": rate}
    return FinetuneDefaults(train | _OPTIMIZER, {}, {"patience": 3})


def _image_rate(init_from: str) -> float:
    num_parameters = sum(p.numel() for p in build_on_meta(read_spec(init_from)).parameters())
    return _NEW_RATE if num_parameters < 20_000_000 else _LARGE_RATE


def _reads_images(input_config: Any) -> bool:
    return hasattr(input_config, "patch_size")  # a spec, or the config of a family


def _image_batch_tokens(num_images: int, num_patches: int) -> int:
    """Return the tokens per step of images with this many patches and one further token each."""
    return min(_EXAMPLES_PER_BATCH, max(1, num_images // _MIN_STEPS_PER_EPOCH)) * (num_patches + 1)


def default_batch_tokens(examples: Sequence[Any], max_examples: int = _EXAMPLES_PER_BATCH) -> int:
    """Return the tokens per step: about `max_examples`, at least the longest one, and several steps per epoch.

    Tokens are estimated from characters, before there is a tokenizer: about four per token, and at least one.
    """
    max_length = max((_num_chars(example) for example in examples), default=0) + _TEMPLATE_ROOM
    if max_length > _MAX_BATCH_TOKENS:
        return _MAX_BATCH_TOKENS
    num_tokens = sum(map(_estimate_tokens, examples))
    batch_tokens = num_tokens * min(1 / _MIN_STEPS_PER_EPOCH, max_examples / max(1, len(examples)))
    return min(_MAX_BATCH_TOKENS, max(max_length, int(batch_tokens)))


def _num_chars(example: Any) -> int:
    """Return the characters of an example; each choice is read together with the context."""
    num_chars = sum(map(len, example.iter_texts()))
    if not isinstance(example, MultipleChoiceExample):
        return num_chars
    choices = sum(map(len, example.choices))
    return (num_chars - choices) * len(example.choices) + choices


def _estimate_tokens(example: Any) -> float:
    return _num_chars(example) / _CHARS_PER_TOKEN + _TEMPLATE_TOKENS
