"""Ids of embeddings in the prefix cache, and prompts with embeddings over workers that die."""

from __future__ import annotations

import functools
import random

import attrs
import numpy as np
import pytest
import trio
import trio.testing

from trioserve import EmbeddingsPrompt
from trioserve.protocol.embeddings import EmbeddingRows, ImageGrid
from trioserve.protocol.sampling import SamplerParams
from trioserve.requests import embedded
from trioserve.requests.embedded import (
    FIRST_CONTENT_ID,
    PLACEHOLDER,
    ContentIds,
    EmbeddedMedia,
    EmbeddedSpan,
    grids_of,
    rows_after,
    take_marks,
)
from trioserve.testing import FakeWorker, WorkerDies
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.fake_model import EMBEDDING_WIDTH, embedded_token

ROWS = np.random.default_rng(1).normal(size=(64, EMBEDDING_WIDTH)).astype(np.float32)


def spans(*parts: tuple[int, int], start: int = 0) -> list[EmbeddedSpan]:
    """Return the spans of a prompt of such parts of :data:`ROWS`."""
    found: list[EmbeddedSpan] = []
    for first, stop in parts:
        found += EmbeddingsPrompt(ROWS[first:stop]).spans(start, 0, stop - first)
        start += stop - first
    return found


def test_equal_contents_have_equal_ids_and_others_have_others() -> None:
    contents = ContentIds()
    one = contents.named([0] * 40, spans((0, 40)))
    same = contents.named([7] * 3 + [0] * 20, spans((0, 20), start=3))
    assert same[:3] == [7] * 3
    assert one[:16] == same[3:19]  # a whole span
    assert not set(one[16:]) & set(same)  # the next one is cut off elsewhere
    half = contents.named([0] * 40, EmbeddingsPrompt(ROWS[:40].astype(np.float16)).spans(0, 0, 40))
    assert not set(one) & set(half)
    assert min(one + same[3:] + half) >= FIRST_CONTENT_ID
    assert len(set(one)) == 3


def test_an_image_with_another_grid_is_another_content() -> None:
    rows = EmbeddingRows(start=0, rows=ROWS[:6].tobytes(), number_format="float32")
    grids = [
        *(ImageGrid(start=0, rows=rows, columns=6 // rows) for rows in (2, 3)),
        *(ImageGrid(start=0, rows=1, columns=2, frames=3, interval=i) for i in (1.0, 1.5)),
        None,
    ]
    images = [
        EmbeddedMedia(
            kind="image",
            token_ids=[1, *[7] * 6, 2],
            placeholder=7,
            digest=b"d",
            rows=rows,
            grid=grid,
        )
        for grid in grids
    ]
    ids = [5, *(mark for index, each in enumerate(images) for mark in each.marks(index))]
    found = take_marks(ids, images)
    assert ids == [5, *[1, *[7] * 6, 2] * 5]
    starts = [2, 10, 18, 26, 34]
    assert [(span.start, span.stop) for span in found] == [(each, each + 6) for each in starts]
    assert len({span.digest for span in found}) == 5
    assert grids_of(found) == [
        attrs.evolve(grid, start=start)
        for grid, start in zip(grids, starts, strict=True)
        if grid is not None
    ]


def test_ids_begin_anew_where_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = ContentIds(end=FIRST_CONTENT_ID + 3)
    first = contents.named([0] * 32, spans((0, 32)))
    assert contents.has_room(spans((32, 48)))
    assert not contents.has_room(spans((32, 49)))
    contents.begin_anew()
    assert contents.named([0] * 16, spans((32, 48))) == first[:16]
    monkeypatch.setattr(embedded, "MAX_KNOWN_CONTENTS", 1)
    names = [contents.named([0], spans(part))[0] for part in ((0, 1), (1, 2), (0, 1))]
    assert len(set(names)) == 3  # the first was forgotten


def test_marks_become_spans_in_order() -> None:
    given = [EmbeddingsPrompt(ROWS[:3]), EmbeddingsPrompt(ROWS[3:20])]
    ids = [5, *given[1].marks(1), 6, *given[0].marks(0), 7]
    found = take_marks(ids, given)
    assert ids == [5, *([PLACEHOLDER] * 17), 6, *([PLACEHOLDER] * 3), 7]
    assert [(each.start, each.stop) for each in found] == [(1, 17), (17, 18), (19, 22)]
    rows = rows_after(found, 10)
    assert [each.start for each in rows] == [10, 17, 19]
    assert np.array_equal(rows[0].numbers(EMBEDDING_WIDTH), ROWS[3 + 9 : 3 + 16])


async def test_histories_over_workers_that_die(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are those of the embeddings, whichever worker computed them, and cached or not.

    There are so few ids that they begin anew many times.
    """
    few = functools.partial(ContentIds, end=FIRST_CONTENT_ID + 40)
    monkeypatch.setattr("trioserve.engine.schedulers.ContentIds", few)
    numbers = random.Random(3)

    def die(step: int, _: object) -> None:
        if numbers.random() < 0.02:
            raise WorkerDies

    def make() -> FakeWorker:
        return FakeWorker(
            num_pages=40, page_size=4, max_num_batched_tokens=32, script=die, step_time=0.01
        )

    token_of = FakeWorker().token
    cached = 0

    async def ask() -> None:
        nonlocal cached
        first, count = numbers.choice([0, 0, 0, 16, 32]), numbers.randint(1, 30)
        rows = ROWS[first : first + count]
        await trio.sleep(numbers.random() * 20)
        answer = await engine.complete(EmbeddingsPrompt(rows), max_tokens=12, seed=7, n=2)
        cached += answer.usage.cached_tokens
        for output in answer.outputs:
            context = [embedded_token(row) for row in rows]
            sampler = SamplerParams(seed=7, sequence_index=output.index)
            for token in output.token_ids:
                assert token == token_of(context, sampler)
                context.append(token)

    options = {"data_parallel_size": 2, "max_worker_restarts": 1000}
    async with open_fake_engine(make, **options) as engine, trio.open_nursery() as nursery:
        for _ in range(200):
            nursery.start_soon(ask)
    assert sum(worker.restarts for worker in engine.workers) > 3
    assert cached > 300
