"""The arrays that describe a step to the compiled decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from gpu.lora.groups import tokens_by_adapter
from gpu.models.rotary_positions import Positions, positions_of
from gpu.models.step_embeddings import StepEmbeddings, embeddings_of
from gpu.slots import Row, SlotTable


@attrs.frozen(eq=False, kw_only=True)
class CompiledStep:
    """A step of R rows with T tokens, whose arrays are contiguous."""

    tokens: npt.NDArray[np.int32]  # [T]
    query_start: npt.NDArray[np.int64]  # [R + 1]
    context_lens: npt.NDArray[np.int64]  # [R]
    block_tables: npt.NDArray[np.int32]  # [R, W]
    adapted: Mapping[int, npt.NDArray[np.int32]]
    """By the adapter's number: places of its tokens."""
    embedded: StepEmbeddings | None
    """Embeddings in place of those of tokens."""
    rotary_positions: Positions | None = None
    """[T, 3], for M-RoPE; None if they are the tokens' places in their sequences."""

    def last_tokens(self, rows: Sequence[Row]) -> npt.NDArray[np.integer]:
        """Return for each of ``rows`` the place of its last token before its drafts."""
        last = self.query_start[1:] - 1
        if len(self.tokens) > len(rows):
            last -= np.array([row.drafts for row in rows])
        return last


class StepArrays:
    """Memory for steps of up to ``most`` tokens, filled anew by each.

    ``has_mrope`` says whether tokens have rotary positions of their own.
    """

    def __init__(self, most: int, *, has_mrope: bool = False) -> None:
        self._has_mrope = has_mrope
        self._tokens = np.zeros(most, dtype=np.int32)
        self._context_lens = np.zeros(most, dtype=np.int64)
        self._query_start = np.zeros(most + 1, dtype=np.int64)
        self._numbers = np.arange(most + 1, dtype=np.int64)
        """The ``query_start`` of rows of one token each."""

    def arrange(self, rows: Sequence[Row], slots: SlotTable, *, adapters: bool) -> CompiledStep:
        """Return the step of ``rows``; without ``adapters`` no row has one."""
        count = len(rows)
        self._context_lens[:count] = [row.stop for row in rows]
        if all(row.num_computed == 1 for row in rows):
            num_tokens = count
            self._tokens[:count] = [row.slot.token(row.start) for row in rows]
            query_start = self._numbers
        else:
            query_start = self._query_start
            np.cumsum([row.num_computed for row in rows], out=query_start[1 : count + 1])
            num_tokens = int(query_start[count])
            tokens = [row.slot.span(row.start, row.stop) for row in rows]
            np.concatenate(tokens, out=self._tokens[:num_tokens])
        width = max(row.slot.num_pages for row in rows)
        return CompiledStep(
            tokens=self._tokens[:num_tokens],
            query_start=query_start[: count + 1],
            context_lens=self._context_lens[:count],
            block_tables=slots.block_tables[[row.slot.number for row in rows], :width],
            adapted=tokens_by_adapter(rows) if adapters else {},
            embedded=embeddings_of(rows, query_start, slots.embedding_width),
            rotary_positions=positions_of(rows) if self._has_mrope else None,
        )
