"""Old names of recipe keys and values, command-line options and spec fields, each with its new name. Imports nothing.

Old names are refused everywhere; the error messages take the new name from these tables.
"""

from __future__ import annotations

_ERROR_RATES = {"per": "token_error_rate", "wer": "sequence_error_rate"}
_TASK_METRICS = {"exact": "exact_match", "matthews": "matthews_correlation"}
_CORPUS_FORMATS = {"lines": "line_per_document", "blank": "blank_line_separated", "whole": "file_per_document"}
_FEATURE_LAYERS = {"last_four": "concat_last_4", "mix": "scalar_mix"}
_POSITIONS = {"halves": "sinusoid_concat"}
# `classify` and `tag` are not listed: they are aliases, which `qkv.recipe.task_names` resolves
TASK_NAMES = {
    "rate": "regression",
    "label": "multi_label",
    "answer": "question_answering",
    "choose": "multiple_choice",
    "picture": "image_classification",
}

# keyed by the new name of the section, so that recipes that mix old and new names are covered
RECIPE_KEYS: dict[str, dict[str, str]] = {
    "": {"text": "tokenizer", "valid": "validation", "tune": "finetune"},
    "train": {
        "steps": "max_steps",
        "accumulate": "gradient_accumulation_steps",
        "optimiser": "optimizer",
        "paper_rate": "noam_factor",
        "epsilon": "adam_epsilon",
        "warmup": "warmup_steps",
        "smoothing": "label_smoothing",
        "clip": "max_grad_norm",
        "agree": "rdrop_alpha",
        "own": "scheduled_sampling",
        "graph": "cuda_graphs",
        "recompute": "activation_checkpointing",
        "spread": "strategy",
        "ema": "ema_decay",
        "average": "average_checkpoints",
        "workers": "num_workers",
    },
    "model": {
        "from": "init_from",
        "width": "d_model",
        "hidden": "d_ff",
        "decoder_hidden": "decoder_d_ff",
        "spread": "init_std",
        "key": "d_kv",
        "length": "max_length",
        "shared": "share_embeddings",
        "tied": "tie_embeddings",
        "segments": "num_segments",
        "offset": "position_offset",
        "distance": "max_distance",
        "buckets": "num_buckets",
        "biased": "qkv_bias",
        "head_dropout": "classifier_dropout",
        "choice_dropout": "summary_dropout",
        "epsilon": "norm_eps",
        "scale_by_depth": "scale_attn_by_inverse_layer_idx",
        "score": "score_fn",
        "scale": "scale_embedding",
        "image": "image_size",
        "patch": "patch_size",
        "channels": "num_channels",
    },
    "tokenizer": {"tokenizer": "path", "size": "vocab_size", "joint": "joint_vocab"},
    "tokenizer.source": {"size": "vocab_size"},
    "tokenizer.target": {"size": "vocab_size"},
    "validation": {
        "every": "every_steps",
        "examples": "max_examples",
        "tokens": "max_tokens",
        "samples": "num_samples",
        "beams": "num_beams",
        "unseen": "exclude_train_sources",
    },
    "test": {"beams": "num_beams"},
    "data": {
        "source_length": "max_source_length",
        "target_length": "max_target_length",
        "length": "max_length",
        "pieces": "chunking",
        "stream": "streaming",
        "field": "text_field",
        "mix": "datasets",
        "temperature": "mixing_temperature",
        "together": "group_by",
        "too_long": "on_too_long",
        "unknown": "on_unknown",
        "stress": "keep_stress",
    },
    "data.columns": {
        "second": "text_pair",
        "number": "regression",
        "separator": "label_separator",
        "form": "file_type",
        "options": "choices",
        "optional": "answer_optional",
    },
    "data.datasets": {"stress": "keep_stress"},
    "data.datasets.columns": {"form": "file_type"},
    "objective": {"causal": "clm", "masked": "mlm", "denoise": "denoising", "span": "span_corruption"},
    "objective.mlm": {
        "rate": "mask_prob",
        "masked": "mask_token_prob",
        "random": "random_token_prob",
        "whole_words": "whole_word",
    },
    "objective.denoising": {
        "permute": "permute_sentences",
        "rotate": "rotate_prob",
        "delete": "delete_prob",
        "infill": "infill_ratio",
        "mean": "poisson_lambda",
    },
    "objective.span_corruption": {"rate": "noise_density", "mean": "mean_noise_span_length"},
    "finetune": {
        "parts": "trainable",
        "features": "feature_layers",
        "adapters": "lora",
        "layer_decay": "layerwise_lr_decay",
        "language": "lm_loss_weight",
    },
    "finetune.lora": {"scale": "alpha", "matrices": "target_modules"},
    "task": {
        "stride": "doc_stride",
        "longest": "max_answer_length",
        "best": "n_best_size",
        "weights": "class_weights",
        "smoothing": "label_smoothing",
        "positive": "positive_label",
        "mark": "mark_spans",
        "pairs": "text_pairs",
        "too_long": "on_too_long",
        "word": "subword_pooling",
        "deviation": "std",
        "flip": "horizontal_flip",
        "shift": "max_shift",
        "erase": "random_erasing",
    },
}
# keys of `model` whose new name depends on the family, and of `task` whose new name depends on the task
_KEYS_OF_KIND: dict[str, dict[str, str]] = {
    "rnn": {"hidden": "hidden_size"},
    "t5": {"scale": "head_input_scale"},
    "token_classification": {"stride": "window_stride"},
    "question_answering": {"threshold": "null_score_diff_threshold"},
}
# changes of meaning in addition to the new name
_HINTS = {
    "train.rdrop_alpha": "the paper's alpha: twice the old value",
    "train.warmup_steps": "or train.warmup_ratio, a fraction of all steps",
}

