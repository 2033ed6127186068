"""The options of ``trioserve top``. It imports nothing heavy."""

from __future__ import annotations

import attrs

from trioserve.cli.remote_options import RemoteOptions
from trioserve.config.options import OptionGroup, option

TOP_GROUPS = {
    "target": OptionGroup("The server", "terminal#Talk to a model"),
    "snapshot": OptionGroup("The feed", "terminal#Watch a server"),
}
"""Groups of options, in the order of help."""


@attrs.frozen(kw_only=True)
class TopOptions(RemoteOptions):
    """The options of ``trioserve top``."""

    interval: float = option(
        1.0, "seconds between two snapshots", group="snapshot", kind=float, low=0.1, high=10
    )
    once: bool = False
    """True to print one snapshot and exit."""
    json: bool = False
    """True to print snapshots as JSON."""
