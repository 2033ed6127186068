"""The step buffer: fixed addresses, one copy, and hosts' buffers in turn."""

from __future__ import annotations

import numpy as np
import pytest

from gpu.cuda.step_buffer import NUM_HOST_BUFFERS, StepBuffer
from gpu.kernels import KernelLoader


@pytest.fixture
def buffer(loader: KernelLoader) -> StepBuffer:
    return StepBuffer(loader.device, {"slots": 5, "items": 8, "updates": 40})


def test_regions_arrive_where_their_views_are(buffer: StepBuffer) -> None:
    views = {name: buffer[name] for name in ("slots", "items", "updates")}
    buffer.put("items", np.arange(8).reshape(2, 4))
    buffer.put("slots", [3, 1])
    assert not any(bool(view.any()) for view in views.values())
    buffer.upload()
    assert views["slots"].tolist() == [3, 1, 0, 0, 0]
    assert views["items"].tolist() == list(range(8))
    assert all(view.data_ptr() == buffer[name].data_ptr() for name, view in views.items())
    assert all(view.data_ptr() % 64 == views["slots"].data_ptr() % 64 for view in views.values())


def test_it_lies_where_the_kernels_run(buffer: StepBuffer, loader: KernelLoader) -> None:
    assert buffer["items"].device == loader.device
    assert buffer._hosts[0].tensor.is_pinned() == (loader.device.type == "cuda")


def test_padding_overwrites_what_an_earlier_step_left(buffer: StepBuffer) -> None:
    for _ in range(NUM_HOST_BUFFERS):
        buffer.put("slots", [7, 7, 7, 7, 7])
        buffer.upload()
    buffer.put("slots", [2], padded_to=4, fill=-1)
    buffer.upload()
    assert buffer["slots"].tolist() == [2, -1, -1, -1, 7]


def test_nothing_behind_the_last_region_put_is_copied(buffer: StepBuffer) -> None:
    buffer.put("updates", range(40))
    buffer.upload()
    buffer.put("items", [5])
    buffer.upload()
    assert buffer["items"].tolist() == [5, 0, 0, 0, 0, 0, 0, 0]
    assert buffer["updates"].tolist() == list(range(40))


def test_the_next_step_is_packed_beside_the_copy_of_the_last(buffer: StepBuffer) -> None:
    written = [host.numbers for host in buffer._hosts]
    for step in range(2 * NUM_HOST_BUFFERS):
        buffer.put("slots", [step])
        buffer.upload()
        assert written[step % NUM_HOST_BUFFERS][0] == step
        assert buffer["slots"][0] == step


@pytest.mark.parametrize(("values", "padded_to"), [(range(6), 0), ([1], 6)])
def test_too_much_for_a_region_is_refused(
    buffer: StepBuffer, values: range | list[int], padded_to: int
) -> None:
    with pytest.raises(ValueError, match="6 numbers for slots, which holds 5"):
        buffer.put("slots", values, padded_to=padded_to)
