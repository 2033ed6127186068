"""Cross-origin rules: web pages may use the server from a browser only if their origin is allowed.

A browser sends a page's requests to another site, but hides the answer from the page unless the
site allows it. For requests that a page couldn't send as a form, such as all JSON, it asks
beforehand (a preflight). Without an allowed origin none of these headers is ever sent, so every
browser refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

Headers = list[tuple[bytes, bytes]]

ANY = "*"
EXPOSED = b"X-Request-Id, Retry-After"
"""Headers of answers that a page may read in addition to those always allowed."""
PREFLIGHT_SECONDS = 600
"""Seconds for which a browser may reuse the answer to a preflight."""
_HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(\s*,\s*[\w!#$%&'*+.^`|~-]+)*", re.ASCII)
_MAX_HEADER_NAMES = 2048


class CrossOrigin:
    """The cross-origin headers of answers.

    Args:
        origins: origins of the pages to allow, as ``https://example.org``; ``*`` for any.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = ANY in origins
        self._origins = frozenset(origin.lower() for origin in origins)

    def allows(self, origin: str | None) -> bool:
        """Return whether requests from a page of ``origin`` are allowed; None is no page."""
        return origin is not None and (self._any or origin.lower() in self._origins)

    def response_headers(self, origin: str | None) -> Headers:
        """Return the headers of every answer to a request from ``origin``, errors too."""
        headers: Headers = []
        if self._origins and not self._any:
            # Sent to all, so that a cache doesn't give one page's answer to another page.
            headers.append((b"Vary", b"Origin"))
        if self.allows(origin):
            assert origin is not None
            headers += [
                (b"Access-Control-Allow-Origin", b"*" if self._any else origin.encode("latin-1")),
                (b"Access-Control-Expose-Headers", EXPOSED),
            ]
        return headers

    def preflight_headers(self, methods: Iterable[str], asked: str) -> dict[str, str]:
        """Return the further headers of the answer to a preflight.

        Args:
            methods: the methods of the path.
            asked: names of headers that the page wants to send; all are allowed.
        """
        headers = {
            "Access-Control-Allow-Methods": ", ".join(sorted(methods)),
            "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        }
        if len(asked) <= _MAX_HEADER_NAMES and _HEADER_NAMES.fullmatch(asked):
            headers["Access-Control-Allow-Headers"] = asked
        return headers
