"""Allowed hosts of a server without keys.

The owner of a web page can point the page's own name at this machine after the page has been loaded
(DNS rebinding). The browser then takes page and server for one site, so the page may send and read
everything. The ``Host`` header gives such a request away: it names the page's host. An IP address
can't be pointed elsewhere, and neither can ``localhost``.

Requests with a valid key aren't checked, because such a page has no key. TLS connections aren't
checked, because the browser checks the name itself. Unix sockets aren't checked, because no browser
opens them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Sequence

from trioserve.http.api.errors import HostNotAllowed

ANY = "*"
_HOST = re.compile(r"(\[[\w.:%]*\]|[\w.-]*)(:\d*)?", re.ASCII)
_PRIVATE_ENDINGS = (".internal", ".local", ".home.arpa")
"""Domains that the public DNS never has (ICANN's resolution of 2024-07-29, RFC 6762, RFC 8375)."""
_MAX_QUOTED = 100


class AllowedHosts:
    """Rules that decide whether a request without a key is answered.

    If other machines can reach the server, names of private networks are allowed, too: names
    without a dot, such as a container's, names in private domains, and the machine's own names.

    Args:
        names: further names, ``*.name`` for all below a name, ``*`` for any.
        bound: the address or name that the server was told to listen on.
    """

    def __init__(self, names: Sequence[str], bound: str) -> None:
        given = [_plain(name) for name in (*names, bound)]
        self._any = ANY in given
        self._names = frozenset(given) | {"localhost"}
        self._endings = (".localhost", *(name[1:] for name in given if name.startswith("*.")))
        self._is_bound_to_loopback = bound == "localhost" or _is_loopback(bound)
        self._own_name = _plain(socket.gethostname())

    def check(self, host: str, reached_at: str) -> None:
        """Return if requests to ``host`` are answered.

        Args:
            host: the request's ``Host`` header; browsers always send one.
            reached_at: the address of the server's end of the connection.

        Raises:
            HostNotAllowed: they aren't.
        """
        if self._any or not host:
            return
        parts = _HOST.fullmatch(host)
        name = "" if parts is None else _plain(parts[1])
        if name and self._allows(name, reached_at):
            return
        shown = host if len(host) <= _MAX_QUOTED else host[:_MAX_QUOTED] + "…"
        raise HostNotAllowed(
            f"the request's Host is {shown!r}, to which this server doesn't answer without an API "
            "key: start it with --allowed-hosts and the name, or with --api-key"
        )

    def _allows(self, name: str, reached_at: str) -> bool:
        if name in self._names or name.endswith(self._endings) or _address(name) is not None:
            return True
        if self._is_bound_to_loopback and _is_loopback(reached_at):
            return False
        return "." not in name or name.endswith(_PRIVATE_ENDINGS) or name == self._own_name


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that ``name`` is; an IPv6 one may be in brackets."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    return None


def _is_loopback(name: str) -> bool:
    address = _address(name)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address is not None and address.is_loopback
