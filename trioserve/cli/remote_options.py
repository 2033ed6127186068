"""The options of every command that asks a server. Nothing here that ``--help`` doesn't need."""

from __future__ import annotations

import attrs

from trioserve.config.options import Group, option

__all__ = ["DEFAULT_URL", "REMOTE_GROUPS", "RemoteOptions"]

DEFAULT_URL = "http://127.0.0.1:8000"
REMOTE_GROUPS = {"target": Group("With --url", "terminal#Talk to a model")}
"""The group of options in the help of ``chat``."""


@attrs.frozen(kw_only=True)
class RemoteOptions:
    """Where a server is and how it is asked."""

    url: str = DEFAULT_URL
    """Its address, ``/v1`` at its end or not."""

    api_key: str | None = option(
        None,
        "key to send as a bearer token",
        unset="$OPENAI_API_KEY",
        group="target",
        common=True,
        metavar="KEY",
        secret=True,
    )
    ca_file: str | None = option(
        None,
        "certificates of the authorities to trust for https",
        unset="the system's",
        group="target",
        metavar="FILE",
    )
    insecure: bool = option(
        False, "accept any certificate of an https server", group="target", kind=bool
    )
