"""Pauses of drafts: after drafts that cost more time than they save, for a bounded time."""

from __future__ import annotations

import pytest

from gpu.sampling.drafting.pause import LONGEST, SHORTEST, TOLERATED, WINDOW, DraftPause

ROWS = 32


def steps_of(pause: DraftPause, saved: float, number: int, rows: int = ROWS) -> list[bool]:
    """Return whether each of ``number`` steps of a second belongs to a pause.

    In the others, drafts save ``saved`` seconds.
    """
    paused = []
    for _ in range(number):
        paused.append(pause.includes(rows))
        if not paused[-1]:
            pause.note(rows, saved, 1.0, has_drafts=True)
    return paused


@pytest.mark.parametrize("saved", [0.5, 0.0, -0.9 * TOLERATED])
def test_drafts_that_pay_or_cost_little_go_on(saved: float) -> None:
    assert not any(steps_of(DraftPause(), saved, 1000))


def test_pauses_grow_until_drafts_pay_again() -> None:
    pause, window = DraftPause(), WINDOW // ROWS
    length = SHORTEST
    while length < LONGEST:
        assert steps_of(pause, -0.1, window + length) == [False] * window + [True] * length
        length *= 2
    for _ in range(2):
        assert steps_of(pause, -0.1, window + LONGEST) == [False] * window + [True] * LONGEST
    assert not any(steps_of(pause, 0.1, window))
    assert sum(steps_of(pause, -0.1, window + SHORTEST + 1)) == SHORTEST


def test_drafts_that_never_pay_take_little_of_the_time() -> None:
    paused = steps_of(DraftPause(), -0.1, 1000)
    assert paused.count(False) < 100


def test_a_single_failure_is_no_reason() -> None:
    """One refused draft of a single stream, among others that pay."""
    pause = DraftPause()
    for step in range(1000):
        assert not pause.includes(1)
        pause.note(1, 0.2 if step % 4 else -0.3, 1.0, has_drafts=True)


def paused() -> DraftPause:
    """Return a pause at its beginning."""
    pause = DraftPause()
    steps_of(pause, -0.1, WINDOW // ROWS)
    assert pause.includes(ROWS)
    return pause


def test_a_pause_ends_once_half_of_the_rows_are_gone() -> None:
    pause = paused()
    assert pause.includes(ROWS // 2 + 1)
    assert not pause.includes(ROWS // 2)
    assert not pause.includes(ROWS)


def test_a_pause_ends_once_half_of_the_sequences_are_others() -> None:
    pause = paused()
    for _ in range(ROWS // 2 - 1):
        pause.open()
    assert pause.includes(ROWS)
    pause.open()
    assert not pause.includes(ROWS)
    # Those count for this pause only.
    steps_of(pause, -0.1, WINDOW // ROWS - 1)
    pause.note(ROWS, -1.0, 1.0, has_drafts=True)
    assert pause.includes(ROWS)
