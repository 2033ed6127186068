"""Answers the engine's calls for the embeddings of images and audio."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from gpu.models.media.tower import Arrays
from trioserve.protocol.embeddings import NUMPY_DTYPES, NumberFormat
from trioserve.protocol.media_arrays import read_arrays

_FORMATS: dict[torch.dtype, NumberFormat] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class Tower(Protocol):
    """Makes embeddings."""

    def embed(self, arrays: Arrays) -> torch.Tensor:
        """Return the embeddings [n, E] of an image or a window of audio."""
        ...


class EncodeMedia:
    """The call ``encode_media``: arrays of one medium to its embeddings. It runs in one thread.

    Args:
        tower: The model's tower.
        dtype: Number format of the decoder, in which embeddings are sent.
    """

    def __init__(self, tower: Tower, dtype: torch.dtype) -> None:
        self._tower = tower
        self._dtype = dtype

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return ``rows``, the embeddings [n, E], and their ``number_format``.

        Args:
            arguments: Those of :mod:`trioserve.protocol.media_arrays`.

        Raises:
            ModelLoadError: The arrays aren't there any more.
        """
        embeddings = self._tower.embed(read_arrays(arguments)).to(self._dtype).cpu().contiguous()
        kind = _FORMATS[self._dtype]
        raw = embeddings.view(torch.uint8).numpy()
        assert raw.nbytes == embeddings.numel() * NUMPY_DTYPES[kind].itemsize
        return {"rows": raw.tobytes(), "number_format": kind}
