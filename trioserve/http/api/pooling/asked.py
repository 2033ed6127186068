"""What the handlers for texts as a whole share: who asks, until when, and what it used."""

from __future__ import annotations

import time
from typing import Any

import attrs

from trioserve.http.api.pooling.schemas import PoolingRequest, TextUsage
from trioserve.http.api.service import Service
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.generation import Usage


@attrs.frozen(kw_only=True)
class Asked:
    """One request: the name of its answer, and what the engine is to know of it."""

    id: str
    timeout: float | None
    arrived: float
    tenant: str
    traceparent: str
    tracestate: str
    created: int = attrs.field(factory=lambda: int(time.time()))

    @classmethod
    def of(cls, service: Service, kind: str, given: str | None, timeout: float | None) -> Asked:
        """The request being served.

        Args:
            service: serves it.
            kind: what comes before its id.
            given: the client's own id, if there is one.
            timeout: the one that it names.
        """
        record = service.record
        return cls(
            id=f"{kind}-{given or record.request_id}",
            timeout=timeout,
            arrived=record.started,
            tenant=record.tenant,
            traceparent=record.traceparent,
            tracestate=record.tracestate,
        )

    @property
    def options(self) -> dict[str, Any]:
        """The engine's arguments."""
        return {
            "request_id": self.id,
            "timeout": self.timeout,
            "arrived": self.arrived,
            "tenant": self.tenant,
            "traceparent": self.traceparent,
            "tracestate": self.tracestate,
        }


def check_truncation(request: PoolingRequest) -> int | None:
    """The engine's ``truncate_prompt_tokens``.

    Raises:
        InvalidRequest: it is 0, which would leave nothing.
    """
    if request.truncate_prompt_tokens == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens must be at least 1, or -1; got 0",
            param="truncate_prompt_tokens",
        )
    return request.truncate_prompt_tokens


def text_usage(usage: Usage) -> TextUsage:
    """``usage`` in the API's words."""
    return TextUsage(usage.prompt_tokens, usage.total_tokens)
