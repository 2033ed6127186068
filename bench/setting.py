"""What a server is to be started with, in words that hold for every server."""

from __future__ import annotations

import os

import attrs

__all__ = ["Setting"]


@attrs.frozen(kw_only=True)
class Setting:
    """The default model in one number format, on all cores.

    Without ``kv_tokens`` a server has the KV cache that it takes by itself or, where it doesn't
    size one, room for all streams.
    """

    format: str = "bf16"
    """One of :data:`bench.peers.gguf_files.FORMATS`."""
    streams: int = 32
    """The most requests at a time."""
    context: int = 2048
    """The most tokens of one request, prompt and answer together."""
    kv_tokens: int | None = None
    """Tokens that the KV cache is to hold, all requests together."""

    @property
    def threads(self) -> int:
        """Threads that compute: as many as this process has cores."""
        return len(os.sched_getaffinity(0))
