"""The scheduler's record of one sequence, and ordered queues of such records."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator

import attrs
import numpy as np

from trioserve.protocol.wire import from_ints
from trioserve.requests.request import Sequence
from trioserve.requests.tensors import NOTHING_MISSING, MissingRows
from trioserve.scheduler.cache_events import adapter_word
from trioserve.scheduler.limits import SchedulerLimits
from trioserve.scheduler.policy import NO_TURN, Order, queue_order
from trioserve.scheduler.prefix_tree import Namespace, Node
from trioserve.scheduler.token_counts import Ints, TokenCounts

NO_SLOT = -1
NO_LOGPROBS = -1


_get_order = operator.attrgetter("order")


def namespace_of(salt: str, adapter: int) -> Namespace:
    """Return the namespace in which requests with that salt and adapter share cached prefixes."""
    return (salt, adapter_word(adapter)) if adapter else (salt,)


@attrs.define(eq=False, kw_only=True)
class SequenceState:
    """The scheduler's record of a sequence, from its submission until it has finished.

    Three counts give its progress: ``computed <= planned < length <= limit`` while it holds a slot;
    all are 0 otherwise. Counts run ahead of what is known: with a plan in flight, ``length``
    includes the token that the plan will sample.
    """

    sequence: Sequence = attrs.field(repr=False)
    order: Order
    """Position in every queue; no two are equal. The smallest is preempted last and resumed first.
    """
    arrival: int
    """Arrival number of its request."""
    adapter: int
    """Number of its adapter for the worker; 0 for none."""
    namespace: Namespace | None
    """Namespace of its cached prefixes. With None it shares none, and none of its own are kept."""
    own_namespace: Namespace | None
    """Namespace that it had at first, and has again in its next slot."""
    limit: int
    """Tokens, prompt and output, at which the sequence ends by length; at least one of output."""
    is_held: bool = False
    """True while it is held back for another sequence of its request to compute the prompt."""

    expected_cached: int | None = None
    """Tokens that the prefix cache had when a plan last looked for them; None before the first."""
    asked_elsewhere: bool = False
    """True once it was looked up which of its pages other places have."""
    left_grammar: bool = False
    """True if it was preempted, so that the worker may have dropped its grammar."""

    slot: int = NO_SLOT
    generation: int = 0
    num_stays: int = 0
    """Number of slots that it has had."""
    pages: list[int] = attrs.field(factory=list)
    """Block table."""
    cached: int = 0
    """Number of tokens whose keys and values were there when it entered its slot."""
    cursor: Node | None = None
    """Deepest node of the prefix tree on the path that ``pages`` begins with."""
    _counts: TokenCounts | None = attrs.field(init=False, default=None, repr=False)
    """Columns that hold its counts while it holds a slot."""
    _left_in: int = attrs.field(init=False, default=0)
    """Last plan that named its previous slot."""
    prompt_logprobs_from: int = NO_LOGPROBS
    """Position of the first prompt token with a log-probability in the slot's rows."""
    missing_rows: MissingRows = NOTHING_MISSING
    """First positions with rows of output tensors in the slot's rows."""

    @classmethod
    def of(cls, sequence: Sequence, limits: SchedulerLimits, arrival: int) -> SequenceState:
        """Return the record of a sequence with known ``max_tokens`` that arrived as ``arrival``."""
        request = sequence.request
        namespace: Namespace | None = None
        own = namespace_of(request.cache_salt, request.adapter)
        if limits.enable_prefix_caching:
            namespace = own
        elif (
            len(request.all_sequences) > 1
        ):  # Its sequences share their prompt with each other only.
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
            adapter=request.worker_adapter,
            namespace=namespace,
            own_namespace=namespace,
            limit=len(request.prompt_ids) + max(sequence.max_tokens, 1),
        )

    @property
    def had_turn(self) -> bool:
        """True if it has held a slot before."""
        return self.order[1] != NO_TURN

    @property
    def length(self) -> int:
        """Number of tokens that the slot will hold once every plan built so far is done."""
        return 0 if self._counts is None else int(self._counts.length[self.slot])

    @property
    def planned(self) -> int:
        """Number of tokens that have been given to plans."""
        return 0 if self._counts is None else int(self._counts.planned[self.slot])

    @property
    def computed(self) -> int:
        """Number of tokens with KV: their plans have been acknowledged."""
        return 0 if self._counts is None else int(self._counts.computed[self.slot])

    @property
    def last_plan(self) -> int:
        """Last plan that names the slot, or the last slot that it had."""
        return self._left_in if self._counts is None else int(self._counts.last_plan[self.slot])

    @property
    def remaining(self) -> int:
        """Number of tokens that have not been given to a plan; 1 means decode."""
        return self.length - self.planned

    @property
    def holds_slot(self) -> bool:
        return self.slot != NO_SLOT

    def is_in_its(self, stay: int) -> bool:
        """Return True if it holds a slot, and it is slot number ``stay`` that it has had."""
        return self.holds_slot and self.num_stays == stay

    def known_tokens(self) -> list[int]:
        """Return the prompt and the output so far. Don't change it: it may be the prompt itself.

        They are the prefix cache's, so embeddings have ids, too.
        """
        output = self.sequence.output_ids
        prompt = self.sequence.request.cache_ids
        return prompt + output if output else prompt

    def known_column(self) -> bytes:
        """Return :meth:`known_tokens` as a column."""
        return self.sequence.request.cache_column() + from_ints(self.sequence.output_ids)

    def enter_slot(self, counts: TokenCounts, slot: int, generation: int, computed: int) -> None:
        """Begin in ``slot`` with all known tokens; the KV of ``computed`` tokens exists."""
        sequence = self.sequence
        params = sequence.request.params
        counts.open(
            slot,
            generation,
            limit=self.limit,
            plain=params.logprobs is None
            and params.n == 1
            and sequence.request.tensors is None
            and not params.beam_width
            and sequence.max_tokens > 0,
            stop_ids=sequence.sampler.stop_ids,
            waits=params.beam_width > 0,
            leaves=sequence.request.hands_over,
            may_draft=sequence.sampler.speculative,
        )
        counts.length[slot] = sequence.num_tokens
        counts.planned[slot] = counts.computed[slot] = computed
        counts.last_plan[slot] = 0
        self._counts, self.slot, self.generation = counts, slot, generation
        self.num_stays += 1

    def add_row(self, count: int, samples: bool, plan: int) -> None:
        """Count a row: ``plan`` computes the next ``count`` tokens, and samples one if asked."""
        counts = self._counts
        assert counts is not None
        counts.planned[self.slot] += count
        counts.last_plan[self.slot] = plan
        if samples:
            counts.length[self.slot] += 1
            counts.decodes[self.slot] = True
            counts.note_draws(np.array([self.slot]))

    def change_slot(self, counts: TokenCounts, slot: int, generation: int) -> None:
        """Go on in ``slot`` with all known tokens and the same pages.

        The counts of the slot before, which has been given back, must still be there.
        """
        computed, room = self.computed, int(counts.room[self.slot])
        self._left_in = self.last_plan
        counts.close(self.slot, self.sequence.sampler.stop_ids)
        self.enter_slot(counts, slot, generation, computed)
        self.cached = computed
        counts.room[slot] = room
        self.prompt_logprobs_from = NO_LOGPROBS  # the whole prompt is computed

    def settle(self, extra: int) -> None:
        """Count ``extra`` tokens that a row brought after its first."""
        if self._counts is not None:
            self._counts.settle(np.array([self.slot]), np.array([extra]))

    def note_token(self, now: float) -> None:
        """Note that a token came at ``now``; the sequence may have lost its slot meanwhile."""
        self.sequence.last_token = self.sequence.request.times.last_token = now
        if self._counts is not None:
            self._counts.last_token[self.slot] = now

    def bring_times_up_to_date(self) -> None:
        """Copy the newest token's time from the slot's column to the sequence and request."""
        if self._counts is None:
            return
        last = float(self._counts.last_token[self.slot])
        if last == last:  # NaN before the first token
            times = self.sequence.request.times
            self.sequence.last_token = last
            times.last_token = last if times.last_token is None else max(times.last_token, last)

    def leave_slot(self) -> None:
        """Leave the slot."""
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
        self.missing_rows = NOTHING_MISSING
        self.asked_elsewhere = False


