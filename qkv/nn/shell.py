"""The interface that all model shells share (`Model`), and the parts of it that do not depend on the shell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from qkv.nn.bag_of_words import BagOfWords
from qkv.nn.bilm import BiLM
from qkv.nn.frontend import FrontEnd, RawInput
from qkv.nn.heads import Head
from qkv.nn.kv_cache import source_rows
from qkv.nn.layer_mix import concat_last_layers, make_scalar_mix, num_concat_layers
from qkv.nn.lora import LORA_PARAMETERS
from qkv.nn.memory import Memory
from qkv.nn.ragged import PooledToken, Ragged
from qkv.nn.recurrent import RecurrentEncoder, RecurrentState
from qkv.nn.recurrent_stack import RecurrentStack
from qkv.nn.span_head import ConditionalSpanHead
from qkv.nn.stack import EncoderOutput, Stack, StackState

HEAD_MODULES = ("head", "aux_head", "scalar_mix")  # modules that are not part of the backbone


@dataclass
class DecoderState:
    """State of a decoder between two steps."""

    layer_states: StackState | RecurrentState
    position: Tensor  # [R] of the next token of each row

    def reorder(self, indices: Tensor) -> None:
        """Let row i continue from row indices[i]; both must belong to the same source (beam search)."""
        self.layer_states.reorder(indices)

    def merge(self, kept: Tensor, other: DecoderState | None, rows_per_source: int) -> None:
        """Keep the sources at `kept` [S], which have `rows_per_source` adjacent rows each, and append those of `other`.

        Finished sources leave a batch and new ones enter it between two steps.
        """
        self.layer_states.merge(kept, None if other is None else other.layer_states, rows_per_source)  # type: ignore[arg-type]  # of one decoder
        positions = self.position[source_rows(kept, rows_per_source)]
        self.position = positions if other is None else torch.cat([positions, other.position])

    def watch_attention(self) -> None:
        """Let each step leave its attention over the source in `attention_weights`."""
        if self.layer_states.watchable_kv is None:
            raise InputError("this model has no attention over a source, so it has no alignments and no coverage")
        self.layer_states.watchable_kv.watched = True

    def attention_weights(self) -> Tensor | None:
        """Return the watched attention of the last step, the mean over heads; None: it is not watched.  # [R, M]"""
        kv = self.layer_states.watchable_kv
        return None if kv is None else kv.weights


