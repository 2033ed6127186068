"""The CUDA backend against the reference backend, on the same steps over the same cache."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu.attention import CacheShape, StepLayout
from gpu.attention.kv_cache import KvCache, bytes_per_page
from gpu.attention.torch_cpu import TorchCpuAttention
from gpu.cuda.attention import CudaAttention
from gpu.cuda.attention_limits import AttentionLimits
from gpu.cuda.step_buffer import StepBuffer
from gpu.kernels import MOST_BLOCKS, KernelLoader, KernelSource
from tests.gpu.attention.test_packing import layout_of
from tests.kernels.memory import relative_error

PAGE_SIZE = 16
NUM_PAGES = 80
NUM_SLOTS = 4
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 64
MAX_LEN = 512
MAX_TOKENS = 64
AXES = np.tile(np.repeat(np.arange(3), (8, 12, 12)), 2)
TOLERANCE = 1e-2


def cache_shape(dtype: torch.dtype, device: torch.device) -> CacheShape:
    return CacheShape(
        num_layers=1,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=device,
    )


def cos_sin() -> torch.Tensor:
    angles = torch.outer(torch.arange(MAX_LEN), 0.5 ** torch.arange(HEAD_DIM // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@attrs.define
class Backend:
    """The CUDA backend with the buffers that an executor would give it."""

    buffer: StepBuffer
    block_tables: torch.Tensor
    attention: CudaAttention

    @classmethod
    def of(
        cls,
        loader: KernelLoader,
        windows: tuple[int | None, ...] = (None,),
        *,
        cache_dtype: torch.dtype = torch.bfloat16,
        batch_invariant: bool = False,
        axes: npt.NDArray[np.int64] | None = None,
    ) -> Backend:
        limits = AttentionLimits(
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            windows=windows,
            max_rows=NUM_SLOTS,
            max_tokens=MAX_TOKENS,
            max_model_len=MAX_LEN,
            num_multiprocessors=4,  # so that small steps are cut as large ones are on a GPU
            batch_invariant=batch_invariant,
            has_mrope=axes is not None,
        )
        table = cos_sin()
        if axes is not None:
            table = torch.cat([table, torch.zeros(MAX_TOKENS, HEAD_DIM)])
        buffer = StepBuffer(loader.device, limits.regions())
        tables = torch.full((NUM_SLOTS, MAX_LEN // PAGE_SIZE), -1, dtype=torch.int32)
        tables = tables.to(loader.device)
        attention = CudaAttention(
            loader,
            buffer=buffer,
            block_tables=tables,
            cache=poisoned_cache(cache_shape(cache_dtype, loader.device)),
            limits=limits,
            dtype=torch.bfloat16,
            cos_sin=table.to(loader.device),
            axes=axes,
        )
        return cls(buffer, tables, attention)

    def run(
        self,
        layout: StepLayout,
        qkv: torch.Tensor,
        window: int | None,
        rotate: bool = True,
        padded_to: int = 0,
    ) -> torch.Tensor:
        """Return the attention of a step, whose rows are ``padded_to`` more than 0 for a graph."""
        for row, slot in enumerate(layout.slots):
            pages = -(-int(layout.context_lens[row]) // PAGE_SIZE)
            self.block_tables[slot, :pages] = torch.from_numpy(layout.block_tables[row, :pages])
        count = len(qkv)
        if padded_to:
            self.attention.begin_padded(padded_to, shares=False)
            self.attention.pack_padded(layout, padded_to, None)
            qkv = torch.cat([qkv, torch.zeros_like(qkv[:1]).expand(padded_to - count, -1, -1)])
        else:
            self.attention.begin(layout)
        self.buffer.upload()
        qkv = qkv.to(self.block_tables.device, copy=True)
        q = self.attention.rope_and_write(0, qkv, rotate)
        return self.attention.attend(0, q, window)[:count].cpu()


def poisoned_cache(shape: CacheShape) -> KvCache:
    cache = KvCache(shape)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xFF)
    return cache


def random_qkv(num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    return torch.randn(shape, generator=generator).bfloat16()


def step(rows: list[tuple[int, int]]) -> StepLayout:
    """Return a step of rows (tokens, context) with their pages in the pool row after row."""
    layout = layout_of([tokens for tokens, _ in rows], [context for _, context in rows], 0)
    tables, first = layout.block_tables.copy(), 0
    for row, context in enumerate(layout.context_lens.tolist()):
        pages = -(-context // PAGE_SIZE)
        tables[row, :pages] = range(first, first + pages)
        first += pages
    assert first <= NUM_PAGES
    return attrs.evolve(layout, block_tables=tables)


def fill(layout: StepLayout, backends: list[Backend | TorchCpuAttention], seed: int = 1) -> None:
    """Write every row's context before its new tokens, in chunks as prefill would."""
    counts = layout.query_start[1:] - layout.query_start[:-1]
    for row, known in enumerate((layout.context_lens - counts).tolist()):
        for begin in range(0, known, 64):
            end = min(begin + 64, known)
            chunk = layout_of([end - begin], [end], 0)
            chunk = attrs.evolve(
                chunk, slots=layout.slots[[row]], block_tables=layout.block_tables[[row]]
            )
            qkv = random_qkv(end - begin, seed + 1000 * row + begin)
            for backend in backends:
                run(backend, chunk, qkv, None)


