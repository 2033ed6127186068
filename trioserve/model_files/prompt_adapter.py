"""Prompt adapters on disk: PEFT's prompt tuning and P-tuning, checked and read.

Both are files with the embeddings of virtual tokens, which come before those of a prompt. PEFT
saves what the encoder of P-tuning gives, so nothing has to be computed.
"""

from __future__ import annotations

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

PROMPT_TYPES = ("PROMPT_TUNING", "P_TUNING")
"""Values of ``peft_type`` of prompt adapters."""
TENSOR = "prompt_embeddings"
_DTYPES = {
    "F32": NUMPY_DTYPES["float32"],
    "F16": NUMPY_DTYPES["float16"],
    "BF16": NUMPY_DTYPES["bfloat16"],
}


def is_prompt_adapter(folder: Path) -> bool:
    """Return True if ``folder`` has the configuration of a prompt adapter, False if it has none."""
    try:
        path = folder / CONFIG_NAME
        return parse_object(read_adapter_config(path), path).get("peft_type") in PROMPT_TYPES
    except (ModelLoadError, OSError):
        return False


def read_prompt_adapter(folder: Path, width: int, max_model_len: int) -> npt.NDArray[Any]:
    """Return the embeddings of the prompt adapter in ``folder``: [virtual tokens, width].

    Args:
        folder: An adapter of :data:`PROMPT_TYPES`.
        width: The model's hidden size; 0 if its worker takes no embeddings.
        max_model_len: Longest sequence in tokens, in which a prompt and output must have room, too.

    Raises:
        ModelLoadError: The files are missing, damaged, another model's, or hold what isn't served;
            one line says what and names it.
    """
    if not width:
        raise ModelLoadError("prompt adapters aren't served with this model or these options")
    path = folder / CONFIG_NAME
    fields = Fields(path, parse_object(read_adapter_config(path), path), {})
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
    rows = _read(shard)
    if not np.isfinite(rows.astype(np.float32, copy=False)).all():
        raise ModelLoadError(
            f"{shard.path}: tensor {TENSOR} holds infinities or NaN: nothing can be computed "
            "with it"
        )
    return rows


def _check(shard: Shard, expected: tuple[int, int]) -> None:
    """Demand that the file holds the embeddings of that shape, and nothing else."""
    if TENSOR not in shard.shapes:
        raise ModelLoadError(f"{shard.path} has no tensor {TENSOR}: it is no prompt adapter's")
    for name in shard.shapes:
        if name != TENSOR:
            raise ModelLoadError(f"{shard.path} holds {name}, which isn't served: {TENSOR} is")
    if shard.shapes[TENSOR] != expected:
        raise ModelLoadError(
            f"{shard.path}: tensor {TENSOR} is {list(shard.shapes[TENSOR])}, and "
            f"num_virtual_tokens and the model's hidden size ask for {list(expected)}: they don't "
            "belong together"
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
