"""The kernels that one model needs, built side by side before the model is assembled."""

from __future__ import annotations

import torch

from gpu.kernels import KernelSource, combine_partials, decode_attention
from gpu.kernels.attention_tile import TILES
from gpu.kernels.gather_tokens import gather_tokens_source
from gpu.kernels.lora import lora_sources
from gpu.kernels.rms_norm import rms_norm_source
from gpu.kernels.rope_and_write import rope_and_write_source
from gpu.kernels.sampling import Tiling, sampling_sources
from gpu.kernels.scatter_updates import scatter_updates_source
from gpu.kernels.silu_mul import silu_mul_source
from gpu.kernels.tiled_attention import tiled_attention_source
from trioserve.model_files import ModelConfig


def model_kernels(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    may_share: bool,
    serves_adapters: bool,
    vocab_size: int | None,
) -> list[KernelSource]:
    """Return every kernel that :func:`gpu.cuda.assembly.assemble` and the model's operations load.

    ``may_share`` is :attr:`gpu.cuda.attention_limits.AttentionLimits.may_share`. ``vocab_size`` is
    that of the logits from which tokens are drawn; None where none are.
    """
    head_dim = config.head_dim
    sources = [
        gather_tokens_source(),
        scatter_updates_source(),
        rms_norm_source(config.hidden_size, dtype, add=False),
        rms_norm_source(config.hidden_size, dtype, add=True),
        silu_mul_source(dtype),
        rope_and_write_source(head_dim, dtype, cache_dtype),
        decode_attention.source(head_dim, dtype, cache_dtype),
        combine_partials.source(head_dim, dtype),
        *(() if vocab_size is None else sampling_sources(Tiling.of(vocab_size)).values()),
        *(lora_sources(dtype).values() if serves_adapters else ()),
    ]
    return sources + [
        tiled_attention_source(
            shared_prefix=shared_prefix,
            dtype=dtype,
            cache_dtype=cache_dtype,
            head_dim=head_dim,
            tile=tile,
        )
        for shared_prefix in ((False, True) if may_share else (False,))
        for tile in TILES
    ]
