"""`qkv log-probs`: log-probabilities and perplexity of given texts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.help import INPUT, OUTPUT
from qkv.cli.input_stream import (
    Input,
    StreamingPredictor,
    check_source,
    count_lines,
    from_args_or_stdin,
    from_iterator,
    from_lines,
    progress_bar,
)
from qkv.cli.options import (
    Device,
    InputFile,
    Json,
    ModelName,
    OnTooLongOfRecipe,
    OnUnknown,
    SkipBad,
    Texts,
    With,
    check_choice,
    check_device,
    split_models,
)
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.generation.scoring import TextLogProbs
    from qkv.tasks.predictor import Predictor

Stride = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Score texts that exceed the model in windows that begin N tokens after each other (language models).",
        rich_help_panel=INPUT,
    ),
]
Bos = Annotated[
    bool,
    typer.Option(
        "--bos",
        help="Put BOS before each text, so that its first token is scored too (language models).",
        rich_help_panel=INPUT,
    ),
]
Tokens = Annotated[
    bool, typer.Option("--tokens", help="Print the log-probability of each token.", rich_help_panel=OUTPUT)
]
Rank = Annotated[
    bool,
    typer.Option(
        "--rank",
        help="Print the candidates of each source or prompt, which are adjacent lines, best first.",
        rich_help_panel=OUTPUT,
    ),
]
RankLengthPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="ALPHA",
        help="Rank by log-probability divided by the number of tokens to the power of ALPHA (--rank).",
        show_default="0",
        rich_help_panel=OUTPUT,
    ),
]


@dataclass
class _Totals:
    """Sums over all texts."""

    texts: int = 0
    tokens: int = 0
    log_prob: float = 0.0
    truncated: int = 0

    def add(self, result: TextLogProbs) -> None:
        self.texts += 1
        self.tokens += len(result.tokens)
        self.log_prob += result.log_prob
        self.truncated += result.truncated

    def warnings(self) -> list[str]:
        """Return a line about texts that were not scored in full."""
        if not self.truncated:
            return []
        number = "1 text was" if self.truncated == 1 else f"{self.truncated:,} texts were"
        return [f"warning: {number} too long for the model, and only a part was scored (--on-too-long truncate)"]

    def __str__(self) -> str:
        if not self.tokens:
            return f"texts {self.texts:,}, tokens 0: nothing precedes the first token of a text; --bos scores it too"
        nats = -self.log_prob / self.tokens
        perplexity = (
            f"perplexity {math.exp(min(nats, 709.0)):,.3f} ({nats:.4f} nats, {nats / math.log(2):.4f} bits per token)"
        )
        return f"texts {self.texts:,}, tokens {self.tokens:,}, log-probability {self.log_prob:,.4f}, {perplexity}"


def log_probs(
    model: ModelName,
    texts: Texts = None,
    file: InputFile = None,
    skip_bad: SkipBad = False,
    on_too_long: OnTooLongOfRecipe = None,
    stride: Stride = None,
    bos: Bos = False,
    on_unknown: OnUnknown = None,
    rank: Rank = False,
    length_penalty: RankLengthPenalty = None,
    tokens: Tokens = False,
    as_json: Json = False,
    with_: With = None,
    device: Device = None,
) -> None:
    """Print the log-probabilities of given texts, and their perplexity.

    A text of a language model may be a prompt, a tab and its continuation, which alone is scored; prompt and
    continuation are joined as they are. A text of an encoder-decoder is a source, a tab and its target, or a line of
    qkv predict --n-best. Texts are arguments, lines of a file or lines of stdin.

    Columns are the log-probability, the number of tokens, the perplexity and the text. The total goes to stderr.

    Examples:
        qkv log-probs gpt2 --file texts.txt
        qkv log-probs runs/translation --file candidates.tsv --rank
    """
    from qkv.data.formats.io import ErrorPolicy

    models, texts = split_models(model, with_, texts)
    check_source(texts, file, {})
    if length_penalty is not None and not rank:
        raise InputError("--length-penalty ranks the candidates of --rank; add it, or leave the option out")
    if stride is not None and on_too_long is not None:
        raise InputError("--stride scores texts of any length, so that none is too long; leave out --on-too-long")
    error_policy = ErrorPolicy(skip_bad)
    take = from_args_or_stdin(texts, error_policy) if file is None else from_iterator(from_lines(file, error_policy))
    if take is None:
        raise InputError("no texts: give TEXT, --file FILE, or lines on stdin")
    predictor = _load_predictor(models, device, {"on_too_long": on_too_long, "on_unknown": on_unknown})

    def score(inputs: Sequence[Input], first_index: int) -> Any:  # noqa: ARG001  # nothing is drawn at random
        items = [_parse_line(item, predictor) for item in inputs]
        return predictor.log_probs(items, [item.location for item in inputs], stride=stride, add_bos=bos)

    stream, totals = StreamingPredictor(score, error_policy), _Totals()
    results = _iter_results(stream, take, count_lines(file), totals)
    if rank:
        results = _ranked(results, length_penalty or 0.0)
    for item, result in results:
        print(_format(item, result, predictor, with_tokens=tokens, as_json=as_json))
    for line in [*error_policy.notes, *stream.warnings(), *totals.warnings(), str(totals)]:
        print(line, file=sys.stderr)


def _load_predictor(models: list[str], device: str | None, settings: dict[str, Any]) -> Predictor:
    from qkv.tasks.predictor import Predictor

    for name, choices in {"on_too_long": ("refuse", "truncate"), "on_unknown": ("refuse", "replace")}.items():
        if settings[name] is not None:
            check_choice(f"--{name.replace('_', '-')}", settings[name], *choices)
    if device is not None:
        check_device(device)
    predictor = Predictor.load(models if len(models) > 1 else models[0], device)
    chosen = {name: value for name, value in settings.items() if value is not None}
    if chosen and predictor.bundle.model.is_generative:
        predictor = predictor.with_settings(**chosen)
        predictor.check_used(list(chosen))
    return predictor


def _parse_line(item: Input, predictor: Predictor) -> str | tuple[str, str]:
    """Return a text, or a pair that a tab separates; the score of an n-best list of `qkv predict` is left out."""
    columns, has_source = item.text.split("\t"), predictor.bundle.model.is_encoder_decoder
    if has_source and len(columns) == 3 and _is_number(columns[1]):
        del columns[1]
    if len(columns) > 2:
        names = "a source and its target" if has_source else "a prompt and its text"
        raise InputError(f"{item.location}: {len(columns)} texts separated by tabs; give {names}, or one text")
    return columns[0] if len(columns) == 1 else (columns[0], columns[1])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _iter_results(
    stream: StreamingPredictor, take: Any, total: int | None, totals: _Totals
) -> Iterator[tuple[Input, TextLogProbs]]:
    with progress_bar(total) as step:
        for num_inputs, predictions in stream.iter_windows(take):
            for item, prediction in predictions:
                result: Any = prediction
                totals.add(result)
                yield item, result
            step(num_inputs)


def _ranked(
    results: Iterator[tuple[Input, TextLogProbs]], length_penalty: float
) -> Iterator[tuple[Input, TextLogProbs]]:
    """Yield the adjacent texts of one source or prompt best first; texts without one are the candidates of one list."""

    def rank(pair: tuple[Input, TextLogProbs]) -> float:
        return pair[1].log_prob / math.pow(max(len(pair[1].tokens), 1), length_penalty)

    def source(pair: tuple[Input, TextLogProbs]) -> str | None:
        before, tab, _ = pair[0].text.partition("\t")
        return before if tab else None

    for _, group in groupby(results, source):
        yield from sorted(group, key=rank, reverse=True)


def _format(item: Input, result: TextLogProbs, predictor: Predictor, *, with_tokens: bool, as_json: bool) -> str:
    """Return the lines of one text."""
    names: list[str] = []
    if with_tokens:
        tokenizer = predictor.bundle.target_tokenizer
        assert tokenizer is not None  # it has encoded the text
        names = tokenizer.ids_to_display(result.tokens)
    perplexity = result.perplexity
    if as_json:
        fields: dict[str, Any] = {"log_prob": result.log_prob, "num_tokens": len(result.tokens)}
        fields["perplexity"] = None if math.isnan(perplexity) else perplexity
        if result.truncated:
            fields["truncated"] = True
        if with_tokens:
            fields |= {"tokens": names, "token_log_probs": result.token_log_probs}
        return json.dumps(item.fields | fields, ensure_ascii=False)
    per_token = "-" if math.isnan(perplexity) else f"{perplexity:.3f}"
    lines = [f"{result.log_prob:.4f}\t{len(result.tokens)}\t{per_token}\t{item.text}"]
    lines += [f"  {value:.4f}\t{name}" for value, name in zip(result.token_log_probs, names, strict=with_tokens)]
    return "\n".join(lines)
