"""The servers that trioserve is measured beside, each in an environment of its own."""

from __future__ import annotations

from collections.abc import Callable

from bench.peers import llama_server, transformers_serve, vllm_serve
from bench.servers import Server
from bench.setting import Setting

__all__ = ["BF16_ONLY", "MAKERS", "SERVERS"]

SERVERS: dict[str, Callable[[Setting], Server]] = {
    "llama.cpp": llama_server.llama_server,
    "vllm": vllm_serve.vllm_server,
    "transformers": transformers_serve.transformers_server,
}
"""How each peer is started; it is installed first if need be."""

MAKERS: dict[str, Callable[[], object]] = {
    "llama.cpp": llama_server.make,
    "vllm": vllm_serve.make,
    "transformers": transformers_serve.make,
}
"""How each peer is installed."""

BF16_ONLY = ("vllm", "transformers")
"""Peers that don't read GGUF's formats on a CPU, or not well."""
