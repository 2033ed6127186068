"""Activation functions by their names in configurations of encoders."""

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
"""Each works in place and returns its argument, so that the widest tensors exist once."""
