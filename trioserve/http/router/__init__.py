"""A router in front of whole servers: an ASGI application that forwards requests.

It keeps a copy of each server's prefix caches and loads, from the server's own feed, and chooses by
:mod:`trioserve.engine.routing.policy`, as an engine chooses among its workers.
"""
