"""The options of ``trioserve worker``. It imports nothing heavy."""

from __future__ import annotations

from typing import Any

import attrs

from trioserve.config.options import OptionGroup, option
from trioserve.config.worker_group import WORKER_ROLES
from trioserve.protocol.devices import ANY_DEVICE
from trioserve.protocol.errors import InvalidRequest

WORKER_GROUPS = {"worker": OptionGroup("The worker", "workers#Other hosts")}
"""Groups of options, in the order of help."""


def join_option() -> Any:
    """Return the option for the address of an engine."""
    return option(
        None,
        "address of the engine's port for other hosts (its --worker-listen); this is needed",
        group="worker",
        metavar="HOST:PORT",
        form=(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]]+):\d{1,5}", "HOST:PORT, such as engine.lan:7000"),
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
        "part of each request that the worker computes: prompts (prefill), outputs (decode) or both",
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

    def __attrs_post_init__(self) -> None:
        check_given(self, "join", "tls")
