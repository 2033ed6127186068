"""The options of ``trioserve worker``. It imports nothing heavy."""

from __future__ import annotations

import attrs

from trioserve.config.options import OptionGroup, option
from trioserve.protocol.devices import ANY_DEVICE
from trioserve.protocol.errors import InvalidRequest

WORKER_GROUPS = {"worker": OptionGroup("The worker", "workers#Other hosts")}
"""Groups of options, in the order of help."""


@attrs.frozen(kw_only=True)
class WorkerOptions:
    """The options of ``trioserve worker``.

    Raises:
        InvalidRequest: A value isn't allowed or is missing; ``param`` names the option.
    """

    join: str | None = option(
        None,
        "address of the engine's port for workers (its --worker-listen); this is needed",
        group="worker",
        metavar="HOST:PORT",
        form=(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]]+):\d{1,5}", "HOST:PORT, such as engine.lan:7000"),
    )
    tls: str | None = option(
        None,
        "folder with ca.crt, worker.crt and worker.key, which trioserve worker-certificates makes; "
        "this is needed",
        group="worker",
        metavar="FOLDER",
    )
    device: str | None = option(
        None,
        "device that computes the model",
        unset="the engine's",
        group="worker",
        metavar="DEVICE",
        form=ANY_DEVICE,
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
        for name in ("join", "tls"):
            if getattr(self, name) is None:
                raise InvalidRequest(f"{name} is needed", param=name)
