"""The options of a router in front of servers."""

from __future__ import annotations

import attrs

from trioserve.config.options import option
from trioserve.config.server import ServerConfig

ROUTER_SERVER_OPTIONS = (
    "host",
    "port",
    "uds",
    "allowed_hosts",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_keyfile_password",
    "ssl_ca_certs",
    "max_body_size",
    "request_timeout",
    "send_timeout",
    "shutdown_timeout",
    "log_level",
    "log_format",
)
"""Options that a router shares with a server."""
ROUTER_ENGINE_OPTIONS = ("routing_policy", "routing_temperature")
"""Options that a router shares with an engine."""


@attrs.frozen(kw_only=True)
class RouterConfig:
    """Options of a router: the servers behind it, its policy, its own address and limits."""

    server: ServerConfig
    """Its address, its limits and, as the engine's, its policy."""
    urls: tuple[str, ...]
    """URLs of the servers."""
    upstream_admin_api_key: str | None = option(
        None,
        "admin key of the servers, with which their caches and loads are read; the variable is "
        "safer, since other users can read a command line",
        group="upstream",
        page="router#Start it",
        common=True,
        metavar="KEY",
        secret=True,
    )
    upstream_ca_file: str | None = option(
        None,
        "certificates of the authorities to trust for https servers",
        unset="the system's",
        group="upstream",
        page="router#Start it",
        metavar="FILE",
    )
    upstream_timeout: float = option(
        5.0,
        "seconds to connect to a server, and longest silence of its feed; past them the server "
        "is out until its feed is back",
        group="upstream",
        page="router#Servers that come and go",
        kind=float,
        low=0.1,
    )
