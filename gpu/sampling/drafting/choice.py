"""The choice of drafts: how many of which rows are worth their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LEAST_GAIN = 1.03
"""Tokens per second with drafts, over those without, from which on drafts are verified."""


def choose_drafts(
    num_rows: int,
    candidates: Sequence[tuple[int, float]],
    step_seconds: Callable[[int, int], float],
    room: int | None = None,
) -> list[int]:
    """Return how many drafts of each candidate a step verifies, for the most tokens per second.

    Args:
        num_rows: tokens that the step computes without drafts; each row gives one.
        candidates: for each sequence with drafts, how many there are, and the probability that one
            is accepted if those before it are.
        step_seconds: the time of a step of so many tokens and drafts.
        room: the most drafts of all candidates together; None for any number.
    """
    ranked = sorted(
        (-(probability**depth), index)
        for index, (count, probability) in enumerate(candidates)
        for depth in range(1, count + 1)
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
    candidates: Sequence[tuple[int, float]],
    step_seconds: Callable[[int, int], float],
    draft_seconds: float,
) -> int:
    """Return how many drafts of each candidate are to be made, for the most tokens per second.

    Args:
        num_rows: tokens that the step computes without drafts; each row gives one.
        candidates: for each sequence, the most drafts, and the probability that one is accepted if
            those before it are.
        step_seconds: the time of a step of so many tokens and drafts.
        draft_seconds: the time of one draft for each candidate.
    """
    best, best_rate = 0, LEAST_GAIN * num_rows / step_seconds(num_rows, 0)
    expected, num_drafts = float(num_rows), 0
    for depth in range(1, max((most for most, _ in candidates), default=0) + 1):
        growing = [probability for most, probability in candidates if most >= depth]
        expected += sum(probability**depth for probability in growing)
        num_drafts += len(growing)
        rate = expected / (step_seconds(num_rows, num_drafts) + depth * draft_seconds)
        if rate > best_rate:
            best, best_rate = depth, rate
    return best
