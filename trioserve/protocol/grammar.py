"""Rules that an output may have to follow: a JSON schema, a regular expression, a grammar, a
choice.

A :class:`Grammar` is a text and its kind. The worker compiles it (:mod:`gpu.constraints.grammars`),
since only the worker knows the tokens. The engine has the worker compile it before it admits the
request.
"""

from __future__ import annotations

import attrs

from trioserve.protocol.checks import refuse

GRAMMAR_KINDS = ("json_schema", "regex", "grammar", "choice", "structural_tag")
MAX_GRAMMAR_CHARACTERS = 256 << 10


@attrs.frozen
class Grammar:
    """A rule for the whole output.

    =============== ===============================================================================
    kind            text
    =============== ===============================================================================
    json_schema     a JSON schema, as JSON (``{"type": "object"}`` for any object)
    regex           a regular expression that the whole output matches, in Rust's syntax
    grammar         a Lark grammar in llguidance's dialect, or GBNF as llama.cpp has it ("EBNF")
    choice          a JSON list of strings, of which the output is one
    structural_tag  a JSON object with ``structures``, a list of ``begin``, ``schema`` and ``end``,
                    and ``triggers``: free text, in which what begins with a trigger has to be one
                    of the structures
    =============== ===============================================================================

    Raises:
        InvalidRequest: an unknown kind, or a text that is empty or too long. Compiling it may fail
            later.
    """

    kind: str
    text: str

    def __attrs_post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise refuse("grammar", self.kind, "of a kind out of " + ", ".join(GRAMMAR_KINDS))
        if not isinstance(self.text, str) or not self.text:
            raise refuse("grammar", self.text, "a text that isn't empty")
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            wanted = f"at most {MAX_GRAMMAR_CHARACTERS} characters long"
            raise refuse("grammar", f"{len(self.text)} characters", wanted)
