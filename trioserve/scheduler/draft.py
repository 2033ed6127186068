"""A plan in the making, and what is remembered of it while it is in flight."""

from __future__ import annotations

import attrs
import msgspec

from trioserve import wire
from trioserve.logprobs import PromptLogprobs
from trioserve.request import Sequence
from trioserve.scheduler.computation import NO_LOGPROBS, Computation

__all__ = ["Draft", "DuePiece", "InFlight", "Row"]

MAX_OPENED_BYTES = wire.MAX_MESSAGE_BYTES // 4
"""Of what one plan opens, besides the sequence that goes past it: those behind it come in the next.

A prompt, a grammar or a list of token ids may have megabytes, and each output has them again.
"""

ATTENTION_SPAN = 1024
"""Tokens to look back at that cost as much as a token does by itself.

Fewer than with any usual model, so that a long context is given rather too much time.
"""

Row = tuple[Computation, int, bool]
"""Who computes, how many tokens, and whether one is sampled after them."""


@attrs.frozen(eq=False)
class DuePiece:
    """The log-probabilities that a row gives: of prompt tokens ``start`` to before ``stop``."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def logprobs(self) -> PromptLogprobs:
        """Where they go."""
        wanted = self.sequence.request.prompt_logprobs
        assert wanted is not None
        return wanted


@attrs.frozen(eq=False)
class InFlight:
    """What a plan that was sent asked for. ``slots`` and ``generations`` are its rows' columns.

    ``pieces`` are by slot; most plans have none. ``size`` is that of :mod:`.watchdog`: the tokens,
    and more for those with a long context.
    """

    number: int
    rows: list[Row]
    slots: bytes
    generations: bytes
    pieces: dict[int, DuePiece]
    num_tokens: int
    size: float


@attrs.define(eq=False)
class Draft:
    """Collects the changes and rows of plan ``number``; ``budget`` is the tokens that are left."""

    number: int
    budget: int
    _num_tokens: int = attrs.field(init=False, default=0)
    _size: float = attrs.field(init=False, default=0.0)
    _opened_bytes: int = attrs.field(init=False, default=0)
    _opened: list[wire.OpenSlot] = attrs.field(init=False, factory=list)
    _page_slots: list[int] = attrs.field(init=False, factory=list)
    _page_ids: list[int] = attrs.field(init=False, factory=list)
    _singles: list[Row] = attrs.field(init=False, factory=list)
    _chunks: list[Row] = attrs.field(init=False, factory=list)
    _pieces: dict[int, DuePiece] = attrs.field(init=False, factory=dict)

    @property
    def may_open(self) -> bool:
        """Whether there is a token left, and room in the message, for one more sequence."""
        return self.budget > 0 and self._opened_bytes < MAX_OPENED_BYTES

    def open(self, computation: Computation) -> None:
        """The worker is to open the slot that ``computation`` has got."""
        sequence = computation.sequence
        tokens = wire.from_ints(computation.known_tokens())
        self._opened_bytes += len(tokens) + len(msgspec.msgpack.encode(sequence.sampler))
        self._opened.append(
            wire.OpenSlot(
                slot=computation.slot,
                generation=computation.generation,
                tokens=tokens,
                prompt_length=len(sequence.request.prompt_ids),
                computed=computation.computed,
                pages=wire.from_ints(computation.pages),
                sampler=sequence.sampler,
                prompt_logprobs_from=computation.prompt_logprobs_from,
            )
        )

    def append_page(self, computation: Computation, page: int) -> None:
        """The worker is to append ``page`` to the block table."""
        self._page_slots.append(computation.slot)
        self._page_ids.append(page)

    def add_row(self, computation: Computation, count: int, samples: bool) -> None:
        """``computation`` computes its next ``count`` tokens, and samples one if ``samples``."""
        (self._singles if count == 1 else self._chunks).append((computation, count, samples))
        self.budget -= count
        self._num_tokens += count
        self._size += count * (1 + computation.planned / ATTENTION_SPAN)
        if computation.prompt_logprobs_from != NO_LOGPROBS:
            self._expect_piece(computation, count)

    def _expect_piece(self, computation: Computation, count: int) -> None:
        """The logits at a position are those of the token after it, while that is the prompt's."""
        sequence = computation.sequence
        first = computation.planned + 1
        start = max(first, computation.prompt_logprobs_from)
        stop = min(first + count, len(sequence.request.prompt_ids))
        if start < stop:
            self._pieces[computation.slot] = DuePiece(sequence, start, stop)

    def seal(self, closed: list[int]) -> tuple[wire.Plan, InFlight] | None:
        """The finished plan, rows of one token first; None where there is nothing to be done."""
        rows = self._singles + self._chunks
        if not rows and not closed:
            return None
        slots = wire.from_ints([computation.slot for computation, _, _ in rows])
        plan = wire.Plan(
            number=self.number,
            closed=wire.from_ints(closed),
            opened=self._opened,
            page_slots=wire.from_ints(self._page_slots),
            page_ids=wire.from_ints(self._page_ids),
            row_slots=slots,
            row_counts=wire.from_ints([count for _, count, _ in rows]),
        )
        generations = wire.from_ints([computation.generation for computation, _, _ in rows])
        return plan, InFlight(
            self.number,
            rows,
            slots,
            generations,
            self._pieces,
            self._num_tokens,
            self._size,
        )
