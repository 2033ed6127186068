"""A model's weights, tensor after tensor, under Hugging Face's names, whatever file they are in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import cast

import torch

from gpu.weights import gguf, safetensors
from gpu.weights.blocks import Blocks, Weight
from gpu.weights.expected import expected_tensors
from trioserve.model_files import ModelFiles

__all__ = ["Blocks", "Weight", "expected_tensors", "load_weights", "read_weights"]


def load_weights(
    files: ModelFiles, dtype: torch.dtype, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` in ``dtype`` on the CPU, one tensor in memory at a time.

    Names are Hugging Face's (``model.layers.0.self_attn.q_proj.weight``), and exactly those of
    :func:`expected_tensors`, each once, in the order of the files. The tensors own their memory.
    ``progress`` is called after each with the bytes of the files read so far, and those in all.

    Raises:
        ModelLoadError: a tensor is missing, unknown or of the wrong shape (found before the first
            is yielded), or a file is damaged.
    """
    weights = read_weights(files, dtype, progress)
    return cast("Iterator[tuple[str, torch.Tensor]]", weights)


def read_weights(
    files: ModelFiles,
    dtype: torch.dtype | None,
    progress: Callable[[int, int], None],
    keep: Collection[str] = (),
) -> Iterator[tuple[str, Weight]]:
    """As :func:`load_weights`, but matrices of the types ``keep`` of a GGUF file stay as they are.

    Types have ggml's names, such as Q4_0. Without a ``dtype``, what is stored as bfloat16 stays
    that, and all else is float32: nothing is rounded.
    """
    load = gguf.load if files.format == "gguf" else safetensors.load
    return load(files, dtype, progress, keep)
