"""Checks of a foreign tokenizer when it is loaded, so that no text makes the library panic or fill the memory.

The library raises a bare Exception for some damages and panics for others: a panic is no Exception, and its text goes
to stderr. The settings that can multiply a text are bounded here, and a few texts are encoded as a test.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from qkv.errors import InputError, quote
from qkv.limits import limit, raise_hint

T = TypeVar("T")

_MAX_WORD_CHARS = 1000  # the time of WordPiece grows with the square of a word's length
_MAX_TYPE_ID = 9
_MAX_SETTING_CHARS = 1000  # of a prefix, a replacement and the like
# ordinary and unknown characters, and runs that a catastrophic regular expression cannot match in reasonable time
_PROBE_TEXTS = ("The cat, 1 été 😀\n\u0f0b\U0010fffd", *(char * 32 + "!" for char in "aA1 -."), "ab" * 16 + "!", "")
_stderr_lock = threading.Lock()


def call_library(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call a function of the library; its errors and panics become an `InputError` of one line."""
    try:
        return function(*args, **options)
    except (KeyboardInterrupt, SystemExit, TypeError):
        raise
    except BaseException as problem:  # a panic is not an Exception
        raise InputError(f"the tokenizer cannot process it ({_one_line(problem)}); check the tokenizer") from None


def call_quietly(function: Callable[..., T], *args: Any) -> T:
    """Call a function of the library without the text that a panic prints; a failure is a ValueError of one line."""
    with _silenced_stderr():
        try:
            return function(*args)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as problem:
            raise ValueError(_one_line(problem)) from None


@contextlib.contextmanager
def _silenced_stderr() -> Iterator[None]:
    """Discard what is written to stderr, also by code that is not Python."""
    with _stderr_lock:
        try:
            saved = os.dup(2)
        except OSError:  # stderr is closed
            yield
            return
        try:
            with open(os.devnull, "wb") as sink:
                os.dup2(sink.fileno(), 2)
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _one_line(problem: BaseException) -> str:
    return quote(" ".join(str(problem).split()) or type(problem).__name__, 100)[1:-1]


def probe(encode: Callable[..., object], location: str, *, pairs: bool = True) -> None:
    """Encode a few texts; a tokenizer that cannot is refused when it is loaded and not at a user's text.

    Args:
        encode: encodes a text or two.
        location: name of the file in messages.
        pairs: whether `encode` takes a second text.
    """
    with _silenced_stderr():
        try:
            for text in _PROBE_TEXTS:
                encode(text)
            if pairs:
                encode(*_PROBE_TEXTS[:2])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as problem:
            reason = f"cannot encode texts ({_one_line(problem)})"
            raise InputError(f"{location}: {reason}; copy it again, or save it again with its library") from None


def check_tokenizer_json(raw_json: Any, location: str) -> int:
    """Check the content of a tokenizer.json before the library parses it; return the largest id plus one."""
    if not isinstance(raw_json, dict) or not isinstance(raw_json.get("model"), dict):
        raise InputError(f"{location}: damaged or not a tokenizer.json, which has an object 'model'; copy it again")
    model = raw_json["model"]
    growth = _growth(raw_json.get("normalizer"), location)
    if growth > limit("text_growth"):
        reason = f"its normalizer can make a text {_factor(growth)} times longer"
        raise InputError(f"{location}: {reason}; {raise_hint('text_growth')}")
    for component in ("pre_tokenizer", "post_processor", "decoder"):
        _growth(raw_json.get(component), location)
    _check_type_ids(raw_json.get("post_processor"), location)
    num_ids = _num_ids(raw_json, location)
    _check_template_ids(raw_json.get("post_processor"), num_ids, location)
    _check_settings({key: value for key, value in model.items() if key not in ("vocab", "merges")}, location)
    max_word_chars = model.get("max_input_chars_per_word", 0)
    if isinstance(max_word_chars, int) and max_word_chars > _MAX_WORD_CHARS:
        reason = f"max_input_chars_per_word is {quote(max_word_chars)}"
        raise InputError(f"{location}: {reason}; it must not exceed {_MAX_WORD_CHARS:,}")
    return num_ids


def check_ids(largest_id: int, location: str) -> int:
    """Refuse a vocabulary with an id over the limit; return the number of ids, of which some may have no token."""
    if largest_id >= limit("vocabulary"):
        reason = f"a token has the id {quote(largest_id, 20)}"
        raise InputError(f"{location}: {reason}; {raise_hint('vocabulary')}")
    return largest_id + 1


def _num_ids(raw_json: Mapping[str, Any], location: str) -> int:
    vocab, added_tokens = raw_json["model"].get("vocab"), raw_json.get("added_tokens") or []
    num_pieces = len(vocab) if isinstance(vocab, dict | list) else 0
    try:
        # the types of the ids are the library's to check
        largest_id = max(vocab.values(), default=-1) if isinstance(vocab, dict) else num_pieces - 1
        largest_id = max([largest_id, *(token["id"] for token in added_tokens)])
        return check_ids(int(largest_id), location)
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as problem:
        if isinstance(problem, InputError):
            raise
        raise InputError(f"{location}: an id of its vocabulary is not a number; copy it again") from None


