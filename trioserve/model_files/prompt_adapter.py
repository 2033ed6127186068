"""Prompt adapters on disk: PEFT's prompt tuning, P-tuning and prefix tuning, checked and read.

They are files with rows of virtual tokens, which come before a prompt: their embeddings, or with
prefix tuning their keys and values in all layers. PEFT saves what the encoders of P-tuning and
prefix tuning give, so nothing has to be computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trioserve.model_files.fields import Fields
from trioserve.model_files.jsonfile import parse_object
from trioserve.model_files.peft_files import (
    CONFIG_NAME,
    read_adapter_config,
    read_adapter_header,
    unserved,
)
from trioserve.model_files.shards import Shard
from trioserve.protocol.embeddings import NUMPY_DTYPES
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.wire import MAX_MESSAGE_BYTES

PREFIX_TYPE = "PREFIX_TUNING"
PROMPT_TYPES = ("PROMPT_TUNING", "P_TUNING", PREFIX_TYPE)
"""Values of ``peft_type`` of prompt adapters."""
TENSOR = "prompt_embeddings"
MOST_BYTES = MAX_MESSAGE_BYTES // 2
"""Most bytes of virtual tokens, which go to the worker in one message."""
_DTYPES = {
    "F32": NUMPY_DTYPES["float32"],
    "F16": NUMPY_DTYPES["float16"],
    "BF16": NUMPY_DTYPES["bfloat16"],
}


def is_prompt_adapter(folder: Path) -> bool:
    """Return True if ``folder`` has the configuration of a prompt adapter, False if it has none."""
    return _peft_type(folder) in PROMPT_TYPES


def is_prefix(folder: Path) -> bool:
    """Return True if ``folder`` has the configuration of an adapter with keys and values."""
    return _peft_type(folder) == PREFIX_TYPE


def _peft_type(folder: Path) -> object:
    try:
        path = folder / CONFIG_NAME
        return parse_object(read_adapter_config(path), path).get("peft_type")
    except (ModelLoadError, OSError):
        return None


def read_prompt_adapter(
    folder: Path, width: int, max_model_len: int, kv_shape: Sequence[int] = ()
) -> npt.NDArray[Any]:
    """Return the rows of the prompt adapter in ``folder``, one for each virtual token.

    They are embeddings [virtual tokens, width]; or with prefix tuning keys and values [virtual
    tokens, layers * 2 * KV heads * numbers of a head], where 0 of 2 is a key.

    Args:
        folder: An adapter of :data:`PROMPT_TYPES`.
        width: The model's hidden size; 0 if its worker takes no embeddings.
        max_model_len: Longest sequence in tokens, in which a prompt and output must have room, too.
        kv_shape: Layers, KV heads and numbers of a head; empty if its worker takes none of these.

    Raises:
        ModelLoadError: The files are missing, damaged, another model's, or hold what isn't served;
            one line says what and names it.
    """
    path = folder / CONFIG_NAME
    fields = Fields(path, parse_object(read_adapter_config(path), path), {})
    kind = "prompt"
    if fields.get("peft_type") == PREFIX_TYPE:
        kind, width = "prefix", _prefix_width(fields, path, kv_shape)
    if not width:
        raise ModelLoadError(f"{kind} adapters aren't served with this model or these options")
    if fields.get("task_type") not in (None, "CAUSAL_LM"):
        raise unserved(path, "task_type", fields.get("task_type"), "only CAUSAL_LM is served")
    if fields.get("num_transformer_submodules") not in (None, 1):
        value = fields.get("num_transformer_submodules")
        raise unserved(path, "num_transformer_submodules", value, "only 1 is served")
    if fields.get("modules_to_save"):
        value = fields.get("modules_to_save")
        raise unserved(path, "modules_to_save", value, "whole modules, which aren't served")
    count = fields.integer("num_virtual_tokens")
    if count + 2 > max_model_len:
        raise ModelLoadError(
            f"{path} has num_virtual_tokens = {count}, which leave no room for a prompt and "
            f"output: this model's maximum context length is {max_model_len} tokens"
        )
    shard = read_adapter_header(folder)
    _check(shard, (count, width))
    if shard.num_bytes[TENSOR] > MOST_BYTES:
        raise ModelLoadError(f"{shard.path} has more than {MOST_BYTES >> 20} MiB of virtual tokens")
    rows = _read(shard)
    if not np.isfinite(rows.astype(np.float32, copy=False)).all():
        raise ModelLoadError(
            f"{shard.path}: tensor {TENSOR} holds infinities or NaN: nothing can be computed "
            "with it"
        )
    return rows


def _prefix_width(fields: Fields, path: Path, kv_shape: Sequence[int]) -> int:
    """Return the numbers of a virtual token's keys and values; 0 if the worker takes none.

    Raises:
        ModelLoadError: They are those of a model of another shape.
    """
    if not kv_shape:
        return 0
    num_layers, num_kv_heads, head_dim = kv_shape
    # PEFT names the KV heads so, and the numbers of all of them.
    expected = {
        "num_layers": num_layers,
        "num_attention_heads": num_kv_heads,
        "token_dim": num_kv_heads * head_dim,
    }
    for name, value in expected.items():
        if fields.get(name) != value:
            raise unserved(path, name, fields.get(name), f"this model has {value}")
    return 2 * math.prod(kv_shape)


def _check(shard: Shard, expected: tuple[int, int]) -> None:
    """Demand that the file holds the rows of that shape, and nothing else."""
    if TENSOR not in shard.shapes:
        raise ModelLoadError(f"{shard.path} has no tensor {TENSOR}: it is no prompt adapter's")
    for name in shard.shapes:
        if name != TENSOR:
            raise ModelLoadError(f"{shard.path} holds {name}, which isn't served: {TENSOR} is")
    if shard.shapes[TENSOR] != expected:
        raise ModelLoadError(
            f"{shard.path}: tensor {TENSOR} is {list(shard.shapes[TENSOR])}, and "
            f"num_virtual_tokens and the model's sizes ask for {list(expected)}: they don't belong "
            "together"
        )
    if shard.dtypes[TENSOR] not in _DTYPES:
        raise ModelLoadError(
            f"{shard.path}: tensor {TENSOR} has the type {shard.dtypes[TENSOR]}, which isn't read; "
            f"{', '.join(_DTYPES)} are"
        )


def _read(shard: Shard) -> npt.NDArray[Any]:
    try:
        with shard.path.open("rb") as file:
            file.seek(shard.offsets[TENSOR])
            data = file.read(shard.num_bytes[TENSOR])
    except OSError as error:
        raise ModelLoadError(f"{shard.path} can't be read: {error.strerror}") from error
    if len(data) < shard.num_bytes[TENSOR]:
        raise ModelLoadError(f"{shard.path} was cut short while it was read: fetch it again")
    return np.frombuffer(data, _DTYPES[shard.dtypes[TENSOR]]).reshape(shard.shapes[TENSOR])
