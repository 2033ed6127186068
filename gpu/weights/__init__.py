"""A model's weights, one after the other, under Hugging Face's names, whatever file they are in.

They are NumPy's arrays, so that a model can be computed without torch. :mod:`gpu.weights.tensors`
makes torch's tensors of them.

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
) -> Iterator[tuple[str, Weight]]:
    """Yield ``(name, weight)`` in ``dtype``, one at a time; each owns its memory.

    Names are Hugging Face's (``model.layers.0.self_attn.q_proj.weight``), and exactly those of
    :func:`~gpu.weights.expected.expected_tensors`, each once, in the order of the files.
    ``progress`` is called after each with the bytes of the files read so far, and those in all.

    Args:
        files: of the model.
        dtype: one of the three of :mod:`gpu.weights.blocks`. Without it, what is stored as bfloat16
            stays that, and all else is float32: nothing is rounded.
        progress: see above.
        keep: types of matrices in a GGUF file that stay :class:`~gpu.weights.blocks.Blocks`, by
            ggml's names, such as Q4_0.

    Raises:
        ModelLoadError: a tensor is missing, unknown or of the wrong shape (found before the first
            is yielded), or a file is damaged.
    """
    load = gguf.load if files.format == "gguf" else safetensors.load
    return load(files, dtype, progress, keep)
