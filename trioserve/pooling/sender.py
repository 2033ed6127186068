"""Who asks for what is said of texts as a whole, and until when."""

from __future__ import annotations

import uuid

import attrs

from trioserve.requests.arguments import check_arguments


@attrs.frozen(kw_only=True)
class EncodeArguments:
    """The arguments that every request for texts has: those of :meth:`trioserve.Engine.embed`.

    ``id`` is a random one where none is given.
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
        """Refuse arguments that can't be right, and ``texts`` that are none.

        Raises:
            InvalidRequest: there is one; ``param`` names it.
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
