"""The making of an engine's workers, with what all of them share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import trio

from trioserve._util.host_memory import host_memory
from trioserve.config import EngineConfig
from trioserve.engine.engine_worker import EngineWorker, MakeWorker
from trioserve.observability.metrics import Metrics
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.joining import WorkerRole
from trioserve.scheduler.beams import StopStringAtEnd
from trioserve.scheduler.siblings import Siblings
from trioserve.workers.remote.joined import JoinedWorker

MakeJoined: TypeAlias = Callable[[int, JoinedWorker], EngineWorker]


def check_role(config: EngineConfig, role: WorkerRole, *, loads_first: bool = False) -> None:
    """Check that a worker that is added may have a role.

    If it ``loads_first``, it gets the role when it has loaded the model.

    Raises:
        InvalidRequest: Pages can't be handed over as it needs.
    """
    if role == "both":
        return
    if config.splits_by_load:
        raise InvalidRequest(
            "the loads decide what each worker computes (--disaggregation auto): leave the role "
            "out",
            param="role",
        )
    if not config.lends_pages:
        raise InvalidRequest(
            f"the role {role} needs pages that are handed over: start the engine with "
            "--kv-offloading-bytes or --disaggregation",
            param="role",
        )
    if loads_first and config.num_ranks > 1:
        raise InvalidRequest(
            f"the role {role} isn't for a worker of Ray that is added, if it has several ranks: "
            "name roles when the engine starts (--disaggregation)",
            param="role",
        )


def makers(
    config: EngineConfig,
    metrics: Metrics,
    make: MakeWorker,
    stop_string_at_end: StopStringAtEnd | None,
) -> tuple[MakeWorker, MakeJoined]:
    """Return the functions that make workers of this host, as ``make`` does, and of others.

    ``stop_string_at_end`` finds the stop strings of beams; None if there is no text.
    """
    siblings = (
        Siblings(functools.partial(host_memory, "trioserve-pages")) if config.lends_pages else None
    )
    had_grammars = trio.Event()

    def prepared(worker: EngineWorker) -> EngineWorker:
        worker.scheduler.stop_string_at_end = stop_string_at_end
        worker.scheduler.feeds.siblings = siblings
        worker.scheduler.feeds.had_grammars = had_grammars
        return worker

    def make_worker(index: int, device: str | None = None) -> EngineWorker:
        return prepared(make(index, device))

    def make_joined(index: int, joined: JoinedWorker) -> EngineWorker:
        worker = EngineWorker.of(
            index,
            config,
            metrics,
            joined.open,
            traffic=joined.traffic,
            wait_here=joined.wait_here,
            dismiss=joined.dismiss,
        )
        joined.amend = worker.amend
        return prepared(worker)

    return make_worker, make_joined
