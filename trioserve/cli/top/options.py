"""The options of ``trioserve top``; imports nothing heavy."""

from __future__ import annotations

import attrs

from trioserve.cli.remote_options import RemoteOptions
from trioserve.config.options import OptionGroup, option

TOP_GROUPS = {
    "target": OptionGroup("The server", "terminal#Talk to a model"),
    "picture": OptionGroup("The picture", "terminal#Watch a server"),
}
"""Groups of options, in the order of help."""


@attrs.frozen(kw_only=True)
class TopOptions(RemoteOptions):
    """The options of ``trioserve top``."""

    interval: float = option(
        1.0, "seconds between two pictures", group="picture", kind=float, low=0.1, high=10
    )
    once: bool = False
    """True to print one picture and leave."""
    json: bool = False
    """True to print pictures as JSON."""
