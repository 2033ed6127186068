"""The table of states: what may follow what, and what a rejection does."""

from __future__ import annotations

import itertools

import pytest

from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.prompts import TokensPrompt
from trioserve.requests.request import TRANSITIONS, FinishReason, Request, Sequence, State, Times
from trioserve.requests.stream import Stream, StreamBudget


def make_request() -> Request:
    request = Request(
        id="r",
        prompt=TokensPrompt((1, 2)),
        params=SamplingParams(),
        stream=Stream(StreamBudget(1024, 1024)),
        times=Times(arrived=0.0),
    )
    request.sequences.append(Sequence(request=request, sampler=SamplerParams()))
    return request


def test_every_state_is_in_the_table_and_all_but_the_last_can_finish() -> None:
    assert set(TRANSITIONS) == set(State)
    for state in set(State) - {State.FINISHED}:
        assert State.FINISHED in TRANSITIONS[state]


def test_every_state_can_be_reached() -> None:
    reached = {State.CREATED}
    while new := set().union(*(TRANSITIONS[state] for state in reached)) - reached:
        reached |= new
    assert reached == set(State)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(State, State)))
def test_only_the_table_s_transitions_happen(old: State, new: State) -> None:
    sequence = make_request().sequences[0]
    sequence.state = old
    if new in TRANSITIONS[old]:
        sequence.move_to(new)
        assert sequence.state is new
    else:
        with pytest.raises(AssertionError):
            sequence.move_to(new)


def test_a_rejection_finishes_every_sequence_and_lets_the_caller_go() -> None:
    request = make_request()
    error = InvalidRequest("too long")
    request.reject(error)
    assert request.admitted.is_set()
    assert request.rejection is error
    assert request.sequences[0].state is State.FINISHED
    assert request.sequences[0].finish is not None
    assert request.sequences[0].finish.reason is FinishReason.ERROR


def test_a_request_that_was_admitted_can_no_longer_be_rejected() -> None:
    request = make_request()
    request.admit()
    request.reject(InvalidRequest("too late"))
    assert request.rejection is None
    assert request.sequences[0].state is State.CREATED
