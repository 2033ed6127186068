"""The small operations in torch against float64, and the seam through which a model uses them."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from gpu.attention import StepLayout
from gpu.models.decoder import Decoder
from gpu.models.linear import Linear, padded_rows
from gpu.models.operations import Operations
from gpu.models.operations.torch_ops import TorchOperations
from gpu.models.registry import build_model
from tests.support.plans import make_attention
from tests.support.rounding import sum_error
from tests.support.tiny_models import make_tiny
from trioserve.model_files import open_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def assert_near(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """Assert that ``actual`` has the errors of a sum of 24 in float32 and of three roundings."""
    bound = sum_error(24 + 4, wanted.abs()) + sum_error(3, wanted.abs(), actual.dtype)
    assert ((actual.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = randn(5, 24, dtype=dtype), randn(24, dtype=dtype, seed=1)
    before = x.clone()
    assert_near(TorchOperations().rms_norm(x, weight, EPS), norm64(x, weight))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual = randn(5, 24, dtype=dtype), randn(5, 24, dtype=dtype, seed=1)
    weight, wanted_residual = randn(24, dtype=dtype, seed=2), residual + x
    y = TorchOperations().add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, wanted_residual)
    assert_near(y, norm64(wanted_residual, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = randn(5, 48, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    y = TorchOperations().silu_mul(gate_up)
    assert y.is_contiguous()
    # torch rounds silu(gate) once more before the product.
    assert_near(y, gate * gate.sigmoid() * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_in_float32(dtype: torch.dtype, with_bias: bool) -> None:
    weight, x = randn(24, 40, dtype=dtype), randn(3, 40, dtype=dtype, seed=1)
    linear = Linear(weight, randn(24, dtype=dtype, seed=2) if with_bias else None)
    product = linear.in_float32(x)
    assert product.dtype == torch.float32
    assert torch.equal(product, linear(x).float())
    out = torch.empty(5, 24)[:3]
    assert linear.in_float32(x, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, product)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_in_float32_beyond_the_cpu(dtype: torch.dtype) -> None:
    """Use the meta device: as on a GPU, torch's product has a dtype of its own for the result."""
    linear = Linear(torch.empty(24, 40, dtype=dtype, device="meta"))
    x, out = torch.empty(3, 40, dtype=dtype, device="meta"), torch.empty(3, 24, device="meta")
    for product in (linear.in_float32(x), linear.in_float32(x, out)):
        assert product.dtype == torch.float32
        assert product.shape == (3, 24)
    assert product is out


class CountingOperations:
    """torch's operations, and how often each was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._inner = TorchOperations()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.calls.append("rms_norm")
        return self._inner.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        self.calls.append("add_rms_norm")
        return self._inner.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        self.calls.append("silu_mul")
        return self._inner.silu_mul(gate_up)


def tiny_decoder(folder: Path, operations: Operations | None) -> Decoder:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    return build_model(open_model(folder).config, weights.items(), operations)


def test_a_model_uses_the_operations_it_is_given(tmp_path: Path) -> None:
    folder, operations = make_tiny("qwen3", tmp_path), CountingOperations()
    layout = StepLayout(
        positions=torch.arange(9).numpy(),
        query_start=torch.tensor([0, 9]).numpy(),
        context_lens=torch.tensor([9]).numpy(),
        slots=torch.tensor([0]).numpy(),
        block_tables=torch.tensor([[2, 0, 1]], dtype=torch.int32).numpy(),
        num_decode_rows=0,
    )
    logits = []
    for model in (tiny_decoder(folder, operations), tiny_decoder(folder, None)):
        attention = make_attention(model, page_size=4, num_pages=3)
        with torch.inference_mode():
            attention.begin(layout)
            logits.append(model.logits(model.forward(torch.arange(3, 12), attention)))
    assert torch.equal(logits[0], logits[1])
    layers = model.config.num_layers
    per_layer = ["add_rms_norm", "silu_mul", "add_rms_norm"]
    assert operations.calls == ["rms_norm", *per_layer * layers]


def test_products_are_made_for_few_numbers_of_rows() -> None:
    made_for = [padded_rows(num_rows) for num_rows in range(1, 2049)]
    assert len(set(made_for)) == 32 + 8 * 6
    assert made_for[:32] == list(range(1, 33))
    assert all(n <= m <= n * 9 / 8 for n, m in enumerate(made_for, 1))


@pytest.mark.parametrize("num_rows", [1, 33, 65, 131])
def test_a_product_of_any_number_of_rows(num_rows: int) -> None:
    weight = randn(24, 40, dtype=torch.bfloat16)
    x = randn(num_rows, 40, dtype=torch.bfloat16, seed=1)
    product = Linear(weight)(x)
    assert product.shape == (num_rows, 24)
    assert_near(product, x.double() @ weight.double().T)
