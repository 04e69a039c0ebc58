"""transformers' Trainer as a row of `finetune.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.encoder import quiet_transformers
from bench.labeled import WARMUP_STEPS, Setup


def trainer_row(setup: Setup, seed: int, grouped: bool = False, compiled: bool = False) -> tuple[float, float]:
    """Return real tokens per second after the warm-up, and accuracy."""
    transformers, device = quiet_transformers(), setup.options.device
    model = transformers.BertForSequenceClassification.from_pretrained(
        setup.initial_model(seed), dtype=torch.float32, attn_implementation="sdpa"
    )
    pad = transformers.DataCollatorWithPadding(setup.tokenizer, pad_to_multiple_of=8 if device.type == "cuda" else None)

    class Timer(transformers.TrainerCallback):  # type: ignore[misc]
        start = rate = 0.0
        tokens = 0

        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == WARMUP_STEPS:
                _synchronize(device)
                self.start, self.tokens = time.perf_counter(), 0

        def on_train_end(self, *_args: Any, **_: Any) -> None:
            _synchronize(device)
            self.rate = self.tokens / (time.perf_counter() - self.start)

    timer = Timer()

    class CountingTrainer(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            timer.tokens += inputs.pop(_NUM_TOKENS)
            return super().compute_loss(model, inputs, *args, **kwargs)

    def collate(features: list[dict[str, Any]]) -> dict[str, Any]:
        return {**pad(features), _NUM_TOKENS: sum(len(feature["input_ids"]) for feature in features)}

    args = arguments(setup, seed, grouped, compiled)
    trainer = CountingTrainer(
        model=model, args=args, train_dataset=setup.train_features, data_collator=collate, callbacks=[timer]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return timer.rate, _accuracy(setup, model)


_NUM_TOKENS = "num_tokens"  # key of a batch for its number of real tokens


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def arguments(setup: Setup, seed: int, grouped: bool, compiled: bool) -> Any:
    options, arguments_class = setup.options, quiet_transformers().TrainingArguments
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
        del os.environ[name]  # set by a compiled row; they would compile the next one
    sampling: dict[str, Any] = {"train_sampling_strategy": "group_by_length" if grouped else "random"}
    if "train_sampling_strategy" not in arguments_class.__dataclass_fields__:  # the name in older versions
        sampling = {"group_by_length": grouped}
    return arguments_class(
        **sampling,
        output_dir=str(setup.folder / "trainer"),
        seed=seed,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.rate,
        lr_scheduler_type="linear",
        warmup_steps=round(0.1 * options.steps),
        weight_decay=0.01,
        max_grad_norm=1.0,
        bf16=options.device.type == "cuda",
        use_cpu=options.device.type == "cpu",
        torch_compile=compiled,
        dataloader_num_workers=options.their_workers,
        dataloader_persistent_workers=options.their_workers > 0,
        remove_unused_columns=False,  # keeps the number of tokens
        dataloader_pin_memory=options.device.type == "cuda",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_nan_inf_filter=False,  # it would wait for the GPU in every step
    )


@torch.inference_mode()
def _accuracy(setup: Setup, model: Any) -> float:
    features = sorted(setup.encoded(setup.test), key=lambda feature: len(feature["input_ids"]))
    num_correct = 0
    for start in range(0, len(features), 64):
        batch = features[start : start + 64]
        labels = torch.tensor([feature["labels"] for feature in batch])
        num_correct += int((their_logits(setup, model, batch).argmax(-1) == labels).sum())
    return num_correct / len(features)


@torch.inference_mode()
def their_logits(setup: Setup, model: Any, features: Sequence[dict[str, Any]]) -> torch.Tensor:
    inputs = setup.tokenizer.pad([{"input_ids": feature["input_ids"]} for feature in features], return_tensors="pt")
    logits: torch.Tensor = model.eval()(**inputs.to(model.device)).logits
    return logits.float().cpu()
