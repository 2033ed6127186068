"""Whatever a step looks like, its work fits the buffers and every token's attention is complete."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.attention import StepLayout
from gpu.cuda.attention_limits import AttentionLimits
from gpu.cuda.attention_packing import StepPacker, StepShape, padded_shape
from gpu.cuda.step_buffer import StepBuffer

PAGE_SIZE = 16
MAX_LEN = 4096
MAX_ROWS = 12
MAX_TOKENS = 64


def make(
    num_heads: int, num_kv_heads: int, windows: tuple[int | None, ...], **options: bool
) -> tuple[AttentionLimits, StepBuffer, StepPacker]:
    limits = AttentionLimits(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        windows=windows,
        max_rows=MAX_ROWS,
        max_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        num_multiprocessors=8,
        **options,
    )
    buffer = StepBuffer(torch.device("cpu"), limits.regions())
    return limits, buffer, StepPacker(buffer, limits, page_size=PAGE_SIZE, cache_bytes=2)


def layout_of(counts: list[int], contexts: list[int], num_shared_pages: int) -> StepLayout:
    """Rows with block tables that begin with the same pages, and go on with pages of their own."""
    order = sorted(range(len(counts)), key=lambda i: (counts[i] > 1, -contexts[i]))
    tokens, ends = np.array(counts)[order], np.array(contexts)[order]
    start = np.concatenate([[0], tokens.cumsum()])
    width = MAX_LEN // PAGE_SIZE
    tables = 1000 + np.arange(len(counts) * width, dtype=np.int32).reshape(-1, width)
    tables[:, :num_shared_pages] = np.arange(num_shared_pages)
    return StepLayout(
        positions=np.arange(start[-1]) + np.repeat(ends - tokens - start[:-1], tokens),
        query_start=start,
        context_lens=ends,
        slots=np.arange(len(counts)),
        block_tables=tables,
        num_decode_rows=int((tokens == 1).sum()),
    )


@st.composite
def layouts(draw: st.DrawFn, *, decode_only: bool = False) -> StepLayout:
    num_rows = draw(st.integers(1, MAX_ROWS))
    most = 1 if decode_only else MAX_TOKENS // num_rows
    counts = draw(st.lists(st.integers(1, most), min_size=num_rows, max_size=num_rows))
    num_shared = draw(st.integers(0, 200))
    lengths = st.integers(PAGE_SIZE * num_shared + MAX_TOKENS, MAX_LEN)
    contexts = draw(st.lists(lengths, min_size=num_rows, max_size=num_rows))
    return layout_of(counts, contexts, num_shared)


SHAPES = st.sampled_from([(32, 8), (4, 4), (6, 2), (16, 1)])
WINDOWS = st.sampled_from([(None,), (100,), (None, 64), (1000, 64)])


def decode_items(
    buffer: StepBuffer, shape: StepShape, index: int, window: int | None
) -> npt.NDArray[np.int32]:
    count = int(buffer[f"num_items.{index}"][0])
    assert count == shape.num_items[window]
    return buffer[f"items.{index}"][: 4 * count].view(-1, 4).numpy()


@settings(max_examples=60, deadline=None)
@given(SHAPES, WINDOWS, st.booleans(), layouts())
def test_every_decode_row_sees_all_it_should_once(
    heads: tuple[int, int], windows: tuple[int | None, ...], fixed: bool, layout: StepLayout
) -> None:
    limits, buffer, packer = make(*heads, windows, batch_invariant=fixed)
    shared = packer.find_shared(layout, layout.num_decode_rows)
    shape = packer.pack(layout, shared=shared)
    buffer.upload()
    for index, window in enumerate(limits.distinct_windows):
        items = decode_items(buffer, shape, index, window)
        starts = buffer[f"partial_start.{index}"][: shape.num_tokens + 1].numpy()
        assert (np.diff(starts) >= 0).all()
        assert starts[-1] <= limits.max_partials
        taken = []
        for row in range(layout.num_decode_rows):
            seen = np.zeros(MAX_LEN, dtype=int)
            if shared is not None and window is None:
                seen[: shared.prefix_lens[row]] += 1
                taken += list(range(starts[row], starts[row] + shared.num_partials[row]))
            for _, begin, end, partial in items[items[:, 0] == row]:
                seen[begin:end] += 1
                taken += [partial] if partial >= 0 else []
            context = int(layout.context_lens[row])
            wanted = np.zeros(MAX_LEN, dtype=int)
            wanted[max(0, context - window) if window else 0 : context] = 1
            np.testing.assert_array_equal(seen, wanted)
        assert sorted(taken) == list(range(starts[layout.num_decode_rows]))


@settings(max_examples=60, deadline=None)
@given(SHAPES, WINDOWS, layouts(decode_only=True), st.data())
def test_a_padded_step_fits_what_was_captured_for_it(
    heads: tuple[int, int],
    windows: tuple[int | None, ...],
    layout: StepLayout,
    data: st.DataObject,
) -> None:
    limits, buffer, packer = make(*heads, windows)
    size = data.draw(st.integers(len(layout.slots), MAX_ROWS))
    shared = packer.find_shared(layout, size)
    captured = padded_shape(limits, size, shares=shared is not None)
    shape = packer.pack(layout, padded_to=size, shared=shared)
    buffer.upload()
    assert shape.num_tokens == shape.num_decode_rows == captured.num_tokens == size
    assert shape.prefix_tile == captured.prefix_tile
    assert shape.num_prefix_items <= captured.num_prefix_items
    if limits.may_share:
        assert int(buffer["num_prefix_items"][0]) == shape.num_prefix_items
    for window in limits.distinct_windows:
        assert shape.num_items[window] <= captured.num_items[window]
        assert captured.has_partials[window]
    rows = len(layout.slots)
    assert buffer["slots"][:size].tolist() == [*layout.slots.tolist(), *[-1] * (size - rows)]
    assert buffer["kv_locations"][rows:size].tolist() == [-1] * (size - rows)


def test_prefixes_of_an_earlier_step_are_gone() -> None:
    _, buffer, packer = make(8, 2, (None,))
    together, apart = (layout_of([1] * 12, [4000] * 12, pages) for pages in (200, 0))
    for layout, shares in ((together, True), (apart, False)):
        shared = packer.find_shared(layout, 12)
        packer.pack(layout, padded_to=12, shared=shared)
        buffer.upload()
        assert (int(buffer["num_prefix_items"][0]) > 0) == shares


def test_locations_follow_the_block_table() -> None:
    _, buffer, packer = make(4, 2, (None,))
    layout = layout_of([1, 3], [40, 18], 0)
    packer.pack(layout)
    buffer.upload()
    pages = layout.block_tables
    assert buffer["kv_locations"][:4].tolist() == [
        pages[0, 2] * 16 + 7,
        pages[1, 0] * 16 + 15,
        pages[1, 1] * 16,
        pages[1, 1] * 16 + 1,
    ]
    assert buffer["positions"][:4].tolist() == [39, 15, 16, 17]


def test_a_fixed_split_does_not_look_at_the_batch() -> None:
    alone, together = layout_of([1], [3000], 0), layout_of([1, 1, 1], [3000, 1200, 4000], 0)
    cuts = []
    for layout in (alone, together):
        _, buffer, packer = make(8, 2, (None,), batch_invariant=True)
        shape = packer.pack(layout)
        buffer.upload()
        row = layout.context_lens.tolist().index(3000)
        items = decode_items(buffer, shape, 0, None)
        cuts.append(sorted(items[items[:, 0] == row][:, 1:3].tolist()))
    assert cuts[0] == cuts[1]
    assert len(cuts[0]) > 1