RECIPE_VALUES: dict[str, dict[str, str]] = {
    "tokenizer.source.kind": {"symbol": "whitespace"},
    "tokenizer.target.kind": {"symbol": "whitespace"},
    "validation.metric": _ERROR_RATES | _TASK_METRICS,
    "test.metrics": _ERROR_RATES,
    "task.metric": _TASK_METRICS,
    "task": TASK_NAMES,
    "task.name": TASK_NAMES,
    "data.chunking": {"longest": "greedy"},
    "data.format": _CORPUS_FORMATS,
    "objective": RECIPE_KEYS["objective"],
    "finetune.feature_layers": _FEATURE_LAYERS,
    "model.position": _POSITIONS,
}

COMMANDS = {"look": "plot"}
OPTIONS = {
    "--best": "--n-best",
    "--beams": "--num-beams",
    "--limit": "--max-new-tokens",
    "--word": "--subword-pooling",
    "--second": "--text-pair",
    "--special": "--parse-special-tokens",
    "--too-long": "--on-too-long",
    "--unknown": "--on-unknown",
    "--from": "--init-from",
    "--seeds": "--num-seeds",
    "--folds": "--num-folds",
    "--column": "--reader-option",
    "--free": "--free-running",
    "--bootstrap": "--num-resamples",
    "--other": "--baseline",
    "--each": "--per-example",
    "--by-label": "--per-class",
    "--newline": "--sentence-separator",
    "--references": "--multi-reference",
    "--stem": "--use-stemmer",
    "--level": "--confidence",
    "--positive": "--positive-label",
    "--separator": "--label-separator",
    "--mean": "--length-normalize",
    "--examples": "--max-examples",
    "--unit": "--normalize",
    "--merge": "--merge-lora",
    "--size": "--vocab-size",
    "--pair": "--text-pair",
    "--field": "--text-field",
    "--workers": "--num-workers",
    "--vocabulary": "--vocab-size",
}
_OPTIONS_OF_COMMAND = {"prompt": {"--word": "--verbalizer"}}
OPTION_VALUES = {
    "--pool": {"first": "cls"},
    "--layers": {"join": "concat"},
    "--head": {"body": "backbone", "generation": "seq2seq_lm", "lm_and_choice": "double_heads"},
    "--task": TASK_NAMES,
    "--format": _CORPUS_FORMATS,
}

