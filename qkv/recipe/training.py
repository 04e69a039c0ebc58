"""The recipe section `train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Len

from qkv.errors import InputError
from qkv.recipe.fields import (
    STRICT,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    WorkerCount,
)
from qkv.recipe.registries import CALLBACKS, SCHEDULES

_DEFAULT_WARMUP_RATIO, _MAX_DEFAULT_WARMUP = 0.1, 400  # of all steps; steps

DEFAULT_BATCH_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimization: length of the run, batches, optimizer, schedule, regularization, precision, checkpoints."""

    max_steps: PositiveInt | None = None
    """Number of optimizer steps. Set this or `epochs`."""
    epochs: PositiveFloat | None = None
    """Number of passes over the training data, instead of `max_steps`; not for streamed text, whose size is unknown."""
    batch_tokens: PositiveInt | None = None
    """Tokens per step, without padding, for pairs of source and target together; 4096 if `batch_size` is not set."""
    batch_size: PositiveInt | None = None
    """Examples per step (texts, pairs, images or chunks of text), instead of `batch_tokens`."""
    gradient_accumulation_steps: PositiveInt = 1
    """Number of micro-batches that a batch is split into. The gradient does not depend on it."""
    optimizer: Literal["adam", "adamw", "sgd", "nt_asgd"] = "adamw"
    """Optimizer: `adam`, `adamw` (decoupled weight decay), `sgd`, or `nt_asgd`: SGD, then its mean (AWD-LSTM)."""
    nonmonotone: PositiveInt = 5
    """Validations that `nt_asgd` waits for an improvement before it begins to average the weights."""
    learning_rate: NonNegativeFloat = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    noam_factor: PositiveFloat | None = None
    """Instead of `learning_rate`: the peak is this factor times (d_model · warmup_steps)^-0.5 (Vaswani et al. 2017)."""
    betas: Annotated[list[Fraction], Len(2, 2)] = field(default_factory=lambda: [0.9, 0.98])
    """Decay rates of Adam's first and second moments."""
    adam_epsilon: PositiveFloat = 1e-9
    """Constant added to the denominator of Adam's update."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices; biases, norms and other vectors have none."""
    schedule: str = "inverse_sqrt"
    """After the warm-up: `inverse_sqrt`, `linear`, `slanted_triangular`, `cosine`, `constant`, or a registered name."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warm-up; if neither this nor `warmup_ratio` is set, a tenth of all steps, at most 400."""
    warmup_ratio: Fraction | None = None
    """Warm-up as a fraction of all steps, instead of `warmup_steps`."""
    label_smoothing: Fraction = 0.0
    """Probability mass that label smoothing spreads over the other classes or tokens."""
    max_grad_norm: PositiveFloat | None = None
    """Gradients are clipped to this global norm; not clipped if unset."""
    rdrop_alpha: NonNegativeFloat = 0.0
    """Weight alpha of the KL term between two passes with different dropout (R-Drop, Liang et al. 2021)."""
    scheduled_sampling: Probability = 0.0
    """Probability with which a recurrent decoder reads its own prediction instead of the reference token."""
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    """Numeric precision; `auto` is bf16 autocast on a GPU and float32 on a CPU."""
    compile: bool = False
    """Compile the model's blocks with torch.compile."""
    cuda_graphs: bool = True
    """On one GPU, replay each step as a CUDA graph: pairs, texts with labels, and compiled batches of equal shape."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: replicate the model (`ddp`) or shard it (`fsdp`)."""
    deterministic: bool = False
    """Use deterministic GPU kernels, so that resume is bit-exact; slower."""
    ema_decay: Fraction = 0.0
    """Decay of the exponential moving average of the weights; if set, the EMA weights are validated and saved."""
    average_checkpoints: PositiveInt = 1
    """Also evaluate the mean of this many last checkpoints and keep it if it is better."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints; by default a checkpoint is written at each validation."""
    keep_checkpoint: bool = False
    """Keep the checkpoint of a finished run, so that it can be extended exactly; 3 to 5 times the model's size."""
    log_every: PositiveInt = 50
    """Steps between training records in the log."""
    num_workers: WorkerCount = 0
    """Threads that prepare batches ahead of the training loop."""
    callbacks: list[str] = field(default_factory=list)
    """Names of registered callbacks that are called at steps, validations and checkpoints."""
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if self.max_steps is None and self.epochs is None:
            raise ValueError("'max_steps' is missing; set max_steps or epochs")
        if self.max_steps is not None and self.epochs is not None:
            raise ValueError("max_steps and epochs are both set; set one of them")
        if self.batch_tokens is not None and self.batch_size is not None:
            raise ValueError("batch_tokens and batch_size are both set; set one of them")
        if self.batch_tokens is None and self.batch_size is None:
            object.__setattr__(self, "batch_tokens", DEFAULT_BATCH_TOKENS)  # frozen; saved with the run
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("warmup_steps and warmup_ratio are both set; set one of them")
        try:
            for registry, names in ((SCHEDULES, [self.schedule]), (CALLBACKS, self.callbacks)):
                for name in names:
                    if name not in registry:
                        registry.get(name)
        except InputError as error:
            raise ValueError(str(error)) from None

    def tokens_per_step(self, example_length: int) -> int:
        """Return the tokens per step of examples of a length."""
        return self.batch_tokens if self.batch_tokens is not None else (self.batch_size or 1) * example_length

    def warmup_steps_of(self, max_steps: int) -> int:
        """Return the number of warm-up steps of a run of `max_steps` steps."""
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * max_steps)
        if self.warmup_steps is not None:
            return self.warmup_steps
        return min(_MAX_DEFAULT_WARMUP, max(1, round(_DEFAULT_WARMUP_RATIO * max_steps)))
