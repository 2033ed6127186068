"""``trioserve top`` over a server with several workers: which of them is sick, and one alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.cli.test_top import a_view, plain
from tests.support.live_snapshots import NOW, row, snapshot, some_rows, some_workers, worker
from trioserve.cli.top.drawing import draw
from trioserve.cli.top.glyphs import ASCII, UNICODE
from trioserve.cli.top.view import View
from trioserve.observability.live.schema import WorkerRow

LOST = " workers      3 of 4 running; worker 2 lost 12s ago (process 4244 was killed by signal 9)"
ALL = """\
 requests     2 running, 1 waiting; 12.3k ended, 6 aborted, 0 failed
 WORKER STATE       RUN WAIT PAGES            MS/STEP  TOK/S
      0 running       0    1   30% ███▒▒░░░░░     9.8    200
      1 running       1    1   30% ███▒▒░░░░░     9.8    201
      2 restarting    0    0    0% ░░░░░░░░░░       -      0  lost 12s ago
      3 running       3    1   30% ███▒▒░░░░░     9.8    203
REQUEST             STATE          AGE PROMPT CACHED OUTPUT DONE      TOK/S PAGES WORKER MOVES
chatcmpl-1          waiting        10s    100     16      0 ░░░░░░░░            0      0
chatcmpl-2          prefill        20s    200     16      0 ▒▒▒▒░░░░           14      1
chatcmpl-3          decode         30s    300     16     30 ██░░░░░░           21      3     1"""
ONE = """\
 worker 3     running as 4245 for 1:02:00  NVIDIA H200
 generated    203 tok/s                     step         9.8 ms
 prompts      1203 tok/s                    rows a step  2.5
 device idle  12%                           one more     11.3 ms a step, as predicted
 pages        ██████████▒▒▒▒▒▒▒░░░░░░░░░░░░░░░░░  300 held, 200 cached of 1000
 requests     3 running, 1 waiting
