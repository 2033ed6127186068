"""Programs with instructor: answers as objects, by tools and by JSON."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Any, Literal

import instructor
import openai
import pytest
from asked_server import KEY, MODEL, URL, wait_until_idle
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
"""Modes in which a grammar holds the model to the schema."""

Size = StrEnum("Size", ["small", "large"])


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class River(Strict):
    name: Literal["Seine", "Thames"]
    long: bool


class City(Strict):
    """A city, and what flows through it."""

    size: Size
    capital: bool
    river: River | None
    districts: list[Literal["north", "south"]] = Field(max_length=2)


class Warm(Strict):
    """Warmth, as the schema has it."""

    warm: bool


ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Describe Paris."}],
    "temperature": 0,
    "max_tokens": 150,
    "max_retries": 1,
}


def client(mode: instructor.Mode = instructor.Mode.TOOLS, key: str = KEY) -> instructor.Instructor:
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0)
    return instructor.from_openai(plain, mode=mode, model=MODEL)


@pytest.mark.parametrize("mode", MODES)
def test_an_object_with_others_in_it(mode: instructor.Mode) -> None:
    city = client(mode).create(response_model=City, **ASKED)
    assert isinstance(city, City)


@pytest.mark.parametrize("mode", MODES)
def test_an_object_as_it_grows(mode: instructor.Mode) -> None:
    *parts, last = client(mode).create_partial(response_model=River, **ASKED)
    assert isinstance(last, River)
    assert parts
    assert parts[0].name is None or parts[0].long is None
    for part in parts:
        assert last.name.startswith(part.name or "")
        assert part.long in (None, last.long)


def test_an_object_and_the_completion_that_it_came_in() -> None:
    warm, completion = client().create_with_completion(response_model=Warm, **ASKED)
    assert isinstance(warm, Warm)
    assert completion.model == MODEL
    assert completion.usage.completion_tokens > 0


def test_objects_that_come_one_by_one() -> None:
    """A schema of instructor's would allow none at all, so the server is told what to write."""
    one = r'\{"warm": (true|false)\}'
    form = f'```json\n\\{{"tasks": \\[{one}, {one}\\]\\}}\n```'
    asking = client(instructor.Mode.MD_JSON)
    forced = {"extra_body": {"structured_outputs": {"regex": form}}}
    objects = list(asking.create_iterable(response_model=Warm, **ASKED, **forced))
    assert len(objects) == 2
    assert all(isinstance(each, Warm) for each in objects)


def test_leaving_aborts_a_request() -> None:
    endless = {**ASKED, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as plain:
            asking = instructor.from_openai(plain, model=MODEL, mode=instructor.Mode.MD_JSON)
            async with asyncio.timeout(0.5):
                await asking.create(response_model=Warm, **endless)

    with pytest.raises(TimeoutError):
        asyncio.run(leave())
    wait_until_idle()


def test_simple_types() -> None:
    assert isinstance(client().create(response_model=bool, **ASKED), bool)
    colour = client().create(response_model=Literal["red", "blue"], **ASKED)  # type: ignore[type-var]
    assert colour in ("red", "blue")


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_that_is_asked_for_again(mode: instructor.Mode) -> None:
    """The second request says what was wrong with the first answer."""
    seen = []

    class Checked(Warm):
        @field_validator("warm")
        @classmethod
        def only_the_second(cls, value: bool, info: ValidationInfo) -> bool:
            seen.append(value)
            if len(seen) == 1:
                raise ValueError("look again")
            return value

    told: list[str] = []
    asking = client(mode)
    asking.on("completion:kwargs", lambda *_, messages, **__: told.append(str(messages)))
    asking.create(response_model=Checked, **{**ASKED, "max_retries": 2})
    assert len(seen) == 2
    assert ["look again" in each for each in told] == [False, True]


def test_json_of_any_form() -> None:
    """The schema is in the prompt only, so the answer need not be what was asked for."""
    with pytest.raises(IncompleteOutputException) as caught:
        client(instructor.Mode.JSON).create(response_model=City, **{**ASKED, "max_tokens": 8})
    assert caught.value.last_completion.choices[0].message.content.startswith("{")


def test_the_asynchronous_half() -> None:
    async def ask() -> list[Warm]:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as plain:
            asking = instructor.from_openai(plain, model=MODEL)
            answers = [asking.create(response_model=Warm, **ASKED) for _ in range(2)]
            return list(await asyncio.gather(*answers))

    assert all(isinstance(each, Warm) for each in asyncio.run(ask()))


def test_a_client_by_its_provider() -> None:
    asking = instructor.from_provider(f"openai/{MODEL}", base_url=f"{URL}/v1", api_key=KEY)
    assert isinstance(asking.create(response_model=Warm, **ASKED), Warm)


def test_responses() -> None:
    asked = {"messages": ASKED["messages"], "max_output_tokens": 100, "max_retries": 1}
    warm = client(instructor.Mode.RESPONSES_TOOLS).create(response_model=Warm, **asked)
    assert isinstance(warm, Warm)


@pytest.mark.parametrize(
    ("key", "options", "error"),
    [
        (KEY, {"model": "gpt-4"}, openai.NotFoundError),
        (KEY, {"temperature": -1}, openai.BadRequestError),
        (KEY, {"messages": [{"role": "user", "content": "word " * 9000}]}, openai.BadRequestError),
        ("wrong", {}, openai.AuthenticationError),
    ],
)
def test_errors_are_those_that_the_client_knows(
    key: str, options: dict[str, Any], error: type[openai.APIStatusError]
) -> None:
    with pytest.raises(InstructorRetryException) as caught:
        client(key=key).create(response_model=Warm, **{**ASKED, **options})
    assert isinstance(caught.value.__cause__, error)


def test_an_answer_that_is_cut_off() -> None:
    with pytest.raises(IncompleteOutputException):
        client().create(response_model=City, **{**ASKED, "max_tokens": 3})
