"""Every kind of grammar: what it allows, what it doesn't, and what can't be compiled."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import regex
import tokenizers

from gpu.constraints.grammar_cache import GrammarCache
from gpu.constraints.grammar_trial import GrammarTrial, TrialVerdict
from gpu.constraints.grammars import GrammarVocabulary, compile_text, to_llguidance
from gpu.constraints.lazy_grammars import LazyGrammars
from gpu.constraints.refusals import GrammarError
from gpu.loading.loaded_model import unseen
from gpu.loading.loading import load
from tests.support.grammar_vocabularies import (
    EOS,
    VOCABULARY,
    allowed,
    ids_of,
    make_matcher,
    text_of,
    tokenizer,
)
from tests.support.text_tokenizers import byte_fallback, byte_level, metaspace, words
from tests.support.tiny_models import VOCAB_SIZE, make_tiny, tiny_tokenizer
from trioserve.config import EngineConfig
from trioserve.engine.worker_start import start_message
from trioserve.model_files import open_model
from trioserve.protocol.grammar import GRAMMAR_KINDS, Grammar

TAG = json.dumps(
    {
        "structures": [
            {"begin": "<call=add>", "schema": {"type": "integer"}, "end": "</call>"},
            {"begin": "<call=say>", "schema": {"type": "string"}, "end": "</call>"},
        ],
        "triggers": ["<call="],
    }
)
FORMAT = json.dumps(
    {
        "format": {
            "type": "triggered_tags",
            "triggers": ["<call="],
            "tags": [
                {
                    "begin": "<call=add>",
                    "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                    "end": "</call>",
                }
            ],
            "at_least_one": True,
        }
    }
)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", None]}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
LARK = 'start: "a" tail\ntail: /[0-9]+/ | "(" tail ")"'
GBNF = 'root ::= "a" tail\ntail ::= [0-9]+ | "(" tail ")"'

ACCEPTED = [
    ("json_schema", SCHEMA, ['{"a": 1}', '{"a":-7,"b":null}', '{\n "a": 0, "b": "x"}']),
    ("json_schema", "true", ["[1, {}]", '"é"', "null"]),
    ("json_schema", '{"type": "object"}', ["{}", '{"a": {"b": [true]}}']),
    ("regex", "a[bc]{2,3}|Ω/", ["abb", "acbc", "Ω/"]),
    ("grammar", LARK, ["a12", "a((3))"]),
    ("grammar", GBNF, ["a12", "a((3))"]),
    ("choice", json.dumps(["yes", "yes!", "a|b", 'the "world"\n', "[é]\\d/"]), None),
    ("structural_tag", FORMAT, ["<call=add>12</call>, and so", "<call=add>-1</call>"]),
    ("structural_tag", TAG, ["just text", "t <call=add>12</call> then <call=say>\"x\"</call>", ""]),
]  # fmt: skip
REJECTED = [
    ("json_schema", SCHEMA, ['{"b":null}', '{"a":1.5}', '{"a":1,"c":2}', '{"a":1', '{"a":1}x']),
    ("json_schema", "true", ["", "nul", "{]"]),
    ("json_schema", '{"type": "object"}', ["[]", "{'a': 1}"]),
    ("regex", "a[bc]{2,3}|Ω/", ["ab", "abbbb", "xabb", ""]),
    ("grammar", LARK, ["a", "a((3)", "12"]),
    ("grammar", GBNF, ["a", "a((3)", "12"]),
    ("choice", '["yes", "yes!", "a|b"]', ["ye", "yes!!", "a", ""]),
    ("structural_tag", FORMAT, ["", "x <call=add>1</call>", "<call=add>1</call> <call=x>"]),
    ("structural_tag", TAG, ["<call=mul>1</call>", "<call=add>x</call>", "<call=add>1"]),
]


def accepts(kind: str, text: str, output: str) -> bool:
    """Return whether ``output`` and then the end of the sequence is what the grammar allows."""
    matcher = make_matcher(kind, text)
    for token in ids_of(output):
        if token not in allowed(matcher):
            return False
        assert matcher.consume_token(token)
    return set(EOS) <= allowed(matcher)


@pytest.mark.parametrize(("kind", "text", "outputs"), ACCEPTED)
def test_what_a_grammar_allows(kind: str, text: str, outputs: list[str] | None) -> None:
    for output in json.loads(text) if outputs is None else outputs:
        assert accepts(kind, text, output), output


@pytest.mark.parametrize(("kind", "text", "outputs"), REJECTED)
def test_what_a_grammar_does_not_allow(kind: str, text: str, outputs: list[str]) -> None:
    for output in outputs:
        assert not accepts(kind, text, output), output


def test_every_kind_is_looked_at() -> None:
    for cases in (ACCEPTED, REJECTED):
        assert {kind for kind, _, _ in cases} == set(GRAMMAR_KINDS)
    assert {kind for kind, _, _ in WRONG} == set(GRAMMAR_KINDS)


WRONG = [
    ("json_schema", '{"type":', "it must be a JSON schema, as JSON"),
    ("json_schema", "[1]", "a JSON schema is an object, true or false"),
    ("json_schema", '{"type": "foo"}', "Invalid type: foo"),
    ("json_schema", '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
    ("json_schema", '{"type":"string","pattern":"(?=a)b"}', "look-around"),
    ("json_schema", "false", "Unsatisfiable schema"),
    ("json_schema", '{"type":"integer","minimum":5,"maximum":3}', "minimum (5) is greater"),
    ("json_schema", '{"$ref":"http://localhost/x"}', "does not fetch"),
    ("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000, "recursion"),
    ("regex", "(", 'invalid regex "("'),
    ("regex", "a{1,", "unclosed counted repetition"),
    ("regex", "[a&&b]", "no output at all"),
    ("grammar", "start: foo", 'unknown name: "foo"'),
    ("grammar", 'root ::= "a" | foo', "Rule 'foo' not found"),
    ("grammar", 'root ::= "a" | "b', "Unexpected end of input"),
    ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
    ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
    ("grammar", "start: /" + "(" * 5000 + "a" + ")" * 5000 + "/", "exceed"),
    ("choice", "[]", "at least one string"),
    ("choice", '["a", 1]', "a JSON list of strings"),
    ("choice", "yes", "it must be a list of strings, as JSON"),
    ("structural_tag", "[]", "with structures and triggers"),
    ("structural_tag", '{"format": {}}', "format.type: one of const_string"),
    ("structural_tag", '{"triggers": ["<"], "structures": []}', "structures must be a list"),
    ("structural_tag", '{"triggers": [], "structures": [{}]}', "triggers must be a list"),
    ("structural_tag", '{"triggers": [""], "structures": [{}]}', "aren't empty"),
    ("structural_tag", '{"triggers": ["<"], "structures": [1]}', "structures[0] must be an object"),
    ("structural_tag", TAG.replace('"</call>"', "1"), "structures[0] must have the strings"),
    ("structural_tag", TAG.replace("schema", "scheme"), "structures[0].schema must be"),
    ("structural_tag", TAG.replace('["<call="]', '["<call=a"]'), "structures[1].begin begins with"),
    ("structural_tag", TAG.replace('["<call="]', '["<call=", "!"]'), "with the trigger '!'"),
    ("structural_tag", TAG.replace("integer", "int"), "Invalid type: int"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "reason"), WRONG)
def test_why_a_grammar_is_refused(kind: str, text: str, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        make_matcher(kind, text)
    message = str(caught.value)
    assert reason in message
    assert "\n" not in message
    assert len(message) <= 300


PIECES = {
    id: tokenizer().decode_bytes([id])
    for id in range(VOCAB_SIZE)
    if not tokenizer().is_special_token(id) and id != tiny_tokenizer().token_to_id("ÿ")
}
"""The bytes of each token, without the byte 255, which is in no text."""


@pytest.mark.parametrize(
    ("text", "letters"),
    [("(the|there|then)?e{0,2}", "then r"), ("[a-c]+d|cat( cat)*", "abcdt "), ("..", "aé\n")],
)
def test_masks_equal_brute_force(text: str, letters: str) -> None:
    """Compare masks: a token is allowed if the text with it begins a word of the language."""
    pattern = regex.compile(text)
    alphabet = [chr(byte) for byte in range(32, 127)] + list(letters)

    def is_beginning(output: bytes) -> bool:
        try:
            decoded = output.decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return False
            # Any character may come of it: the languages don't tell those beyond ASCII apart.
            decoded = output[: error.start].decode() + "é"
        return pattern.fullmatch(decoded, partial=True) is not None

    checked = 0
    for length in range(3):
        letters_of_prefix = alphabet if length == 1 else list(dict.fromkeys(letters))
        for prefix in itertools.product(letters_of_prefix, repeat=length):
            output = "".join(prefix)
            if pattern.fullmatch(output, partial=True) is None:
                continue
            matcher = make_matcher("regex", text)
            assert matcher.consume_tokens(ids_of(output))
            expected = {id for id, piece in PIECES.items() if is_beginning(output.encode() + piece)}
            if pattern.fullmatch(output):
                expected |= set(EOS)
            assert allowed(matcher) == expected, output
            checked += 1
    assert checked > 3


def test_choices_equal_brute_force() -> None:
    choices = ["the", "there", "the cat", "in", "ing", "é", ""]
    beginnings = {word.encode()[:end] for word in choices for end in range(len(word.encode()) + 1)}
    for beginning in beginnings:
        matcher = make_matcher("choice", json.dumps(choices))
        matcher.consume_tokens(tokenizer().tokenize_bytes(beginning))
        assert not matcher.is_error()
        expected = {id for id, piece in PIECES.items() if beginning + piece in beginnings}
        if beginning.decode(errors="replace") in choices:
            expected |= set(EOS)
        next_bytes = {PIECES[id][:1] for id in expected.difference(EOS)}
        if len(next_bytes) == 1 and not expected & set(EOS):
            # What is certain to come is given in the tokens that the tokenizer has for it.
            assert allowed(matcher) <= expected, beginning
            assert allowed(matcher)
        else:
            assert allowed(matcher) == expected, beginning


def test_many_choices() -> None:
    choices = [f"option number {number} of many" for number in range(5000)]
    matcher = make_matcher("choice", json.dumps(choices))
    began = time.process_time()
    assert text_of(sorted(allowed(matcher))) == "o"
    assert time.process_time() - began < 2


def test_a_trigger_that_is_a_special_token() -> None:
    text = json.dumps(
        {
            "structures": [
                {"begin": "<|im_start|>add:", "schema": {"const": 1}, "end": ";"},
                {"begin": "<say>", "schema": {"const": 2}, "end": "</say>"},
            ],
            "triggers": ["<|im_start|>", "<say>"],
        }
    )
    matcher = make_matcher("structural_tag", text)
    assert matcher.consume_tokens(ids_of("so "))
    assert 1 in allowed(matcher)
    assert matcher.consume_tokens([1, *ids_of("add:1;<say>")])
    assert text_of(sorted(allowed(matcher))).strip() == "2"
    assert matcher.consume_tokens(ids_of("2</say>"))
    assert set(EOS) <= allowed(matcher)


def test_a_trigger_that_only_looks_like_a_special_token() -> None:
    text = json.dumps(
        {
            "structures": [{"begin": "<tool>", "schema": {"const": 1}, "end": "</tool>"}],
            "triggers": ["<tool>"],
        }
    )
    assert accepts("structural_tag", text, "a <toolbox> <tool>1</tool>")
    assert not accepts("structural_tag", text, "a <tool>2")


def test_what_a_model_has_no_tokens_for_is_masked() -> None:
    matcher = make_matcher("regex", "(.|\\n)*")
    assert max(allowed(matcher)) < VOCAB_SIZE < tokenizer().vocab_size
    assert not {1} & allowed(matcher)  # a special token that ends nothing


def test_models_without_what_a_grammar_needs(tmp_path: Path) -> None:
    files = open_model(make_tiny("smollm2", tmp_path))
    assert GrammarVocabulary.of(files) == attrs.evolve(
        GrammarVocabulary.of(files, str(tmp_path)), vocab_size=300, eos_ids=(2,)
    )
    endless = attrs.evolve(files, config=attrs.evolve(files.config, eos_token_ids=()))
    with pytest.raises(GrammarError, match="the model has no end-of-sequence id"):
        GrammarVocabulary.of(endless)
    with pytest.raises(GrammarError, match="nowhere"):
        GrammarVocabulary.of(files, str(tmp_path / "nowhere"))
    cache = GrammarCache(GrammarVocabulary('{"model": 1}', 300, (2,)))
    with pytest.raises(GrammarError, match="grammars need the bytes of tokens"):
        cache.prepare(Grammar("regex", "a"))
    refused = GrammarError("why not")
    with pytest.raises(GrammarError, match="why not"):
        GrammarCache(refused).matcher(Grammar("regex", "a"))


def test_a_vocabulary_is_built_with_the_first_grammar(tmp_path: Path) -> None:
    folder = make_tiny("smollm2", tmp_path)
    grammars = LazyGrammars(folder)
    grammars.prepare(Grammar("regex", "a"))
    (folder / "config.json").unlink()  # it is there, and isn't read again
    assert not grammars.matcher(Grammar("regex", "b")).is_error()
    grammars.close()
    late = LazyGrammars(folder)
    late.close()
    with pytest.raises(GrammarError, match=r"tokenizer can't be read again: .*config\.json"):
        late.prepare(Grammar("regex", "a"))


def test_a_vocabulary_is_built_with_the_model_if_there_were_grammars(tmp_path: Path) -> None:
    folder = make_tiny("smollm2", tmp_path)
    config = EngineConfig(str(folder), device="cpu", dtype="float32", num_threads=1)
    for has_grammars in (True, False):
        start = attrs.evolve(start_message(config, folder), has_grammars=has_grammars)
        constraints = load(start, unseen).constraints
        assert constraints is not None
        copy = shutil.copy(folder / "config.json", tmp_path / "kept")
        (folder / "config.json").unlink()
        found = constraints.prepare(Grammar("regex", "a"), {})
        assert isinstance(found, int) == has_grammars
        shutil.copy(copy, folder / "config.json")
        constraints.shut_down()


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_tokenizers_that_tell_bytes(make: Callable[[], tokenizers.Tokenizer]) -> None:
    backend = make()
    mine = GrammarVocabulary(backend.to_str(), backend.get_vocab_size() + 3, (0,)).build()
    text = "the stop é😀"
    matcher = compile_text(to_llguidance(Grammar("regex", f" ?{text}+"), mine), mine)
    ids = backend.encode(text, add_special_tokens=False).ids
    for id in ids:
        assert id in allowed(matcher)
        assert matcher.consume_token(id)
    assert 0 in allowed(matcher)
    assert not matcher.consume_token(ids[0])


@pytest.mark.parametrize("make", [metaspace, words])
def test_tokenizers_that_do_not(make: Callable[[], tokenizers.Tokenizer]) -> None:
    with pytest.raises(GrammarError, match=r"grammars need the bytes of tokens.*decoder type"):
        GrammarVocabulary(make().to_str(), make().get_vocab_size(), (0,)).build()


HOPELESS = Grammar(
    "json_schema", json.dumps({"allOf": [{"pattern": f".*a{{{i}}}.*b"} for i in range(1, 30)]})
)


@pytest.mark.parametrize(
    ("seconds", "memory", "reason"), [(1, 1 << 30, "1 s or 1024 MiB"), (60, 1 << 25, "32 MiB")]
)
def test_a_grammar_that_would_take_all_there_is(seconds: int, memory: int, reason: str) -> None:
    trial = GrammarTrial(VOCABULARY, max_seconds=seconds, max_memory=memory)
    assert "root" not in trial.run(Grammar("regex", "a+")).text
    with pytest.raises(GrammarError, match=f"it takes more than .*{reason}"):
        trial.run(HOPELESS)
    assert trial.run(Grammar("regex", "a+")).text  # in a new process
    process = trial._process
    assert process is not None
    with pytest.raises(GrammarError, match="Rule 'foo' not found"):
        trial.run(Grammar("grammar", "root ::= foo"))
    trial.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)


def test_a_tokenizer_that_the_trial_cannot_read() -> None:
    trial = GrammarTrial(GrammarVocabulary("{}", 300, (2,)))
    with pytest.raises(GrammarError, match="grammars need the bytes of tokens"):
        trial.run(Grammar("regex", "a"))
    trial.close()


def test_the_cache_is_bounded_and_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    run = GrammarTrial.run

    def counted(self: GrammarTrial, grammar: Grammar) -> TrialVerdict:
        asked.append(grammar.text)
        return run(self, grammar)

    monkeypatch.setattr(GrammarTrial, "run", counted)
    cache = GrammarCache(VOCABULARY, max_entries=3)
    for text in ("a", "b", "(", "a"):
        if text == "(":
            for _ in range(2):  # an error is remembered too
                with pytest.raises(GrammarError, match="unclosed group"):
                    cache.prepare(Grammar("regex", text))
        else:
            cache.prepare(Grammar("regex", text))
    assert asked == ["a", "b", "("]
    cache.prepare(Grammar("choice", '["a"]'))  # takes b's place: a was used since
    assert len(cache) == 3
    cache.prepare(Grammar("regex", "a"))
    assert asked == ["a", "b", "(", '["a"]']
    cache.prepare(Grammar("regex", "b"))
    # What was prepared and isn't there any more needs no second trial.
    assert allowed(cache.matcher(Grammar("regex", "bc"))) == set(ids_of("b"))
    assert cache.prepare(Grammar("regex", "c"), tried=True) > 0
    assert len(asked) == 5
    cache.close()


def test_compiled_grammars_are_bounded_by_their_bytes() -> None:
    cache = GrammarCache(VOCABULARY, max_bytes=10_000_000)
    schemas = [
        Grammar("json_schema", json.dumps({"properties": {f"p{n}_{i}": {} for i in range(1500)}}))
        for n in range(6)
    ]
    sizes = [cache.prepare(schema) for schema in schemas]
    assert all(size > 20 * len(schemas[0].text) for size in sizes)
    assert sum(sizes) > 10_000_000 >= cache.num_bytes
    assert len(cache) < len(schemas)
    cache.prepare(Grammar("regex", "a"))
    assert cache.num_bytes <= 10_000_000
    small = GrammarCache(VOCABULARY, max_bytes=1)  # one is kept, whatever it takes
    small.prepare(schemas[0])
    assert len(small) == 1
    cache.close()
    small.close()


def test_matchers_of_a_grammar_are_independent() -> None:
    cache = GrammarCache(VOCABULARY)
    first, second = (cache.matcher(Grammar("regex", "ab")) for _ in range(2))
    assert first.consume_tokens(ids_of("a"))
    assert allowed(first) == set(ids_of("b"))
    assert allowed(second) == set(ids_of("a"))
    cache.close()
