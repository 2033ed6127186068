"""The order of the waiting queue: tenants take turns, and one tenant's requests come by age."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.scheduling import ABORT, Bench, make_limits, make_request, worker
from trioserve.requests.request import Sequence
from trioserve.scheduler.sequence_state import SequenceQueue, SequenceState
from trioserve.scheduler.waiting_queue import WaitingQueue

LIMITS = make_limits(worker(), scheduling_policy="priority")


class QueueMachine(RuleBasedStateMachine):
    """A waiting queue and those that run, beside a model that keeps a list for each tenant.

    The model knows no numbers: of each priority it has the admitted in the order in which they came
    in, and the tenants in the order of their turns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.running = SequenceQueue()
        self.arrivals = itertools.count(1)
        self.rings: dict[int, dict[str, list[SequenceState]]] = {0: {}, 1: {}}
        self.admitted: dict[int, list[SequenceState]] = {0: [], 1: []}
        self.overtaken: dict[SequenceState, list[str]] = {}
        """Tenants that had a turn before each oldest waiting sequence of a tenant."""
        self.has_skipped = False

    def tenant(self, seq_state: SequenceState) -> str:
        return seq_state.sequence.request.tenant

    @rule(tenant=st.sampled_from(["", "a", "b", "c"]), priority=st.integers(0, 1))
    def arrive(self, tenant: str, priority: int) -> None:
        request = make_request([1], tenant=tenant, priority=priority)
        seq_state = SequenceState.of(request.sequences[0], LIMITS, next(self.arrivals))
        self.queue.add(seq_state)
        self.rings[priority].setdefault(tenant, []).append(seq_state)

    def expected(self) -> list[SequenceState]:
        waiting = set(self.queue)
        order: list[SequenceState] = []
        for priority in (0, 1):
            order += [each for each in self.admitted[priority] if each in waiting]
            rounds = itertools.zip_longest(*self.rings[priority].values())
            order += [each for each in itertools.chain.from_iterable(rounds) if each is not None]
        return order

    @invariant()
    def order_is_the_model_s(self) -> None:
        self.queue.check()
        order = list(self.queue.in_turn())
        if not self.has_skipped:
            assert order == self.expected()
            admitted = [each for priority in (0, 1) for each in self.admitted[priority]]
            assert list(self.running) == [each for each in admitted if each in set(self.running)]
        assert sorted(map(id, order)) == sorted(map(id, self.queue))
        for line in (order, list(self.running)):
            assert [each.order[0] for each in line] == sorted(each.order[0] for each in line)
            for tenant, priority in itertools.product(["", "a", "b", "c"], (0, 1)):
                own = [
                    each.arrival
                    for each in line
                    if self.tenant(each) == tenant and each.order[0] == priority
                ]
                assert own == sorted(own), "a request comes behind a younger one of its tenant"

    @precondition(lambda self: self.queue)
    @rule()
    def admit(self) -> None:
        self.enter(next(self.queue.in_turn()))

    def enter(self, seq_state: SequenceState) -> None:
        priority = seq_state.order[0]
        is_new = not seq_state.had_turn
        self.queue.admit(seq_state, self.running)
        self.running.add(seq_state)
        self.overtaken.pop(seq_state, None)
        if not is_new:
            return
        self.admitted[priority].append(seq_state)
        ring = self.rings[priority]
        tenant = self.tenant(seq_state)
        ring[tenant].remove(seq_state)
        rest = ring.pop(tenant)
        if rest:
            ring[tenant] = rest
        for other, line in ring.items():
            if other != tenant:
                self.overtaken.setdefault(line[0], []).append(tenant)

    @invariant()
    def nobody_is_overtaken_twice_by_a_tenant(self) -> None:
        for names in self.overtaken.values():
            assert self.has_skipped or len(set(names)) == len(names)

    @precondition(lambda self: len(self.running))
    @rule()
    def preempt(self) -> None:
        seq_state = self.running[len(self.running) - 1]
        self.running.remove(seq_state)
        self.queue.add(seq_state)

    @rule()
    def lose_the_worker(self) -> None:
        for seq_state in self.running.take_all():
            self.queue.add(seq_state)
        for seq_state in self.queue.take_all():
            self.queue.add(seq_state)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq_state = data.draw(st.sampled_from(list(self.queue)))
        self.queue.remove(seq_state)
        self.forget(seq_state)

    @precondition(lambda self: len(self.running))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        seq_state = data.draw(st.sampled_from(list(self.running)))
        self.running.remove(seq_state)
        self.forget(seq_state)

    def forget(self, seq_state: SequenceState) -> None:
        priority = seq_state.order[0]
        self.overtaken.pop(seq_state, None)
        if seq_state.had_turn:
            self.admitted[priority].remove(seq_state)
            return
        line = self.rings[priority][self.tenant(seq_state)]
        line.remove(seq_state)
        if not line:
            del self.rings[priority][self.tenant(seq_state)]


class SkippingMachine(QueueMachine):
    """A queue in which any sequence may be admitted, as if those before it waited for a grammar.

    From the first skip on, only the order of one tenant's requests is checked.
    """

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        self.has_skipped = True
        self.enter(data.draw(st.sampled_from(list(self.queue))))


TestQueue = QueueMachine.TestCase
TestSkipping = SkippingMachine.TestCase


def _finished(bench: Bench, sequences: list[Sequence]) -> list[int]:
    """Return the places in ``sequences`` in the order in which they finish."""
    bench.drain()
    ends = [each.sequence for each in bench.outputs if each.finish is not None]
    return [sequences.index(each) for each in ends]


def test_a_tenant_with_many_requests_delays_another_by_one() -> None:
    bench = Bench.make(worker(max_num_seqs=1))
    tenants = ["a", "a", "a", "a", "b", "b", "", "b"]
    sequences = [
        bench.submit([number + 1] * 6, max_tokens=2, tenant=tenant)
        for number, tenant in enumerate(tenants)
    ]
    assert _finished(bench, sequences) == [0, 4, 6, 1, 5, 2, 7, 3]


def test_each_output_is_a_turn() -> None:
    bench = Bench.make(worker(max_num_seqs=1))
    outputs = bench.submit_all([1] * 6, max_tokens=2, n=4, tenant="a")
    other = bench.submit_all([2] * 6, max_tokens=2, n=2, tenant="b")
    assert _finished(bench, [*outputs, *other]) == [0, 4, 1, 5, 2, 3]


def test_requests_that_leave_the_queue_cost_their_tenant_no_turn() -> None:
    bench = Bench.make(worker(max_num_seqs=1))
    sequences = [
        bench.submit([number + 1] * 6, max_tokens=2, tenant=tenant)
        for number, tenant in enumerate("aaaaabbb")
    ]
    bench.plan()
    for sequence in sequences[1:4]:
        bench.core.abort(sequence, ABORT)
    # Both have one turn after another all the same.
    assert _finished(bench, sequences) == [0, 5, 4, 6, 7]


def test_a_preempted_request_comes_back_before_all_that_are_new() -> None:
    bench = Bench.make(worker(num_pages=6, max_num_seqs=2), capacity_policy="max_utilization")
    first = bench.submit([1] * 6, max_tokens=14, tenant="a")
    second = bench.submit([2] * 6, max_tokens=14, tenant="b")
    others = [bench.submit([number] * 6, max_tokens=2, tenant="a") for number in (3, 4)]
    finished = _finished(bench, [first, second, *others])
    assert bench.core.counters.num_preemptions
    assert finished.index(1) < finished.index(3)
