"""The products of a model that are packed; their results stay the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gpu.models.transformers_models import packing
from gpu.models.transformers_models.packing import pack, record_called_linears


class Odd(torch.nn.Module):
    """Calls one of its products, and takes the weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.called = torch.nn.Linear(24, 40)
        self.taken = torch.nn.Linear(40, 16, bias=False)
        self.idle = torch.nn.Linear(40, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.called(x), self.taken.weight)


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Odd:
    """In bfloat16, as on a processor that multiplies it."""
    monkeypatch.setattr(packing, "prepacks", lambda dtype, device: dtype == torch.bfloat16)
    torch.manual_seed(0)
    return Odd().to(torch.bfloat16).eval()


def test_what_was_called_is_packed_and_gives_the_same(odd: Odd) -> None:
    x = torch.randn(1, 7, 24, dtype=torch.bfloat16)
    with torch.inference_mode():
        with record_called_linears(odd) as products:
            before = odd(x)
        odd.idle(before.new_zeros(1, 40))  # outside of the block
        assert products == {odd.called}
        for product in products:
            pack(product)
        after = odd(x)
    assert after.shape == (1, 7, 16)
    torch.testing.assert_close(after, before, rtol=0, atol=2e-2)
    assert odd.called.weight.shape == (40, 24)
    assert odd.called.weight.dtype == torch.bfloat16
    assert odd.called.weight.isnan().all()
    assert not odd.taken.weight.isnan().any()


def test_float32_stays_as_it_is(odd: Odd) -> None:
    model = odd.to(torch.float32)
    with record_called_linears(model) as products:
        model(torch.randn(2, 24))
    assert products == set()
