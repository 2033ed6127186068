"""A plan being built, and the record of it while it is in flight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from typing import TypeVar

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from trioserve.protocol import wire
from trioserve.requests.embedded import grids_of, prefix_after, rows_after
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.request import Sequence, State
from trioserve.scheduler.sequence_state import NO_LOGPROBS, SequenceState
from trioserve.scheduler.step_time import StepLoad
from trioserve.scheduler.token_counts import Bools, Ints, TokenCounts

MAX_OPENED_BYTES = wire.MAX_MESSAGE_BYTES // 4
"""Bytes of opened sequences after which a plan opens no more; the next plan opens the others.

A prompt, a grammar or a list of token ids may have megabytes, and each output repeats them.
"""

ATTENTION_SPAN = 1024
"""Tokens of context that cost as much as a token does by itself.

It is lower than for usual models, so that a long context is given rather too much time.
"""

Row = tuple[SequenceState, int, bool]
"""A row: its sequence, its number of tokens, and True if a token is sampled after them."""


def _no_rows() -> Ints:
    return np.zeros(0, dtype=np.int64)


@attrs.frozen(eq=False)
class DuePiece:
    """The log-probabilities that a row gives: of prompt tokens ``start`` to before ``stop``."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def logprobs(self) -> PromptLogprobs:
        """Record that collects them."""
        wanted = self.sequence.request.prompt_logprobs
        assert wanted is not None
        return wanted


@attrs.frozen(eq=False, kw_only=True)
class InFlight:
    """A plan in flight: its sequences, and columns with one entry for each row.

    ``pieces`` are by slot; most plans have none. ``size`` is that of :mod:`.watchdog`: the tokens,
    more for those with a long context, and one for each page that is copied.
    """

    number: int
    seq_states: list[SequenceState] = attrs.field(factory=list)
    slots: Ints = attrs.field(factory=_no_rows)
    generations: Ints = attrs.field(factory=_no_rows)
    counts: Ints = attrs.field(factory=_no_rows)
    """Number of tokens that each row computes, without drafted ones."""
    samples: Bools = attrs.field(factory=lambda: np.zeros(0, dtype=np.bool_))
    """True for rows after which a token is sampled."""
    limits: Ints | None = None
    """Most tokens that each row may bring; None for one."""
    wants_more: Bools = attrs.field(factory=lambda: np.zeros(0, dtype=np.bool_))
    """True for rows that aren't plain: see :class:`~.token_counts.TokenCounts`."""
    pieces: dict[int, DuePiece] = attrs.field(factory=dict)
    num_tokens: int = 0
    num_decodes: int = 0
    """Number of rows of sequences that have got a token in their slot before."""
    load: StepLoad = attrs.field(factory=StepLoad)
    """Work of the step, without drafted tokens: the worker may draft fewer than it is allowed."""
    size: float = 0.0

    @property
    def rows(self) -> list[Row]:
        """Rows as tuples."""
        columns = self.counts.tolist(), self.samples.tolist()
        return list(zip(self.seq_states, *columns, strict=True))


