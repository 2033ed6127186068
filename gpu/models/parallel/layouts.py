"""The layout of a step in a message, for ranks that torch computes on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from gpu.attention import StepLayout
from gpu.models.parallel.steps import (
    Compute,
    SentEmbeddings,
    received_positions,
    sent_positions,
)
from gpu.models.step_embeddings import StepEmbeddings


def compute(
    tokens: npt.NDArray[np.int64],
    layout: StepLayout,
    adapted: Mapping[int, npt.NDArray[np.int64]],
    embedded: StepEmbeddings | None,
) -> Compute:
    """Return the message for a step.

    Args:
        tokens: [T], in the order of ``layout``.
        layout: Rows of the step.
        adapted: By the adapter's number, the places of its tokens.
        embedded: Embeddings in place of those of tokens.
    """
    return Compute(
        tokens=tokens.tobytes(),
        positions=layout.positions.tobytes(),
        query_start=layout.query_start.tobytes(),
        context_lens=layout.context_lens.tobytes(),
        slots=layout.slots.tobytes(),
        block_tables=layout.block_tables.tobytes(),
        width=layout.block_tables.shape[1],
        num_decode_rows=layout.num_decode_rows,
        rotary_positions=sent_positions(layout.rotary_positions),
        adapted={number: own.tobytes() for number, own in adapted.items()},
        embedded=SentEmbeddings.of(embedded),
    )


def layout_of(step: Compute) -> StepLayout:
    """Return the layout that :func:`compute` got."""
    tables = np.frombuffer(step.block_tables, dtype=np.int32).copy()
    return StepLayout(
        positions=_longs(step.positions),
        query_start=_longs(step.query_start),
        context_lens=_longs(step.context_lens),
        slots=_longs(step.slots),
        block_tables=tables.reshape(-1, step.width),
        num_decode_rows=step.num_decode_rows,
        rotary_positions=received_positions(step.rotary_positions),
    )


def _longs(column: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(column, dtype=np.int64).copy()
