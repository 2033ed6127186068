"""What the scheduler knows of one sequence, and the ordered lines in which sequences stand."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator

import attrs
import numpy as np

from trioserve.requests.request import Sequence
from trioserve.scheduler.limits import SchedulerLimits
from trioserve.scheduler.policy import NO_TURN, Order, queue_order
from trioserve.scheduler.prefix_cache import Namespace, Node
from trioserve.scheduler.token_counts import Ints, TokenCounts

NO_SLOT = -1
NO_LOGPROBS = -1


_get_order = operator.attrgetter("order")


def adapter_word(number: int) -> str:
    """What stands second in the namespaces of sequences with that adapter, and in no others."""
    return f"adapter {number}"


def namespace_of(salt: str, adapter: int) -> Namespace:
    """Whose cached prefixes requests with that salt and adapter share."""
    return (salt, adapter_word(adapter)) if adapter else (salt,)


@attrs.define(eq=False, kw_only=True)
class SequenceState:
    """The scheduler's record of a sequence, from its submission until it has finished.

    Three counts say how far a sequence has come; ``computed <= planned < length <= limit`` while it
    holds a slot, and all are 0 while it doesn't. Counts run ahead of what is known: with a plan in
    flight, ``length`` includes the token which that plan will sample, whatever it will be.
    """

    sequence: Sequence = attrs.field(repr=False)
    order: Order
    """Smaller is preempted later, and comes back earlier. No two are equal."""
    arrival: int
    """Its request's place in the order of arrival."""
    adapter: int
    """The number of its adapter; 0 for none."""
    namespace: Namespace | None
    """Whose cached prefixes it shares; None for nobody's, and none of its own are kept."""
    own_namespace: Namespace | None
    """The namespace it had at first, and has again in its next slot."""
    limit: int
    """Tokens, prompt and output, at which the sequence ends by length; at least one of output."""
    is_held: bool = False
    """Whether it waits for another sequence of its request to compute the prompt."""

    left_grammar: bool = False
    """Whether it has left a slot, and the worker may have dropped its grammar since."""

    slot: int = NO_SLOT
    generation: int = 0
    pages: list[int] = attrs.field(factory=list)
    """The block table."""
    cursor: Node | None = None
    """The deepest node of the prefix tree on the path that ``pages`` begins with."""
    _counts: TokenCounts | None = attrs.field(init=False, default=None, repr=False)
    """Where its counts stand while it holds a slot."""
    _left_in: int = attrs.field(init=False, default=0)
    """The last plan that named the slot that it had."""
    prompt_logprobs_from: int = NO_LOGPROBS
    """The position of the first prompt token whose log-probability the slot's rows give."""

    @classmethod
    def of(cls, sequence: Sequence, limits: SchedulerLimits, arrival: int) -> SequenceState:
        """The record of a sequence whose ``max_tokens`` is known; ``arrival`` is its request's."""
        request = sequence.request
        namespace: Namespace | None = None
        own = namespace_of(request.cache_salt, request.adapter)
        if limits.enable_prefix_caching:
            namespace = own
        elif len(request.sequences) > 1:  # They share their prompt, and with nobody else.
            namespace = (*own, arrival)
        return cls(
            sequence=sequence,
            order=queue_order(
                limits.scheduling_policy,
                priority=request.priority,
                arrival=arrival,
                index=sequence.index,
            ),
            arrival=arrival,
            adapter=request.adapter,
            namespace=namespace,
            own_namespace=namespace,
            limit=len(request.prompt_ids) + max(sequence.max_tokens, 1),
        )

    @property
    def had_turn(self) -> bool:
        """Whether it has entered a slot before."""
        return self.order[1] != NO_TURN

    @property
    def length(self) -> int:
        """Tokens that the slot will hold once every plan made so far is done."""
        return 0 if self._counts is None else int(self._counts.length[self.slot])

    @property
    def planned(self) -> int:
        """Tokens that have been given to plans."""
        return 0 if self._counts is None else int(self._counts.planned[self.slot])

    @property
    def computed(self) -> int:
        """Tokens whose KV exists: their plans have been acknowledged."""
        return 0 if self._counts is None else int(self._counts.computed[self.slot])

    @property
    def last_plan(self) -> int:
        """The last plan that names the slot, or the last slot that it had."""
        return self._left_in if self._counts is None else int(self._counts.last_plan[self.slot])

    @property
    def remaining(self) -> int:
        """Tokens that have not been given to a plan; 1 means decode."""
        return self.length - self.planned

    @property
    def holds_slot(self) -> bool:
        return self.slot != NO_SLOT

    def known_tokens(self) -> list[int]:
        """The prompt and the output so far. Not to be changed: it may be the prompt itself."""
        output = self.sequence.output_ids
        prompt = self.sequence.request.prompt_ids
        return prompt + output if output else prompt

    def enter_slot(self, counts: TokenCounts, slot: int, generation: int, computed: int) -> None:
        """Begin in ``slot`` with all that is known, of which ``computed`` tokens have their KV."""
        sequence = self.sequence
        params = sequence.request.params
        counts.open(
            slot,
            generation,
            limit=self.limit,
            plain=params.logprobs is None and params.n == 1 and sequence.max_tokens > 0,
            stop_ids=sequence.sampler.stop_ids,
        )
        counts.length[slot] = sequence.num_tokens
        counts.planned[slot] = counts.computed[slot] = computed
        counts.last_plan[slot] = 0
        self._counts, self.slot, self.generation = counts, slot, generation

    def add_row(self, count: int, samples: bool, plan: int) -> None:
        """The next ``count`` tokens are computed by ``plan``, and one is drawn if ``samples``."""
        counts = self._counts
        assert counts is not None
        counts.planned[self.slot] += count
        counts.last_plan[self.slot] = plan
        if samples:
            counts.length[self.slot] += 1
            counts.decodes[self.slot] = True

    def settle(self, extra: int) -> None:
        """Count ``extra`` tokens that a row brought after its first."""
        if self._counts is not None:
            self._counts.settle(np.array([self.slot]), np.array([extra]))

    def note_token(self, now: float) -> None:
        """A token has come for the sequence, at ``now``; it may have lost its slot meanwhile."""
        self.sequence.last_token = self.sequence.request.times.last_token = now
        if self._counts is not None:
            self._counts.last_token[self.slot] = now

    def bring_times_up_to_date(self) -> None:
        """Tell the sequence and its request when its newest token came, which the slot knows."""
        if self._counts is None:
            return
        last = float(self._counts.last_token[self.slot])
        if last == last:  # NaN before the first token
            times = self.sequence.request.times
            self.sequence.last_token = last
            times.last_token = last if times.last_token is None else max(times.last_token, last)

    def leave_slot(self) -> None:
        """Back to how it was before the slot was opened."""
        self.bring_times_up_to_date()
        if self._counts is not None:
            self._left_in = self.last_plan
            self._counts.close(self.slot, self.sequence.sampler.stop_ids)
        self._counts = None
        self.slot = NO_SLOT
        self.pages = []
        self.cursor = None
        self.namespace = self.own_namespace
        self.prompt_logprobs_from = NO_LOGPROBS


