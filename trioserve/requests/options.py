"""The options of a request, beyond its prompt and its sampling parameters."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import attrs

from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.arguments import check_arguments
from trioserve.requests.retention import Retention


@attrs.frozen(kw_only=True)
class RequestOptions:
    """The options of one request: the arguments of :meth:`trioserve.Engine.generate`.

    Args:
        request_id: a name for logs (default: a random one).
        priority: smaller runs sooner under the priority policy.
        timeout: seconds after which the block is cancelled and ``DeadlineExceeded`` raised
            (default: the option ``default_timeout``); infinity for never.
        arrived: when the request came, on trio's clock: ``timeout`` and the measured times count
            from then (default: now).
        cache_salt: share cached prefixes only with requests of the same salt.
        tenant: the name under which the request's share of the queue counts (default: none).
        retention: how much its KV is worth in the prefix cache once it has ended.
        adapter: the name of a loaded adapter (default: the model as it is).
        prefix_ids: tokens that come before those of the prompt.
        traceparent: the caller's W3C trace context; the request's span becomes its child.
        tracestate: what goes with ``traceparent``.
    """

    request_id: str | None = None
    priority: int = 0
    timeout: float | None = None
    arrived: float | None = None
    cache_salt: str = ""
    tenant: str = ""
    retention: Retention | None = None
    adapter: str = ""
    prefix_ids: Sequence[int] = ()
    traceparent: str = ""
    tracestate: str = ""

    def check(self) -> None:
        """Check the options that would fail in a task, where they would end every request.

        Raises:
            InvalidRequest: one has a wrong type or is out of range; ``param`` names it.
        """
        check_arguments(
            self.priority,
            self.timeout,
            self.arrived,
            request_id=self.request_id or "",
            cache_salt=self.cache_salt,
            tenant=self.tenant,
            adapter=self.adapter,
            traceparent=self.traceparent,
            tracestate=self.tracestate,
        )

    def check_retention(self) -> None:
        """Check the retention.

        Raises:
            InvalidRequest: it has a wrong type.
        """
        if self.retention is not None and not isinstance(self.retention, Retention):
            raise InvalidRequest(
                f"retention must be a Retention, got {self.retention!r}", param="retention"
            )

    def named(self) -> str:
        """Return the request's name, which is random unless one is given."""
        return self.request_id or f"req-{uuid.uuid4().hex}"
