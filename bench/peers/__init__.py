"""The servers that trioserve is measured beside, each in an environment of its own."""

from __future__ import annotations

from bench.peers import servers

SERVERS = {
    "llama.cpp": servers.llama_server,
    "vllm": servers.vllm_server,
    "transformers": servers.transformers_server,
}
"""Functions that start each peer; it is installed first if need be."""
MAKERS = {
    "llama.cpp": servers.make_llama,
    "vllm": servers.make_vllm,
    "transformers": servers.make_transformers,
}
BF16_ONLY = ("vllm", "transformers")
"""Peers that don't read GGUF's formats on a CPU, or not well."""
