"""Names that users of transformers, PEFT, Lightning, fairseq, JoeyNMT and nanoGPT expect, each with the name here.

They are not accepted, only explained: the error message for an unknown recipe key, option or model family takes the
name from these tables. Imports nothing.
"""

from __future__ import annotations

_LEARNING_RATE, _WARMUP, _BATCH = "train.learning_rate", "train.warmup_steps", "train.batch_size"
_EVERY, _LENGTH = "validation.every_steps", "model.max_length"

RECIPE_KEYS: dict[str, str] = {
    # length of the run, batches
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "n_epochs": "train.epochs",
    "max_epoch": "train.epochs",
    "max_epochs": "train.epochs",
    "epoch": "train.epochs",
    "max_iters": "train.max_steps",
    "max_update": "train.max_steps",
    "max_updates": "train.max_steps",
    "num_train_steps": "train.max_steps",
    "num_steps": "train.max_steps",
    "train_steps": "train.max_steps",
    "total_steps": "train.max_steps",
    "per_device_train_batch_size": _BATCH,
    "per_gpu_train_batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "batchsize": _BATCH,
    "bs": _BATCH,
    "max_sentences": _BATCH,
    "max_tokens": "train.batch_tokens",
    "update_freq": "train.gradient_accumulation_steps",
    "batch_multiplier": "train.gradient_accumulation_steps",
    "accumulate_grad_batches": "train.gradient_accumulation_steps",
    "accumulation_steps": "train.gradient_accumulation_steps",
    "grad_accum": "train.gradient_accumulation_steps",
    "gradient_accumulation": "train.gradient_accumulation_steps",
    # optimizer and schedule
    "lr": _LEARNING_RATE,
    "rate": _LEARNING_RATE,
    "peak_lr": _LEARNING_RATE,
    "learning_rate_init": _LEARNING_RATE,
    "decay": "train.weight_decay",
    "wd": "train.weight_decay",
    "l2": "train.weight_decay",
    "weight_decay_rate": "train.weight_decay",
    "adam_betas": "train.betas",
    "beta1": "train.betas",
    "beta2": "train.betas",
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "eps": "train.adam_epsilon",
    "adam_eps": "train.adam_epsilon",
    "epsilon": "train.adam_epsilon",
    "optim": "train.optimizer",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "scheduler": "train.schedule",
    "scheduling": "train.schedule",
    "warmup": _WARMUP,
    "warmup_iters": _WARMUP,
    "warmup_updates": _WARMUP,
    "num_warmup_steps": _WARMUP,
    "learning_rate_warmup": _WARMUP,
    "warmup_proportion": "train.warmup_ratio",
    "clip_norm": "train.max_grad_norm",
    "clip_grad_norm": "train.max_grad_norm",
    "grad_clip": "train.max_grad_norm",
    "gradient_clip_val": "train.max_grad_norm",
    "gradient_clipping": "train.max_grad_norm",
    "label_smoothing_factor": "train.label_smoothing",
    "smoothing": "train.label_smoothing",
    # precision, memory, logging, saving
    "bf16": "train.precision",
    "fp16": "train.precision",
    "tf32": "train.precision",
    "dtype": "train.precision",
    "torch_dtype": "train.precision",
    "mixed_precision": "train.precision",
    "torch_compile": "train.compile",
    "gradient_checkpointing": "train.activation_checkpointing",
    "checkpoint_activations": "train.activation_checkpointing",
    "fsdp": "train.strategy",
    "ddp": "train.strategy",
    "ema": "train.ema_decay",
    "dataloader_num_workers": "train.num_workers",
    "logging_steps": "train.log_every",
    "logging_freq": "train.log_every",
    "log_interval": "train.log_every",
    "log_every_n_steps": "train.log_every",
    "save_steps": "train.save_every",
    "save_interval": "train.save_every",
    "save_interval_updates": "train.save_every",
    "report_to": "train.callbacks",
    # validation
    "eval_steps": _EVERY,
    "eval_interval": _EVERY,
    "validate_interval": _EVERY,
    "validate_interval_updates": _EVERY,
    "validation_freq": _EVERY,
    "val_check_interval": _EVERY,
    "early_stopping_patience": "validation.patience",
    "early_stopping": "validation.patience",
    "metric_for_best_model": "validation.metric",
    "best_checkpoint_metric": "validation.metric",
    "eval_metric": "validation.metric",
    "max_eval_samples": "validation.max_examples",
    "beam": "validation.num_beams",
    "beam_size": "validation.num_beams",
    "generation_num_beams": "validation.num_beams",
    # the model
    "model_name_or_path": "model.init_from",
    "model_name": "model.init_from",
    "pretrained_model_name_or_path": "model.init_from",
    "checkpoint": "model.init_from",
    "restore_file": "model.init_from",
    "model_type": "model.family",
    "arch": "model.family",
    "n_layer": "model.layers",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "encoder_layers": "model.layers",
    "depth": "model.layers",
    "num_decoder_layers": "model.decoder_layers",
    "n_head": "model.heads",
    "num_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "encoder_attention_heads": "model.heads",
    "n_embd": "model.d_model",
    "hidden_size": "model.d_model",
    "hidden_dim": "model.d_model",
    "embedding_dim": "model.d_model",
    "encoder_embed_dim": "model.d_model",
    "n_inner": "model.d_ff",
    "ff_size": "model.d_ff",
    "ffn_dim": "model.d_ff",
    "dim_feedforward": "model.d_ff",
    "intermediate_size": "model.d_ff",
    "encoder_ffn_embed_dim": "model.d_ff",
    "dropout_rate": "model.dropout",
    "dropout_prob": "model.dropout",
    "hidden_dropout": "model.dropout",
    "hidden_dropout_prob": "model.dropout",
    "attn_dropout": "model.attention_dropout",
    "attention_probs_dropout_prob": "model.attention_dropout",
    "block_size": _LENGTH,
    "context_length": _LENGTH,
    "n_positions": _LENGTH,
    "max_positions": _LENGTH,
    "max_position_embeddings": _LENGTH,
    "max_seq_len": _LENGTH,
    "max_seq_length": _LENGTH,
    "max_sequence_length": _LENGTH,
    "vocabulary_size": "tokenizer.vocab_size",
    "tokenizer_name": "tokenizer.path",
    # data, fine-tuning
    "train_file": "data.train",
    "train_data": "data.train",
    "validation_file": "data.valid",
    "valid_file": "data.valid",
    "dev": "data.valid",
    "test_file": "data.test",
    "validation_split": "data.hold_out.valid",
    "train_test_split": "data.hold_out.valid",
    "test_size": "data.hold_out.test",
    "max_source_positions": "data.max_source_length",
    "max_target_positions": "data.max_target_length",
    "lora_r": "finetune.lora.rank",
    "r": "finetune.lora.rank",
    "lora_alpha": "finetune.lora.alpha",
    "lora_dropout": "finetune.lora.dropout",
    "freeze": "finetune.trainable",
    "freeze_backbone": "finetune.trainable",
    "output_dir": "--output",
    "save_dir": "--output",
    "out_dir": "--output",
    "resume_from_checkpoint": "--resume",
    "random_seed": "seed",
    "manual_seed": "seed",
}
SECTIONS: dict[str, str] = {
    "training": "train",
    "training_args": "train",
    "training_arguments": "train",
    "trainer": "train",
    "optimization": "train",
    "optimizer": "train",
    "dataset": "data",
    "datasets": "data",
    "testing": "test",
    "eval": "validation",
    "evaluation": "validation",
    "architecture": "model",
    "peft": "finetune",
    "lora": "finetune.lora",
}

