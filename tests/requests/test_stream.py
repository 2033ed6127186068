"""The stream of a request: nothing lost, merged for slow readers, bounded, safe when cancelled."""

from __future__ import annotations

import contextlib

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from trioserve.protocol.errors import EngineError, SlowReader
from trioserve.requests.stream import Chunk, Stream, StreamBudget, TokenLogprob, merge


def make_stream(per_stream: int = 1 << 20, total: int = 1 << 20) -> Stream:
    return Stream(StreamBudget(per_stream, total))


async def test_a_reader_that_keeps_up_sees_every_chunk() -> None:
    stream = make_stream()
    for text in "abc":
        stream.push(Chunk(text))
        assert [chunk.text for chunk in await stream.take()] == [text]


async def test_a_waiting_reader_is_woken_by_a_push() -> None:
    stream = make_stream()
    taken: list[Chunk] = []

    async def read() -> None:
        taken.extend(await stream.take())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        stream.push(Chunk("x", (1,)))
    assert taken == [Chunk("x", (1,))]


async def test_a_sink_takes_what_comes_while_the_reader_waits_but_for_the_last() -> None:
    stream = make_stream()
    taken: list[str] = []

    def sink(chunk: Chunk) -> bool:
        taken.append(chunk.text)
        return chunk.text != "refused"

    stream.sink = sink
    stream.push(Chunk("before"))
    read = [chunk.text for chunk in await stream.take()]

    async def reader() -> None:
        for _ in range(2):
            read.extend(chunk.text for chunk in await stream.take())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        for text, finish_reason in (("a", None), ("refused", None), ("last", "stop")):
            await trio.testing.wait_all_tasks_blocked()
            stream.push(Chunk(text, finish_reason=finish_reason))
    assert taken == ["a", "refused"]
    assert read == ["before", "refused", "last"]


async def test_a_sink_that_fails_is_its_readers_error_alone() -> None:
    stream = make_stream()

    def sink(chunk: Chunk) -> bool:
        raise KeyError(chunk.text)

    stream.sink = sink

    async def reader() -> None:
        with pytest.raises(KeyError, match="x"):
            await stream.take()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        await trio.testing.wait_all_tasks_blocked()
        stream.push(Chunk("x"))
        stream.push(Chunk("y"))
    assert stream.pending_bytes == 0


async def test_a_shared_error_has_one_streams_traceback() -> None:
    error = EngineError("it broke")
    streams = [make_stream() for _ in range(3)]
    for each in streams:
        each.close(error)
    depths = []
    for each in streams:
        with pytest.raises(EngineError) as raised:
            await each.take()
        depths.append(len(raised.traceback))
    assert depths == [2, 2, 2]


async def test_what_waits_is_read_before_the_end_and_before_an_error() -> None:
    ended, failed = make_stream(), make_stream()
    for stream, error in ((ended, None), (failed, EngineError("broken"))):
        stream.push(Chunk("last"))
        stream.close(error)
        stream.close()  # a second close changes nothing
        stream.push(Chunk("too late"))
        assert [chunk.text for chunk in await stream.take()] == ["last"]
    with pytest.raises(trio.EndOfChannel):
        await ended.take()
    with pytest.raises(EngineError, match="broken"):
        await failed.take()


async def test_closing_wakes_a_waiting_reader() -> None:
    stream = make_stream()
    ended = False

    async def read() -> None:
        nonlocal ended
        with pytest.raises(trio.EndOfChannel):
            await stream.take()
        ended = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        stream.close()
    assert ended


async def test_reading_what_was_discarded_is_an_error_unless_all_was_read() -> None:
    running, unread, finished = make_stream(), make_stream(), make_stream()
    for stream in (unread, finished):
        stream.push(Chunk("last"))
        stream.close()
    await finished.take()
    for stream in (running, unread, finished):
        stream.discard()
        stream.discard()
    for stream in (running, unread):
        with pytest.raises(trio.ClosedResourceError, match="block was left"):
            await stream.take()
    with pytest.raises(trio.EndOfChannel):
        await finished.take()


async def test_a_cancelled_take_loses_nothing() -> None:
    stream = make_stream()
    with trio.move_on_after(0) as scope:
        await stream.take()
    assert scope.cancelled_caught
    stream.push(Chunk("kept"))
    with trio.CancelScope() as scope:
        scope.cancel()
        await stream.take()
    assert scope.cancelled_caught
    assert [chunk.text for chunk in await stream.take()] == ["kept"]


async def test_a_second_reader_is_refused() -> None:
    stream = make_stream()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.take)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await stream.take()
        stream.push(Chunk("x"))


def test_a_stream_past_its_own_bound_is_refused_with_the_option() -> None:
    stream = make_stream(per_stream=200)
    stream.push(Chunk("x" * 100))
    with pytest.raises(SlowReader, match="max_stream_bytes is 200"):
        stream.push(Chunk("x" * 100))
    assert stream.pending_bytes == Chunk("x" * 100).size


def test_all_streams_share_one_bound_and_give_it_back() -> None:
    budget = StreamBudget(per_stream=1400, total=1500)
    first, second = Stream(budget), Stream(budget)
    first.push(Chunk("x" * 500))
    second.push(Chunk("x" * 800))
    with pytest.raises(SlowReader, match=r"left 1428 .* this one 864 of them; max_.* is 1500"):
        second.push(Chunk("x" * 100))
    first.discard()
    second.push(Chunk("x" * 50))
    second.discard()
    assert budget.waiting == 0


