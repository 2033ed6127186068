"""The requests of each data set, and work read from files."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.support.load_server import DONE, FakeServer, Script, event, usage
from tests.support.tiny_models import tiny_tokenizer
from trioserve.load import (
    Cancel,
    Conversation,
    CountedTexts,
    GuessedTexts,
    Lengths,
    Target,
    Turn,
    chats,
    closed_loop,
    fixed_prompt,
    random_prompts,
    repeated,
    request_fields,
    shared_prefixes,
    structured,
    with_cancellations,
)
from trioserve.model_files import locate, open_model

GUESSED = GuessedTexts()


@pytest.fixture(scope="module")
def counted() -> CountedTexts:
    return CountedTexts(open_model(locate("smollm2-135m")).load_tokenizer())


def words(work: list[Conversation]) -> list[int]:
    return [len(str(one.turns[0].prompt).split()) for one in work]


@given(st.integers(1, 5000), st.floats(0, 0.99), st.integers(0, 99))
def test_lengths_are_drawn_from_the_range_that_vllm_has(n: int, ratio: float, seed: int) -> None:
    lengths = Lengths(input_tokens=n, output_tokens=n, range_ratio=ratio)
    rng = random.Random(seed)
    for value in (value for _ in range(5) for value in lengths.draw(rng)):
        assert max(int(n * (1 - ratio)), 1) <= value <= n * (1 + ratio) + 1
        if not ratio:
            assert value == n


def test_both_ends_of_the_range_are_drawn() -> None:
    lengths = Lengths(input_tokens=10, output_tokens=4, range_ratio=0.25)
    rng = random.Random(0)
    drawn = [lengths.draw(rng) for _ in range(500)]
    assert {tokens_in for tokens_in, _ in drawn} == set(range(7, 14))
    assert {tokens_out for _, tokens_out in drawn} == {3, 4, 5}


@pytest.mark.parametrize(
    "wrong", [{"input_tokens": 0}, {"output_tokens": 0}, {"range_ratio": 1.0}, {"range_ratio": -1}]
)
def test_lengths_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="lengths are at least 1"):
        Lengths(**{"input_tokens": 1, "output_tokens": 1, **wrong})


def test_random_prompts_have_exactly_the_tokens_drawn_and_differ(counted: CountedTexts) -> None:
    work = random_prompts(counted, 30, Lengths(input_tokens=100, output_tokens=9), seed=4)
    prompts = [str(one.turns[0].prompt) for one in work]
    assert {counted.count(prompt) for prompt in prompts} == {100}
    assert len({prompt[:20] for prompt in prompts}) == 30
    assert {one.turns[0].max_tokens for one in work} == {9}
    again = random_prompts(counted, 30, Lengths(input_tokens=100, output_tokens=9), seed=4)
    assert work == again


def test_groups_share_their_prefixes_exactly(counted: CountedTexts) -> None:
    lengths = Lengths(input_tokens=20, output_tokens=9)
    work = shared_prefixes(counted, 12, lengths, groups=3, prefix_tokens=50)
    ids = [counted.tokenizer.encode(str(one.turns[0].prompt)).ids for one in work]
    assert {len(prompt) for prompt in ids} == {70}
    assert len({tuple(prompt[:50]) for prompt in ids}) == 3
    assert all(ids[n][:50] == ids[n + 3][:50] for n in range(9))
    assert len({tuple(prompt[50:54]) for prompt in ids}) == 12


def test_without_a_tokenizer_words_stand_for_tokens() -> None:
    assert not GUESSED.exact
    work = random_prompts(GUESSED, 3, Lengths(input_tokens=40, output_tokens=1), prefix_tokens=5)
    assert words(work) == [45] * 3
    assert len({str(one.turns[0].prompt).split()[4] for one in work}) == 1
    assert GUESSED.count("a" * 9) == 3


def test_a_tokenizer_whose_texts_do_not_come_back_gives_nearly_the_length() -> None:
    texts = CountedTexts(tiny_tokenizer())
    text = texts.make(20, random.Random(0))
    assert abs(texts.count(text) - 20) <= 2


def test_a_fixed_prompt_is_always_the_same() -> None:
    work = fixed_prompt("Say it again.", 3, 5)
    assert [(one.turns[0].prompt, one.turns[0].max_tokens) for one in work] == [
        ("Say it again.", 5)
    ] * 3
    assert [one.turns[0].prompt for one in repeated([*work[:1], *fixed_prompt("b", 1, 1)], 3)] == [
        "Say it again.", "b", "Say it again."
    ]  # fmt: skip


async def test_each_turn_of_a_chat_has_the_history_and_the_answers(autojump_clock: Any) -> None:
    work = chats(
        GUESSED, 2, Lengths(input_tokens=6, output_tokens=3), turns=3, system_tokens=4, pause=2.0
    )

    def answer(body: dict[str, Any]) -> Script:
        said = f"answer {len(body['messages'])}"
        delta = event(choices=[{"index": 0, "delta": {"content": said}, "finish_reason": "stop"}])
        return [(1.0, delta), (0.0, usage(1, 2)), (0.0, DONE)]

    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, answer)
        target = Target(connect=server.connect, path="/v1/chat/completions", fields={})
        run = await closed_loop(target, work, 1)
    assert [record.error for record in run.records] == [""] * 6
    bodies = [body["messages"] for _, body in server.requests]
    assert [message["role"] for message in bodies[2]] == [
        "system", "user", "assistant", "user", "assistant", "user"
    ]  # fmt: skip
    assert [m["content"] for m in bodies[2] if m["role"] == "assistant"] == ["answer 2", "answer 4"]
    assert bodies[1][:2] == bodies[0] == bodies[2][:2]
    assert bodies[3][0] == bodies[0][0]
    assert bodies[3][1] != bodies[0][1]
    pauses = [turn.pause for one in work for turn in one.turns]
    assert pauses[0] == pauses[3] == 0
    assert all(pause > 0 for pause in (*pauses[1:3], *pauses[4:]))
    assert run.duration == pytest.approx(6.0 + sum(pauses))


async def test_a_conversation_ends_with_its_first_failure(autojump_clock: Any) -> None:
    work = chats(GUESSED, 1, Lengths(input_tokens=3, output_tokens=3), turns=3)
    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, lambda _: [(0.0, b"{}")], status=500)
        target = Target(connect=server.connect, path="/v1/chat/completions", fields={})
        run = await closed_loop(target, work, 1)
    assert [record.error_kind for record in run.records] == ["HTTP 500"]


@pytest.mark.parametrize(
    ("answer", "finish", "valid"),
    [('{"a": 1}', "stop", True), ("Sure!", "stop", False), ('{"a": ', "length", None)],
)
async def test_structured_work_brings_a_schema_and_its_answers_are_checked(
    autojump_clock: Any, answer: str, finish: str, valid: bool | None
) -> None:
    work = structured(4, 50, seed=1)
    schemas = [one.turns[0].fields["response_format"]["json_schema"]["schema"] for one in work]
    assert schemas[0] == schemas[3] != schemas[1]
    assert all(schema["required"] == list(schema["properties"]) for schema in schemas)

    def script(body: dict[str, Any]) -> Script:
        assert body["response_format"]["type"] == "json_schema"
        delta = {"content": answer}
        return [(0.1, event(choices=[{"index": 0, "delta": delta, "finish_reason": finish}]))]

    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, script)
        target = Target(connect=server.connect, path="/v1/chat/completions", fields={})
        run = await closed_loop(target, work, 4)
    assert [record.valid for record in run.records] == [valid] * 4


def test_a_schema_of_ones_own_takes_their_place() -> None:
    (one,) = structured(1, 5, schema={"type": "array"})
    assert one.turns[0].fields["response_format"]["json_schema"]["schema"] == {"type": "array"}


def test_cancellations_are_drawn_at_the_rate_and_from_the_range() -> None:
    work = random_prompts(GUESSED, 2000, Lengths(input_tokens=1, output_tokens=1))
    leaving = with_cancellations(work, rate=0.25, events=(2, 5), seed=3)
    drawn = [one.turns[0].cancel for one in leaving if one.turns[0].cancel is not None]
    assert len(drawn) / 2000 == pytest.approx(0.25, abs=0.03)
    assert {cancel.events for cancel in drawn} == {2, 3, 4, 5}
    timed = with_cancellations(work[:200], rate=1.0, seconds=(0.5, 2.0))
    seconds = [one.turns[0].cancel for one in timed]
    assert all(c is not None and c.seconds and 0.5 <= c.seconds <= 2.0 for c in seconds)
    assert with_cancellations(work, rate=0.0, events=(1, 1)) == work
    for wrong in ({}, {"seconds": (0.0, 1.0), "events": (1, 2)}):
        with pytest.raises(ValueError, match="leaves after"):
            with_cancellations(work, rate=0.5, **wrong)  # type: ignore[arg-type]


# -- the bodies of requests


def test_a_prompt_is_text_or_tokens_or_a_users_message() -> None:
    one = Conversation(turns=(Turn(prompt="hi", max_tokens=3, fields={"seed": 1}),))
    assert request_fields(one, 0, [], chat=False) == {"max_tokens": 3, "prompt": "hi", "seed": 1}
    assert request_fields(one, 0, [], chat=True)["messages"] == [{"role": "user", "content": "hi"}]
    ids = Conversation(turns=(Turn(prompt=(1, 2)), Turn(prompt="x")))
    assert request_fields(ids, 0, [], chat=False) == {"prompt": [1, 2]}
    with pytest.raises(ValueError, match="/v1/completions only"):
        request_fields(ids, 0, [], chat=True)
    with pytest.raises(ValueError, match="can't be joined"):
        request_fields(ids, 1, ["a"], chat=False)
    messages = Conversation(turns=(Turn(messages=({"role": "user", "content": "q"},)),) * 2)
    assert request_fields(messages, 1, ["a"], chat=False)["prompt"] == "q\n\na\n\nq"
    assert Cancel() == Cancel(seconds=None, events=None)
