"""Kept responses: their owners, their number, and their lifetime."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from trioserve.http.api.openai.responses.store import MAX_CONVERSATION_BYTES, KeptResponses


def test_a_conversation_is_held_once() -> None:
    kept = KeptResponses()
    assert kept.keep(None, "a", b"11", None)
    assert kept.keep(None, "b", b"22", "a")
    assert kept.keep(None, "c", b"333", "b")
    assert kept.keep(None, "d", b"4", "b")
    assert kept.conversation(None, "c") == [b"11", b"22", b"333"]
    assert kept.conversation(None, "d") == [b"11", b"22", b"4"]
    assert kept.conversation(None, "a") == [b"11"]
    assert (len(kept), kept.num_bytes) == (4, 8)


def test_what_others_go_on_from_stays() -> None:
    """Keep its text as part of later ones, although it can't be named any more."""
    kept = KeptResponses()
    kept.keep(None, "a", b"11", None)
    kept.keep(None, "b", b"22", "a")
    assert kept.drop(None, "a")
    assert not kept.drop(None, "a")
    assert kept.conversation(None, "a") == []
    assert kept.conversation(None, "b") == [b"11", b"22"]
    assert not kept.keep(None, "c", b"", "a")
    assert kept.num_bytes == 4
    assert kept.drop(None, "b")
    assert kept.num_bytes == 0


def test_everybody_has_their_own() -> None:
    kept = KeptResponses()
    kept.keep("key-1", "a", b"1", None)
    kept.keep("key-2", "a", b"2", None)
    assert kept.conversation("key-1", "a") == [b"1"]
    assert kept.conversation("key-2", "a") == [b"2"]
    assert kept.conversation(None, "a") == []
    assert not kept.keep("key-3", "b", b"", "a")
    assert not kept.drop("key-3", "a")
    assert kept.drop("key-2", "a")
    assert kept.conversation("key-1", "a") == [b"1"]


def test_the_oldest_go_first() -> None:
    kept = KeptResponses(max_responses=2)
    for name in "abc":
        kept.keep(None, name, b"", None)
    assert [bool(kept.conversation(None, name)) for name in "abc"] == [False, True, True]


def test_bytes_are_bounded() -> None:
    kept = KeptResponses(max_bytes=10)
    kept.keep(None, "a", b"1234", None)
    kept.keep(None, "b", b"5678", "a")
    kept.keep(None, "c", b"90", "b")
    assert kept.num_bytes == 10
    # What the others go on from is held for them, so they all have to go.
    kept.keep(None, "d", b"x", None)
    assert (len(kept), kept.num_bytes) == (1, 1)
    assert kept.keep(None, "e", b"x" * 11, None)
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_an_owner_that_keeps_many_loses_its_own() -> None:
    kept = KeptResponses(max_responses=10)
    kept.keep("key-1", "a", b"", None)
    for number in range(100):
        kept.keep("key-2", f"{number}", b"", None)
    assert kept.conversation("key-1", "a") == [b""]
    assert len(kept) == 10
    assert [bool(kept.conversation("key-2", f"{number}")) for number in (90, 91)] == [False, True]


def test_an_owner_that_keeps_large_ones_loses_its_own() -> None:
    kept = KeptResponses(max_bytes=100)
    kept.keep("key-1", "a", b"x" * 10, None)
    kept.keep("key-1", "b", b"x" * 20, "a")
    for number in range(100):
        kept.keep("key-2", f"{number}", b"x" * 35, None)
    assert kept.conversation("key-1", "b") == [b"x" * 10, b"x" * 20]
    assert kept.num_bytes == 100
    assert [bool(kept.conversation("key-2", f"{number}")) for number in (97, 98)] == [False, True]


def test_a_conversation_that_is_too_large() -> None:
    kept = KeptResponses()
    half = bytes(MAX_CONVERSATION_BYTES // 2)
    assert kept.keep(None, "a", half, None)
    assert kept.keep(None, "b", half, "a")
    assert not kept.keep(None, "c", b"x", "b")
    assert kept.keep(None, "d", b"x", "a")
    assert not kept.keep(None, "e", half + half + b"x", None)
    assert kept.num_bytes == 2 * len(half) + 1
    kept.check_integrity()


def test_one_that_takes_its_own_place() -> None:
    kept = KeptResponses()
    kept.keep(None, "a", b"11", None)
    assert kept.keep(None, "a", b"2", "a")
    assert kept.conversation(None, "a") == [b"11", b"2"]
    assert kept.keep(None, "a", b"3", None)
    assert kept.conversation(None, "a") == [b"3"]
    assert kept.num_bytes == 1


_NAMES = st.sampled_from("abcdef")
_OWNERS = st.sampled_from([None, "key-1"])
_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("drop"), _OWNERS, _NAMES),
        st.tuples(st.just("keep"), _OWNERS, _NAMES, st.binary(max_size=9), st.none() | _NAMES),
    ),
    max_size=60,
)


@hypothesis.given(_ACTIONS, st.integers(1, 6), st.integers(0, 60))
def test_whatever_happens(actions: list[tuple], max_responses: int, max_bytes: int) -> None:  # type: ignore[type-arg]
    kept = KeptResponses(max_responses=max_responses, max_bytes=max_bytes)
    said: dict[tuple[str | None, str], list[bytes]] = {}
    for action, owner, name, *rest in actions:
        if action == "drop":
            assert kept.drop(owner, name) <= ((owner, name) in said)
            said.pop((owner, name), None)
        else:
            data, previous = rest
            before = kept.conversation(owner, previous) if previous is not None else []
            if kept.keep(owner, name, data, previous):
                said[owner, name] = [*before, data]
        kept.check_integrity()
        for key, conversation in said.items():
            assert kept.conversation(*key) in ([], conversation)
