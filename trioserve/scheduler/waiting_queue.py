"""The waiting queue: sequences without a slot. Tenants take turns within a priority.

A **turn** is one sequence's admission to a slot. Tenants, such as API keys, have turns one after
another, and a tenant that begins to wait comes last. So a tenant waits for at most one turn of each
other tenant, however many sequences those have waiting. Among the sequences of a tenant, the oldest
request comes first. Requests of the tenant ``""`` take turns like any other.

A sequence keeps the turn with which it was admitted. If it loses its slot, it returns in front of
all sequences with a later turn or none. A sequence never comes behind a younger one of its tenant:
if a younger one had its turn before, both count as admitted at that turn. With one tenant, all of
this is the order of arrival.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import attrs

from trioserve.scheduler.sequence_state import SequenceQueue, SequenceState


def _priority(seq_state: SequenceState) -> int:
    return seq_state.order[0]


def _tenant(seq_state: SequenceState) -> str:
    return seq_state.sequence.request.tenant


def _age(seq_state: SequenceState) -> tuple[int, int]:
    """Return a key that is smaller for the older of two sequences."""
    return seq_state.order[2:]


def _is_like(seq_state: SequenceState, other: SequenceState) -> bool:
    """Return True if both have the same tenant and priority."""
    return _priority(seq_state) == _priority(other) and _tenant(seq_state) == _tenant(other)


@attrs.define(eq=False)
class WaitingQueue(SequenceQueue):
    """The waiting sequences, by priority and age, and the turns of their tenants."""

    _new: dict[int, dict[str, SequenceQueue]] = attrs.field(init=False, factory=dict)
    """Sequences that had no turn, by priority and tenant, in the order of the tenants' next turns.
    No queue is empty.
    """
    _returned: SequenceQueue = attrs.field(init=False, factory=SequenceQueue)
    """Sequences that had a turn."""
    _num_turns: int = attrs.field(init=False, default=0)

    def add(self, seq_state: SequenceState) -> int:
        if seq_state.had_turn:
            self._returned.add(seq_state)
        else:
            tenants = self._new.setdefault(_priority(seq_state), {})
            tenants.setdefault(_tenant(seq_state), SequenceQueue()).add(seq_state)
        return super().add(seq_state)

    def remove(self, seq_state: SequenceState) -> int:
        if seq_state.had_turn:
            self._returned.remove(seq_state)
        else:
            tenants = self._new[_priority(seq_state)]
            queue = tenants[_tenant(seq_state)]
            queue.remove(seq_state)
            if not queue:
                del tenants[_tenant(seq_state)]
            if not tenants:
                del self._new[_priority(seq_state)]
        return super().remove(seq_state)

    def take_all(self) -> list[SequenceState]:
        """Empty the queue. Adding all again, in the order returned, keeps the turns."""
        items = list(self.in_turn())
        super().take_all()
        self._new.clear()
        self._returned.take_all()
        return items

    def admit(self, seq_state: SequenceState, running: SequenceQueue) -> None:
        """Remove the sequence, which enters a slot. If it had no turn, it uses its tenant's."""
        self.remove(seq_state)
        if seq_state.had_turn:
            return
        priority, _, arrival, index = seq_state.order
        tenants = self._new.get(priority, {})
        queue = tenants.pop(_tenant(seq_state), None)
        if queue is not None:
            tenants[_tenant(seq_state)] = queue
        self._num_turns += 1
        turns = (each.order[1] for each in self._younger(seq_state, running))
        seq_state.order = (priority, min(turns, default=self._num_turns), arrival, index)

    def _younger(self, seq_state: SequenceState, running: SequenceQueue) -> Iterator[SequenceState]:
        """Yield the younger sequences of its tenant and priority that had turns."""
        for queue in (running, self._returned):
            for each in reversed(queue):
                if _is_like(each, seq_state):
                    if _age(each) < _age(seq_state):
                        break  # The rest is older still.
                    yield each

    def in_turn(
        self, may_enter: Callable[[SequenceState], bool] = lambda _: True
    ) -> Iterator[SequenceState]:
        """Return the waiting sequences that may enter, in the order of turns.

        They may be admitted during the iteration.
        """
        if not self._returned and all(len(tenants) == 1 for tenants in self._new.values()):
            return filter(may_enter, list(self))
        priorities = sorted({*self._new, *map(_priority, self._returned)})
        return itertools.chain.from_iterable(
            self._in_turn_of(priority, may_enter) for priority in priorities
        )

    def _in_turn_of(
        self, priority: int, may_enter: Callable[[SequenceState], bool]
    ) -> Iterator[SequenceState]:
        """Yield the sequences of one priority in the order of turns."""
        queues = [list(queue) for queue in self._new.get(priority, {}).values()]
        returned = [each for each in self._returned if _priority(each) == priority]
        returned = list(filter(may_enter, returned))
        in_front = [(each.order[1], _age(each), each) for each in returned]
        for queue in queues if returned else ():
            own = [each for each in returned if _is_like(each, queue[0])]
            while queue and (
                turns := [each.order[1] for each in own if _age(each) > _age(queue[0])]
            ):
                first = queue.pop(0)
                if may_enter(first):
                    in_front.append((min(turns), _age(first), first))
        in_front.sort(key=lambda entry: entry[:2])
        yield from (each for _, _, each in in_front)
        heads = [filter(may_enter, queue) for queue in queues]
        while heads:
            for head in heads.copy():
                each = next(head, None)
                if each is None:
                    heads.remove(head)
                else:
                    yield each

    def check(self) -> None:
        """Assert that each waiting sequence is in exactly one queue."""
        queues = [queue for tenants in self._new.values() for queue in tenants.values()]
        assert all(queues)
        assert all(self._new.values())
        found = [each for queue in (*queues, self._returned) for each in queue]
        assert sorted(map(id, found)) == sorted(map(id, self)), "a waiting sequence has no turn"
        for priority, tenants in self._new.items():
            for tenant, queue in tenants.items():
                for each in queue:
                    assert not each.had_turn
                    assert (_priority(each), _tenant(each)) == (priority, tenant)
        assert all(each.had_turn for each in self._returned)
