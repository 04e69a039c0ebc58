"""Parse YAML that somebody else wrote: plain values only, limits on nesting and aliases, one line for every failure.

Dates stay texts, keys are texts and occur once per mapping, and tags such as `!!python/object` are refused. The aliases
are counted before any value is built, because a few of them can stand for billions of values.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import yaml

from qkv.errors import InputError, quote
from qkv.limits import limit, raise_hint

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser is about ten times as fast
_TAG_PREFIX = "tag:yaml.org,2002:"
_TAGS = frozenset(_TAG_PREFIX + name for name in ("null", "bool", "int", "float", "str", "seq", "map"))
_NUMBER_TAGS = frozenset(_TAG_PREFIX + name for name in ("int", "float"))
_TEXT_TAGS = frozenset(_TAG_PREFIX + name for name in ("timestamp", "value"))


class _Loader(_Base):  # type: ignore[misc]
    """A loader of plain values: mappings with text keys, lists, texts, numbers, booleans and null."""

    yaml_implicit_resolvers: ClassVar = {
        first_char: [(tag, pattern) for tag, pattern in resolvers if tag not in _TEXT_TAGS]
        for first_char, resolvers in _Base.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in _TAGS:
            tag = quote(node.tag.replace(_TAG_PREFIX, "!!"))
            raise _error(node, f"the tag {tag} is not allowed; write the value without it")
        if node.tag in _NUMBER_TAGS and len(str(node.value)) > limit("digits"):
            raise _error(node, f"a number has {len(node.value):,} digits; {raise_hint('digits')}")
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            kind = node.tag.removeprefix(_TAG_PREFIX)
            raise _error(node, f"{quote(node.value)} is no value of type {kind}") from None

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Hashable, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _error(node, "a mapping of keys to values is expected")
        keys = [key for key, _ in node.value if key.tag != _TAG_PREFIX + "merge"]
        seen: set[str] = set()
        for key in keys:
            if not isinstance(key, yaml.ScalarNode):
                raise _error(key, "a key must be a text, not a list or a mapping")
            if key.tag != _TAG_PREFIX + "str":
                raise _error(key, f"the key {quote(key.value)} must be a text; put it in quotation marks")
            if key.value in seen:
                raise _error(key, f"the key {quote(key.value)} occurs twice; remove one")
            seen.add(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML text; `where` is what the error message starts with."""
    try:
        _check_events(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        # the C parser and the Python parser have different words, both without a capital letter
        reason = error.problem or "the text cannot be parsed"
        raise InputError(f"{_position(where, text, mark)}: not YAML: {reason}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"a character is not allowed, code {ord(error.character):#x}" if _is_char(error) else error.reason
        raise InputError(f"{where}, line {line:,}: not YAML: {message}") from None
    except UnicodeEncodeError:
        raise InputError(f"{where}: not YAML: a character cannot be written as UTF-8") from None
    except (yaml.YAMLError, RecursionError):
        raise InputError(f"{where}: not YAML: the text cannot be parsed") from None


def _check_events(text: str) -> None:
    """Count nesting, aliases and the values that they stand for, before any value is built."""
    max_depth, max_aliases, max_values = limit("nesting"), limit("yaml_aliases"), limit("yaml_values")
    anchored_sizes: dict[str, int | None] = {}  # None while the value is not complete
    open_values: list[tuple[str | None, int]] = []  # anchor and the values before it, of every list and mapping
    num_values = num_aliases = 0
    for event in yaml.parse(text, Loader=_Base):
        if isinstance(event, yaml.AliasEvent):
            num_aliases += 1
            size = anchored_sizes.get(event.anchor or "", 0)
            if size is None:
                raise _error(event, f"the alias {quote(f'*{event.anchor}')} refers to itself")
            num_values += size
        elif isinstance(event, yaml.CollectionStartEvent):
            if event.anchor:
                anchored_sizes[event.anchor] = None
            open_values.append((event.anchor, num_values))
            num_values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, values_before = open_values.pop()
            if anchor:
                anchored_sizes[anchor] = num_values - values_before
        elif isinstance(event, yaml.ScalarEvent):
            num_values += 1
            if event.anchor:
                anchored_sizes[event.anchor] = 1
        if len(open_values) > max_depth:
            raise _error(event, f"lists and mappings are nested too deeply; {raise_hint('nesting')}")
        if num_aliases > max_aliases:
            raise _error(event, f"too many aliases; {raise_hint('yaml_aliases')}")
        if num_values > max_values:
            raise _error(event, f"too many values; {raise_hint('yaml_values')}")


def _error(node: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _is_char(error: yaml.reader.ReaderError) -> bool:
    return isinstance(error.character, str) and len(error.character) == 1


def _position(where: str, text: str, mark: yaml.Mark | None) -> str:
    """Return the location with line and column; a text of one line, such as an option's value, has neither."""
    if mark is None or "\n" not in text.rstrip():
        return where
    return f"{where}, line {mark.line + 1:,}, column {mark.column + 1:,}"
