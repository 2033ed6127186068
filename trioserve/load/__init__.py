"""The load generator: streaming requests in a closed loop, and the figures that come out of it.

It speaks HTTP/1.1 with h11 over trio's sockets. A client library in front would cost more per chunk
than the server does, and on a small machine both share the cores.
"""

from __future__ import annotations

from trioserve.load.client import Client, Connect, Record, Target, over_tcp, send
from trioserve.load.figures import Figures, Spread, figures_of
from trioserve.load.loop import Run, closed_loop

__all__ = [
    "Client",
    "Connect",
    "Figures",
    "Record",
    "Run",
    "Spread",
    "Target",
    "closed_loop",
    "figures_of",
    "over_tcp",
    "send",
]
