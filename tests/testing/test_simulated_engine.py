"""The whole engine in the simulation: many seeds, and cancellation at every checkpoint."""

from __future__ import annotations

import collections
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from trioserve.protocol.grammar import Grammar
from trioserve.scheduler.planning import Planner
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.testing.simulation import (
    Departure,
    Fault,
    Report,
    Scenario,
    SimulatedClient,
    WorkerKind,
    draw_scenario,
    run_scenario,
    shrink,
    simulate,
)
from trioserve.testing.simulation.command import Totals, main, run_seeds
from trioserve.testing.simulation.draw import FIRST_CLUSTERS
from trioserve.testing.simulation.expected import expected_outputs, ids_of
from trioserve.testing.simulation.scenario import AdapterChange, seed_of

SECONDS = 10.0
FEWEST_SEEDS, MOST_SEEDS = 120, 1500
"""Run however slow the machine is, so that the time can't be over before anything happened; and
however fast it is, so that it tries no life that others can't."""


def test_nothing_goes_wrong_in_many_lives_of_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    totals, started = Totals(), time.monotonic()
    seeds = itertools.chain.from_iterable(zip(itertools.count(), itertools.count(FIRST_CLUSTERS)))
    for report in run_seeds(seeds, seconds=60 * SECONDS):
        totals.add(report)
        totals.seconds = time.monotonic() - started
        assert report.violation is None, (
            f"{report.violation}; python -m trioserve.testing.simulation "
            f"--seed {report.scenario.seed} --trace"
        )
        if totals.num_seeds == MOST_SEEDS:
            break
        if totals.num_seeds >= FEWEST_SEEDS and totals.seconds > SECONDS:
            break
    with capsys.disabled():
        print(f"\nsimulation: {totals}")
    assert totals.num_requests > 4 * FEWEST_SEEDS
    # All that is to be tried was.
    wanted = {"whole", "left", "left by error", "DeadlineExceeded", "QueueFull", "EngineError"}
    wanted.add("AdapterNotFound")
    assert wanted <= totals.outcomes.keys()
    kinds = {"loading", "killed", "dies", "fails", "fails_in_row", "fatal", "hangs", "pauses"}
    kinds |= {"cut", "slow"}
    assert kinds <= totals.faults.keys()
    assert totals.workers_lost > FEWEST_SEEDS / 10


@pytest.mark.parametrize("seed", [3136, 71223, 103580, 103698])
def test_nothing_is_found_by_the_order_of_the_checks(seed: int) -> None:
    """A page that a plan cuts and gives away, failures in a row, and a loss that isn't told yet."""
    report = simulate(draw_scenario(seed))
    assert report.violation is None, report.violation


def test_a_beam_search_whose_grammar_is_compiled_makes_way_for_another() -> None:
    """It held pages, so the other one computed its beams over and over, and chose none."""
    report = simulate(draw_scenario(211613))
    assert report.violation is None, report.violation


def test_another_order_of_hashes_changes_nothing() -> None:
    command = [sys.executable, "-m", "trioserve.testing.simulation", "--count", "12", "--digests"]
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        folder = Path(__file__).parents[2]
        run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
        outputs.append(run.stdout)
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 12


# ---- leaving at every checkpoint

STEP = 0.01
KIND = WorkerKind(
    num_pages=12,
    page_size=4,
    max_model_len=64,
    max_num_batched_tokens=8,
    alphabet=ids_of("ab "),
    step_time=STEP,
)
OPTIONS: dict[str, Any] = {
    "seed": 0,
    "max_num_seqs": 3,
    "max_num_queued_reqs": 100,
    "max_plans_in_flight": 1,
    "scheduling_policy": "fcfs",
    "capacity_policy": "max_utilization",
    "enable_prefix_caching": True,
    "grammar_timeout": 1.0,
    "max_worker_restarts": 3,
    "watchdog_timeout": 5.0,
}


def scene(
    prompt: Any = "abcabcabcabc",
    *,
    depth: int = 1,
    n: int = 1,
    others: int = 1,
    faults: tuple[Fault, ...] = (),
    worker: WorkerKind = KIND,
    max_num_seqs: int = 3,
    **params: Any,
) -> Scenario:
    """Return a scenario: client 0, which leaves, and ``others`` that came before and stay."""
    leaving = SimulatedClient(
        number=0,
        arrives=STEP,
        prompt=prompt,
        params={"max_tokens": 5, "seed": seed_of(1, 0), "n": n, **params},
        leaves=Departure(how="checkpoint", at=0),
    )
    staying = [
        SimulatedClient(
            number=number,
            arrives=0.0,
            prompt="abcabcab",
            params={"max_tokens": 12, "seed": seed_of(1, number)},
        )
        for number in range(1, 1 + others)
    ]
    options = {**OPTIONS, "max_plans_in_flight": depth, "max_num_seqs": max_num_seqs}
    clients = (leaving, *staying)
    return Scenario(seed=0, options=options, worker=worker, clients=clients, faults=faults)


