"""Weights from the safetensors files of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from gpu.weights.blocks import BFLOAT16, FLOAT16, FLOAT32, Weight
from gpu.weights.expected import check_tensors
from gpu.weights.reading import read_bytes
from trioserve.errors import ModelLoadError
from trioserve.model_files import ModelConfig, ModelFiles
from trioserve.model_files.shards import Shard, read_shards

__all__ = ["load"]

_DTYPES = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}


def load(
    files: ModelFiles,
    dtype: np.dtype[Any] | None,
    progress: Callable[[int, int], None],
    keep: Collection[str] = (),
) -> Iterator[tuple[str, Weight]]:
    """As :func:`gpu.weights.read_weights`, for a folder, which has nothing to ``keep``."""
    shards = read_shards(files.path)
    found: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        for name, shape in shard.shapes.items():
            if not _is_left_out(name, files.config):
                _check_dtype(shard, name)
                found[name] = shape
    check_tensors(files.config, found, files.path)
    total = sum(shard.num_bytes[name] for shard in shards for name in shard.shapes if name in found)
    done = 0
    for shard in shards:
        try:
            with shard.path.open("rb", buffering=0) as file:
                for name, shape in shard.shapes.items():
                    if name in found:
                        num_bytes = shard.num_bytes[name]
                        raw = read_bytes(shard.path, file, shard.offsets[name], num_bytes)
                        tensor = raw.view(_DTYPES[shard.dtypes[name]]).reshape(shape)
                        tensor = tensor.astype(dtype or _unrounded(tensor.dtype), copy=False)
                        done += num_bytes
                        yield name, tensor
                        progress(done, total)
        except OSError as error:
            raise ModelLoadError(f"{shard.path} can't be read: {error.strerror}") from error


def _unrounded(stored: np.dtype[Any]) -> np.dtype[Any]:
    return BFLOAT16 if stored == BFLOAT16 else FLOAT32


def _is_left_out(name: str, config: ModelConfig) -> bool:
    """Tensors that say nothing new: tied output weights, and frequencies that old files store."""
    tied = name == "lm_head.weight" and config.tie_word_embeddings
    return tied or name.endswith("rotary_emb.inv_freq")


def _check_dtype(shard: Shard, name: str) -> None:
    if shard.dtypes[name] not in _DTYPES:
        raise ModelLoadError(
            f"{shard.path}: tensor {name} has the type {shard.dtypes[name]}, which isn't read; "
            f"{', '.join(_DTYPES)} are"
        )
