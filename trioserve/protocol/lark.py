"""Pieces of grammars in llguidance's dialect of Lark: text in, text out, nothing is compiled.

Every rule that is made of another grammar stands in a ``%lark`` block of its own, so that names of
one don't meet those of another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.grammar import Grammar

HEADER = "%llguidance {}\n"
"""Without it a grammar without a hint of Lark may be taken for GBNF."""
TEXT = "TEXT: /(?s:.*)/\n"
GAP = "GAP: /[ \\n]{1,4}/\n"
"""White space between parts, bounded: a model that may go on with it for ever sometimes does."""
MAX_GBNF_CHARACTERS = 32768
"""Of a GBNF grammar that another one is to contain: the time of its conversion is quadratic."""
# What llguidance takes for Lark; its own pattern takes quadratic time over empty lines.
_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*:)", re.MULTILINE)
_WHITESPACE_IN_JSON = r"[\x20\x0A\x0D\x09]{1,16}"

TokenOf = Callable[[str], int | None]
"""The id of the token that is spelled like this; None if there is none."""


def literal(text: str, token_of: TokenOf) -> str:
    """What matches ``text``, spelled out or as a token of its own.

    Both have to be named: llguidance takes every added token that looks like ``<this>`` for a
    special one, which no text matches.
    """
    spelled = json.dumps(text, ensure_ascii=False)
    id = token_of(text)
    return spelled if id is None else f"(<[{id}]> | {spelled})"


_MARK = re.compile(r"(<[^<>\s]{1,64}>|\[[A-Z_]{1,64}\])")
"""What tokens of their own are spelled like."""


def spelled(text: str, token_of: TokenOf) -> list[str]:
    """Return what matches ``text``, part by part: marks in it may be tokens of their own."""
    parts: list[str] = []
    for piece in _MARK.split(text):
        if piece and _MARK.fullmatch(piece) and token_of(piece) is not None:
            parts.append(literal(piece, token_of))
        elif piece:
            parts.append(json.dumps(piece, ensure_ascii=False))
    return parts


def head(text: str, token_of: TokenOf, *, name: str = "head") -> str:
    """The rule ``name``: any text up to the first ``text``, and that. It needs :data:`TEXT`."""
    spelled = json.dumps(text, ensure_ascii=False)
    id = token_of(text)
    token = "" if id is None else f" | TEXT <[{id}]>"
    return f"{name}: spelled_{name}{token}\nspelled_{name}[lazy]: TEXT {spelled}\n"


def json_rule(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """What matches the JSON that ``schema`` allows.

    With ``lenient``, what the schema says that can't be made a grammar is left out of it.
    """
    options = {"whitespace_pattern": _WHITESPACE_IN_JSON}
    given = schema.get("x-guidance")
    if isinstance(given, dict):
        options.update(given)
    if lenient:
        options["lenient"] = True  # type: ignore[assignment]
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def nested(lark: str) -> str:
    """What matches a whole grammar."""
    return "%lark {\n" + lark.removeprefix(HEADER) + "\n}"


def lark_of(grammar: Grammar, token_of: TokenOf) -> str:
    """``grammar`` as a Lark grammar whatever its kind, for one that is to contain it.

    Takes up to a second.

    Raises:
        InvalidRequest: its text isn't of its kind, or is GBNF that is too long.
    """
    try:
        return HEADER + _RULES[grammar.kind](grammar.text, token_of)
    except InvalidRequest:
        raise
    except Exception as error:
        # Of a text that isn't what it should be, parsers raise whatever Python raises there.
        reason = f"{type(error).__name__}: {error}"
        raise InvalidRequest(
            f"grammar can't be read as a {grammar.kind}: {reason}", param="grammar"
        ) from error


def _of_json_schema(text: str, token_of: TokenOf) -> str:
    if not isinstance(json.loads(text), dict):
        raise ValueError("the schema isn't an object")
    return f"start: %json {text}\n"


def _of_regex(text: str, token_of: TokenOf) -> str:
    return "start: PATTERN\nPATTERN: /" + _escaped_slashes(text) + "/\n"


def _escaped_slashes(pattern: str) -> str:
    """A regular expression as it stands between slashes."""
    escaped, result = False, []
    for character in pattern:
        if character == "\n":
            result.append("n" if escaped else "\\n")
        else:
            result.append("\\/" if character == "/" and not escaped else character)
        escaped = character == "\\" and not escaped
    return "".join(result)


def _of_grammar(text: str, token_of: TokenOf) -> str:
    if _LARK.search(text) is not None:
        return text.removeprefix(HEADER)
    if len(text) > MAX_GBNF_CHARACTERS:
        raise InvalidRequest(
            f"grammar must have at most {MAX_GBNF_CHARACTERS} characters as GBNF beside tools or "
            f"reasoning, got {len(text)}; in Lark it may have more",
            param="grammar",
        )
    return str(gbnf_to_lark(text)).removeprefix(HEADER)


def _of_choice(text: str, token_of: TokenOf) -> str:
    # One lexeme: as alternatives of a rule, thousands of choices would be slow.
    choices = " | ".join(json.dumps(str(choice)) for choice in json.loads(text))
    return f"start: CHOICE\nCHOICE: {choices}\n"


def _of_structural_tag(text: str, token_of: TokenOf) -> str:
    """Free text in which what begins with a trigger is one of the structures."""
    tag = json.loads(text)
    rules, names = [], []
    for number, structure in enumerate(tag["structures"]):
        begin, end = str(structure["begin"]), str(structure["end"])
        trigger = max(filter(begin.startswith, tag["triggers"]), key=len)
        names.append(f"tag_{number}")
        rules.append(head(trigger, token_of, name=f"head_{number}"))
        rest = begin.removeprefix(trigger)
        parts = [
            f"head_{number}",
            *([json.dumps(rest)] if rest else []),
            "%json " + json.dumps(structure["schema"]),
            *([literal(end, token_of)] if end else []),
        ]
        rules.append(f"tag_{number}: {' '.join(parts)}\n")
    return f"start: ({' | '.join(names)})* tail\ntail: TEXT\n{TEXT}{''.join(rules)}"


_RULES: dict[str, Callable[[str, TokenOf], str]] = {
    "json_schema": _of_json_schema,
    "regex": _of_regex,
    "grammar": _of_grammar,
    "choice": _of_choice,
    "structural_tag": _of_structural_tag,
}
