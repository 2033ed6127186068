"""The slot table: one slot for each open sequence, and the changes that a plan makes to them.

A slot's state is a pure function of its tokens and options, with the number of computed tokens as
the only counter. A sequence that was preempted, or whose worker died, is opened again with its
tokens so far. Nothing here touches a tensor or a model.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from gpu._util.page_format import PageFormat
from trioserve.protocol.embeddings import EmbeddingRows, ImageGrid, find_misfit
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, ints

UNKNOWN_TOKEN = -1
"""Placeholder for a token that is sampled on the device and not on the host yet."""


_SHORT_COLUMN = 1024
"""Columns of at most so many bytes aren't shared between slots."""


class PlanError(Exception):
    """A plan can't be run. ``slot`` is the number of the slot at fault, -1 if there is none."""

    def __init__(self, message: str, slot: int = -1) -> None:
        super().__init__(message)
        self.slot = slot


@attrs.define(eq=False, kw_only=True)
class Slot:
    """One open sequence. The keys and values of its first ``computed`` tokens are in the cache.

    While a step is in flight, the token that it samples is :data:`UNKNOWN_TOKEN`.
    """

    number: int
    generation: int
    prompt_length: int
    computed: int
    sampler: SamplerParams
    adapter: int = 0
    """Number of its LoRA adapter; 0 for none."""
    prompt_logprobs_from: int = -1
    """Position of the first prompt token whose log-probability is requested; -1 for none."""
    states_from: int = -1
    """Position of the first token whose hidden state is requested; -1 for none."""
    context_logits_from: int = -1
    """Position of the first prompt token whose logits are requested; -1 for none."""
    num_pages: int = 0
    num_cuts: int = 0
    """Number of times that the block table was cut, so that other pages may replace those cut off.
    """
    stopped: bool = False
    """True if no more of it is computed: its last token is a stop id, the mask allowed no token, or
    the engine dropped it."""
    embeddings: Sequence[EmbeddingRows] = ()
    """Embeddings in place of those of its tokens, in the order of their positions."""
    grids: Sequence[ImageGrid] = ()
    """Images among its tokens, in the order of their positions, for a model with M-RoPE."""
    _buffer: npt.NDArray[np.int32]
    _length: int

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Prompt and output so far, [num_tokens] int32: a view, valid until :meth:`extend`."""
        return self._buffer[: self._length]

    def token(self, position: int) -> int:
        """Return the token at ``position``; cheaper than indexing :attr:`tokens`."""
        return int(self._buffer[position])

    def span(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Return the tokens from ``start`` to ``stop``, drafts included: a view."""
        return self._buffer[start:stop]

    def draft(self, tokens: Sequence[int]) -> None:
        """Write draft tokens behind the tokens, to be read by :meth:`span` and :meth:`drafted`.

        They don't count as the slot's tokens, and the next :meth:`extend` overwrites them.
        """
        stop = self._length + len(tokens)
        self._make_room(stop)
        self._buffer[self._length : stop] = tokens

    def drafted(self, count: int) -> Slot:
        """Return the slot as it will be if its first ``count`` drafts are accepted."""
        return attrs.evolve(self, length=self._length + count) if count else self

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including unknown ones."""
        return self._length

    def extend(self) -> int:
        """Append an unknown token and return its position."""
        self._make_room(self._length + 1)
        self._buffer[self._length] = UNKNOWN_TOKEN
        self._length += 1
        return self._length - 1

    def advance(self, end: int) -> None:
        """Note that a submitted row computes the tokens before ``end``."""
        self.computed = end
        if self.embeddings and end >= self.prompt_length:
            self.embeddings = ()

    def _make_room(self, length: int) -> None:
        if length > len(self._buffer):
            larger = np.zeros(max(length, 2 * len(self._buffer)), dtype=np.int32)
            larger[: self._length] = self._buffer[: self._length]
            self._buffer = larger

    def take(self, position: int, tokens: Sequence[int]) -> int:
        """Set the token at ``position`` to the first of ``tokens`` and append the others.

        One step sampled them all, so the KV of all but the last is computed. Tokens after one that
        ends the sequence are dropped. Return how many were taken.
        """
        for taken, token in enumerate(tokens, 1):
            if taken > 1:
                position = self.extend()
                self.computed += 1
            self.settle(position, token)
            if self.stopped:
                return taken
        return len(tokens)

    def settle(self, position: int, token: int) -> None:
        """Set the token at ``position``, and :attr:`stopped` if it ends the sequence.

        A negative token means that the mask allowed none; that ends the sequence too.
        """
        self._buffer[position] = token
        self.stopped = token < 0 or self.sampler.is_stop(token, position + 1 - self.prompt_length)


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row of a plan: compute ``count`` tokens of ``slot`` from position ``start`` on.

    ``count`` is 0 if the sequence has stopped. ``samples`` is true if the row reaches the end of
    the slot's tokens, so that the next one is sampled. Every decoded token makes a row, so it is a
    Struct outside the garbage collector; no reference cycle can contain it.
    """

    slot: Slot
    start: int
    count: int
    samples: bool
    drafts: int = 0
    """Draft tokens that the step computes and verifies after these; in a plan, how many it may."""

    @property
    def end(self) -> int:
        """Position after the last token computed, without draft tokens."""
        return self.start + self.count

    @property
    def stop(self) -> int:
        """Position after the last token computed, with draft tokens."""
        return self.start + self.count + self.drafts

    @property
    def num_computed(self) -> int:
        """Number of tokens computed, with draft tokens."""
        return self.count + self.drafts


