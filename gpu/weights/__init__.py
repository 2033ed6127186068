"""A model's weights, tensor after tensor, under Hugging Face's names, whatever file they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from gpu.weights import gguf, safetensors
from gpu.weights.expected import expected_tensors
from trioserve.model_files import ModelFiles

__all__ = ["expected_tensors", "load_weights"]


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
    load = gguf.load if files.format == "gguf" else safetensors.load
    return load(files, dtype, progress)
