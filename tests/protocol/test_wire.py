"""Messages survive the wire, and nonsense is named as such."""

from __future__ import annotations

import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.protocol import wire
from trioserve.protocol.embeddings import ImageGrid
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.joining import Join, JoinRefusal, LinkHeartbeat, WorkerEnd
from trioserve.protocol.sampling import SamplerParams

MESSAGES: list[wire.Message] = [
    wire.WorkerHello(protocol=1, schema="abc", package="/x/gpu", pid=7),
    wire.Start(
        model="/x/model.gguf",
        device="cuda",
        dtype="auto",
        max_model_len=0,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        page_size=16,
        num_pages=0,
        kv_cache_dtype="fp8",
        kv_cache_memory_bytes=1 << 40,
        gpu_memory_utilization=0.9,
        num_threads=0,
        logprobs_mode="raw",
        max_logprobs=20,
        enforce_eager=True,
        deterministic=False,
        quantization="auto",
        tokenizer="",
        logits_processors=["module:Class"],
        cores=[0, 1, 64],
    ),
    wire.LoadingProgress(stage="weights", done=1, total=2),
    Join(role="worker", protocol=1, schema="abc", version="1", id="a", host="other", checksum="c"),
    JoinRefusal(reason="another model", final=True),
    LinkHeartbeat(number=3, is_answer=True),
    WorkerEnd(reason="process 7 exited with status 1", from_outside=False, leaves=True),
    wire.Plan(
        number=3,
        closed=wire.from_ints([4]),
        opened=[
            wire.OpenSlot(
                slot=1,
                generation=2,
                tokens=wire.from_ints([5, 6, 7]),
                prompt_length=2,
                computed=0,
                pages=wire.from_ints([9]),
                sampler=SamplerParams(
                    temperature=0.5,
                    logit_bias={3: -1.5},
                    stop_ids=[0, 2],
                    seed=2**64 - 1,
                    bad_words=[[4, 5]],
                    grammar=Grammar("regex", "a+"),
                    extra_args={"target": [1, "x", None]},
                ),
                prompt_logprobs_from=1,
                grids=[ImageGrid(start=0, rows=1, columns=2, frames=3, interval=0.5)],
            )
        ],
        page_slots=wire.from_ints([1]),
        page_ids=wire.from_ints([8]),
        row_slots=wire.from_ints([1]),
        row_counts=wire.from_ints([3]),
    ),
    wire.StepResult(
        number=3,
        slots=wire.from_ints([1]),
        generations=wire.from_ints([2]),
        offsets=wire.from_ints([0, 1]),
        tokens=wire.from_ints([11]),
        logprobs=wire.from_floats([-0.25]),
    ),
    wire.Reset(next_plan=9),
    wire.Failure(number=3, message="no", slot=1, fatal=True),
    wire.Call(number=1, name="ping"),
    wire.Reply(number=1, error="", result=b"\x01"),
    wire.Quit(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    try:
        message = wire.decode(data)
    except wire.WireError:
        return
    assert wire.decode(wire.encode(message)) == message


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x04", b"\x04\x80"])
def test_damage_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(data)


def opened_slot(extra_args: bytes, *, tag: bytes = b"\x04") -> bytes:
    """Return a plan that opens one slot; its sampler has ``extra_args`` as MessagePack."""
    sampler = b"\x81" + msgspec.msgpack.encode("extra_args") + extra_args
    fields = {"slot": 1, "generation": 1, "tokens": b"", "prompt_length": 0, "computed": 0}
    body = b"".join(map(msgspec.msgpack.encode, (x for kv in fields.items() for x in kv)))
    body += msgspec.msgpack.encode("pages") + msgspec.msgpack.encode(b"")
    slot = b"\x87" + body + msgspec.msgpack.encode("sampler") + sampler
    start = msgspec.msgpack.encode("number") + b"\x01" + msgspec.msgpack.encode("opened")
    return tag + b"\x82" + start + b"\x91" + slot


@pytest.mark.parametrize(
    "data",
    [
        b"\x07\x82\xa6number\x01\xa7message\xa2\xeeo",  # no UTF-8
        opened_slot(b"\x81\xa1a" + b"\x91" * 100_000 + b"\x01"),  # nested too deeply
        b"\x04\x82\xa6number\x01\xa6opened\xdd\xff\xff\xff\xff",  # four billion slots
        b"\x04\x82\xa6number\x01\xa6closed\xc6\xff\xff\xff\xff",  # four billion bytes
        b"\x07\x82\xa6number\x01\xa7message\xdb\xff\xff\xff\xff",  # four billion letters
        b"\x04\xdf\xff\xff\xff\xff",  # four billion fields
        opened_slot(b"\xdf\xff\xff\xff\xff"),
    ],
)
def test_hostile_bytes_are_a_wire_error_and_cost_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(wire.WireError):
            wire.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_plan_with_arguments_is_read_where_they_are_fine() -> None:
    plan = wire.decode(opened_slot(b"\x81\xa1a\x91\x01"))
    assert isinstance(plan, wire.Plan)
    assert plan.opened[0].sampler.extra_args == {"a": [1]}


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_integer_columns(values: list[int]) -> None:
    assert wire.ints(wire.from_ints(values)).tolist() == values


def test_float_columns_keep_nan_and_infinity() -> None:
    values = [0.5, float("nan"), float("-inf")]
    np.testing.assert_array_equal(wire.floats(wire.from_floats(values)), np.float32(values))


def test_a_steady_decode_plan_is_small() -> None:
    """design.md: a plan that only decodes is a few dozen bytes and four a row and column."""
    rows = list(range(32))
    plan = wire.Plan(
        number=1000, row_slots=wire.from_ints(rows), row_counts=wire.from_ints([1] * 32)
    )
    assert len(wire.encode(plan)) < 100 + 8 * len(rows)
