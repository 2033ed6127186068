"""The tokens that slots may draw: static masks, bad words, grammars and processors, row by row."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

from gpu.constraints.adjuster import ROWS_FOR_THREADS, Constraints
from gpu.constraints.grammar_cache import GrammarCache
from gpu.constraints.processors import NamedProcessor, Processors
from gpu.slots import UNKNOWN_TOKEN, PlanError, Slot
from tests.support.grammar_vocabularies import EOS, VOCABULARY, allowed_of, ids_of, text_of
from tests.support.json_schemas import schemas
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.logits_processors import ProcessorRow
from trioserve.protocol.sampling import SamplerParams

VOCAB_SIZE = VOCABULARY.vocab_size
ALL = set(range(VOCAB_SIZE))
PROMPT = [5, 9, 9]


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCache]:
    cache = GrammarCache(VOCABULARY)
    yield cache
    cache.close()


@pytest.fixture
def constraints(grammars: GrammarCache) -> Constraints:
    return Constraints(VOCAB_SIZE, grammars, num_threads=2)


def make_slot(number: int, output: Sequence[int] = (), **params: Any) -> Slot:
    buffer = np.array([*PROMPT, *output, *[0] * 400], dtype=np.int32)
    return Slot(
        number=number, generation=1, prompt_length=len(PROMPT), computed=0,
        sampler=SamplerParams(stop_ids=list(EOS), **params), buffer=buffer,
        length=len(PROMPT) + len(output),
    )  # fmt: skip


def opened(
    constraints: Constraints, number: int, output: Sequence[int] = (), **params: Any
) -> Slot:
    slot = make_slot(number, output, **params)
    constraints.open(slot)
    return slot


def append(slot: Slot, token: int) -> None:
    slot.settle(slot.extend(), token)


def allowed(constraints: Constraints, slots: Sequence[Slot]) -> list[set[int]]:
    """Return what each of ``slots`` may draw."""
    adjustment = constraints.adjustment(torch.zeros(len(slots), VOCAB_SIZE), slots)
    if adjustment.bitmask is None:
        return [ALL for _ in slots]
    assert adjustment.bitmask.dtype == np.int32
    assert adjustment.bitmask.shape == (len(slots), -(-VOCAB_SIZE // 32))
    return [allowed_of(row.tobytes()) & ALL for row in adjustment.bitmask]


def test_nothing_to_adjust(constraints: Constraints) -> None:
    slot = opened(constraints, 3)
    assert not constraints.adjusts(slot)
    assert not constraints.needs_last_token(slot)
    adjustment = constraints.adjustment(torch.zeros(1, VOCAB_SIZE), [slot])
    assert adjustment.bitmask is None
    assert adjustment.bias is None
    constraints.close(3)
    constraints.close(77)


def test_allowed_ids_and_words_of_one_token_need_no_last_token(constraints: Constraints) -> None:
    some = opened(constraints, 0, allowed_token_ids=[0, 31, 32, 63, 309, 7])
    without = opened(constraints, 1, bad_words=[[31], [309]])
    both = opened(constraints, 2, allowed_token_ids=[4, 31], bad_words=[[31]])
    plain = opened(constraints, 3)
    for slot in (some, without, both):
        assert constraints.adjusts(slot)
        assert not constraints.needs_last_token(slot)
        slot.extend()
        assert slot.tokens[-1] == UNKNOWN_TOKEN
    sets = allowed(constraints, [both, plain, some, without])
    assert sets == [{4}, ALL, {0, 31, 32, 63, 309, 7}, ALL - {31, 309}]
    append(some, EOS[0])
    assert some.stopped
    assert allowed(constraints, [some, both]) == [ALL, {4}]


def test_bad_words_of_several_tokens(constraints: Constraints) -> None:
    # The prompt ends with 9, 9: it isn't part of what must not have the words.
    slot = opened(constraints, 0, bad_words=[[9, 9, 4], [4, 6], [8]])
    assert constraints.needs_last_token(slot)
    expected = []
    for token in (9, 9, 4, 5, 9, 4):
        output = slot.tokens[slot.prompt_length :].tolist()
        banned = {8}
        if output[-2:] == [9, 9]:
            banned.add(4)
        if output[-1:] == [4]:
            banned.add(6)
        expected.append(len(banned))
        assert allowed(constraints, [slot]) == [ALL - banned]
        append(slot, token)
    assert expected == [1, 1, 2, 2, 1, 1]


def test_a_grammar_and_the_end_it_allows(constraints: Constraints) -> None:
    slot = opened(constraints, 0, grammar=Grammar("regex", "ab?"))
    assert constraints.adjusts(slot)
    assert constraints.needs_last_token(slot)
    (a,), (b,) = ids_of("a"), ids_of("b")
    assert allowed(constraints, [slot]) == [{a}]
    assert allowed(constraints, [slot]) == [{a}]  # looking changes nothing
    append(slot, a)
    assert allowed(constraints, [slot]) == [{b, *EOS}]
    append(slot, b)
    assert allowed(constraints, [slot]) == [set(EOS)]
    append(slot, EOS[0])
    assert slot.stopped
    assert allowed(constraints, [slot]) == [ALL]


def test_a_grammar_goes_on_to_the_end_where_that_is_ignored(constraints: Constraints) -> None:
    slot = opened(constraints, 0, grammar=Grammar("regex", "a"))
    slot.sampler = SamplerParams(grammar=Grammar("regex", "a"))
    tokens = [*ids_of("a"), EOS[0], EOS[1], EOS[0]]
    for token in tokens:
        append(slot, token)
        assert allowed(constraints, [slot]) == [set(EOS)]
    again = make_slot(1, tokens)
    again.sampler = slot.sampler
    constraints.open(again)
    assert allowed(constraints, [again]) == [set(EOS)]


def test_everything_at_once_leaves_what_all_allow(constraints: Constraints) -> None:
    a, b, c = ids_of("a")[0], ids_of("b")[0], ids_of("c")[0]
    params: dict[str, Any] = {"grammar": Grammar("regex", "[abc]+")}
    slot = opened(constraints, 0, [a], **params, allowed_token_ids=[a, b, c], bad_words=[[a, b]])
    assert allowed(constraints, [slot]) == [{a, c}]
    nothing = opened(constraints, 1, **params, allowed_token_ids=[EOS[0]])
    assert allowed(constraints, [slot, nothing]) == [{a, c}, set()]


def test_a_token_that_the_grammar_forbids_leaves_nothing(constraints: Constraints) -> None:
    slot = opened(constraints, 0, ids_of("x"), grammar=Grammar("regex", "a+"))
    beside = opened(constraints, 1, grammar=Grammar("regex", "a+"))
    assert allowed(constraints, [slot, beside]) == [set(), {ids_of("a")[0], *ids_of("aa")}]
    behind_the_end = opened(constraints, 2, ids_of("ax"), grammar=Grammar("regex", "a"))
    assert allowed(constraints, [behind_the_end]) == [set()]


def test_a_number_that_is_used_again(constraints: Constraints) -> None:
    opened(constraints, 0, grammar=Grammar("regex", "a+"))
    again = opened(constraints, 0, grammar=Grammar("regex", "b"))
    assert allowed(constraints, [again]) == [set(ids_of("b"))]
    assert not constraints.adjusts(opened(constraints, 0))


def test_many_rows_are_computed_in_threads(constraints: Constraints) -> None:
    texts = [f"{chr(97 + i % 26)}{{{1 + i // 26}}}" for i in range(3 * ROWS_FOR_THREADS)]
    slots = [opened(constraints, i, grammar=Grammar("regex", t)) for i, t in enumerate(texts)]
    plain = opened(constraints, len(slots))
    together = allowed(constraints, [*slots[:5], plain, *slots[5:]])
    alone = [allowed(constraints, [slot])[0] for slot in [*slots[:5], plain, *slots[5:]]]
    assert together == alone
    assert len({frozenset(each) for each in together}) > 20


def walk(constraints: Constraints, slot: Slot, rng: random.Random, most: int) -> list[set[int]]:
    """Draw until the end or ``most`` tokens: what was allowed before each."""
    seen = []
    while not slot.stopped and len(seen) < most:
        seen += allowed(constraints, [slot])
        append(slot, rng.choice(sorted(seen[-1])))
    return seen


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type":"object","properties":{"the":{"type":"string"}}}'),
        ("regex", "[a-z]{1,9}( the| on){0,7}"),
        ("grammar", 'start: item (", " item)*\nitem: "the" | "(" start ")"'),
        ("choice", '["the there", "them", "in"]'),
    ],
)
def test_a_slot_that_is_opened_again_has_the_same_masks(
    constraints: Constraints, kind: str, text: str
) -> None:
    for round in range(5):
        params: dict[str, Any] = {"grammar": Grammar(kind, text), "bad_words": [[70, 71]]}
        slot = opened(constraints, 0, **params)
        seen = walk(constraints, slot, random.Random(round), 40)
        output = slot.tokens[slot.prompt_length :].tolist()
        for length in {0, 1, len(seen) // 2, len(seen) - 1}:
            again = opened(constraints, 1, output[:length], **params)
            assert allowed(constraints, [again]) == [seen[length]]


@seed(4)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(schemas())
def test_walks_under_masks_are_what_the_schema_accepts(
    constraints: Constraints, schema: dict[str, Any]
) -> None:
    slot = opened(constraints, 0, grammar=Grammar("json_schema", json.dumps(schema)))
    walk(constraints, slot, random.Random(len(schema)), 380)
    if slot.stopped:
        value = json.loads(text_of(slot.tokens[slot.prompt_length :].tolist()))
        jsonschema.validate(value, schema)
        FINISHED.append(schema)


FINISHED: list[dict[str, Any]] = []


def test_most_walks_got_to_an_end() -> None:
    assert len(FINISHED) >= 150


def test_a_grammar_that_gets_too_complex_on_the_way(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gpu.constraints.grammars._STEP_MAX_ITEMS", 100)
    ambiguous = Grammar("grammar", 'start: a\na: a a | b\nb: "x" | "y" | a b a | ')
    slot = opened(constraints, 0, grammar=ambiguous)
    beside = opened(constraints, 1, grammar=Grammar("regex", "c+"))
    for length in range(50):
        mine, others = allowed(constraints, [slot, beside])
        assert others
        if not mine:
            assert length > 2
            (line,) = caplog.messages
            assert line.startswith("slot 0 has no token to draw: ")
            assert "\n" not in line
            return
        append(slot, ids_of("x")[0])
    pytest.fail("it never got too complex")


def test_what_prepare_says(constraints: Constraints) -> None:
    assert constraints.prepare(None, {}) == 0
    num_bytes = constraints.prepare(Grammar("regex", "a*"), {})
    assert isinstance(num_bytes, int)
    assert num_bytes > 0
    wrong = constraints.prepare(Grammar("regex", "("), {})
    assert wrong == {
        "error": 'grammar: invalid regex "(" (in regex): regex parse error: unclosed group',
        "param": "grammar",
    }
    untaken = constraints.prepare(None, {"beta": 1, "alpha": 2})
    assert untaken is not None
    assert untaken["param"] == "extra_args"
    assert "(--logits-processors) takes alpha, beta" in untaken["error"]
    with pytest.raises(PlanError, match="the grammar of slot 6: invalid regex") as caught:
        opened(constraints, 6, grammar=Grammar("regex", "("))
    assert caught.value.slot == 6


@attrs.define
class Adds:
    """A processor that adds to the bias of token ``args[name]``; it records the open slots."""

    name: str
    thread: str = ""
    seen: dict[int, float] = attrs.field(factory=dict)
    log: list[str] = attrs.field(factory=list)

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.name,)

    def check(self, args: Mapping[str, Any]) -> bool:
        if args.get(self.name) == 13:
            raise ValueError(f"{self.name} must not be 13")
        return self.name in args

    def open(self, slot: int, args: Mapping[str, Any]) -> None:
        self.log.append(f"open {slot}")
        self.seen[slot] = args[self.name]

    def close(self, slot: int) -> None:
        self.log.append(f"close {slot}")
        del self.seen[slot]

    def apply(self, logits: torch.Tensor, bias: torch.Tensor, rows: Sequence[ProcessorRow]) -> None:
        for row in rows:
            assert row.prompt_length == len(PROMPT)
            self.log.append(f"apply {row.slot} {row.tokens.tolist()[row.prompt_length :]}")
            bias[row.index] = 2 * bias[row.index] + self.seen[row.slot]
            if self.seen[row.slot] == 666:
                raise RuntimeError("no more\nof this")


def test_processors_see_the_rows_that_they_said_yes_to(grammars: GrammarCache) -> None:
    first, second = Adds("x"), Adds("y")
    named = [NamedProcessor("m:X", first), NamedProcessor("m:Y", second)]
    constraints = Constraints(VOCAB_SIZE, grammars, Processors(named))
    slots = [
        opened(constraints, 4, [8], extra_args={"x": 1, "y": 10}),
        opened(constraints, 5),
        opened(constraints, 6, extra_args={"y": 3}, allowed_token_ids=[4]),
    ]
    assert [constraints.adjusts(slot) for slot in slots] == [True, False, True]
    assert [constraints.needs_last_token(slot) for slot in slots] == [True, False, True]
    logits = torch.zeros(3, VOCAB_SIZE)
    adjustment = constraints.adjustment(logits, slots)
    assert adjustment.bias is not None
    assert adjustment.bias.dtype == torch.float32
    assert [row.unique().tolist() for row in adjustment.bias] == [[12], [0], [3]]
    assert allowed(constraints, slots) == [ALL, ALL, {4}]
    append(slots[0], EOS[0])
    assert slots[0].stopped
    constraints.close(6)
    constraints.close(6)
    opened(constraints, 4, [9], extra_args={"x": 2})
    constraints.adjustment(logits[:1], [slots[0]])
    assert first.log == ["open 4", "apply 4 [8]", "apply 4 [8]", "close 4", "open 4"]
    assert second.log[-3:] == ["apply 6 []", "close 6", "close 4"]
    assert second.seen == {}
    assert constraints.prepare(None, {"x": 1, "y": 1}) == 0
    untaken = constraints.prepare(None, {"x": 1, "z": 1, "a": 1})
    assert untaken is not None
    assert untaken["error"].endswith("(--logits-processors) takes a, z")
    assert untaken["param"] == "extra_args"
    refused = {"error": "y must not be 13", "param": "extra_args"}
    assert constraints.prepare(None, {"x": 1, "y": 13}) == refused


def test_processors_ask_for_no_gradients(grammars: GrammarCache) -> None:
    """Whatever computes the logits: a processor's own network gives plain numbers."""

    class Network(Adds):
        def apply(
            self, logits: torch.Tensor, bias: torch.Tensor, rows: Sequence[ProcessorRow]
        ) -> None:
            bias += torch.from_numpy(torch.nn.Linear(VOCAB_SIZE, VOCAB_SIZE)(logits).numpy())

    constraints = Constraints(
        VOCAB_SIZE, grammars, Processors([NamedProcessor("m:N", Network("x"))])
    )
    slot = opened(constraints, 1, extra_args={"x": 1})
    bias = constraints.adjustment(np.ones((1, VOCAB_SIZE), dtype=np.float32), [slot]).bias
    assert bias is not None
    assert bias.isfinite().all()


