"""Simulated clusters of workers."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from trioserve.config.worker_group import ROUTING_POLICIES
from trioserve.protocol.grammar import Grammar
from trioserve.testing.simulation import (
    Fault,
    Report,
    Scenario,
    SimulatedClient,
    WorkerKind,
    draw_scenario,
    simulate,
)
from trioserve.testing.simulation.draw import FIRST_CLUSTERS
from trioserve.testing.simulation.expected import ids_of
from trioserve.testing.simulation.scenario import (
    AdapterChange,
    Member,
    Pause,
    WorkerChange,
    seed_of,
)

STEP = 0.01
OPTIONS: dict[str, Any] = {
    "seed": 0,
    "max_num_seqs": 3,
    "max_num_queued_reqs": 100,
    "max_plans_in_flight": 2,
    "scheduling_policy": "fcfs",
    "capacity_policy": "max_utilization",
    "enable_prefix_caching": True,
    "grammar_timeout": 1.0,
    "max_worker_restarts": 3,
    "watchdog_timeout": 5.0,
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 2,
    "routing_policy": "round_robin",
}
KIND = WorkerKind(
    num_pages=40,
    page_size=4,
    max_model_len=64,
    max_num_batched_tokens=8,
    alphabet=ids_of("ab "),
    step_time=STEP,
    load_time=0.5,
)


def cluster(
    *,
    num_clients: int = 6,
    every: float = 0.0,
    lengths: tuple[int, ...] = (30,),
    adapter: str = "",
    params: dict[str, Any] | None = None,
    members: tuple[Member, ...] = (Member(), Member()),
    worker: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **events: Any,
) -> Scenario:
    """Return a scenario of several workers, and clients that arrive one after the other."""
    clients = [
        SimulatedClient(
            number=number,
            arrives=number * every,
            prompt="abcabcab",
            params={
                "max_tokens": lengths[number % len(lengths)],
                "seed": seed_of(1, number),
                **(params or {}),
            },
            adapter=adapter,
        )
        for number in range(num_clients)
    ]
    return Scenario(
        seed=0,
        options={**OPTIONS, "data_parallel_size": len(members), **(options or {})},
        worker=attrs.evolve(KIND, **(worker or {})),
        clients=tuple(clients),
        members=members,
        **events,
    )


def killed(index: int, at: float, worker: int = 0) -> Fault:
    return Fault(index=index, worker=worker, what="killed", at=at)


def add(at: float = 0.0) -> WorkerChange:
    return WorkerChange(at=at, what="add")


def remove(index: int, at: float) -> WorkerChange:
    return WorkerChange(at=at, what="remove", index=index)


def pause(mode: str, at: float = 0.1, seconds: float = 1.0) -> Pause:
    return Pause(at=at, mode=mode, seconds=seconds)


def load(name: str, at: float = 0.0) -> AdapterChange:
    return AdapterChange(at=at, what="load", name=name, path=f"/{name}")


def unload(name: str, at: float) -> AdapterChange:
    return AdapterChange(at=at, what="unload", name=name)


MEETINGS = {
    "a removal, and a loss that isn't judged yet": cluster(
        faults=(Fault(index=0, worker=0, what="hangs", at=4),), changes=(remove(0, 0.06),)
    ),
    "a worker given up while the other one is replaced": cluster(
        options={"max_worker_restarts": 1},
        worker={"load_time": 2.0},
        faults=(
            killed(1, 0.1),
            killed(0, 0.15),
            Fault(index=0, worker=1, what="loading", at=0.1),
        ),
    ),
    "a removal, and all others given up": cluster(
        options={"max_worker_restarts": 0},
        members=(Member(slowness=5.0), Member()),
        faults=(killed(1, 0.08),),
        changes=(remove(0, 0.06),),
    ),
    "an addition, and a pause": cluster(
        num_clients=20, every=0.1, changes=(add(),), pauses=(pause("in_place"),)
    ),
    "an addition, and a weight swap": cluster(changes=(add(),), pauses=(pause("swap retract"),)),
    "an addition, and a release of memory": cluster(
        num_clients=20, every=0.1, changes=(add(),), pauses=(pause("release"),)
    ),
    "an addition, and an adapter that is loaded and unloaded": cluster(
        num_clients=20,
        every=0.1,
        adapter="x",
        worker={"call_time": 0.3},
        changes=(add(),),
        adapters=(load("x", at=0.4), unload("x", at=3.0)),
    ),
    "an addition, and an adapter that is unloaded": cluster(
        num_clients=4,
        adapter="x",
        worker={"call_time": 0.1},
        changes=(add(at=0.2),),
        adapters=(load("x"), unload("x", at=0.75)),
    ),
    "an adapter that is unloaded while its requests move": cluster(
        every=0.001,
        lengths=(30, 1),
        adapter="x",
        faults=(killed(0, 0.12),),
        adapters=(load("x"), unload("x", at=0.1)),
    ),
    "two adapters that are loaded on a worker that is removed": cluster(
        num_clients=2,
        worker={"call_time": 1.0},
        changes=(remove(0, 0.1),),
        adapters=(load("x"), load("y")),
    ),
    "a pause that waits, and a worker that dies": cluster(
        num_clients=2,
        every=0.001,
        lengths=(2, 30),
        faults=(killed(1, 0.2),),
        pauses=(pause("wait", at=0.05),),
    ),
    "a weight swap, and a worker that is given up": cluster(
        num_clients=4,
        options={"max_worker_restarts": 0},
        worker={"call_time": 0.1},
        faults=(killed(0, 0.35),),
        pauses=(pause("swap retract", at=0.2),),
    ),
    "a release of memory, and grammars that were being compiled": cluster(
        worker={"call_time": 0.3},
        params={"grammar": Grammar("regex", "fine")},
        faults=(killed(0, 0.05), killed(1, 0.08)),
        pauses=(pause("release", at=0.2),),
    ),
    "a release of memory, and a worker that is given up": cluster(
        options={"max_worker_restarts": 0},
        faults=(Fault(index=0, worker=1, what="loading", at=0.1),),
        pauses=(pause("release"),),
    ),
}


def run(scenario: Scenario, *, orders: int = 1) -> Report:
    """Run a scenario in several orders of tasks; return the last report."""
    for seed in range(orders):
        report = simulate(attrs.evolve(scenario, seed=seed))
        assert report.violation is None, f"order {seed}: {report.violation}"
    return report


@pytest.mark.parametrize("what", ["dies", "hangs", "killed", "cut", "slow"])
def test_requests_outlive_what_befalls_their_worker(what: str) -> None:
    at = 4 if what in ("dies", "hangs") else 0.05
    report = run(cluster(faults=(Fault(index=0, worker=0, what=what, at=at, seconds=20.0),)))
    assert report.outcomes == {"whole": 6}
    assert report.workers_lost == (what != "slow")


def test_workers_may_be_far_and_slow_and_their_clocks_wrong() -> None:
    strange = Member(slowness=20.0, link_delay=0.05, clock_rate=0.0)
    for policy in ROUTING_POLICIES:
        report = run(cluster(members=(strange, Member()), options={"routing_policy": policy}))
        assert report.outcomes == {"whole": 6}


@pytest.mark.parametrize("meeting", MEETINGS)
def test_all_requests_outlive_events_that_meet(meeting: str) -> None:
    scenario = MEETINGS[meeting]
    assert run(scenario, orders=4).outcomes == {"whole": len(scenario.clients)}


def test_most_seeds_have_several_workers() -> None:
    assert not any(draw_scenario(seed).is_cluster for seed in range(0, FIRST_CLUSTERS, 29))
    scenarios = [draw_scenario(seed) for seed in range(FIRST_CLUSTERS, FIRST_CLUSTERS + 200)]
    found = [each for each in scenarios if each.is_cluster]
    assert 130 < len(found) < 170
    assert {len(each.members) for each in found} == {2, 3, 4}
    assert {fault.what for each in found for fault in each.faults} >= {"cut", "slow", "dies"}
    assert {change.what for each in found for change in each.changes} == {"add", "remove"}
    policies = {each.options["routing_policy"] for each in found}
    assert policies == set(ROUTING_POLICIES)
    clients = [client for each in found if each.faults for client in each.clients]
    for name in ("grammar", "beam_width", "logprobs", "prompt_logprobs", "return_hidden_states"):
        assert any(each.params.get(name) for each in clients), name
    assert any(each.num_outputs > 1 for each in clients)
    assert any(each.session for each in clients)
    assert any(each.adapter for each in clients)
