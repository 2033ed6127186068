"""Sampling parameters: ranges hold, and every refusal names its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trioserve.protocol.checks import MAX_IDS
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.sampling import MAX_SEED, SamplerParams, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n", "2"),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("max_tokens", 2**31),
        ("top_k", -2),
        ("top_k", 10**26),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 2),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", [1]),
        ("seed", MAX_SEED + 1),
        ("stop", ["x" * 2000]),
        ("stop", ["x"] * 65),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        pytest.param("stop_token_ids", [0] * (MAX_IDS + 1), id="stop_token_ids-too-many"),
        ("ignore_eos", 1),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs_start", -1),
        ("prompt_logprobs_start", 1),
        ("logprob_token_ids", [1]),
        ("logprob_token_ids", ["a"]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", 7),
        ("bad_words", ["x"] * 257),
        ("bad_words", [7]),
        ("stop_regex", ["x"] * 65),
        ("grammar", '{"type": "object"}'),
        ("extra_args", [1]),
        ("extra_args", {1: 2}),
        ("extra_args", {str(number): 0 for number in range(65)}),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens must be at most max_tokens \(3\)"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_min_tokens_and_a_grammar_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="0 where the output follows a grammar") as caught:
        SamplingParams(grammar=Grammar("regex", "a+"), min_tokens=1)
    assert caught.value.param == "min_tokens"


def test_what_only_makes_sense_with_log_probabilities_is_taken_with_them() -> None:
    params = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=4, logprob_token_ids=[3, 1])
    assert params.logprob_token_ids == (3, 1)
    assert SamplingParams(logprobs=0, logprob_token_ids=[5]).logprob_token_ids == (5,)


def test_stop_and_bias_take_the_forms_that_clients_send() -> None:
    params = SamplingParams(stop="END", logit_bias={"12": 5})
    assert params.stop == ("END",)
    assert params.logit_bias == {12: 5.0}
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop=["", "a"]).stop == ("a",)


def test_a_stop_id_counts_only_from_min_tokens_on() -> None:
    sampler = SamplerParams(stop_ids=[2], min_tokens=3)
    assert not sampler.is_stop(2, 2)
    assert sampler.is_stop(2, 3)
    assert not sampler.is_stop(1, 3)
    assert SamplerParams(stop_ids=[2]).is_stop(2, 1)
