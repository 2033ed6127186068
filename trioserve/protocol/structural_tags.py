"""Structural tags by ``format``: an output described piece by piece, as a grammar in Lark.

The pieces are those of xgrammar's structural tags, which vLLM's and SGLang's clients send: constant
texts, JSON, regular expressions and grammars, in sequences, alternatives and tags, among free text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.lark import (
    HEADER,
    MAX_GBNF_CHARACTERS,
    TEXT,
    TokenOf,
    lark_of,
    nested,
    spelled,
)

MAX_FORMAT_DEPTH = 32
"""The deepest nesting of formats."""


def format_lark(format: Any, token_of: TokenOf) -> str:
    """Return the grammar of an output that follows ``format``.

    Raises:
        InvalidRequest: the format is unknown, or no grammar can express it; the message begins with
            its path, and ``param`` is ``grammar``.
    """
    writer = _Writer(token_of, lambda grammar: nested(lark_of(grammar, token_of)))
    start = writer.rule(format, "format", 0)
    return f"{HEADER}start: {start}\n{TEXT}{''.join(writer.rules)}"


def check_format(format: Any) -> None:
    """Refuse what :func:`format_lark` refuses, except for errors inside its grammars."""
    _Writer(lambda _: None, lambda grammar: grammar.kind).rule(format, "format", 0)


def any_lark_of(grammar: Grammar, token_of: TokenOf) -> str:
    """Return ``grammar`` as a Lark grammar: :func:`~trioserve.protocol.lark.lark_of` with formats.

    Raises:
        InvalidRequest: its text isn't of its kind.
    """
    if grammar.kind == "structural_tag":
        tag = msgspec.json.decode(grammar.text, type=dict[str, Any])
        if "format" in tag:
            return format_lark(tag["format"], token_of)
    return lark_of(grammar, token_of)


class _Writer:
    """The rules of one grammar."""

    def __init__(self, token_of: TokenOf, nest: Callable[[Grammar], str]) -> None:
        self.rules: list[str] = []
        self._token_of = token_of
        self._nest = nest
        self._num_nested = 0
        """Characters of nested grammars, which take long to convert."""
        self._kinds: dict[str, Callable[[Mapping[str, Any], str, int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def rule(self, format: Any, path: str, depth: int) -> str:
        """Add the rules of ``format`` and return the name of the first."""
        if depth > MAX_FORMAT_DEPTH:
            raise _wrong(path, f"formats are nested at most {MAX_FORMAT_DEPTH} deep")
        if not isinstance(format, Mapping):
            raise _wrong(path, "a format is an object with a type")
        kind = format.get("type")
        if not isinstance(kind, str) or kind not in self._kinds:
            raise _wrong(f"{path}.type", f"one of {', '.join(self._kinds)} is served")
        return self._add(self._kinds[kind](format, path, depth))

    def _add(self, expression: str, *, lazy: bool = False) -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {expression}\n")
        return name

    # -- single pieces -----------------------------------------------------------------------

    def _const_string(self, format: Mapping[str, Any], path: str, depth: int) -> str:
        _check_keys(format, ("value",), path)
        return self._spelled(_text(format, "value", path))

    def _json_schema(self, format: Mapping[str, Any], path: str, depth: int) -> str:
        _check_keys(format, ("json_schema", "style"), path)
        schema = format.get("json_schema")
        if not isinstance(schema, (dict, bool)):
            raise _wrong(f"{path}.json_schema", "a JSON schema is an object, true or false")
        if format.get("style", "json") != "json":
            raise _wrong(f"{path}.style", '"json" is served')
        return "%json " + json.dumps(schema if isinstance(schema, dict) else {})

    def _regex(self, format: Mapping[str, Any], path: str, depth: int) -> str:
        _check_keys(format, ("pattern",), path)
        return self._nest(Grammar("regex", _text(format, "pattern", path)))

    def _grammar(self, format: Mapping[str, Any], path: str, depth: int) -> str:
        _check_keys(format, ("grammar",), path)
        text = _text(format, "grammar", path)
        self._num_nested += len(text)
        if self._num_nested > MAX_GBNF_CHARACTERS:
            most = MAX_GBNF_CHARACTERS
            raise _wrong(f"{path}.grammar", f"grammars have at most {most} characters together")
        return self._nest(Grammar("grammar", text))

    def _any_text(self, format: Mapping[str, Any], path: str, depth: int) -> str:
        return self._free(format, path)

    def _free(self, format: Mapping[str, Any], path: str) -> str:
        """Return the name of a terminal that matches any text except what a format excludes."""
        names = ("excludes", "excluded_strs", "excluded_str")
        _check_keys(format, names, path)
        excluded: list[str] = []
        for name in names:
            if format.get(name):
                excluded += _texts(format, name, path)
        if not excluded:
            return "TEXT"
        terminal = f"FREE_{len(self.rules)}"
        pattern = "|".join(re.escape(each).replace("/", "\\/") for each in excluded)
        self.rules.append(f"{terminal}: /(?s:.*)/ & ~/(?s:.*({pattern}).*)/\n")
        return terminal

    # -- pieces made of others ---------------------------------------------------------------

    def _sequence(self, format: Mapping[str, Any], path: str, depth: int) -> str:
        _check_keys(format, ("elements",), path)
        elements = _objects(format, "elements", path)
        parts: list[str] = []
        free = ""
        for index, element in enumerate(elements):
            here = f"{path}.elements[{index}]"
            is_last = index == len(elements) - 1
            if element.get("type") == "any_text" and not is_last:
                free = self._free(element, here)
                continue
            ends = element.get("stop_after_first") and element.get("at_least_one")
            if element.get("type") == "triggered_tags" and not is_last and not ends:
                raise _wrong(here, "free text comes last, or up to a constant text or a tag")
            if free:
                parts += self._behind(free, element, here, depth)
                free = ""
            else:
                parts.append(self.rule(element, here, depth + 1))
        return " ".join(parts)

    def _behind(self, free: str, element: Mapping[str, Any], path: str, depth: int) -> list[str]:
        """Return free text up to the beginning of ``element``, and the rest of ``element``."""
        if element.get("type") == "const_string" and element.get("value"):
            return [self._until(free, [_text(element, "value", path)])]
        if element.get("type") == "tag" and element.get("begin"):
            begin = _text(element, "begin", path)
            return [self._until(free, [begin]), *self._inside(element, path, depth)]
        raise _wrong(path, "what comes behind any_text is a constant text or a tag")

    def _or(self, format: Mapping[str, Any], path: str, depth: int) -> str:
        _check_keys(format, ("elements",), path)
        elements = _objects(format, "elements", path)
        names = [
            self.rule(each, f"{path}.elements[{index}]", depth + 1)
            for index, each in enumerate(elements)
        ]
        return " | ".join(names)

    def _tag(self, format: Mapping[str, Any], path: str, depth: int) -> str:
        begin = _text(format, "begin", path, empty=True)
        return " ".join([self._spelled(begin), *self._inside(format, path, depth)])

    def _inside(self, tag: Mapping[str, Any], path: str, depth: int) -> list[str]:
        """Return a tag's content and end."""
        _check_keys(tag, ("begin", "content", "end"), path)
        content, end = tag.get("content"), tag.get("end")
        ends = [end] if isinstance(end, str) else _texts(tag, "end", path, empty=True)
        if isinstance(content, Mapping) and content.get("type") == "any_text" and all(ends):
            return [self._until(self._free(content, f"{path}.content"), ends)]
        inner = self.rule(content, f"{path}.content", depth + 1)
        return [inner, f"({' | '.join(self._spelled(each) for each in ends)})"]

    def _triggered_tags(self, format: Mapping[str, Any], path: str, depth: int) -> str:
        _check_keys(
            format, ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"), path
        )
        triggers = _texts(format, "triggers", path)
        tags = _objects(format, "tags", path)
        free = self._free({"excludes": format.get("excludes")}, path)
        rests: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole = []
        for index, tag in enumerate(tags):
            here = f"{path}.tags[{index}]"
            begin = _text(tag, "begin", here)
            trigger = max(filter(begin.startswith, triggers), key=len, default=None)
            if trigger is None:
                raise _wrong(f"{here}.begin", "it begins with none of the triggers")
            inside = self._add(" ".join(self._inside(tag, here, depth)))
            rest = begin.removeprefix(trigger)
            rests[trigger].append(f"{self._spelled(rest)} {inside}" if rest else inside)
            whole.append(f"{self._spelled(begin)} {inside}")
        found = [
            f"{self._until(free, [trigger])} ({' | '.join(each)})"
            for trigger, each in rests.items()
            if each
        ]
        any_tag = self._add(" | ".join(found))
        only_one = _flag(format, "stop_after_first", path)
        if _flag(format, "at_least_one", path):
            first = self._add(" | ".join(whole))
            return first if only_one else f"{first} {any_tag}* {free}"
        return f"{any_tag} | {free}" if only_one else f"{any_tag}* {free}"

    def _tags_with_separator(self, format: Mapping[str, Any], path: str, depth: int) -> str:
        names = ("tags", "separator", "at_least_one", "stop_after_first")
        _check_keys(format, names, path)
        separator = self._spelled(_text(format, "separator", path, empty=True))
        tags = [
            self._add(self._tag(tag, f"{path}.tags[{index}]", depth + 1))
            for index, tag in enumerate(_objects(format, "tags", path))
        ]
        one = self._add(" | ".join(tags))
        several = one if _flag(format, "stop_after_first", path) else f"{one} ({separator} {one})*"
        return several if _flag(format, "at_least_one", path) else f"({several})?"

    # -- texts -------------------------------------------------------------------------------

    def _until(self, free: str, ends: Sequence[str]) -> str:
        """Return the name of a rule that matches text up to and including the first of ``ends``."""
        alternatives = " | ".join(json.dumps(end, ensure_ascii=False) for end in ends)
        lazy = self._add(f"{free} ({alternatives})", lazy=True)
        ids = [id for id in map(self._token_of, ends) if id is not None]
        return self._add(" | ".join([lazy, *(f"{free} <[{id}]>" for id in ids)]))

    def _spelled(self, text: str) -> str:
        return " ".join(spelled(text, self._token_of)) or '""'