async def test_the_one_that_lags_the_most_makes_room_for_the_others() -> None:
    budget = StreamBudget(per_stream=10_000, total=10_000)
    streams = [Stream(budget) for _ in range(4)]
    evicted: list[tuple[int, SlowReader]] = []
    for number, (stream, size) in enumerate(zip(streams, (100, 5000, 1500, 3000), strict=True)):
        stream.on_evicted = lambda error, number=number: evicted.append((number, error))
        stream.push(Chunk("x" * (size - 64)))
    # The first one lags, too, but it is the smallest.
    for _ in range(3):
        streams[0].push(Chunk("y" * 100))
    ((number, error),) = evicted
    assert number == 1
    assert "this one 5000 of them" in str(error)
    assert budget.waiting == sum(stream.pending_bytes for stream in streams)
    with pytest.raises(SlowReader) as caught:
        await streams[1].take()
    assert caught.value is error
    streams[1].push(Chunk("nobody hears it"))
    # All others have lost nothing.
    for number, size in ((0, 36 + 300), (2, 1436), (3, 2936)):
        (chunk,) = await streams[number].take()
        assert len(chunk.text) == size
    assert budget.waiting == 0
    assert budget.largest() is None


async def test_a_reader_that_keeps_up_is_not_refused_for_what_others_left() -> None:
    budget = StreamBudget(per_stream=1000, total=1500)
    slow = [Stream(budget), Stream(budget)]
    for stream in slow:
        stream.push(Chunk("x" * 600))
    fast = [Stream(budget) for _ in range(4)]
    taken: list[Chunk] = []

    async def read(stream: Stream) -> None:
        taken.extend(await stream.take())

    async with trio.open_nursery() as nursery:
        for stream in fast:
            nursery.start_soon(read, stream)
        await trio.testing.wait_all_tasks_blocked()
        for stream in fast:
            for index in range(3):  # The reader doesn't run in between.
                stream.push(Chunk("y" * 100, index=index))
    assert len(taken) == 12
    assert all(stream.closed for stream in slow)
    assert budget.waiting == 0


async def test_what_one_step_brings_may_be_more_than_the_limit() -> None:
    stream = Stream(StreamBudget(per_stream=100, total=10_000))
    taken: list[Chunk] = []

    async def read() -> None:
        taken.extend(await stream.take())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        for index in range(3):  # The reader doesn't run in between.
            stream.push(Chunk("x" * 200, index=index))
    assert len(taken) == 3
    stream.push(Chunk("x" * 200))
    with pytest.raises(SlowReader, match="left 264 bytes unread; max_stream_bytes is 100"):
        stream.push(Chunk("x"))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4), st.sampled_from(["push", "take", "discard"]), st.integers(0, 300)
        ),
        max_size=60,
    )
)
def test_the_common_bound_holds_whoever_pushes_and_takes(
    steps: list[tuple[int, str, int]],
) -> None:
    async def main() -> None:
        budget = StreamBudget(per_stream=800, total=1000)
        streams = [Stream(budget) for _ in range(5)]
        for number, what, size in steps:
            stream = streams[number]
            if what == "push":
                lost = {other: other.pending_bytes for other in streams if not other.closed}
                largest = max(lost.values(), default=0)
                with contextlib.suppress(SlowReader):
                    stream.push(Chunk("x" * size))
                for other, before in lost.items():
                    if other.closed:
                        assert before >= largest / 2 > 0
            elif what == "discard":
                stream.discard()
            elif stream.pending_bytes:
                await stream.take()
            assert budget.waiting == sum(each.pending_bytes for each in streams) <= 1000
            lagging = {each for group in budget._lagging for each in group}
            assert lagging == {each for each in streams if each.pending_bytes}

    trio.run(main)


def test_what_waits_is_given_back_once() -> None:
    budget = StreamBudget(per_stream=1000, total=1500)
    stream = Stream(budget)
    stream.push(Chunk("x" * 800))
    stream.discard()
    stream.discard()
    assert budget.waiting == 0


def test_merging_keeps_order_ids_logprobs_and_the_finish() -> None:
    entry = TokenLogprob(1, -0.5, "a")
    chunks = [
        Chunk("a", (1,), 0, (entry,)),
        Chunk("b", (2, 3), 0, (entry, entry)),
        Chunk("c", (4,), 1),
        Chunk("d", (5,), 0, None, "stop", "END"),
    ]
    assert merge(chunks) == [
        Chunk("abd", (1, 2, 3, 5), 0, (entry, entry, entry), "stop", "END"),
        Chunk("c", (4,), 1),
    ]


@given(st.lists(st.tuples(st.text(max_size=5), st.integers(0, 2)), max_size=30))
def test_merging_never_changes_what_a_sequence_says(pieces: list[tuple[str, int]]) -> None:
    chunks = [Chunk(text, (number,), index) for number, (text, index) in enumerate(pieces)]
    merged = merge(chunks)
    assert len(merged) == len({chunk.index for chunk in chunks})
    for index in range(3):
        before = [chunk for chunk in chunks if chunk.index == index]
        after = [chunk for chunk in merged if chunk.index == index]
        assert "".join(c.text for c in before) == "".join(c.text for c in after)
        assert [i for c in before for i in c.token_ids] == [i for c in after for i in c.token_ids]
