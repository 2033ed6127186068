"""The files and names of the certificates with which hosts know each other.

A folder of ``trioserve worker-certificates`` has the files of all sides. An engine, and the first
node of a worker of several nodes, need :data:`ENGINE_FILES` of them, a worker's host
:data:`WORKER_FILES`, a front end's :data:`FRONT_END_FILES`.
"""

from __future__ import annotations

import attrs

AUTHORITY = "ca.crt"
ENGINE = "engine"
WORKER = "worker"
FRONT_END = "front-end"
ENGINE_FILES = (AUTHORITY, f"{ENGINE}.crt", f"{ENGINE}.key")
WORKER_FILES = (AUTHORITY, f"{WORKER}.crt", f"{WORKER}.key")
FRONT_END_FILES = (AUTHORITY, f"{FRONT_END}.crt", f"{FRONT_END}.key")

ENGINE_NAME = "engine.trioserve.internal"
"""Name in an engine's certificate. Its host's name isn't in it, so that it may have any."""
WORKER_NAME = "worker.trioserve.internal"
FRONT_END_NAME = "front-end.trioserve.internal"


@attrs.frozen
class Credentials:
    """The certificates and the key of one side, in PEM: the contents of its three files.

    They aren't shown, so that the key gets into no log.
    """

    authority: str = attrs.field(repr=False)
    """Certificate of the authority."""
    certificate: str = attrs.field(repr=False)
    key: str = attrs.field(repr=False)
