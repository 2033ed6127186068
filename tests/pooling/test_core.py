"""The choice of texts for the next call, and the culprits of workers' deaths, without any task."""

from __future__ import annotations

import random

import numpy as np
import pytest

from trioserve.pooling.columns import Columns
from trioserve.pooling.core import EncodeBatch, EncodeJob, PoolingCore
from trioserve.protocol.errors import EngineError, WorkerLost

KILLED = WorkerLost("killed", from_outside=True)
DIED = WorkerLost("died", reason="crashed")


def a_job(*lengths: int, name: int = 0) -> EncodeJob:
    ids = [np.full(length, name, dtype=np.int32) for length in lengths]
    return EncodeJob(Columns.joined((each, np.zeros_like(each)) for each in ids), 0.0, lambda: None)


def core_of(max_texts: int = 4, max_tokens: int = 100) -> PoolingCore:
    return PoolingCore(max_texts, max_tokens)


def names(batch: EncodeBatch | None) -> list[tuple[int, int]]:
    """(arrival, index) of the texts of a batch."""
    assert batch is not None
    return [(text.job.arrival, text.index) for text in batch.texts]


def answer(core: PoolingCore, batch: EncodeBatch) -> None:
    core.on_vectors(batch, np.array([[text.job.arrival, text.index] for text in batch.texts], "f4"))


def next_batch(core: PoolingCore) -> EncodeBatch:
    batch = core.next_batch(0.0)
    assert batch is not None
    core.check_integrity()
    return batch


def test_what_waits_goes_together_first_come_first_served() -> None:
    core = core_of()
    for lengths in ((5,), (6, 7, 8), (9,)):
        core.submit(a_job(*lengths))
    assert (core.num_waiting, core.num_waiting_tokens) == (5, 35)
    batch = next_batch(core)
    assert names(batch) == [(1, 0), (2, 0), (2, 1), (2, 2)]
    assert batch.num_tokens == 26
    assert names(next_batch(core)) == [(3, 0)]
    assert core.num_waiting == 0


def test_tokens_are_bounded_and_nobody_overtakes() -> None:
    core = core_of(max_texts=10, max_tokens=20)
    core.submit(a_job(15, 6, 1))
    first, second = next_batch(core), next_batch(core)
    assert names(first) == [(1, 0)]
    assert names(second) == [(1, 1), (1, 2)]


def test_a_text_longer_than_the_limit_goes_by_itself() -> None:
    core = core_of(max_tokens=20)
    core.submit(a_job(30, 30))
    assert names(next_batch(core)) == [(1, 0)]


def test_two_calls_are_under_way_and_no_more() -> None:
    core = core_of(max_texts=1)
    core.submit(a_job(1, 1, 1))
    first = next_batch(core)
    next_batch(core)
    assert core.next_batch(0.0) is None
    answer(core, first)
    assert names(next_batch(core)) == [(1, 2)]


def test_vectors_come_to_their_texts() -> None:
    core = core_of(max_texts=2)
    jobs = [a_job(1), a_job(1, 1), a_job(1)]
    for job in jobs:
        core.submit(job)
    while batch := core.next_batch(0.0):
        answer(core, batch)
    for job in jobs:
        assert job.vectors is not None
        assert job.vectors.tolist() == [[job.arrival, i] for i in range(len(job.columns))]
    assert core.is_empty


def test_who_leaves_is_not_computed() -> None:
    core = core_of(max_texts=1)
    job, other = a_job(1, 1), a_job(1)
    core.submit(job)
    core.submit(other)
    batch = next_batch(core)
    core.withdraw(job)
    assert names(next_batch(core)) == [(2, 0)]
    answer(core, batch)
    assert job.vectors is None
    core.check_integrity()


