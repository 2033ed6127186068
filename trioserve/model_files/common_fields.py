"""The fields of config.json that all families share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trioserve.model_files.config import MAX_SIZE
from trioserve.model_files.fields import Fields
from trioserve.model_files.jsonfile import read_object
from trioserve.model_files.shards import read_shards
from trioserve.protocol.errors import ModelLoadError

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def architecture_of(values: Mapping[str, Any]) -> str | None:
    """Return the class that config.json names first; None if it names none."""
    named = values.get("architectures") or []
    return str(named[0]) if isinstance(named, list) and named else None


def refuse_quantized(fields: Fields) -> None:
    """Refuse weights in the format of a quantization library.

    Raises:
        ModelLoadError: The weights are in such a format.
    """
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelLoadError(
            f"{fields.path}: weights quantized with {method} aren't served; "
            "use the model's unquantized folder or a GGUF file"
        )


def dtype_of(fields: Fields, folder: Path) -> str:
    """Return the weights' number format, by config.json or else by the first tensor."""
    named = fields.get("dtype") or fields.get("torch_dtype")
    if named is not None:
        return str(named).removeprefix("torch.")
    for shard in read_shards(folder):
        for dtype in shard.dtypes.values():
            if dtype in _DTYPES:
                return _DTYPES[dtype]
    return "float32"


def token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    """Return the ids in a field that has one id, a list or nothing."""
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_SIZE:
            raise fields.error(name, value)
    return tuple(ids)


def ids_that_end(fields: Fields, folder: Path) -> tuple[int, ...]:
    """Return the ids that end a sequence, by config.json and generation_config.json."""
    path = folder / "generation_config.json"
    generation = Fields(path, read_object(path, required=False), {})
    both = (*token_ids(fields, "eos_token_id"), *token_ids(generation, "eos_token_id"))
    return tuple(dict.fromkeys(both))
