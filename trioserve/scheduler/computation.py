"""What the scheduler knows of one sequence, and the ordered lines in which sequences stand."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator

import attrs

from trioserve.request import Sequence
from trioserve.scheduler.limits import Limits
from trioserve.scheduler.policy import Order, queue_order
from trioserve.scheduler.prefix import Namespace, Node

__all__ = ["NO_LOGPROBS", "Computation", "Line"]

NO_SLOT = -1
NO_LOGPROBS = -1
_get_order = operator.attrgetter("order")


@attrs.define(eq=False, kw_only=True)
class Computation:
    """The scheduler's record of a sequence, from its submission until it has finished.

    Three counts say how far a sequence has come; ``computed <= planned < length <= limit`` while it
    holds a slot. Counts run ahead of what is known: with a plan in flight, ``length`` includes the
    token which that plan will sample, whatever it will be.
    """

    sequence: Sequence = attrs.field(repr=False)
    order: Order
    """Smaller is admitted earlier and preempted later. No two are equal."""
    namespace: Namespace | None
    """Whose cached prefixes it shares; None for nobody's, and none of its own are kept."""
    limit: int
    """Tokens, prompt and output, at which the sequence ends by length; at least one of output."""
    is_held: bool = False
    """Whether it waits for another sequence of its request to compute the prompt."""

    slot: int = NO_SLOT
    generation: int = 0
    pages: list[int] = attrs.field(factory=list)
    """The block table."""
    cursor: Node | None = None
    """The deepest node of the prefix tree on the path that ``pages`` begins with."""
    length: int = 0
    """Tokens that the slot will hold once every plan made so far is done."""
    planned: int = 0
    """Tokens that have been given to plans."""
    computed: int = 0
    """Tokens whose KV exists: their plans have been acknowledged."""
    last_plan: int = 0
    """The last plan that names the slot."""
    prompt_logprobs_from: int = NO_LOGPROBS
    """The position of the first prompt token whose log-probability the slot's rows give."""

    @classmethod
    def of(cls, sequence: Sequence, limits: Limits, arrival: int) -> Computation:
        """The record of a sequence whose ``max_tokens`` is known; ``arrival`` is its request's."""
        request = sequence.request
        namespace: Namespace | None = None
        if limits.enable_prefix_caching:
            namespace = (request.cache_salt,)
        elif len(request.sequences) > 1:  # They share their prompt, and with nobody else.
            namespace = (request.cache_salt, arrival)
        return cls(
            sequence=sequence,
            order=queue_order(
                limits.scheduling_policy,
                priority=request.priority,
                arrival=arrival,
                index=sequence.index,
            ),
            namespace=namespace,
            limit=len(request.prompt_ids) + max(sequence.max_tokens, 1),
        )

    @property
    def remaining(self) -> int:
        """Tokens that have not been given to a plan; 1 means decode."""
        return self.length - self.planned

    @property
    def holds_slot(self) -> bool:
        return self.slot != NO_SLOT

    @property
    def may_run(self) -> bool:
        """Whether there is a token left to sample that no plan in flight will."""
        return self.length < self.limit

    def known_tokens(self) -> list[int]:
        """The prompt and the output so far. Not to be changed: it may be the prompt itself."""
        output = self.sequence.output_ids
        prompt = self.sequence.request.prompt_ids
        return prompt + output if output else prompt

    def leave_slot(self) -> None:
        """Back to how it was before the slot was opened."""
        self.slot = NO_SLOT
        self.pages = []
        self.cursor = None
        self.length = self.planned = self.computed = 0
        self.prompt_logprobs_from = NO_LOGPROBS


@attrs.define(eq=False)
class Line:
    """Computations in the order of their ``order``."""

    _items: list[Computation] = attrs.field(init=False, factory=list)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Computation]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Computation:
        return self._items[index]

    def add(self, computation: Computation) -> None:
        """Put ``computation`` in its place."""
        bisect.insort(self._items, computation, key=_get_order)

    def remove(self, computation: Computation) -> None:
        """Take ``computation`` out. It must be in."""
        index = bisect.bisect_left(self._items, computation.order, key=_get_order)
        assert self._items[index] is computation
        del self._items[index]

    def take_all(self) -> list[Computation]:
        """Empty the line."""
        items, self._items = self._items, []
        return items