# options of commands; those that are recipe keys here are found by the name of the key
OPTIONS: dict[str, str] = {
    "beam": "--num-beams",
    "beam_size": "--num-beams",
    "nbest": "--n-best",
    "num_return_sequences": "--n-best",
    "top": "--n-best",
    "lenpen": "--length-penalty",
    "max_length": "--max-new-tokens",
    "max_len": "--max-new-tokens",
    "do_sample": "--sample",
    "gpu": "--device",
    "cpu": "--device",
    "cuda": "--device",
    "out": "--output",
    "output_dir": "--output",
    "output_file": "--output",
    "save_dir": "--output",
    "out_dir": "--output",
    "input": "--file",
    "input_file": "--file",
    "sep": "--delimiter",
    "separator": "--delimiter",
    "text_column": "--text",
    "text_column_name": "--text",
    "label_column": "--label",
    "label_column_name": "--label",
    "target": "--label",
    "dev": "--valid",
    "train": "--data",
    "train_file": "--data",
    "train_data": "--data",
    "validation_file": "--valid",
    "test_file": "--test",
    "model": "--init-from",
    "model_name": "--init-from",
    "model_name_or_path": "--init-from",
    "resume_from_checkpoint": "--resume",
    "hypothesis": "--hyp",
    "predictions": "--hyp",
    "reference": "--ref",
}