REQUEST                    STATE          AGE PROMPT CACHED OUTPUT DONE      TOK/S PAGES MOVES
chatcmpl-3                 decode         30s    300     16     30 ██░░░░░░           21     1"""


def placed() -> list[Any]:
    """Return requests on workers; one has moved, and one was placed on none."""
    places = ((0, 0), (1, 0), (3, 1), (None, 0))
    return [
        msgspec.structs.replace(each, worker=index, moves=moves)
        for each, (index, moves) in zip(some_rows(), places, strict=True)
    ]


def four(after: float = 0.0, workers: list[WorkerRow] | None = None) -> Any:
    return snapshot(after, workers=workers or some_workers(), requests=placed())


def test_a_lost_worker_is_named_at_once_and_each_has_a_line() -> None:
    lines = plain(a_view(four()), 94, 24)
    assert lines[1] == LOST
    assert lines[7:17] == ALL.split("\n")
    assert " w worker: all " in lines[-1]


def test_colors_tell_which_worker_is_sick() -> None:
    drawn = draw(a_view(four()), 100, 24, UNICODE).lines
    red = [line.plain.split()[0] for line in drawn if any(s.style == "red" for s in line.spans)]
    assert red == ["workers", "2"]


def test_one_worker_is_looked_at_alone() -> None:
    view = a_view(four())
    view.press("W")
    lines = plain(view, 94, 24)
    assert lines[1] == LOST, "the others' losses are told even so"
    assert lines[2:10] == ONE.split("\n")
    assert " w worker: 3 " in lines[-1]
    assert lines[-1].endswith(" 1-1 of 1")


def test_the_key_goes_round_and_a_worker_that_is_removed_is_left() -> None:
    view = a_view(four())
    seen = []
    for key in "wwwwwWW":
        view.press(key)
        seen.append(view.worker)
    assert seen == [0, 1, 2, 3, None, 3, 2]
    view.take(four(1, [worker(0), worker(1)]), 1)
    assert view.chosen is None
    assert len(view.rows) == 4
    view.press("w")
    assert view.worker == 0
    view.take(snapshot(2, workers=[worker(0)]), 2)
    assert plain(view, 100, 24)[1] == " worker       running as 4242 for 1:02:02"


def test_one_worker_is_shown_as_ever() -> None:
    alone = plain(a_view(snapshot(workers=[worker(0)], requests=[row(1, worker=0)])), 100, 24)
    assert alone == plain(a_view(snapshot(requests=[row(1)])), 100, 24)


def test_the_ranks_of_a_worker_follow_its_process() -> None:
    view = a_view(four(workers=[worker(0), worker(1, rank_pids=(5001, 5002))]))
    view.press("W")
    assert " running as 4243, 5001, 5002 for 1:02:00 " in plain(view, 100, 24)[2]


def test_workers_on_other_hosts_have_the_size_of_plans_and_the_round_trip() -> None:
    far = worker(1, pid=None, host="b\x1b[2J", plan_bytes=612.4, round_trip_ms=1.26)
    view = a_view(four(workers=[worker(0), far]))
    lines = plain(view, 100, 24)
    assert lines[8].endswith(" TOK/S B/PLAN MS/TRIP")
    assert [line.split()[-2:] for line in lines[9:11]] == [["-", "-"], ["612", "1.3"]]
    view.press("W")
    assert plain(view, 100, 24)[2] == (
        " worker 1     running for 1:02:00  NVIDIA H200"
        " on b\\x1b[2J: round trip 1.3 ms, 612 bytes a plan"
    )


def test_a_workers_history_is_its_own() -> None:
    view = View(url="http://h")
    for number in range(4):
        rates = msgspec.structs.replace(worker(1).rates, generated_tokens_per_s=float(number))
        busy = worker(1, rates=rates)
        view.take(
            four(number, [worker(0), busy] if number != 2 else [worker(0), worker(5)]), number
        )
    assert [
        each.workers[1].generated_tokens_per_s for each in view.samples if 1 in each.workers
    ] == [
        1.0,
        3.0,
    ]
    view.on_open(a_view().hello)  # type: ignore[arg-type]
    view.worker = 1
    assert "▃ █" in plain(view, 100, 24)[3]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (worker(1, "stalled"), "; worker 1 stalled: a step doesn't end"),
        (
            worker(1, "ended", since=NOW - 70, last_loss="x\x1b[2J"),
            "; worker 1 given up 1:10 ago (x\\",
        ),
        (worker(1, "draining"), " 1 of 2 running"),
        (worker(1, "starting", pid=None), " 1 of 2 running"),
        (worker(1, restarts=2, since=NOW - 5), " 2 of 2 running"),
    ],
)
def test_each_state_is_told_in_words(changed: WorkerRow, told: str) -> None:
    lines = plain(a_view(four(workers=[worker(0), changed])), 100, 24)
    assert told in lines[1]
    assert changed.state in lines[10]
    assert ("2 restarts, the last 5s ago" in lines[10]) == (changed.restarts == 2)


def test_many_workers_leave_room_for_requests_and_those_in_trouble_are_first() -> None:
    workers = [worker(index) for index in range(40)]
    workers[30] = worker(30, "stalled")
    lines = plain(a_view(four(workers=workers)), 100, 24, glyphs=ASCII)
    assert [line.split()[0] for line in lines[9:17]] == ["0", "1", "2", "3", "4", "5", "30", "33"]
    assert lines[16] == " 33 more: 33 running"
    assert lines[17].startswith("REQUEST")
    for width in (1, 20, 60, 200):
        for height in (1, 5, 20, 100):
            plain(a_view(four(workers=workers)), width, height)
    drafting = msgspec.structs.replace(worker(0).rates, draft_acceptance_share=0.43)
    workers[0] = worker(0, rates=drafting)
    lines = plain(a_view(four(workers=workers)), 100, None)
    assert lines[8].endswith(" DRAFTS")
    assert lines[9].endswith(" 43%")
    assert lines[48].split()[0] == "39"
