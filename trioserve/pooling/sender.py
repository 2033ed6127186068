"""The sender of a pooling request, and its deadline."""

from __future__ import annotations

import uuid

import attrs

from trioserve.requests.arguments import check_arguments


@attrs.frozen(kw_only=True)
class EncodeArguments:
    """The arguments that every pooling request has: those of :meth:`trioserve.Engine.embed`.

    ``id`` is random if none is given.
    """

    request_id: str | None = None
    timeout: float | None = None
    arrived: float | None = None
    tenant: str = ""
    traceparent: str = ""
    tracestate: str = ""
    id: str = attrs.field(init=False)

    @id.default
    def _make_id(self) -> str:
        return self.request_id or f"req-{uuid.uuid4().hex}"

    def check(self, **texts: str) -> None:
        """Check the arguments, and further ``texts`` by name.

        Raises:
            InvalidRequest: An argument is invalid; ``param`` names it.
        """
        check_arguments(
            0,
            self.timeout,
            self.arrived,
            request_id=self.request_id or "",
            tenant=self.tenant,
            traceparent=self.traceparent,
            tracestate=self.tracestate,
            **texts,
        )
