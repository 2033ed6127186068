"""Prefill attention against float64: chunks of rows over their paged contexts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from gpu.attention.prefill_items import prefill_items
from gpu.emulation import EmulatedLoader
from gpu.kernels import KernelLoader
from gpu.kernels.prefill_attention import PrefillAttention
from tests.kernels.memory import place, poisoned, relative_error
from tests.kernels.paged_rows import attention_reference, make_rows

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
TOLERANCE = {BF16: 4e-3, FP16: 8e-4}


class Case:
    """Rows of queries, and what the kernel makes of them."""

    def __init__(
        self,
        loader: KernelLoader,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        dtype: torch.dtype = BF16,
        cache_dtype: torch.dtype | None = None,
        num_kv_heads: int = 1,
        group: int = 2,
        head_dim: int = 64,
        page_size: int = 16,
        tile: int = 64,
        window: int | None = None,
        num_blocks: int = 0,
        seed: int = 0,
        **rows: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.loader, self.window = loader, window
        self.query_lens, self.context_lens = query_lens, context_lens
        self.rows = make_rows(
            loader,
            generator,
            context_lens,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            cache_dtype=cache_dtype,
            **rows,
        )
        self.softmax_scale = head_dim**-0.5
        self.kernel = PrefillAttention(
            loader,
            dtype=dtype,
            cache_dtype=cache_dtype or dtype,
            num_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            softmax_scale=self.softmax_scale,
            tile=tile,
        )
        heads = num_kv_heads * group
        self.start = np.concatenate([[0], np.cumsum(query_lens)])
        qkv = torch.randn(
            int(self.start[-1]), heads + 2 * num_kv_heads, head_dim, generator=generator
        )
        self.q = place(qkv.to(dtype), loader)[:, :heads]
        self.plan = prefill_items(
            np.array(query_lens),
            np.array(context_lens),
            tokens_per_tile=self.kernel.tokens_per_tile,
            num_kv_heads=num_kv_heads,
            num_blocks=num_blocks,
            max_partials=1 << 20,
        )

    def run(self) -> torch.Tensor:
        """Launch; splits are merged in float64."""
        rows, loader = self.rows, self.loader
        out = poisoned(tuple(self.q.shape), self.q.dtype, loader)
        partial_start = np.concatenate([[0], np.cumsum(self.plan.num_partials)])
        total = int(partial_start[-1])
        partial_out = poisoned((total, *self.q.shape[1:]), torch.float32, loader)
        partial_lse = poisoned((total, self.q.shape[1]), torch.float32, loader)
        self.kernel.prepare(
            items=place(torch.from_numpy(self.plan.items), loader),
            num_items=len(self.plan.items),
            query_start=place(torch.from_numpy(self.start).int(), loader),
            context_lens=place(torch.tensor(self.context_lens, dtype=torch.int32), loader),
            slots=rows.slots,
            block_tables=rows.block_tables,
            partial_start=place(torch.from_numpy(partial_start).int(), loader),
            partial_out=partial_out,
            partial_lse=partial_lse,
        )
        self.kernel.launch(
            self.q,
            rows.k_cache,
            rows.v_cache,
            out,
            window=self.window,
            k_scale=rows.k_scale,
            v_scale=rows.v_scale,
        )
        merged = out.cpu().clone()
        for token, (first, last) in enumerate(pairwise(partial_start)):
            if first < last:
                weight = torch.softmax(partial_lse[first:last].cpu().double() * np.log(2), dim=0)
                parts = partial_out[first:last].cpu().double()
                merged[token] = (weight[..., None] * parts).sum(0).to(out.dtype)
        return merged

    def reference(self) -> torch.Tensor:
        """The same in float64."""
        results = []
        for row, (n, length) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            q = self.q[self.start[row] : self.start[row + 1]].cpu()
            k, v = self.rows.k[row], self.rows.v[row]
            results.append(
                attention_reference(
                    q,
                    k,
                    v,
                    softmax_scale=self.softmax_scale,
                    position=length - n,
                    window=self.window,
                )[0]
            )
        return torch.cat(results)

    def error(self) -> float:
        """How far the kernel is from float64."""
        return relative_error(self.run(), self.reference())


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tile", [64, 128])
def test_head_sizes(loader: KernelLoader, head_dim: int, tile: int) -> None:
    case = Case(loader, [70], [150], head_dim=head_dim, tile=tile)
    assert case.error() < TOLERANCE[BF16]
    if isinstance(loader, EmulatedLoader):
        assert case.kernel._kernel.bank_conflicts == 0  # type: ignore[attr-defined]
