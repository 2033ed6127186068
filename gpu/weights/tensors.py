"""A model's weights as torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from gpu.weights import read_weights
from gpu.weights.blocks import BFLOAT16, FLOAT16, FLOAT32, Blocks, Numbers
from trioserve.model_files import ModelFiles

NUMPY_DTYPES = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}


def load_weights(
    files: ModelFiles,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
    wanted: Callable[[str], bool] = lambda _: True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of :func:`gpu.weights.read_weights`, in ``dtype`` and on the CPU."""
    for name, weight in read_weights(files, NUMPY_DTYPES[dtype], progress, wanted=wanted):
        assert not isinstance(weight, Blocks)  # ``keep`` is empty
        yield name, as_tensor(weight)


def as_tensor(numbers: Numbers) -> torch.Tensor:
    """Return a tensor that shares the memory of ``numbers``."""
    if numbers.dtype == BFLOAT16:  # from_numpy doesn't accept it
        return torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(numbers)
