"""Messages between front ends and the engine process arrive as they were sent."""

from __future__ import annotations

import math

import attrs
import msgspec
import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scheduling import make_request
from trioserve import EngineConfig, Grammar, SamplingParams, ServerConfig
from trioserve.front_ends.clock import SharedClock
from trioserve.front_ends.coalesce import merged
from trioserve.front_ends.messages import (
    Abort,
    Entry,
    FrontEndStart,
    GivenRows,
    Prompt,
    RpcCall,
    RpcReply,
    SchedulerUpdate,
    SequenceEnd,
    StepRow,
    StepUpdate,
    Submit,
    decode_from_engine,
    decode_from_front_end,
    encode,
    entries_of,
    numbers_of,
    packed,
    plain_entries,
)
from trioserve.front_ends.wire_errors import ErrorMessage, error_of, fault_of
from trioserve.observability.metrics import Metrics
from trioserve.observability.metrics.snapshot import MetricsSnapshot, add_up, filled, snapshot_of
from trioserve.protocol import errors, wire
from trioserve.protocol.embeddings import ImageGrid
from trioserve.protocol.errors import (
    ContextTooLong,
    EngineError,
    InvalidRequest,
    ModelLoadError,
    QueueFull,
    TrioserveError,
    WorkerLost,
)
from trioserve.protocol.sampling import SamplerParams
from trioserve.requests.adapters import Adapter
from trioserve.requests.embedded import EmbeddingsPrompt
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.request import Finish, FinishReason, Request
from trioserve.requests.retention import Retention, RetentionRange
from trioserve.testing import FakeWorker
from trioserve.testing.fake_model import prompt_piece

numbers = st.integers(0, 2**62)
tokens = st.integers(0, 2**31 - 1)
floats = st.floats(allow_nan=False, width=32)
triples = st.lists(st.tuples(tokens, floats, st.just("")), max_size=3).map(tuple)
entries = st.tuples(tokens, floats, triples, triples)
faults = st.builds(ErrorMessage, st.sampled_from(["QueueFull", "EngineError"]), st.text(max_size=9))
endings = st.builds(
    SequenceEnd,
    st.sampled_from([each.value for each in FinishReason]),
    st.none() | tokens | st.text(max_size=5),
    st.none() | faults,
    st.none() | floats,
    st.none() | floats,
    st.binary(max_size=8),
    tokens,
    tokens,
)


@st.composite
def steps(draw: st.DrawFn) -> StepUpdate:
    """Draw a step of up to ten sequences, some of which got just a token."""
    involved = draw(st.lists(st.integers(0, 12), unique=True, max_size=10))
    plain = [number for number in involved if draw(st.booleans())]
    rows = []
    for number in involved:
        if number not in plain:
            given_tokens = draw(st.lists(tokens, max_size=3).map(tuple))
            logprobs: tuple[Entry, ...] | None = None
            if draw(st.booleans()):
                logprobs = tuple(draw(entries) for _ in given_tokens)
            rows.append(StepRow(number, given_tokens, logprobs, draw(st.none() | endings)))
    return StepUpdate(draw(floats), packed(plain), packed(draw(tokens) for _ in plain), rows)


@given(
    step=st.none() | steps(),
    queue=st.tuples(numbers, numbers),
    admitted=st.lists(st.tuples(numbers, floats), max_size=3),
    rejected=st.lists(st.tuples(numbers, faults), max_size=3),
    moves=st.lists(st.tuples(numbers, st.integers(0, 6)), max_size=3),
    scheduled=st.lists(st.tuples(numbers, floats, numbers), max_size=3),
)
def test_an_update_survives(
    step: StepUpdate | None,
    queue: tuple[int, int],
    admitted: list[tuple[int, float]],
    rejected: list[tuple[int, ErrorMessage]],
    moves: list[tuple[int, int]],
    scheduled: list[tuple[int, float, int]],
) -> None:
    piece = wire.PromptPiece(slot=0, start=1, logprobs=b"1234", ranks=b"5678")
    rows = wire.TensorPiece(slot=0, name="hidden_states", start=3, rows=b"1234")
    update = SchedulerUpdate(
        queue=queue,
        admitted=admitted,
        rejected=rejected,
        moves=moves,
        scheduled=scheduled,
        prompts=[Prompt(7, 1, 2, (3, 4), [piece])],
        tensors=[GivenRows(7, 1, rows)],
        step=step,
    )
    assert decode_from_engine(encode(update)) == update


