"""A request for generated text: what goes into the engine, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from qkv.errors import InputError
from qkv.generation.config import GenerationConfig
from qkv.nn.stack import EncoderOutput

# whether the text of each sequence of generated tokens contains a stop string
StopCheck = Callable[[list[list[int]]], list[bool]]


@dataclass(frozen=True)
class Hypothesis:
    """One generated output."""

    tokens: list[int]  # without EOS
    score: float  # sum of log-probabilities, EOS included
    finished: bool = True  # False: the maximum length came before EOS
    token_log_probs: tuple[float, ...] = ()  # of the tokens, and of EOS if it was generated
    alignment: tuple[int, ...] = ()  # the source token that each of these attends to most, if requested


@dataclass(eq=False)
class Request:
    """One source to generate for. The engine fills in the fields after `streams`.

    The source is a text that an encoder reads, a prompt that is continued, an image, or what an encoder has made of it.
    """

    source: Tensor | EncoderOutput  # token ids [n], an image [channels, side, side], or one encoded source
    config: GenerationConfig
    sample_id: int = 0  # the same number and seed give the same sample
    prefix_ids: Sequence[int] = ()  # tokens of `config.forced_prefix`
    stop_check: StopCheck | None = None  # finds `config.stop_strings` in the text of generated tokens
    streams: bool = False  # keep `tokens` up to date while they are generated; not in beam search

    length: int = 0  # tokens or patches of the source
    max_new_tokens: int = 0
    tokens: list[int] = field(default_factory=list)  # generated so far by the first row; EOS may be the last
    outputs: list[Hypothesis] | None = None  # `config.n_best` outputs, best first; None: not finished
    error: InputError | None = None  # why there will be no outputs
    is_canceled: bool = False
    _num_checked: dict[int, int] = field(default_factory=dict)  # tokens of each row without a stop string

    def __post_init__(self) -> None:
        if isinstance(self.source, EncoderOutput):
            self.length = len(self.source.hidden.values)
        elif not self.is_image:
            self.length = len(self.source)

    @property
    def is_image(self) -> bool:
        """Whether the source is an image, whose number of patches the engine knows."""
        return isinstance(self.source, Tensor) and self.source.dim() > 1

    @property
    def rows_per_source(self) -> int:
        """Number of samples or beams that are generated side by side."""
        return self.config.n_best if self.config.do_sample else self.config.num_beams

    @property
    def is_done(self) -> bool:
        """Whether nothing more will be generated."""
        return self.outputs is not None or self.error is not None or self.is_canceled

    def stop_length(self, row: int, tokens: list[int]) -> int | None:
        """Return how many tokens of a row it takes for a stop string to be in their text; None: none is."""
        num_checked = self._num_checked.get(row, 0)
        self._num_checked[row] = len(tokens)
        if self.stop_check is None or len(tokens) == num_checked or not self.stop_check([tokens])[0]:
            return None
        prefixes = [tokens[:n] for n in range(num_checked + 1, len(tokens) + 1)]
        self._num_checked[row] = num_checked + 1 + self.stop_check(prefixes).index(True)
        return self._num_checked[row]
