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
from trioserve.http.api.schema.refused_fields import Refusal
from trioserve.model_files import ModelConfig
from trioserve.protocol.sampling import SamplingParams
from trioserve.protocol.wire import OpenSlot
from trioserve.requests.embedded import EmbeddingsPrompt, SpeechPrompt
from trioserve.requests.prompts import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from trioserve.requests.stream import TokenLogprob

ROUTES = served_routes(ServerConfig(engine=EngineConfig("m")))
RULES = {rule for route in ROUTES for rule in route.rules}
FLAGS = {option.flag for cls in (EngineConfig, ServerConfig) for option in options_of(cls)}
REQUESTS = struct_classes([type_ for route in ROUTES for type_ in (route.request, route.query)])
ANSWERS = struct_classes([type_ for route in ROUTES for type_ in (route.response, route.events)])


def refused(cls: type) -> dict[str, Refusal | None]:
    """Return the fields of a class that are known and not served, with the reasons."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        name: meta.extra["refusal"]
        for name, annotation in hints.items()
        for meta in getattr(annotation, "__metadata__", ())
        if getattr(meta, "extra", None) and "only" in meta.extra
    }


REFUSED = {refusal for cls in REQUESTS for refusal in refused(cls).values()}


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


CAN: dict[Refusal, Callable[[], bool]] = {
    Refusal.ROUTED_EXPERTS: lambda: told("routed_experts"),
    Refusal.EXPERT_ADAPTERS: lambda: any("expert" in part for part in PACKED_MODULES),
    Refusal.READING_MEDIA: lambda: (
        set(typing.get_args(Prompt))
        != {TextPrompt, TokensPrompt, ChatPrompt, EmbeddingsPrompt, SpeechPrompt}
    ),
    Refusal.MEDIA: lambda: told("modalities"),
    Refusal.DISAGGREGATION: lambda: not option("disaggregation"),
    Refusal.STREAM_INTERVALS: lambda: option("stream-interval"),
    Refusal.REASONING_BUDGETS: lambda: sampled("thinking"),
    Refusal.REPETITION_DETECTION: lambda: sampled("repetition_detection"),
    Refusal.ENTROPY: lambda: hasattr(TokenLogprob, "entropy"),
    Refusal.SAMPLING_MASKS: lambda: told("sampling_mask"),
    Refusal.MODERATION: lambda: route("moderations"),
    Refusal.CONVERSATIONS: lambda: route("/v1/conversations"),
    Refusal.DRAFT_CORPORA: lambda: any("corpus" in field.name for field in attrs.fields(OpenSlot)),
    Refusal.SPARSE_ATTENTION: lambda: any(
        "indexer" in field.name for field in attrs.fields(ModelConfig)
    ),
}
"""Checks that the server has a capability after all, by the refusals that deny it."""


def test_every_refused_field_is_in_the_table() -> None:
    """Use every reason of the table, and no other one."""
    assert set(Refusal) == REFUSED


@pytest.mark.parametrize("refusal", CAN)
def test_what_a_reason_denies_is_not_there(refusal: Refusal) -> None:
    assert not CAN[refusal]()


def test_no_reason_denies_models_that_are_served() -> None:
    """Deny no kind of model that is served; the reason about experts was false for long."""
    assert any("experts" in field.name for field in attrs.fields(ModelConfig))
    denied = [
        refusal
        for refusal in Refusal
        if "no model" in refusal.value or "the models that are served" in refusal.value
    ]
    assert [refusal for refusal in denied if refusal not in CAN] == []


@pytest.mark.parametrize("refusal", Refusal)
def test_what_a_reason_points_to_is_there(refusal: Refusal) -> None:
    why = refusal.value
    for flag in re.findall(r"--[a-z-]+", why):
        assert flag in FLAGS
    for path in re.findall(r"(?<![\w}])/[a-z_/0-9]+[a-z_]", why):
        assert path == "/dev/shm" or any(rule.startswith(path) for rule in RULES), path
    for name in re.findall(r"(?:see|give) ([a-z]+_[a-z_]+)", why):
        served = [cls for cls in REQUESTS if name in cls.__struct_fields__]
        assert any(name not in refused(cls) for cls in served), name