@attrs.define(eq=False)
class PlanBuilder:
    """The changes and rows of plan ``number``; ``budget`` is the number of tokens left."""

    number: int
    budget: int
    _most: int = attrs.field(init=False)
    _num_decodes: int = attrs.field(init=False, default=0)
    _num_tokens: int = attrs.field(init=False, default=0)
    """Number of tokens, with drafted ones."""
    _num_drafts: int = attrs.field(init=False, default=0)
    """Number of draft tokens that rows may bring."""
    _context: float = attrs.field(init=False, default=0.0)
    """Tokens before each of these tokens, together."""
    _opened_bytes: int = attrs.field(init=False, default=0)
    _opened: list[wire.OpenSlot] = attrs.field(init=False, factory=list)
    _page_slots: list[int] = attrs.field(init=False, factory=list)
    _page_ids: list[int] = attrs.field(init=False, factory=list)
    _decodes: list[SequenceState] = attrs.field(init=False, factory=list)
    _decode_slots: Ints = attrs.field(init=False, factory=_no_rows)
    _limits: Ints | None = attrs.field(init=False, default=None)
    _singles: list[Row] = attrs.field(init=False, factory=list)
    _chunks: list[Row] = attrs.field(init=False, factory=list)
    _pieces: dict[int, DuePiece] = attrs.field(init=False, factory=dict)

    @_most.default
    def _most_tokens(self) -> int:
        return self.budget

    @property
    def room(self) -> int:
        """Number of tokens that the worker can still take, which may be more than the budget."""
        return self._most - self._num_tokens

    @property
    def may_open(self) -> bool:
        """True if there is a token left, and room in the message, for one more sequence."""
        return self.budget > 0 and self._opened_bytes < MAX_OPENED_BYTES

    @property
    def num_rows(self) -> int:
        """Number of rows so far."""
        return len(self._decodes) + len(self._singles) + len(self._chunks)

    def open(self, seq_state: SequenceState) -> None:
        """Open the slot that the sequence has got."""
        sequence = seq_state.sequence
        request = sequence.request
        tokens = request.prompt_column() + wire.from_ints(sequence.output_ids)
        embeddings = rows_after(request.embedded, seq_state.computed)
        self._opened_bytes += len(tokens) + len(msgspec.msgpack.encode(sequence.sampler))
        prefix = prefix_after(request.embedded, seq_state.cached)
        self._opened_bytes += sum(len(each.rows) for each in (*embeddings, *prefix))
        self._opened.append(
            wire.OpenSlot(
                slot=seq_state.slot,
                generation=seq_state.generation,
                tokens=tokens,
                prompt_length=len(request.prompt_ids),
                computed=seq_state.computed,
                pages=wire.from_ints(seq_state.pages),
                sampler=sequence.sampler,
                prompt_logprobs_from=seq_state.prompt_logprobs_from,
                states_from=seq_state.missing_rows.states_from,
                context_logits_from=seq_state.missing_rows.context_logits_from,
                adapter=seq_state.adapter,
                embeddings=embeddings,
                grids=grids_of(request.embedded),
                prefix=prefix,
            )
        )

    def append_page(self, seq_state: SequenceState, page: int) -> None:
        """Append ``page`` to the sequence's block table."""
        self._page_slots.append(seq_state.slot)
        self._page_ids.append(page)

    def add_decodes(self, seq_states: list[SequenceState], slots: Ints, planned: Ints) -> None:
        """Add a row for each sequence of ``seq_states`` that computes its last token and samples
        one.

        ``planned`` are the tokens that were given to plans before. To be called once.
        """
        self._decodes, self._decode_slots = seq_states, slots
        self._num_decodes += len(slots)
        self._take(len(slots))
        self._context += float(planned.sum())

    def _take(self, num_tokens: int) -> None:
        self.budget -= num_tokens
        self._num_tokens += num_tokens

    @property
    def decodes(self) -> tuple[list[SequenceState], Ints]:
        """Sequences and slots given to :meth:`add_decodes`."""
        return self._decodes, self._decode_slots

    def draft(self, extra: Ints) -> None:
        """Let the row of each of :attr:`decodes` return up to ``extra`` more tokens."""
        self._limits = 1 + extra
        self._num_drafts = int(extra.sum())
        self._take(self._num_drafts)

    def add_row(self, seq_state: SequenceState, count: int, samples: bool) -> None:
        """Add a row that computes the next ``count`` tokens, and samples one if ``samples``."""
        (self._singles if count == 1 else self._chunks).append((seq_state, count, samples))
        self._num_decodes += seq_state.sequence.state is State.DECODE
        self._take(count)
        self._context += count * (seq_state.planned + count / 2)
        if seq_state.prompt_logprobs_from != NO_LOGPROBS:
            self._expect_piece(seq_state, count)

    @property
    def load(self) -> StepLoad:
        """Work of the rows so far."""
        return StepLoad(
            decodes=self._num_decodes,
            prompt_tokens=self._num_tokens - self._num_decodes - self._num_drafts,
            context=self._context,
        )

    def _expect_piece(self, seq_state: SequenceState, count: int) -> None:
        """Expect the log-probabilities of prompt tokens in the row.

        The logits at a position are those of the token after it.
        """
        sequence = seq_state.sequence
        first = seq_state.planned + 1
        start = max(first, seq_state.prompt_logprobs_from)
        stop = min(first + count, len(sequence.request.prompt_ids))
        if start < stop:
            self._pieces[seq_state.slot] = DuePiece(sequence, start, stop)

    def build(
        self,
        closed: list[int],
        cuts: list[tuple[int, int]],
        copies: list[tuple[int, int]],
        counts: TokenCounts,
    ) -> tuple[wire.Plan, InFlight] | None:
        """Return the finished plan, rows of one token first; None if there is nothing to do.

        Args:
            closed: Slots that the worker closes.
            cuts: Slots whose block tables get shorter, each with the pages that it keeps.
            copies: Pages that the worker copies: (source, destination).
            counts: Columns of the slots.
        """
        others = self._singles + self._chunks
        if not (others or self._decodes or closed or cuts or copies):
            return None
        steady = len(self._decodes)
        seq_states = self._decodes + [seq_state for seq_state, _, _ in others]
        slots = _joined(self._decode_slots, [each.slot for each in seq_states[steady:]])
        tokens = _joined(np.ones(steady, dtype=np.int64), [count for _, count, _ in others])
        samples = _joined(np.ones(steady, dtype=np.bool_), [samples for _, _, samples in others])
        row_counts, limits = tokens, None
        if self._limits is not None:
            limits = _joined(self._limits, [1] * len(others))
            row_counts = tokens + limits - 1
            order = np.argsort(row_counts > 1, kind="stable")
            seq_states = [seq_states[place] for place in order.tolist()]
            slots, tokens, samples = slots[order], tokens[order], samples[order]
            row_counts, limits = row_counts[order], limits[order]
        plan = wire.Plan(
            number=self.number,
            closed=wire.from_ints(closed),
            opened=self._opened,
            cuts=wire.from_ints(list(itertools.chain(*cuts))),
            page_slots=wire.from_ints(self._page_slots),
            page_ids=wire.from_ints(self._page_ids),
            copies=wire.from_ints(list(itertools.chain(*copies))),
            row_slots=wire.from_ints(slots),
            row_counts=wire.from_ints(row_counts),
        )
        return plan, InFlight(
            number=self.number,
            seq_states=seq_states,
            slots=slots,
            generations=counts.generation[slots],
            counts=tokens,
            samples=samples,
            limits=limits,
            wants_more=~counts.plain[slots],
            pieces=self._pieces,
            num_tokens=int(tokens.sum()),
            num_decodes=self._num_decodes,
            load=self.load,
            size=self._num_tokens + self._context / ATTENTION_SPAN + len(copies),
        )


C = TypeVar("C", bound=np.generic)


def _joined(column: npt.NDArray[C], rest: Seq[int]) -> npt.NDArray[C]:
    return np.concatenate([column, np.array(rest, dtype=column.dtype)]) if rest else column
