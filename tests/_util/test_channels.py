"""Crowds in memory channels: nothing is waited for, lost or put in another order."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from trioserve._util.channels import forward, receive_waiting


async def test_all_that_waits_is_taken_in_order_and_nothing_is_waited_for() -> None:
    send, receive = trio.open_memory_channel[int](math.inf)
    assert list(receive_waiting(receive)) == []
    with trio.testing.assert_no_checkpoints():
        for number in range(100):
            await forward(send, number)
        assert list(receive_waiting(receive)) == list(range(100))
    await forward(send, 7)
    send.close()
    assert list(receive_waiting(receive)) == [7]
    assert list(receive_waiting(receive)) == []


async def test_a_full_channel_is_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    send, receive = trio.open_memory_channel[int](1)
    await forward(send, 1)
    with trio.move_on_after(1) as patience:
        await forward(send, 2)
    assert patience.cancelled_caught
    assert list(receive_waiting(receive)) == [1]


async def test_a_closed_channel_says_so() -> None:
    send, receive = trio.open_memory_channel[int](1)
    receive.close()
    with pytest.raises(trio.BrokenResourceError):
        await forward(send, 1)