def _growth(component: Any, location: str) -> float:
    """Return how many times longer a text can become in a normalizer, by the settings of its parts."""
    _check_settings(component, location)
    if isinstance(component, list):
        product = 1.0
        for child in component:
            product *= _growth(child, location)
        return product
    if not isinstance(component, dict):
        return 1.0
    factor = 1.0
    if component.get("type") == "Replace":
        pattern, content = component.get("pattern"), component.get("content")
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        num_chars = len(content) if isinstance(content, str) else 0
        # a regular expression can match nothing, between any two characters
        factor = max(1.0, num_chars / max(1, len(literal)) if isinstance(literal, str) else float(num_chars + 1))
    if component.get("type") == "Precompiled":
        _check_charsmap_base64(component.get("precompiled_charsmap"), location)
    children = (value for key, value in component.items() if isinstance(value, list) and key != "special_tokens")
    for child in children:
        factor *= _growth(child, location)
    return factor


def _check_type_ids(component: Any, location: str) -> None:
    """Refuse token types that no model has; the model's own number is compared when a text is encoded."""
    if isinstance(component, dict):
        type_id = component.get("type_id", 0)
        if not isinstance(type_id, int) or not 0 <= type_id <= _MAX_TYPE_ID:
            raise InputError(f"{location}: type_id is {quote(type_id, 30)}; it is a number from 0 to {_MAX_TYPE_ID}")
        component = list(component.values())
    for child in component if isinstance(component, list) else ():
        _check_type_ids(child, location)


def _check_template_ids(component: Any, num_ids: int, location: str) -> None:
    """Refuse ids outside of the vocabulary in the special tokens that a post-processor adds."""
    if isinstance(component, dict):
        ids = component.get("ids", [])
        pairs = [component[role] for role in ("cls", "sep") if isinstance(component.get(role), list)]
        for token_id in [*(ids if isinstance(ids, list) else [ids]), *(pair[-1] for pair in pairs if pair)]:
            if type(token_id) is not int or not 0 <= token_id < num_ids:
                reason = f"its post-processor adds the id {quote(token_id, 20)}"
                raise InputError(f"{location}: {reason}, which is not one of its {num_ids:,} ids; copy it again")
        component = list(component.values())
    for child in component if isinstance(component, list) else ():
        _check_template_ids(child, num_ids, location)


def _check_settings(component: Any, location: str) -> None:
    """Refuse very long texts in the settings of a component."""
    for key, value in component.items() if isinstance(component, dict) else ():
        if isinstance(value, str) and len(value) > _MAX_SETTING_CHARS and key != "precompiled_charsmap":
            reason = f"{quote(key, 30)} has {len(value):,} characters"
            raise InputError(f"{location}: {reason}; {_MAX_SETTING_CHARS:,} are the limit")


def _factor(growth: float) -> str:
    return f"{growth:,.0f}" if growth < 1e9 else "billions of"


# ---- character maps of SentencePiece ---------------------------------------------------------------------------------

_OFFSET_BITS, _IS_VALUE, _HAS_VALUE = 1 << 9, 1 << 31, 1 << 8


def _check_charsmap_base64(text: Any, location: str) -> None:
    import base64

    try:
        content = base64.b64decode(text or "", validate=True)
    except (ValueError, TypeError):
        raise InputError(f"{location}: its character map is damaged; copy it again") from None
    if content:
        check_charsmap(content, location)


def check_charsmap(content: bytes, location: str) -> None:
    """Check that every step and every value of a character map stays inside it; the library does not look.

    The map is a double-array trie of 32-bit units, followed by the replacements, which end in zero bytes.
    """
    try:
        (size,) = struct.unpack_from("<I", content)
        units = np.frombuffer(content, "<u4", size // 4, 4).astype(np.int64)  # [N]
        replacements = np.frombuffer(content, np.uint8, offset=4 + size)
        content[4 + size :].decode()
    except (struct.error, ValueError):
        raise InputError(f"{location}: its character map is damaged; copy it again") from None
    positions = np.arange(len(units))
    offsets = (units >> 10) << ((units & _OFFSET_BITS) >> 6)
    is_node = (units & _IS_VALUE) == 0
    is_node[:1] = True  # every search starts at the first unit
    children = positions ^ offsets  # [N]
    is_inside = (children | 0xFF) < len(units)
    leaves = children[is_node & ((units & _HAS_VALUE) != 0)]
    is_damaged = not len(units) or not is_inside[is_node].all() or (leaves >= len(units)).any()
    if not is_damaged:
        values = units[leaves] & (_IS_VALUE - 1)
        is_damaged = bool((values >= len(replacements)).any()) or (
            bool(len(values)) and bool(((replacements[values] & 0xC0) == 0x80).any() or replacements[-1] != 0)
        )
    if is_damaged:
        raise InputError(f"{location}: its character map is damaged; copy it again")
