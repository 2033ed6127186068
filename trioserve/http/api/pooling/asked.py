"""Arguments and usage that the handlers for whole texts share."""

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
    """One request: the id of its answer, and its arguments for the engine."""

    id: str
    timeout: float | None
    arrived: float
    tenant: str
    traceparent: str
    tracestate: str
    created: int = attrs.field(factory=lambda: int(time.time()))

    @classmethod
    def of(cls, service: Service, kind: str, given: str | None, timeout: float | None) -> Asked:
        """Return the arguments of the current request.

        Args:
            service: serves it.
            kind: the prefix of its id.
            given: the client's own id, if there is one.
            timeout: the timeout that it names.
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
        """Return the engine's arguments."""
        return {
            "request_id": self.id,
            "timeout": self.timeout,
            "arrived": self.arrived,
            "tenant": self.tenant,
            "traceparent": self.traceparent,
            "tracestate": self.tracestate,
        }


def check_truncation(request: PoolingRequest) -> int | None:
    """Return the engine's ``truncate_prompt_tokens``.

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
    """Return ``usage`` in the API's form."""
    return TextUsage(usage.prompt_tokens, usage.total_tokens)
