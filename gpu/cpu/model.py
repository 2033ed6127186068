"""The seams between the executor of the CPU and what computes a model and draws there.

Nothing here needs torch: the compiled kernels do without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu.executor import Content, Copies
from gpu.lora.store import AdapterStore
from gpu.sampling.adjustments import Adjustment
from gpu.sampling.drawn import Drawn
from gpu.sampling.sampler_io import SamplerRow
from gpu.slots import Row, SlotTable

if TYPE_CHECKING:
    import torch

Floats: TypeAlias = npt.NDArray[np.float32]
Hidden: TypeAlias = "torch.Tensor | npt.NDArray[Any]"
"""Hidden states [T, E], a row for each token; what they are made of is their model's business."""


class CpuModel(Protocol):
    """A model with its paged KV cache.

    What a method returns is valid until the next call of the same method.
    """

    @property
    def adapters(self) -> AdapterStore[Any] | None:
        """The adapters that rows may have; None where none can be served."""

    def copy_pages(self, copies: Copies) -> None:
        """Copy pages of the KV cache, which has those behind that are on the host elsewhere."""

    def begin_transfer(self) -> None:
        """Let pages be read and written, by other threads, behind the steps before this call."""

    def read_page(self, number: int) -> Content:
        """Return the content of a page; steps that don't use it may be computed meanwhile."""
        ...

    def write_page(self, number: int, content: Content) -> None:
        """Write to a page what :meth:`read_page` has returned; as there."""

    def forward(self, rows: Sequence[Row], slots: SlotTable) -> tuple[Any, npt.NDArray[np.integer]]:
        """Compute the hidden states of the tokens of ``rows``, at least one, and fill the KV cache.

        ``slots`` has the rows' block tables. Returns the states that the head takes
        (:data:`Hidden`), in which a row's tokens stand together, its drafts behind them, and for
        each row which of them is its last token's, before the drafts.
        """
        ...

    def floats(self, hidden: Any) -> Floats:
        """[R, E]: ``hidden``, some of what :meth:`forward` returned, in float32."""
        ...

    def logits(self, hidden: Any, rows: npt.NDArray[np.integer] | None = None) -> Floats:
        """Return the logits [R, V] of the R ``rows`` of ``hidden``, or of all; may be changed.

        ``hidden`` is a contiguous part of what :meth:`forward` returned.
        """
        ...

    def most_probable(
        self, hidden: Any, rows: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int32] | None:
        """[R]: the first of the largest logits of each row, -1 where they hold NaN or are all -inf.

        None where that is no cheaper than to take it from the logits.
        """
        ...


class CpuSampler(Protocol):
    """Sampler: tokens from logits, as written down in :mod:`trioserve.protocol.sampling`."""

    @property
    def vocab_size(self) -> int:
        """The model's."""

    def sample(
        self, logits: Floats, rows: Sequence[SamplerRow], adjustment: Adjustment | None = None
    ) -> Drawn:
        """Draw one token for every row.

        Args:
            logits: [R, vocab_size], contiguous; overwritten.
            rows: R rows.
            adjustment: of the R rows, what is done to their logits in step 5.
        """
        ...
