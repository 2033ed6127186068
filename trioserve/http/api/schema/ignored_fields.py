"""Ignoring of unserved fields, if the server is told to.

A request is refused for one field after the other, so it is parsed again without each field until
it is accepted. The number of attempts and the number of remembered names are bounded.
"""

from __future__ import annotations

import re
from typing import Any

import attrs

from trioserve.observability.logs import get_logger

MAX_IGNORED = 32
"""Fields of one request that are ignored; the next one is refused."""

_MAX_NOTED = 256
"""Names that are remembered as logged; more aren't logged."""
_MAX_SHOWN_CHARACTERS = 100

_log = get_logger("trioserve.http")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[\d+\]")


@attrs.define(eq=False)
class IgnoredFields:
    """Names of ignored fields, each of which is logged once."""

    _noted: set[str] = attrs.field(factory=set)

    def note(self, param: str) -> None:
        """Log that the field ``param`` is ignored, the first time."""
        name = re.sub(r"\[\d+\]", "[]", param)[:_MAX_SHOWN_CHARACTERS]
        if name not in self._noted and len(self._noted) < _MAX_NOTED:
            self._noted.add(name)
            _log.warning("field ignored", field=name, see="--ignore-unknown-fields")


def without_field(value: Any, param: str) -> bool:
    """Take the field ``param`` out of a request's JSON; return whether it was there.

    Items of a list are alike: ``messages[3].name`` is taken out of all messages.
    """
    steps = [match[1] for match in _STEP.finditer(param)]
    if "".join(match[0] for match in _STEP.finditer(param)) != param or not steps or not steps[-1]:
        return False
    holders = [value]
    for name in steps[:-1]:
        if name is None:
            holders = [item for each in holders if isinstance(each, list) for item in each]
        else:
            holders = [each[name] for each in holders if isinstance(each, dict) and name in each]
    found = [each for each in holders if isinstance(each, dict) and steps[-1] in each]
    for each in found:
        del each[steps[-1]]
    return bool(found)