@attrs.define(eq=False)
class SequenceQueue:
    """Computations in the order of their ``order``."""

    _items: list[SequenceState] = attrs.field(init=False, factory=list)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._items)

    def __getitem__(self, index: int) -> SequenceState:
        return self._items[index]

    def add(self, computation: SequenceState) -> int:
        """Put ``computation`` in its place, and say which that is."""
        index = bisect.bisect_left(self._items, computation.order, key=_get_order)
        self._items.insert(index, computation)
        return index

    def remove(self, computation: SequenceState) -> int:
        """Take ``computation`` out. It must be in. Its place was the one returned."""
        index = bisect.bisect_left(self._items, computation.order, key=_get_order)
        assert self._items[index] is computation
        del self._items[index]
        return index

    def take_all(self) -> list[SequenceState]:
        """Empty the line."""
        items, self._items = self._items, []
        return items


@attrs.define(eq=False)
class Running(SequenceQueue):
    """Those who hold slots, and beside them their slots as a column in the same order."""

    slots: Ints = attrs.field(init=False, factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, computation: SequenceState) -> int:
        index = super().add(computation)
        self.slots = np.insert(self.slots, index, computation.slot)
        return index

    def remove(self, computation: SequenceState) -> int:
        index = super().remove(computation)
        self.slots = np.delete(self.slots, index)
        return index

    def take_all(self) -> list[SequenceState]:
        self.slots = np.zeros(0, dtype=np.int64)
        return super().take_all()

    def at(self, indices: Ints) -> list[SequenceState]:
        """Those who stand at ``indices``."""
        if len(indices) == len(self._items):
            return self._items.copy()
        return list(map(self._items.__getitem__, indices.tolist()))