def test_processors_that_fail(grammars: GrammarCache) -> None:
    constraints = Constraints(VOCAB_SIZE, grammars, Processors([NamedProcessor("m:X", Adds("x"))]))
    bad = opened(constraints, 0, extra_args={"x": 666})
    good = opened(constraints, 1, extra_args={"x": 1})
    message = "the logits processor m:X failed: RuntimeError: no more$"
    with pytest.raises(PlanError, match=message) as caught:
        constraints.adjustment(torch.zeros(2, VOCAB_SIZE), [good, bad])
    assert caught.value.slot == -1
    with pytest.raises(PlanError, match=message) as caught:
        constraints.adjustment(torch.zeros(1, VOCAB_SIZE), [bad])
    assert caught.value.slot == 0
    with pytest.raises(PlanError, match="TypeError") as caught:
        opened(constraints, 7, extra_args={"x": []}).extend()
        constraints.adjustment(torch.zeros(1, VOCAB_SIZE), [make_slot(7)])
    assert caught.value.slot == 7
    with pytest.raises(PlanError, match="ValueError: x must not be 13") as caught:
        opened(constraints, 8, extra_args={"x": 13})
    assert caught.value.slot == 8


def test_grammars_are_prepared_from_any_thread(constraints: Constraints) -> None:
    verdicts: list[Any] = []

    def prepare() -> None:
        verdicts.append(constraints.prepare(Grammar("regex", "q{4}"), {}))

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(verdicts) == 4
    assert len(set(verdicts)) == 1
    assert isinstance(verdicts[0], int)


