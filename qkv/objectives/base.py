"""The interface of a pretraining objective: how it prepares text, which losses it computes, which models it fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar

from qkv import spec
from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.rng import CounterRNG, Ints
from qkv.data.template_batch import TemplateIds, build_template_ids
from qkv.errors import InputError
from qkv.nn.memory import Memory
from qkv.nn.two_stream import has_two_streams
from qkv.objectives.loss import LossSum
from qkv.objectives.registry import OBJECTIVES
from qkv.recipe.objectives import ObjectiveConfig
from qkv.tokenization.tokenizer import Tokenizer
from qkv.tokenization.vocab_tables import VocabTables, build_vocab_tables

ConfigT = TypeVar("ConfigT", bound=ObjectiveConfig)
Architecture = Literal["encoder", "decoder", "encoder-decoder", "two-stream encoder"]


@dataclass(frozen=True)
class TextContext:
    """The model and the tokenizer that an objective prepares text for."""

    spec: spec.Model
    tokenizer: Tokenizer
    is_packed: bool = False
    """Whether chunks are cut from documents that were joined end to end, with a separator token between them."""
    carries_memory: bool = False
    """Whether chunks are segments of streams, which begin with the BOS token only where a document begins."""

    token_counts: Ints | None = None
    """Number of occurrences of each token in the training text; None: it is streamed."""

    @cached_property
    def vocab_tables(self) -> VocabTables:
        """Tables of the vocabulary that masking and noise need."""
        return build_vocab_tables(self.tokenizer)

    @cached_property
    def template(self) -> TemplateIds:
        """The special tokens that the tokenizer adds to one text."""
        return build_template_ids(self.tokenizer)

    @cached_property
    def pair_template(self) -> TemplateIds:
        """The special tokens that the tokenizer adds to a pair of texts."""
        return build_template_ids(self.tokenizer, pairs=True)

    @cached_property
    def max_input_length(self) -> int:
        """Maximum number of tokens that the model accepts on each side."""
        embeddings = (self.spec.source_embedding, self.spec.target_embedding)
        return min(embedding.max_length for embedding in embeddings if isinstance(embedding, spec.Embedding))


class Objective(ABC, Generic[ConfigT]):
    """A pretraining objective with its settings.

    Subclasses define the class attributes and the abstract methods; `qkv.register.objective` makes one available to
    recipes under a name.
    """

    name: ClassVar[str]
    """Key of the objective in a recipe's `objective` section; set when the objective is registered."""
    config_class: ClassVar[type[ObjectiveConfig]] = ObjectiveConfig
    """Dataclass that validates the objective's settings in a recipe."""
    architectures: ClassVar[frozenset[Architecture]]
    """Architectures of models that the objective can train."""
    inputs_class: ClassVar[type[tuple[Any, ...]]]
    """Named tuple that `prepare` returns; objectives that are mixed in one recipe need different ones."""
    supports_label_smoothing: ClassVar[bool] = False
    """Whether `losses` uses its `label_smoothing` argument."""
    supports_memory: ClassVar[bool] = False
    """Whether it trains models with memory on streams: `losses_with_memory`, and inputs with a field `segments`."""
    updates_in_place: ClassVar[bool] = False
    """Whether `update` changes the weights by itself, instead of an optimizer by the gradients of `losses`."""
    is_likelihood: ClassVar[bool] = True
    """Whether the exponential of the mean loss is a perplexity."""
    segment_overlap: ClassVar[int] = 0
    """Tokens of a segment that the following one repeats: 1 if the last token of a segment is a label only."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses in the log, in the order in which `losses` returns them."""
        return ("loss",)

    @property
    def sentence_pairs(self) -> bool:
        """Whether it trains on pairs of segments, with the model's auxiliary next-sentence head."""
        return False

    def check_model(self, model: spec.Model) -> None:
        """Raise an InputError if the objective cannot train a model."""
        architecture = architecture_of(model)
        if architecture not in self.architectures:
            needed = " or ".join(_with_article(name) for name in sorted(self.architectures))
            fitting = (name for name in OBJECTIVES.names() if architecture in OBJECTIVES.get(name).architectures)
            message = f"{self.name} needs {needed}, and {model.family} is {_with_article(architecture)}"
            raise InputError(f"objective: {message}; try {', '.join(fitting)}")
        if model.head is None or model.head.kind != "lm":
            raise InputError(f"objective: {self.name} needs a head of kind 'lm', which this {model.family} lacks")

    @abstractmethod
    def max_chunk_tokens(self, max_length: int, context: TextContext) -> int:
        """Return the largest number of text tokens in a chunk whose model inputs have at most `max_length` tokens."""

    @abstractmethod
    def prepare(self, batch: ChunkBatch, context: TextContext, rng: CounterRNG) -> Any:
        """Turn a batch of chunks into model inputs with labels, on the host.

        Returns a named tuple of tensors and `Ragged` tensors with a property `num_targets`: the number of targets of
        each loss. Random decisions come from `rng` and the chunks' indices only, so that they do not depend on the
        other chunks of the batch.
        """

    @abstractmethod
    def losses(self, model: Any, inputs: Any, label_smoothing: float = 0.0) -> tuple[LossSum, ...]:
        """Return the sum of each loss over its targets, for inputs that `prepare` made."""

    def update(self, model: Any, inputs: Any, learning_rate: float) -> LossSum:
        """Change the weights by a step of gradient descent, and return the loss of some of the inputs before it."""
        raise NotImplementedError(f"{self.name} has no update of its own")

    def losses_with_memory(
        self,
        model: Any,  # noqa: ARG002
        inputs: Any,  # noqa: ARG002
        memory: Memory,  # noqa: ARG002
        label_smoothing: float = 0.0,  # noqa: ARG002
    ) -> tuple[tuple[LossSum, ...], Memory]:
        """Return the losses of segments that continue a memory, one row per segment, and the memory after them."""
        raise InputError(f"objective: {self.name} does not carry memory; set data.carry_memory to false")

    @abstractmethod
    def sample(self, model: Any, chunk: ChunkBatch, context: TextContext, rng: CounterRNG) -> str:
        """Show in one line what a model in eval mode predicts for a held-out text, given as a batch of one chunk."""


def architecture_of(model: spec.Model) -> Architecture:
    """Return whether a model has an encoder, a decoder or both; an encoder with a query stream is none of these."""
    if model.decoder is None:
        return "two-stream encoder" if has_two_streams(model) else "encoder"
    return "decoder" if model.encoder is None else "encoder-decoder"


def _with_article(architecture: str) -> str:
    return f"an {architecture}" if architecture.startswith("e") else f"a {architecture}"
