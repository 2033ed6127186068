"""Loads an encoder, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu.models.encoder.model import Encoder
from gpu.weights.encoder import read_encoder_weights
from gpu.weights.tensors import NUMPY_DTYPES, as_tensor
from trioserve.model_files import EncoderFiles


def load_encoder(
    files: EncoderFiles,
    dtype: torch.dtype,
    device: str,
    progress: Callable[[int, int], None],
) -> Encoder:
    """Return the model with its weights. It computes with torch's current number of threads.

    Args:
        files: the model's files.
        dtype: the dtype of weights and activations: float32, bfloat16 or float16.
        device: such as ``cpu`` or ``cuda:0``.
        progress: called after each tensor with the bytes read so far and in total.

    Raises:
        ModelLoadError: the files are damaged, or of another model.
    """
    torch.set_float32_matmul_precision("highest")
    weights = read_encoder_weights(files, NUMPY_DTYPES[dtype], progress)
    return Encoder(files.config, ((name, as_tensor(w).to(device)) for name, w in weights))
