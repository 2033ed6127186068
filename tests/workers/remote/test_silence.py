"""The deadline of a silent link."""

from __future__ import annotations

from trioserve.workers.remote.silence import MAX_LATENESS, Silence
from trioserve.workers.supervisor import delay_after


def test_a_link_is_lost_after_its_time_of_silence() -> None:
    silence = Silence(5.0, 100.0)
    assert silence.deadline == 105.0
    assert not silence.is_over(104.9)
    assert silence.is_over(105.0)
    silence.hear(104.0)
    assert not silence.is_over(105.0)
    assert silence.is_over(109.0)


def test_a_process_that_was_stopped_reads_first_what_came_meanwhile() -> None:
    silence = Silence(5.0, 100.0)
    late = 105.0 + MAX_LATENESS + 1
    assert not silence.is_over(late)
    assert silence.deadline == late + 5.0
    # Once only, until something is heard.
    assert silence.is_over(late + 5.0 + MAX_LATENESS + 1)
    silence.hear(200.0)
    assert not silence.is_over(205.0 + MAX_LATENESS + 1)


def test_heartbeats_come_several_times_in_either_ends_time() -> None:
    assert Silence(5.0, 0.0).interval == 1.0
    # The other end may not know a longer time yet.
    assert Silence(600.0, 0.0).interval == 2.0


def test_attempts_become_rarer_and_go_on_for_days() -> None:
    assert [delay_after(number, 0.5, 5.0) for number in range(7)] == [0.5, 0.5, 1, 2, 4, 5, 5]
    assert delay_after(10**6, 0.5, 5.0) == 5.0
