"""The value of ``--speculative-config``, a JSON object."""

from __future__ import annotations

import attrs

from trioserve.config.json_object import parse_json_object
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
    allowed = [field.name for field in attrs.fields(SpeculativeConfig)]
    values = parse_json_object(_OPTION, text, allowed, '{"method": "suffix"}')
    try:
        return SpeculativeConfig(**values)
    except InvalidRequest as error:
        raise InvalidRequest(f"{_OPTION}: {error}", param=_OPTION) from error