@attrs.define(eq=False)
class SequenceQueue:
    """A queue of sequences, sorted by their ``order``."""

    _items: list[SequenceState] = attrs.field(init=False, factory=list)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._items)

    def __getitem__(self, index: int) -> SequenceState:
        return self._items[index]

    def add(self, seq_state: SequenceState) -> int:
        """Insert the sequence and return its position."""
        index = bisect.bisect_left(self._items, seq_state.order, key=_get_order)
        self._items.insert(index, seq_state)
        return index

    def remove(self, seq_state: SequenceState) -> int:
        """Remove the sequence, which must be in, and return its former position."""
        index = bisect.bisect_left(self._items, seq_state.order, key=_get_order)
        assert self._items[index] is seq_state
        del self._items[index]
        return index

    def take_all(self) -> list[SequenceState]:
        """Empty the queue and return what was in it."""
        items, self._items = self._items, []
        return items


@attrs.define(eq=False)
class Running(SequenceQueue):
    """The running sequences, and their slots as a column in the same order."""

    slots: Ints = attrs.field(init=False, factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, seq_state: SequenceState) -> int:
        index = super().add(seq_state)
        self.slots = np.insert(self.slots, index, seq_state.slot)
        return index

    def remove(self, seq_state: SequenceState) -> int:
        index = super().remove(seq_state)
        self.slots = np.delete(self.slots, index)
        return index

    def take_all(self) -> list[SequenceState]:
        self.slots = np.zeros(0, dtype=np.int64)
        return super().take_all()

    def at(self, indices: Ints) -> list[SequenceState]:
        """Return the sequences at ``indices``."""
        if len(indices) == len(self._items):
            return self._items.copy()
        return list(map(self._items.__getitem__, indices.tolist()))
