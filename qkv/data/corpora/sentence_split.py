"""A simple sentence splitter, sufficient for next-sentence prediction.

A sentence ends after `.`, `!`, `?` or `…` and closing quotes and brackets, if white space and then no lowercase letter
follow, but not after an abbreviation such as "Mr." or an initial such as "J."; and at every blank line. The split is
before the white space, where most tokenizers split anyway, so the concatenated tokens of the sentences are those of
the text. Text in a script without spaces between sentences is split at blank lines only.
"""

from __future__ import annotations

import re

_STOP = re.compile(r"""[.!?…]["'”’»)\]]*(?=\s+["'“‘«(\[¿¡]*(\S))""")
_BLANK = re.compile(r"\n[^\S\n]*\n")
_TITLES = "Mr Mrs Ms Messrs Dr Prof Rev Hon Gen Col Capt Lt Sgt St Mt Jr Sr Mme Mlle"
_OTHER_ABBREVIATIONS = "vs cf viz Vol pp Fig e.g i.e al ca approx Jan Feb Aug Sept Oct Nov Dec"
_ABBREVIATIONS = frozenset(f"{_TITLES} {_OTHER_ABBREVIATIONS}".split())
_MAX_LOOKBEHIND = max(map(len, _ABBREVIATIONS)) + 3  # characters checked before the stop: abbreviation, space, bracket


def sentence_ends(text: str) -> list[int]:
    """Return the end of each sentence in characters; the last one ends with the text."""
    ends = {
        match.end() for match in _STOP.finditer(text) if not match[1].islower() and not _is_abbreviation(text, match)
    }
    ends |= {_strip_trailing_space(text, match.start()) for match in _BLANK.finditer(text)}
    last = len(text.rstrip())
    return [*sorted(end for end in ends if 0 < end < last), len(text)]


def _is_abbreviation(text: str, stop: re.Match[str]) -> bool:
    if stop[0][0] != ".":
        return False
    words = text[max(0, stop.start() - _MAX_LOOKBEHIND) : stop.start()].split()
    word = words[-1].lstrip("\"'“‘«([") if words else ""
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    return is_initial or word in _ABBREVIATIONS


def _strip_trailing_space(text: str, position: int) -> int:
    while position and text[position - 1].isspace():
        position -= 1
    return position
