"""The load generator: requests in closed and open loops, and the figures that come out of them.

=================  ===========================================================================
module             what is in it
=================  ===========================================================================
work               what is asked: conversations, turns, and when a client leaves
datasets           makers of such work: synthetic lengths, shared prefixes, chats, JSON
sharegpt, traces   the same from files
arrivals           when it is asked
target             who is asked, as the loops see it
client, embedded   the two kinds: a server over HTTP, and an engine in this process
loop               the runs
records, figures   what became of each request, and of all
report             a table, JSON, plots and a page
=================  ===========================================================================

The client reads HTTP with a small parser of its own and all sockets from one task. A client library
in front would cost more per event than the server does, and on a small machine both share the
cores.
"""

from __future__ import annotations

from trioserve.load.arrivals import (
    arrivals,
    constant_arrivals,
    poisson_arrivals,
    scaled_arrivals,
)
from trioserve.load.client import Client, Target, send
from trioserve.load.connect import Connect, over_tcp, over_tls, parse_url, tls_context
from trioserve.load.datasets import (
    Lengths,
    chats,
    fixed_prompt,
    random_prompts,
    repeated,
    shared_prefixes,
    structured,
    with_cancellations,
)
from trioserve.load.embedded import EmbeddedTarget
from trioserve.load.figures import Figures, Limits, Spread, figures_of
from trioserve.load.loop import Progress, closed_loop, open_loop
from trioserve.load.records import Record, Run
from trioserve.load.sharegpt import DataError, load_sharegpt
from trioserve.load.target import AnyTarget, Sender
from trioserve.load.texts import CountedTexts, GuessedTexts, Texts
from trioserve.load.traces import TraceRow, load_trace, trace_work
from trioserve.load.work import Cancel, Conversation, Turn, request_fields, single

__all__ = [
    "AnyTarget",
    "Cancel",
    "Client",
    "Connect",
    "Conversation",
    "CountedTexts",
    "DataError",
    "EmbeddedTarget",
    "Figures",
    "GuessedTexts",
    "Lengths",
    "Limits",
    "Progress",
    "Record",
    "Run",
    "Sender",
    "Spread",
    "Target",
    "Texts",
    "TraceRow",
    "Turn",
    "arrivals",
    "chats",
    "closed_loop",
    "constant_arrivals",
    "figures_of",
    "fixed_prompt",
    "load_sharegpt",
    "load_trace",
    "open_loop",
    "over_tcp",
    "over_tls",
    "parse_url",
    "poisson_arrivals",
    "random_prompts",
    "repeated",
    "request_fields",
    "scaled_arrivals",
    "send",
    "shared_prefixes",
    "single",
    "structured",
    "tls_context",
    "trace_work",
    "with_cancellations",
]
