"""Matrix products with a fixed weight, laid out for the device once and for all."""

from __future__ import annotations

import torch
import torch.nn.functional as F

EXACT_ROWS = 32
"""Up to here every number of rows has a product of its own: that is where decode steps are."""


def prepacks(dtype: torch.dtype, device: torch.device, *, float32: bool = False) -> bool:
    """Return whether :class:`Linear` reorders weights of this dtype on this device for oneDNN.

    bfloat16 on a CPU gains a factor of two at small batches. float32 stays with the plain product,
    the exact reference, unless ``float32`` asks for it: encoders do, since on a processor of AMD's
    MKL's plain product takes twice as long at any size.
    """
    if device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False  # as in a build without oneDNN
    if dtype == torch.float32:
        return float32
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def padded_rows(num_rows: int) -> int:
    """Return the number of rows, ``num_rows`` or up to an eighth more, that a packed product is
    made for.

    oneDNN compiles a product for each number of rows that it meets, and keeps it: with prompts of
    every length that would be hundreds of megabytes. So there are eight for each power of two.
    """
    if num_rows <= EXACT_ROWS:
        return num_rows
    step = 1 << (num_rows.bit_length() - 4)
    return -(-num_rows // step) * step


class Linear:
    """``x @ weight.T + bias`` for x of [T, in] and a weight of [out, in]; gives [T, out].

    The weight is copied into oneDNN's own blocked layout where that is faster, so the caller should
    let go of the one it passed in. ``pack_float32`` does so for float32 too, with sums in another
    order than the plain product's.
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
        # torch has this product for 16-bit numbers, and not on the CPU.
        self._sums_in_float32 = (
            weight.device.type != "cpu" and weight.dtype.itemsize == 2 and bias is None
        )

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], to be overwritten in place; not to be had where it lies in another layout."""
        assert not self._packed
        return self._weight

    @property
    def bias(self) -> torch.Tensor | None:
        """[out], likewise."""
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
        """Return the product as float32, for logits: their small differences matter.

        On a GPU these are the product's own sums, which otherwise would be rounded to the dtype of
        x and widened again by another pass over them. ``out`` [T, out] float32 is written to, if
        given.
        """
        if self._sums_in_float32:
            return torch.mm(x, self._weight.t(), out_dtype=torch.float32, out=out)
        return self(x).float() if out is None else out.copy_(self(x))
