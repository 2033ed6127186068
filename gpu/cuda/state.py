"""The state of each slot on the device: its block table and its tokens.

Both are rows of one int32 arena. The sampler appends to the tokens on the device itself, unless
there are drafts. All else is changed by the host, with the pairs (index, value) that travel in the
step buffer. Where a step has more of them than fit, the rest is copied row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu._util.upload import staged
from gpu.cuda.step_buffer import StepBuffer
from gpu.kernels import KernelLoader
from gpu.kernels.scatter_updates import ScatterUpdates
from gpu.slots import PlanError, Row, Slot, SlotTable

MAX_UPDATES = 4096
# Rows begin at multiples of this many numbers, so that kernels may read four at once.
ALIGNMENT = 4

Run = tuple[int, npt.NDArray[np.int32]]
"""A first index in the arena, and the numbers to write from there on."""


class DeviceState:
    """Block tables and tokens of ``num_slots`` slots with up to ``max_model_len`` tokens each.

    :meth:`regions` of the step buffer belong to it. :meth:`open` and :meth:`pack` note what the
    host knows; :meth:`copy_large` and :meth:`scatter` bring the device to it, after the upload of
    the same step.

    Raises:
        ValueError: so many tokens that their places are no int32.
    """

    @staticmethod
    def regions() -> dict[str, int]:
        """Return what it needs of the step buffer."""
        return {"num_updates": 1, "updates": 2 * MAX_UPDATES}

    def __init__(
        self,
        loader: KernelLoader,
        buffer: StepBuffer,
        *,
        num_slots: int,
        max_model_len: int,
        page_size: int,
    ) -> None:
        self._num_slots = num_slots
        self._buffer = buffer
        pages = _aligned(-(-max_model_len // page_size))
        # A token may be drawn behind the last position; it is never computed.
        tokens = _aligned(max_model_len + 1)
        if num_slots * (pages + tokens) > np.iinfo(np.int32).max:
            raise ValueError(
                f"{num_slots} sequences (--max-num-seqs) of {max_model_len} tokens "
                "(--max-model-len) are more than the device keeps"
            )
        self._arena = torch.zeros(
            num_slots * (pages + tokens), dtype=torch.int32, device=loader.device
        )
        tables = self._arena[: num_slots * pages]
        self.block_tables = tables.view(num_slots, pages)
        """[num_slots, pages of a sequence]: page ids; what is behind a slot's last is old."""
        self.history = self._arena[len(tables) :].view(num_slots, tokens)
        """[num_slots, max_model_len + 1 or more]: prompt and output."""
        self._first_token = len(tables)
        self._pages_known = [0] * num_slots
        self._cuts_known = [0] * num_slots
        self._opened: dict[int, npt.NDArray[np.int32]] = {}
        self.large: list[Run] = []
        """Runs that find no place in the step buffer, until they are copied."""
        self._scatter = ScatterUpdates(
            loader,
            arena=self._arena,
            updates=buffer["updates"],
            num_updates=buffer["num_updates"],
        )

    def open(self, slot: Slot) -> None:
        """Take over the slot's tokens from the host; it has no pages yet.

        Raises:
            PlanError: there are fewer slots.
        """
        if slot.number >= self._num_slots:
            raise PlanError(f"slot {slot.number} is one of {self._num_slots}", slot.number)
        self._pages_known[slot.number] = self._cuts_known[slot.number] = 0
        self._opened[slot.number] = slot.tokens.copy()

    def pack(self, rows: Sequence[Row], slots: SlotTable, from_host: Sequence[Row] = ()) -> None:
        """Put the changes since the last step into the step buffer, before its upload.

        ``from_host`` are rows whose tokens and drafts the device may lack, because no sampler has
        appended them.
        """
        indices: list[npt.NDArray[np.int64]] = []
        values: list[npt.NDArray[np.int32]] = []
        room = MAX_UPDATES
        for first, numbers in [*self._missing(from_host), *self._changes(rows, slots)]:
            if len(numbers) > room:
                self.large.append((first, numbers))
                continue
            room -= len(numbers)
            indices.append(np.arange(first, first + len(numbers)))
            values.append(numbers)
        self._buffer.put("num_updates", MAX_UPDATES - room)
        if indices:
            pairs = np.stack([np.concatenate(indices), np.concatenate(values)], axis=1)
            self._buffer.put("updates", pairs)

    def pack_nothing(self) -> None:
        """Put into the step buffer that nothing has changed."""
        self._buffer.put("num_updates", 0)

    def copy_large(self) -> None:
        """Copy what found no place in the step buffer. Not to be captured."""
        for first, numbers in self.large:
            source = staged(numbers, self._arena.device)
            self._arena[first : first + len(numbers)].copy_(source, non_blocking=True)
        self.large.clear()

    def scatter(self) -> None:
        """Apply the pairs that the step buffer brought."""
        self._scatter.launch()

    def _changes(self, rows: Sequence[Row], slots: SlotTable) -> list[Run]:
        """Runs of numbers to write. No two overlap."""
        changes = [(self._place(number, 0), tokens) for number, tokens in self._opened.items()]
        self._opened.clear()
        stride = self.block_tables.shape[1]
        for row in rows:
            number, num_pages = row.slot.number, row.slot.num_pages
            if row.slot.num_cuts > self._cuts_known[number]:
                self._cuts_known[number], self._pages_known[number] = row.slot.num_cuts, 0
            known = self._pages_known[number]
            if known < num_pages:
                table = slots.block_tables[number, known:num_pages].copy()
                changes.append((number * stride + known, table))
                self._pages_known[number] = num_pages
        return changes

    def _missing(self, rows: Sequence[Row]) -> list[Run]:
        """Return the tokens of ``rows`` and their drafts, without those that an opening brings."""
        runs = []
        for row in rows:
            first = row.end if row.slot.number in self._opened else row.start
            runs.append((self._place(row.slot.number, first), row.slot.span(first, row.stop)))
        return runs

    def _place(self, number: int, position: int) -> int:
        """Return the index in the arena of a slot's token."""
        return self._first_token + number * self.history.shape[1] + position


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
