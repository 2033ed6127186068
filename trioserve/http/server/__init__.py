"""Connections, TLS, HTTP/1 and HTTP/2 for any ASGI application, with limits and deadlines.

Stands on hypercorn's protocols; imported by ``http.api`` and by those that open a server.
"""