class Model(nn.Module, ABC):
    """Interface of all shells; callers need not know which one they have."""

    continues_input: bool = False  # decoder-only: generation continues the input, and hidden states are causal
    is_encoder_decoder: bool = False  # the output is a second sequence, which attends to the encoded input
    backbone_frozen: bool = False  # the backbone gets no gradient and runs without dropout
    head: Head | None
    aux_head: Head | None

    def __init__(self, s: spec.Model):
        super().__init__()
        self.spec = s
        self.scalar_mix = make_scalar_mix(s)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    @abstractmethod
    def front_end(self) -> FrontEnd:
        """Module that reads the model's input."""

    @property
    @abstractmethod
    def input_stack(self) -> Stack | RecurrentEncoder | RecurrentStack | BagOfWords | BiLM:
        """Layers that read the model's input: the encoder, or the decoder of a decoder-only model."""

    @property
    def max_input_length(self) -> int:
        """Maximum length of an input in tokens or patches."""
        return self.front_end.max_length

    @property
    def has_memory(self) -> bool:
        """Whether the model carries memory from one segment of a text to the next (`forward_with_memory`)."""
        return self.spec.has_memory

    def initial_memory(self, num_streams: int) -> Memory:  # noqa: ARG002
        """Return the memory of texts before their first token."""
        raise self._no_memory()

    def forward_with_memory(
        self,
        source: Ragged,  # noqa: ARG002
        memory: Memory,  # noqa: ARG002
        positions: Tensor | None = None,  # noqa: ARG002
        *,
        return_logits: bool = True,  # noqa: ARG002
    ) -> tuple[Tensor, Memory]:
        """Read one segment per text and return the output of `forward` and the memory for the following segments.

        Sequence i of `source` continues row i of `memory`. Gradients flow into the memory unless it is detached.
        """
        raise self._no_memory()

    def _no_memory(self) -> InputError:
        return InputError(f"{self.spec.family}: this model has no memory; it reads each text as a whole")

    @property
    def is_generative(self) -> bool:
        """Whether the model generates text: a decoder with a language model head."""
        return self.spec.decoder is not None and self.spec.head is not None and self.spec.head.kind == "lm"

    def embed_inputs(self, source: RawInput, token_type_ids: Tensor | None = None) -> Ragged:
        """Return the input of the first layer: embedded token ids [T], or images [B, channels, side, side]."""
        return self.front_end(source, token_type_ids)

    @abstractmethod
    def hidden_states(self, source: RawInput, token_type_ids: Tensor | None = None) -> EncoderOutput:
        """Return the hidden states that the head reads.

        An encoder-decoder gives its decoder the source shifted right by one token, as BART and T5 do for
        classification.
        """

    @abstractmethod
    def logits(self, source: RawInput, positions: Tensor | None = None, token_type_ids: Tensor | None = None) -> Tensor:
        """Return the head's logits for an input, or only those of the tokens at `positions` of the packed batch.

        Like `forward`, but with the same arguments for every shell. Returns hidden states if the model has no head.
        """

    def max_new_tokens(self, source_lengths: Sequence[int], requested: int | None = None) -> list[int]:  # noqa: ARG002
        """Return the maximum output length for each source; it does not depend on the rest of the batch."""
        raise InputError(f"{self.spec.family}: this model does not generate text; generation needs a decoder")

    def prefill(
        self,
        source: RawInput | EncoderOutput,  # noqa: ARG002
        rows_per_source: int,  # noqa: ARG002
        max_new_tokens: int,  # noqa: ARG002
        *,
        watch_attention: bool = False,  # noqa: ARG002
    ) -> tuple[Tensor, DecoderState]:
        """Read the sources and return the logits of the first generated token, with the state for `step`.

        Each source gets `rows_per_source` adjacent rows, and each row space for `max_new_tokens` tokens. The source of
        an encoder-decoder may be encoded already. For `watch_attention` see `DecoderState.watch_attention`.
        # [B * rows_per_source, vocabulary]
        """
        raise InputError(f"{self.spec.family}: this model does not generate text; generation needs a decoder")

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:  # noqa: ARG002
        """Append one token per row and return the logits of the next one.  # [R] -> [R, vocabulary]"""
        raise InputError(f"{self.spec.family}: this model does not generate text; generation needs a decoder")

    def forward_with_aux_head(
        self,
        source: RawInput,
        token_type_ids: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        return_logits: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of both heads (BERT pretraining, GPT fine-tuning).

        `positions` and `return_logits` apply to the first head as in `forward`.
        """
        if self.head is None or self.aux_head is None:
            raise InputError(f"{self.spec.family}: this model has only one head")
        hidden = self.hidden_states(source, token_type_ids).hidden
        aux_logits: Tensor = self.aux_head(hidden)
        return self._apply_head(hidden, positions, return_logits), aux_logits

    def forward_with_hidden_states(self, source: RawInput, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the head's logits and all hidden states [T, width], for an auxiliary language model loss."""
        assert self.head is not None
        hidden = self.hidden_states(source).hidden
        return self._apply_head(hidden, positions, True), hidden.values

    def tie_weights(self) -> None:
        """Share the parameters that the spec ties; call it again after weights were replaced."""
        if self.spec.head is not None and self.spec.head.tie_embeddings:
            assert self.head is not None
            if self.head.adaptive_softmax is not None:
                self._tie_clusters(self.head.adaptive_softmax)
                return
            assert self.head.linear is not None
            weight = self._output_embedding_weight()
            assert weight is not None  # build_heads refuses others
            self.head.linear.weight = weight

    def _tie_clusters(self, adaptive_softmax: AdaptiveSoftmax) -> None:
        tokens = getattr(self.front_end, "tokens", None)
        assert isinstance(tokens, AdaptiveEmbedding)  # `check_model` refuses others
        assert self.spec.head is not None
        adaptive_softmax.tie(tokens, self.spec.head.tie_projections)

    def _output_embedding_weight(self) -> Tensor | None:
        """Return the embedding matrix that a tied head uses."""
        return self.front_end.token_weight

    def freeze_backbone(self) -> None:
        """Freeze the backbone: only the heads, and LoRA parameters if present, stay trainable.

        Without LoRA no gradient flows through the backbone, so it runs in eval mode and stores no activations.
        """
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_head_or_lora(name))
        self.backbone_frozen = self.spec.lora is None
        self.train(self.training)

    def train(self, mode: bool = True) -> Model:
        """Set training mode; a frozen backbone stays in eval mode."""
        super().train(mode)
        for name, child in self.named_children():
            if self.backbone_frozen and name not in HEAD_MODULES:
                child.eval()
        return self

    def _run_backbone(
        self,
        stack: nn.Module,
        x: Ragged,
        encoder_output: EncoderOutput | None = None,
        pooled_token: PooledToken | None = None,
    ) -> EncoderOutput:
        """Return the head's input; with `pooled_token`, only this token of each sequence where that is cheaper."""
        if self.spec.feature_layers == "last":
            if pooled_token is not None and isinstance(stack, Stack):
                return as_encoder_output(stack(x, encoder_output, pooled_token=pooled_token))
            return as_encoder_output(stack(x) if encoder_output is None else stack(x, encoder_output))
        assert isinstance(stack, Stack | BiLM)  # make_scalar_mix refuses other recurrent backbones
        layers = stack.all_hidden_states(x, encoder_output)
        return EncoderOutput(
            x.with_values(concat_last_layers(layers) if self.scalar_mix is None else self.scalar_mix(layers))
        )

    def _apply_head(self, hidden: Ragged, positions: Tensor | None, return_logits: bool) -> Tensor:
        assert self.head is not None
        if positions is not None and not self.head.spec.is_token_level:
            raise InputError(f"a head of kind '{self.head.spec.kind}' reads whole sequences; leave out positions")
        hidden = hidden.to_tokens() if self.head.spec.is_token_level else hidden
        selected = hidden if positions is None else hidden.values[positions]
        output: Tensor = self.head(selected) if return_logits else self.head.compute_features(selected)
        return output


def is_head_or_lora(name: str) -> bool:
    """Return whether a parameter belongs to a head or to LoRA rather than to the pretrained backbone."""
    root, _, rest = name.partition(".")
    return root in HEAD_MODULES or rest.rpartition(".")[2] in LORA_PARAMETERS


def as_encoder_output(output: Any) -> EncoderOutput:
    """Return a module's output with its type."""
    assert isinstance(output, EncoderOutput)  # nn.Module calls are untyped
    return output


def build_heads(s: spec.Model) -> tuple[Head | None, Head | None]:
    """Build the head and the auxiliary head of a spec; each may be None."""
    if s.head is not None and s.head.num_concat_layers != num_concat_layers(s):  # a mean in earlier releases
        raise InputError(f"{s.family}: the head does not read the concatenation of {s.feature_layers}; train it again")
    return (None if s.head is None else build_head(s.head)), (None if s.aux_head is None else Head(s.aux_head))


def build_head(s: spec.Head) -> Head:
    """Build a head of the class that its spec needs."""
    return ConditionalSpanHead(s) if s.start_beams else Head(s)