def run(
    backend: Backend | TorchCpuAttention, layout: StepLayout, qkv: torch.Tensor, window: int | None
) -> torch.Tensor:
    if isinstance(backend, Backend):
        return backend.run(layout, qkv, window)
    backend.begin(layout)
    q = backend.rope_and_write(0, qkv.float(), True)
    return backend.attend(0, q, window)


MIXED = [(1, 130), (1, 17), (3, 40), (33, 300)]


@pytest.mark.parametrize("windows", [(None,), (None, 48)])
@pytest.mark.parametrize(
    "rows", [[(1, 1)], [(1, 400)], [(1, 300), (1, 5), (1, 64)], [(20, 20)], MIXED]
)
def test_it_gives_what_the_reference_gives(
    loader: KernelLoader, rows: list[tuple[int, int]], windows: tuple[int | None, ...]
) -> None:
    backend = Backend.of(loader, windows)
    shape = cache_shape(torch.float32, torch.device("cpu"))
    reference = TorchCpuAttention(shape, NUM_HEADS, cos_sin(), windows)
    layout = step(rows)
    fill(layout, [backend, reference])
    qkv = random_qkv(int(layout.query_start[-1]), 7)
    for window in windows:
        ours, theirs = (run(each, layout, qkv, window) for each in (backend, reference))
        assert relative_error(ours, theirs) < TOLERANCE


@pytest.mark.parametrize(("rows", "padded_to"), [(MIXED, 0), ([(1, 130), (1, 17)], 4)])
def test_rows_turn_by_rotary_positions(
    loader: KernelLoader, rows: list[tuple[int, int]], padded_to: int
) -> None:
    """The three positions of a token may differ, or be the same; or there are none."""
    backend = Backend.of(loader, axes=AXES)
    shape = cache_shape(torch.float32, torch.device("cpu"))
    reference = TorchCpuAttention(shape, NUM_HEADS, cos_sin(), axes=AXES)
    layout = step(rows)
    fill(layout, [backend, reference])
    qkv = random_qkv(int(layout.query_start[-1]), 7)
    different = np.random.default_rng(3).integers(0, MAX_LEN, (len(qkv), 3))
    outputs = []
    for positions in (different, different[:, :1].repeat(3, axis=1), None):
        turned = attrs.evolve(layout, rotary_positions=positions)
        ours = backend.run(turned, qkv, None, padded_to=padded_to)
        outputs.append(run(reference, turned, qkv, None))
        assert relative_error(ours, outputs[-1]) < TOLERANCE
    assert relative_error(outputs[0], outputs[1]) > 5 * TOLERANCE
    assert relative_error(outputs[1], outputs[2]) > 5 * TOLERANCE


