"""Whether a model is to reason, as requests say it and as its chat template is told."""

from __future__ import annotations

from typing import Any

from trioserve.http.api.openai.chat.format import ChatFormat
from trioserve.protocol.errors import InvalidRequest

SWITCHES = ("enable_thinking", "thinking")
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
    switches = {name: wanted for name in SWITCHES if name in format.variables}
    fields: dict[str, Any] = {"chat_template_kwargs": switches} if switches else {}
    return fields if wanted else {**fields, "include_reasoning": False}


def no_effort_arguments(format: ChatFormat) -> dict[str, Any] | None:
    """Return what tells a template that ``reasoning_effort`` is ``none``.

    Switches of the template are turned off, too. A model that never reasons needs to be told
    nothing. None says that the model reasons and can't be told not to.
    """
    arguments: dict[str, Any] = {name: False for name in SWITCHES if name in format.variables}
    if "reasoning_effort" in format.variables:
        arguments["reasoning_effort"] = "none"
    return arguments if arguments or not format.reasons else None
