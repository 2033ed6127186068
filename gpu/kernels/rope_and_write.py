"""Launches ``rope_and_write.cu``: rotary embedding fused with the write to the paged KV cache."""

from __future__ import annotations

import numpy as np
import torch

from gpu.attention import QkNorm
from gpu.kernels import KernelLoader, KernelSource, element_name, parameters
from gpu.kernels.attention_tile import DTYPES, HEAD_DIMS

CACHE_DTYPES = (None, torch.float8_e4m3fn)
"""None: the model's own dtype."""

NUM_THREADS = 128
# With fewer tokens per multiprocessor than this, a token's heads are spread over several blocks.
TOKENS_PER_MULTIPROCESSOR = 8

PARAMETERS = parameters(
    ("qkv", "u8"),
    ("cos_sin", "u8"),
    ("positions", "u8"),
    ("kv_locations", "u8"),
    ("k_cache", "u8"),
    ("v_cache", "u8"),
    ("k_scale", "u8"),
    ("v_scale", "u8"),
    ("norm_weight", "u8"),
    ("num_heads", "i4"),
    ("num_kv_heads", "i4"),
    ("page_size_log2", "i4"),
    ("rotate", "i4"),
    ("eps", "f4"),
)


def rope_and_write_source(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> KernelSource:
    """Return the kernel for a head size, a format of q, k and v, and a format of the cache."""
    return KernelSource(
        name="rope_and_write",
        parameters=PARAMETERS,
        num_threads=NUM_THREADS,
        defines=(
            ("HEAD_DIM", head_dim),
            ("ELEMENT", element_name(dtype)),
            ("CACHE", element_name(cache_dtype)),
        ),
    )


VARIANTS = [
    rope_and_write_source(head_dim, dtype, cache_dtype or dtype)
    for head_dim in HEAD_DIMS
    for dtype in DTYPES
    for cache_dtype in CACHE_DTYPES
]


class RopeAndWrite:
    """Norms and rotates queries and keys, and writes keys and values to the cache of a layer.

    ``dtype`` is that of queries, keys and values; ``cache_dtype`` the same, or e4m3 with a scale
    for each token and head. ``cos_sin`` is the table of :func:`gpu.models.rope.cos_sin_table` on
    the loader's device; every position must lie inside it.

    Raises:
        ValueError: a size or dtype that the kernel isn't made for.
    """

    def __init__(
        self,
        loader: KernelLoader,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        cos_sin: torch.Tensor,
    ) -> None:
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"heads of {head_dim} numbers: the kernels know {HEAD_DIMS}")
        if dtype not in DTYPES or cache_dtype not in (dtype, torch.float8_e4m3fn):
            raise ValueError(f"no kernel for {dtype} with a cache of {cache_dtype}")
        if page_size & (page_size - 1):
            raise ValueError(f"a page of {page_size} tokens is not a power of two")
        if cos_sin.shape[1:] != (head_dim,) or cos_sin.dtype != torch.float32:
            raise ValueError(f"the rotary table is {cos_sin.dtype} {list(cos_sin.shape)}")
        if not cos_sin.is_contiguous() or cos_sin.device != loader.device:
            raise ValueError(f"the rotary table must be contiguous and on {loader.device}")
        self._kernel = loader.load(rope_and_write_source(head_dim, dtype, cache_dtype))
        self._few_tokens = TOKENS_PER_MULTIPROCESSOR * loader.num_multiprocessors
        lanes = 4 if head_dim <= 64 else 8 if head_dim <= 128 else 16
        heads = num_heads + 2 * num_kv_heads
        self._blocks_of_token = -(-heads * lanes // NUM_THREADS)
        self._cos_sin = cos_sin  # kept alive: the kernel has only its address
        self._quantizes = cache_dtype != dtype
        self._parameters = np.zeros(1, dtype=PARAMETERS)
        self._parameters["cos_sin"] = cos_sin.data_ptr()
        self._parameters["num_heads"] = num_heads
        self._parameters["num_kv_heads"] = num_kv_heads
        self._parameters["page_size_log2"] = page_size.bit_length() - 1

    def prepare(self, positions: torch.Tensor, kv_locations: torch.Tensor) -> None:
        """Set where the coming launches find their tokens' places.

        ``positions`` and ``kv_locations`` are int32 on the device, one number per token or more;
        they are read when the kernel runs. A location is page * page_size + offset, or -1 for a
        token that isn't written. The position of a padding token may be negative.
        """
        assert positions.dtype == kv_locations.dtype == torch.int32
        self._parameters["positions"] = positions.data_ptr()
        self._parameters["kv_locations"] = kv_locations.data_ptr()
        self._kept = (positions, kv_locations)  # as the table of angles

    def launch(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        rotate: bool,
        qk_norm: QkNorm | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Run over ``qkv`` [T, H + 2 K, D], contiguous: queries are changed in place, keys aren't.

        ``k_cache`` and ``v_cache`` are one layer's, [num_pages, K, page_size, D]; ``k_scale`` and
        ``v_scale`` are [num_pages, K, page_size] float32, given if and only if the cache is e4m3.
        """
        assert (k_scale is not None) == (v_scale is not None) == self._quantizes
        filled = self._parameters
        filled["qkv"] = qkv.data_ptr()
        filled["k_cache"] = k_cache.data_ptr()
        filled["v_cache"] = v_cache.data_ptr()
        if k_scale is not None and v_scale is not None:
            filled["k_scale"] = k_scale.data_ptr()
            filled["v_scale"] = v_scale.data_ptr()
        filled["norm_weight"] = 0
        if qk_norm is not None:
            filled["norm_weight"] = qk_norm.weight.data_ptr()
            filled["eps"] = qk_norm.eps
        filled["rotate"] = rotate
        num_tokens = qkv.shape[0]
        blocks_of_token = self._blocks_of_token if num_tokens < self._few_tokens else 1
        self._kernel.launch((num_tokens, blocks_of_token, 1), filled)
