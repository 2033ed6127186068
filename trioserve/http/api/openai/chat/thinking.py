"""Switching reasoning on and off, from requests to the chat template."""

from __future__ import annotations

from typing import Any

from trioserve.http.api.openai.chat.format import ChatFormat
from trioserve.protocol.errors import InvalidRequest

SWITCHES = ("enable_thinking", "thinking")
"""Names of the template's argument that switches reasoning."""


def thinking_fields(wanted: bool | None, format: ChatFormat, param: str) -> dict[str, Any]:
    """Return the fields of a chat request that ask for reasoning or for none.

    A template without a switch always decides by itself. Unwanted reasoning is then left out of the
    answer.

    Args:
        wanted: None to leave the decision to the template.
        param: the field that asks for it.

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
    switches = {name: wanted for name in SWITCHES if name in format.variables}
    fields: dict[str, Any] = {"chat_template_kwargs": switches} if switches else {}
    return fields if wanted else {**fields, "include_reasoning": False}


def no_effort_arguments(format: ChatFormat) -> dict[str, Any] | None:
    """Return the template's arguments for a ``reasoning_effort`` of ``none``.

    Switches of the template are turned off, too. A model that never reasons needs no arguments. The
    result None means that the model reasons and can't be told not to.
    """
    arguments: dict[str, Any] = {name: False for name in SWITCHES if name in format.variables}
    if "reasoning_effort" in format.variables:
        arguments["reasoning_effort"] = "none"
    return arguments if arguments or not format.reasons else None
