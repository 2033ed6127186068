"""Connections, TLS, HTTP/1 and HTTP/2 for any ASGI application, with limits and deadlines.

It builds on hypercorn's protocols. ``http.api`` and the programs that open a server may import it.

Imported by ``http.api``, ``http``, ``front_ends`` and ``cli``.
"""
