"""The setup of a node's process, which starts the ranks of another host's worker."""

from __future__ import annotations

import msgspec

from trioserve.protocol.certificates import Credentials


class NodeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Setup of a node's process, which gets it as a line of JSON on standard input."""

    node: int
    """Its number; node 0 has rank 0."""
    address: str
    """Address and port of node 0."""
    tls: Credentials
    """Certificates of a worker's host."""
    model: str
    """Path of the model on this host."""
    checksum: str
    """Checksum of its files."""
    num_threads: int
    """Threads of all its ranks; 0 for as many as there are cores."""
    cores: list[int]
    """Cores to which they are bound; empty for all that may be used."""
