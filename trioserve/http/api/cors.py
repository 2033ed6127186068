"""Which web pages may use the server from a browser: none, unless their origin is allowed.

A browser sends a page's requests to another site, but shows the page no answer without the site's
leave. What a page couldn't have sent as a form, as all JSON, it asks for beforehand (a preflight).
Without an allowed origin no header of this is ever sent, so every browser says no.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

Headers = list[tuple[bytes, bytes]]

ANY = "*"
EXPOSED = b"X-Request-Id, Retry-After"
"""Headers of answers that a page may read beside those that it always may."""
PREFLIGHT_SECONDS = 600
"""For how long a browser needn't ask again."""
_HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(\s*,\s*[\w!#$%&'*+.^`|~-]+)*", re.ASCII)
_MAX_HEADER_NAMES = 2048


class CrossOrigin:
    """Says which headers answers get.

    Args:
        origins: those whose pages are let in, as ``https://example.org``; ``*`` for any.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = ANY in origins
        self._origins = frozenset(origin.lower() for origin in origins)

    def allows(self, origin: str | None) -> bool:
        """Whether a request from a page of ``origin`` is let in; None is no page at all."""
        return origin is not None and (self._any or origin.lower() in self._origins)

    def response_headers(self, origin: str | None) -> Headers:
        """What every answer to a request from ``origin`` says, errors too."""
        headers: Headers = []
        if self._origins and not self._any:
            # Told to all, lest a cache hands one page's answer to another's.
            headers.append((b"Vary", b"Origin"))
        if self.allows(origin):
            assert origin is not None
            headers += [
                (b"Access-Control-Allow-Origin", b"*" if self._any else origin.encode("latin-1")),
                (b"Access-Control-Expose-Headers", EXPOSED),
            ]
        return headers

    def preflight_headers(self, methods: Iterable[str], asked: str) -> dict[str, str]:
        """What the answer to a preflight says besides.

        Args:
            methods: those that the path takes.
            asked: names of headers that the page wants to send; all are fine.
        """
        headers = {
            "Access-Control-Allow-Methods": ", ".join(sorted(methods)),
            "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        }
        if len(asked) <= _MAX_HEADER_NAMES and _HEADER_NAMES.fullmatch(asked):
            headers["Access-Control-Allow-Headers"] = asked
        return headers
