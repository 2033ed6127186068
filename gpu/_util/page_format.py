"""The interface to the places of keys and values in a page."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class PageFormat(Protocol):
    """The places of keys and values in the content of a page."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, KV heads and numbers of a head."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    def put(self, content: npt.NDArray[np.uint8], first: int, numbers: npt.NDArray[Any]) -> None:
        """Put ``numbers`` [n, layers, 2, KV heads, numbers of a head] into a page's ``content``.

        They are those of its tokens from ``first`` on; 0 of 2 is a key.
        """
