"""Compiles a :class:`~trioserve.protocol.grammar.Grammar` to a matcher of llguidance.

llguidance (https://github.com/guidance-ai/llguidance) parses output byte by byte, with an Earley
parser over lexemes that are derivatives of regular expressions, and walks the vocabulary as a trie.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from gpu.constraints.refusals import GrammarError, one_line
from trioserve.model_files import ModelFiles, load_tokenizer_from
from trioserve.model_files.native import panics_raised
from trioserve.protocol.errors import InvalidRequest, ModelLoadError
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.structural_tags import format_lark

# Limits on the time of one mask and the memory of one sequence. With llguidance's defaults,
# a{1000000} takes a third of a second and 95 MB before it is refused, and an ambiguous grammar
# 36 ms for each mask. These limits allow about a third of that. An enum of 8,000 strings, strings
# of 10,000 characters and patterns like (.*a.{12}){6} pass. A lexer's state takes up to 2 kB.
_INITIAL_LEXER_FUEL = 300_000
_STEP_LEXER_FUEL = 100_000
_STEP_MAX_ITEMS = 20_000
_MAX_LEXER_STATES = 50_000
_MAX_GRAMMAR_SIZE = 250_000


@attrs.frozen
class GrammarVocabulary:
    """The tokenizer and vocabulary that matchers need.

    Ids from the tokenizer's number of tokens up to ``vocab_size`` match no grammar.
    """

    tokenizer_json: str = attrs.field(repr=False)
    vocab_size: int
    eos_ids: tuple[int, ...]

    @classmethod
    def of(cls, files: ModelFiles, tokenizer: str = "") -> GrammarVocabulary:
        """Return the vocabulary of a model; ``tokenizer`` is the path of another tokenizer.

        Raises:
            GrammarError: there is no tokenizer, or no end-of-sequence id.
        """
        eos_ids = tuple(id for id in files.config.eos_token_ids if id < files.config.vocab_size)
        if not eos_ids:
            raise GrammarError("the model has no end-of-sequence id, so that no output could end")
        try:
            backend = load_tokenizer_from(tokenizer) if tokenizer else files.load_tokenizer()
        except ModelLoadError as error:
            raise GrammarError(str(error)) from error
        return cls(backend.to_str(), files.config.vocab_size, eos_ids)

    def build(self) -> llguidance.LLTokenizer:
        """Return llguidance's tokenizer. This holds the GIL: 0.2 s for 49,000 tokens.

        Raises:
            GrammarError: llguidance can't read the tokenizer.
        """
        try:
            with panics_raised():
                return llguidance.LLTokenizer(
                    self.tokenizer_json, n_vocab=self.vocab_size, eos_token=list(self.eos_ids)
                )
        except Exception as error:  # Rust code may raise anything
            raise GrammarError(
                "grammars need the bytes of tokens, which the model's tokenizer doesn't tell: "
                + one_line(str(error))
            ) from error


def to_llguidance(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> str:
    """Return ``grammar`` in llguidance's format. Time and memory aren't bounded.

    Raises:
        GrammarError: the text isn't of its kind. A grammar that passes may still not compile.
    """
    if grammar.kind == "structural_tag":
        return _structural_tag(grammar.text, tokenizer)
    return _CONVERTERS[grammar.kind](grammar.text)


def compile_text(text: str, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """Return a new matcher for ``text``, a grammar in llguidance's format.

    Its first mask is already computed, which warms up the lexer for copies. The limits don't bound
    time and memory: the intersection of many patterns may take all memory.

    Raises:
        GrammarError: the grammar is wrong, too large, or allows no text.
    """
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.get_error().startswith("NoExtension"):
        raise GrammarError("it allows no output at all")
    if matcher.is_error():
        raise GrammarError(one_line(matcher.get_error()))
    return matcher


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=_INITIAL_LEXER_FUEL,
        step_lexer_fuel=_STEP_LEXER_FUEL,
        step_max_items=_STEP_MAX_ITEMS,
        max_lexer_states=_MAX_LEXER_STATES,
        max_grammar_size=_MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )


def _json_schema(text: str) -> str:
    schema = _json(text, "a JSON schema")
    if not isinstance(schema, (dict, bool)):
        raise GrammarError("a JSON schema is an object, true or false")
    return llguidance.LLMatcher.grammar_from_json_schema(text)


def _regex(text: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(text)


def _lark_or_gbnf(text: str) -> str:
    try:
        lark = any_to_lark(text)
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    except Exception as error:  # GbnfToLarkError or any other
        raise GrammarError(one_line(str(error))) from error
    return llguidance.LLMatcher.grammar_from_lark(lark)


def _choice(text: str) -> str:
    choices = _json(text, "a list of strings")
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise GrammarError("a choice is a JSON list of strings")
    if not choices:
        raise GrammarError("a choice needs at least one string")
    # One lexeme, since llguidance refuses a rule of 8,000 alternatives: 30 ms a mask.
    return llguidance.LLMatcher.grammar_from_regex("|".join(map(re.escape, choices)))


_CONVERTERS: dict[str, Callable[[str], str]] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "grammar": _lark_or_gbnf,
    "choice": _choice,
}


def _structural_tag(text: str, tokenizer: llguidance.LLTokenizer) -> str:
    value = _json(text, "an object")
    if not isinstance(value, dict):
        raise GrammarError("a structural tag is a JSON object with structures and triggers")
    if "format" in value:
        return _by_format(value["format"], tokenizer)
    triggers = _strings(value, "triggers")
    structures = value.get("structures")
    if not isinstance(structures, list) or not structures:
        raise GrammarError("structures must be a list of at least one object")
    tags = [_tag(index, each, triggers) for index, each in enumerate(structures)]
    unused = set(triggers).difference(tag.trigger for tag in tags)
    if unused:
        raise GrammarError(f"no structure begins with the trigger {min(unused)!r}")
    # llguidance treats either all triggers <like this> as special tokens, or none.
    special = any(_is_special(tag.trigger, tokenizer) for tag in tags)
    for tag in tags:
        if special and not _is_special(tag.trigger, tokenizer) and tag.trigger[-1] == ">":
            tag.trigger = tag.trigger[:-1] or tag.trigger
    return llguidance.LLMatcher.grammar_from_lark(
        llguidance.StructTag.to_grammar(tags, assume_special=special)
    )


def _by_format(format: Any, tokenizer: llguidance.LLTokenizer) -> str:
    def token_of(text: str) -> int | None:
        if not _is_special(text, tokenizer):
            return None
        (id,) = tokenizer.tokenize_str(text, parse_special=True)
        return id

    try:
        lark = format_lark(format, token_of)
    except InvalidRequest as error:
        raise GrammarError(one_line(str(error).removeprefix("grammar: "))) from error
    return llguidance.LLMatcher.grammar_from_lark(lark)


def _strings(value: dict[str, Any], name: str) -> list[str]:
    strings = value.get(name)
    if not isinstance(strings, list) or not strings:
        raise GrammarError(f"{name} must be a list of at least one string")
    if not all(isinstance(each, str) and each for each in strings):
        raise GrammarError(f"{name} must be strings that aren't empty")
    return strings


def _tag(index: int, value: Any, triggers: Sequence[str]) -> llguidance.StructTag:
    name = f"structures[{index}]"
    if not isinstance(value, dict):
        raise GrammarError(f"{name} must be an object with begin, schema and end")
    begin, schema, end = (value.get(key) for key in ("begin", "schema", "end"))
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarError(f"{name} must have the strings begin and end")
    if not isinstance(schema, dict):
        raise GrammarError(f"{name}.schema must be a JSON schema, an object")
    trigger = max((each for each in triggers if begin.startswith(each)), key=len, default=None)
    if trigger is None:
        raise GrammarError(f"{name}.begin begins with none of the triggers")
    return llguidance.StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)


def _is_special(text: str, tokenizer: llguidance.LLTokenizer) -> bool:
    ids = tokenizer.tokenize_str(text, parse_special=True)
    return len(ids) == 1 and tokenizer.is_special_token(ids[0])


def _json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"it must be {what}, as JSON: {error}") from error
