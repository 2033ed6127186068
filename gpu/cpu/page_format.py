"""The places of keys and values in a page of the compiled kernels: those of csrc/kv_cache.h."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy.typing as npt

from gpu.executor import Content
from trioserve.protocol.embeddings import NUMPY_DTYPES


@attrs.frozen(kw_only=True)
class CompiledPages:
    """:class:`gpu._util.page_format.PageFormat` of the compiled kernels."""

    shape: tuple[int, int, int]
    page_size: int

    def put(self, content: Content, first: int, numbers: npt.NDArray[Any]) -> None:
        """See :meth:`gpu._util.page_format.PageFormat.put`."""
        layers, heads, size = self.shape
        page = content.view(NUMPY_DTYPES["bfloat16"])
        keys_together, values_together = math.gcd(self.page_size, 16), 2 - self.page_size % 2
        halves = layers, heads, 2
        # [layers, heads, groups of keys, pairs of numbers, keys, 2]
        keys = page.reshape(*halves, -1, size // 2, keys_together, 2)[:, :, 0]
        # [layers, heads, groups of values, numbers, values]
        values = page.reshape(*halves, -1, size, values_together)[:, :, 1]
        for place, given in enumerate(numbers, first):
            group, within = divmod(place, keys_together)
            keys[:, :, group, :, within] = given[:, 0].reshape(layers, heads, size // 2, 2)
            group, within = divmod(place, values_together)
            values[:, :, group, :, within] = given[:, 1]
