"""Plans in flight of a worker with stages: each stage has one, and no row waits for its token."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scheduling import Bench, reference, worker
from trioserve.config import EngineConfig
from trioserve.protocol import wire
from trioserve.scheduler.limits import SchedulerLimits
from trioserve.scheduler.micro_batches import most_in_flight, share_of


@given(
    last_plans=st.lists(st.integers(0, 9), max_size=12),
    in_flight=st.integers(0, 12),
    num_stages=st.integers(1, 5),
)
def test_a_plan_takes_an_equal_share_of_the_longest_waiting(
    last_plans: list[int], in_flight: int, num_stages: int
) -> None:
    total = len(last_plans) + in_flight
    found = share_of(np.array(last_plans, dtype=np.int64), total, num_stages).tolist()
    assert found == sorted(set(found))
    assert len(found) == min(len(last_plans), math.ceil(total / num_stages))
    left = [each for place, each in enumerate(last_plans) if place not in found]
    taken = [last_plans[place] for place in found]
    assert max(taken, default=0) <= min(left, default=9)


@pytest.mark.parametrize(
    ("most", "num_stages", "decodes", "expected"),
    [(3, 2, True, 2), (3, 2, False, 3), (2, 1, True, 2), (1, 4, True, 1), (5, 4, True, 4)],
)
def test_there_are_as_many_plans_as_stages_while_sequences_decode(
    most: int, num_stages: int, decodes: bool, expected: int
) -> None:
    assert most_in_flight(most, num_stages, decodes=decodes) == expected


@pytest.mark.parametrize(("num_stages", "most", "target"), [(1, 1, 0.09), (3, 4, 0.03)])
def test_limits_follow_from_the_stages(num_stages: int, most: int, target: float) -> None:
    ready = worker(num_stages=num_stages).ready()
    limits = SchedulerLimits.of(EngineConfig("m", itl_target_ms=90), ready)
    assert limits.max_plans_in_flight == most
    assert limits.itl_target == pytest.approx(target)
    assert SchedulerLimits.of(EngineConfig("m", max_plans_in_flight=2), ready) == attrs.evolve(
        limits, max_plans_in_flight=2, itl_target=None
    )


@attrs.define
class Pipeline:
    """A bench whose worker has stages that take a tick for each plan."""

    bench: Bench
    stages: deque[wire.Plan | None]
    """The plan in each stage, the first one's first."""
    waiting: deque[wire.Plan] = attrs.field(factory=deque)
    """Plans sent that no stage has begun."""
    idle: list[int] = attrs.field(factory=list)
    """Number of stages without a plan, by tick."""

    @classmethod
    def of(cls, num_stages: int, **options: Any) -> Pipeline:
        fake = worker(num_stages=num_stages, num_pages=400, **options)
        bench = Bench.make(fake, max_plans_in_flight=num_stages + 1)
        return cls(bench, deque([None] * num_stages))

    def tick(self) -> None:
        """Send what may be sent, and let each stage compute its plan."""
        while (plan := self.bench.plan()) is not None:
            self.waiting.append(plan)
        if self.stages[-1] is not None:
            self.bench.result()
            while (plan := self.bench.plan()) is not None:
                self.waiting.append(plan)
        self.stages.pop()
        self.stages.appendleft(self.waiting.popleft() if self.waiting else None)
        self.idle.append(sum(each is None for each in self.stages))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_streams", [4, 7, 12])
def test_every_stage_always_has_a_plan(num_stages: int, num_streams: int) -> None:
    pipeline = Pipeline.of(num_stages)
    sequences = [pipeline.bench.submit([1] * 5, max_tokens=80) for _ in range(num_streams)]
    for _ in range(40):
        pipeline.tick()
    assert not any(pipeline.idle[-20:])
    rows = [len(wire.ints(plan.row_slots)) for plan in pipeline.stages if plan is not None]
    assert sum(rows) == num_streams
    assert max(rows) == math.ceil(num_streams / num_stages)
    lengths = [len(sequence.output_ids) for sequence in sequences]
    assert max(lengths) - min(lengths) <= 2
    pipeline.bench.drain()


def test_chunks_of_a_prompt_follow_each_other() -> None:
    """Without streams one more plan than stages is in flight."""
    pipeline = Pipeline.of(3, max_num_batched_tokens=8)
    sequence = pipeline.bench.submit(list(range(64)), max_tokens=4)
    pipeline.tick()
    assert len(pipeline.bench.core.in_flight) == 4
    for _ in range(4):
        pipeline.tick()
    assert pipeline.idle[:4] == [2, 1, 0, 0]
    pipeline.bench.drain()
    assert sequence.output_ids == reference(pipeline.bench.worker, sequence)


def test_groups_that_formed_by_chance_become_equal() -> None:
    """Sequences that come one by one end up in as many plans as there are stages."""
    pipeline = Pipeline.of(2)
    for _ in range(5):
        pipeline.bench.submit([1] * 5, max_tokens=100)
        for _ in range(3):
            pipeline.tick()
    for _ in range(12):
        pipeline.tick()
    rows = [len(wire.ints(plan.row_slots)) for plan in pipeline.stages if plan is not None]
    assert sorted(rows) == [2, 3]
    pipeline.bench.drain()


def test_prompts_beside_streams_of_other_stages_are_limited() -> None:
    """A plan without decodes delays the streams of the plans in flight, too."""

    def seconds(plan: wire.Plan) -> float:
        return 0.01 + 0.001 * float(wire.ints(plan.row_counts).sum())

    pipeline = Pipeline.of(2, max_num_batched_tokens=512, max_model_len=2048, step_time=seconds)
    bench = pipeline.bench
    bench.submit([1] * 5, max_tokens=200)
    bench.submit([2] * 60, max_tokens=1)
    for _ in range(12):
        pipeline.tick()
    while not any(plan.load.decodes for plan in bench.core.in_flight):
        bench.plan()
    bench.submit([3] * 1000, max_tokens=4)
    plan = bench.plan()
    assert plan is not None
    # As many as double the time of a step, because the prompt has just come.
    ((_, count),) = bench.rows(plan)
    assert 5 < count < 20
