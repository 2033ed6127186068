"""Messages of workers and front ends: any bytes, and results that don't fit a plan."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import numpy as np
from hypothesis import strategies as st

from tests.fuzz.target import Target
from tests.protocol.test_wire import MESSAGES
from tests.support.scheduling import Bench, worker
from trioserve.front_ends.messages import (
    Abort,
    RpcCall,
    RpcReply,
    Submit,
    Taken,
    decode_from_front_end,
    encode,
)
from trioserve.protocol import wire
from trioserve.protocol.embeddings import ImageGrid
from trioserve.protocol.errors import WorkerLost
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.embedded import EmbeddingsPrompt
from trioserve.requests.retention import Retention, RetentionRange

__all__ = ["TARGETS"]

MEMORY = 1 << 20
"""Most memory for decoding a few hundred bytes: an error's text and little more."""


def _decoded_within_bounds(
    decode: Callable[[bytes], Any], errors: tuple[type[Exception], ...], data: bytes
) -> Any:
    """Return the message, or None after one of the decoder's own errors; check the memory."""
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        message = decode(data)
    except errors:
        message = None
    finally:
        peak = tracemalloc.get_traced_memory()[1] - before
        if started:
            tracemalloc.stop()
    assert peak < MEMORY + 64 * len(data), f"{peak} bytes for a message of {len(data)}"
    return message


def _check_message(data: bytes) -> None:
    message = _decoded_within_bounds(wire.decode, (wire.WireError,), data)
    if message is not None:
        # Equal messages are equal as bytes; NaN isn't equal to itself.
        assert wire.encode(wire.decode(wire.encode(message))) == wire.encode(message)


def _check_front_end_message(data: bytes) -> None:
    errors = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
    _decoded_within_bounds(decode_from_front_end, errors, data)


def _front_end_messages() -> list[bytes]:
    (embedded,) = EmbeddingsPrompt(np.ones((2, 3), np.float16)).spans(1, 0, 2)
    submit = Submit(
        number=1,
        id="req-1",
        prompt_column=wire.from_ints([5, 6, 7]),
        embedded=[attrs.evolve(embedded, grid=ImageGrid(start=1, rows=1, columns=2))],
        params=SamplingParams(n=2, stop=("a",), grammar=Grammar("regex", "a+")),
        sampler=SamplerParams(seed=2**64 - 1, stop_ids=[1, 2], bad_words=[[3], [4, 5]]),
        arrived=1.25,
        priority=0,
        cache_salt="salt",
        tenant="key",
        adapter=3,
        default_max_tokens=512,
        retention=Retention(ranges=(RetentionRange(0, 8, 90, 5),), output_priority=3),
    )
    call = RpcCall(1, "watch", [1, {"a": None}, b"x"])
    return [encode(each) for each in (submit, call, RpcReply(2, {"b": 1.5}), Abort([1]), Taken(3))]


_INTEGERS = st.sampled_from((-(2**31), -2, -1, 0, 1, 2, 3, 4, 255, 256, 2**31 - 1))
_COLUMNS = st.one_of(
    st.lists(
        st.sampled_from((-(2**31), -2, -1, 0, 1, 2, 3, 4, 255, 256, 2**31 - 1)), max_size=8
    ).map(wire.from_ints),
    st.lists(st.floats(width=32), max_size=8).map(wire.from_floats),
    st.binary(max_size=9),
)
_COLUMN_NAMES = (
    *("slots", "generations", "offsets", "tokens", "logprobs", "top_offsets", "top_ids"),
    *("top_logprobs", "ids_offsets", "ids_logprobs"),
)
_PIECES = st.builds(
    wire.PromptPiece,
    slot=st.integers(-1, 4),
    start=st.sampled_from((-(2**31), -1, 0, 1, 2, 3, 2**31)),
    logprobs=_COLUMNS,
    ranks=_COLUMNS,
    top_ids=_COLUMNS,
    top_logprobs=_COLUMNS,
    ids_logprobs=_COLUMNS,
)
_TENSORS = st.builds(
    wire.TensorPiece,
    slot=st.integers(-1, 4),
    name=st.sampled_from(("hidden_states", "context_logits", "generation_logits", "")),
    start=st.sampled_from((-(2**31), -1, 0, 1, 2, 3, 2**31)),
    rows=_COLUMNS,
)
_CHANGES = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(_COLUMN_NAMES, _COLUMNS),
        "number": st.integers(0, 3),
        "prompts": st.lists(_PIECES, max_size=3),
        "tensors": st.lists(_TENSORS, max_size=3),
        "step_us": st.sampled_from((-(2**63), -1, 0, 2**63 - 1)),
        "idle_us": st.sampled_from((-(2**63), -1, 0, 2**63 - 1)),
    },
)


def _check_result(changes: dict[str, Any]) -> None:
    """Check that a changed result is refused, or taken with all invariants kept."""
    bench = Bench.make(worker())
    sequences = [
        bench.submit([1, 2, 3], max_tokens=3, logprobs=2, prompt_logprobs=1),
        bench.submit([3], max_tokens=3, logprobs=0, logprob_token_ids=[1, 2]),
        bench.submit([4, 5], max_tokens=3),
        bench.submit([4, 6], max_tokens=3, return_hidden_states="all"),
    ]
    bench.plan()
    result = bench.results[0]
    data = wire.encode(attrs.evolve(result, **changes))
    try:
        outputs = bench.core.on_result(_decoded(data), 0.0)
    except WorkerLost:
        assert all(sequence.output_ids == [] for sequence in sequences)
        outputs = []
    bench.core.check_integrity()
    for output in outputs:
        for entry in output.logprobs or ():
            for token, _, _ in (*entry.top, *entry.asked):
                assert 0 <= token < bench.worker.vocab_size
        assert all(0 <= token < bench.worker.vocab_size for token in output.token_ids)


def _decoded(data: bytes) -> wire.StepResult:
    message = wire.decode(data)
    assert isinstance(message, wire.StepResult)
    return message


TARGETS = (
    Target("message", _check_message, seeds=lambda: [wire.encode(each) for each in MESSAGES]),
    Target("front_end_message", _check_front_end_message, seeds=_front_end_messages),
    Target("step_result", _check_result, _CHANGES),
)
