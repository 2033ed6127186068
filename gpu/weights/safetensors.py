"""Weights from the safetensors files of a Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu.weights.blocks import BFLOAT16, FLOAT16, FLOAT32, Numbers, Weight
from gpu.weights.expected import check_tensors, expected_tensors
from gpu.weights.experts import split_experts, with_common_name
from gpu.weights.fused import in_rotated_order, split_fused
from gpu.weights.reading import check_finite, read_bytes
from trioserve.model_files import ModelConfig, ModelFiles
from trioserve.model_files.media_config import text_tensor
from trioserve.model_files.shards import Shard, read_shards
from trioserve.protocol.errors import ModelLoadError

_DTYPES = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}
_OF_BARE_MODELS = ("embed_tokens.", "layers.", "norm.")
"""Prefixes of names in the files of a model saved without its head."""


def load(
    files: ModelFiles,
    dtype: np.dtype[Any] | None,
    progress: Callable[[int, int], None],
    keep: Collection[str] = (),
    wanted: Callable[[str], bool] = lambda _: True,
) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of a folder; see :func:`gpu.weights.read_weights`. ``keep`` is ignored."""
    config = files.native
    expected = expected_tensors(config)

    def name_of(stored: str) -> str | None:
        if files.media is not None:
            own = text_tensor(stored)
            return None if own is None or _is_left_out(own, config) else own
        name = f"model.{stored}" if stored.startswith(_OF_BARE_MODELS) else stored
        name = with_common_name(name)
        return None if _is_left_out(name, config) else name

    loaded = load_folder(
        files.path,
        expected,
        name_of,
        config.family,
        dtype,
        progress,
        only_finite=files.only_finite,
        wanted=wanted,
    )
    for name, numbers in loaded:
        yield name, in_rotated_order(name, numbers, config)


def load_folder(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    name_of: Callable[[str], str | None],
    family: str,
    dtype: np.dtype[Any] | None,
    progress: Callable[[int, int], None],
    *,
    only_finite: bool = False,
    wanted: Callable[[str], bool] = lambda _: True,
) -> Iterator[tuple[str, Numbers]]:
    """Yield ``(name, numbers)`` for each of the ``expected`` tensors, in the order of the files.

    Args:
        folder: the model's folder.
        expected: the shape of each tensor, by name.
        name_of: maps a stored name to a name in ``expected``, or to None to skip the tensor.
            Stacked experts and fused matrices are yielded one matrix at a time.
        family: the model's family, for errors.
        dtype: see :func:`gpu.weights.read_weights`.
        progress: see :func:`gpu.weights.read_weights`.
        only_finite: True to refuse infinities and NaN.
        wanted: see :func:`gpu.weights.read_weights`.

    Raises:
        ModelLoadError: the tensors aren't those expected (raised before the first is yielded), a
            file is damaged, or a number isn't finite.
    """
    shards = read_shards(folder)
    names, found = _find_tensors(folder, shards, expected, name_of, family)
    check_tensors(expected, found, folder, family)
    total = sum(shard.num_bytes[name] for shard in shards for name in shard.shapes if name in names)
    done = 0
    for shard in shards:
        try:
            with shard.path.open("rb", buffering=0) as file:
                for stored in shard.shapes:
                    parts = names.get(stored, [])
                    size = math.prod(shard.shapes[stored])
                    offset = shard.offsets[stored]
                    for name in parts:
                        share = math.prod(found[name])
                        num_bytes = shard.num_bytes[stored] * share // max(size, 1)
                        done += num_bytes
                        if wanted(name):
                            raw = read_bytes(shard.path, file, offset, num_bytes)
                            tensor = raw.view(_DTYPES[shard.dtypes[stored]]).reshape(found[name])
                            if only_finite:
                                check_finite(shard.path, name, tensor)
                            kind = dtype or _unrounded(tensor.dtype)
                            yield name, tensor.astype(kind, copy=False)
                        offset += num_bytes
                        progress(done, total)
        except OSError as error:
            raise ModelLoadError(f"{shard.path} can't be read: {error.strerror}") from error


def _find_tensors(
    folder: Path,
    shards: Sequence[Shard],
    expected: Mapping[str, tuple[int, ...]],
    name_of: Callable[[str], str | None],
    family: str,
) -> tuple[dict[str, list[str]], dict[str, tuple[int, ...]]]:
    """Return the names of each stored tensor's matrices, and the shape of each matrix by name."""
    names: dict[str, list[str]] = {}
    found: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        for stored, shape in shard.shapes.items():
            name = name_of(stored)
            if name is None:
                continue
            parts = split_fused(name, shape, expected) if family == "phi3" else {name: shape}
            if name in parts:
                matrices, part_shape = split_experts(name, shape, expected)
                parts = dict.fromkeys(matrices, part_shape)
            names[stored] = list(parts)
            for part, part_shape in parts.items():
                if part in found:
                    raise ModelLoadError(f"{folder} holds {part} twice: fetch it again")
                found[part] = part_shape
            _check_dtype(shard, stored)
    return names, found


def _unrounded(stored: np.dtype[Any]) -> np.dtype[Any]:
    return BFLOAT16 if stored == BFLOAT16 else FLOAT32


def _is_left_out(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor is redundant: a tied LM head, or RoPE frequencies in old files."""
    tied = name == "lm_head.weight" and config.tie_word_embeddings
    return tied or name.endswith("rotary_emb.inv_freq")


def _check_dtype(shard: Shard, name: str) -> None:
    if shard.dtypes[name] not in _DTYPES:
        raise ModelLoadError(
            f"{shard.path}: tensor {name} has the type {shard.dtypes[name]}, which isn't read; "
            f"{', '.join(_DTYPES)} are"
        )
