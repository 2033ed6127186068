"""Activations by the names that configurations of encoders have for them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from trioserve.model_files.encoder_config import Activation

_gelu: Callable[..., torch.Tensor] = torch.ops.aten.gelu_

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "gelu": _gelu,
    "gelu_tanh": functools.partial(_gelu, approximate="tanh"),
    "relu": torch.relu_,
    "sigmoid": torch.sigmoid_,
    "silu": functools.partial(torch.nn.functional.silu, inplace=True),
    "tanh": torch.tanh_,
}
"""Each changes its argument and gives it back: the widest activations aren't there twice."""