def test_a_slot_goes_on_from_the_matcher_of_another(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beam that continues another one consumes one token; the two go apart from there."""
    grammar = Grammar("regex", "(ab|cd|e[0-9]){3,9}")
    constraints = Constraints(VOCAB_SIZE, grammars)
    first = opened(constraints, 0, ids_of("abe7"), grammar=grammar)
    allowed(constraints, [first])
    made: list[Grammar] = []
    matcher = GrammarCache.matcher
    monkeypatch.setattr(
        GrammarCache, "matcher", lambda self, text: made.append(text) or matcher(self, text)
    )
    fork = opened(constraints, 1, ids_of("abe7c"), grammar=grammar)
    assert not made
    append(first, ids_of("e")[0])
    apart = Constraints(VOCAB_SIZE, grammars)
    expected = allowed(apart, [opened(apart, 7, ids_of("abe7c"), grammar=grammar)])
    expected += allowed(apart, [opened(apart, 8, ids_of("abe7e"), grammar=grammar)])
    assert allowed(constraints, [fork, first]) == expected
    assert expected[0] != expected[1]
    made.clear()
    opened(constraints, 2, ids_of("cd"), grammar=grammar)
    opened(constraints, 3, ids_of("abe7e"), grammar=Grammar("regex", "(ab|e[0-9]){3,9}"))
    assert len(made) == 2
