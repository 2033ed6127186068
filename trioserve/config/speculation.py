"""The value of ``--speculative-config``, a JSON object."""

from __future__ import annotations

import json

import attrs

from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.speculation import SpeculativeConfig

_OPTION = "speculative_config"


def parse_speculative(text: str | None) -> SpeculativeConfig | None:
    """Return the option's value; None without text.

    Raises:
        InvalidRequest: The text isn't a JSON object, or a field isn't allowed.
    """
    if text is None:
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidRequest(
            f'{_OPTION} must be a JSON object, as in {{"method": "suffix"}}; got {text!r}',
            param=_OPTION,
        )
    allowed = [field.name for field in attrs.fields(SpeculativeConfig)]
    unknown = sorted(set(values) - set(allowed))
    if unknown:
        raise InvalidRequest(
            f"{_OPTION} has {', '.join(unknown)}; it takes {', '.join(allowed)}", param=_OPTION
        )
    try:
        return SpeculativeConfig(**values)
    except InvalidRequest as error:
        raise InvalidRequest(f"{_OPTION}: {error}", param=_OPTION) from error
