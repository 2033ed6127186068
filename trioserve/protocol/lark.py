"""Pieces of grammars in llguidance's dialect of Lark. Nothing is compiled here.

A rule made of another grammar stands in a ``%lark`` block of its own, so that the names of two
grammars don't clash.
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
"""Start of every grammar: llguidance may otherwise take a grammar for GBNF."""
TEXT = "TEXT: /(?s:.*)/\n"
GAP = "GAP: /[ \\n]{1,4}/\n"
"""Bounded white space between parts; without a bound, a model sometimes repeats it for ever."""
MAX_GBNF_CHARACTERS = 32768
"""Limit of a GBNF grammar inside another grammar: its conversion takes quadratic time."""
# llguidance's test for Lark. Its own pattern takes quadratic time over empty lines.
_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*:)", re.MULTILINE)
_WHITESPACE_IN_JSON = r"[\x20\x0A\x0D\x09]{1,16}"

TokenOf = Callable[[str], int | None]
"""Function that returns the id of the token spelled like its argument; None if there is none."""


def literal(text: str, token_of: TokenOf) -> str:
    """Return the Lark expression that matches ``text``, as characters or as a token of its own.

    Both have to be named: llguidance takes every added token that looks like ``<this>`` for a
    special token, and no text matches a special token.
    """
    spelled = json.dumps(text, ensure_ascii=False)
    id = token_of(text)
    return spelled if id is None else f"(<[{id}]> | {spelled})"


_MARK = re.compile(r"(<[^<>\s]{1,64}>|\[[A-Z_]{1,64}\])")
"""Spelling of a special token."""


def spelled(text: str, token_of: TokenOf) -> list[str]:
    """Return the Lark expressions that match ``text`` part by part; marks may be special tokens."""
    parts: list[str] = []
    for piece in _MARK.split(text):
        if piece and _MARK.fullmatch(piece) and token_of(piece) is not None:
            parts.append(literal(piece, token_of))
        elif piece:
            parts.append(json.dumps(piece, ensure_ascii=False))
    return parts


def head(text: str, token_of: TokenOf, *, name: str = "head") -> str:
    """Return the rule ``name``: any text up to and including the first ``text``. It uses
    :data:`TEXT`.
    """
    spelled = json.dumps(text, ensure_ascii=False)
    id = token_of(text)
    token = "" if id is None else f" | TEXT <[{id}]>"
    return f"{name}: spelled_{name}{token}\nspelled_{name}[lazy]: TEXT {spelled}\n"


def json_rule(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """Return the Lark expression that matches the JSON that ``schema`` allows.

    With ``lenient``, parts of the schema that no grammar can express are left out.
    """
    options = {"whitespace_pattern": _WHITESPACE_IN_JSON}
    given = schema.get("x-guidance")
    if isinstance(given, dict):
        options.update(given)
    if lenient:
        options["lenient"] = True  # type: ignore[assignment]
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def nested(lark: str) -> str:
    """Return the Lark expression that matches a whole grammar."""
    return "%lark {\n" + lark.removeprefix(HEADER) + "\n}"


def lark_of(grammar: Grammar, token_of: TokenOf) -> str:
    """Return ``grammar``, of whatever kind, as a Lark grammar that another one can contain.

    This takes up to a second.

    Raises:
        InvalidRequest: its text isn't of its kind, or is GBNF that is too long.
    """
    try:
        return HEADER + _RULES[grammar.kind](grammar.text, token_of)
    except InvalidRequest:
        raise
    except Exception as error:
        # Parsers of Python raise many kinds of errors for an invalid text.
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
    """Return a regular expression escaped to stand between slashes."""
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
    # One lexeme: thousands of choices would be slow as alternatives of a rule.
    choices = " | ".join(json.dumps(str(choice)) for choice in json.loads(text))
    return f"start: CHOICE\nCHOICE: {choices}\n"


def _of_structural_tag(text: str, token_of: TokenOf) -> str:
    """Return a grammar: free text where a trigger begins one of the structures."""
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
