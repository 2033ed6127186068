"""The rules for the options that say where an engine's workers are."""

from __future__ import annotations

from typing import Protocol

from trioserve.protocol.errors import InvalidRequest

EXECUTOR_BACKENDS = ("mp", "ray")


class WorkerPlaces(Protocol):
    """These options."""

    @property
    def data_parallel_size(self) -> int: ...
    @property
    def distributed_executor_backend(self) -> str: ...
    @property
    def worker_listen(self) -> str | None: ...
    @property
    def worker_tls(self) -> str | None: ...


def check_places(options: WorkerPlaces) -> None:
    """Check options that go with others only.

    Raises:
        InvalidRequest: They don't go together.
    """
    uses_ray = options.distributed_executor_backend == "ray"
    if uses_ray and options.worker_tls is not None:
        raise InvalidRequest(
            "worker_tls isn't for workers of Ray, whose certificates the engine makes itself",
            param="worker_tls",
        )
    if not uses_ray and options.worker_listen is not None and options.worker_tls is None:
        raise InvalidRequest(
            "worker_listen needs certificates for workers of other hosts (--worker-tls)",
            param="worker_listen",
        )
    if options.data_parallel_size == 0 and (uses_ray or options.worker_listen is None):
        raise InvalidRequest(
            "data_parallel_size 0 needs workers of other hosts (--worker-listen)",
            param="data_parallel_size",
        )
