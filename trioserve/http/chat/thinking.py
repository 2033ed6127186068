"""Whether a model is to reason, for dialects that have a field for it: told to its template."""

from __future__ import annotations

from typing import Any

from trioserve.errors import InvalidRequest
from trioserve.http.chat.format import ChatFormat

__all__ = ["thinking_fields"]

_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the argument that says so."""


def thinking_fields(wanted: bool | None, format: ChatFormat, param: str) -> dict[str, Any]:
    """The fields of a chat request that ask for reasoning or for none.

    A template without a switch reasons as it does: reasoning that isn't wanted is left out of the
    answer then.

    Args:
        wanted: None for whatever the template does by itself.
        param: what asks for it.

    Raises:
        InvalidRequest: reasoning is wanted of a model that never does.
    """
    if wanted and not format.reasons:
        raise InvalidRequest(
            f"{param} isn't served: this model doesn't reason (--reasoning-parser)",
            param=param,
            code="unsupported_parameter",
        )
    if wanted is None:
        return {}
    switches = {name: wanted for name in _SWITCHES if name in format.variables}
    fields: dict[str, Any] = {"chat_template_kwargs": switches} if switches else {}
    return fields if wanted else {**fields, "include_reasoning": False}
