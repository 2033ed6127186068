"""The ASGI application over an engine: routes by API, and the code that the APIs share.

The front ends and the command line import it. It imports the engine, never a worker.
"""
