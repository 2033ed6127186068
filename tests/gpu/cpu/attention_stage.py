"""Sequences with attention computed step by step, by any backend, and in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from gpu.attention import Attention, CacheShape, QkNorm, StepLayout
from gpu.attention.torch_cpu import TorchCpuAttention
from gpu.cpu.attention import CompiledAttention

__all__ = ["Case", "Stage", "Step"]

Step = Sequence[tuple[int, int]]
"""The rows of one step: (number of a sequence, how many of its next tokens)."""

MAX_LEN = 2048
EPS = 1e-6


@attrs.frozen(kw_only=True)
class Case:
    """A shape, what happens to queries and keys, and random sequences."""

    kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    page_size: int = 16
    lengths: tuple[int, ...]
    window: int | None = None
    rotate: bool = True
    norm: bool = False
    seed: int = 0
    spread: float = 1.0
    """The standard deviation of queries and keys: the larger, the fewer keys matter."""

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def cos_sin(self) -> torch.Tensor:
        angles = torch.rand(MAX_LEN, self.head_dim // 2, generator=self._generator(1)) * 7
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def sequences(self) -> list[torch.Tensor]:
        """Queries, keys and values, [length, heads + 2 * kv_heads, head_dim] each."""
        generator = self._generator(2)
        size = (self.heads + 2 * self.kv_heads, self.head_dim)
        qkv = [torch.randn(length, *size, generator=generator) for length in self.lengths]
        for x in qkv:
            x[:, : self.heads + self.kv_heads] *= self.spread
        return [x.bfloat16() for x in qkv]

    def qk_norm(self) -> QkNorm | None:
        if not self.norm:
            return None
        size = (self.heads + self.kv_heads, self.head_dim)
        return QkNorm((torch.rand(size, generator=self._generator(3)) + 0.5).bfloat16(), EPS)

    def shape(self, num_pages: int) -> CacheShape:
        return CacheShape(
            num_layers=2,
            num_pages=num_pages,
            page_size=self.page_size,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )

    def _generator(self, salt: int) -> torch.Generator:
        return torch.Generator().manual_seed(10 * self.seed + salt)


class Stage:
    """One backend's cache with the sequences of a case, with their pages in a random order."""

    def __init__(
        self, case: Case, *, compiled: bool = True, threads: int = 1, page_seed: int = 0
    ) -> None:
        self.case = case
        counts = [-(-length // case.page_size) for length in case.lengths]
        num_pages = sum(counts) + 3
        order = np.random.default_rng(page_seed).permutation(num_pages).astype(np.int32)
        bounds = np.cumsum([0, *counts])
        self.pages = [order[a:b] for a, b in itertools.pairwise(bounds)]
        self.computed = [0] * len(counts)
        self.sequences = case.sequences()
        self.attention: Attention
        if compiled:
            self.compiled = CompiledAttention(
                case.shape(num_pages),
                case.heads,
                case.cos_sin(),
                max_tokens=sum(case.lengths),
                threads=threads,
                fill=torch.nan,  # unwritten memory must not matter
            )
            self.attention = self.compiled
        else:
            self.attention = TorchCpuAttention(
                case.shape(num_pages), case.heads, case.cos_sin(), [case.window]
            )

    def step(self, rows: Step) -> dict[int, torch.Tensor]:
        """Compute one step: sequence -> [tokens, heads, head_dim]."""
        case, counts = self.case, dict(rows)
        ends = {i: self.computed[i] + count for i, count in rows}
        layout = self.layout(ends, counts)
        self.attention.begin(layout)
        order = layout.slots.tolist()
        qkv = torch.cat([self.sequences[i][self.computed[i] : ends[i]] for i in order])
        q = self.attention.rope_and_write(1, qkv, case.rotate, case.qk_norm())
        out = self.attention.attend(1, q, case.window)
        for i, end in ends.items():
            self.computed[i] = end
        starts = layout.query_start
        return {i: out[starts[row] : starts[row + 1]] for row, i in enumerate(order)}

    def layout(self, ends: dict[int, int], counts: dict[int, int]) -> StepLayout:
        """Return the last ``counts[i]`` tokens before ``ends[i]`` of each sequence i."""
        order = sorted(counts, key=lambda i: (counts[i] > 1, -ends[i]))
        tables = np.zeros((len(order), max(len(self.pages[i]) for i in order)), dtype=np.int32)
        for row, i in enumerate(order):
            tables[row, : len(self.pages[i])] = self.pages[i]
        return StepLayout(
            positions=np.concatenate([np.arange(ends[i] - counts[i], ends[i]) for i in order]),
            query_start=np.cumsum([0, *(counts[i] for i in order)]),
            context_lens=np.array([ends[i] for i in order]),
            slots=np.array(order),
            block_tables=tables,
            num_decode_rows=sum(counts[i] == 1 for i in order),
        )

    def run(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """Return all steps: of each sequence what was computed, [tokens, heads, head_dim]."""
        pieces: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        for rows in steps:
            for i, out in self.step(rows).items():
                pieces[i].append(out)
        empty = torch.empty(0, self.case.heads, self.case.head_dim, dtype=torch.bfloat16)
        return [torch.cat([empty, *outs]) for outs in pieces]

    def close(self) -> None:
        self.compiled.close()


def rotated(case: Case, qkv: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values as attention sees them, rounded as documented; float64."""
    x = qkv[:, : case.heads + case.kv_heads].double()
    norm = case.qk_norm()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
        x = (x.bfloat16().double() * norm.weight.double()).bfloat16().double()
    if case.rotate:
        cos, sin = case.cos_sin()[: len(x), None].double().chunk(2, dim=-1)
        a, b = x.chunk(2, dim=-1)
        x = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).bfloat16().double()
    return torch.cat([x, qkv[:, case.heads + case.kv_heads :].double()], dim=1)


def exact(case: Case, qkv: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the tokens from ``first`` on in float64, [tokens, heads, head_dim].

    And as large, the error that rounding the weights and the result to bfloat16 may make, at most.
    """
    q, k, v = rotated(case, qkv).split([case.heads, case.kv_heads, case.kv_heads], dim=1)
    k, v = (x.repeat_interleave(case.group, dim=1).transpose(0, 1) for x in (k, v))
    q = q[first:].transpose(0, 1)
    scores = q @ k.transpose(1, 2) / case.head_dim**0.5
    queries, keys = torch.arange(first, len(qkv))[:, None], torch.arange(len(qkv))
    hidden = keys > queries
    if case.window is not None:
        hidden |= keys <= queries - case.window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    out, size = weights @ v, weights @ v.abs()
    return out.transpose(0, 1), ((out.abs() + size) * 2**-8 + 1e-6).transpose(0, 1)
