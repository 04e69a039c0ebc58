"""transformers' Trainer as a row of `finetune.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.encoder import quiet_transformers
from bench.labelled import WARM, Shop


def trainer_row(shop: Shop, seed: int, grouped: bool = False, compiled: bool = False) -> tuple[float, float]:
    """Real tokens a second behind the warm-up, and accuracy."""
    transformers, device = quiet_transformers(), shop.options.device
    kind, start = transformers.BertForSequenceClassification, shop.start(seed)
    model = kind.from_pretrained(start, dtype=torch.float32, attn_implementation="sdpa")
    pad = transformers.DataCollatorWithPadding(shop.tokeniser, pad_to_multiple_of=8 if device.type == "cuda" else None)

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        began = rate = 0.0
        tokens = 0

        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == WARM:
                _wait(device)
                self.began, self.tokens = time.perf_counter(), 0

        def on_train_end(self, *_args: Any, **_: Any) -> None:
            _wait(device)
            self.rate = self.tokens / (time.perf_counter() - self.began)

    timer = Clock()

    class Counting(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: dict[str, Any], *others: Any, **named: Any) -> Any:
            timer.tokens += inputs.pop(_REAL)
            return super().compute_loss(model, inputs, *others, **named)

    def collate(some: list[dict[str, Any]]) -> dict[str, Any]:
        return {**pad(some), _REAL: sum(len(one["input_ids"]) for one in some)}

    given = arguments(shop, seed, grouped, compiled)
    trainer = Counting(model=model, args=given, train_dataset=shop.asked, data_collator=collate, callbacks=[timer])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return timer.rate, _accuracy(shop, model)


_REAL = "real"  # what the collator says of a batch beside its tensors


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def arguments(shop: Shop, seed: int, grouped: bool, compiled: bool) -> Any:
    options, kind = shop.options, quiet_transformers().TrainingArguments
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
        del os.environ[name]  # what a compiled row leaves there would compile the next one
    sampling: dict[str, Any] = {"train_sampling_strategy": "group_by_length" if grouped else "random"}
    if "train_sampling_strategy" not in kind.__dataclass_fields__:  # what it was called before
        sampling = {"group_by_length": grouped}
    return kind(
        **sampling,
        output_dir=str(shop.folder / "trainer"),
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
        remove_unused_columns=False,  # the collator's count is one
        dataloader_pin_memory=options.device.type == "cuda",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_nan_inf_filter=False,  # it would wait for the GPU in every step
    )


@torch.inference_mode()
def _accuracy(shop: Shop, model: Any) -> float:
    asked = sorted(shop.encoded(shop.test), key=lambda one: len(one["input_ids"]))
    right = 0
    for begin in range(0, len(asked), 64):
        some = asked[begin : begin + 64]
        right += int((their_logits(shop, model, some).argmax(-1) == torch.tensor([o["labels"] for o in some])).sum())
    return right / len(asked)


@torch.inference_mode()
def their_logits(shop: Shop, model: Any, some: Sequence[dict[str, Any]]) -> torch.Tensor:
    given = shop.tokeniser.pad([{"input_ids": one["input_ids"]} for one in some], return_tensors="pt")
    logits: torch.Tensor = model.eval()(**given.to(model.device)).logits
    return logits.float().cpu()
