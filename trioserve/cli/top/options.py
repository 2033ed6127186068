"""The options of ``trioserve top``. Nothing here that ``--help`` doesn't need."""

from __future__ import annotations

import attrs

from trioserve.cli.remote_options import RemoteOptions
from trioserve.config.options import Group, option

__all__ = ["TOP_GROUPS", "TopOptions"]

TOP_GROUPS = {
    "target": Group("The server", "terminal#Talk to a model"),
    "picture": Group("The picture", "terminal#Watch a server"),
}
"""Every group of options, in the order in which help shows them."""


@attrs.frozen(kw_only=True)
class TopOptions(RemoteOptions):
    """Everything that ``trioserve top`` can be told."""

    interval: float = option(
        1.0, "seconds between two pictures", group="picture", kind=float, low=0.1, high=10
    )
    once: bool = False
    """Whether one picture is enough."""
    json: bool = False
    """Whether pictures are printed as they come from the server."""
