"""The options of ``trioserve worker``. It imports nothing heavy."""

from __future__ import annotations

from typing import Any

import attrs

from trioserve.config.options import OptionGroup, option
from trioserve.config.worker_group import HOST_AND_PORT, WORKER_ROLES
from trioserve.protocol.devices import ANY_DEVICE
from trioserve.protocol.errors import InvalidRequest

WORKER_GROUPS = {
    "worker": OptionGroup("The worker", "workers#Other hosts"),
    "nodes": OptionGroup("A worker of several hosts", "several-hosts#A worker of several hosts"),
}
"""Groups of options, in the order of help."""


def join_option() -> Any:
    """Return the option for the address of an engine."""
    return option(
        None,
        "address of the engine's port for other hosts (its --worker-listen); this is needed",
        group="worker",
        metavar="HOST:PORT",
        form=(HOST_AND_PORT, "HOST:PORT, such as engine.lan:7000"),
    )


def tls_option(side: str) -> Any:
    """Return the option for the folder with the certificate of ``side``."""
    return option(
        None,
        f"folder with ca.crt, {side}.crt and {side}.key, which trioserve worker-certificates "
        "makes; this is needed",
        group="worker",
        metavar="FOLDER",
    )


def check_given(options: object, *names: str) -> None:
    """Check that options without a default are given.

    Raises:
        InvalidRequest: One is missing.
    """
    for name in names:
        if getattr(options, name) is None:
            raise InvalidRequest(f"{name} is needed", param=name)


@attrs.frozen(kw_only=True)
class WorkerOptions:
    """The options of ``trioserve worker``.

    Raises:
        InvalidRequest: A value isn't allowed or is missing; ``param`` names the option.
    """

    join: str | None = join_option()
    tls: str | None = tls_option("worker")
    device: str | None = option(
        None,
        "device that computes the model",
        unset="the engine's",
        group="worker",
        metavar="DEVICE",
        form=ANY_DEVICE,
    )
    role: str = option(
        "both",
        "part of each request that it computes: prompts (prefill), outputs (decode) or both",
        group="worker",
        choices=WORKER_ROLES,
    )
    num_threads: int | None = option(
        None,
        "threads to compute with on a CPU",
        unset="the engine's, else as many as there are cores that may be used",
        group="worker",
        kind=int,
        low=1,
        high=1024,
    )
    nnodes: int = option(
        1,
        "hosts that have the worker's processes, as many each, if the engine's "
        "--tensor-parallel-size or --pipeline-parallel-size asks for several",
        group="nodes",
        kind=int,
        low=1,
        high=1024,
    )
    node_rank: int = option(
        0,
        "number of this host among them; 0 joins the engine, and the others join 0",
        group="nodes",
        kind=int,
        low=0,
        high=1023,
    )
    dist_init_addr: str | None = option(
        None,
        "address and port of node 0: where it listens, and where the others join; needed with "
        "--nnodes",
        group="nodes",
        metavar="HOST:PORT",
        form=(HOST_AND_PORT, "HOST:PORT, such as first.lan:7100"),
    )

    def __attrs_post_init__(self) -> None:
        check_given(self, *(("tls", "dist_init_addr") if self.node_rank else ("join", "tls")))
        if self.node_rank >= self.nnodes:
            raise InvalidRequest(
                f"node_rank {self.node_rank} needs --nnodes {self.node_rank + 1} or more",
                param="node_rank",
            )
        if (self.nnodes > 1) != (self.dist_init_addr is not None):
            raise InvalidRequest(
                "dist_init_addr is for a worker of several hosts, and needed there: give it "
                "together with --nnodes",
                param="dist_init_addr",
            )
        if self.node_rank and self.join is not None:
            raise InvalidRequest(
                "join is for node 0, which alone joins the engine: leave it out here",
                param="join",
            )
