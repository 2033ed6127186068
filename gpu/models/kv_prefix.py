"""Keys and values that a sequence brings with it, written to its pages.

An adapter of prefix tuning has them for its virtual tokens. Each executor writes them at the start
of the step that opens the sequence, behind the copies of pages, whether or not it has a row.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from gpu._util.page_format import PageFormat
from gpu.executor import Content, PagedExecutor
from gpu.slots import SlotTable
from trioserve.protocol.embeddings import EmbeddingRows


@attrs.frozen(kw_only=True)
class PlainPages:
    """Pages [layers, 2, KV heads, page_size, numbers of a head], as torch and CUDA kernels have
    them.
    """

    shape: tuple[int, int, int]
    page_size: int
    numbers: np.dtype[Any]
    """Type of the keys and values."""

    def put(self, content: Content, first: int, numbers: npt.NDArray[Any]) -> None:
        """See :meth:`gpu._util.page_format.PageFormat.put`."""
        layers, heads, size = self.shape
        page = content.view(self.numbers)
        places = page.reshape(layers, 2, heads, self.page_size, size)
        places[:, :, :, first : first + len(numbers)] = np.moveaxis(numbers, 0, 3)


def write_prefixes(slots: SlotTable, executor: PagedExecutor) -> None:
    """Write the keys and values that slots have brought, and forget them."""
    for number, given in slots.prefixes:
        assert slots.kv_format is not None
        _write(given, slots.block_tables[number], slots.kv_format, executor)
    slots.prefixes.clear()


def _write(
    given: EmbeddingRows,
    pages: npt.NDArray[np.int32],
    kv_format: PageFormat,
    executor: PagedExecutor,
) -> None:
    layers, heads, size = kv_format.shape
    numbers = given.numbers(2 * layers * heads * size).reshape(-1, layers, 2, heads, size)
    done = 0
    while done < len(numbers):
        place, first = divmod(given.start + done, kv_format.page_size)
        part = numbers[done : done + kv_format.page_size - first]
        content = executor.read_page(int(pages[place]))
        kv_format.put(content, first, part)
        executor.write_page(int(pages[place]), content)
        done += len(part)