class SlotTable:
    """The open slots and their block tables.

    ``block_tables`` is [slots, pages per sequence] int32, one row for each slot number. Entries
    from a slot's ``num_pages`` on are 0 or stale.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        vocab_size: int,
        num_host_pages: int = 0,
        max_row_tokens: int = 1,
        embedding_width: int = 0,
    ) -> None:
        self.adapters: Container[int] = ()
        """Numbers of the loaded adapters."""
        self._num_pages = num_pages
        self._num_host_pages = num_host_pages
        self._page_size = page_size
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self.embedding_width = embedding_width
        """Width of embeddings that stand in place of tokens; 0 if none can."""
        self.kv_format: PageFormat | None = None
        """Format of pages to which keys and values can be written; None if none can."""
        self.prefixes: list[tuple[int, EmbeddingRows]] = []
        """Keys and values to be written for slots that were opened, by their numbers."""
        self.max_row_tokens = max_row_tokens
        """Most tokens that a row may bring."""
        self._slots: dict[int, Slot] = {}
        self._dropped: dict[tuple[int, int], int] = {}
        """Last plan that computes a sequence to be stopped, by its slot and generation."""
        self._last_sampler = SamplerParams()
        self.block_tables = np.zeros((0, -(-max_model_len // page_size)), dtype=np.int32)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_pages(self) -> int:
        """Number of pages of the KV cache."""
        return self._num_pages

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def clear(self) -> None:
        """Forget every slot."""
        self._slots.clear()
        self._dropped.clear()
        self.prefixes.clear()

    def drop(self, number: int, generation: int, plan: int) -> None:
        """Stop a sequence after ``plan``, whether its slot is open or a later plan opens it."""
        self._dropped[number, generation] = plan

    def _stop_dropped(self, plan: int) -> None:
        """Stop the dropped sequences that ``plan`` needn't compute."""
        for (number, generation), last in list(self._dropped.items()):
            slot = self._slots.get(number)
            if slot is None or slot.generation < generation:
                continue  # It will be opened, or its place will be reused.
            if slot.generation == generation and plan <= last:
                continue
            del self._dropped[number, generation]
            if slot.generation == generation:
                slot.stopped = True

    def num_pages_used(self) -> int:
        """Return the number of distinct pages in the block tables of open slots."""
        held = [self.block_tables[slot.number, : slot.num_pages] for slot in self]
        return len(np.unique(np.concatenate(held))) if held else 0

    def apply(self, plan: Plan) -> list[Row]:
        """Change slots and their block tables as ``plan`` says; return its rows in order.

        ``Slot.computed`` doesn't change; the caller advances it when a row is submitted.

        Raises:
            PlanError: the plan doesn't fit the slots; some of it may have been applied.
        """
        for number in ints(plan.closed).tolist():
            if self._slots.pop(number, None) is None:
                raise PlanError(f"slot {number} is to be closed but is not open", number)
        for opened in plan.opened:
            self._open(opened)
        if self._dropped:
            self._stop_dropped(plan.number)
        self._cut_tables(ints(plan.cuts))
        self._append_pages(ints(plan.page_slots), ints(plan.page_ids))
        numbers, counts = ints(plan.row_slots).tolist(), ints(plan.row_counts).tolist()
        if len(numbers) != len(counts) or len(set(numbers)) != len(numbers):
            raise PlanError("the plan's rows are not one count for each of different slots")
        return [self._row(number, count) for number, count in zip(numbers, counts, strict=True)]

    def copies(self, plan: Plan) -> npt.NDArray[np.int32]:
        """Return the page copies of ``plan``: [C, 2] int32, pairs of source and destination.

        Raises:
            PlanError: a page number is out of range.
        """
        numbers = ints(plan.copies)
        if len(numbers) % 2:
            raise PlanError("the plan's copies are not from one page to one page each")
        pairs = numbers.reshape(-1, 2)
        total = self._num_pages + self._num_host_pages
        if len(pairs) and not (pairs.min() >= 0 and pairs.max() < total):
            raise PlanError(f"a page is copied that isn't one of {total}")
        return pairs

    def _open(self, opened: OpenSlot) -> None:
        number, tokens = opened.slot, ints(opened.tokens)
        if number < 0 or number in self._slots:
            raise PlanError(f"slot {number} is to be opened but is open", number)
        if not 0 < opened.prompt_length <= len(tokens) or not 0 <= opened.computed < len(tokens):
            raise PlanError(f"slot {number} is opened with lengths that don't fit", number)
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise PlanError(f"slot {number} has a token outside the vocabulary", number)
        if opened.adapter and opened.adapter not in self.adapters:
            raise PlanError(f"slot {number} has adapter {opened.adapter}, which isn't here", number)
        if 0 <= opened.prompt_logprobs_from <= opened.computed:
            raise PlanError(f"slot {number} wants log-probabilities of what is computed", number)
        for first in (opened.states_from, opened.context_logits_from):
            if 0 <= first < opened.computed:
                raise PlanError(f"slot {number} wants rows of what is computed", number)
        width = self.embedding_width
        if misfit := find_misfit(opened.embeddings, opened.grids, width, len(tokens)):
            raise PlanError(f"slot {number} has {misfit}", number)
        width = 0 if self.kv_format is None else 2 * math.prod(self.kv_format.shape)
        if misfit := find_misfit(opened.prefix, (), width, opened.computed):
            raise PlanError(f"slot {number} has a prefix with {misfit}", number)
        self.prefixes += [(number, each) for each in opened.prefix]
        if number >= len(self.block_tables):
            missing = max(number + 1, 2 * len(self.block_tables)) - len(self.block_tables)
            self.block_tables = np.pad(self.block_tables, ((0, missing), (0, 0)))
        buffer = np.empty(len(tokens) + 128, dtype=np.int32)
        buffer[: len(tokens)] = tokens
        self._slots[number] = Slot(
            number=number,
            generation=opened.generation,
            prompt_length=opened.prompt_length,
            computed=opened.computed,
            sampler=self._sharing(opened.sampler),
            adapter=opened.adapter,
            prompt_logprobs_from=opened.prompt_logprobs_from,
            states_from=opened.states_from,
            context_logits_from=opened.context_logits_from,
            embeddings=opened.embeddings,
            grids=opened.grids,
            buffer=buffer,
            length=len(tokens),
        )
        pages = ints(opened.pages)
        self._append_pages(np.full(len(pages), number, dtype=np.int32), pages)

    def _sharing(self, sampler: SamplerParams) -> SamplerParams:
        """Return ``sampler`` with equal long columns shared with the slot opened before it.

        The outputs of one request are opened one after the other, so they hold one copy.
        """
        last, self._last_sampler = self._last_sampler, sampler
        shared = {
            name: getattr(last, name)
            for name in ("stop_ids", "allowed_token_ids", "prediction")
            if len(getattr(sampler, name)) > _SHORT_COLUMN
            and getattr(sampler, name) == getattr(last, name)
        }
        if shared:
            self._last_sampler = sampler = attrs.evolve(sampler, **shared)
        return sampler

    def _cut_tables(self, cuts: npt.NDArray[np.int32]) -> None:
        if len(cuts) % 2:
            raise PlanError("the plan's cuts are not a number of pages for each slot")
        for number, num_pages in cuts.reshape(-1, 2).tolist():
            slot = self._slots.get(number)
            if slot is None:
                raise PlanError(f"slot {number} loses pages but is not open", number)
            if not 0 <= num_pages < slot.num_pages:
                raise PlanError(f"slot {number} keeps {num_pages} of {slot.num_pages}", number)
            slot.num_pages = num_pages
            slot.num_cuts += 1

    def _append_pages(self, numbers: npt.NDArray[np.int32], pages: npt.NDArray[np.int32]) -> None:
        if len(numbers) != len(pages):
            raise PlanError("the plan's pages are not one slot for each page")
        for number, page in zip(numbers.tolist(), pages.tolist(), strict=True):
            slot = self._slots.get(number)
            if slot is None:
                raise PlanError(f"slot {number} gets a page but is not open", number)
            if not 0 <= page < self._num_pages:
                raise PlanError(f"slot {number} gets page {page} of {self._num_pages}", number)
            if slot.num_pages == self.block_tables.shape[1]:
                raise PlanError(f"slot {number} gets more pages than a sequence can have", number)
            self.block_tables[number, slot.num_pages] = page
            slot.num_pages += 1

    def _row(self, number: int, count: int) -> Row:
        slot = self._slots.get(number)
        if slot is None:
            raise PlanError(f"slot {number} is to be computed but is not open", number)
        start, known = slot.computed, slot.num_tokens
        if slot.stopped:
            return Row(slot=slot, start=start, count=0, samples=False)
        end = start + count
        drafts = max(end - known, 0)
        may_draft = count <= self.max_row_tokens and start == known - 1 >= slot.prompt_length
        if count < 1 or (drafts and not may_draft):
            raise PlanError(
                f"slot {number} is to compute {count} tokens but has {known - start}", number
            )
        if end > min(slot.num_pages * self._page_size, self._max_model_len):
            raise PlanError(f"slot {number} has no room for {end} tokens", number)
        return Row(
            slot=slot, start=start, count=count - drafts, samples=end >= known, drafts=drafts
        )
