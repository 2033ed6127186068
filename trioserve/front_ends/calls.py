"""The table of remote calls between the engine process and a front end.

An entry is a typed signature. Its name is the message's, and the handler is the method of that name
on a part of the other process. A caller uses the entry like a method::

    await EngineCalls(rpc).pause("wait", refuse=False)
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import attrs
import msgspec

from trioserve.engine.administration import Administration
from trioserve.engine.cache_feed import CacheChanges
from trioserve.engine.sessions.continuation import Continuation
from trioserve.front_ends.rpc import Handlers, RpcPeer
from trioserve.http.api.openai.responses.store import ResponseStore
from trioserve.observability.live.schema import Snapshot, TaskNode
from trioserve.observability.metrics.snapshot import MetricsSnapshot
from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.observability.statistics import EngineStatistics
from trioserve.requests.media.encoder import MediaEncoder

_P = ParamSpec("_P")
_R = TypeVar("_R")


@attrs.frozen(kw_only=True)
class EngineState:
    """The state of the engine process."""

    attached: bool
    stalled: bool
    paused: bool
    memory_released: bool
    worker_restarts: int
    scheduler: SchedulerStatistics


@attrs.frozen(kw_only=True)
class Collected:
    """The counts of all processes together, and their state at this moment."""

    snapshot: MetricsSnapshot
    statistics: EngineStatistics


@attrs.frozen(kw_only=True)
class Counted:
    """The counts of one front end, and how much is going on in it."""

    snapshot: MetricsSnapshot = attrs.field(factory=MetricsSnapshot)
    num_tokenizing: int = 0
    num_streams: int = 0
    stream_bytes: int = 0


@attrs.frozen
class Looked:
    """A front end's part of a snapshot."""

    counted: Counted
    tasks: TaskNode


