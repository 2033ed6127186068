"""``--speculative-config``: what it takes, and errors that name the field and the limit."""

from __future__ import annotations

import pytest

from trioserve import EngineConfig, InvalidRequest
from trioserve.config.speculation import parse_speculative
from trioserve.protocol.speculation import SpeculativeConfig


def test_fields_and_defaults() -> None:
    assert parse_speculative(None) is None
    assert parse_speculative("{}") == SpeculativeConfig(method="suffix", num_speculative_tokens=15)
    given = parse_speculative('{"method": "ngram", "prompt_lookup_max": 3}')
    assert given == SpeculativeConfig(method="ngram", prompt_lookup_max=3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("suffix", "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ('{"size": 3}', "has size; it takes method, num_speculative_tokens"),
        ('{"method": "eagle"}', "method must be one of suffix, ngram, draft_model, got 'eagle'"),
        ('{"model": "other"}', "model must be left out without draft_model, got 'other'"),
        ('{"quantization": "int4"}', "quantization must be left out without draft_model"),
        ('{"quantization": "q4"}', "quantization must be one of auto, none, int8, int4, w8a8"),
        ('{"method": "draft_model"}', "model must be a model, got ''"),
        ('{"method": "draft_model", "model": 3}', "model must be a string"),
        (
            '{"num_speculative_tokens": 32}',
            "num_speculative_tokens must be an integer from 1 to 31",
        ),
        ('{"adaptive": 1}', "adaptive must be true or false"),
        ('{"prompt_lookup_min": 6}', "prompt_lookup_max must be at least prompt_lookup_min"),
    ],
)
def test_what_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        EngineConfig("model", speculative_config=text)
    assert refused.value.param == "speculative_config"