# families of transformers that qkv has not -> the family that is most like it
FAMILIES: dict[str, str] = {
    "albert": "bert",
    "camembert": "roberta",
    "convbert": "bert",
    "deberta": "bert",
    "deberta-v2": "bert",
    "deit": "vit",
    "distilbert": "bert",
    "electra": "bert",
    "gpt_neo": "gpt2",
    "gpt_neox": "gpt2",
    "gptj": "gpt2",
    "llama": "gpt2",
    "longformer": "roberta",
    "m2m_100": "marian",
    "mbart": "bart",
    "mistral": "gpt2",
    "mobilebert": "bert",
    "modernbert": "bert",
    "mt5": "t5",
    "opt": "gpt2",
    "pegasus": "bart",
    "qwen2": "gpt2",
    "qwen3": "gpt2",
    "swin": "vit",
    "xlm-roberta": "roberta",
}


def recipe_key_hint(dotted: str) -> str | None:
    """Return the key of a recipe that a foreign key, such as `lr` or `train.lr`, corresponds to; None: not known."""
    section, _, rest = dotted.partition(".")
    if not rest:
        return RECIPE_KEYS.get(_normalize(section)) or SECTIONS.get(_normalize(section))
    key = RECIPE_KEYS.get(_normalize(dotted.rpartition(".")[2]))
    if key is None and section in SECTIONS:
        return f"{SECTIONS[section]}.{rest}"
    return key if key != dotted else None


def option_hint(option: str, known_options: list[str], recipe_key: str | None = None) -> str | None:
    """Return a hint for a foreign option, such as `--output_dir`; None: it is not known.

    Args:
        option: the unknown option.
        known_options: the options of the command.
        recipe_key: the key of a recipe that the option corresponds to, if the command takes KEY=VALUE changes.
    """
    name = _normalize(option.lstrip("-"))
    foreign_key = RECIPE_KEYS.get(name, "")
    option_of_key = "--" + (recipe_key or foreign_key).rpartition(".")[2].replace("_", "-")
    for candidate in ("--" + name.replace("_", "-"), OPTIONS.get(name), option_of_key):
        if candidate in known_options:
            return f"qkv calls it {candidate}"
    return None if recipe_key is None else f"write {recipe_key}=VALUE, without dashes"


def family_hint(family: str) -> str | None:
    """Return the end of a message about a family that is not supported; None: the name is not known at all."""
    nearest = FAMILIES.get(family.lower()) or FAMILIES.get(family.lower().replace("-", "_"))
    return None if nearest is None else f"is not supported; the nearest family is {nearest}"


def _normalize(name: str) -> str:
    return name.lower().replace("-", "_")
