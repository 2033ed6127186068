"""The value of ``--override-generation-config``, a JSON object."""

from __future__ import annotations

from typing import Any

from trioserve.config.json_object import parse_json_object
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.sampling import GENERATION_CONFIG_FIELDS, SamplingParams

_OPTION = "override_generation_config"
_LENGTH = "max_new_tokens"


def parse_override(text: str | None) -> dict[str, Any]:
    """Return the option's values, by names of generation_config.json; none without text.

    Raises:
        InvalidRequest: The text isn't a JSON object, or a value isn't allowed.
    """
    if text is None:
        return {}
    allowed = (*GENERATION_CONFIG_FIELDS, _LENGTH)
    values = parse_json_object(_OPTION, text, allowed, '{"temperature": 0.5}')
    _check({name: value for name, value in values.items() if value is not None})
    return values


def _check(given: dict[str, Any]) -> None:
    length = given.pop(_LENGTH, 1)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise InvalidRequest(
            f"{_OPTION}: {_LENGTH} must be an integer of at least 1, got {length!r}", param=_OPTION
        )
    try:
        SamplingParams(**given)
    except InvalidRequest as error:
        raise InvalidRequest(f"{_OPTION}: {error}", param=_OPTION) from error