def test_nothing_is_computed_behind_a_closed_gate() -> None:
    core = core_of()
    core.submit(a_job(1))
    core.pause_gate.close_behind("operator", core.num_arrivals)
    core.submit(a_job(1))
    batch = next_batch(core)
    assert names(batch) == [(1, 0)]
    assert core.num_open_until(1) == 1
    answer(core, batch)
    assert core.num_open_until(1) == 0
    assert core.next_batch(0.0) is None
    core.pause_gate.close("operator")
    assert core.next_batch(0.0) is None
    core.pause_gate.release("operator")
    assert names(next_batch(core)) == [(2, 0)]


def test_killed_from_outside_all_are_asked_again_in_order() -> None:
    core = core_of(max_texts=2)
    core.submit(a_job(1, 1, 1))
    core.submit(a_job(1, 1))
    next_batch(core)
    next_batch(core)
    assert core.on_worker_lost(KILLED) == 1
    core.check_integrity()
    assert [names(next_batch(core)) for _ in range(2)] == [[(1, 0), (1, 1)], [(1, 2), (2, 0)]]
    assert core.on_worker_lost(KILLED) == 2


def test_an_idle_workers_death_blames_nobody() -> None:
    core = core_of()
    assert core.on_worker_lost(DIED) == 1
    assert core.on_worker_lost(DIED) == 2


def test_a_batch_that_failed_is_taken_apart() -> None:
    core = core_of()
    jobs = [a_job(1) for _ in range(4)]
    for job in jobs:
        core.submit(job)
    core.on_error(next_batch(core), EngineError("out of memory"))
    assert core.num_waiting == 4
    batch = next_batch(core)
    assert names(batch) == [(1, 0), (2, 0)]
    assert core.next_batch(0.0) is None  # a trial has the worker to itself
    core.submit(a_job(1))
    assert core.next_batch(0.0) is None
    core.on_error(batch, EngineError("out of memory"))
    alone = next_batch(core)
    core.on_error(alone, EngineError("out of memory"))
    assert "out of memory" in str(jobs[0].error)
    while batch := core.next_batch(0.0):
        answer(core, batch)
    assert all(job.vectors is not None for job in jobs[1:])


@pytest.mark.parametrize("seed", range(40))
def test_poison_is_found_and_nobody_else_fails(seed: int) -> None:
    """Random histories: deaths from poison and from outside, leavers, pauses, all at once."""
    chance = random.Random(seed)
    core = core_of(max_texts=chance.randint(1, 8), max_tokens=chance.choice([10, 1000]))
    jobs: list[EncodeJob] = []
    poisonous: set[EncodeJob] = set()
    left: set[EncodeJob] = set()
    under_way: list[EncodeBatch] = []
    num_killed = 0
    for turn in range(400):
        if turn < 150 and chance.random() < 0.5:
            job = a_job(*(chance.randint(1, 9) for _ in range(chance.randint(1, 5))))
            core.submit(job)
            jobs.append(job)
            if chance.random() < 0.15:
                poisonous.add(job)
        if turn < 150 and jobs and chance.random() < 0.05:
            leaver = chance.choice(jobs)
            core.withdraw(leaver)
            left.add(leaver)
        while (batch := core.next_batch(0.0)) is not None:
            under_way.append(batch)
        core.check_integrity()
        if turn < 150 and chance.random() < 0.05:
            core.on_worker_lost(KILLED)
            num_killed += 1
            under_way.clear()
        if under_way:
            batch = under_way.pop(0)
            if any(text.job in poisonous and text.index == 0 for text in batch.texts):
                assert core.on_worker_lost(DIED) <= 2 + num_killed
                under_way.clear()
            else:
                answer(core, batch)
        core.check_integrity()
    while core.num_waiting:
        while (batch := core.next_batch(0.0)) is not None:
            under_way.append(batch)
        batch = under_way.pop(0)
        if any(text.job in poisonous and text.index == 0 for text in batch.texts):
            core.on_worker_lost(DIED)
            under_way.clear()
        else:
            answer(core, batch)
        core.check_integrity()
    for batch in under_way:
        answer(core, batch)
    assert core.is_empty
    for job in jobs:
        if job not in left:
            assert (job.error is not None) == (job in poisonous)
            assert job.num_missing == 0 or job.error is not None
