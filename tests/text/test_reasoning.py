"""Reasoning apart from the answer: any way to cut the text gives the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.text.reasoning import ReasoningSplitter, Split, is_open, marks_reasoning


def split(pieces: list[str], *, inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside)
    parts = [splitter.feed(piece) for piece in pieces]
    parts.append(splitter.finish())
    return "".join(part.reasoning for part in parts), "".join(part.answer for part in parts)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "answer"),
    [
        ("<think>\nSo.\n\nYes\n</think>\n\nParis.", False, "So.\n\nYes", "Paris."),
        ("So.\n</think>\n\nParis. ", True, "So.", "Paris. "),
        ("\n<think>a < b</thin</think>c", False, "a < b</thin", "c"),
        ("Paris.", False, "", "Paris."),
        (" Paris <think>.</think>", False, "", " Paris <think>.</think>"),
        ("<think>\n\n</think>\n\nParis.", False, "", "Paris."),
        ("<think>cut of", False, "cut of", ""),
        ("cut of </thi", True, "cut of </thi", ""),
        ("</think>Paris</think>", True, "", "Paris</think>"),
        ("<think>\nSo.</think>Paris", True, "So.", "Paris"),
        ("\n<th", True, "<th", ""),
        ("So <think> it is</think>Paris", True, "So <think> it is", "Paris"),
        ("<thi", False, "", "<thi"),
        ("", False, "", ""),
    ],
)
def test_split(text: str, inside: bool, reasoning: str, answer: str) -> None:
    assert split([text], inside=inside) == (reasoning, answer)
    assert split(list(text), inside=inside) == (reasoning, answer)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "a"])),
    st.booleans(),
    st.data(),
)
def test_cutting_the_text_changes_nothing(parts: list[str], inside: bool, data: Any) -> None:
    text = "".join(parts)
    places = st.lists(st.integers(0, len(text)), max_size=6).map(sorted)
    cuts = [0, *data.draw(places), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
    assert split(pieces, inside=inside) == split([text], inside=inside)


def test_reasoning_is_streamed_as_it_comes() -> None:
    splitter = ReasoningSplitter()
    assert splitter.feed("<think>So") == Split(reasoning="So")
    assert splitter.feed(" it is") == Split(reasoning=" it is")
    assert splitter.feed("\n</think>\n\nPa") == Split(answer="Pa")
    assert splitter.feed("ris") == Split(answer="ris")


def test_where_a_text_leaves_off() -> None:
    assert is_open("user: hi\nassistant: <think>\n")
    assert not is_open("<think>\n\n</think>\n\n")
    assert not is_open("user: hi")
    assert marks_reasoning("{{ '<think>' }}")
    assert not marks_reasoning("{{ messages }}")
