"""The options of all commands that connect to a server. It imports nothing heavy."""

from __future__ import annotations

import attrs

from trioserve.config.options import OptionGroup, option

DEFAULT_URL = "http://127.0.0.1:8000"
REMOTE_GROUPS = {"target": OptionGroup("With --url", "terminal#Talk to a model")}
"""Group of options in the help of ``chat``."""


@attrs.frozen(kw_only=True)
class RemoteOptions:
    """Address of a server, its key and its certificates."""

    url: str = DEFAULT_URL
    """URL, with or without ``/v1``."""

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