def test_an_fp8_cache_is_near(loader: KernelLoader) -> None:
    backend = Backend.of(loader, cache_dtype=torch.float8_e4m3fn)
    shape = cache_shape(torch.float32, torch.device("cpu"))
    reference = TorchCpuAttention(shape, NUM_HEADS, cos_sin())
    layout = step(MIXED)
    fill(layout, [backend, reference])
    qkv = random_qkv(int(layout.query_start[-1]), 7)
    error = relative_error(*(run(each, layout, qkv, None) for each in (backend, reference)))
    assert TOLERANCE / 10 < error < 6 * TOLERANCE


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_rows_bits_depend_on_its_batch_unless_told_not_to(
    loader: KernelLoader, batch_invariant: bool
) -> None:
    """Alone, a long row is cut in many parts; beside others in fewer, unless the split is fixed."""
    together = step([(1, 400), (1, 390), (1, 380)])
    alone = attrs.evolve(
        step([(1, 400)]), slots=together.slots[:1], block_tables=together.block_tables[:1]
    )
    qkv = random_qkv(3, 7)
    outputs = []
    for layout in (together, alone):
        backend = Backend.of(loader, batch_invariant=batch_invariant)
        fill(together, [backend])
        outputs.append(run(backend, layout, qkv[: len(layout.slots)], None)[0])
    assert torch.equal(*outputs) == batch_invariant
    assert relative_error(*outputs) < TOLERANCE


def test_bytes_of_a_page_count_the_scales() -> None:
    device = torch.device("cpu")
    numbers = 2 * NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
    assert bytes_per_page(cache_shape(torch.bfloat16, device)) == 2 * numbers
    fp8 = bytes_per_page(cache_shape(torch.float8_e4m3fn, device))
    assert fp8 == numbers + 4 * numbers // HEAD_DIM


@attrs.define
class GridRecorder:
    """A loader of kernels that compute nothing and keep the grids of their launches."""

    grids: dict[str, tuple[int, int, int]] = attrs.field(factory=dict)
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    num_multiprocessors: int = 132

    def load(self, source: KernelSource) -> _Recorded:
        return _Recorded(source.name, self.grids)


@attrs.frozen
class _Recorded:
    name: str
    grids: dict[str, tuple[int, int, int]]

    def launch(self, grid: tuple[int, int, int], parameters: Any) -> None:
        self.grids[self.name] = grid


@pytest.mark.parametrize(("num_rows", "batch_invariant"), [(2048, True), (65535, False)])
def test_no_grid_is_larger_than_a_gpu_allows(num_rows: int, batch_invariant: bool) -> None:
    """Capture a step of rows with as many parts as there may be: 32 with a fixed split."""
    loader = GridRecorder()
    limits = AttentionLimits(
        num_heads=1,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        windows=(None,),
        max_rows=num_rows,
        max_tokens=num_rows,
        max_model_len=32 * 512,
        num_multiprocessors=loader.num_multiprocessors,
        batch_invariant=batch_invariant,
    )
    assert limits.max_decode_items(num_rows) > MOST_BLOCKS[1]
    shape = cache_shape(torch.bfloat16, loader.device)
    attention = CudaAttention(
        loader,
        buffer=StepBuffer(loader.device, limits.regions()),
        block_tables=torch.zeros((1, 1024), dtype=torch.int32),
        cache=KvCache(attrs.evolve(shape, num_kv_heads=1)),
        limits=limits,
        dtype=torch.bfloat16,
        cos_sin=cos_sin(),
    )
    attention.begin_padded(num_rows, shares=limits.may_share)
    qkv = torch.zeros((num_rows, 3, HEAD_DIM), dtype=torch.bfloat16)
    attention.attend(0, attention.rope_and_write(0, qkv, True), None)
    assert {"decode_attention", "combine_partials"} <= loader.grids.keys()
    for name, grid in loader.grids.items():
        assert all(size <= most for size, most in zip(grid, MOST_BLOCKS, strict=True)), name
