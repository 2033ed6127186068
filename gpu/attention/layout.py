"""Makes the layout of a step from its rows and their slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpu.attention import StepLayout
from gpu.slots import Row, SlotTable


def in_layout_order(rows: Sequence[Row]) -> list[Row]:
    """Return rows in the order of :class:`~gpu.attention.StepLayout`."""
    return sorted(rows, key=lambda row: (row.num_computed > 1, -row.stop))


def step_layout(
    rows: Sequence[Row],
    slots: SlotTable,
    rotary_positions: npt.NDArray[np.int64] | None = None,
) -> StepLayout:
    """Return the layout of at least one row; ``rows`` are in the order of the layout.

    ``rotary_positions`` are those of the rows, if they aren't the tokens' places.
    """
    counts = np.array([row.num_computed for row in rows])
    query_start = np.concatenate([[0], counts.cumsum()])
    starts = np.array([row.start for row in rows])
    numbers = np.array([row.slot.number for row in rows])
    width = max(row.slot.num_pages for row in rows)
    return StepLayout(
        positions=np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts),
        query_start=query_start,
        context_lens=starts + counts,
        slots=numbers,
        block_tables=slots.block_tables[numbers, :width],
        num_decode_rows=int((counts == 1).sum()),
        rotary_positions=rotary_positions,
    )


def ends_of(
    rows: Sequence[Row], ordered: Sequence[Row], layout: StepLayout
) -> npt.NDArray[np.int64]:
    """Return for each of ``rows`` the place of its last token in a step, before its drafts.

    ``ordered`` are the same rows in the order of ``layout``.
    """
    ends = zip(ordered, layout.query_start[1:].tolist(), strict=True)
    last = {row.slot.number: end - 1 - row.drafts for row, end in ends}
    return np.array([last[row.slot.number] for row in rows])
