"""An option's value that is a JSON object of known fields."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from trioserve.protocol.errors import InvalidRequest


def parse_json_object(
    option: str, text: str, allowed: Collection[str] | None, example: str
) -> dict[str, Any]:
    """Return the fields in ``text``; an error shows ``example``.

    Args:
        option: Name of the option.
        text: JSON.
        allowed: Fields that it may have, None for any.
        example: A value.

    Raises:
        InvalidRequest: The text isn't a JSON object, or has another field.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidRequest(
            f"{option} must be a JSON object, as in {example}; got {text!r}", param=option
        )
    if allowed is None:
        return values
    unknown = sorted(set(values) - set(allowed))
    if unknown:
        raise InvalidRequest(
            f"{option} has {', '.join(unknown)}; it takes {', '.join(allowed)}", param=option
        )
    return values
