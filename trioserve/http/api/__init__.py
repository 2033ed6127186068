"""The ASGI application over an engine: routes by API, and what the APIs share.

Imported by the front ends and the command line; imports the engine, never a worker.
"""