def with_adapters(scenario: Scenario) -> Scenario:
    """Return the scenario with an adapter for client 0, unloaded during its use, and one for client
    1.

    The worker holds one of them at a time.
    """
    first, second, *others = scenario.clients
    return attrs.evolve(
        scenario,
        options={**scenario.options, "enable_lora": True, "max_loras": 1, "max_cpu_loras": 1},
        clients=(attrs.evolve(first, adapter="x"), attrs.evolve(second, adapter="y"), *others),
        adapters=(
            AdapterChange(at=0.0, what="load", name="x", path="/x"),
            AdapterChange(at=0.0, what="load", name="y", path="/y"),
            AdapterChange(at=5 * STEP, what="unload", name="x"),
        ),
    )


STAGES = {
    "alone": scene(others=0),
    "decoding": scene(),
    "tokenizing": scene("abc" * 700, truncate_prompt_tokens=12),
    "preparing": scene(
        worker=attrs.evolve(KIND, call_time=5 * STEP), grammar=Grammar("regex", "fine")
    ),
    "waiting": scene(max_num_seqs=1, others=2),
    "prefill in chunks": scene(worker=attrs.evolve(KIND, max_num_batched_tokens=3)),
    "pages run out": scene(worker=attrs.evolve(KIND, num_pages=7), others=3),
    "no worker": scene(faults=(Fault(worker=0, what="killed", at=2.5 * STEP),)),
    "a worker that dies": scene(faults=(Fault(worker=0, what="dies", at=3),)),
    "a plan that fails": scene(faults=(Fault(worker=0, what="fails", at=3),)),
    "the final chunk": scene(stop=("ab", "b ", "a ")),
    "adapters": with_adapters(scene(others=2)),
    "adapters, and a worker that dies": with_adapters(
        scene(faults=(Fault(worker=0, what="dies", at=10),))
    ),
}


