"""The choice of drafts: how many of which rows are worth their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LEAST_GAIN = 1.03
"""Tokens per second with drafts, over those without, from which on drafts are verified."""


def choose_drafts(
    num_rows: int,
    candidates: Sequence[Sequence[float]],
    step_seconds: Callable[[int, int], float],
    room: int | None = None,
) -> list[int]:
    """Return how many drafts of each candidate a step verifies, for the most tokens per second.

    Args:
        num_rows: tokens that the step computes without drafts; each row gives one.
        candidates: for each sequence with drafts, the probabilities that the first 1, 2, … of them
            are all accepted.
        step_seconds: the time of a step of so many tokens and drafts.
        room: the most drafts of all candidates together; None for any number.
    """
    ranked = sorted(
        (-probability, index)
        for index, probabilities in enumerate(candidates)
        for probability in probabilities
    )[:room]
    expected = float(num_rows)
    best, best_rate = 0, LEAST_GAIN * expected / step_seconds(num_rows, 0)
    for number, (gain, _) in enumerate(ranked, 1):
        expected -= gain
        rate = expected / step_seconds(num_rows, number)
        if rate > best_rate:
            best, best_rate = number, rate
    chosen = [0] * len(candidates)
    for _, index in ranked[:best]:
        chosen[index] += 1
    return chosen


def first_within(room: int | None, counts: Sequence[int]) -> list[int]:
    """Return ``counts``, the last of them lowered so that their sum is at most ``room``."""
    if room is None:
        return list(counts)
    chosen = []
    for count in counts:
        chosen.append(min(count, room))
        room -= chosen[-1]
    return chosen


def choose_depth(
    num_rows: int,
    candidates: Sequence[Sequence[float]],
    step_seconds: Callable[[int, int], float],
    draft_seconds: float,
) -> int:
    """Return how many drafts of each candidate are to be made, for the most tokens per second.

    Args:
        num_rows: tokens that the step computes without drafts; each row gives one.
        candidates: for each sequence, the probabilities that the first 1, 2, … of its drafts are
            all accepted, up to the most that it may have.
        step_seconds: the time of a step of so many tokens and drafts.
        draft_seconds: the time of one draft for each candidate.
    """
    best, best_rate = 0, LEAST_GAIN * num_rows / step_seconds(num_rows, 0)
    expected, num_drafts = float(num_rows), 0
    for depth in range(1, max(map(len, candidates), default=0) + 1):
        growing = [each[depth - 1] for each in candidates if len(each) >= depth]
        expected += sum(growing)
        num_drafts += len(growing)
        rate = expected / (step_seconds(num_rows, num_drafts) + depth * draft_seconds)
        if rate > best_rate:
            best, best_rate = depth, rate
    return best
