"""The bounds on rounding hold for every order of a sum, and no mistake fits in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.rounding import apart, roundoff, sum_error, terms_of, terms_of_folder
from tests.support.tiny_models import make_tiny

Sum = Callable[[torch.Tensor], torch.Tensor]


def in_order(terms: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(terms[:, 0])
    for column in terms.unbind(1):
        total = total + column
    return total


def in_pairs(terms: torch.Tensor) -> torch.Tensor:
    while terms.shape[1] > 1:
        if terms.shape[1] % 2:
            terms = torch.nn.functional.pad(terms, (0, 1))
        terms = terms[:, ::2] + terms[:, 1::2]
    return terms[:, 0]


ORDERS: dict[str, Sum] = {
    "in order": in_order,
    "backwards": lambda terms: in_order(terms.flip(1)),
    "in pairs": in_pairs,
    "the largest first": lambda terms: in_order(
        terms.gather(1, terms.abs().argsort(1, descending=True))
    ),
    "as torch likes": lambda terms: terms.sum(1),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_in_any_order(order: str, dtype: torch.dtype) -> None:
    terms = torch.randn(200, 90, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = terms.double().sum(1)
    bound = sum_error(90, terms.double().abs().sum(1), dtype)
    error = (ORDERS[order](terms).double() - exact).abs()
    assert (error <= bound).all()
    assert (terms.double()[:, 1:].sum(1) - exact).abs().max() > bound.max() or dtype.itemsize == 2


@pytest.mark.parametrize("order", ORDERS)
def test_a_chain_of_products(order: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = exact = torch.randn(50, 64, generator=generator)
    exact = exact.double()
    for _ in range(6):
        weight = torch.randn(64, 64, generator=generator) / 8
        products = x[:, None, :] * weight[None]
        x = ORDERS[order](products.reshape(-1, 64)).reshape(50, 64)
        exact = exact @ weight.double().T
    error = float((x.double() - exact).abs().max())
    assert error < apart(6 * 64, exact) < 1e-4


def test_the_roundoff_and_the_terms_of_a_model(tmp_path: Path) -> None:
    assert roundoff() == 2**-24
    assert roundoff(torch.bfloat16) == 2**-8
    folder = make_tiny("llama2", tmp_path)
    assert terms_of_folder(folder, 100) == terms_of(hidden=64, inner=96, layers=2, tokens=100)
    assert apart(100, np.array([3.0, -np.inf, 4.0])) == pytest.approx(160 * 2**-24 * 12.5**0.5)
