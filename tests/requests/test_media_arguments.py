"""A request's arguments for its media are JSON of a bounded size, checked with the prompt."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import pytest

from trioserve import ChatPrompt, InvalidRequest, TextPrompt, TokensPrompt
from trioserve.requests.media_arguments import MAX_ARGUMENT_BYTES, MAX_ARGUMENTS, MediaArguments
from trioserve.requests.prompts import media_arguments_of

HI = ({"role": "user", "content": "Hi"},)
BOTH: dict[str, Any] = {
    "mm_processor_kwargs": {"size": {"longest_edge": 8}, "image_mean": (0.5, 1)},
    "media_io_kwargs": {"video": {"num_frames": 3}},
}
MAKERS: list[Callable[..., Any]] = [
    lambda **fields: TextPrompt("Hi", **fields),
    lambda **fields: ChatPrompt(messages=HI, **fields),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_prompt_has_a_copy_of_its_arguments(make: Callable[..., Any]) -> None:
    size = BOTH["mm_processor_kwargs"]["size"]
    prompt = make(**BOTH)
    size["longest_edge"] = 9
    found = media_arguments_of(prompt)
    size["longest_edge"] = 8
    assert found.processor == {"size": {"longest_edge": 8}, "image_mean": [0.5, 1]}
    assert found.reading == BOTH["media_io_kwargs"]
    for nothing in ({}, {"mm_processor_kwargs": {}, "media_io_kwargs": None}):
        assert not media_arguments_of(make(**nothing))


def test_other_prompts_have_none() -> None:
    assert not media_arguments_of(TokensPrompt((1,)))
    assert hash(TextPrompt("a")) == hash(TextPrompt("a"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([1], 'must be an object, as in {"do_image_splitting": false}; got list'),
        ("x", "must be an object"),
        ({1: 2}, "must have names that are printable strings"),
        ({"a\n": 2}, "must have names that are printable strings"),
        ({"size": object()}, "has size with a value that isn't JSON"),
        ({"size": {1: 2}}, "has size with a value that isn't JSON"),
        ({"size": [[b"x"]]}, "has size with a value that isn't JSON"),
        ({"size": math.nan}, "has size with a value that isn't JSON"),
        ({"size": 2**64}, "has size with a value that isn't JSON"),
        ({"size": "\ud800"}, "can't be written as JSON"),
        ({"size": [[[[1]]]]}, "is nested too deeply in size: at most 4 levels are read"),
        ({"size": [0] * 10**6}, "has more values, with those of size, than 16384 bytes of JSON"),
        ({"a": [0] * 9000, "b": [0] * 9000}, "has more values, with those of b, than 16384"),
        ({"size": "x" * MAX_ARGUMENT_BYTES}, "bytes as JSON: at most 16384 are read"),
        ({str(n): n for n in range(MAX_ARGUMENTS + 1)}, "has 65 arguments: at most 64 are read"),
    ],
)
def test_what_is_no_small_object_is_refused(given: Any, told: str) -> None:
    for make in MAKERS:
        for field in BOTH:
            with pytest.raises(InvalidRequest) as refused:
                make(**{field: given})
            assert refused.value.param == field
            example = '"video": {"fps": 2, "num_frames": 32}'
            here = told.replace('"do_image_splitting": false', example)
            assert str(refused.value).startswith(f"{field} ")
            assert (told if field == "mm_processor_kwargs" else here) in str(refused.value)


class Resampling(enum.IntEnum):
    """Numbers as those of Pillow."""

    CUBIC = 3


def test_a_number_with_a_name_is_a_number() -> None:
    prompt = TextPrompt("Hi", mm_processor_kwargs={"resample": Resampling.CUBIC})
    assert media_arguments_of(prompt).processor == {"resample": 3}


def test_an_object_that_holds_itself_is_refused() -> None:
    held: dict[str, Any] = {}
    held["size"] = held
    with pytest.raises(InvalidRequest, match="nested too deeply in size"):
        TextPrompt("Hi", mm_processor_kwargs=held)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"image": {}}, "media_io_kwargs has image; it takes video"),
        ({"video": {"path": "x"}}, "video must be an object with fps and num_frames"),
        ({"video": {"num_frames": 10**6}}, "num_frames must be a whole number from 1 to 1024"),
        ({"video": {"fps": "2"}}, "fps must be a number above 0 and at most 1000"),
    ],
)
def test_reading_arguments_are_those_of_videos(given: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as refused:
        TextPrompt("Hi", media_io_kwargs=given)
    assert refused.value.param == "media_io_kwargs"


def test_errors_name_a_few_arguments() -> None:
    assert str(MediaArguments(processor={"b": 1, "a": 1})) == "mm_processor_kwargs (a, b)"
    many = MediaArguments(processor={f"{n}" * 100: n for n in range(9)}, reading={"video": {}})
    shown = str(many)
    assert shown.endswith("…) and media_io_kwargs")
    assert len(shown) < 8 * 70 + 60
    assert MediaArguments(reading={"video": {}}).param == "media_io_kwargs"
    assert many.param == "mm_processor_kwargs"