def left_at(scenario: Scenario, checkpoint: int, when_woken: bool) -> Report:
    leaves = Departure(how="checkpoint", at=checkpoint, when_woken=when_woken)
    first, *others = scenario.clients
    clients = (attrs.evolve(first, leaves=leaves), *others)
    return run_scenario(attrs.evolve(scenario, clients=clients))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("depth", "n"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_client_may_leave_at_every_checkpoint(stage: str, depth: int, n: int) -> None:
    scenario = STAGES[stage]
    first, *others = scenario.clients
    scenario = attrs.evolve(
        scenario,
        options={**scenario.options, "max_plans_in_flight": depth},
        clients=(attrs.evolve(first, params={**first.params, "n": n}), *others),
    )
    undisturbed = simulate(scenario)
    assert undisturbed.violation is None
    assert undisturbed.outcomes == {"whole": len(scenario.clients)}
    assert undisturbed.num_checkpoints > 5
    # Twice the work, where it is not the plain case: depth and outputs each have their own.
    for when_woken in (False, True) if depth == n else (False,):
        ends: collections.Counter[str] = collections.Counter()
        for checkpoint in range(1, undisturbed.num_checkpoints + 1):
            report = left_at(scenario, checkpoint, when_woken)
            where = f"checkpoint {checkpoint}, {when_woken=}: {report.violation}"
            assert report.violation is None, where
            assert report.outcomes.get("whole", 0) >= len(others), where
            ends.update(report.outcomes)
        # A client that leaves when its last wait is over has got everything.
        assert ends["left"] >= undisturbed.num_checkpoints - (2 if when_woken else 0)


# ---- what befalls the worker


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_only_the_poisonous_request_fails(depth: int, count: int) -> None:
    scenario = scene(depth=depth, others=count, max_num_seqs=8)
    first, *others = scenario.clients
    poisonous = attrs.evolve(first, poisonous=True, leaves=None)
    report = simulate(attrs.evolve(scenario, clients=(poisonous, *others)))
    assert report.violation is None
    assert report.outcomes == {"whole": count, "EngineError": 1}
    assert any("blamed" in line and "'0'" in line for line in report.trace.lines)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_worker_that_hangs_is_replaced(depth: int) -> None:
    report = simulate(scene(depth=depth, others=3, faults=(Fault(worker=0, what="hangs", at=4),)))
    assert report.violation is None
    assert report.outcomes == {"whole": 4}
    assert report.workers_lost == 1


@pytest.mark.parametrize("others", [0, 2])
def test_outputs_wait_only_while_their_own_grammar_is_compiled_again(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant a fault in what the check allows: outputs without a grammar wait as well."""
    grammar = Grammar("regex", "fine")
    worker = attrs.evolve(KIND, call_time=5 * STEP)
    dies = Fault(worker=0, what="dies", at=8 if others else 6)
    scenario = scene(n=2, others=others, faults=(dies,), worker=worker, grammar=grammar)
    report = simulate(scenario)
    assert report.violation is None
    assert report.outcomes == {"whole": 1 + others}
    assert report.workers_lost == 1

    entry_rule = Planner._entry_rule

    def all_wait(self: Planner) -> Callable[[SequenceState], bool]:
        may_enter = entry_rule(self)
        return lambda seq_state: not self._state.uncompiled and may_enter(seq_state)

    monkeypatch.setattr(Planner, "_entry_rule", all_wait)
    violation = simulate(scenario).violation
    found = "" if violation is None else violation.invariant
    assert found == ("outputs that can be computed are computed" if others else "")


# ---- adapters


@pytest.mark.parametrize("what", ["dies", "killed", "fails", "fatal"])
def test_adapters_are_there_again_after_whatever_befalls_the_worker(what: str) -> None:
    scenario = with_adapters(scene(others=3, faults=(Fault(worker=0, what=what, at=7),)))
    report = simulate(scenario)
    assert report.violation is None
    assert report.outcomes == {"whole": 4}


def test_the_tokens_are_those_of_the_adapter_that_had_the_name_when_the_client_came() -> None:
    """Load another adapter by the same name, while the first is still in use."""
    scenario = scene(others=0)
    (client,) = scenario.clients
    early, late = (
        attrs.evolve(
            client,
            number=number,
            arrives=arrives,
            adapter="x",
            leaves=None,
            params={"max_tokens": 20, "seed": seed_of(1, number)},
        )
        for number, arrives in ((0, 0.0), (1, 7 * STEP))
    )
    adapters = (
        AdapterChange(at=0.0, what="load", name="x", path="/x"),
        AdapterChange(at=5 * STEP, what="unload", name="x"),
        AdapterChange(at=6 * STEP, what="load", name="x", path="/again"),
    )
    options = {**OPTIONS, "enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}
    report = simulate(
        attrs.evolve(scenario, options=options, clients=(early, late), adapters=adapters)
    )
    assert report.violation is None
    assert report.outcomes == {"whole": 2}
    lines = report.trace.lines
    ended, loaded = (
        next(at for at, line in enumerate(lines) if text in line)
        for text in ("end of unload adapter x", "end of load adapter x /again")
    )
    assert loaded < ended
    assert expected_outputs(scenario, late, "/x") != expected_outputs(scenario, late, "/again")


# ---- the simulation itself


def test_the_reference_knows_how_outputs_end() -> None:
    """Worked out by hand for a model that says one thing only."""
    worker = attrs.evolve(KIND, alphabet=ids_of("a"))

    def expected(**params: Any) -> tuple[str, str, int | str | None]:
        scenario = scene(worker=worker, **params)
        (output,) = expected_outputs(scenario, scenario.clients[0])
        return output.text, output.finish_reason, output.stop_reason

    assert expected() == ("aaaaa", "length", None)
    assert expected(stop=("aa",)) == ("", "stop", "aa")
    assert expected(stop=("aa",), include_stop_str_in_output=True) == ("aa", "stop", "aa")
    assert expected(stop=("aa",), min_tokens=3) == ("a", "stop", "aa")
    a = ids_of("a")
    assert expected(stop_token_ids=a) == ("", "stop", a[0])
    assert expected(stop_token_ids=a, min_tokens=3) == ("aa", "stop", a[0])
    assert expected(max_tokens=0) == ("", "length", None)


def test_a_client_that_gets_too_little_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant one fault, from its detection to the command that repeats it."""
    from trioserve.scheduler.page_pool import PagePool

    release = PagePool.release
    monkeypatch.setattr(PagePool, "release", lambda self, pages, epoch: release(self, pages, 0))
    found = next(
        report for report in map(simulate, map(draw_scenario, range(300))) if report.violation
    )
    small = shrink(found)
    assert small.violation is not None
    assert found.violation is not None
    assert small.violation.invariant == found.violation.invariant
    assert len(small.scenario.clients) <= len(found.scenario.clients)
    assert main(["--first", str(found.scenario.seed), "--count", "1"]) == 1


def test_a_failing_seed_comes_with_the_command_that_shows_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trioserve.scheduler.page_pool import PagePool

    release = PagePool.release
    monkeypatch.setattr(PagePool, "release", lambda self, pages, epoch: release(self, pages, 0))
    assert main(["--count", "300", "--most-failures", "1"]) == 1
    output = capsys.readouterr().out
    (again,) = [line for line in output.splitlines() if line.startswith("again: ")]
    arguments = again.split("trioserve.testing.simulation ")[1].split()
    assert main(arguments) == 1
    assert "VIOLATION" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(arguments) == 0