def _wrong(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"grammar: {path}: {what}", param="grammar")


def _check_keys(format: Mapping[str, Any], known: Sequence[str], path: str) -> None:
    for key in format:
        if key not in known and key != "type":
            raise _wrong(f"{path}.{key}", f"{', '.join(known)} are served here")


def _text(format: Mapping[str, Any], key: str, path: str, *, empty: bool = False) -> str:
    value = format.get(key)
    if not isinstance(value, str) or not (value or empty):
        raise _wrong(f"{path}.{key}", "it must be a string" + ("" if empty else " with characters"))
    return value


def _texts(format: Mapping[str, Any], key: str, path: str, *, empty: bool = False) -> list[str]:
    values = format.get(key)
    if not isinstance(values, list) or not values:
        raise _wrong(f"{path}.{key}", "it must be a list of at least one string")
    if not all(isinstance(each, str) and (each or empty) for each in values):
        raise _wrong(f"{path}.{key}", "it must be strings that aren't empty")
    return values


def _objects(format: Mapping[str, Any], key: str, path: str) -> list[Mapping[str, Any]]:
    values = format.get(key)
    if not isinstance(values, list) or not values:
        raise _wrong(f"{path}.{key}", "it must be a list of at least one object")
    if not all(isinstance(each, Mapping) for each in values):
        raise _wrong(f"{path}.{key}", "it must hold objects")
    return values


def _flag(format: Mapping[str, Any], key: str, path: str) -> bool:
    value = format.get(key, False)
    if not isinstance(value, bool):
        raise _wrong(f"{path}.{key}", "it must be true or false")
    return value
