"""Jobs: prompts of an HTTP request with their arguments for the engine."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from trioserve.engine.sessions.continuation import Generate
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.prompts import Prompt
from trioserve.requests.retention import Retention


@attrs.frozen(kw_only=True)
class PromptJob:
    """One prompt, and all of its arguments for the engine."""

    prompt: Prompt
    params: SamplingParams
    request_id: str
    priority: int = 0
    timeout: float | None = None
    arrived: float | None = None
    """Time on trio's clock from which ``timeout`` counts; None for the time of entering."""
    cache_salt: str = ""
    tenant: str = ""
    retention: Retention | None = None
    adapter: str = ""
    """Name of its adapter, empty for none."""
    turn: Generate | None = None
    """Function that generates it in place of the engine, if it is a turn of a session."""
    traceparent: str = ""
    tracestate: str = ""
    renames: Mapping[str, str] = attrs.field(factory=dict)
    """The endpoint's names of fields by the engine's; errors name the client's field."""
