"""Grammars, schemas and expressions of clients, as the worker compiles them after their trial."""

from __future__ import annotations

import functools
import json
import time

from hypothesis import strategies as st

from gpu.constraints.grammar_trial import MAX_SECONDS, GrammarTrial
from gpu.constraints.grammars import GrammarError, GrammarVocabulary
from tests.fuzz.target import Target
from tests.fuzz.values import JSON, TEXTS
from tests.support.tiny_models import VOCAB_SIZE, tiny_tokenizer
from trioserve.protocol.grammar import Grammar

__all__ = ["TARGETS"]

MAX_WALL_SECONDS = 6 * MAX_SECONDS

_KEYWORDS = st.sampled_from(
    (
        *("type", "properties", "items", "enum", "const", "anyOf", "allOf", "oneOf", "$ref", "$id"),
        *("pattern", "minimum", "maximum", "multipleOf", "minLength", "maxLength", "required"),
        *("additionalProperties", "minItems", "maxItems", "prefixItems", "format", "not", "$defs"),
        *("patternProperties", "if", "then", "else", "uniqueItems", "x-guidance", "default"),
    )
)
_SCHEMA_VALUES = st.one_of(
    JSON,
    st.sampled_from(
        (
            *("object", "array", "string", "integer", "date-time", "#", "#/$defs/a", "(a+)+$"),
            *("http://localhost:1/x.json", "file:///etc/passwd", "[", "a{1,1000}", "\\p{L}{1000}"),
        )
    ),
)
_SCHEMAS = st.recursive(
    st.dictionaries(_KEYWORDS, _SCHEMA_VALUES, max_size=4),
    lambda inner: st.dictionaries(
        _KEYWORDS,
        st.one_of(inner, st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
        max_size=4,
    ),
    max_leaves=6,
).map(json.dumps)
_EXPRESSIONS = st.lists(
    st.sampled_from(
        (
            *("a", ".", "*", "+", "?", "(", ")", "|", "[", "]", "^", "$", "{3}", "{1000}", "{0,}"),
            *(r"\w", r"\b", r"\1", "(?i)", "(?=", "&", "~", "(?R)", r"\p{L}", "é", "\0"),
        )
    ),
    min_size=1,
    max_size=12,
).map("".join)
_LARK = st.lists(
    st.sampled_from(
        (
            *("start: ", "a", "b: ", "A: ", "/x+/", '"y"', "|", "\n", "(", ")", "*", "?", "%json "),
            *(
                '{"type": "string"}',
                "%import common.WORD",
                "%ignore /\\s/",
                "%llguidance {}",
                "<|a|>",
            ),
            *(
                "root ::= ",
                "[a-z]",
                "{3}",
                "start",
                "%regex {}",
                "[capture]",
                ":",
                "~ 1..9",
                "\ud800",
            ),
        )
    ),
    min_size=1,
    max_size=14,
).map("".join)
_GRAMMARS = st.one_of(
    st.tuples(st.just("json_schema"), _SCHEMAS | TEXTS),
    st.tuples(st.just("regex"), _EXPRESSIONS),
    st.tuples(st.just("grammar"), _LARK),
    st.tuples(st.just("choice"), st.lists(TEXTS | JSON, max_size=4).map(json.dumps)),
    st.tuples(
        st.just("structural_tag"),
        st.fixed_dictionaries(
            {},
            optional={
                "triggers": JSON | st.just(["<f"]),
                "structures": JSON
                | st.just([{"begin": "<f>", "schema": {}, "end": "</f>"}])
                | st.lists(st.dictionaries(st.sampled_from(("begin", "schema", "end")), JSON)),
            },
        ).map(json.dumps),
    ),
)


@functools.cache
def _trial() -> GrammarTrial:
    return GrammarTrial(
        GrammarVocabulary(tiny_tokenizer().to_str(), VOCAB_SIZE, eos_ids=(2,)), max_seconds=2
    )


def _check_grammar(drawn: tuple[str, str]) -> None:
    kind, text = drawn
    if not text or "\ud800" in text:
        return  # refused before it comes to the worker
    started = time.monotonic()
    try:
        assert _trial().run(Grammar(kind, text))
    except GrammarError as error:
        message = str(error)
        assert message.strip()
        assert "\n" not in message
    assert time.monotonic() - started < MAX_WALL_SECONDS


TARGETS = (Target("grammar", _check_grammar, _GRAMMARS),)
