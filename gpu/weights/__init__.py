"""A model's weights, one at a time, under Hugging Face's names, from safetensors or GGUF.

They are NumPy arrays, so that a model can be computed without torch. :mod:`gpu.weights.tensors`
turns them into torch tensors.

Imported by ``lora``, ``models``, ``cpu``, ``cuda``, ``models.encoder`` and ``loading.loading``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from gpu.weights import gguf, safetensors
from gpu.weights.blocks import Weight
from trioserve.model_files import ModelFiles


def read_weights(
    files: ModelFiles,
    dtype: np.dtype[Any] | None,
    progress: Callable[[int, int], None],
    keep: Collection[str] = (),
    wanted: Callable[[str], bool] = lambda _: True,
) -> Iterator[tuple[str, Weight]]:
    """Yield ``(name, weight)``, one at a time; each array owns its memory.

    Names are Hugging Face's (``model.layers.0.self_attn.q_proj.weight``), exactly those of
    :func:`~gpu.weights.expected.expected_tensors`, in the order of the files.

    Args:
        files: the model's files.
        dtype: bfloat16, float16 or float32. With None, bfloat16 stays bfloat16 and everything else
            becomes float32, so nothing is rounded.
        progress: called after each tensor with the bytes read so far and in total.
        keep: ggml's names of quantized types, such as Q4_0; matrices of these types in a GGUF file
            are yielded as :class:`~gpu.weights.blocks.Blocks`.
        wanted: returns False for names of tensors that aren't read.

    Raises:
        ModelLoadError: a tensor is missing, unknown or of the wrong shape (raised before the first
            is yielded), or a file is damaged.
    """
    load = gguf.load if files.format == "gguf" else safetensors.load
    return load(files, dtype, progress, keep, wanted)
