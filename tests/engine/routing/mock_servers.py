"""Servers over simulated workers: HTTP as routers expect it, answers when the simulation says so.

A request is told by its ``seed``, which is its index in the trace. Its answer begins at once and
ends with :meth:`MockServers.end`, so it takes the simulation's time and no other. A router of this
project also gets the feed of caches and loads, and the blocks of a prompt as its pages.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import attrs
import h11
import msgspec
import trio

from tests.engine.routing.replay import BLOCK, MAX_RUNNING, MAX_TOKENS, Asked, Worker
from trioserve.engine.cache_feed import CacheChanges
from trioserve.engine.routing.load_report import LoadReport
from trioserve.http.api.prompt_pages import PromptPages, PromptPagesReply
from trioserve.http.api.sse import named_event
from trioserve.http.router.follow import PATH
from trioserve.scheduler.cache_events import CacheEvent

MODEL = "mock"
_ABOUT = {
    "status": "ok",
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "mock", "root": MODEL}],
    "model_path": MODEL,
    "served_model_name": MODEL,
    "version": "0.0",
}
"""The answer to every GET: what peers ask of a server's health, model and version."""
_TOKEN = b'data: {"id":"cmpl","object":"text_completion","created":0,"model":"mock","choices":'
_LAST = _TOKEN + b'[{"index":0,"text":" a","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'


class Completion(msgspec.Struct):
    """The part of a request by which it is known."""

    seed: int


@attrs.define(eq=False)
class MockServers:
    """A server for each worker, on ports of this machine.

    Args:
        trace: The requests.
        workers: The workers.
    """

    _trace: Sequence[Asked]
    _workers: Sequence[Worker]
    ports: list[int] = attrs.field(init=False, factory=list)
    arrived: dict[int, int] = attrs.field(init=False, factory=dict)
    """Worker of each request that has arrived, by index."""
    _ends: dict[int, trio.Event] = attrs.field(init=False, factory=dict)
    _feeds: dict[int, _FeedOfWorker] = attrs.field(init=False, factory=dict)

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            for number in range(len(self._workers)):
                listeners = await nursery.start(
                    trio.serve_tcp, functools.partial(self._serve, number), 0
                )
                self.ports.append(listeners[0].socket.getsockname()[1])
            task_status.started()

    @property
    def has_readers(self) -> bool:
        """True if a router follows feeds."""
        return bool(self._feeds)

    def end(self, index: int) -> None:
        """End the answer to a request."""
        self._ends.pop(index).set()

    async def publish(self) -> None:
        """Tell routers that follow a feed what has changed."""
        for feed in self._feeds.values():
            await feed.publish()

    async def _serve(self, number: int, stream: trio.SocketStream) -> None:
        """Answer the requests of one connection."""
        connection = h11.Connection(h11.SERVER)
        try:
            async with stream:
                while await self._answer(number, stream, connection):
                    connection.start_next_cycle()
        except (h11.ProtocolError, trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async def _answer(self, number: int, stream: trio.SocketStream, wire: h11.Connection) -> bool:
        """Answer one request; return whether there may be another one."""
        request, body = None, b""
        async for event in events_of(stream, wire):
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
        if request is None:
            return False
        headers = dict(request.headers)
        if request.target.decode() == PATH:
            feed = _FeedOfWorker(self._workers[number], stream, wire)
            await feed.run(self._feeds, number)
            return False
        if request.method == b"GET":
            await send_whole(stream, wire, 200, msgspec.json.encode(_ABOUT))
        elif request.target == b"/v1/completions/render":
            await send_whole(stream, wire, 200, self._rendered(body))
        elif request.target != b"/v1/completions":
            await send_whole(stream, wire, 404, b"{}")
        elif b"x-prompt-pages" in headers:
            asked = self._trace[msgspec.json.decode(body, type=Completion).seed]
            pages = PromptPages(num_tokens=asked.prompt, hashes=array("Q", asked.blocks).tobytes())
            reply = PromptPagesReply(page_size=BLOCK, prompts=[pages])
            await send_whole(stream, wire, 200, msgspec.json.encode(reply))
        else:
            await self._complete(
                number, msgspec.json.decode(body, type=Completion).seed, stream, wire
            )
        return wire.our_state is h11.DONE and wire.their_state is h11.DONE

    def _rendered(self, body: bytes) -> bytes:
        """Return the prompt's ids as vLLM does, of which its router asks the servers."""
        asked = self._trace[msgspec.json.decode(body, type=Completion).seed]
        ids = ",".join(map(_ids_of_block, asked.blocks))
        return f'[{{"request_id":"","token_ids":[{ids}],"sampling_params":{{}}}}]'.encode()

    async def _complete(
        self, number: int, index: int, stream: trio.SocketStream, wire: h11.Connection
    ) -> None:
        ended = self._ends[index] = trio.Event()
        head = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]
        self.arrived[index] = number
        await stream.send_all(wire.send(h11.Response(status_code=200, headers=head)) or b"")
        await ended.wait()
        data = wire.send(h11.Data(_LAST)) or b""
        await stream.send_all(data + (wire.send(h11.EndOfMessage()) or b""))


