"""Activations and probabilities of an encoder's outputs equal torch's."""

from __future__ import annotations

import functools
import typing

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trioserve.model_files.encoder_config import Activation
from trioserve.pooling.results import Shape, activated, probabilities_of
from trioserve.protocol.errors import InvalidRequest

THEIRS = {
    "identity": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}
NUMBERS = np.array([[-100.0, -3.0, -0.5], [0.0, 0.7, 90.0]], dtype=np.float32)


@pytest.mark.parametrize("name", typing.get_args(Activation))
def test_an_activation(name: Activation) -> None:
    found = activated(NUMBERS, name)
    assert (found.shape, found.dtype) == (NUMBERS.shape, np.float32)
    wanted = THEIRS[name](torch.from_numpy(NUMBERS)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_probabilities() -> None:
    logits = torch.from_numpy(NUMBERS)
    of_one = probabilities_of(NUMBERS, independent=False)
    np.testing.assert_allclose(of_one, logits.softmax(1).numpy(), rtol=1e-5, atol=1e-7)
    of_any = probabilities_of(NUMBERS, independent=True)
    np.testing.assert_allclose(of_any, logits.sigmoid().numpy(), rtol=1e-5, atol=1e-7)
    alone = probabilities_of(NUMBERS[:, :1], independent=False)
    np.testing.assert_allclose(alone, logits[:, :1].sigmoid().numpy(), rtol=1e-5, atol=1e-7)


def test_shapes() -> None:
    whole = Shape(None, None, are_normalized=True)
    np.testing.assert_array_equal(whole.of(NUMBERS), NUMBERS)
    cut = Shape(2, None, are_normalized=True).of(NUMBERS)
    np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, rtol=1e-6)
    zeros = np.zeros((1, 3), dtype=np.float32)
    np.testing.assert_array_equal(Shape(None, True, are_normalized=False).of(zeros), zeros)
    with pytest.raises(InvalidRequest, match="always as long as 1"):
        Shape(None, False, are_normalized=True).check(3)
    with pytest.raises(InvalidRequest, match="from 1 to 3"):
        Shape(4, None, are_normalized=True).check(3)
