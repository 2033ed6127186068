"""The options of ``trioserve front-end``. It imports nothing heavy."""

from __future__ import annotations

import attrs

from trioserve.cli.worker_options import check_given, join_option, tls_option
from trioserve.config import GROUPS
from trioserve.config.options import OptionGroup

FRONT_END_SERVER_OPTIONS = (
    *("host", "port", "uds"),
    *("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"),
)
"""Options that a front end on another host has of its own."""
FRONT_END_GROUPS = {
    "worker": OptionGroup("The engine", "front-ends#On other hosts"),
    "http": GROUPS["http"],
}
"""Groups of options, in the order of help."""


@attrs.frozen(kw_only=True)
class FrontEndOptions:
    """The options of ``trioserve front-end``, besides those that it shares with a server.

    Raises:
        InvalidRequest: A value isn't allowed or is missing; ``param`` names the option.
    """

    join: str | None = join_option()
    tls: str | None = tls_option("front-end")

    def __attrs_post_init__(self) -> None:
        check_given(self, "join", "tls")
