"""The load generator: requests in closed and open loops, and figures of their results.

=================  ===========================================================================
module             contents
=================  ===========================================================================
work               conversations, turns, and clients that disconnect
datasets           synthetic work: given lengths, shared prefixes, chats, JSON
sharegpt, traces   work from files
arrivals           times of requests
target             interface of a server for the loops
client, embedded   its implementations: a server over HTTP, an engine in this process
loop               the runs
records, figures   results of each request, and of a run
report             results as a table, JSON, plots and a page
=================  ===========================================================================

The client has its own small HTTP parser and reads all sockets in one task. A client library would
cost more per event than the server, and on a small machine both share the cores.

Imported by ``cli``.
"""

from __future__ import annotations

from trioserve.load.arrivals import arrivals as arrivals
from trioserve.load.arrivals import constant_arrivals as constant_arrivals
from trioserve.load.arrivals import poisson_arrivals as poisson_arrivals
from trioserve.load.arrivals import scaled_arrivals as scaled_arrivals
from trioserve.load.client import Client as Client
from trioserve.load.client import Target as Target
from trioserve.load.client import send as send
from trioserve.load.connect import Connect as Connect
from trioserve.load.connect import over_tcp as over_tcp
from trioserve.load.connect import over_tls as over_tls
from trioserve.load.connect import parse_url as parse_url
from trioserve.load.connect import tls_context as tls_context
from trioserve.load.datasets import Lengths as Lengths
from trioserve.load.datasets import chats as chats
from trioserve.load.datasets import fixed_prompt as fixed_prompt
from trioserve.load.datasets import random_prompts as random_prompts
from trioserve.load.datasets import repeated as repeated
from trioserve.load.datasets import shared_prefixes as shared_prefixes
from trioserve.load.datasets import structured as structured
from trioserve.load.datasets import with_cancellations as with_cancellations
from trioserve.load.embedded import EmbeddedTarget as EmbeddedTarget
from trioserve.load.figures import Figures as Figures
from trioserve.load.figures import Limits as Limits
from trioserve.load.figures import Spread as Spread
from trioserve.load.figures import figures_of as figures_of
from trioserve.load.loop import Progress as Progress
from trioserve.load.loop import closed_loop as closed_loop
from trioserve.load.loop import open_loop as open_loop
from trioserve.load.records import Record as Record
from trioserve.load.records import Run as Run
from trioserve.load.sharegpt import DataError as DataError
from trioserve.load.sharegpt import load_sharegpt as load_sharegpt
from trioserve.load.target import AnyTarget as AnyTarget
from trioserve.load.target import Sender as Sender
from trioserve.load.texts import CountedTexts as CountedTexts
from trioserve.load.texts import GuessedTexts as GuessedTexts
from trioserve.load.texts import Texts as Texts
from trioserve.load.traces import TraceRow as TraceRow
from trioserve.load.traces import load_trace as load_trace
from trioserve.load.traces import scaled_lengths as scaled_lengths
from trioserve.load.traces import trace_work as trace_work
from trioserve.load.work import Cancel as Cancel
from trioserve.load.work import Conversation as Conversation
from trioserve.load.work import Turn as Turn
from trioserve.load.work import request_fields as request_fields
from trioserve.load.work import single as single