class RemoteCall(Generic[_P, _R]):
    """An entry of the table. Arguments and reply have the types of ``method``'s annotations."""

    def __init__(self, method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]]) -> None:
        self.name = method.__name__
        self._method = method

    def __get__(self, table: Table, _: object) -> Callable[_P, Coroutine[Any, Any, _R]]:
        return functools.partial(self._ask, table.rpc)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The arguments of the call, ``self`` among them."""
        return inspect.signature(self._method)

    @functools.cached_property
    def _types(self) -> tuple[Any, Any]:
        """The type of all arguments together, and that of the reply."""
        hints = typing.get_type_hints(self._method)
        reply = hints.pop("return")
        return tuple[tuple(hints.values())], reply  # type: ignore[misc]

    async def _ask(self, rpc: RpcPeer, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        bound = self.signature.bind(None, *args, **kwargs)
        _, *arguments = bound.arguments.values()
        reply: _R = msgspec.convert(await rpc.ask(self.name, arguments), self._types[1])
        return reply

    def handled_by(self, part: object) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        """Return a handler that calls the method of this name on ``part``."""
        method = getattr(part, self.name)

        async def answer(arguments: Any) -> Any:
            return await method(*msgspec.convert(arguments, self._types[0]))

        return answer


class Table:
    """The calls that one side may make of the other."""

    rpc: RpcPeer

    @classmethod
    def entries(cls) -> list[RemoteCall[Any, Any]]:
        """Return all calls of the table."""
        entries = [each for base in cls.__mro__ for each in vars(base).values()]
        return [each for each in entries if isinstance(each, RemoteCall)]

    @classmethod
    def handlers(cls, *parts: object) -> Handlers:
        """Return a handler for each call that one of ``parts`` has a method for."""
        return {
            call.name: call.handled_by(part)
            for part in parts
            for call in cls.entries()
            if hasattr(part, call.name)
        }


class AdministrationCalls(Table):
    """The calls of operators that a front end passes on to the engine process as they are."""

    pause = RemoteCall(Administration.pause)
    resume = RemoteCall(Administration.resume)
    abort = RemoteCall(Administration.abort)
    flush_cache = RemoteCall(Administration.flush_cache)
    update_weights = RemoteCall(Administration.update_weights)
    weight_version = RemoteCall(Administration.weight_version)
    set_weights_version = RemoteCall(Administration.set_weights_version)
    release_memory = RemoteCall(Administration.release_memory)
    resume_memory = RemoteCall(Administration.resume_memory)
    unload_adapter = RemoteCall(Administration.unload_adapter)
    workers = RemoteCall(Administration.workers)
    add_worker = RemoteCall(Administration.add_worker)
    remove_worker = RemoteCall(Administration.remove_worker)
    cache_events = RemoteCall(Administration.cache_events)
    open_session = RemoteCall(Administration.open_session)
    close_session = RemoteCall(Administration.close_session)
    keep_response = RemoteCall(ResponseStore.keep_response)
    kept_conversation = RemoteCall(ResponseStore.kept_conversation)
    drop_response = RemoteCall(ResponseStore.drop_response)


class EngineCalls(AdministrationCalls):
    """All calls that a front end makes of the engine process."""

    def __init__(self, rpc: RpcPeer) -> None:
        self.rpc = rpc

    load_adapter = RemoteCall(Administration.load_adapter)
    iterations = RemoteCall(Administration.iterations)

    @RemoteCall
    async def state(self) -> EngineState:
        """Return the state of the engine process."""
        raise NotImplementedError

    @RemoteCall
    async def collect(self) -> Collected:
        """Return the counts of all processes."""
        raise NotImplementedError

    @RemoteCall
    async def call_worker(self, name: str, arguments: Any) -> Any:
        """Call the worker by name."""
        raise NotImplementedError

    @RemoteCall
    async def encode(self, columns: Any, tenant: str) -> bytes:
        """Compute texts as a whole; return their vectors as a column of float32."""
        raise NotImplementedError

    kept_media = RemoteCall(MediaEncoder.kept_media)
    encode_media = RemoteCall(MediaEncoder.encode_media)
    align_speech = RemoteCall(MediaEncoder.align_speech)

    @RemoteCall
    async def take_permit(self, number: int, key: str) -> bool:
        """Return whether one more request of ``key`` may be open; if so it has that number."""
        raise NotImplementedError

    @RemoteCall
    async def watch(self, number: int, requests: int, nodes: int) -> None:
        """Open a subscription of that number to snapshots."""
        raise NotImplementedError

    @RemoteCall
    async def take_snapshot(self, number: int) -> Snapshot:
        """Return the next snapshot of the subscription of that number."""
        raise NotImplementedError

    @RemoteCall
    async def read_cache(self, number: int) -> None:
        """Open a subscription of that number to the prefix caches."""
        raise NotImplementedError

    @RemoteCall
    async def take_changes(self, number: int) -> CacheChanges:
        """Return the next changes of the subscription of that number."""
        raise NotImplementedError

    @RemoteCall
    async def begin_turn(
        self,
        number: int,
        session_id: str,
        owner: str | None,
        turn_id: str,
        continuation: Continuation,
    ) -> bytes:
        """Begin a turn; return the tokens that it goes on from, as a column."""
        raise NotImplementedError

    @RemoteCall
    async def keep_turn(
        self, number: int, own: bytes, num_prompt_tokens: int, salt: str, adapter: int
    ) -> None:
        """Keep a turn that has ended as it should. Idempotent."""
        raise NotImplementedError


class FrontEndCalls(Table):
    """The calls that the engine process makes of a front end."""

    def __init__(self, rpc: RpcPeer) -> None:
        self.rpc = rpc

    @RemoteCall
    async def count(self) -> Counted:
        """Return the front end's counts."""
        raise NotImplementedError

    @RemoteCall
    async def look(self) -> Looked:
        """Return the front end's part of a snapshot."""
        raise NotImplementedError

    @RemoteCall
    async def abort_own(self, ids: list[str], prefix: bool) -> int:
        """Abort the front end's requests by name; return how many were ended."""
        raise NotImplementedError