@given(
    params=st.builds(
        SamplingParams,
        n=st.integers(1, 9),
        max_tokens=st.none() | st.integers(0, 10**6),
        temperature=st.floats(0, 10),
        stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
        stop_token_ids=st.lists(tokens, max_size=3),
        logit_bias=st.dictionaries(tokens, st.floats(-9, 9), max_size=3),
        logprobs=st.none() | st.integers(0, 20),
        allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=3),
        grammar=st.none() | st.builds(Grammar, st.just("regex"), st.text(min_size=1, max_size=5)),
        extra_args=st.dictionaries(st.text(max_size=3), st.none() | st.text(max_size=3)),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    ),
    prompt_ids=st.lists(tokens, max_size=20),
    number=numbers,
)
def test_a_request_survives(params: SamplingParams, prompt_ids: list[int], number: int) -> None:
    spans = EmbeddingsPrompt(np.ones((20, 3), np.float16)).spans(2, 0, 20)
    grid = ImageGrid(start=2, rows=1, columns=2, frames=8, interval=0.5)
    submit = Submit(
        number=number,
        id="req-1",
        prompt_column=wire.from_ints(prompt_ids),
        embedded=[attrs.evolve(spans[0], grid=grid, is_together=True), *spans[1:]],
        params=params,
        sampler=SamplerParams(seed=2**64 - 1, stop_ids=[1, 2], bad_words=[[3], [4, 5]]),
        arrived=1.25,
        priority=-(2**40),
        cache_salt="salt",
        tenant="key",
        adapter=3,
        default_max_tokens=512,
        retention=Retention(ranges=(RetentionRange(0, 8, 90, 5),), output_priority=3),
    )
    there = decode_from_front_end(encode(submit))
    assert there == submit
    assert isinstance(there, Submit)
    assert isinstance(there.params.stop, tuple)
    assert wire.ints(there.prompt_column).tolist() == prompt_ids


def test_whatever_a_request_says_travels_or_is_of_no_use_to_the_scheduler() -> None:
    """Check that each field is sent, or named here."""
    stays = {
        *("prompt", "stream", "times", "traceparent", "tracestate", "max_prompt_tokens"),
        *("fewest_tokens", "sequences", "admitted", "on_tokenized", "on_admitted", "rejection"),
        *("prompt_ids", "scheduler", "cache_ids", "cache_column"),
        *("prompt_logprobs", "tensors", "vector"),
        *("num_cached_tokens", "prefix_ids", "num_virtual_tokens", "spare_sequences"),
        "beams",
        "num_moves",
        *("num_cached_when_placed", "coming", "hands_over"),
    }
    travels = {*Submit.__struct_fields__} - {"number", "sampler", "arrived"}
    assert {field.alias for field in attrs.fields(Request)} - stays == travels


def test_all_options_reach_a_front_end() -> None:
    config = ServerConfig(
        engine=EngineConfig("model", seed=3, logits_processors=("a:B",), default_timeout=2.5),
        api_key=("secret",),
        api_server_count=4,
        ssl_certfile="certificate.pem",
    )
    start = FrontEndStart(
        index=1,
        count=4,
        config=config,
        name="x",
        path="/x",
        files={"config.json of MODEL": "0"},
        ready=FakeWorker().ready(),
        sockets=[3, 5],
        adapters=[Adapter(number=2, name="a", path="/a")],
    )
    assert decode_from_engine(encode(start)) == start


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", encode(Abort([1]))[:-1], msgspec.msgpack.encode(["SchedulerUpdate", 1])],
    ids=["empty", "no message", "cut off", "of another shape"],
)
def test_nonsense_is_named_as_such(data: bytes) -> None:
    for decode in (decode_from_engine, decode_from_front_end):
        with pytest.raises(msgspec.MsgspecError):
            decode(data)


def test_questions_hold_whatever_messagepack_does() -> None:
    for message in (RpcCall(1, "call", ["name", {"a": [1, None, b"x"]}]), RpcReply(2, {"b": 1.5})):
        assert decode_from_engine(encode(message)) == message
        assert decode_from_front_end(encode(message)) == message


# ---- merging

Given = dict[int, tuple[list[int], list[Entry], SequenceEnd | None]]


def given_by(parts: list[StepUpdate]) -> Given:
    """Return the tokens, log-probabilities and end of each sequence, one step at a time."""
    given: Given = {}
    for step in parts:
        for number, token in zip(numbers_of(step.numbers), numbers_of(step.tokens), strict=True):
            given.setdefault(number, ([], [], None))[0].append(token)
        for row in step.rows:
            tokens_so_far, logprobs, _ = given.setdefault(row.number, ([], [], None))
            tokens_so_far.extend(row.tokens)
            logprobs.extend(row.logprobs or ())
            given[row.number] = (tokens_so_far, logprobs, row.ending)
    return given


@given(st.lists(steps(), min_size=1, max_size=5))
def test_several_steps_as_one_give_the_same(parts: list[StepUpdate]) -> None:
    together = merged(parts)
    assert given_by([together]) == given_by(parts)
    involved = [*numbers_of(together.numbers), *(row.number for row in together.rows)]
    assert len(involved) == len(set(involved))
    assert together.time == parts[-1].time


