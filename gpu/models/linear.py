"""Linear layers, with weights packed for the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

EXACT_ROWS = 32
"""Up to this many rows, as in decode steps, nothing is padded."""


def prepacks(dtype: torch.dtype, device: torch.device, *, float32: bool = False) -> bool:
    """Return whether :class:`Linear` packs weights of this dtype on this device for oneDNN.

    Packing makes bfloat16 on a CPU twice as fast at small batches. float32 stays with torch's
    product, the exact reference, unless ``float32`` is true. Encoders ask for it, since MKL's
    product takes twice as long on AMD CPUs.
    """
    if device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False  # a build without oneDNN
    if dtype == torch.float32:
        return float32
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def padded_rows(num_rows: int) -> int:
    """Return the number of rows to pad ``num_rows`` to for a packed product, at most 1/8 more.

    oneDNN compiles and caches a kernel for each number of rows, which would take hundreds of
    megabytes with prompts of all lengths. This leaves eight for each power of two.
    """
    if num_rows <= EXACT_ROWS:
        return num_rows
    step = 1 << (num_rows.bit_length() - 4)
    return -(-num_rows // step) * step


class Linear:
    """A linear layer: ``x @ weight.T + bias``, with x [T, in], weight [out, in], result [T, out].

    The weight is copied into oneDNN's blocked layout where that is faster (:func:`prepacks`); the
    caller should then drop its own. ``pack_float32`` allows that for float32 too, which changes the
    order of the sums.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        pack_float32: bool = False,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = prepacks(weight.dtype, weight.device, float32=pack_float32)
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._weight = weight
        # Only the GPU has a product of 16-bit numbers with a float32 result.
        self._sums_in_float32 = (
            weight.device.type != "cpu" and weight.dtype.itemsize == 2 and bias is None
        )

    @property
    def weight(self) -> torch.Tensor:
        """The weight, [out, in], which may be overwritten in place; fails if it is packed."""
        assert not self._packed
        return self._weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, [out], which may be overwritten in place."""
        return self._bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            num_rows = len(x)
            padding = padded_rows(num_rows) - num_rows
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
                F.pad(x, (0, 0, 0, padding)) if padding else x,
                self._weight,
                self._bias,
                "none",
                [],
                "",
            )
            return product[:num_rows] if padding else product
        return F.linear(x, self._weight, self._bias)

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product as float32, [T, out], in ``out`` if it is given.

        It is for logits, whose small differences matter. On a GPU the float32 sums are returned
        without rounding them to the dtype of x.
        """
        if self._sums_in_float32:
            return torch.mm(x, self._weight.t(), out_dtype=torch.float32, out=out)
        return self(x).float() if out is None else out.copy_(self(x))
