"""Addresses with ports, as texts."""

from __future__ import annotations


def host_and_port(host: str, port: int) -> str:
    """Return ``HOST:PORT``; an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