# ---- errors, times, log-probabilities


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("no", param="n", code="c"),
        ContextTooLong("too long", param="prompt"),
        QueueFull("full", retry_after=7),
        EngineError("failed"),
        ModelLoadError("can't be\nread"),
        WorkerLost("died", from_outside=True),
    ],
)
def test_an_error_of_ours_is_the_same_on_the_other_side(error: TrioserveError) -> None:
    there = error_of(msgspec.convert(msgspec.to_builtins(fault_of(error)), ErrorMessage))
    assert type(there) is type(error)
    assert (str(there), vars(there)) == (str(error), vars(error))


def test_every_error_of_ours_can_travel() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert len(kinds) > 10
    for kind in kinds:
        assert type(error_of(fault_of(kind("why")))) is kind


def test_any_other_error_is_the_engines() -> None:
    class Own(QueueFull):
        pass

    assert error_of(fault_of(ZeroDivisionError("by zero"))).args == ("ZeroDivisionError: by zero",)
    assert type(error_of(fault_of(Own("full")))) is QueueFull
    assert type(error_of(ErrorMessage("FromTheFuture", "x"))) is EngineError


def test_an_ending_is_the_finish_it_tells_of() -> None:
    finish = Finish(FinishReason.STOP, stop_reason=7)
    request = make_request([1, 2], max_tokens=3)
    (sequence,) = request.sequences
    sequence.num_draft_tokens, sequence.num_accepted_drafts = 7, 3
    ending = SequenceEnd.of(finish, None, 1.0, 2.0, sequence)
    assert ending.finish(None) == finish
    assert (ending.num_draft_tokens, ending.num_accepted_drafts) == (7, 3)


async def test_times_go_there_and_back(autojump_clock: trio.testing.MockClock) -> None:
    clock = SharedClock.now()
    await trio.sleep(3)
    now = trio.current_time()
    assert math.isclose(clock.own(clock.shared(now)), now, abs_tol=1e-6)


def test_log_probabilities_of_a_prompt_go_there_and_back() -> None:
    prompt = list(range(40, 60))
    sampler = SamplerParams(prompt_logprobs=2, logprob_token_ids=[5, 6])
    here = PromptLogprobs(1, 2, (5, 6))
    for start, stop in ((1, 8), (8, 20)):
        here.add(prompt_piece(3, prompt, start, stop, sampler, 256))
    there = PromptLogprobs(here.start, here.num_top, here.token_ids)
    for piece in here.pieces():
        there.add(piece)
    assert there.entries(prompt) == here.entries(prompt)
    assert len(there.entries(prompt)) == 19


def test_entries_get_their_texts_later() -> None:
    given_entries: tuple[Entry, ...] = ((3, -0.5, ((3, -0.5, ""), (4, -1.5, "")), ()),)
    assert plain_entries(entries_of(given_entries)) == given_entries


# ---- counts


def counted(times: int) -> Metrics:
    metrics = Metrics("m")
    for _ in range(times):
        metrics.observe_response("GET", "/health", 200)
        metrics.observe_error("queue_full")
        metrics.observe_step(times)
        metrics.observe_grammar("regex", "ok", 0.5)
        metrics.generation_tokens += 2
        metrics.loop_lag.observe(times / 10)
    metrics.watch_connections(range(times))
    return metrics


def test_sums_of_counts_are_what_one_process_would_have_counted() -> None:
    parts = [snapshot_of(counted(2)), snapshot_of(counted(3))]
    sent = [msgspec.convert(msgspec.to_builtins(each), MetricsSnapshot) for each in parts]
    assert sent == parts
    whole = filled(add_up(sent), model_name="m", prefix="p")
    assert whole.http_responses == {("GET", "/health", 200): 5}
    assert whole.http_errors["queue_full"] == 5
    assert whole.grammars == {("regex", "ok"): 5}
    assert whole.generation_tokens == 10
    assert whole.iteration_tokens.total == 2 * 2 + 3 * 3
    assert sum(whole.iteration_tokens.counts) == 5
    assert (whole.loop_lag.peak, sum(whole.loop_lag.histogram.counts)) == (0.3, 5)
    assert len(whole.connections) == 5
    assert whole.prefix == "p"


def test_what_a_process_had_counted_outlasts_it() -> None:
    gone = snapshot_of(counted(2)).lasting
    whole = filled(add_up([gone, snapshot_of(counted(1))]), model_name="m", prefix="p")
    assert whole.generation_tokens == 6
    assert (len(whole.connections), whole.loop_lag.peak) == (1, 0.1)


def test_nothing_that_is_counted_is_left_out() -> None:
    metrics = Metrics("m")
    snapshot = snapshot_of(metrics)
    summed = {*snapshot.numbers, *snapshot.counters, *snapshot.histograms}
    others = {name for name in vars(metrics) if name not in summed}
    assert others == {
        "model_name",
        "prefix",
        "connections",
        "registry",
        "watched",
        "_interrupted_at",
    }
