"""Embeddings in a request's body: base64 of a safetensors file or of NumPy's format."""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors

from trioserve.http.api.threads import LONG_BODY, run_if_long
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.embedded import EmbeddingsPrompt

_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NUMPY = b"\x93NUMPY"
_TORCH = (b"PK\x03\x04", b"\x80")
"""Beginnings of what torch.save and pickle write."""


async def read_embeddings(texts: Sequence[str], params: Sequence[str]) -> list[EmbeddingsPrompt]:
    """Return the embeddings in ``texts``, each of the field that ``params`` has for it.

    Raises:
        InvalidRequest: One isn't a matrix of finite numbers; ``param`` names it.
    """

    def read() -> list[EmbeddingsPrompt]:
        return [decode_embeddings(*each) for each in zip(texts, params, strict=True)]

    return await run_if_long(sum(map(len, texts)), read, most=LONG_BODY)


def decode_embeddings(text: str, param: str) -> EmbeddingsPrompt:
    """Return the embeddings in ``text``; see :func:`read_embeddings`."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{param} isn't base64", param=param) from None
    if data.startswith(_TORCH):
        raise InvalidRequest(
            f"{param} is a pickle, which runs code when it is read: send "
            'safetensors.torch.save({"prompt_embeds": tensor}) in base64 instead of torch.save',
            param=param,
        )
    try:
        rows = _from_numpy(data) if data.startswith(_NUMPY) else _from_safetensors(data)
        if not np.isfinite(rows.astype(np.float32, copy=False)).all():
            raise ValueError("it has numbers that aren't finite")
        return EmbeddingsPrompt(rows)
    except (ValueError, InvalidRequest) as error:
        raise InvalidRequest(f"{param} can't be read: {error}", param=param) from None


def _from_numpy(data: bytes) -> npt.NDArray[Any]:
    """Return the array in NumPy's format.

    Raises:
        ValueError: The header doesn't fit the data, or describes Python objects.
    """
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, in_columns, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, in_columns, dtype = np.lib.format.read_array_header_2_0(stream)
    if dtype.newbyteorder("=") not in (np.float16, np.float32, np.float64):
        raise ValueError(f"its numbers are {dtype}, not float16, float32 or float64")
    body = memoryview(data)[stream.tell() :]
    if len(body) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"it has {len(body)} bytes for an array of the shape {list(shape)}")
    rows = np.frombuffer(body, dtype).reshape(shape, order="F" if in_columns else "C")
    return rows.astype(dtype.newbyteorder("<"), copy=False)


def _from_safetensors(data: bytes) -> npt.NDArray[Any]:
    """Return the only tensor of a safetensors file.

    Raises:
        ValueError: It is none, or has several tensors, or another dtype.
    """
    try:
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise ValueError(f"neither safetensors nor NumPy's format ({error})") from None
    if len(tensors) != 1:
        raise ValueError(f"it has {len(tensors)} tensors in place of one")
    [(_, tensor)] = tensors
    if tensor["dtype"] not in _DTYPES:
        raise ValueError(f"its numbers are {tensor['dtype']}, not one of {', '.join(_DTYPES)}")
    return np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
