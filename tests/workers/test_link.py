"""The nng link: messages in order, nothing lost to a cancellation, closing wakes all waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pynng
import pytest
import trio
import trio.testing

from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost
from trioserve.workers.link import NngLink


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/link.sock"


@pytest.fixture
def peer(url: str) -> Iterator[pynng.Pair0]:
    """A worker's end of the link that the test opens at ``url``."""
    socket = pynng.Pair0(recv_timeout=60_000, send_timeout=60_000, recv_max_size=0)
    yield socket
    socket.close()


async def test_messages_go_both_ways_in_order(url: str, peer: pynng.Pair0) -> None:
    link = NngLink.listen(url)
    peer.dial(url, block=True)
    for number in range(50):
        peer.send(wire.encode(wire.Call(number=number, name="x" * number)))
    for number in range(50):
        assert await link.receive() == wire.Call(number=number, name="x" * number)
    for number in range(50):
        await link.send(wire.Reset(next_plan=number))
    for number in range(50):
        assert wire.decode(peer.recv()) == wire.Reset(next_plan=number)
    link.close()


async def test_a_cancelled_receive_loses_nothing(url: str, peer: pynng.Pair0) -> None:
    link = NngLink.listen(url)
    peer.dial(url, block=True)
    received: list[int] = []
    sent = 200

    def send_all() -> None:
        for number in range(sent):
            peer.send(wire.encode(wire.Reset(next_plan=number)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, send_all)
        while len(received) < sent:
            with trio.move_on_after(0.0005):
                while True:
                    message = await link.receive()
                    assert isinstance(message, wire.Reset)
                    received.append(message.next_plan)
    assert received == list(range(sent))
    link.close()


async def test_closing_wakes_a_receiver_and_refuses_a_sender(url: str) -> None:
    link = NngLink.listen(url)

    async def wait_for_loss() -> None:
        with pytest.raises(WorkerLost):
            await link.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for_loss)
        await trio.testing.wait_all_tasks_blocked()
        link.close()
        link.close()
    with pytest.raises(WorkerLost):
        await link.send(wire.Quit())
    assert not link.send_nowait(wire.Quit())


@pytest.mark.parametrize("message", [b"\xffnonsense", b""], ids=["no tag", "empty"])
async def test_an_invalid_message_from_the_worker_is_a_lost_worker(
    url: str, peer: pynng.Pair0, message: bytes
) -> None:
    link = NngLink.listen(url)
    peer.dial(url, block=True)
    peer.send(message)
    with pytest.raises(WorkerLost, match="invalid message"):
        await link.receive()
    link.close()


async def test_an_error_of_nng_is_a_lost_worker(
    url: str, peer: pynng.Pair0, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise pynng.NoMemory("out of memory", 2)

    link = NngLink.listen(url)
    monkeypatch.setattr(pynng.Pair0, "send", fails)
    monkeypatch.setattr(pynng.Pair0, "recv", fails)
    with pytest.raises(WorkerLost, match="failed"):
        await link.send(wire.Quit())
    with pytest.raises(WorkerLost, match="failed"):
        await link.receive()
    link.close()


async def test_links_leave_no_descriptor_behind(tmp_path: Path) -> None:
    async def open_and_close(number: int) -> None:
        link = NngLink.listen(f"ipc://{tmp_path}/{number}.sock")
        with trio.move_on_after(0.001):
            await link.receive()
        link.close()

    await open_and_close(0)  # nng starts its own threads and pipes with the first socket
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 20):
        await open_and_close(number)
    # nng reaps closed sockets on a thread of its own.
    with trio.fail_after(30):
        while len(os.listdir("/proc/self/fd")) > before:
            await trio.sleep(0.01)
