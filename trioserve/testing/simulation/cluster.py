"""The checkers of all workers of a scenario, as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import attrs

from trioserve.scheduler.fault_isolation import MAX_ALONE
from trioserve.testing.simulation.places import PlaceChecker
from trioserve.testing.simulation.scenario import Scenario
from trioserve.testing.simulation.trace import Violation
from trioserve.testing.simulation.watch import MessageChecker


@attrs.define(eq=False)
class ClusterChecker:
    """The checkers of the messages of each worker, by index.

    Args:
        scenario: The scenario.
        make: Makes the checker of a worker.
    """

    _scenario: Scenario
    _make: Callable[[int, PlaceChecker], MessageChecker]
    places: PlaceChecker = attrs.field(init=False, factory=PlaceChecker)
    members: set[int] = attrs.field(init=False)
    """Workers that the engine has, whether they are given up or not."""
    _checkers: dict[int, MessageChecker] = attrs.field(init=False, factory=dict)

    @members.default
    def _first(self) -> set[int]:
        return set(range(len(self._scenario.members)))

    def of(self, index: int) -> MessageChecker:
        """Return the checker of the worker of that index."""
        if index not in self._checkers:
            self._checkers[index] = self._make(index, self.places)
        return self._checkers[index]

    def __iter__(self) -> Iterator[MessageChecker]:
        return iter(self._checkers.values())

    @property
    def num_steps(self) -> int:
        """Number of steps of all workers."""
        return sum(each.num_steps for each in self)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all workers."""
        return sum(each.num_tokens for each in self)

    @property
    def deaths(self) -> int:
        """Number of workers lost."""
        return sum(each.deaths for each in self)

    @property
    def losses(self) -> int:
        """Number of workers lost, with those that have failed for good."""
        return self.deaths + sum(each.is_failing for each in self)

    def is_calling(self, *names: str) -> bool:
        """Return True if a call with one of ``names`` is unanswered by a worker."""
        return any(each.is_calling(*names) for each in self)

    def begin_again(self) -> None:
        """Record that the prefix caches of all workers were emptied."""
        for each in self:
            each.since_flush = set()

    def disturb(self) -> None:
        """Stop checking the order of outputs, because other rules apply from now on."""
        for index in range(len(self._scenario.members)):
            self.of(index)
        for each in self:
            each.turns.on_fault()

    def is_given_up(self, index: int) -> bool:
        """Return True if so many processes of a worker died that it may not be replaced."""
        limit: int = self._scenario.options["max_worker_restarts"]
        too_many = self.of(index).deaths_without_progress > limit
        return too_many and not self._scenario.is_poisoned

    @property
    def engine_may_fail(self) -> bool:
        """True if so many workers died that the engine may fail."""
        firsts = [self.of(index) for index in range(len(self._scenario.members))]
        if any(each.num_ready == 0 and each.deaths > 0 for each in firsts):
            return True
        return all(map(self.is_given_up, self.members))

    def was_on_a_worker_given_up(self, client: int) -> bool:
        """Return True if a client's request was in flight on a worker when that was given up."""
        return any(client in each.lost_with and self.is_given_up(each.index) for each in self)

    def check_poison(self) -> None:
        """Check that a request that ends workers ended few, all of one index."""
        found = [each for each in self if each.num_poisoned]
        most = math.ceil(math.log2(len(self._scenario.clients))) + MAX_ALONE + 2
        if len(found) > 1 or any(each.num_poisoned > most for each in found):
            deaths = {each.index: each.num_poisoned for each in found}
            raise Violation("a culprit ends few processes of one worker", f"{deaths}")
