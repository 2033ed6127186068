"""Reasons of refused fields are true: what they deny isn't there, and what they point to is."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable

import attrs
import pytest

from gpu.weights.packed_modules import PACKED_MODULES
from trioserve.config import EngineConfig, ServerConfig
from trioserve.config.options import options_of
from trioserve.http.api.routes import served_routes
from trioserve.http.api.schema.reading import struct_classes
from trioserve.model_files import ModelConfig
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.request import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from trioserve.requests.stream import TokenLogprob

ROUTES = served_routes(ServerConfig(engine=EngineConfig("m")))
RULES = {rule for route in ROUTES for rule in route.rules}
FLAGS = {option.flag for cls in (EngineConfig, ServerConfig) for option in options_of(cls)}
REQUESTS = struct_classes([type_ for route in ROUTES for type_ in (route.request, route.query)])
ANSWERS = struct_classes([type_ for route in ROUTES for type_ in (route.response, route.events)])


def refused(cls: type) -> dict[str, str]:
    """Return the fields of a class that are known and not served, with the reasons."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        name: meta.extra["why"]
        for name, annotation in hints.items()
        for meta in getattr(annotation, "__metadata__", ())
        if getattr(meta, "extra", None) and "only" in meta.extra
    }


REASONS = sorted({why for cls in REQUESTS for why in refused(cls).values()})


def told(part: str) -> bool:
    """Return whether an answer has a field with ``part`` in its name."""
    return any(part in name for cls in ANSWERS for name in cls.__struct_fields__)


def sampled(part: str) -> bool:
    """Return whether a sampling parameter has ``part`` in its name."""
    return any(part in field.name for field in attrs.fields(SamplingParams))


def option(part: str) -> bool:
    return any(part in flag for flag in FLAGS)


def route(part: str) -> bool:
    return any(part in rule for rule in RULES)


CAN: dict[str, Callable[[], bool]] = {
    "the experts that computed a token aren't reported": lambda: told("routed_experts"),
    "adapters of experts aren't served": lambda: any("expert" in part for part in PACKED_MODULES),
    "read text only": lambda: (
        set(typing.get_args(Prompt)) != {TextPrompt, TokensPrompt, ChatPrompt}
    ),
    "read and write text only": lambda: told("modalities"),
    "beam search isn't implemented": lambda: sampled("beam"),
    "there is one worker": lambda: option("parallel-size"),
    "aren't computed by one worker and continued by another": lambda: option("disaggregation"),
    "every step's tokens are sent as they come": lambda: option("stream-interval"),
    "reasoning isn't cut off": lambda: sampled("thinking"),
    "outputs aren't searched for repetitions": lambda: sampled("repetition_detection"),
    "the entropy of a distribution isn't computed": lambda: hasattr(TokenLogprob, "entropy"),
    "hidden states stay in the worker": lambda: told("hidden_states"),
    "they stay in the worker": lambda: told("hidden_states"),
    "which tokens were left to draw from isn't kept": lambda: told("sampling_mask"),
    "there is no moderation": lambda: route("moderations"),
    "there are no conversations beside responses": lambda: route("/v1/conversations"),
    "outputs aren't predicted": lambda: option("speculative"),
    "no model with sparse attention": lambda: any(
        "indexer" in field.name for field in attrs.fields(ModelConfig)
    ),
    "see n and, for completions, best_of": lambda: not sampled("n"),
}
"""Checks that the code can do a thing after all, by the reason that denies it."""


@pytest.mark.parametrize("claim", CAN)
def test_what_a_reason_denies_is_not_there(claim: str) -> None:
    assert any(claim in why for why in REASONS), "no reason says so any more"
    assert not CAN[claim]()


def test_no_reason_denies_models_that_are_served() -> None:
    """Deny no kind of model that is served; the reason about experts was false for long."""
    assert any("experts" in field.name for field in attrs.fields(ModelConfig))
    denied = [why for why in REASONS if "no model" in why or "the models that are served" in why]
    assert [why for why in denied if not any(claim in why for claim in CAN)] == []


@pytest.mark.parametrize("why", REASONS)
def test_what_a_reason_points_to_is_there(why: str) -> None:
    for flag in re.findall(r"--[a-z-]+", why):
        assert flag in FLAGS
    for path in re.findall(r"(?<![\w}])/[a-z_/0-9]+[a-z_]", why):
        assert path == "/dev/shm" or any(rule.startswith(path) for rule in RULES), path
    for name in re.findall(r"(?:see|give) ([a-z]+_[a-z_]+)", why):
        served = [cls for cls in REQUESTS if name in cls.__struct_fields__]
        assert any(name not in refused(cls) for cls in served), name