SPEC_TYPES = {
    "Adapters": "LoraConfig",
    "Embed": "Embedding",
    "Patches": "PatchEmbedding",
    "Recurrent": "RecurrentEncoder",
    "Relative": "RelativePositionBias",
    "Stack": "TransformerStack",
}
# keyed by the new name of the class
SPEC_KEYS: dict[str, dict[str, str]] = {
    "Attention": {
        "width": "query_dim",
        "memory": "kv_dim",
        "key": "head_dim",
        "value": "v_head_dim",
        "score": "score_fn",
        "score_width": "score_hidden_dim",
        "project": "use_projections",
        "scale": "score_scale",
    },
    "FeedForward": {"width": "d_model", "hidden": "d_ff"},
    "Norm": {"epsilon": "eps"},
    "Block": {"attention": "self_attention", "cross": "cross_attention"},
    "RelativePositionBias": {"buckets": "num_buckets", "distance": "max_distance"},
    "TransformerStack": {
        "depth": "num_layers",
        "relative": "relative_position_bias",
        "scale_by_depth": "scale_attn_by_inverse_layer_idx",
        "scaled_start": "scaled_residual_init",
    },
    "RecurrentEncoder": {"width": "d_model", "hidden": "hidden_size"},
    "RecurrentDecoder": {"width": "d_model", "memory": "encoder_dim", "hidden": "hidden_size"},
    "Embedding": {
        "vocabulary": "vocab_size",
        "width": "d_model",
        "length": "max_length",
        "offset": "position_offset",
        "padding": "padding_idx",
        "segments": "num_segments",
        "scale": "scale_by_sqrt_dim",
    },
    "PatchEmbedding": {"image": "image_size", "patch": "patch_size", "channels": "num_channels", "width": "d_model"},
    "Head": {
        "width": "d_model",
        "outputs": "num_outputs",
        "joined": "num_concat_layers",
        "tied": "tie_embeddings",
        "dense": "dense_activation",
        "scale": "input_scale",
        "offset": "final_logits_bias",
        "dropout_first": "dropout_before_dense",
        "several": "multi_label",
        "word": "subword_pooling",
    },
    "LoraConfig": {"scale": "alpha", "matrices": "target_modules"},
    "Model": {
        "source": "source_embedding",
        "target": "target_embedding",
        "beside": "aux_head",
        "shared": "share_embeddings",
        "start": "bos_id",
        "end": "eos_id",
        "pad": "pad_id",
        "never": "suppress_tokens",
        "spread": "init_std",
        "read": "feature_layers",
        "adapters": "lora",
    },
}
SPEC_VALUES = {"Embedding.position": _POSITIONS, "Model.feature_layers": _FEATURE_LAYERS}


def renamed_recipe_key(dotted: str, kind: str | None = None) -> str | None:
    """Return the new name of a recipe key, such as `train.agree`, or None if it was not renamed.

    `kind` is the family for keys of `model` and the task for keys of `task`; some names depend on it.
    """
    section, names = "", []
    for name in dotted.split("."):
        of_kind = _KEYS_OF_KIND.get(kind or "", {}) if section in ("model", "task") else {}
        names.append(of_kind.get(name) or RECIPE_KEYS.get(section, {}).get(name, name))
        section = ".".join(names)
    return section if section != dotted else None


def renamed_recipe_key_message(dotted: str, kind: str | None = None) -> str | None:
    """Return a message with the new name of a recipe key, or None if it was not renamed."""
    new_key = renamed_recipe_key(dotted, kind)
    hint = f" ({_HINTS[new_key]})" if new_key in _HINTS else ""
    return None if new_key is None else f"{dotted} is now {new_key}{hint}"


def renamed_value(key: str, value: object) -> str | None:
    """Return the new name of a value, or None if it was not renamed.

    `key` is a recipe key, an option (`--pool`) or a spec field (`Embedding.position`).
    """
    values = RECIPE_VALUES.get(renamed_recipe_key(key) or key) or OPTION_VALUES.get(key) or SPEC_VALUES.get(key) or {}
    return values.get(value) if isinstance(value, str) else None


def renamed_value_message(key: str, value: object) -> str | None:
    """Return a message with the new name of a value, or None if it was not renamed."""
    new_value = renamed_value(key, value)
    return None if new_value is None else f"{key} '{value}' is now '{new_value}'"


def renamed_option(option: str, command: str | None = None) -> str | None:
    """Return the new name of an option of a command, or None if it was not renamed."""
    return _OPTIONS_OF_COMMAND.get(command or "", {}).get(option) or OPTIONS.get(option)


def renamed_command(command: str) -> str | None:
    """Return the new name of a command, or None if it was not renamed."""
    return COMMANDS.get(command)


def renamed_spec_type(name: str) -> str | None:
    """Return the new name of a spec class (`type` in spec.json), or None if it was not renamed."""
    return SPEC_TYPES.get(name)


def renamed_spec_key(type_name: str, key: str) -> str | None:
    """Return the new name of a field of a spec class (old or new name), or None if it was not renamed."""
    return SPEC_KEYS.get(SPEC_TYPES.get(type_name, type_name), {}).get(key)