@attrs.define(eq=False)
class _FeedOfWorker:
    """The feed of one server, to one reader."""

    _worker: Worker
    _stream: trio.SocketStream
    _wire: h11.Connection
    _batch: int = attrs.field(init=False, default=0)
    _number: int = attrs.field(init=False, default=0)
    _told: set[int] = attrs.field(init=False, factory=set)
    _lock: trio.Lock = attrs.field(init=False, factory=trio.Lock)

    async def run(self, feeds: dict[int, _FeedOfWorker], number: int) -> None:
        """Be one of ``feeds`` until the reader leaves."""
        head = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]
        await self._stream.send_all(
            self._wire.send(h11.Response(status_code=200, headers=head)) or b""
        )
        await self._send(named_event("server", {"models": [MODEL], "page_size": BLOCK}))
        await self.publish()
        feeds[number] = self
        try:
            while True:
                await trio.sleep(1)
                await self.publish()
        finally:
            del feeds[number]

    async def publish(self) -> None:
        """Send what has changed, and the load."""
        async with self._lock:
            await self._send(named_event("changes", self._changes()))

    def _changes(self) -> CacheChanges:
        cached = set(self._worker.cache)
        kinds = [("stored", cached - self._told), ("removed", self._told - cached)]
        changed = [(kind, block) for kind, blocks in kinds for block in blocks]
        events = [
            CacheEvent(number=number, kind=kind, hash=block)  # type: ignore[arg-type]
            for number, (kind, block) in enumerate(changed, self._number + 1)
        ]
        self._number += len(events)
        self._told = cached
        changes = CacheChanges(
            batch=self._batch, snapshot=not self._batch, number=self._number, events=events,
            pages=[], complete=True, loads=[load_of(self._worker)],
        )  # fmt: skip
        self._batch += 1
        return changes

    async def _send(self, data: bytes) -> None:
        await self._stream.send_all(self._wire.send(h11.Data(data)) or b"")


def load_of(worker: Worker) -> LoadReport:
    """Return the report of a worker's load."""
    fixed, decode, token, read = worker.model.coefficients
    return LoadReport(
        worker=0,
        serves=True,
        is_known=worker.model.is_known,
        coefficients=(fixed, decode, token, read),
        prompt_tokens=int(worker.prompt_tokens),
        num_prompts=len(worker.prompts),
        num_decodes=len(worker.ends),
        context=int(worker.context),
        num_free=MAX_RUNNING - len(worker.ends) - len(worker.prompts),
        max_tokens=MAX_TOKENS,
    )


@functools.lru_cache(1 << 15)
def _ids_of_block(number: int) -> str:
    return ",".join([str(number)] * BLOCK)


async def events_of(stream: trio.SocketStream, wire: h11.Connection) -> AsyncIterator[Any]:
    """Yield the events of the next message to its end."""
    while True:
        event = wire.next_event()
        if event is h11.NEED_DATA:
            wire.receive_data(await stream.receive_some(1 << 18))
            continue
        yield event
        if isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
            return


async def send_whole(
    stream: trio.SocketStream, wire: h11.Connection, status: int, body: bytes
) -> None:
    """Send a whole answer."""
    head = [("content-type", "application/json"), ("content-length", str(len(body)))]
    parts = [h11.Response(status_code=status, headers=head), h11.Data(body), h11.EndOfMessage()]
    await stream.send_all(b"".join(wire.send(each) or b"" for each in parts))
