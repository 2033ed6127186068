"""Output tensors in an answer: a safetensors file, in base64."""

from __future__ import annotations

import binascii
from typing import Any

import msgspec

from trioserve.requests.tensors import Arrays

_ALIGNMENT = 8
"""Bytes that the arrays' place in the file is a multiple of."""


def safetensors_file(arrays: Arrays) -> bytes:
    """Return a safetensors file with ``arrays``."""
    header: dict[str, Any] = {}
    stop = 0
    for name, array in arrays.items():
        start, stop = stop, stop + array.nbytes
        shape = list(array.shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    contents = [array.astype("<f4", copy=False).tobytes() for array in arrays.values()]
    return b"".join([len(text).to_bytes(8, "little"), text, *contents])


def tensors_as_json(arrays: Arrays) -> Any:
    """Return a safetensors file with ``arrays`` for a field of an answer: a string in base64."""
    encoded = binascii.b2a_base64(safetensors_file(arrays), newline=False)
    return msgspec.Raw(b'"%b"' % encoded)
